"""Changes the code in small ways, one at a time, and tells which changes the tests do not notice: `make mutants`.

    python -m tools.mutants [--sample 300] [--seed 1] [--jobs 2] [--only apcbatch/store] [--json FILE]

The changes are a fixed sample (sites.py) of those that cosmic-ray's operators, and the removal of a statement, can make
in the folders of FOLDERS. One run of the suite learns which tests touch which line; a change is then tried on these
tests alone, until the first one fails. Every run works in a copy of the tree, never in the checkout itself.
A change that makes a test hang counts as noticed. Exit status 1 if fewer than --least percent were noticed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from tools.mutants import touched
from tools.mutants.sites import Mutant, sample
from tools.mutants.touched import Touched
from tools.mutants.warm import Run, import_libraries

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("engine", "store", "job", "data", "model", "prefix.py")
NOT_HERE = {  # why
    "apcbatch/model/graphs.py": "runs on a CUDA device only",
    "apcbatch/job/bench/": "measures: what it gives are times",
}
SUITES = (  # for the run that learns: two halves of about the same time
    ["tests/job", "tests/store"],
    ["tests", "--ignore=tests/job", "--ignore=tests/store", "--ignore=tests/soak", "--ignore=tests/kernels"],
)
MOST_TEST_SECONDS = 90.0  # of tests that are tried on a change, by what they take without one


@dataclass(frozen=True)
class Outcome:
    """outcome: `killed`, `timeout`, `survived`. by: the test that noticed. tried: how many tests could have."""

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
    """The copies of the tree, one for each run at a time."""

    def __init__(self, work: Path, jobs: int) -> None:
        self.work, self.jobs = work, jobs
        self.files = [path for path in _tracked() if (ROOT / path).is_file()]
        self.trees = [work / f"tree{number}" for number in range(max(jobs, len(SUITES)))]
        for tree in self.trees:
            shutil.rmtree(tree, ignore_errors=True)
            for path in [*self.files, *(str(built.relative_to(ROOT)) for built in ROOT.glob("apcbatch/*.so"))]:
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, tree / path)

    def learn(self) -> Touched:
        """Which tests touch which line; from the last time, if nothing has changed since."""
        digest = touched.digest(ROOT, [path for path in self.files if path.startswith(("apcbatch/", "tests/", "tools/mutants/"))])
        known = touched.load(digest, self.work)
        if known is not None:
            return known
        click.echo("one run of the suite, to learn which tests touch which line ...", err=True)
        found = Touched({}, {}, [])
        waiting = list(zip(self.trees, SUITES, strict=False))
        runs = []
        for tree, suite in waiting:
            folder = tree.with_name(f"{tree.name}-cover")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            run = Run(tree, suite, plugins=("tools.mutants.contexts",), options=(), settings=_recording(folder))
            run.start()
            runs.append((run, folder))
        for run, folder in runs:
            while run.poll() is None:
                time.sleep(0.2)
            found = touched.merge(found, touched.gather(run.tree, folder))
        touched.save(found, digest, self.work)
        return found

    def try_all(self, mutants: Iterable[Mutant], known: Touched) -> Iterator[Outcome]:
        """What came of each, as it ends."""
        free, busy = self.trees[: self.jobs], {}
        for mutant in mutants:
            tests, touching = _chosen(known.of(mutant), known.seconds)
            if not tests:
                yield _outcome(mutant, {"outcome": "passed", "test": ""}, 0, touching, 0.0)
                continue
            while not free:
                yield from self._ended(busy, free)
            tree = free.pop()
            (tree / mutant.path).write_text(mutant.code((ROOT / mutant.path).read_text(encoding="utf-8")))
            run = Run(tree, tests, known.seconds)
            run.start()
            busy[run.pid] = (run, mutant, touching)
        while busy:
            yield from self._ended(busy, free)

    def _ended(self, busy: dict[int, tuple[Run, Mutant, int]], free: list[Path]) -> Iterator[Outcome]:
        time.sleep(0.05)
        for pid, (run, mutant, touching) in list(busy.items()):
            result = run.poll()
            if result is not None:
                del busy[pid]
                shutil.copy2(ROOT / mutant.path, run.tree / mutant.path)
                free.append(run.tree)
                yield _outcome(mutant, result, len(run.tests), touching, time.monotonic() - run.began)


def _tracked() -> list[str]:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(filter(None, done.stdout.split("\0")))


def _recording(folder: Path) -> dict[str, str]:
    rules = Path(__file__).with_name("cover.rc")
    return {
        "MUTANTS_COVER": str(folder), "COVERAGE_FILE": str(folder / "coverage"), "COVERAGE_PROCESS_START": str(rules)
    }  # fmt: skip


def _chosen(tests: list[str], seconds: dict[str, float]) -> tuple[list[str], int]:
    """As many as fit the time, and how many there are."""
    chosen, total = [], 0.0
    for test in tests:
        if total + seconds[test] <= MOST_TEST_SECONDS:
            chosen.append(test)
            total += seconds[test]
    return chosen, len(tests)


def _outcome(mutant: Mutant, result: dict[str, str], tried: int, touching: int, seconds: float) -> Outcome:
    word = {"passed": "survived", "failed": "killed", "timeout": "timeout"}[result["outcome"]]
    diff = mutant.diff((ROOT / mutant.path).read_text(encoding="utf-8"))
    return Outcome(
        mutant.path, mutant.line, mutant.operator, diff, word, result["test"], tried, touching, round(seconds, 1)
    )


def _table(outcomes: list[Outcome]) -> str:
    rows = [f"{'folder':<8}{'tried':>7}{'killed':>8}{'timeout':>9}{'survived':>10}{'noticed':>9}"]
    for folder in (*FOLDERS, ""):
        own = [one for one in outcomes if one.path.startswith(f"apcbatch/{folder}")]
        count = {word: sum(one.outcome == word for one in own) for word in ("killed", "timeout", "survived")}
        share = f"{1 - count['survived'] / len(own):.1%}" if own else "-"
        name = folder or "all"
        rows.append(f"{name:<8}{len(own):>7}" + "{killed:>8}{timeout:>9}{survived:>10}".format(**count) + f"{share:>9}")
    return "\n".join(rows)


@click.command(help=__doc__)
@click.option("--sample", "size", default=300, show_default=True, help="how many changes")
@click.option("--seed", default=1, show_default=True, help="which ones")
@click.option("--jobs", default=2, show_default=True, help="runs at a time")
@click.option("--only", default="apcbatch/", help="of the sample, those in files whose path begins so")
@click.option("--work", type=click.Path(path_type=Path), default=ROOT / "build" / "mutants", help="folder for the copies")
@click.option("--json", "report", type=click.Path(path_type=Path), help="where to write all outcomes")
@click.option("--least", default=92.0, show_default=True, help="percent that must be noticed")
def main(size: int, seed: int, jobs: int, only: str, work: Path, report: Path | None, least: float) -> None:
    bench = Bench(work, jobs)
    places = tuple(f"apcbatch/{folder}" for folder in FOLDERS)
    code = [path for path in bench.files if path.endswith(".py") and path.startswith(places)]
    code = [path for path in code if not path.startswith(tuple(NOT_HERE))]
    mutants = [mutant for mutant in sample(ROOT, code, size, seed) if mutant.path.startswith(only)]
    import_libraries()
    known = bench.learn()
    click.echo(f"{len(known.seconds)} tests; left out, as they fail on the tree as it is: {known.bad}", err=True)
    outcomes: list[Outcome] = []
    for one in bench.try_all(mutants, known):
        outcomes.append(one)
        click.echo(f"{len(outcomes)}/{len(mutants)} {one.outcome} {one.path}:{one.line} {one.operator} {one.by}", err=True)
        if report is not None:
            report.write_text(json.dumps({"seed": seed, "sample": size, "mutants": [*map(asdict, outcomes)]}, indent=1))
    for one in sorted(outcomes, key=lambda one: (one.path, one.line)):
        if one.outcome == "survived":
            click.echo(f"\n{one.path}:{one.line} {one.operator} survived {one.tried} of {one.touching} tests\n{one.diff}")
    click.echo("\n" + _table(outcomes))
    survived = sum(one.outcome == "survived" for one in outcomes)
    sys.exit(100 * survived > (100 - least) * len(outcomes))


if __name__ == "__main__":
    main()
