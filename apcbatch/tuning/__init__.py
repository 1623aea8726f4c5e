"""Forecast what a run would reuse, and find the fastest block size."""
