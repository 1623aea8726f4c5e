"""Run the checks of `apcbatch doctor`. Each returns its result as a text, or raises CheckFailed or CheckWarning."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apcbatch.config import Config
from apcbatch.cores import find_cores
from apcbatch.errors import ApcbatchError, RequestError
from apcbatch.model.locate import locate_model, note_of

if TYPE_CHECKING:
    from apcbatch.data.chat.render import Renderer

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
REINSTALL = "install apcbatch again: its wheel, or pip install --force-reinstall . where its source is"
SCAN_TOLERANCE = 1e-5


class CheckFailed(Exception):
    """Failed check. what: the fault. fix: advice that repairs it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; fix: {fix}")


class CheckWarning(Exception):
    """Raised by a check that passes, with advice on a state that makes most runs slower or worse."""


@dataclass(frozen=True)
class Finding:
    """One line of the report. is_warning: the check passed (ok is true), and text has advice."""

    name: str
    ok: bool
    text: str
    is_warning: bool = False


def examine(config: Config) -> Iterator[Finding]:
    """Run the checks and yield each finding as it comes. config: names the model, the device and the store."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", _python),
        ("torch", _torch),
        ("extension", lambda: _extension(config)),
        ("threads", _threads),
        ("kernels", _kernels),
        ("cuda", lambda: _cuda(config.device, config.gpus)),
        ("model", lambda: _model(config)),
        ("memory", lambda: _memory(config)),
        ("ends", lambda: _ends(config)),
        ("template", lambda: _template(config)),
        ("store", lambda: _store(config.store)),
        *([("tools", lambda: _tools(config))] if config.tools is not None else []),
    ]
    for name, check in checks:
        try:
            yield Finding(name, True, check())
        except CheckWarning as doubt:
            yield Finding(name, True, str(doubt), is_warning=True)
        except (CheckFailed, ApcbatchError) as error:
            yield Finding(name, False, str(error))
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            yield Finding(name, False, f"{error}; fix: {REINSTALL}")


def _tools(config: Config) -> str:
    """Load the factory of --tools in a worker process, and make an episode of an empty line."""
    from apcbatch.job.tool_workers import opened_workers

    with opened_workers(config, os.devnull, lambda sentence: None) as workers:
        assert workers is not None
        try:
            names = [tool["function"]["name"] for tool in workers.tools_for({}) or ()]
            made = f"the tools of an empty line's episode: {', '.join(names) or 'those of the line'}"
        except RequestError as error:
            made = f"of an empty line it makes no episode ({error.message})"
    return f"{config.tools} can be loaded; {made}"


def _python() -> str:
    if sys.version_info < OLDEST_PYTHON:
        raise CheckFailed(f"Python {platform.python_version()} is too old", "use Python 3.10 or newer")
    return f"{platform.python_version()}, {sys.executable}"


def _torch() -> str:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise CheckFailed(f"torch {torch.__version__} is too old", "pip install 'torch>=2.11'")
    return str(torch.__version__)


def _extension(config: Config) -> str:
    try:
        from apcbatch.engine.parts import use_processor
        from apcbatch.kernels.processor import isa
    except ImportError as error:
        raise CheckFailed(f"the compiled extension cannot be loaded ({error})", REINSTALL) from None
    use_processor(config)
    return f"instruction set {isa()}"


def _threads() -> str:
    """Report the threads of the CPU kernels, as `_extension` has set them, and the cores of the machine."""
    from apcbatch.kernels.processor import num_threads

    cores, count = find_cores(), num_threads()
    quota = "" if cores.quota is None else f", a quota of {cores.quota:g}"
    nodes = f"{cores.nodes} NUMA node" + ("s" if cores.nodes > 1 else "")
    found = f"{count} on {cores.physical} cores ({cores.logical} processors{quota}, {nodes})"
    pages = "" if cores.huge_pages is None else f", huge pages: {cores.huge_pages}"
    advice = cores.advice(count)
    if advice is not None:
        raise CheckWarning(f"{found}{pages}; {advice}")
    return found + pages


def _kernels() -> str:
    """Run a small scan with two sequences and a snapshot in the extension, and compare it with the reference."""
    import torch

    from apcbatch.kernels import reference
    from apcbatch.kernels.cpu.ops import ops
    from apcbatch.kernels.ragged import Ragged

    # Both start from a state of zeros; the state after 7 tokens of the second goes to slot 2.
    batch = Ragged(
        cu_seqlens=torch.tensor([0, 5, 17]),
        initial_slots=torch.tensor([-1, -1]),
        final_slots=torch.tensor([0, 1]),
        snapshot_cu=torch.tensor([0, 0, 1]),
        snapshot_positions=torch.tensor([7]),
        snapshot_slots=torch.tensor([2]),
    )
    draw = torch.Generator().manual_seed(0)
    tokens, channels, states = 17, 24, 16
    x, dt, z = (torch.randn(tokens, channels, generator=draw) for _ in range(3))
    B, C = (torch.randn(tokens, states, generator=draw) for _ in range(2))
    A = -torch.rand(states, channels, generator=draw) - 0.5
    D, dt_bias = torch.randn(channels, generator=draw), torch.randn(channels, generator=draw)
    outputs = []
    for kernels in (ops, reference):
        state = torch.zeros(3, states, channels)
        y = kernels.selective_scan(x, dt, A, B, C, D, z, dt_bias, state, batch)
        outputs.append(torch.cat([y.flatten(), state.flatten()]))
    difference = float((outputs[0] - outputs[1]).abs().max())
    if not difference <= SCAN_TOLERANCE * float(outputs[1].abs().max()):
        raise CheckFailed(f"the compiled scan differs from the reference by {difference:.2g}", REINSTALL)
    return f"the scan of {tokens} tokens equals the reference to {difference:.1g}"


def _cuda(device: str, gpus: int) -> str:
    import torch

    from apcbatch.kernels.cuda import extension as cuda

    if not torch.cuda.is_available():
        if device == "cuda" or gpus > 1:
            raise CheckFailed("torch finds no CUDA device", "give --device cpu, or see what nvidia-smi says")
        return "no device; the CPU is used"
    try:
        cuda.extension()
    except RuntimeError as error:
        if device == "cuda" or gpus > 1:
            raise CheckFailed(f"{error}", "build them, or give --device cpu") from None
        return f"{torch.cuda.get_device_name()}, without kernels in this build (`make demo CUDA=1`); the CPU is used"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if gpus > len(names):
        raise CheckFailed(
            f"--gpus {gpus}: {len(names)} GPUs are visible to this process",
            "give as many at most, or see what nvidia-smi and CUDA_VISIBLE_DEVICES say",
        )
    if len(names) == 1:
        return names[0]
    if len(set(names)) == 1:
        return f"{len(names)} x {names[0]}; --gpus {len(names)} spreads a model over them"
    return f"{', '.join(names)}; --gpus takes those of one kind"


def _model(config: Config) -> str:
    """Load every tensor and generate one token."""
    from apcbatch.engine.engine import Engine
    from apcbatch.engine.memory import LEAST_POOL_BYTES
    from apcbatch.engine.parts import EngineOptions
    from apcbatch.model.adapter import about_weights
    from apcbatch.model.families import family_of, load_model_config
    from apcbatch.model.weight_files import WeightFiles, ignored_tensors
    from apcbatch.types import Request

    said: list[str] = []
    options = EngineOptions(
        dtype=config.dtype,
        weights=config.weights,
        device=config.device,
        gpus=config.gpus,
        policy="none",
        max_running=1,
        pool_size_bytes=LEAST_POOL_BYTES,
        adapter=config.adapter,
    )
    with closing(Engine(config.model, options, warn=said.append)) as engine:
        result = next(iter(engine.run([Request("doctor", [0], max_tokens=1)])))
        if result.error is not None:
            raise CheckFailed(f"model {config.model} does not answer: {result.error}", "check the checkpoint's files")
    found = f"{config.model} is complete, {engine.dtype}, fingerprint {engine.fingerprint[:12]}"
    folder = locate_model(config.model)
    with WeightFiles(folder) as files:
        ignored = ignored_tensors(files, family_of(load_model_config(folder)).ignored)
    return "; ".join(filter(None, (found, *about_weights(folder, config), *said, ignored, note_of(config.model))))


def _memory(config: Config) -> str:
    """Return a text about the memory that a run with the model may need. Raises UsageError if there is less."""
    from apcbatch.engine.memory import MemoryPlan
    from apcbatch.model.devices import choose_devices, memory_of
    from apcbatch.model.encoded import kind_of
    from apcbatch.model.families import load_model_config, state_layout
    from apcbatch.model.own_dtype import with_own_dtype

    config, folder = with_own_dtype(config), locate_model(config.model)
    model, devices = load_model_config(folder), choose_devices(config.device, config.gpus)
    limit = memory_of(devices)
    plan = MemoryPlan.of(config, state_layout(model, config.dtype), model, folder, kind_of(devices))
    plan.check(*limit)
    return plan.needs(limit[0])


def _ends(config: Config) -> str:
    from apcbatch.data.tokenization.no_tokenizer import load_any_tokenizer

    tokenizer = load_any_tokenizer(locate_model(config.model), lambda sentence: None)
    if tokenizer.end_tokens.outside or not tokenizer.eos_token_ids:
        raise CheckWarning(tokenizer.ends())
    return tokenizer.ends()


def _template(config: Config) -> str:
    """Describe the chat template. Raises CheckWarning if the model has none, or if its prompts change from day to
    day."""
    from apcbatch.data.chat.render import Renderer
    from apcbatch.data.chat.template import NO_TEMPLATE
    from apcbatch.data.template_options import ChatOptions

    warnings: list[str] = []
    options = ChatOptions.of(config)
    renderer = Renderer.load(locate_model(config.model), warn=warnings.append, options=options)
    if renderer.template.is_fallback:
        raise CheckWarning(NO_TEMPLATE)
    stability = _stability(renderer, warnings)
    if changes := list(renderer.template.changes(options.is_dated)):
        raise CheckWarning("; ".join([stability, *changes]))
    return stability


def _stability(renderer: Renderer, warnings: list[str]) -> str:
    """Render a short conversation with a tool call, without and with thoughts, and say whether each prompt begins with
    the previous one. warnings: those of the renderer so far; it appends to them."""
    from apcbatch.data.conversation import Conversation

    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "tide"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is a tide?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "the rise and fall of the sea"},
        {"role": "assistant", "content": "The rise and fall of the sea."},
        {"role": "user", "content": "Thanks."},
    ]
    rendered = renderer.render(Conversation("doctor", 1, messages, None, "messages"))
    if rendered.failures:
        return f"usable; it refuses tool calls ({rendered.failures[0].error.message})"
    if not rendered.prefix_stable:
        return f"usable, but not prefix-stable, so turns reuse less of each other: {warnings[-1]}"
    for message in messages:
        if message["role"] == "assistant":
            message["reasoning_content"] = "The user asks for a definition."
    if renderer.render(Conversation("doctor", 1, messages, None, "messages")).drops_thoughts:
        given = json.dumps(renderer.keeps_thoughts_with)
        return (
            "prefix-stable, but it takes earlier thoughts out of the history: what follows them is computed again"
            + f"; --template-kwargs '{given}' keeps them" * bool(renderer.keeps_thoughts_with)
        )
    return "prefix-stable: each turn's prompt begins with the one before"


def _store(folder: str | None) -> str:
    from apcbatch.store import Store

    warnings: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(folder) if folder else Path(scratch) / "store"
        is_new = not os.path.exists(path)
        with Store.open(path, warn=warnings.append) as store:
            if store.is_read_only:
                reason = warnings[-1] if warnings else f"store {path}: it is read-only"
                raise CheckFailed(reason, "give --store a folder that this user can write")
    return f"{folder} can be written" + (" (made)" if is_new else "") if folder else "can be written; none given"
