"""Which tests touch a line, learnt from one run of the suite, and kept until the code or a test changes."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData
from coverage.exceptions import DataError

from tools.mutants.sites import Mutant

RECORD = "touched.json"
PLUGIN = "tools.mutants.contexts"
TESTS = "tests-*.json"


@dataclass
class Touched:
    """tests: by file and line. seconds: by test, those that pass. bad: those that do not, and are not used."""

    tests: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]
    bad: list[str]

    def of(self, mutant: Mutant) -> list[str]:
        """The tests that can notice, those of the module's own folder first, and the quickest of them first.

        What runs on import, outside of any test (""), is noticed by any test of the module."""
        by_line = self.tests.get(mutant.path, {})
        lines: Iterable[int] = [line for line in mutant.lines if line in by_line]
        if mutant.on_import or any("" in by_line[line] for line in lines):
            lines = by_line
        found = {test for line in lines for test in by_line[line] if test in self.seconds}
        own = mutant.path.replace("apcbatch/", "tests/", 1).rpartition("/")[0] + "/"
        return sorted(found, key=lambda test: (not test.startswith(own), self.seconds[test], test))


def settings(folder: Path) -> dict[str, str]:
    """The environment of a run under PLUGIN that records in a folder."""
    rules = Path(__file__).with_name("cover.rc")
    return {
        "MUTANTS_COVER": str(folder),
        "COVERAGE_FILE": str(folder / "coverage"),
        "COVERAGE_PROCESS_START": str(rules),
    }


def digest(root: Path, files: list[str]) -> str:
    """Of all that decides which test touches which line."""
    whole = hashlib.sha256()
    for path in files:
        whole.update(path.encode() + b"\0" + (root / path).read_bytes())
    return whole.hexdigest()


def gather(records: Iterable[tuple[Path, Path]]) -> Touched:
    """What the runs under `contexts` have recorded. records: the tree of each run, and the folder of its record."""
    tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    seconds: dict[str, float] = {}
    bad: set[str] = set()
    for root, folder in records:
        for file in folder.glob(TESTS):
            record = json.loads(file.read_text(encoding="utf-8"))
            seconds |= record["passed"]
            bad |= set(record["bad"])
        for file in folder.glob("coverage.*"):
            data = CoverageData(str(file))
            with suppress(DataError):  # its process was killed while it wrote
                data.read()
            for name in data.measured_files():
                if not Path(name).is_relative_to(root):
                    continue
                by_line = tests[str(Path(name).relative_to(root))]
                for line, names in data.contexts_by_lineno(name).items():
                    by_line[line] |= set(names)
    lists = {path: {line: sorted(names) for line, names in lines.items()} for path, lines in tests.items()}
    return Touched(lists, seconds, sorted(bad))


def save(touched: Touched, digest: str, folder: Path) -> None:
    content = {"digest": digest, "tests": touched.tests, "seconds": touched.seconds, "bad": touched.bad}
    (folder / RECORD).write_text(json.dumps(content), encoding="utf-8")


def load(digest: str, folder: Path) -> Touched | None:
    """What was saved, if it was for the same files."""
    if not (folder / RECORD).exists():
        return None
    content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    if content["digest"] != digest:
        return None
    tests = {path: {int(line): names for line, names in lines.items()} for path, lines in content["tests"].items()}
    return Touched(tests, content["seconds"], content["bad"])
