"""The feed-forward parts of Jamba: a SwiGLU MLP and a mixture of them.

Must not know: requests, the layers around them. Invariant: a token's result does not depend on the other tokens: it
is the sum over its experts in ascending order of expert, whatever else is routed there.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.layer import Expert, Linear, PreNorm
from apcbatch.kernels.ops import Backend, FeedForward
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.weights import Checkpoint


def load_mlp(
    config: ModelConfig,
    checkpoint: Checkpoint,
    prefix: str,
    dtype: torch.dtype,
    backend: Backend,
    norm: PreNorm,
) -> FeedForward:
    """One expert for all tokens."""
    return backend.mlp(norm, _expert(config, checkpoint, prefix, dtype, backend))


def load_mixture(
    config: ModelConfig,
    checkpoint: Checkpoint,
    prefix: str,
    dtype: torch.dtype,
    backend: Backend,
    norm: PreNorm,
) -> FeedForward:
    """The num_experts_per_tok likeliest experts of each token."""
    router = checkpoint.take(f"{prefix}.router.weight", (config.num_experts, config.hidden_size))
    experts = [_expert(config, checkpoint, f"{prefix}.experts.{i}", dtype, backend) for i in range(config.num_experts)]
    packed = backend.pack_linear(router.to(dtype))
    return backend.mixture(norm, packed, experts, config.num_experts_per_tok)


def _expert(
    config: ModelConfig, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype, backend: Backend
) -> Expert[Linear]:
    h, f = config.hidden_size, config.intermediate_size
    gate = checkpoint.take(f"{prefix}.gate_proj.weight", (f, h))
    up = checkpoint.take(f"{prefix}.up_proj.weight", (f, h))
    down = checkpoint.take(f"{prefix}.down_proj.weight", (h, f))
    return Expert(
        backend.pack_linear(torch.cat([gate, up]).to(dtype)),  # (2f, h)
        backend.pack_linear(down.to(dtype)),
    )
