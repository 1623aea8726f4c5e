"""Models from Hugging Face checkpoints (Mamba, Falcon Mamba, Jamba, Qwen3.5), computed by apcbatch.kernels."""
