"""Which device a model gets, what is said where there is too little memory, and in which order a device copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apcbatch.errors import UsageError
from apcbatch.layout import SSM, StateLayout
from apcbatch.model import devices, host_copies
from apcbatch.model.arena import StateArena
from apcbatch.model.encoded import kind_of, mode_beside
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.model.host_copies import Copies, Fetch, finite_rows, largest
from apcbatch.model.pipeline_arena import SpreadArena
from tests.effort import table

CPU = torch.device("cpu")
LAYOUT = StateLayout.of([SSM.part(0, (2, 3), "float32"), SSM.part(1, (2, 3), "float32")])


@table(
    "name, is_there, is_built, chosen",
    [
        ("cpu", True, True, "cpu"),
        ("cpu", False, False, "cpu"),
        ("auto", True, True, "cuda:1"),
        ("auto", False, True, "cpu"),
        ("auto", True, False, "cpu"),
        ("cuda", True, True, "cuda:1"),
        ("cuda", False, True, "--device cuda: torch finds no CUDA device; give --device cpu"),
        ("cuda", True, False, "--device cuda: not built"),
        ("tpu", True, True, "device is 'tpu'; expected auto, cpu or cuda"),
    ],
)
def test_the_device_is_the_one_that_was_asked_for(
    name: str, is_there: bool, is_built: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a GPU that stays idle, one that is taken without kernels for it, and a run on the CPU where a GPU was
    asked for."""

    def extension() -> None:
        if not is_built:
            raise RuntimeError("not built")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(devices.cuda, "extension", extension)
    if len(chosen) > 6:
        with pytest.raises(UsageError, match=chosen):
            devices.choose_device(name)
    else:
        assert str(devices.choose_device(name)) == chosen


@table("error, is_memory", [
    (MemoryError(), True), (torch.OutOfMemoryError("CUDA out of memory"), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate"), True),
    (RuntimeError("a size does not match"), False),
])  # fmt: skip
def test_weights_that_find_no_memory_are_told_from_other_errors(
    error: Exception, is_memory: bool, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a fault of the loader that is put down to the memory, memory that ends in a traceback, and a remedy for
    another device."""

    def fails(*_: object, **__: object) -> None:
        raise error

    config = load_model_config(tiny_checkpoint("mamba", num_hidden_layers=2))
    checkpoint: Any = None
    layout = state_layout(config, "float32")
    monkeypatch.setattr(devices, "CausalLM", fails)
    monkeypatch.setattr(devices, "load_stages", fails)
    monkeypatch.setattr(devices, "backend_for", lambda *_: None)
    on_gpu, whole = (devices.make_arena(layout, 2, 0, [CPU], [range(2)]) for _ in range(2))
    on_gpu.device = torch.device("cuda")
    spread = devices.make_arena(layout, 2, 0, [CPU, CPU], [range(1), range(1, 2)])
    assert isinstance(whole, StateArena) and isinstance(spread, SpreadArena)
    remedies = "or run where there is more memory", "more --gpus or --device cpu", "more --gpus or --device cpu"
    for arena, remedy in zip((whole, spread, on_gpu), remedies, strict=True):
        with pytest.raises(UsageError if is_memory else RuntimeError) as raised:
            devices.load_model(checkpoint, config, torch.float32, arena, [range(2)], exact=True, passes=3)
        if is_memory:
            expected = "the model's weights do not fit the memory beside the states; give a smaller --pool-size, "
            assert str(raised.value) == expected + remedy
        else:
            assert raised.value is error


@table("count, where", [(1, "the device and 1.5 GiB are"), (2, "2 devices and 1.5 GiB and 2.5 GiB are")])
def test_memory_that_a_device_does_not_give_is_counted(count: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a sentence with another size than the one that was asked for, or with one device's free bytes for all."""

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    free = {"cuda:0": 3 << 29, "cuda:1": 5 << 29}
    monkeypatch.setattr(devices, "StateArena", fails)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[str(device)], 1 << 40))
    layers = [range(2)] if count == 1 else [range(1), range(1, 2)]
    gpus = [torch.device("cuda", number) for number in range(count)]
    num_slots = (7 << 30) // LAYOUT.slot_bytes
    with pytest.raises(UsageError) as raised:
        devices.make_arena(LAYOUT, num_slots, 0, gpus, layers)
    assert str(raised.value) == (
        f"the {num_slots} states and snapshots and 0 pages of KV need 7.0 GiB on {where} free; give a smaller "
        "--pool-size or --max-running"
    )


