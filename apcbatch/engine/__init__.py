"""Continuous batching over states and snapshots. Must not know: text, files, the command line."""
