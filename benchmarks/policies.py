"""What each policy restores, keeps and costs: `apcbatch run` over datasets, one table.

    python benchmarks/policies.py chats.jsonl --blocks 1,64 --orders file,auto --running 1,32 --out policies.json

Every run has --no-store, --max-tokens 1 and a process of its own. `none` has no blocks and one order, `all` and
`last` work in the order of the file, so that they run once for all --orders. The table has a row a run; the last line
is one JSON document. Exit status 1 where a run did not finish; error records are counted, and are no failure.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

POLICIES = ("none", "last", "all", "planned")
ORDERS = ("file", "auto")
FINISHED = (0, 3)  # 3: some requests are error records
MOST_WRITTEN_PER_READ = 1.05
COUNTS = (
    "requests", "ok", "errors", "prompt_tokens", "cached_tokens", "computed_tokens", "unique_tokens", "hit_rate",
    "ideal_hit_rate", "snapshots_written", "snapshots_read", "snapshots_for_later", "snapshots_evicted",
    "peak_live_snapshots",
)  # fmt: skip
COLUMNS = {  # heading: (what of a row, how it is shown)
    "requests": ("requests", ","),
    "errors": ("errors", ","),
    "prompt tokens": ("prompt_tokens", ","),
    "computed": ("computed_tokens", ","),
    "unique": ("unique_tokens", ","),
    "hit rate": ("hit_rate", ".2%"),
    "ideal": ("ideal_hit_rate", ".2%"),
    "written": ("snapshots_written", ","),
    "read": ("snapshots_read", ","),
    "written/read": ("written_per_read", ".2f"),
    "for later": ("snapshots_for_later", ","),
    "evicted": ("snapshots_evicted", ","),
    "peak live": ("peak_live_snapshots", ","),
    "plan s": ("plan_s", ".2f"),
    "prefill s": ("prefill_s", ".2f"),
    "wall s": ("wall_s", ".2f"),
    "wall/none": ("wall_over_none", ".3f"),
}


@dataclass(frozen=True)
class Case:
    """One row of the table. block: None for `none`."""

    dataset: str
    policy: str
    block: int | None
    order: str
    running: int


@dataclass(frozen=True)
class Runs:
    """How runs are made. further: options of `apcbatch run` that all of them have. threads: None for all cores."""

    paths: dict[str, Path]
    further: list[str]
    threads: int | None

    def measure(self, case: Case) -> dict[str, Any]:
        """One run in a process of its own: its exit code, seconds and summary, or its last words."""
        with tempfile.TemporaryDirectory() as folder:
            summary = Path(folder) / "summary.json"
            command = [*self._command(case), "-o", str(Path(folder) / "out.jsonl"), "--summary", str(summary)]
            threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
            begin = time.perf_counter()
            done = subprocess.run(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | threads,
            )
            wall_s = time.perf_counter() - begin
            if done.returncode in FINISHED and summary.exists():
                return {"exit": done.returncode, "wall_s": wall_s, "summary": json.loads(summary.read_text())}
        return {"exit": done.returncode, "wall_s": wall_s, "failure": done.stderr[-2000:]}

    def _command(self, case: Case) -> list[str]:
        command = [sys.executable, "-m", "apcbatch", "run", str(self.paths[case.dataset])]
        command += ["--policy", case.policy, "--order", case.order, "--max-running", str(case.running)]
        command += ["--block-size", str(case.block)] if case.block is not None else []
        return [*command, "--no-store", "--max-tokens", "1", "-q", "--progress", "none", *self.further]


def cases_of(
    datasets: Iterable[str], policies: list[str], blocks: list[int], orders: list[str], running: list[int]
) -> list[Case]:
    """Every row, each once."""
    cases = {}
    for dataset, lanes, block, policy in itertools.product(datasets, running, blocks, policies):
        for order in orders if policy == "planned" else ["file"]:
            cases[Case(dataset, policy, None if policy == "none" else block, order, lanes)] = None
    return list(cases)


class Table:
    """What was measured so far. With `path`, kept in that file after each run; a later call goes on from there."""

    def __init__(self, cases: list[Case], settings: dict[str, Any], path: Path | None) -> None:
        self._cases, self._settings, self._path = cases, settings, path
        self._measured: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
        if path is not None and path.exists():
            self._take_up(json.loads(path.read_text()))

    def _take_up(self, document: dict[str, Any]) -> None:
        if document["settings"] != self._settings:
            raise click.ClickException(f"--out {self._path} is of runs with other options; give another file")
        for row in document["rows"]:
            case = Case(**row["case"])
            self._measured.setdefault(case, []).extend(one for one in row["runs"] if "summary" in one)

    def num_runs(self, case: Case) -> int:
        return len(self._measured[case])

    def add(self, case: Case, measured: dict[str, Any]) -> None:
        """Note one run, and keep it."""
        self._measured[case].append(measured)
        if self._path is not None:
            beside = self._path.with_name(self._path.name + ".part")
            beside.write_text(json.dumps(self.document()) + "\n")
            beside.replace(self._path)

    def document(self) -> dict[str, Any]:
        """Settings and rows: each case's runs, counts, median seconds and verdicts."""
        rows = [{"case": asdict(case), **row_of(runs), "runs": runs} for case, runs in self._measured.items() if runs]
        for row in rows:
            row["verdicts"] = verdicts_of(row, rows)
            row["wall_over_none"] = wall_over_none(row, rows)
        return {"settings": self._settings, "rows": rows}


