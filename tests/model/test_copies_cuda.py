"""Copies of slots beside a CUDA device's passes: never before what they depend on, never after what depends on them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from apcbatch.engine.snapshot_arrays import Staging
from apcbatch.layout import CONV, KV, SSM, StateLayout
from apcbatch.model.arena import StateArena

pytestmark = pytest.mark.cuda
LAYOUT = StateLayout.of(
    [SSM.part(0, (16, 4096), "float32"), CONV.part(0, (3, 4096), "bfloat16"), KV.part(1, (2, None, 2, 8), "bfloat16")]
)
LONG = 200_000_000  # cycles that the device waits: a tenth of a second


def arena() -> StateArena:
    return StateArena(LAYOUT, 3, 4, torch.device("cuda"))


def fill(states: StateArena, slot: int, value: float) -> None:
    for part in states.slots.values():
        part[slot].fill_(value)


def test_a_copy_out_waits_for_its_mark_and_for_nothing_later() -> None:
    """Catches a slot that is copied before its pass has written it, and a copy that waits for later passes."""
    states, staging = arena(), Staging(LAYOUT, 2)
    buffer = staging.take()
    assert all(part.is_pinned() for part in buffer.values())
    states.copy_out(0, buffer, states.mark())  # what a device loads at its first copy waits for all that it does
    states.gather(torch.tensor([0, 1]), 10, 100)
    torch.cuda._sleep(LONG)
    fill(states, 1, 7.0)
    for part in states.pages.values():
        part.fill_(3.0)
    mark = states.mark()
    torch.cuda._sleep(20 * LONG)
    later = torch.cuda.Event()
    later.record()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(states.copy_out, 1, buffer, mark).result()
        kept = threads.submit(states.gather, torch.tensor([2, 0]), 10, 100, mark).result()
    assert not later.query()
    assert all((part == 7.0).all() for part in buffer.values())
    assert kept["kv"].device.type == "cpu" and kept["kv"].shape[2] == 90 and (kept["kv"] == 3.0).all()
    torch.cuda.synchronize()


def test_a_copy_in_comes_between_what_was_and_what_will_be_asked_for() -> None:
    """Catches a slot that is filled while an earlier pass reads it, one that a later pass reads before it is filled,
    and a buffer that changes while the bus reads it."""
    states, staging = arena(), Staging(LAYOUT, 1)
    fill(states, 2, 1.0)
    torch.cuda._sleep(LONG)
    before = {name: part[2].clone() for name, part in states.slots.items()}
    buffer = staging.take()
    for part in buffer.values():
        part.fill_(5.0)
    staging.give_back(buffer, states.copy_in(2, buffer))
    after = {name: part[2].clone() for name, part in states.slots.items()}
    for part in staging.take().values():  # waits until it was copied
        part.fill_(9.0)
    assert all((part == 1.0).all() for part in before.values())
    assert all((part == 5.0).all() for part in after.values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_every_floating_part_tells_whether_a_state_is_finite(value: float) -> None:
    """Catches a broken state that a device publishes."""
    states = arena()
    for slot in range(3):
        fill(states, slot, 1.0)
    for role in ("ssm", "conv"):
        states.slots[role][1].view(-1)[-1] = value
        assert [part.tolist() for part in states.finite([0, 1, 2])] == [[True, False, True]]
        fill(states, 1, 1.0)
    assert [part.tolist() for part in states.finite([2])] == [[True]]
