"""Matrix products on a CUDA device with fixed-order accumulation.

Each element is one float32 sum over its inputs in ascending order: bfloat16 inputs 16 at a time by one tensor-core
instruction, float32 inputs one at a time by fused multiply-adds. So a row's bits depend neither on the number of rows
in the batch nor on the kernel. For weights with few rows one sum over all inputs would take too long: their inputs are
cut into pieces, each with its own sum, and the sums are added. The weights alone settle the number of pieces.

cuBLASLt kernels without split-K accumulate in this order for any tile size. That is verified, not assumed: a kernel is
used only after some of its elements matched our own kernel's bit for bit. The fastest of those that match is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from apcbatch.kernels.cuda.extension import ALIGNMENT, DTYPE_CODES, current_stream, extension

MOST_TIMED_ROWS = 2048  # of x; the kernel that is fastest for them is taken for more
CANDIDATES, FEW_CANDIDATES = 8, 4  # of the library's kernels; for fewer rows in bfloat16, as each takes 2 ms to load
TIMINGS = 5  # of a kernel, the shortest counts
MOST_TRIAL_ROWS, TRIAL_OUTPUTS, COMPARED_ROWS = 512, 512, 64  # of products that show the order of sums
FEWEST_WEIGHT_ROWS = 2560  # all pieces of fewer rows keep a device busy
FEWEST_INPUTS = 256  # of a piece
FEWEST_ROWS_IN_TURN = 1024  # of x, whose two pieces the library adds up itself
_STEP = {torch.bfloat16: 16, torch.float32: 1}  # inputs come in multiples of it


def pieces_of(weight: torch.Tensor) -> int:
    """Number of pieces that the inputs of weights (out, in) are cut into."""
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
    """What a kernel is chosen by, beside the number of rows: the weights (outputs, inputs), the pieces of the inputs,
    the dtypes of x and y, whether x's rows lie one after the other."""

    outputs: int
    inputs: int
    pieces: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    is_packed: bool


class FixedOrderProducts:
    """The fixed-order products of one device, with the library's kernel chosen for each shape and number of rows. The
    first product of a new shape chooses its kernel, which waits for the device, so it must not be captured in a CUDA
    graph."""

    def __init__(self, device: torch.device) -> None:
        self._taken: dict[tuple[ProductShape, int], bytes | None] = {}
        self._device = device

    def takes(self, weight: torch.Tensor) -> bool:
        """Whether products with these weights (out, in) can be made in fixed order."""
        step = _STEP.get(weight.dtype)
        if step is None or weight.shape[1] % step or weight.data_ptr() % ALIGNMENT:
            return False
        return torch.cuda.get_device_capability(self._device)[0] >= 9

    def kernel(self, shape: ProductShape, rows: int) -> tuple[bytes, bool] | None:
        """The kernel for so many rows: (the library's kernel, whether it adds up the pieces in turn), (b"", False) for
        our own kernel; None if `product` has not chosen one yet."""
        if rows <= extension().MOST_FEW_ROWS and shape.dtype == torch.bfloat16:
            return b"", False
        bucket = _bucket(rows)
        if (shape, bucket) not in self._taken:
            return None
        taken = self._taken[shape, bucket]
        return (b"", False) if taken is None else (taken, _in_turn(shape.pieces, shape.out_dtype, bucket))

    def product(self, x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, pieces: int) -> torch.Tensor:
        """x W^T (t, out) in out_dtype, x's or float32. x: (t, in) of the weights' dtype. pieces: of the inputs."""
        if not _lies(x):
            x = x.clone(memory_format=torch.contiguous_format)
        y = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
        if not y.numel():
            return y
        with torch.cuda.device(x.device):
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
        if key not in self._taken:
            self._taken[key] = _fastest(weight, y.dtype, pieces, bucket)
        taken = self._taken[key]
        if taken is None or not _library(x, weight, y, pieces, taken, _in_turn(pieces, y.dtype, bucket)):
            _own_product(x, weight, y, pieces)


