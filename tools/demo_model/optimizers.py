"""What makes gradients into steps: Muon for the large matrices, AdamW for everything else.

Muon makes the momentum of a matrix orthogonal by a few Newton-Schulz iterations: Jordan et al., "Muon", 2024,
https://kellerjordan.github.io/posts/muon. Matrices of one shape are worked on together. Must not know: the network.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MUON = ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def orthogonal(matrices: Tensor) -> Tensor:
    """(count, rows, columns) -> matrices of the same shape whose singular values are all near 1, in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Each group: matrices of one shape. lr is the spectral size of a step of a square matrix."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        super().__init__([{"params": group} for group in by_shape.values()], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Move every matrix against its momentum, Nesterov's way."""
        for group in self.param_groups:
            params = group["params"]
            gradient = torch.stack([param.grad for param in params])
            state = self.state[params[0]]
            momentum = state.setdefault("momentum", torch.zeros_like(gradient))
            momentum.lerp_(gradient, 1 - group["momentum"])
            update = orthogonal(gradient.lerp(momentum, group["momentum"]))
            rows, columns = params[0].shape
            size = group["lr"] * max(1.0, rows / columns) ** 0.5
            torch._foreach_add_(params, list(update.to(gradient.dtype).unbind(0)), alpha=-size)


def optimizers(
    network: nn.Module, muon_rate: float, rate: float, betas: tuple[float, float]
) -> list[torch.optim.Optimizer]:
    """Muon for the projections of MUON, AdamW for embeddings, norms, biases, routers and the steps of the state."""
    matrices, others = [], []
    for name, param in network.named_parameters():
        (matrices if name.split(".")[-2] in MUON else others).append(param)
    fused = others[0].is_cuda
    adam = torch.optim.AdamW(others, lr=rate, betas=betas, weight_decay=0.0, fused=fused)
    return [Muon(matrices, muon_rate), adam]
