"""A stack's decode pass in one launch: what the mixers compute one after the other, whoever comes together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.kernels.cuda.decode import DecodeStack
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.mixer import DeviceMixer
from apcbatch.kernels.cuda.scan import batch_on
from apcbatch.kernels.layer import MixerWeights, PreNorm
from apcbatch.kernels.ragged import Ragged
from tests.kernels.recurrent import fresh_seed, poison, ragged, same_bits

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda", 0)
EPS = 1e-5
NORMS = ["none", "plain", "weighted"]
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 5e-2}
# h, d, n, r, w, v: every number of groups of columns a thread has, in both dtypes; a share of no row at all
SIZES = [
    (16, 32, 3, 8, 1, 11),
    (64, 120, 8, 8, 4, 97),
    (72, 2640, 16, 24, 2, 131),
    (768, 1536, 16, 48, 4, 5003),
    (1272, 2560, 16, 160, 4, 257),
    (2560, 5120, 16, 160, 4, 3001),
    (4096, 8192, 16, 256, 4, 400),
]
MOST_INNER, MOST_HIDDEN = 10240, 5120  # bytes of a row that the kernel takes


def is_taken(size: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a pass of this size goes in one launch."""
    return size[1] * dtype.itemsize <= MOST_INNER and size[0] * dtype.itemsize <= MOST_HIDDEN


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    """Tensors are made on the CUDA device."""
    with torch.device(CUDA):
        yield


class Stack:
    """Random mixers of one shape over an arena of random states, in one launch and one after the other."""

    def __init__(
        self, size: tuple[int, ...], dtype: torch.dtype, norms: str = "none", layers: int = 3, exact: bool = False
    ) -> None:
        h, d, n, _, w, v = size
        self.ops = CudaBackend(CUDA, exact)
        self.size, self.dtype, self.biases = size, dtype, norms != "none"
        self.head = self._linear(v, h)
        self.final_norm = self._norm(h)
        self.layers = [(self._norm(h), self._weights(norms)) for _ in range(layers)]
        self.start = torch.randn(24, layers, n, d), torch.randn(24, layers, w - 1, d).to(dtype)

    def _linear(self, outputs: int, inputs: int) -> DeviceLinear:
        return self.ops.pack_linear((torch.randn(outputs, inputs) * inputs**-0.5).to(self.dtype))

    def _norm(self, size: int) -> PreNorm:
        return PreNorm(1 + 0.2 * torch.randn(size), EPS)

    def _weights(self, norms: str) -> MixerWeights[DeviceLinear]:
        h, d, n, r, w, _ = self.size
        inner = tuple(1 + 0.2 * torch.randn(size) if norms == "weighted" else None for size in (r, n, n))
        return MixerWeights(
            in_proj=self._linear(2 * d, h),
            x_proj=self._linear(r + 2 * n, d),
            dt_proj=self._linear(d, r),
            out_proj=self._linear(h, d),
            in_bias=torch.randn(2 * d) if self.biases else None,
            out_bias=torch.randn(h) if self.biases else None,
            conv_weight=torch.randn(d, w),
            conv_bias=torch.randn(d) if self.biases else None,
            A=-8 * torch.rand(n, d) - 0.1,
            D=torch.randn(d),
            dt_bias=torch.randn(d) - 3,
            norms=None if norms == "none" else inner,
            norm_eps=EPS,
        )

    def mixers(self, arena: tuple[torch.Tensor, torch.Tensor]) -> list[DeviceMixer]:
        ssm, conv = arena
        return [DeviceMixer(norm, weights, ssm[:, i], conv[:, i]) for i, (norm, weights) in enumerate(self.layers)]

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.start[0].clone(), self.start[1].clone()

    def at_once(self, arena: tuple[torch.Tensor, torch.Tensor]) -> DecodeStack:
        return DecodeStack(self.mixers(arena), self.final_norm, self.head)

    def logits(self, begin: torch.Tensor, arena: tuple[torch.Tensor, torch.Tensor], batch: Ragged) -> torch.Tensor:
        """In one launch."""
        for columns in (self.size[1], self.size[5]):
            poison((len(begin), columns), self.dtype)
        return self.at_once(arena)(begin.clone(), batch_on(CUDA, batch))

    def one_by_one(self, begin: torch.Tensor, arena: tuple[torch.Tensor, torch.Tensor], batch: Ragged) -> torch.Tensor:
        residual = self.ops.residual(begin.clone())
        for mixer in self.mixers(arena):
            mixer(residual, batch)
        normed = self.ops.normed(residual, self.final_norm, self.dtype)
        return self.ops.linear(normed, self.head, out_dtype=torch.float32)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """By the norm of the difference."""
    difference = (actual.double() - expected.double()).norm()
    return bool(difference <= TOLERANCE[dtype] * expected.double().norm())


