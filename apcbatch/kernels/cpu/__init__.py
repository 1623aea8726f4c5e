"""The ops on the CPU."""
