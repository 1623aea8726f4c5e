"""Matrix products on a CUDA device with fixed-order accumulation.

Each element is one float32 sum over its inputs in ascending order: bfloat16 inputs 16 at a time by one tensor-core
instruction, float32 inputs one at a time by fused multiply-adds. So a row's bits depend neither on the number of rows
in the batch nor on the kernel. For weights with few rows, one sum over all inputs would take too long. Their inputs are
cut into pieces, each with its own sum, and these sums are added. The number of pieces depends on the weights alone.

cuBLASLt kernels without split-K accumulate in this order for any tile size. This is verified: a cuBLASLt kernel is used
only if its results in a trial equal those of our own kernel bit for bit. The fastest kernel that passes is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

import torch

from apcbatch.kernels.arguments import DTYPE_CODES, address
from apcbatch.kernels.cuda.coded import CodedWeight, SharedScratch
from apcbatch.kernels.cuda.extension import ALIGNMENT, current_stream, extension

MOST_TIMED_ROWS = 2048  # rows of x in the largest timing; products with more rows use the kernel chosen for it
# cuBLASLt kernels to try. FEW_CANDIDATES: for bfloat16 with fewer than MOST_TIMED_ROWS rows, as each takes 2 ms to
# load.
CANDIDATES, FEW_CANDIDATES = 8, 4
TIMINGS = 5  # runs of each kernel; the shortest time counts
MOST_TRIAL_ROWS, TRIAL_OUTPUTS, COMPARED_ROWS = 512, 512, 64  # rows of x, outputs and rows compared in a trial
FEWEST_WEIGHT_ROWS = 2560  # split inputs until rows of weights x pieces exceed this, which keeps the device busy
FEWEST_INPUTS = 256  # minimum inputs of a piece
MOST_FLOAT_ROWS = 128  # rows of x up to which our own float32 kernel is timed beside cuBLASLt's
FEWEST_ROWS_IN_TURN = 1024  # rows of x from which cuBLASLt accumulates two pieces itself
_STEP = {torch.bfloat16: 16, torch.float32: 1}  # the number of inputs must be a multiple of this


def pieces_of(weight: torch.Tensor | CodedWeight) -> int:
    """Return the number of pieces to cut the inputs of weights (out, in) into."""
    pieces, (rows, inputs) = 1, weight.shape
    if weight.dtype != torch.bfloat16:
        return 1
    while (
        rows * pieces <= FEWEST_WEIGHT_ROWS and inputs >= 2 * pieces * FEWEST_INPUTS
        and extension().takes_pieces(inputs, 2 * pieces)
    ):  # fmt: skip
        pieces *= 2
    return pieces


class ProductShape(NamedTuple):
    """Product for which a kernel is chosen per number of rows. outputs, inputs: shape of the weights. pieces: number of
    pieces of the inputs. dtype: of x. out_dtype: of y. is_packed: x has no gap between its rows. most_own: most rows
    that our own kernel multiplies, whichever is faster."""

    outputs: int
    inputs: int
    pieces: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    is_packed: bool
    most_own: int = 0


class FixedOrderProducts:
    """Fixed-order products of one device, with the kernel chosen for each shape and number of rows.

    The first product of a new shape times the candidate kernels and waits for the device. So a CUDA graph must not
    capture it.
    """

    def __init__(self, device: torch.device) -> None:
        self._chosen: dict[tuple[ProductShape, int], bytes | None] = {}  # None: our own kernel
        self._device = device

    @cached_property
    def scratch(self) -> SharedScratch:
        """Memory for the decoded weights of a product."""
        return SharedScratch(self._device)

    def takes(self, weight: torch.Tensor) -> bool:
        """Return True if products with these weights (out, in), float32 or bfloat16, can accumulate in fixed order."""
        if weight.shape[1] % _STEP[weight.dtype] or weight.data_ptr() % ALIGNMENT:
            return False
        return torch.cuda.get_device_capability(self._device)[0] >= 9

    def kernel(self, shape: ProductShape, rows: int) -> tuple[bytes, bool] | None:
        """Return the kernel for this number of rows: (cuBLASLt kernel, result of `_in_turn`), or (b"", False) for our
        own kernel. Returns None if `product` has not chosen one yet."""
        if rows <= max(shape.most_own, extension().MOST_FEW_ROWS) and shape.dtype == torch.bfloat16:
            return b"", False
        shape, bucket = shape._replace(most_own=0), _bucket(rows)
        if (shape, bucket) not in self._chosen:
            return None
        chosen = self._chosen[shape, bucket]
        return (b"", False) if chosen is None else (chosen, _in_turn(shape.pieces, shape.out_dtype, bucket))

    def product(
        self, x: torch.Tensor, weight: torch.Tensor | CodedWeight, out_dtype: torch.dtype, pieces: int
    ) -> torch.Tensor:
        """Compute x W^T, (t, out) in out_dtype. x: (t, in) in the weights' dtype. weight: (out, in), encoded only if it
        takes the rows. out_dtype: x's or float32. pieces: see `pieces_of`."""
        if not _is_readable(x):
            x = x.clone(memory_format=torch.contiguous_format)
        y = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
        if not y.numel():
            return y
        with torch.cuda.device(x.device):
            if isinstance(weight, CodedWeight):
                extension().coded_product(weight.given, product_of(x, weight, y, pieces), current_stream())
            else:
                self._multiply(x, weight, y, pieces)
        return y

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, pieces: int) -> None:
        rows = x.shape[0]
        if rows <= extension().MOST_FEW_ROWS and x.dtype == torch.bfloat16:
            _own_product(x, weight, y, pieces)
            return
        bucket = _bucket(rows)
        (outputs, inputs), is_packed = weight.shape, x.stride(0) == x.shape[1]
        key = ProductShape(outputs, inputs, pieces, x.dtype, y.dtype, is_packed), bucket
        if key not in self._chosen:
            self._chosen[key] = _fastest(weight, y.dtype, pieces, bucket)
        chosen = self._chosen[key]
        _run(x, weight, y, pieces, chosen, _in_turn(pieces, y.dtype, bucket))


