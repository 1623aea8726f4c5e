"""The feed-forward parts of Jamba: a SwiGLU MLP and a mixture of them.

Must not know: requests, the layers around them. Invariant: a token's result does not depend on the other tokens: it
is the sum over its experts in ascending order of expert, whatever else is routed there.
"""

from __future__ import annotations

import torch

from apcbatch.kernels import ops
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.weights import Checkpoint


class Mlp:
    """down(silu(gate x) * up x): (t, h) -> (t, h) float32. Shazeer, "GLU variants", arXiv 2002.05202."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype) -> None:
        h, f = config.hidden_size, config.intermediate_size
        gate = checkpoint.take(f"{prefix}.gate_proj.weight", (f, h))
        up = checkpoint.take(f"{prefix}.up_proj.weight", (f, h))
        self.gate_up_proj = ops.pack_linear(torch.cat([gate, up]).to(dtype))
        self.down_proj = ops.pack_linear(checkpoint.take(f"{prefix}.down_proj.weight", (h, f)).to(dtype))
        self.intermediate_size = f

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        f = self.intermediate_size
        gate_up = ops.linear(normed, self.gate_up_proj)  # (t, h) -> (t, 2f)
        return ops.linear(
            ops.silu_mul(gate_up[:, :f], gate_up[:, f:]), self.down_proj, out_dtype=torch.float32
        )


class MixtureOfExperts:
    """The num_experts_per_tok likeliest experts of each token, weighted by the softmax over all of them, which is not
    normalised again: (t, h) -> (t, h) float32."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype) -> None:
        shape = (config.num_experts, config.hidden_size)
        self.router = ops.pack_linear(checkpoint.take(f"{prefix}.router.weight", shape).to(dtype))
        self.experts = [
            Mlp(config, checkpoint, f"{prefix}.experts.{i}", dtype) for i in range(config.num_experts)
        ]
        self.experts_per_tok = config.num_experts_per_tok

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        logits = ops.linear(normed, self.router, out_dtype=torch.float32)  # (t, h) -> (t, experts)
        weights, experts = ops.softmax_topk(logits, self.experts_per_tok)  # (t, k) each
        y = torch.zeros(normed.shape, dtype=torch.float32, device=normed.device)
        for index, expert in enumerate(self.experts):
            rows, choice = (experts == index).nonzero(as_tuple=True)
            if rows.numel():
                part = expert(normed[rows]) * weights[rows, choice].unsqueeze(1)
                y.index_add_(0, rows, part)
        return y
