"""Shapes of the matrix products of a model."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from apcbatch.config import Config
from apcbatch.kernels.cpu.backend import CpuBackend

from .server import serving


def product_shapes(config: Config) -> list[tuple[int, int]]:
    """Return each different (in_features, out_features) of the weights that loading a model packs."""
    shapes: dict[tuple[int, int], None] = {}
    pack = CpuBackend.pack_linear

    def noted(weight: torch.Tensor, *others: Any, **named: Any) -> Any:
        shapes[weight.shape[1], weight.shape[0]] = None
        return pack(weight, *others, **named)

    with patch.object(CpuBackend, "pack_linear", staticmethod(noted)), serving(config, "none"):
        return list(shapes)