def _run(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, pieces: int, chosen: bytes | None, in_turn: bool
) -> None:
    """Compute the product into y by this cuBLASLt kernel, or by our own if it is None or does not support the call."""
    if chosen is None or not _library(x, weight, y, pieces, chosen, in_turn):
        _own_product(x, weight, y, pieces)


def _fastest(weight: torch.Tensor, out_dtype: torch.dtype, pieces: int, rows: int) -> bytes | None:
    """Return the fastest cuBLASLt kernel for this number of rows that passes the trial. None if none passes, or, for
    few rows of float32, if our own kernel is faster."""
    generator = torch.Generator(weight.device).manual_seed(rows)
    x = torch.randn((rows, weight.shape[1]), device=weight.device, generator=generator)
    x = x.to(weight.dtype)
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    trial, in_turn = _Trial(weight, out_dtype, pieces, rows), _in_turn(pieces, out_dtype, rows)
    most = FEW_CANDIDATES if weight.dtype == torch.bfloat16 and rows < MOST_TIMED_ROWS else CANDIDATES
    candidates = extension().library_choices(_in_pieces(x, weight, y, pieces, in_turn)[0], in_turn, most)
    took: dict[bytes | None, float] = {one: math.inf for one in candidates if trial.passes(one)}
    if weight.dtype == torch.float32 and rows <= MOST_FLOAT_ROWS:
        took[None] = math.inf
    cache_bytes = torch.cuda.get_device_properties(weight.device).L2_cache_size
    before = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=weight.device)
    timings = [  # the candidates alternate, as an idle device's clock rises during the first runs
        (one, _timed(partial(_run, x, weight, y, pieces, one, in_turn), before)) for _ in range(TIMINGS) for one in took
    ]
    for candidate, (begin, end) in timings:
        end.synchronize()
        took[candidate] = min(took[candidate], begin.elapsed_time(end))
    return min(took, key=lambda candidate: took[candidate], default=None)


