"""What the tests of the recurrent ops share: random arguments, ragged batches, passes over pieces."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.processor import set_isa
from apcbatch.kernels.ragged import Ragged
from apcbatch.model.devices import backend_for

DTYPES = [torch.float32, torch.bfloat16]
THREADED = [1, 90, 3, 200, 7]  # tokens of the sequences of assert_threads_change_no_bit
# relative and absolute tolerance against float64
TOLERANCES = {torch.float32: (6e-4, 2e-3), torch.bfloat16: (3e-2, 5e-2)}


# Run the test on the CPU and on a CUDA device.
on_devices = pytest.mark.usefixtures("device")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: the reference's tensors are so small that waking a second one costs far more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def poison(shape: Sequence[int], dtype: torch.dtype) -> None:
    """Fill and free memory of this size, so that the next tensor of it most likely begins as NaN."""
    torch.full(tuple(shape), float("nan"), dtype=dtype)


def strided(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows that are a slice of wider ones, which are NaN everywhere else."""
    wide = torch.full((rows, columns + 5), torch.nan, dtype=dtype)
    wide[:, 3 : 3 + columns] = torch.randn(rows, columns)
    return wide[:, 3 : 3 + columns]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes: NaN equals itself and -0 differs from 0."""
    bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance for activations of this dtype; expected is float64."""
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


def ragged(
    lengths: Sequence[int],
    initial: Sequence[int] | None = None,
    final: Sequence[int] | None = None,
    snapshots: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> Ragged:
    """A batch from Python lists; snapshots: (position, slot) of each sequence."""

    def integers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device="cpu")  # on any default device

    def offsets(counts: Sequence[int]) -> torch.Tensor:
        return integers([sum(counts[:i]) for i in range(len(counts) + 1)])

    kept = snapshots or [[] for _ in lengths]
    return Ragged.create(
        offsets(lengths),
        None if initial is None else integers(initial),
        None if final is None else integers(final),
        offsets([len(pairs) for pairs in kept]),
        integers([position for pairs in kept for position, _ in pairs]),
        integers([slot for pairs in kept for _, slot in pairs]),
    )


@dataclass
class Scan:
    """Arguments of selective_scan over t tokens; state slots are (n, d)."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def random(cls, t: int, d: int, n: int, dtype: torch.dtype = torch.float32, options: bool = True) -> Scan:
        """x and z are column slices of one projection, as in the model; options: with D, z and dt_bias."""
        xz, bc = torch.randn(t, 2 * d).to(dtype), torch.randn(t, 3 + 2 * n).to(dtype)
        return cls(
            xz[:, :d],
            (torch.randn(t, d) - 3).to(dtype),
            -8 * torch.rand(n, d) - 0.1,
            bc[:, 3 : 3 + n],
            bc[:, 3 + n :],
            torch.randn(d) if options else None,
            xz[:, d:] if options else None,
            torch.randn(d) if options else None,
            dtype,
        )

    def arena(self, slots: int) -> torch.Tensor:
        """Random states, every second layer's, as a model's arena has them."""
        return torch.randn(slots, 2, *self.A.shape)[:, 1]

    def tokens(self, begin: int, end: int) -> Scan:
        return self.at(slice(begin, end))

    def at(self, rows: slice | torch.Tensor) -> Scan:
        """These tokens alone."""
        cut = {name: getattr(self, name)[rows] for name in ("x", "dt", "B", "C")}
        return dataclasses.replace(self, z=None if self.z is None else self.z[rows], **cut)

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """Those before the states, as the op takes them."""
        return self.x, self.dt, self.A, self.B, self.C, self.D, self.z, self.dt_bias

    def channels(self, begin: int, end: int) -> Scan:
        """The same tokens in channels begin to end only; B and C are shared by all channels."""

        def cut(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else value[..., begin:end].contiguous()

        names = ("x", "dt", "A", "D", "z", "dt_bias")
        return dataclasses.replace(self, **{name: cut(getattr(self, name)) for name in names})

    def run(self, state: torch.Tensor, batch: Ragged) -> torch.Tensor:
        poison(self.x.shape, self.dtype)
        return backend_for(self.x.device).selective_scan(*self.arguments, state, batch)

    def expect(self, state: torch.Tensor, batch: Ragged) -> torch.Tensor:
        """The reference in float64; state must be float64."""
        wide = (None if value is None else value.double() for value in self.arguments)
        with one_thread():
            return reference.selective_scan(*wide, state, batch)


@dataclass
class Conv:
    """Arguments of causal_conv over t tokens; state slots are (w - 1, d)."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    has_silu: bool = True

    @classmethod
    def random(cls, t: int, d: int, width: int = 4, dtype: torch.dtype = torch.float32, options: bool = True) -> Conv:
        """x is a column slice; options: with bias and SiLU."""
        x = torch.randn(t, 2 * d).to(dtype)[:, :d]
        return cls(x, torch.randn(d, width), torch.randn(d) if options else None, dtype, options)

    def arena(self, slots: int) -> torch.Tensor:
        d, width = self.weight.shape
        return torch.randn(slots, 2, width - 1, d).to(self.dtype)[:, 1]

    def tokens(self, begin: int, end: int) -> Conv:
        return dataclasses.replace(self, x=self.x[begin:end])

    def channels(self, begin: int, end: int) -> Conv:
        """With a bias."""
        cut = slice(begin, end)
        x, bias = self.x[:, cut].contiguous(), self.bias[cut].clone()
        return dataclasses.replace(self, x=x, weight=self.weight[cut].clone(), bias=bias)

    def run(self, state: torch.Tensor, batch: Ragged) -> torch.Tensor:
        poison(self.x.shape, self.dtype)
        ops = backend_for(self.x.device)
        return ops.causal_conv(self.x, self.weight, self.bias, state, batch, self.has_silu)

    def expect(self, state: torch.Tensor, batch: Ragged) -> torch.Tensor:
        """The reference in float64; state must be float64."""
        bias = None if self.bias is None else self.bias.double()
        with one_thread():
            return reference.causal_conv(self.x.double(), self.weight.double(), bias, state, batch, self.has_silu)