def test_codes_are_kept_where_kernels_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches codes that are counted and then decoded: on a GPU without kernels for them, and beside an adapter."""
    capabilities = {"cuda:0": (9, 0), "cuda:1": (8, 6)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[str(device)])
    gpus = [torch.device("cuda", number) for number in range(2)]
    assert [kind_of(one) for one in ([CPU], gpus[:1], gpus[1:], gpus)] == ["cpu", "cuda", "other", "other"]
    assert (mode_beside("encoded", None), mode_beside("encoded", "lora")) == ("encoded", "decoded")


def test_each_gpu_has_its_backend_and_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model of a GPU that runs the CPU's kernels, or other products than it was asked for, and a stage
    without graphs or with buffers for fewer passes than are in flight."""
    monkeypatch.setattr(devices, "CudaBackend", lambda device, exact: (str(device), exact))
    monkeypatch.setattr(devices, "CpuBackend", lambda: "cpu")
    monkeypatch.setattr(devices, "GraphedLM", lambda stage, device, passes=1: (stage, str(device), passes))
    monkeypatch.setattr(devices, "SpreadLM", lambda stages, used: (stages, [str(device) for device in used]))
    monkeypatch.setattr(devices, "load_stages", lambda *arguments: arguments[-1])
    gpus = [torch.device("cuda", number) for number in range(2)]
    assert devices.backend_for(gpus[1]) == ("cuda:1", True) and devices.backend_for(CPU) == "cpu"
    arena: Any = SimpleNamespace(stages=[SimpleNamespace(device=device) for device in (*gpus, CPU)])
    given: Any = (None, None, torch.float32)
    stages, used = devices.load_model(*given, arena, [], exact=False, passes=4)
    assert stages == [(("cuda:0", False), "cuda:0", 4), (("cuda:1", False), "cuda:1", 4), "cpu"]
    assert used == ["cuda:0", "cuda:1", "cpu"]
    monkeypatch.setattr(devices, "StateArena", SimpleNamespace)
    monkeypatch.setattr(devices, "CausalLM", lambda *arguments: arguments[-1])
    for stage, model in ((arena.stages[1], (("cuda:1", True), "cuda:1", 1)), (arena.stages[2], "cpu")):
        assert devices.load_model(*given, stage, [], exact=True, passes=1) == model


class FakeCuda:
    """What torch.cuda is asked to do, as lines: each on the stream that is current then."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.current = SimpleNamespace(name="passes")

    def own_stream(self, device: object, purpose: str) -> Any:
        name = purpose.removeprefix("copy ")
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.lines.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.lines.append(f"{name} waits for {event}"),
        )

    def Event(self, blocking: bool = False) -> Any:
        def record(stream: Any = None) -> None:
            self.lines.append(f"event on {(stream or self.current).name}")

        return SimpleNamespace(record=record, synchronize=lambda: self.lines.append("the host waits"), block=blocking)

    def current_stream(self, device: object) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def tensor(self, name: str) -> Any:
        def copy(source: Any, non_blocking: bool = False) -> None:
            self.lines.append(f"{source.name} to {name} on {self.current.name}" + " async" * non_blocking)

        return SimpleNamespace(name=name, copy_=copy)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(host_copies.torch, "cuda", fake)
    monkeypatch.setattr(host_copies, "own_stream", fake.own_stream)
    fake.current.wait_event = lambda event: fake.lines.append("passes wait for an event")
    return fake


def test_a_copy_to_a_device_is_ordered_among_its_passes(cuda: FakeCuda) -> None:
    """Catches a slot that is overwritten while an earlier pass reads it, and one that a later pass reads before it is
    there: without a device there is nothing to race with."""
    copies = Copies(torch.device("cuda", 0))
    done = copies.into([(cuda.tensor("slot"), cuda.tensor("host"))])
    expected = ["in waits for passes", "host to slot on in async", "event on in", "passes wait for an event"]
    assert cuda.lines == expected and cuda.current.name == "passes"
    done.wait()
    assert cuda.lines[4:] == ["the host waits"] and done._event.block, "without spinning"


def test_a_copy_from_a_device_begins_at_its_mark_and_ends_with_the_call(cuda: FakeCuda) -> None:
    """Catches bytes that are read on the host before they are there, or copied before the pass has written them."""
    copies = Copies(torch.device("cuda", 0))
    after = copies.mark()
    after._event = "the mark"
    copies.out([(cuda.tensor("host"), cuda.tensor("slot"))], after)
    expected = ["event on passes", "out waits for the mark", "slot to host on out async"]
    assert cuda.lines[:3] == expected and cuda.lines[-1] == "the host waits"
    cuda.lines.clear()
    with copies.beside(None):
        assert cuda.current.name == "passes"
    assert not cuda.lines


def test_a_fetched_tensor_is_read_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tokens that are read on the host before the device has copied them."""
    lines: list[str] = []
    event = SimpleNamespace(record=lambda: lines.append("event"), synchronize=lambda: lines.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextmanager(lambda: iter([None]))())

    def to(device: str, non_blocking: bool) -> str:
        lines.append(f"to {device}" + " async" * non_blocking)
        return "the copy"

    tensor: Any = SimpleNamespace(is_cuda=True, device="cuda:0", to=to)
    fetch = Fetch(tensor)
    assert lines == ["to cpu async", "event"]
    assert fetch.read() == "the copy" and lines[2:] == ["wait"]  # type: ignore[comparison-overlap]


@table("bad", [torch.nan, torch.inf, -torch.inf])
def test_each_number_that_is_not_finite_is_seen(bad: float) -> None:
    """Catches a row that is called finite for its largest or its smallest number alone."""
    rows = torch.randn(3, 5)
    assert finite_rows(rows).tolist() == [True] * 3 and largest(rows) == rows.abs().max()
    rows[1, 3] = bad
    assert finite_rows(rows).tolist() == [True, False, True] and not largest(rows).isfinite()
