"""The copies of the tree, in which every run works, one for each run at a time: the checkout itself is only read."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tools.mutants import touched
from tools.mutants.sites import Mutant
from tools.mutants.touched import Touched
from tools.mutants.warm import Run

NOT_TO_LEARN = ("tests/browser/", "tests/ray/")  # they run the package in processes that record nothing
SHARED = Path("shared")  # the real conversations, beside a checkout; without them, the tests marked `data` are skipped
RUNS_OF_A_JOB = 4  # of those that learn: a job that has finished one takes the next
MOST_TEST_SECONDS = 90.0  # of tests that are tried on a change, by what they take without one

Work = TypeVar("Work")


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
        code = [path for path in self.files if path.startswith("apcbatch/") and path.endswith(".py")]
        self._sources = {path: (root / path).read_text(encoding="utf-8") for path in code}  # before later edits
        self._trees = [work / f"tree{number}" for number in range(jobs)]
        compiled = [str(built.relative_to(root)) for built in root.glob("apcbatch/*.so")]
        for tree in self._trees:
            shutil.rmtree(tree, ignore_errors=True)
            for path in [*self.files, *compiled]:
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / path, tree / path)
        beside = work / SHARED
        beside.unlink(missing_ok=True)
        if (root.parent / SHARED).is_dir():
            beside.symlink_to(root.parent / SHARED)

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

        def begin(work: tuple[Mutant, int, list[str]], tree: Path) -> Run:
            mutant, _, tests = work
            (tree / mutant.path).write_text(mutant.code(self._sources[mutant.path]), encoding="utf-8")
            return Run(tree, tests, known.seconds)

        untested: list[Mutant] = []  # each is reported in its turn, so that the first outcomes are a fair sample too

        def tested() -> Iterator[tuple[Mutant, int, list[str]]]:
            for mutant in mutants:
                touching = known.of(mutant)
                if tests := _within(MOST_TEST_SECONDS, touching, known.seconds):
                    yield mutant, len(touching), tests
                else:
                    untested.append(mutant)

        def survived() -> Iterator[Outcome]:
            while untested:
                yield self._outcome(untested.pop(0), {"outcome": "passed", "test": ""}, 0, 0, 0.0)

        for (mutant, count, tests), run, result in self._side_by_side(tested(), begin):
            (run.tree / mutant.path).write_text(self._sources[mutant.path], encoding="utf-8")
            yield self._outcome(mutant, result, len(tests), count, time.monotonic() - run.began)
            yield from survived()
        yield from survived()

    def _run_the_suite(self) -> Touched:
        records = self._work / "records"
        shutil.rmtree(records, ignore_errors=True)

        def begin(files: list[str], tree: Path) -> Run:
            folder = records / files[0]
            folder.mkdir(parents=True)
            settings = touched.settings(folder)
            return Run(tree, files, plugins=(touched.PLUGIN,), options=(), settings=settings)

        folders: list[tuple[Path, Path]] = []
        for files, run, result in self._side_by_side(self._parts(), begin):
            folders.append((run.tree, records / files[0]))
            if result["outcome"] == "timeout" or not any(folders[-1][1].glob(touched.TESTS)):
                raise SystemExit(f"{result['test']} ends the run of the tree as it is; see {run.folder / 'output'}")
        return touched.gather(folders)

    def _parts(self) -> list[list[str]]:
        """The files of tests, folder by folder, in parts of about the same length."""
        names = [path for path in self.files if path.startswith("tests/") and Path(path).match("test_*.py")]
        sizes = {path: (self._root / path).stat().st_size for path in names if not path.startswith(NOT_TO_LEARN)}
        most = sum(sizes.values()) / (RUNS_OF_A_JOB * len(self._trees))
        parts: dict[int, list[str]] = {}
        before = 0
        for path, size in sizes.items():
            parts.setdefault(int((before + size / 2) / most), []).append(path)
            before += size
        return list(parts.values())

    def _side_by_side(
        self, queue: Iterable[Work], begin: Callable[[Work, Path], Run]
    ) -> Iterator[tuple[Work, Run, dict[str, str]]]:
        """Run one piece of work in each tree at a time; each with what came of it, as it ends. The tree is used again
        when the next is asked for."""
        free, busy, left = list(self._trees), list[tuple[Work, Run]](), iter(queue)
        try:
            while True:
                for work in itertools.islice(left, len(free)):
                    run = begin(work, free.pop())
                    run.start()
                    busy.append((work, run))
                if not busy:
                    return
                time.sleep(0.05)
                for entry in list(busy):
                    if (result := entry[1].poll()) is not None:
                        busy.remove(entry)
                        yield *entry, result
                        free.append(entry[1].tree)
        finally:
            for _, run in busy:
                run.end()

    def _outcome(self, mutant: Mutant, result: dict[str, str], tried: int, touching: int, seconds: float) -> Outcome:
        word = {"passed": "survived", "failed": "killed", "timeout": "timeout"}[result["outcome"]]
        diff = mutant.diff(self._sources[mutant.path])
        place = (mutant.path, mutant.line, mutant.operator)
        return Outcome(*place, diff, word, result["test"], tried, touching, round(seconds, 1))


def _within(most: float, tests: list[str], seconds: dict[str, float]) -> list[str]:
    """The first of the tests, as many as fit the time."""
    chosen, total = [], 0.0
    for test in tests:
        if total + seconds[test] <= most:
            chosen.append(test)
            total += seconds[test]
    return chosen
