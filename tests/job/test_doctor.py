"""The checks of `doctor`, one by one, on machines that lack what they look for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apcbatch.cores import Cores
from apcbatch.engine.engine import Engine
from apcbatch.errors import RequestError, UsageError
from apcbatch.job import doctor
from apcbatch.kernels.cpu.ops import ops as cpu
from apcbatch.kernels.cuda import extension as cuda
from apcbatch.model.locate import DEMO_DIR
from apcbatch.resolution import load
from apcbatch.types import Result
from tests.chats import DROPS_THOUGHTS
from tests.effort import table

CHECKS = (
    "_python", "_torch", "_extension", "_threads", "_kernels", "_cuda", "_model", "_memory", "_ends",
    "_template", "_store",
)  # fmt: skip


def finding(name: str, **given: Any) -> doctor.Finding:
    """What one check found with these options. Those before it are made too, but no model is loaded and no thread set
    for them."""

    def refuse(*_: Any, **options: Any) -> None:
        raise UsageError("it is not asked for")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("apcbatch.engine.parts.use_processor", lambda config: None)
        if name != "model":
            patch.setattr("apcbatch.engine.engine.Engine", refuse)
        return next(one for one in doctor.examine(load({"device": "cpu", **given}, None, {})) if one.name == name)


@table("version, is_old", [((3, 9, 20), True), ((3, 10, 0), False), ((4, 0, 0), False)])
def test_an_old_python_is_named(version: tuple[int, ...], is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a Python that is too old passing, or the oldest one that will do being refused."""
    monkeypatch.setattr(sys, "version_info", version)
    found = finding("python").text
    assert found.endswith("is too old; fix: use Python 3.10 or newer") == is_old
    assert is_old or sys.executable in found


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches versions that are compared as text, and a torch that is too old passing."""
    for version, is_old in [("2.10.1", True), ("2.11.0+cpu", False), ("2.9", True), ("3.0.0", False), ("1.13.0", True)]:
        monkeypatch.setattr(torch, "__version__", version)
        expected = f"torch {version} is too old; fix: pip install 'torch>=2.11'"
        assert finding("torch").text == (expected if is_old else version)


def test_threads_that_are_too_many_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that is slow because of its threads while doctor finds nothing."""
    cores = Cores(logical=4, physical=2, quota=None, nodes=1, huge_pages="madvise")
    monkeypatch.setattr(doctor, "find_cores", lambda: cores)
    monkeypatch.setattr("apcbatch.kernels.processor.num_threads", lambda: 2)
    assert finding("threads").text == "2 on 2 cores (4 processors, 1 NUMA node), huge pages: madvise"
    other = Cores(logical=4, physical=4, quota=2.5, nodes=2, huge_pages=None)
    monkeypatch.setattr(doctor, "find_cores", lambda: other)
    assert finding("threads").text == "2 on 4 cores (4 processors, a quota of 2.5, 2 NUMA nodes)"
    monkeypatch.setattr(doctor, "find_cores", lambda: cores)
    monkeypatch.setattr("apcbatch.kernels.processor.num_threads", lambda: 5)
    found = finding("threads")
    assert found.ok and found.is_warning and re.search("5 threads share 4 processors .* give --threads 2", found.text)


