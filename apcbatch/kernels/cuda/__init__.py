"""Ops and fused sub-blocks on a CUDA device."""