def mixed(rows: int) -> Ragged:
    """Sequences from a slot or from nothing, into the same slot, another or none, with and without a snapshot."""
    return ragged(
        [1] * rows,
        [s if s % 3 != 1 else -1 for s in range(rows)],
        [(s, 8 + s, -1)[s % 3] if s else s for s in range(rows)],
        [[(1, 16 + s)] if s % 2 else [] for s in range(rows)],
    )


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_its_parts_one_by_one(dtype: torch.dtype, size: tuple[int, ...], norms: str) -> None:
    """A row or a column that is left out or counted twice, a block that reads what another is yet to write, weights of
    another layer, a slot that nobody named or that is not written."""
    fresh_seed()
    stack = Stack(size, dtype, norms)
    most = stack.at_once(stack.arena()).most_rows
    assert most >= 4 if is_taken(size, dtype) else most == 0
    for rows in (1, 2, 4, 8):
        if rows > most:
            break
        begin, batch = torch.randn(rows, size[0]), mixed(rows)
        arena, expected_arena = stack.arena(), stack.arena()
        logits = stack.logits(begin, arena, batch)
        assert close(logits, stack.one_by_one(begin, expected_arena, batch), dtype)
        written = {s for s in [*batch.final_slots.tolist(), *batch.snapshot_slots.tolist()] if s >= 0}
        for part, expected, start in zip(arena, expected_arena, stack.start, strict=True):
            for slot in range(len(start)):
                if slot in written:
                    assert close(part[slot], expected[slot], dtype)
                else:
                    assert same_bits(part[slot], start[slot])


@pytest.mark.parametrize(
    ("dtype", "size"), [(t, size) for t in TOLERANCE for size in SIZES[1:] if is_taken(size, t)], ids=str
)
def test_bits_do_not_depend_on_the_company(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """A sum whose order depends on how many sequences come together, or that another sequence gets into."""
    fresh_seed()
    stack = Stack(size, dtype, "weighted")
    rows = stack.at_once(stack.arena()).most_rows
    begin, together = torch.randn(rows, size[0]), stack.arena()
    logits = stack.logits(begin, together, ragged([1] * rows, range(rows), range(8, 8 + rows)))
    arena = stack.arena()
    for s in range(rows):
        alone = stack.logits(begin[s : s + 1], arena, ragged([1], [s], [8 + s]))
        assert same_bits(alone, logits[s : s + 1])
    assert all(same_bits(one, other) for one, other in zip(arena, together, strict=True))
    again = stack.logits(begin, stack.arena(), ragged([1] * rows, range(rows), range(8, 8 + rows)))
    assert same_bits(again, logits)


@pytest.mark.parametrize("size", [(64, 120, 8, 8, 4, 97), (768, 1536, 16, 48, 3, 11)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_states_have_the_bits_of_the_single_ops(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """A convolution, a softplus or an update of the state that is not causal_conv's and selective_scan's: with weights
    that pick single columns, and a residual whose norm is exact, no product rounds."""
    fresh_seed()
    stack = Stack(size, dtype, layers=1)
    weights = stack.layers[0][1]
    for packed in (weights.in_proj, weights.x_proj, weights.dt_proj):
        picked = torch.randint(packed.in_features, (packed.out_features, 1))
        packed.weight.zero_().scatter_(1, picked, 1.0)
    begin = torch.randint(2, (4, size[0])).float() * 2 - 1
    arena, expected = stack.arena(), stack.arena()
    stack.logits(begin, arena, mixed(4))
    stack.one_by_one(begin, expected, mixed(4))
    assert all(same_bits(one, other) for one, other in zip(arena, expected, strict=True))


def test_a_captured_pass_follows_its_batch() -> None:
    """A launch that cannot be captured, or a replay that goes on with the slots or the counts of the pass before."""
    fresh_seed()
    stack = Stack(SIZES[3], torch.bfloat16)
    arena, expected = stack.arena(), stack.arena()
    at_once, begin = stack.at_once(arena), torch.randn(4, SIZES[3][0])
    batches = [ragged([1] * 4, slots, slots) for slots in ([0, 1, 2, 3], [7, 5, 4, 6], [0, 1, 2, 3])]
    device_batch = batch_on(CUDA, ragged([1] * 4))
    at_once(begin.clone(), device_batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = at_once(begin.clone(), device_batch)
    for batch in batches:
        device_batch.slots.copy_(torch.stack([batch.initial_slots, batch.final_slots]))
        graph.replay()
        assert same_bits(logits, stack.logits(begin, expected, batch))
    assert all(same_bits(one, other) for one, other in zip(arena, expected, strict=True))


def test_takes_only_what_it_can_read() -> None:
    """Memory read out of bounds, or free products where exact ones were asked for."""
    for size in ((36, 72, 8, 3, 4, 97), (64, 120, 17, 8, 4, 97), (64, 120, 8, 8, 5, 97), (64, 90000, 8, 8, 4, 97)):
        odd = Stack(size, torch.bfloat16, layers=1)
        assert odd.at_once(odd.arena()).most_rows == 0
    exact = Stack(SIZES[1], torch.bfloat16, exact=True)
    assert exact.at_once(exact.arena()).most_rows == 0
    stack = Stack(SIZES[1], torch.bfloat16)
    at_once = stack.at_once(stack.arena())
    for lengths in ([1] * 3, [1] * 16, [2, 1]):
        with pytest.raises(ValueError, match="must be a power of two of sequences"):
            at_once(torch.randn(sum(lengths), 64), batch_on(CUDA, ragged(lengths)))
    with pytest.raises(ValueError, match="residual must be contiguous"):
        at_once(torch.randn(2, 63), batch_on(CUDA, ragged([1, 1])))
