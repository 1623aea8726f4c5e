"""Benchmarks of one model on this machine: kernels, passes, reuse, whole runs. Importing this package imports no other
module."""

GROUPS = ("kernels", "passes", "reuse", "run")  # of figures, in the order of measurement
