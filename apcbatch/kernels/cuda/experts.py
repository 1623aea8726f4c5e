"""All experts of a mixture in one call on a CUDA device.

Tokens are grouped by expert on the device. So the host does not wait, and a CUDA graph can capture the pass.

Invariant: a token's result does not depend on the other tokens. Its products accumulate in fixed order
(apcbatch.kernels.cuda.fixed_order), as for single experts with exact weights, and its experts are added in ascending
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apcbatch.kernels.arguments import address
from apcbatch.kernels.cuda.coded import CodedWeight
from apcbatch.kernels.cuda.extension import ALIGNMENT, current_stream, extension
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.layer import Expert


class GroupedExperts:
    """All experts of one mixture, with the same activation. is_supported: whether the kernels support the device and
    the experts' dtype, shape and scales."""

    def __init__(self, experts: Sequence[Expert[DeviceLinear]]) -> None:
        self._experts = list(experts)  # kept alive
        gate_ups, downs = [one.gate_up for one in experts], [one.down for one in experts]
        self.is_supported = False
        if not _alike(gate_ups) or not _alike(downs) or gate_ups[0].scale is not None:
            return
        self._hidden, self._inner = downs[0].out_features, downs[0].in_features
        activations = extension().Activation
        self._activation = activations.swiglu if experts[0].is_gated else activations.relu_square
        device = downs[0].weight.device
        with torch.cuda.device(device):
            if len(downs) > extension().MOST_EXPERTS or not extension().takes_experts():
                return
        sizes = (gate_ups, self._inner, experts[0].is_gated), (downs, self._hidden, False)
        self._maps = [_maps(*its).to(device) for its in sizes]
        self._codings = [_coding(parts[0]) for parts, *_ in sizes]
        self.is_supported = True

    def mixture(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        present: torch.Tensor | None,
        groups: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, (t, h) float32. The rows of padding tokens are zero. See
        rows."""
        return sum_experts(self.rows(x, weights, chosen, present, groups), present)

    def rows(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        present: torch.Tensor | None,
        groups: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted outputs of each token's experts, (t, k, h) float32. Rows of padding tokens stay
        uninitialised.

        x: (t, h) bfloat16 contiguous. weights: (t, k) float32. chosen: (t, k) int64, experts of each token, ascending.
        present: (1,) int64, number of real tokens, which come first; None: all. groups: the tokens by expert; None:
        they are grouped here. Raises ValueError.
        """
        (t, k), h, f = chosen.shape, self._hidden, self._inner
        self._require(x)
        inner = torch.empty((t * k, f), dtype=x.dtype, device=x.device)
        rows = torch.empty((t, k, h), dtype=torch.float32, device=x.device)
        with torch.cuda.device(x.device):
            if groups is None:
                groups = self.groups(t, k, x.device)
                grouping = chosen.data_ptr(), address(present), groups.data_ptr()
                extension().group(t, k, len(self._experts), *grouping, current_stream())
            gate_ups, downs = ((*its, maps.data_ptr()) for its, maps in zip(self._codings, self._maps, strict=True))
            product, stream = extension().expert_product, current_stream()
            sizes = groups.data_ptr(), t, k, len(self._experts)
            product(*sizes, h, f, self._activation, *gate_ups, x.data_ptr(), inner.data_ptr(), 0, 0, stream)
            factors = address(self._experts[0].down.scale), weights.data_ptr()
            plain = extension().Activation.none
            product(*sizes, f, h, plain, *downs, inner.data_ptr(), rows.data_ptr(), *factors, stream)
        return rows

    @staticmethod
    def groups(t: int, k: int, device: torch.device) -> torch.Tensor:
        """Allocate memory for t tokens of k experts, grouped by expert."""
        return torch.empty(extension().GROUPS_BYTES + 4 * t * k, dtype=torch.uint8, device=device)

    def _require(self, x: torch.Tensor) -> None:
        if (
            x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != self._hidden or not x.is_contiguous()
            or x.data_ptr() % ALIGNMENT
        ):  # fmt: skip
            raise ValueError(
                f"x must be contiguous bfloat16 of {self._hidden} columns; it is {x.dtype} of shape {tuple(x.shape)} "
                f"with strides {x.stride()}"
            )


def sum_experts(rows: torch.Tensor, present: torch.Tensor | None) -> torch.Tensor:
    """Return the sum over the k experts of each token, in their order, (t, h) float32: zero for padding tokens. rows:
    (t, k, h) float32 contiguous. present: see GroupedExperts.rows."""
    t, k, h = rows.shape
    y = torch.empty((t, h), dtype=torch.float32, device=rows.device)
    with torch.cuda.device(rows.device):
        extension().expert_sum(t, k, h, address(present), rows.data_ptr(), y.data_ptr(), current_stream())
    return y


def _maps(parts: Sequence[DeviceLinear], out: int, is_gated: bool) -> torch.Tensor:
    """Make the tensor maps (TMA descriptors) of these weights, (2 out, in) if is_gated, else (out, in), as one uint8
    tensor on the host."""
    addresses = []
    for part in parts:
        if isinstance(part.weight, CodedWeight):
            codes, *_, scales = part.weight.parts[0]
            addresses.append((codes.data_ptr(), address(scales)))
        else:
            addresses.append((part.weight.data_ptr(), 0))
    maps = extension().expert_maps(addresses, *_coding(parts[0]), out, parts[0].in_features, is_gated)
    return torch.frombuffer(bytearray(maps), dtype=torch.uint8)


def _coding(packed: DeviceLinear) -> tuple[Any, int]:
    """Return how the kernels decode these weights, kind and shift: see Coding in csrc/cuda/products.h."""
    kinds, weight = extension().CodeKind, packed.weight
    if isinstance(weight, torch.Tensor):
        return kinds.none, 0
    _, kind, shift, _ = weight.parts[0]
    return getattr(kinds, kind), shift


def _alike(parts: Sequence[DeviceLinear]) -> bool:
    """Return True if all weights are bfloat16 with fixed-order products, and of one shape, scale and encoding."""
    return all(
        part.fixed_order is not None
        and part.dtype == torch.bfloat16
        and part.weight.shape == parts[0].weight.shape
        and _is_same(part.scale, parts[0].scale)
        and _coding(part) == _coding(parts[0])
        and (isinstance(part.weight, torch.Tensor) or len(part.weight.parts) == 1)
        for part in parts
    )


def _is_same(scale: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if scale is None or other is None:
        return scale is other
    return torch.equal(scale, other)
