"""What the tests of the fused recurrent mixers share. A mixer there has random weights, `arena(slots)`, the states of
its two roles, `fused(*states)`, and `one_by_one(sums, pending, *states, batch)`, its kernels in turn."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from apcbatch.kernels import reference
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.ragged import Ragged
from tests.kernels.recurrent import one_thread, poison, ragged, same_bits

ops = CpuBackend()


def run(fused: Any, sums: torch.Tensor, pending: torch.Tensor | None, batch: Ragged) -> torch.Tensor:
    """What a fused mixer leaves to be added to sums, which changes."""
    poison((batch.num_tokens, 4096), torch.float32)
    residual = ops.residual(sums)
    if pending is not None:
        residual.leave(pending.clone())
    fused(residual, batch)
    assert residual.has_delta
    return residual.delta


def assert_equals_one_by_one(mixer: Any) -> None:
    """Outputs, sums, final states and snapshots of ragged batches have the bits of the kernels in turn, and no other
    slot changes."""
    for lengths in ([1], [1, 1, 1, 1, 1], [3, 1, 70, 2, 129, 64]):
        b = len(lengths)
        initial = [i if i % 2 else -1 for i in range(b)]
        batch = ragged(lengths, initial, list(range(b)), [[(1, b + i)] for i in range(b)])
        sums, pending = torch.randn(2, sum(lengths), mixer.size[0])
        states = mixer.arena(2 * b + 1)
        sums_, states_ = sums.clone(), [state.clone() for state in states]
        expected = mixer.one_by_one(sums_, pending, *states_, batch)
        assert same_bits(run(mixer.fused(*states), sums, pending, batch), expected)
        assert same_bits(sums, sums_)
        for state, state_ in zip(states, states_, strict=True):
            assert same_bits(state, state_)


def assert_close_to_float64(mixer: Any, tolerance: float) -> None:
    """Outputs of two sequences are close to those of the reference with float64 weights."""
    batch = ragged([40, 1], [-1, 1], [0, 1])
    (sums, pending), states = torch.randn(2, 41, mixer.size[0]), mixer.arena(2)
    plain = {name: weight.double() for name, weight in mixer.plain.items()}
    wide = copy.copy(mixer)
    vectors = {name: value for name, value in vars(mixer.weights).items() if isinstance(value, torch.Tensor)}
    wide.weights = replace(mixer.weights, **{name: value.double() for name, value in vectors.items()})
    wide.dtype = torch.float64
    arguments = (one.double() for one in (sums, pending, *states))
    with one_thread():
        expected = wide.one_by_one(*arguments, batch, reference, plain)
    y = run(mixer.fused(*states), sums, pending, batch)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def assert_cuts_and_mates_change_no_bit(mixer: Any) -> None:
    """A sequence cut into passes, beside others, has the outputs, the state and the snapshot of one pass alone."""
    states, hidden = mixer.arena(6), mixer.size[0]
    fused, x, mates = mixer.fused(*states), torch.randn(200, hidden), torch.randn(90, hidden)
    whole = run(fused, x.clone(), None, ragged([200], [-1], [0], [[(64, 1)]]))
    pieces, begin = [], 0
    for end in (1, 64, 65, 150, 199, 200):
        rows = torch.cat([mates[:17], x[begin:end], mates[17:30]])
        batch = ragged(
            [17, end - begin, 13],
            [-1, 2 if begin else -1, -1],
            [4, 2, 5],
            [[], [(end - begin, 3)] if end == 64 else [], []],
        )
        pieces.append(run(fused, rows, None, batch)[17 : 17 + end - begin])
        begin = end
    assert same_bits(torch.cat(pieces), whole)
    for state in states:
        assert same_bits(state[2], state[0])
        assert same_bits(state[3], state[1])
