"""Staging memory and what is read into it ahead: bounded, whole, given back after every outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from apcbatch.engine.pool import Snapshot
from apcbatch.engine.snapshot_arrays import ALIGNMENT, Staging, parts_of, slot_in_memory, staged_bytes
from apcbatch.engine.store_prefetch import StorePrefetcher
from apcbatch.layout import CONV, KV, SSM, StateLayout
from apcbatch.model.arena import StateArena, Tensors
from tests.effort import table

LAYOUT = StateLayout.of([SSM.part(0, (2, 3), "float32"), CONV.part(0, (1, 3), "bfloat16")])
SOON_S = 5.0


class Reader:
    """Reads a key of one byte as a buffer full of it; waits at the gate first. b"0" is not there."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.begun: list[bytes] = []
        self.error: Exception | None = None

    def __call__(self, key: bytes, buffer: Tensors) -> int | None:
        self.begun.append(key)
        assert self.gate.acquire(timeout=SOON_S)
        if self.error is not None:
            raise self.error
        for part in buffer.values():
            part.fill_(key[0] % 64)
        return None if key == b"0" else key[0]


def all_are_free(staging: Staging) -> bool:
    """Whether each buffer can be had now, and once."""
    taken: list[Tensors] = []
    with ThreadPoolExecutor(1) as threads:
        while len(taken) < staging.num_buffers:
            one = threads.submit(staging.take)
            try:
                taken.append(one.result(SOON_S))
            except TimeoutError:
                staging.give_back({})  # for the thread, which waits
                return False
    for buffer in taken:
        staging.give_back(buffer)
    return all(staging.take() is buffer for buffer in taken) and len({id(buffer) for buffer in taken}) == len(taken)


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold soon."""
    pause = threading.Event()
    return any(holds() or pause.wait(0.01) for _ in range(500))


def test_buffers_have_the_shape_of_a_slot_and_lie_apart() -> None:
    """Catches a part of another shape or dtype than the arena's, parts that overlap, and KV in a slot's buffer."""
    layout = StateLayout.of([*LAYOUT.parts, KV.part(1, (2, None, 1, 2), "bfloat16")])
    staging, arena = Staging(layout, 2), StateArena(layout, 1, 1, torch.device("cpu"))
    buffers = [staging.take(), staging.take()]
    for number, buffer in enumerate((*buffers, slot_in_memory(layout))):
        assert {name: (part.shape, part.dtype) for name, part in buffer.items()} == {
            name: (part.shape[1:], part.dtype) for name, part in arena.slots.items()
        }
        for part in buffer.values():
            part.fill_(number)
    assert all((part == number).all() for number, buffer in enumerate(buffers) for part in buffer.values())
    assert staged_bytes(layout) == 2 * ALIGNMENT


def test_a_buffer_comes_back_only_when_its_copy_has_ended() -> None:
    """Catches a file that is read into memory which the device still reads."""
    staging, copied = Staging(LAYOUT, 1), threading.Event()
    staging.give_back(staging.take(), Mock(wait=copied.wait))
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(staging.take)
        assert not taken.done()
        copied.set()
        assert taken.result(SOON_S)


def test_what_is_wanted_is_read_in_order_into_as_many_buffers_as_there_are() -> None:
    """Catches memory without a bound, another order, a buffer handed to two, and one that is lost."""
    reader, staging = Reader(), Staging(LAYOUT, 2)
    ahead = StorePrefetcher(reader, staging, num_threads=2)
    ahead.prefetch([b"a", b"b", b"c"])
    reader.gate.release(8)
    for key, number in ((b"a", 97), (b"b", 98), (b"c", 99)):
        assert eventually(lambda key=key: key in reader.begun)
        read = ahead.take(key)
        assert read is not None and read.position == number
        assert all((part == number % 64).all() for part in read.buffer.values())
        staging.give_back(read.buffer)
    assert sorted(reader.begun) == [b"a", b"b", b"c"]
    ahead.close()
    assert all_are_free(staging)


def test_what_no_thread_has_begun_is_left_to_the_caller() -> None:
    """Catches an engine that waits for a buffer which another key has, for ever."""
    reader, staging = Reader(), Staging(LAYOUT, 1)
    ahead = StorePrefetcher(reader, staging, num_threads=1)
    ahead.prefetch([b"a", b"b"])
    assert eventually(lambda: reader.begun == [b"a"])
    assert ahead.take(b"b") is None and ahead.take(b"c") is None
    reader.gate.release()
    read = ahead.take(b"a")
    assert read is not None
    staging.give_back(read.buffer)
    assert ahead.take(b"a") is None, "once"
    ahead.close()
    assert reader.begun == [b"a"] and all_are_free(staging)


def test_what_is_wanted_no_more_gives_its_buffer_back() -> None:
    """Catches buffers that a sequence keeps which was dropped, or started from a longer prefix; also while one is
    read."""
    reader, staging = Reader(), Staging(LAYOUT, 2)
    ahead = StorePrefetcher(reader, staging, num_threads=2)
    ahead.prefetch([b"a", b"b"])
    assert eventually(lambda: len(reader.begun) == 2)
    reader.gate.release(1)
    ahead.prefetch([b"c"])
    reader.gate.release(3)
    read = None
    assert eventually(lambda: b"c" in reader.begun)
    read = ahead.take(b"c")
    assert read is not None and read.position == 99
    staging.give_back(read.buffer)
    ahead.close()
    assert all_are_free(staging)


@table("fails", [False, True])
def test_a_miss_and_a_failure_reach_who_asks(fails: bool) -> None:
    """Catches a caller that waits for ever, and a thread that dies of an error."""
    reader, staging = Reader(), Staging(LAYOUT, 1)
    reader.error = ValueError("a fault") if fails else None
    ahead = StorePrefetcher(reader, staging, num_threads=1)
    reader.gate.release(2)
    for _ in range(2):
        ahead.prefetch([b"0"])
        assert eventually(lambda: bool(reader.begun))
        if fails:
            with pytest.raises(ValueError, match="a fault"):
                ahead.take(b"0")
        else:
            read = ahead.take(b"0")
            assert read is not None and read.position is None
            staging.give_back(read.buffer)
        reader.begun.clear()
    ahead.close()
    assert all_are_free(staging)


def test_closing_ends_threads_that_read_or_wait_for_a_buffer() -> None:
    """Catches an engine that never ends."""
    reader, staging = Reader(), Staging(LAYOUT, 1)
    ahead = StorePrefetcher(reader, staging, num_threads=3)
    ahead.prefetch([b"a", b"b", b"c"])
    assert eventually(lambda: bool(reader.begun))
    reader.gate.release(8)
    ahead.close()
    assert all_are_free(staging)


def test_without_pinned_memory_buffers_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a limit of locked memory ends the run, though copies would only be slower."""
    pins: list[bool] = []
    empty = torch.empty

    def allocate(*shape: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pins.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    for is_there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        buffer = Staging(LAYOUT, 2).take()
        assert {name: (part.shape, part.dtype) for name, part in buffer.items()} == {
            "ssm": ((1, 2, 3), torch.float32), "conv": ((1, 1, 3), torch.bfloat16),
        }  # fmt: skip
    assert pins == [True, False, False]


def test_what_leaves_a_device_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a snapshot that is sent is not the slot's state, or changes with the next pass."""
    arena = StateArena(
        StateLayout.of([*LAYOUT.parts, KV.part(1, (2, None, 1, 2), "float32")]), 2, 3, torch.device("cpu")
    )
    for tensor in (*arena.slots.values(), *arena.pages.values()):
        tensor.copy_(torch.randn(tensor.shape))
    snapshot = Snapshot(b"a", 70, 1, np.array([2, 0]))
    views = parts_of(arena, snapshot, 64)
    assert views["ssm"].data_ptr() == arena.slots["ssm"][1].data_ptr() and views["kv"].shape[2] == 6
    monkeypatch.setattr(StateArena, "on_host", False)
    parts = parts_of(arena, snapshot, 64)
    assert list(parts) == list(views) and all(torch.equal(parts[name], views[name]) for name in views)
    arena.slots["ssm"].zero_()
    assert parts["ssm"].abs().sum() > 0