@table("cards, kernels, device, gpus, text",
    [
        ("", False, "auto", 1, "no device; the CPU is used"),
        ("", False, "cuda", 1, "torch finds no CUDA device; fix: give --device cpu, or see what nvidia-smi says"),
        ("", False, "auto", 2, "torch finds no CUDA device; fix: give --device cpu, or see what nvidia-smi says"),
        ("A", False, "auto", 1, "A, without kernels in this build (`make demo CUDA=1`); the CPU is used"),
        ("A", False, "cuda", 1, "no kernels; fix: build them, or give --device cpu"),
        ("AA", False, "auto", 2, "no kernels; fix: build them, or give --device cpu"),
        ("A", True, "cuda", 1, "A"),
        ("AA", True, "cuda", 1, "2 x A; --gpus 2 spreads a model over them"),
        ("AAB", True, "auto", 2, "A, A, B; --gpus takes those of one kind"),
        (
            "AA", True, "auto", 3,
            "--gpus 3: 2 GPUs are visible to this process; fix: give as many at most, or see what nvidia-smi and "
            "CUDA_VISIBLE_DEVICES say",
        ),
    ],
)  # fmt: skip
def test_a_device_is_said_to_be_there_or_not(
    cards: str, kernels: bool, device: str, gpus: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run on the CPU that was asked to use a device, a device without kernels taken for one with, and GPUs
    that are not counted."""

    def extension() -> None:
        if not kernels:
            raise RuntimeError("no kernels")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number=0: cards[number])
    monkeypatch.setattr(cuda, "extension", extension)
    assert finding("cuda", device=device, gpus=gpus).text == text


def test_a_model_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model that loads and fails every request passing."""
    error = RequestError("internal", "it broke")
    monkeypatch.setattr(Engine, "run", lambda engine, requests: iter([Result("doctor", 1, error=error)]))
    found = finding("model").text
    assert found.startswith("model demo does not answer: ") and "it broke" in found
    assert found.endswith("; fix: check the checkpoint's files")


def test_what_a_run_may_need_is_told_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a machine on which the run will be killed passes, or a container's limit is not seen."""
    given = {"device": "cpu", "max_running": "7", "pool_size": "3GiB", "store": "states", "model": "demo-jamba"}
    found = finding("memory", **given).text
    assert "GiB at --max-running 7 (weights 0.01 GiB, snapshots 3.00 GiB, KV of running requests 3.00" in found
    monkeypatch.setattr("apcbatch.model.devices.find_memory", lambda: 2 << 30)
    refused = finding("memory", **given)
    assert not refused.ok and re.search("this process may use 2.00 GiB: .*; give --pool-size 384MiB$", refused.text)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("apcbatch.model.devices.choose_devices", lambda name, gpus: [torch.device("cuda", 0)])
    monkeypatch.setattr("apcbatch.model.devices.memory_of", lambda devices: (11 << 30, "the device has free", 4))
    assert finding("memory", **given).text.startswith("at most 9.")
    monkeypatch.setattr("apcbatch.model.devices.memory_of", lambda devices: (6 << 30, "the device has free", 4))
    refused = finding("memory", **given)
    assert not refused.ok and re.search("free 6.00 GiB: .*; give --gpus 2 or --pool-size", refused.text)


EACH = "{% for m in messages %}{{ m.content }}"


@table(
    "template, text",
    [
        (EACH + "{% endfor %}", "prefix-stable: each turn's prompt begins with the one before"),
        (
            EACH + "{{ loop.revindex }}{% endfor %}",
            "usable, but not prefix-stable, so turns reuse less of each other: the chat template is not prefix-stable",
        ),
        (
            DROPS_THOUGHTS,
            "prefix-stable, but it takes earlier thoughts out of the history: what follows them is computed "
            """again; --template-kwargs '{"preserve_thinking": true}' keeps them""",
        ),
        (DROPS_THOUGHTS.replace("preserve_thinking", "true"), "prefix-stable: each turn's"),
        (
            EACH + "{{ raise_exception('not ' ~ messages|length) if m.tool_calls }}{% endfor %}",
            "usable; it refuses tool calls (the chat template refuses messages[0:4]: not 4)",
        ),
    ],
)
def test_a_template_is_said_to_take_calls_and_to_be_stable(template: str, text: str, tmp_path: Path) -> None:
    """Catches a template that spoils reuse, or refuses calls, passing; and the reason of another turn, or another
    warning, in place of its own."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO_DIR / name)
    (tmp_path / "chat_template.jinja").write_text(template)
    given = {"model": str(tmp_path), "template_kwargs": '{"mood": 1}'}  # which is another warning
    assert finding("template", **given).text.startswith(text)


@table(
    "name, warnings, text",
    [
        (None, None, "can be written; none given"),
        ("new", None, "{} can be written (made)"),
        ("old", None, "{} can be written"),
        ("old", ["a", "store X: b"], "store X: b; fix: give --store a folder that this user can write"),
        ("old", [], "store {}: it is read-only; fix: give --store a folder that this user can write"),
    ],
)
def test_a_store_is_said_to_take_states_or_not(
    name: str | None, warnings: list[str] | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a folder that was made in silence, a store that nothing can be written to passing, and one left open."""
    (tmp_path / "old").mkdir()
    closed: list[bool] = []

    def read_only(path: Path, warn: Callable[[str], None]) -> Any:
        for sentence in warnings or ():
            warn(sentence)
        return closing(SimpleNamespace(is_read_only=True, close=lambda: closed.append(True)))

    if warnings is not None:
        monkeypatch.setattr("apcbatch.store.Store.open", read_only)
    folder = None if name is None else str(tmp_path / name)
    assert finding("store", **({"store": folder} if folder else {})).text == text.format(folder)
    assert closed == ([] if warnings is None else [True])


@table(
    "tolerance, difference",
    [
        (doctor.SCAN_TOLERANCE, 0.0),
        (doctor.SCAN_TOLERANCE, 1e-2),
        (doctor.SCAN_TOLERANCE, float("nan")),
        (0.1, 0.08),
        (0.1, 2.0),
    ],
)
def test_a_scan_is_compared_with_the_reference(
    tolerance: float, difference: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a scan that is off, or that gives no numbers, being called equal; a state that is not compared; and a
    difference that is not measured by the largest number, which is between 2 and 16 here."""
    monkeypatch.setattr(doctor, "SCAN_TOLERANCE", tolerance)
    scan = cpu.selective_scan

    def off(*arguments: Any) -> torch.Tensor:
        y = scan(*arguments)
        arguments[8][2] += difference  # the snapshot
        return y

    monkeypatch.setattr(cpu, "selective_scan", off)
    found = finding("kernels").text
    assert found.startswith(
        "the scan of 17 tokens equals" if difference in (0, 0.08) else "the compiled scan differs from"
    )


def test_every_check_is_made_and_each_failure_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that ends the others, one that is left out, and a failure without a fix."""
    raised = (None, doctor.CheckFailed("a", "b"), UsageError("c"), None, OSError("d"), None, ValueError("e"), None,
              None, ImportError("f"), RuntimeError("g"))  # fmt: skip
    errors = dict(zip(CHECKS, raised, strict=True))

    def check_of(error: Exception | None) -> Callable[..., str]:
        def check(*arguments: Any) -> str:
            if error is not None:
                raise error
            return "good"

        return check

    for name, error in errors.items():
        monkeypatch.setattr(doctor, name, check_of(error))
    config: Any = SimpleNamespace(device="cpu", gpus=1, store=None, tools=None)
    found = [(one.name, one.ok, one.text) for one in doctor.examine(config)]
    again = f"; fix: {doctor.REINSTALL}"
    assert found == [
        ("python", True, "good"), ("torch", False, "a; fix: b"), ("extension", False, "c"),
        ("threads", True, "good"), ("kernels", False, "d" + again), ("cuda", True, "good"),
        ("model", False, "e" + again), ("memory", True, "good"),
        ("ends", True, "good"), ("template", False, "f" + again), ("store", False, "g" + again),
    ]  # fmt: skip
