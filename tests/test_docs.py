"""What the pages promise is there: each test, file and option that they name; their Python runs."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from apcbatch.cli.program import cli
from apcbatch.config import ENV_CONFIG, ENV_DEBUG, OPTIONS, env_name
from apcbatch.model.families import families
from tests.effort import table
from tests.fuzz.child import CLOCK_S
from tools import chromium
from tools.make_cli_docs import commands
from tools.output_keys import SUMMARY

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")
PATH = re.compile(r"`((?:apcbatch|benchmarks|configs|csrc|docs|examples|tests|tools|\.ci)/[\w./-]*)(?:::([\w.]+))?`")
ANCHOR = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
OTHER_PROGRAMS = ("hf ", "jq ")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
VARIABLE = re.compile(r"\bAPCBATCH_[A-Z_]+")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


@functools.cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@table("page", PAGES)
def test_the_tests_that_a_page_names_are_there(page: Path) -> None:
    """Fault: a test is renamed or dropped, and a page continues promising what nothing checks."""
    missing = []
    for file, name in TEST.findall(page.read_text()):
        path = ROOT / file
        if not path.is_file() or (name and name not in functions(path)):
            missing.append(f"{file}::{name}" if name else file)
    assert not missing


@functools.cache
def names(path: Path) -> set[str]:
    """The classes, functions and constants of a module, and `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{one.name}" for one in inner if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@table("page", PAGES)
def test_the_paths_that_a_page_names_are_there(page: Path) -> None:
    """Fault: a module moves or a name changes, and a page sends its reader to the old place."""
    missing = []
    for file, name in PATH.findall(page.read_text()):
        path = ROOT / file
        if not path.exists() or (name and not file.startswith("tests/") and name not in names(path)):
            missing.append(f"{file}::{name}" if name else file)
    assert not missing


@table("page", ["README.md", "docs/operating.md", "docs/caching.md"])
def test_the_flags_that_a_page_names_are_there(page: str) -> None:
    """Fault: an option is renamed, and a page tells its reader to give the old one."""
    options = [one for _, command in commands(cli, "apcbatch") for one in command.params]
    flags = {flag for one in options for flag in (*one.opts, *one.secondary_opts)}
    lines = (ROOT / page).read_text().splitlines()
    named = {flag for line in lines if not line.startswith(OTHER_PROGRAMS) for flag in FLAG.findall(line)}
    assert named - flags == set()


@table("page", PAGES)
def test_the_variables_that_a_page_names_are_read(page: Path) -> None:
    """Fault: a variable that nothing reads; apcbatch refuses it."""
    of_the_build = VARIABLE.findall((ROOT / "setup.py").read_text())
    known = {
        ENV_CONFIG,
        ENV_DEBUG,
        chromium.ENV_BROWSER,
        *of_the_build,
        *(env_name(name) for name in (*OPTIONS, "no_store")),
    }
    assert set(VARIABLE.findall(page.read_text())) - known == set()


def test_the_instruction_sets_on_the_page_are_those_of_the_option() -> None:
    """Fault: an instruction set is added, and operators do not hear of it."""
    page = (ROOT / "docs" / "operating.md").read_text().partition("| `APCBATCH_ISA` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(OPTIONS["isa"].choices)


def test_the_tree_of_the_readme_is_the_tree() -> None:
    """Fault: a folder is added or goes, and the first page shows another house."""
    tree = (ROOT / "README.md").read_text().partition("## What is where")[2].split("```")[1]
    shown: set[str] = set()
    above = ""
    for indent, name in re.findall(r"^( *)([\w.]+/?) ", tree, re.MULTILINE):
        above = above if indent else name
        shown.add(above + name if indent else name)
    assert {name for name in shown if not (ROOT / name).exists()} == set()
    packages = {f"apcbatch/{path.parent.name}/" for path in (ROOT / "apcbatch").glob("*/__init__.py")}
    assert packages <= shown


def test_the_targets_on_the_page_are_those_of_make() -> None:
    """Fault: a target that no contributor hears of, or one that is gone."""
    page = (ROOT / "docs" / "contributing.md").read_text().partition("## Make targets")[2].partition("\n## ")[0]
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert targets and set(re.findall(r"^\| `make ([\w-]+)` \|", page, re.MULTILINE)) == set(targets[1].split())


def test_the_numbers_to_look_at_are_in_the_summary() -> None:
    """Fault: a number of the summary is renamed, and operators look for the old one."""
    page = (ROOT / "docs" / "operating.md").read_text().partition("## If a run goes wrong")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    assert len(named) > 10 and named - {key.path for key in SUMMARY} == set()


@table("page", PAGES)
def test_the_files_that_a_page_links_to_are_there(page: Path) -> None:
    """Fault: a page is renamed, and the links to it lead nowhere."""
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


@table("page", PAGES)
def test_the_headings_that_a_page_links_to_are_there(page: Path) -> None:
    """Fault: a heading is reworded, and the links to it lead to the top of a page."""
    missing = []
    for link, anchor in ANCHOR.findall(page.read_text()):
        headings = HEADING.findall((page.parent / link if link else page).read_text())
        if anchor not in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}:
            missing.append(f"{link}#{anchor}")
    assert not missing


def test_each_promise_names_its_tests() -> None:
    """Fault: a promise without the tests that keep it, or a method that says another size than it has."""
    promises, method = (ROOT / "docs" / "reliability.md").read_text().partition("## Promises")[2].split("## Method")
    assert [one for one in promises.split("\n### ")[1:] if "\nTests: `tests/" not in one] == []
    targets = sum(path.read_text().count("\ndef fuzz_") for path in (ROOT / "tests" / "fuzz").glob("*.py"))
    sizes = f"the {len(families())} families", f"{targets} targets", f"within {CLOCK_S:.0f} seconds"
    assert [size for size in sizes if size not in " ".join(method.split())] == []


EXAMPLES = [
    pytest.param(page, code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    if code.startswith(("from ", "import ")) and page.name != "README.md"  # tests/test_readme.py runs that one
]


def test_there_are_examples() -> None:
    """Fault: the examples are written in another way, and none of them is run."""
    assert len(EXAMPLES) >= 3


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), EXAMPLES)
def test_an_example_in_python_runs(page: Path, code: str, tmp_path: Path) -> None:
    """Fault: an argument is renamed, and the first thing that a reader copies fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


@pytest.mark.slow
def test_the_performance_pages_are_what_the_results_say(tmp_path: Path) -> None:
    """Fault: a figure is edited on the page, or new results do not reach it (run tools/make_performance_docs.py)."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    command = [sys.executable, str(ROOT / "tools" / "make_performance_docs.py"), "--docs", str(tmp_path)]
    subprocess.run(command, check=True, cwd=tmp_path)
    for page in ("reference/performance.md", "reference/performance-cuda-models.md"):
        assert (tmp_path / page).read_text() == (ROOT / "docs" / page).read_text()
