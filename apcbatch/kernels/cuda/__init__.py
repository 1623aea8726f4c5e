"""The ops on a CUDA device."""
