"""The prefix plan: common prefixes, the order of the requests, and which snapshots are kept for how long."""
