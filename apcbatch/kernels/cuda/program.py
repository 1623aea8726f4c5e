"""Launch all kernels of consecutive sub-blocks on a CUDA device by one C++ call, to save host time and release the GIL.

Invariant: it launches the same kernels as the ops one by one, so the bits are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from apcbatch.kernels.arguments import DTYPE_CODES, address, slot_stride
from apcbatch.kernels.backend import StackEntry
from apcbatch.kernels.cuda.batch import DeviceBatch, batch_on
from apcbatch.kernels.cuda.extension import ALIGNMENT, current_stream, extension, own_stream
from apcbatch.kernels.cuda.fixed_order import ProductShape
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.residual import DeviceResidual
from apcbatch.kernels.layer import PreNorm, Residual


class UnlistedError(Exception):
    """The launches of a sub-block cannot be listed: its ops run one by one."""


class Rows(NamedTuple):
    """A matrix (t, columns) in the workspace of a pass. buffer: its number. begin: first column in the buffer. stride:
    columns of the buffer."""

    buffer: int
    begin: int
    stride: int
    dtype: torch.dtype

    def columns(self, begin: int) -> Rows:
        """Return the columns from `begin` on."""
        return self._replace(begin=self.begin + begin)

    @property
    def given(self) -> Any:
        """Return the matrix as the compiled module's Rows."""
        return extension().Rows(self.buffer, self.begin, self.stride, DTYPE_CODES[self.dtype])


class Program:
    """Launches of consecutive sub-blocks. hidden: columns of the residual stream. device: where the weights are.
    launches: the compiled module's list, csrc/cuda/program.h.

    A sub-block adds its launches once (`Listed.list_launches`): norms of the residual, products and convolutions by the
    methods here, which check the operands, others by those of `launches`.
    """

    def __init__(self, hidden: int, device: torch.device) -> None:
        self.launches = extension().Program()
        self.hidden, self.device = hidden, device
        self._weights: DeviceLinear | None = None  # of one of the products
        self._shapes: dict[ProductShape, int] = {}
        self._slots: list[int] = []  # numbers of state slots
        self._has_attention = False
        self._factors: torch.Tensor | None = None  # of what the last sub-block leaves

    def add(self, part: Listed) -> bool:
        """Add a sub-block's launches. Returns False, with nothing added, if they cannot be listed."""
        count = self.launches.size()
        before = dict(self._shapes), list(self._slots), self._has_attention, self._factors
        self.launches.begin()
        try:
            part.list_launches(self)
        except UnlistedError:
            self.launches.truncate(count)
            self._shapes, self._slots, self._has_attention, self._factors = before
            return False
        return True

    def rows(self, columns: int, dtype: torch.dtype) -> Rows:
        """Allocate a matrix (t, columns) of the workspace, for this sub-block only."""
        return Rows(self.launches.buffer(columns * dtype.itemsize), 0, columns, dtype)

    def normed(self, norm: PreNorm, dtype: torch.dtype) -> Rows:
        """Add a launch that adds the pending delta to the residual stream and norms the sum. Returns the norm, (t, h)
        in dtype."""
        require(norm.weight.dtype == torch.float32)
        y = self.rows(self.hidden, dtype)
        self.launches.norm((norm.weight.data_ptr(), norm.eps, self.hidden), y.given)
        return y

    def product(self, x: Rows, packed: DeviceLinear) -> Rows:
        """Add a product with weights (out, in). Returns (t, out) in x's dtype."""
        y = self.rows(packed.out_features, x.dtype)
        self._multiply(x, packed, y)
        return y

    def leave(self, x: Rows, packed: DeviceLinear) -> None:
        """Add a product with weights (h, in), whose result becomes the residual's delta."""
        require(packed.out_features == self.hidden)
        self._multiply(x, packed.unscaled, Rows(extension().LEFT, 0, self.hidden, torch.float32))
        self._factors = packed.scale
        self.launches.leave(address(packed.scale))

    def convolved(
        self, x: Rows, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, has_silu: bool = True
    ) -> Rows:
        """Add the causal convolution of x's first d columns: see Ops.causal_conv. Returns (t, d) in x's dtype."""
        d, width = weight.shape
        require(is_parameter(weight, (d, width), self.device) and 1 <= width <= extension().MOST_TAPS)
        require(is_parameter(bias, (d,), self.device))
        slots = state.data_ptr(), slot_stride(state, (width - 1, d), x.dtype, self.device), DTYPE_CODES[x.dtype]
        self.keeps(state)
        y = self.rows(d, x.dtype)
        self.launches.conv(weight.data_ptr(), address(bias), slots, d, width, has_silu, x.given, y.given)
        return y

    def keeps(self, *states: torch.Tensor) -> None:
        """Register state tensors (slots, ...), so that a pass with a slot beyond them is refused."""
        self._slots += [state.shape[0] for state in states]

    def attends(self) -> None:
        """Register that the launches need the locations of keys and values."""
        self._has_attention = True

    def _multiply(self, x: Rows, packed: DeviceLinear, y: Rows) -> None:
        size, is_packed = x.dtype.itemsize, x.stride == packed.in_features
        is_aligned = x.begin * size % ALIGNMENT == 0 and (is_packed or x.stride * size % ALIGNMENT == 0)
        require(packed.fixed_order is not None and packed.dtype == x.dtype and is_aligned)
        self._weights = packed
        summed = y
        if packed.scale is not None and y.dtype != torch.float32:
            summed = self.rows(packed.out_features, torch.float32)
        out, inputs, pieces = packed.out_features, packed.in_features, packed.pieces
        address, coded, most_own = 0, None, 0
        if isinstance(packed.weight, torch.Tensor):
            address = packed.weight.data_ptr()
        else:
            coded = packed.weight.given
            most_own = extension().MOST_CODED_ROWS if packed.weight.takes(1, pieces) else 0
        shape = ProductShape(out, inputs, pieces, packed.dtype, summed.dtype, is_packed, most_own)
        kernel = self._shapes.setdefault(shape, len(self._shapes))
        self.launches.product((address, out, inputs, pieces, coded), kernel, x.given, summed.given)
        if packed.scale is not None:
            self.launches.scale(packed.scale.data_ptr(), out, summed.given, y.given)

    def __call__(self, residual: Residual, batch: Any) -> bool:
        """Run the sub-blocks. batch: as in apcbatch.model.batch.Batch. Returns False, with nothing done, if the caller
        must run them one by one instead: a pass of single tokens, for which there are fused kernels and graphs, no
        fixed-order product for this number of rows, the kernel of a product not chosen yet, or arguments that do not
        fit (the ops then raise the error)."""
        on_device, sums = batch_on(residual.sum.device, batch.ragged), residual.sum
        rows = on_device.num_tokens
        if rows == on_device.num_sequences or not self._fit(sums, on_device) or self._weights is None:
            return False
        products = self._weights.fixed_order_for(rows)
        if products is None:
            return False
        kernels = [products.kernel(shape, rows) for shape in self._shapes]
        lists, pages = self._lists(batch) if self._has_attention else ([0] * 4, 0)
        if None in kernels or lists is None:
            return False
        workspace = torch.empty(self.launches.workspace_bytes(rows, kernels), dtype=torch.uint8, device=sums.device)
        left = torch.empty_like(sums)
        assert isinstance(residual, DeviceResidual)
        delta, pending = residual.pending()
        pointers = sums.data_ptr(), address(delta), pending, left.data_ptr(), workspace.data_ptr()
        self.launches.run(on_device.params, *pointers, kernels, lists, pages, current_stream())
        residual.leave(left, self._factors)
        residual.normed = None
        return True

    def _fit(self, sums: torch.Tensor, batch: DeviceBatch) -> bool:
        return (
            sums.shape == (batch.num_tokens, self.hidden)
            and batch.num_tokens > 0
            and batch.max_slot < min(self._slots, default=batch.max_slot + 1)
            and sums.dtype == torch.float32
            and sums.is_contiguous()
            and sums.device == self.device
            and torch.cuda.current_device() == self.device.index
        )

    def _lists(self, batch: Any) -> tuple[list[int] | None, int]:
        """Return the addresses of page_table, context, token_slots and positions, and the pages of a sequence. Returns
        None in place of the addresses if the lists do not fit."""
        b, t = batch.ragged.num_sequences, batch.ragged.num_tokens
        lists = batch.page_table, batch.context, batch.token_slots, batch.positions
        sizes = (b, batch.page_table.shape[-1]), (b,), (t,), (t,)
        do_fit = all(
            one.shape == size and one.dtype == torch.int64 and one.is_contiguous() and one.device == self.device
            for one, size in zip(lists, sizes, strict=True)
        )
        return [one.data_ptr() for one in lists] if do_fit else None, batch.page_table.shape[-1]