def _fastest(weight: torch.Tensor, out_dtype: torch.dtype, pieces: int, rows: int) -> bytes | None:
    """The library's fastest kernel for so many rows that passes the trial; None if none does."""
    generator = torch.Generator(weight.device).manual_seed(rows)
    x = torch.randn((rows, weight.shape[1]), device=weight.device, generator=generator)
    x = x.to(weight.dtype)
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    trial, in_turn = _Trial(weight, out_dtype, pieces, rows), _in_turn(pieces, out_dtype, rows)
    most = FEW_CANDIDATES if weight.dtype == torch.bfloat16 and rows < MOST_TIMED_ROWS else CANDIDATES
    candidates = extension().library_choices(_in_pieces(x, weight, y, pieces, in_turn)[0], in_turn, most)
    took = {candidate: math.inf for candidate in candidates if trial.passes(candidate)}
    before = torch.empty(2 * _cache_bytes(weight.device), dtype=torch.uint8, device=weight.device)
    timings = [  # in turns, as the device's clock rises from rest
        (candidate, _timed(partial(_library, x, weight, y, pieces, candidate, in_turn), before))
        for _ in range(TIMINGS)
        for candidate in took
    ]
    for candidate, (begin, end) in timings:
        end.synchronize()
        took[candidate] = min(took[candidate], begin.elapsed_time(end))
    return min(took, key=lambda candidate: took[candidate], default=None)


def _cache_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


class _Trial:
    """A product whose elements are zero but for the rounding of their sums, and so have other bits wherever sums are
    made in another order: half of each piece's inputs, drawn at random, take away what the others give."""

    def __init__(self, like: torch.Tensor, out_dtype: torch.dtype, pieces: int, rows: int) -> None:
        """like: the weights (out, in) whose shape and alignment matter; rows: of x, in the products to come."""
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
        """Whether this kernel of the library makes the same bits."""
        self._y.fill_(float("nan"))
        done = _library(self._x, self._weight, self._y, self._pieces, choice, self._in_turn)
        return done and torch.equal(self._y[self._some], self._expected)


def _in_turn(pieces: int, out_dtype: torch.dtype, rows: int) -> bool:
    """Whether the library adds the pieces of so many rows to the result one after the other: less to move where there
    are many rows, but half as much to do at once."""
    return pieces == 2 and out_dtype == torch.float32 and rows >= FEWEST_ROWS_IN_TURN


def _library(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, pieces: int, choice: bytes, in_turn: bool) -> bool:
    """y = the product by this kernel of the library; False where it does not run so."""
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
    """The product that the library makes, and its pieces (pieces, rows, out) where these are to be added up."""
    if pieces == 1 or in_turn:
        return _product(x, weight, y, pieces), None
    parts = torch.empty((pieces, *y.shape), dtype=torch.float32, device=y.device)
    return _product(x, weight, parts, pieces), parts


def _timed(run: Callable[[], object], before: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Queue one run with its weights out of the cache; the events around it. before: memory whose filling takes the
    device longer than the host needs to launch the run."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.zero_()
    begin.record()
    run()
    end.record()
    return begin, end


def _own_product(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, pieces: int) -> None:
    """Multiply in row blocks with our own kernel."""
    few = x.dtype == torch.bfloat16
    multiply = extension().few_rows_product if few else extension().chain_product
    for begin in range(0, len(x), extension().MOST_FEW_ROWS):
        rows = slice(begin, begin + extension().MOST_FEW_ROWS)
        multiply(_product(x[rows], weight, y[rows], pieces), current_stream())


def _lies(x: torch.Tensor) -> bool:
    """Whether kernels may read x as it lies: rows one after the other, or apart and each aligned."""
    apart = x.stride(0) > x.shape[1] and x.stride(0) * x.element_size() % ALIGNMENT == 0
    packed = x.stride(0) == x.shape[1] or apart
    return x.stride(1) == 1 and packed and x.data_ptr() % ALIGNMENT == 0


def _product(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, pieces: int) -> object:
    return extension().Product(
        x.shape[0],
        x.shape[1],
        weight.shape[0],
        DTYPE_CODES[x.dtype],
        weight.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        y.data_ptr(),
        DTYPE_CODES[y.dtype],
        pieces,
    )


def _bucket(rows: int) -> int:
    """The number of rows whose kernel is taken for `rows`. With fewer than 128 rows of float32 the library has kernels
    that sum in another order first."""
    if rows <= 128:
        return 128 if rows > 64 else 64 if rows > 16 else 16
    return min((rows + 255) // 256 * 256, MOST_TIMED_ROWS)