def row_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of the first run that finished, medians of the seconds of all, and how many failed."""
    finished = [run for run in runs if "summary" in run]
    row: dict[str, Any] = {"finished": len(finished), "failed": len(runs) - len(finished)}
    if finished:
        summaries = [run["summary"] for run in finished]
        row |= {name: summaries[0][name] for name in COUNTS}
        row["counts_agree"] = all(one[name] == row[name] for one in summaries for name in COUNTS)
        row["written_per_read"] = written_per_read(row)
        for name in ("prefill", "plan", "total"):
            row[f"{name}_s"] = statistics.median(one["seconds"][name] for one in summaries)
        row["wall_s"] = statistics.median(run["wall_s"] for run in finished)
    return row


def written_per_read(row: dict[str, Any]) -> float | None:
    """Snapshots written for each that was restored; None where none was restored."""
    return row["snapshots_written"] / row["snapshots_read"] if row["snapshots_read"] else None


def verdicts_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, bool]:
    """What `planned` promises and a row can show. `all` is that of the same dataset, block and lanes, had it room."""
    case = row["case"]
    if case["policy"] != "planned" or not row["finished"]:
        return {}
    verdicts = {"written_per_read": row["snapshots_written"] <= MOST_WRITTEN_PER_READ * row["snapshots_read"]}
    if case["block"] == 1:
        verdicts["computes_unique"] = row["computed_tokens"] <= row["unique_tokens"] + row["ok"]
    everything = same_run(rows, case, policy="all", order="file")
    if everything is not None and not everything["snapshots_evicted"]:
        verdicts["hit_rate_of_all"] = row["cached_tokens"] == everything["cached_tokens"]
    return verdicts


def wall_over_none(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """The median wall time over that of `none`; None where `none` was not run."""
    cold = same_run(rows, row["case"], policy="none", block=None, order="file")
    return row["wall_s"] / cold["wall_s"] if cold is not None and row["finished"] else None


def same_run(rows: list[dict[str, Any]], case: dict[str, Any], **but: Any) -> dict[str, Any] | None:
    """The row of a finished case that differs in nothing but `but`."""
    wanted = case | but
    return next((row for row in rows if row["case"] == wanted and row["finished"]), None)


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """The table."""
    head = ["dataset", "policy", "order", "block", "running", *COLUMNS, "verdict"]
    lines = [head, ["---"] * 3 + ["---:"] * (len(head) - 4) + ["---"], *map(cells_of, rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def cells_of(row: dict[str, Any]) -> list[str]:
    """One row's cells; the last says which promises are broken, `ok` where all are kept, `-` where there are none."""
    case = row["case"]
    cells = [case["dataset"], case["policy"], case["order"], str(case["block"] or "-"), str(case["running"])]
    for name, form in COLUMNS.values():
        value = row.get(name)
        cells.append("-" if value is None else format(value, form))
    wrong = [name for name, holds in row["verdicts"].items() if not holds]
    wrong += ["counts differ between runs"] * (not row.get("counts_agree", True))
    wrong += [f"{row['failed']} failed"] * bool(row["failed"])
    return [*cells, ", ".join(wrong) if wrong else "ok" if row["verdicts"] else "-"]


