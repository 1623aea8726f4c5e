"""Mamba, FalconMamba and Jamba from Hugging Face checkpoints, over apcbatch.kernels."""
