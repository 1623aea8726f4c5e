"""Benchmarks of one model on this machine: kernels, passes, reuse, whole runs. Importing this package loads nothing."""

GROUPS = ("kernels", "passes", "reuse", "run")  # of figures, in the order of measurement
