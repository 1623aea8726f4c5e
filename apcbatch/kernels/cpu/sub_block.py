"""What the CPU's stack and the benchmarks know of a sub-block of a layer, whatever its kind.

Must not know: models, any one kind. A new kind is a module beside this one with a FusedSubBlock, its row in
apcbatch.kernels.cpu.backend, and its class in csrc. Invariant: the bits are those of the kind's ops called one after
the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from apcbatch import _C
from apcbatch.kernels.arguments import num_threads
from apcbatch.kernels.cpu.residual import addresses
from apcbatch.kernels.layer import MatrixProduct, Residual
from apcbatch.kernels.ragged import Ragged


class FusedSubBlock:
    """plan: the sub-block as the compiled module has it (csrc/sub_block.h); whoever holds it keeps this object alive,
    which keeps the tensors alive whose addresses it has. num_slots, num_pages: of the state that it reads and writes,
    None for a kind without. hidden: columns of the residual.

    A speculative pass would ask two things more, here and in csrc/sub_block.h: which inputs the kind keeps for tokens
    that may be rejected, and how it replays the accepted ones from the state before.
    """

    plan: _C.SubBlock
    hidden: int
    num_slots: int | None = None
    num_pages: int | None = None
    most_captured = 0  # no CUDA graph holds what runs on the CPU

    def products(self, residual: Residual) -> Iterator[MatrixProduct]:
        """The matrix products that a call with this residual makes, in order. For benchmarks."""
        raise NotImplementedError

    def run(self, residual: Residual, ragged: Ragged | None = None) -> None:
        """Run it alone; ragged: for a kind with slots. Raises ValueError."""
        t, places = residual.sum.shape[0], addresses(residual, self.hidden)
        self.plan.run(t, None if ragged is None else ragged.params, *places, num_threads())