class _Trial:
    """Product that shows in which order a kernel sums.

    Half of the inputs of each piece, drawn at random, cancel the other half. So each element is zero except for
    rounding errors, and has other bits if its sum is made in another order.
    """

    def __init__(self, like: torch.Tensor, out_dtype: torch.dtype, pieces: int, rows: int) -> None:
        """Draw the trial's operands. like: weights (out, in) of the products to come; gives shape and dtype. rows: rows
        of x in these products."""
        outputs, inputs = like.shape
        outputs = outputs if outputs <= 2 * TRIAL_OUTPUTS else TRIAL_OUTPUTS + outputs % TRIAL_OUTPUTS
        generator = torch.Generator(like.device).manual_seed(rows)

        piece = inputs // pieces
        shuffled = torch.randperm(piece, device=like.device, generator=generator)

        def halves(count: int, sign: int) -> torch.Tensor:
            half = torch.randn((count, pieces, piece // 2), device=like.device, generator=generator)
            half *= torch.exp2(torch.randint(-6, 7, half.shape, device=like.device, generator=generator))
            rest = half.new_zeros((count, pieces, piece % 2))
            return torch.cat([half, sign * half, rest], dim=2)[:, :, shuffled].flatten(1).to(like.dtype)

        self._weight, self._x, self._pieces = halves(outputs, 1), halves(min(rows, MOST_TRIAL_ROWS), -1), pieces
        self._in_turn = _in_turn(pieces, out_dtype, rows)
        self._y = torch.empty((len(self._x), outputs), dtype=out_dtype, device=like.device)
        self._some = torch.randperm(len(self._x), device=like.device, generator=generator)[:COMPARED_ROWS]
        self._expected = self._y.new_empty((len(self._some), outputs))
        _own_product(self._x[self._some], self._weight, self._expected, pieces)

    def passes(self, choice: bytes) -> bool:
        """Return True if this cuBLASLt kernel gives the same bits as our own kernel."""
        self._y.fill_(float("nan"))
        done = _library(self._x, self._weight, self._y, self._pieces, choice, self._in_turn)
        return done and torch.equal(self._y[self._some], self._expected)


def _in_turn(pieces: int, out_dtype: torch.dtype, rows: int) -> bool:
    """Return True if cuBLASLt accumulates the two pieces into the result, one after the other.

    With many rows this moves less memory. With few rows both pieces run at once, to occupy more of the device.
    """
    return pieces == 2 and out_dtype == torch.float32 and rows >= FEWEST_ROWS_IN_TURN


def _library(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, pieces: int, choice: bytes, in_turn: bool) -> bool:
    """Compute the product into y by this cuBLASLt kernel. Returns False if the kernel does not support the call."""
    product, parts = _in_pieces(x, weight, y, pieces, in_turn)
    if not extension().library_product(product, in_turn, choice, current_stream()):
        return False
    if parts is not None:
        sizes = y.numel(), len(parts)
        extension().sum_pieces(parts.data_ptr(), *sizes, y.data_ptr(), DTYPE_CODES[y.dtype], current_stream())
    return True


def _in_pieces(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, pieces: int, in_turn: bool
) -> tuple[object, torch.Tensor | None]:
    """Return the product for cuBLASLt, and the tensor of the pieces' sums (pieces, rows, out) float32, which the caller
    must add up. The tensor is None if cuBLASLt adds them itself."""
    if pieces == 1 or in_turn:
        return product_of(x, weight, y, pieces), None
    parts = torch.empty((pieces, *y.shape), dtype=torch.float32, device=y.device)
    return product_of(x, weight, parts, pieces), parts


def _timed(run: Callable[[], object], before: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Queue one run with a cold L2 cache. Returns the events before and after it. before: memory filled first; this
    flushes the cache, and takes the device longer than the host needs to launch the run."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.zero_()
    begin.record()
    run()
    end.record()
    return begin, end


def _own_product(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, pieces: int) -> None:
    """Multiply with our own kernels."""
    extension().own_product(product_of(x, weight, y, pieces), current_stream())


def _is_readable(x: torch.Tensor) -> bool:
    """Return True if kernels can read x in place: contiguous rows, either without gaps or each aligned."""
    apart = x.stride(0) > x.shape[1] and x.stride(0) * x.element_size() % ALIGNMENT == 0
    packed = x.stride(0) == x.shape[1] or apart
    return x.stride(1) == 1 and packed and x.data_ptr() % ALIGNMENT == 0


def product_of(x: torch.Tensor, weight: torch.Tensor | CodedWeight, y: torch.Tensor | None, pieces: int) -> object:
    """Make the compiled module's Product. y: result tensor; None: a fused kernel consumes the result, in x's dtype."""
    return extension().Product(
        x.shape[0],
        x.shape[1],
        weight.shape[0],
        DTYPE_CODES[x.dtype],
        weight.data_ptr() if isinstance(weight, torch.Tensor) else 0,
        x.data_ptr(),
        x.stride(0),
        address(y),
        DTYPE_CODES[x.dtype if y is None else y.dtype],
        pieces,
    )


def _bucket(rows: int) -> int:
    """Return the number of rows whose kernel also serves `rows`. For float32 with fewer than 128 rows, the kernels that
    cuBLASLt ranks highest sum in another order."""
    if rows <= 128:
        return 128 if rows > 64 else 64 if rows > 16 else 16
    return min((rows + 255) // 256 * 256, MOST_TIMED_ROWS)
