"""The feed-forward parts of Jamba: a SwiGLU MLP and a mixture of them.

Must not know: requests, the layers around them. Invariant: a token's result does not depend on the other tokens: it
is the sum over its experts in ascending order of expert, whatever else is routed there.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.layer import Expert, Linear, PreNorm
from apcbatch.kernels.ops import FeedForward
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.tensor_source import TensorSource


def load_mlp(config: ModelConfig, source: TensorSource, norm: PreNorm) -> FeedForward:
    """One expert for all tokens."""
    return source.backend.mlp(norm, _expert(config, source))


def load_mixture(config: ModelConfig, source: TensorSource, norm: PreNorm) -> FeedForward:
    """The num_experts_per_tok likeliest experts of each token."""
    router = source.take("router.weight", (config.num_experts, config.hidden_size))
    experts = [_expert(config, source.below(f"experts.{i}")) for i in range(config.num_experts)]
    return source.backend.mixture(norm, source.pack(router), experts, config.num_experts_per_tok)


def _expert(config: ModelConfig, source: TensorSource) -> Expert[Linear]:
    h, f = config.hidden_size, config.intermediate_size
    gate = source.take("gate_proj.weight", (f, h))
    up = source.take("up_proj.weight", (f, h))
    down = source.take("down_proj.weight", (h, f))
    return Expert(source.pack(torch.cat([gate, up])), source.pack(down))  # (2f, h), (h, f)