def run_all(table: Table, cases: list[Case], runs: Runs, alternate: int, jobs: int) -> None:
    """Every case `alternate` times, each round in the opposite order of the one before; as many at once as `jobs`."""
    todo = []
    for number in range(alternate):
        todo += [case for case in cases[:: -1 if number % 2 else 1] if table.num_runs(case) <= number]
    with ThreadPoolExecutor(jobs) as executor:
        futures = {executor.submit(runs.measure, case): case for case in todo}
        for number, future in enumerate(as_completed(futures), start=1):
            case, measured = futures[future], future.result()
            table.add(case, measured)
            words = f"exit {measured['exit']}, {measured['wall_s']:.1f} s"
            name = " ".join(str(value) for value in asdict(case).values() if value is not None)
            print(f"[{number}/{len(todo)}] {name}: {words}", file=sys.stderr, flush=True)


class CommaList(click.ParamType):
    """Values of one type with commas between."""

    name = "list"

    def __init__(self, of: click.ParamType) -> None:
        self._of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        return [self._of.convert(part, param, ctx) for part in value.split(",")]


NUMBERS = CommaList(click.IntRange(1))


def skipped(case: Case, patterns: tuple[str, ...]) -> bool:
    """Whether NAME:POLICY or NAME:POLICY:BLOCK names the case."""
    names = {f"{case.dataset}:{case.policy}", f"{case.dataset}:{case.policy}:{case.block}"}
    return not names.isdisjoint(patterns)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("datasets", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--policies", type=CommaList(click.Choice(POLICIES)), default=",".join(POLICIES))
@click.option("--blocks", type=NUMBERS, default="64", help="Block sizes.")
@click.option("--orders", type=CommaList(click.Choice(ORDERS)), default="auto", help="Of planned: file,auto.")
@click.option("--running", type=NUMBERS, default="32", help="Values of --max-running.")
@click.option("--alternate", default=1, type=click.IntRange(1), help="Rounds; every other one goes backwards.")
@click.option("--jobs", default=1, type=click.IntRange(1), help="Runs at a time; more than 1 spoils the seconds.")
@click.option("--threads", type=click.IntRange(1), help="Threads of each run.")
@click.option("--skip", multiple=True, metavar="NAME:POLICY[:BLOCK]", help="Leave out; NAME is the file's stem.")
@click.option("--with", "further", default="", metavar="OPTIONS", help="More for `apcbatch run`: '--limit 30'.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep the JSON document here; goes on from what is there.")
def main(datasets: tuple[Path, ...], skip: tuple[str, ...], further: str, out: Path | None, **options: Any) -> None:
    """Run each policy over each DATASET and print what it restored, kept and took."""
    paths = {path.stem: path for path in datasets}
    cases = cases_of(paths, *(options[name] for name in ("policies", "blocks", "orders", "running")))
    cases = [case for case in cases if not skipped(case, skip)]
    settings = {"with": further, "jobs": options["jobs"], "threads": options["threads"]}
    table = Table(cases, settings, out)
    runs = Runs(paths, shlex.split(further), options["threads"])
    run_all(table, cases, runs, options["alternate"], options["jobs"])
    document = table.document()
    print(as_markdown(document["rows"]))
    print(json.dumps(document))
    sys.exit(any(row["failed"] for row in document["rows"]))


if __name__ == "__main__":
    main()