class Listed(Protocol):
    """Sub-block whose launches a Program can list."""

    def list_launches(self, program: Program) -> None:
        """Add the launches to the program. Raises UnlistedError."""


def require(is_listed: bool) -> None:
    """Raise UnlistedError unless is_listed."""
    if not is_listed:
        raise UnlistedError


def is_parameter(tensor: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> bool:
    """Return True if a tensor is a kernel's parameter: float32, contiguous, of this shape, on the device; or None."""
    if tensor is None:
        return True
    is_laid_out = tensor.shape == shape and tensor.is_contiguous()
    return is_laid_out and tensor.dtype == torch.float32 and tensor.device == device


class DeviceStack:
    """See apcbatch.kernels.backend.LayerStack. Each group of consecutive sub-blocks that can be listed is one call. An
    MLP beside a mixture is a group with it."""

    def __init__(self, entries: Sequence[StackEntry], hidden: int, device: torch.device) -> None:
        self._device = device
        self._groups: list[tuple[Program | None, list[StackEntry]]] = []  # None: the entries run op by op
        for entry in entries:
            may_be_listed = hasattr(entry.part, "list_launches") and not entry.is_beside
            last, its = self._groups[-1] if self._groups else (None, [])
            is_next = may_be_listed and last is not None and last.add(entry.part)
            if is_next or (entry.is_beside and hasattr(its[-1].part, "normed")):
                its.append(entry)
            else:
                program = Program(hidden, device)
                is_listed = may_be_listed and program.add(entry.part)
                self._groups.append((program if is_listed else None, [entry]))

    def __call__(self, residual: Residual, batch: Any) -> None:
        for program, entries in self._groups:
            if program is None and len(entries) > 1 and torch.cuda.is_current_stream_capturing():
                mixture, beside = entries
                self._capture_both(mixture, beside, residual, batch)
            elif program is None or not program(residual, batch):
                for entry in entries:
                    entry.run(residual, batch)

    def _capture_both(self, mixture: StackEntry, beside: StackEntry, residual: Residual, batch: Any) -> None:
        """Capture a mixture and the MLP beside it as two branches of the graph, which begin after their common norm. In
        one branch the MLP's launches would wait for the experts' for longer than they run."""
        current, branch = torch.cuda.current_stream(self._device), own_stream(self._device, "branch")
        mixture.part.normed(residual)
        residual.has_delta = False  # added to the sum
        branch.wait_stream(current)
        mixture.run(residual, batch)
        with torch.cuda.stream(branch):
            beside.run(residual, batch)
        current.wait_stream(branch)
