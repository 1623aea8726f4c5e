"""The copies of the tree, in which every run works, one for each run at a time: the checkout itself is only read."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.mutants import touched
from tools.mutants.sites import Mutant
from tools.mutants.touched import Touched
from tools.mutants.warm import Run

SUITES = (  # for the run that learns: two halves of about the same time
    ["tests/job", "tests/store"],
    ["tests", *(f"--ignore=tests/{folder}" for folder in ("job", "store", "soak", "kernels"))],
)
MOST_TEST_SECONDS = 90.0  # of tests that are tried on a change, by what they take without one


@dataclass(frozen=True)
class Outcome:
    """outcome: `killed`, `timeout`, `survived`. by: the test that noticed. tried: of the tests that touch the code."""

    path: str
    line: int
    operator: str
    diff: str
    outcome: str
    by: str
    tried: int
    touching: int
    seconds: float


class Bench:
    """Runs of one checkout's tests. work: a folder for the copies and for what was learnt; jobs: runs at a time."""

    def __init__(self, root: Path, work: Path, jobs: int) -> None:
        self._root, self._work = root, work
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True)
        self.files = sorted(path for path in done.stdout.split("\0") if (root / path).is_file())
        self._trees = [work / f"tree{number}" for number in range(max(jobs, len(SUITES)))]
        self._free = self._trees[:jobs]
        self._busy: list[tuple[Run, Mutant, int]] = []
        compiled = [str(built.relative_to(root)) for built in root.glob("apcbatch/*.so")]
        for tree in self._trees:
            shutil.rmtree(tree, ignore_errors=True)
            for path in [*self.files, *compiled]:
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / path, tree / path)

    def learn(self) -> Touched:
        """Which tests touch which line; from the last time, if nothing has changed since."""
        of_tests = ("apcbatch/", "tests/", "tools/mutants/")
        digest = touched.digest(self._root, [path for path in self.files if path.startswith(of_tests)])
        known = touched.load(digest, self._work)
        if known is None:
            known = self._run_the_suite()
            touched.save(known, digest, self._work)
        return known

    def try_all(self, mutants: Iterable[Mutant], known: Touched) -> Iterator[Outcome]:
        """What came of each, as it ends."""
        for mutant in mutants:
            touching = known.of(mutant)
            tests = _within(MOST_TEST_SECONDS, touching, known.seconds)
            if not tests:
                yield self._outcome(mutant, {"outcome": "passed", "test": ""}, 0, 0, 0.0)
                continue
            while not self._free:
                yield from self._ended()
            tree = self._free.pop()
            (tree / mutant.path).write_text(mutant.code(self._source(mutant)), encoding="utf-8")
            run = Run(tree, tests, known.seconds)
            run.start()
            self._busy.append((run, mutant, len(touching)))
        while self._busy:
            yield from self._ended()

    def _run_the_suite(self) -> Touched:
        runs = []
        for tree, suite in zip(self._trees, SUITES, strict=False):
            folder = tree.with_name(f"{tree.name}-cover")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            settings = touched.settings(folder)
            runs.append((Run(tree, suite, plugins=(touched.PLUGIN,), options=(), settings=settings), folder))
            runs[-1][0].start()
        found = Touched({}, {}, [])
        for run, folder in runs:
            while (result := run.poll()) is None:
                time.sleep(0.2)
            if result["outcome"] == "timeout":
                raise SystemExit(f"{result['test']} hangs on the tree as it is; see {run.folder / 'output'}")
            found = touched.merge(found, touched.gather(run.tree, folder))
        return found

    def _ended(self) -> Iterator[Outcome]:
        time.sleep(0.05)
        for entry in list(self._busy):
            run, mutant, touching = entry
            result = run.poll()
            if result is not None:
                self._busy.remove(entry)
                shutil.copy2(self._root / mutant.path, run.tree / mutant.path)
                self._free.append(run.tree)
                seconds = time.monotonic() - run.began
                yield self._outcome(mutant, result, len(run.tests), touching, seconds)

    def _outcome(self, mutant: Mutant, result: dict[str, str], tried: int, touching: int, seconds: float) -> Outcome:
        word = {"passed": "survived", "failed": "killed", "timeout": "timeout"}[result["outcome"]]
        diff = mutant.diff(self._source(mutant))
        place = (mutant.path, mutant.line, mutant.operator)
        return Outcome(*place, diff, word, result["test"], tried, touching, round(seconds, 1))

    def _source(self, mutant: Mutant) -> str:
        return (self._root / mutant.path).read_text(encoding="utf-8")


def _within(most: float, tests: list[str], seconds: dict[str, float]) -> list[str]:
    """The first of the tests, as many as fit the time."""
    chosen, total = [], 0.0
    for test in tests:
        if total + seconds[test] <= most:
            chosen.append(test)
            total += seconds[test]
    return chosen
