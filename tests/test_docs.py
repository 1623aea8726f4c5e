"""What the pages promise is there: each test, file and option that they name; their Python runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")
NAMED = re.compile(r"::\w|^by hand: `python -m tests\.")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tests_that_a_page_names_are_there(page: Path) -> None:
    """Fault: a test is renamed or dropped, and a page goes on promising what nothing checks."""
    missing = []
    for file, name in TEST.findall(page.read_text()):
        path = ROOT / file
        if not path.is_file() or (name and name not in functions(path)):
            missing.append(f"{file}::{name}" if name else file)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_links_to_are_there(page: Path) -> None:
    """Fault: a page is renamed, and the links to it lead nowhere."""
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


def test_each_row_of_the_faults_names_its_test() -> None:
    """Fault: a promise about a fault without the test that keeps it, or a row that lost a column."""
    page = (ROOT / "docs" / "reliability.md").read_text().partition("## Faults")[2]
    tables = re.findall(r"^\|.*(?:\n\|.*)*", page, re.MULTILINE)
    assert len(tables) == page.count("\n### ") > 0
    for table in tables:
        head, rule, *faults = (
            [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table.splitlines()
        )
        assert head == ["fault", "how many tried", "what is promised", "the test"]
        assert set(rule) == {"---"}
        assert faults
        bad = [cells for cells in faults if len(cells) != 4 or not all(cells) or not NAMED.search(cells[3])]
        assert not bad


EXAMPLES = [
    pytest.param(page, code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    if code.startswith(("from ", "import "))
]


def test_there_are_examples() -> None:
    """Fault: the examples are written in another way, and none of them is run."""
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize(("page", "code"), EXAMPLES)
def test_an_example_in_python_runs(page: Path, code: str, tmp_path: Path) -> None:
    """Fault: an argument is renamed, and the first thing that a reader copies fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
