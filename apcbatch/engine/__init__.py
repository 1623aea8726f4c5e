"""Continuous batching over states and snapshots."""