Inputs = Scan | Conv


def both(t: int, d: int, n: int, dtype: torch.dtype = torch.float32) -> list[Inputs]:
    """Random arguments of the two ops."""
    return [Scan.random(t, d, n, dtype), Conv.random(t, d, 4, dtype)]


def one_shot(inputs: Inputs, length: int, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of one sequence in one pass, from zeros, and an arena: slot i the snapshot at positions[i],
    the last slot the final state."""
    arena = inputs.arena(len(positions) + 1)
    kept = [(position, slot) for slot, position in enumerate(positions)]
    return inputs.run(arena, ragged([length], [-1], [len(positions)], [kept])), arena


def in_pieces(
    inputs: Inputs, ends: Sequence[int], arena: torch.Tensor, live: int, slot_of: Callable[[int], int | None]
) -> torch.Tensor:
    """One sequence from zeros in passes that end at `ends`, in slot `live` all along; slot_of(position) says
    where a snapshot at an absolute position goes. Returns the outputs of all passes."""
    outputs, begin = [], 0
    for end in ends:
        kept = [(p - begin, slot) for p in range(begin + 1, end + 1) if (slot := slot_of(p)) is not None]
        batch = ragged([end - begin], [live if begin else -1], [live], [kept])
        outputs.append(inputs.tokens(begin, end).run(arena, batch))
        begin = end
    return torch.cat(outputs)


def assert_mates_change_no_bit(inputs: Inputs, lengths: Sequence[int]) -> torch.Tensor:
    """Each sequence of a ragged batch has the bits that it has alone, and only the slots that the batch names change.
    Returns the outputs."""
    b = len(lengths)
    initial = [random.choice([-1, s]) for s in range(b)]
    final = [random.choice([-1, s, b + s]) for s in range(b)]
    kept = [[(random.randint(1, n), 2 * b + s)] if n > 2 else [] for s, n in enumerate(lengths)]
    arena = inputs.arena(4 * b)
    arena[3 * b :] = float("nan")
    before, alone = arena.clone(), arena.clone()
    outputs = inputs.run(arena, ragged(lengths, initial, final, kept))
    begin = 0
    for s, length in enumerate(lengths):
        one = inputs.tokens(begin, begin + length)
        single = one.run(alone, ragged([length], initial[s : s + 1], final[s : s + 1], kept[s : s + 1]))
        assert same_bits(single, outputs[begin : begin + length]), f"sequence {s}"
        begin += length
    assert same_bits(arena, alone)
    named = {*final, *(slot for pairs in kept for _, slot in pairs)}
    for slot in set(range(4 * b)) - named:
        assert same_bits(arena[slot], before[slot]), f"slot {slot} was written"
    return outputs


def assert_isas_change_no_bit(inputs: Inputs, start: torch.Tensor, batch: Ragged, isas: Sequence[str]) -> None:
    """The outputs and the states that begin as `start` are the same on each instruction set."""
    results = []
    for name in isas:
        set_isa(name)
        arena = start.clone()
        results.append((name, inputs.run(arena, batch), arena))
    for name, outputs, arena in results:
        assert same_bits(outputs, results[0][1]), f"outputs of {name}"
        assert same_bits(arena, results[0][2]), f"states of {name}"


def assert_threads_change_no_bit(inputs: Inputs) -> None:
    """A batch of sequences of THREADED tokens has the same outputs and states on any number of threads."""
    start = inputs.arena(8)
    batch = ragged(THREADED, [0, 1, -1, 3, 4], range(5), [[], [(64, 5)], [], [(1, 6), (200, 7)], []])
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8, 16):
            torch.set_num_threads(threads)
            arena = start.clone()
            results.append((inputs.run(arena, batch), arena))
    finally:
        torch.set_num_threads(before)
    for outputs, arena in results[1:]:
        assert same_bits(outputs, results[0][0])
        assert same_bits(arena, results[0][1])
