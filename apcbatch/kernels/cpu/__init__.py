"""Ops and fused sub-blocks on the CPU."""
