"""Interface of the CPU's sub-blocks of every kind, for the stack.

To add a kind, write a module in this package with a StackSubBlock or a FusedSubBlock, add its row in
apcbatch.kernels.cpu.backend, and its struct in csrc (csrc/sub_block.h). Invariant: the bits equal those of the kind's
ops run one by one.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import require_parameter, require_slots
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.layer import PreNorm, Residual
from apcbatch.kernels.processor import num_threads
from apcbatch.kernels.ragged import Ragged


class StackSubBlock:
    """Sub-block that runs inside a FusedStack.

    plan: the compiled module's sub-block (csrc/sub_block.h). It holds addresses of tensors, so the plan's user
    must keep this object alive. num_slots, num_pages: capacity of the state that it reads and writes; None for a kind
    without slots or pages. hidden: columns of the residual.

    A pass leaves the states of a sequence with drafts unchanged. A kind with slots keeps the inputs of its recurrence
    instead; the accepted tokens are then replayed (`kept_bytes` and `replay` of csrc/sub_block.h).
    """

    plan: _C.SubBlock
    hidden: int
    num_slots: int | None = None
    num_pages: int | None = None


class FusedSubBlock(StackSubBlock):
    """Sub-block that also runs alone, as one call (BackendOf.sub_block)."""

    can_capture = False

    def __call__(self, residual: Residual, ragged: Ragged) -> None:
        """Run the sub-block alone, a kind with slots on those that the batch names. Raises ValueError unless the
        residual has the sub-block's columns, and for a kind with slots a row for each token of the batch, and the state
        the batch's slots."""
        if self.num_slots is not None:
            if residual.sum.shape[0] != ragged.num_tokens:
                raise ValueError(
                    f"the residual must have a row for each of the batch's {ragged.num_tokens} tokens; it is "
                    f"{tuple(residual.sum.shape)}"
                )
            require_slots(ragged.max_slot, self.num_slots)
        t, places = residual.sum.shape[0], addresses(residual, self.hidden)
        self.plan.run(t, None if self.num_slots is None else ragged.params, *places, num_threads())


def require_projections(dtype: torch.dtype, **projections: tuple[PackedLinear, int, int]) -> None:
    """Raise ValueError unless each projection, by its name, has this dtype and these rows and columns."""
    for name, (packed, *wanted) in projections.items():
        if [packed.out_features, packed.in_features] != wanted or packed.dtype != dtype:
            raise ValueError(
                f"{name} must be ({wanted[0]}, {wanted[1]}) {dtype}; it is ({packed.out_features}, "
                f"{packed.in_features}) {packed.dtype}"
            )


def norm_plan(norm: PreNorm, hidden: int) -> _C.PreNorm:
    """Make the compiled module's handle of a norm of `hidden` columns. It holds an address only: the caller keeps the
    norm alive. Raises ValueError unless the weight is (hidden,) float32."""
    require_parameter(norm.weight, "norm", (hidden,), torch.float32)
    return _C.PreNorm(norm.weight.data_ptr(), norm.eps)


def addresses(residual: Residual, hidden: int) -> tuple[int, int, bool]:
    """Return (address of sum, address of delta, has_delta) for a fused sub-block, and set has_delta, as the sub-block
    overwrites delta with its output. Raises ValueError unless the residual has `hidden` columns."""
    if residual.sum.shape[1] != hidden:
        raise ValueError(f"the residual must have the part's {hidden} columns; it is {tuple(residual.sum.shape)}")
    had_delta, residual.has_delta = residual.has_delta, True
    return residual.sum.data_ptr(), residual.delta.data_ptr(), had_delta
