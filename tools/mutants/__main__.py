"""Changes the code in small ways, one at a time, and tells which changes the tests do not notice: `make mutants`.

    python -m tools.mutants [--sample 300] [--seed 1] [--jobs N] [--only apcbatch/store]

The changes are a fixed sample (sites.py) of those that cosmic-ray's operators, and the removal of a statement, can make
in the folders of FOLDERS. One run of the suite learns which tests touch which line; a change is then tried on these
tests alone, those of the module's own folder first and the quickest of them first, until one fails. A change that makes
a test hang, or take all memory, counts as noticed. Exit status 1 if fewer than --least percent were noticed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click

from tools.mutants.bench import Bench, Outcome
from tools.mutants.sites import sample
from tools.mutants.warm import import_libraries

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"
CORES = min(16, len(os.sched_getaffinity(0)))
FOLDERS = (
    *("engine", "plan", "store", "job", "tuning", "data", "drafts", "model", "kernels", "cluster", "report", "cli"),
    *("llm.py", "prefix.py"),
)
NOT_HERE = {  # why
    "apcbatch/model/graphs.py": "runs on a CUDA device only",
    "apcbatch/kernels/cuda/": "runs on a CUDA device only",
    "apcbatch/cluster/ray_": "runs in processes of Ray",
}


def files_to_change(files: list[str]) -> list[str]:
    """The modules that the sample is drawn from."""
    places = tuple(f"apcbatch/{folder}" for folder in FOLDERS)
    inside = [path for path in files if path.endswith(".py") and path.startswith(places)]
    return [path for path in inside if not path.startswith(tuple(NOT_HERE))]


def table(outcomes: list[Outcome]) -> str:
    """How many were noticed, by folder."""
    rows = [f"{'folder':<10}{'tried':>7}{'killed':>8}{'timeout':>9}{'survived':>10}{'noticed':>9}"]
    for folder in (*FOLDERS, ""):
        own = [one.outcome for one in outcomes if one.path.startswith(f"apcbatch/{folder}")]
        killed, timeout, survived = (own.count(word) for word in ("killed", "timeout", "survived"))
        share = f"{1 - survived / len(own):.1%}" if own else "-"
        rows.append(f"{folder or 'all':<10}{len(own):>7}{killed:>8}{timeout:>9}{survived:>10}{share:>9}")
    return "\n".join(rows)


@click.command(help=__doc__)
@click.option("--sample", "size", default=300, show_default=True, help="how many changes")
@click.option("--seed", default=1, show_default=True, help="which ones")
@click.option("--jobs", default=CORES, show_default="a core each, at most 16", help="runs at a time")
@click.option("--only", default="apcbatch/", help="of the sample, those in files whose path begins so")
@click.option(
    "--work",
    type=click.Path(path_type=Path, resolve_path=True),
    default=WORK,
    help="for the copies, and for outcomes.json",
)
@click.option("--least", default=92.0, show_default=True, help="percent that must be noticed")
def main(size: int, seed: int, jobs: int, only: str, work: Path, least: float) -> None:
    bench = Bench(ROOT, work, jobs)
    mutants = [one for one in sample(ROOT, files_to_change(bench.files), size, seed) if one.path.startswith(only)]
    import_libraries()
    click.echo("learning which tests touch which line ...", err=True)
    known = bench.learn()
    click.echo(f"{len(known.seconds)} tests pass; left out, as they fail on the tree as it is: {known.bad}", err=True)
    outcomes: list[Outcome] = []
    for one in bench.try_all(mutants, known):
        outcomes.append(one)
        place = f"{one.path}:{one.line} {one.operator}"
        click.echo(f"{len(outcomes)}/{len(mutants)} {one.outcome} {place} {one.by}", err=True)
        content = {"seed": seed, "sample": size, "mutants": [asdict(done) for done in outcomes]}
        (work / "outcomes.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    for one in sorted(outcomes, key=lambda one: (one.path, one.line)):
        if one.outcome == "survived":
            click.echo(f"\n{one.path}:{one.line} {one.operator}, {one.tried} of {one.touching} tests\n{one.diff}")
    click.echo("\n" + table(outcomes))
    survived = sum(one.outcome == "survived" for one in outcomes)
    sys.exit(100 * survived > (100 - least) * len(outcomes))


if __name__ == "__main__":
    main()
