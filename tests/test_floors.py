"""The package's floors: every import goes downward, and the light floors stay free of heavy libraries."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "apcbatch"
FLOORS = {name: floor for floor, names in enumerate((
    "address errors foreign_options option_values version regular_files process display tools testing",
    "answer types config_file prefix fingerprint layout formats config draft_sources sampling cores resolution",
    "plan store data drafts", "kernels", "model", "engine", "cluster", "job", "llm tuning report", "cli",
)) for name in names.split()}  # fmt: skip
PACKAGES = {name for name, floor in FLOORS.items() if floor >= 2}  # on the same floor they are strangers to each other
NO_TORCH = {name for name, floor in FLOORS.items() if floor < 3} | {"cli", "report"}
LIGHT_TESTS = ("tests/store", "tests/data", "tests/drafts", "tests/plan", "tests/test_cores.py", "tests/test_prefix.py",
               "tests/test_layout.py", "tests/test_floors.py")  # fmt: skip
ROOMS = ("tokenization", "output", "grammar", "chat input")  # of data, lowest first; its top modules are below them
WHO_MAY = {"_C": {"kernels", "drafts"}, "_CUDA": {"kernels"}}


@functools.cache
def parts_and_imports() -> list[tuple[Path, str, set[str], set[str]]]:
    """(file, its part of the package, parts it imports, top-level libraries it imports), for every module."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        part = relative.parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        own, libraries = set(), set()
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{relative}: relative import; write it in full"
                names = [node.module or ""]
                if node.module == "apcbatch":
                    names = [f"apcbatch.{alias.name}" for alias in node.names]
            for name in names:
                top, _, rest = name.partition(".")
                if top == "apcbatch" and rest:
                    own.add(rest.split(".")[0])
                elif top != "apcbatch":
                    libraries.add(top)
        found.append((relative, part, own, libraries))
    return found


def test_imports_go_downward() -> None:
    """Catches a floor that knows the one above it, and floor-2 packages that know each other."""
    violations = []
    for path, part, own, _ in parts_and_imports():
        for other in own - {part}:
            if other in WHO_MAY:
                if part not in WHO_MAY[other]:
                    violations.append(f"{path} imports apcbatch.{other}; only {sorted(WHO_MAY[other])} may")
            elif FLOORS[other] > FLOORS[part] or (FLOORS[other] == FLOORS[part] and part in PACKAGES):
                violations.append(f"{path} (floor {FLOORS[part]}) imports {other} (floor {FLOORS[other]})")
    assert not violations, "\n".join(violations)


def test_the_rooms_of_data_import_downward() -> None:
    """Catches a noun of data that its readers own, so that rendering and parsing import the reader of INPUT."""
    floors = {name: floor for floor, names in enumerate(ROOMS) for name in names.split()}
    data = PACKAGE / "data"
    violations = []
    for path in data.rglob("*.py"):
        room = path.relative_to(data).parts[0]
        for other in set(re.findall(r"^ *from apcbatch\.data\.(\w+)", path.read_text(), re.MULTILINE)) & floors.keys():
            if other != room and floors[other] >= floors.get(room, -1):
                violations.append(f"{path.relative_to(PACKAGE)} imports data.{other}")
    assert not violations, "\n".join(violations)


def test_light_floors_import_no_torch() -> None:
    """Catches torch, or text libraries in the wrong place, creeping into floors that must not know them."""
    violations = [
        f"{path} imports {library}"
        for path, part, _, libraries in parts_and_imports()
        for library in libraries & {"torch"}
        if part in NO_TORCH
    ]
    violations += [
        f"{path} imports click; only cli may"
        for path, part, _, libraries in parts_and_imports()
        if "click" in libraries and part != "cli"
    ]
    assert not violations, "\n".join(violations)


def test_every_module_says_what_it_is() -> None:
    """Catches a file without a docstring."""
    silent = [
        str(p) for p in PACKAGE.rglob("*.py") if p.stat().st_size and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent, silent


@pytest.mark.effort(3)
@pytest.mark.slow
def test_the_light_floors_tests_need_no_torch() -> None:
    """Fault: a helper or a fixture imports torch, so that the tests of store, data and prefix cannot even be collected
    where torch is not installed. (`make test-light` runs them there.)"""
    code = (
        "import sys, pytest\n"
        "sys.modules['torch'] = None\n"
        "sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", code, *LIGHT_TESTS]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_tests_import_transformers_only_as_their_oracle() -> None:
    """Fault: a module of tests imports transformers at its top, 2.5 CPU seconds in each process of pytest, though none
    or few of its tests compare with it."""
    files = [path for path in ROOT.joinpath("tests").rglob("*.py") if path.parent.name not in ("model", "fuzz")]
    found = [path for path in files if re.search(r"^(from|import) transformers\b", path.read_text(), re.MULTILINE)]
    assert found == [ROOT / "tests" / "test_demo_model.py"], found


def test_help_and_names_need_no_torch() -> None:
    """Catches a heavy import at start-up, which makes --help slow, or one of `import apcbatch` or of its names."""
    code = (
        "import sys; before = set(sys.modules); import apcbatch.cli.program\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'pyarrow', 'numpy', 'tqdm', 'yaml', 'sqlite3',\n"
        "    'tokenizers'} & set(sys.modules) - before\n"
        "assert not heavy, heavy\n"
        "from apcbatch import LLM, Answer; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
