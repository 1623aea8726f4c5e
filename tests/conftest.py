"""Shared fixtures: tiny random checkpoints of the supported families, and the folder of real conversations."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import apcbatch  # noqa: F401  (before torch: it settles how threads wait)
from tests.effort import VARIABLE, is_full, pairwise, tries
from tests.helpers import own_helpers, shared_helpers  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("PYTHONUNBUFFERED", None)  # a child that does not flush must not look as if it did


def pytest_addoption(parser: pytest.Parser) -> None:
    """--effort sizes what the tests draw and try; --seed repeats what they drew."""
    group = parser.getgroup("apcbatch")
    group.addoption("--effort", type=int, default=1, help="Sizes draws, seeds and budgets; 10 is full.")
    group.addoption("--seed", type=int, help="Repeat the draws of an earlier run, which names its seed at its end.")


def pytest_configure(config: pytest.Config) -> None:
    """Draw the run's seed. Where there is a CUDA device, what does not ask for it runs on the CPU, as elsewhere."""
    if config.option.seed is None:
        drawn = getattr(config, "workerinput", {}).get("seed")
        config.option.seed = random.SystemRandom().randrange(1 << 31) if drawn is None else drawn
    os.environ[VARIABLE] = str(config.option.effort)
    settings.register_profile("effort", max_examples=tries(200), deadline=None)
    settings.load_profile("effort")
    random.seed(config.option.seed)  # for what is drawn while tests are collected
    os.environ["APCBATCH_MAX_TOKENS"] = "128"
    if _why_no_cuda() is None:
        os.environ["APCBATCH_DEVICE"] = "cpu"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Give a process of pytest-xdist the run's seed."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed `random` and torch, from which every test draws, by the run's seed and the test's name."""
    random.seed(f"{item.config.option.seed} {item.nodeid}")
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(random.getrandbits(31))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Name the seed that repeats what was drawn."""
    terminalreporter.write_line(f"the draws of this run again: --seed {config.option.seed}")


@pytest.fixture(autouse=True)
def signals() -> None:
    """A test begins with the signals of a terminal's shell: a command line that ends leaves its signals ignored, and a
    process inherits what is ignored."""
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs the shared conversations, or a CUDA device, where there are none."""
    reasons = {
        "data": None if SHARED_DATA.is_dir() else "the shared conversations are not here",
        "cuda": _why_no_cuda(),
    }
    for item in items:
        for marker, reason in reasons.items():
            asks = item.get_closest_marker(marker) or (marker == "data" and "shared_data" in item.fixturenames)
            if reason and asks:  # not item.keywords: those hold folder names too
                item.add_marker(pytest.mark.skip(reason=reason))

    if not is_full():
        _leave_some(config, items)


def _leave_some(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the markers `effort`, `drawn` and `pairwise` leave to more effort; on CUDA, no row of a pairwise
    table."""
    tables: dict[tuple, list[pytest.Item]] = defaultdict(list)
    dropped = set()
    for item in items:
        least = item.get_closest_marker("effort")
        if least is not None and config.option.effort < least.args[0]:
            dropped.add(item)
        elif hasattr(item, "callspec"):
            tables[item.parent, item.originalname].append(item)
    for table in tables.values():
        count = table[0].get_closest_marker("drawn")
        if count is not None:
            draw = random.Random(f"{config.option.seed} {table[0].nodeid}")
            left = draw.sample(table, min(len(table), count.args[0] * config.option.effort))
        elif table[0].get_closest_marker("pairwise") and not table[0].get_closest_marker("cuda"):
            chosen = pairwise([[repr(value) for value in item.callspec.params.values()] for item in table])
            left = [table[index] for index in chosen]
        else:
            continue
        dropped.update(set(table).difference(left))
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`isa`: the plainest instruction set and the best one of this processor; at full effort each that it has."""
    if "isa" in metafunc.fixturenames:
        from apcbatch.kernels.processor import available_isas

        names = available_isas()
        metafunc.parametrize("isa", names if is_full() else [*names[:1], *names[1:][-1:]], indirect=True)


@pytest.fixture
def every_isa() -> Iterator[list[str]]:
    """The names of all instruction sets of this processor; the one in use is set again after the test."""
    from apcbatch.kernels.processor import available_isas, isa, set_isa

    before = isa()
    yield available_isas()
    set_isa(before)


@pytest.fixture
def isa(request: pytest.FixtureRequest, every_isa: list[str]) -> str:
    """An instruction set, in use during the test."""
    from apcbatch.kernels.processor import set_isa

    set_isa(request.param)
    return request.param


def _why_no_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "there is no CUDA device here"
    if importlib.util.find_spec("apcbatch._CUDA") is None:
        return "the CUDA kernels were not built (nvcc was not found, or APCBATCH_CUDA=0)"
    return None


@pytest.fixture
def memory():
    """The file system behind memory://, empty."""
    import fsspec

    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


@pytest.fixture
def one_thread():
    """For passes of a few tokens: more threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest):
    """torch's thread count, and with it the kernels'."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch):
    """stages(n): engines that are opened from now on have n stages, all of them on the CPU."""

    def spread(count: int) -> None:
        import torch

        devices = [torch.device("cpu")] * count
        monkeypatch.setattr("apcbatch.engine.parts.choose_devices", lambda device, gpus: devices)

    return spread


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real conversations."""
    return SHARED_DATA


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """make(name, seed=0, **overrides) -> folder of a tiny random checkpoint, made once per set of arguments."""
    from tests.tiny import save_tiny

    made: dict[tuple, Path] = {}

    def make(name: str, seed: int = 0, **overrides: object) -> Path:
        key = (name, seed, str(sorted(overrides.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"{name}-")
            save_tiny(made[key], name, seed, overrides)
        return made[key]

    return make
