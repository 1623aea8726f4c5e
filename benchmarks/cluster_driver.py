"""What a run on a cluster costs the command itself: `apcbatch run` as it is, with simulated workers in place of Ray's.

    python -m benchmarks.cluster_driver ../shared/data --add

Reading, rendering, tokenising, planning, cutting, assigning, encoding requests, and writing OUT are the
product's, with its default window and look-ahead; the workers answer in virtual time. Figures are processor seconds of
the process and its helpers, less those of the simulated workers, so that other work on the machine does not count.
Those of the main thread, and its wall time, begin once the engine is open: they bound the requests that one command
serves. Ray's own calls and the pickling of messages are left out. `short` is 5,000 shuffled lines of 132 tokens, of
which 20 are new (tests/chats.py). --add puts the document into benchmarks/results/cluster.json, from which
`python tools/cluster_table.py` makes the page's tables.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from apcbatch.cli.program import main as apcbatch
from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.runtime import ClusterSettings, Hooks
from apcbatch.cluster.wire import encode_request
from apcbatch.errors import EXIT_OK, EXIT_REQUEST_ERRORS
from apcbatch.job import opening
from apcbatch.process import settle_collector
from apcbatch.types import Request, Result
from benchmarks.cluster import DATASETS, RESULTS
from tests.chats import forked_lines, write_lines
from tests.cluster.simulator import SimRuntime, Speeds

NAME, SHORT = "driver", "short"
SPEEDS = Speeds(2000.0, 1000.0, bytes_per_s=1e9, state_bytes=20 << 20)


def encoded(request: Request) -> Request:
    """A request as it is, for the simulated workers, after what the product does with it."""
    encode_request(request)
    return request


class MeasuredEngine(ClusterEngine):
    """spent_s: processor seconds of submit and step."""

    spent_s = 0.0

    def submit(self, request: Request) -> None:
        begin = time.thread_time()
        super().submit(request)
        self.spent_s += time.thread_time() - begin

    def step(self) -> list[Result]:
        begin = time.thread_time()
        results = super().step()
        self.spent_s += time.thread_time() - begin
        for result in results:
            result.token_ids = [100 + token % 1000 for token in result.token_ids]  # of the demo's vocabulary
        return results


def processor_s() -> float:
    """Of this process and the helpers that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def clocks() -> tuple[float, float]:
    """Processor seconds of this thread, and seconds."""
    return time.thread_time(), time.perf_counter()


def measured(path: Path, workers: int) -> dict[str, Any]:
    """One row: a run over all turns of a file."""
    engines: list[MeasuredEngine] = []
    opened_at: list[float] = []
    runtime = SimRuntime(SPEEDS)

    def open_engine(*_: object) -> MeasuredEngine:
        engines.append(MeasuredEngine(runtime, ClusterSettings(workers), Hooks(encoded)))
        opened_at.extend(clocks())
        return engines[0]

    was, opening._open_engine = opening._open_engine, open_engine
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.jsonl"
            if not path.exists():
                path = write_lines(Path(folder) / path.name, forked_lines(5000, shuffled=True))
            begin = processor_s()
            words = ("run", str(path), "-o", str(out), "--ray", "local", "--max-tokens", "32", "--progress", "none")
            assert apcbatch([*words, "-q"]) in (EXIT_OK, EXIT_REQUEST_ERRORS)  # ToolBench has ids twice
            total_s = processor_s() - begin - runtime.spent_s
            main_s, wall_s = (now - then - runtime.spent_s for now, then in zip(clocks(), opened_at, strict=True))
            requests = len(out.read_bytes().splitlines())
    finally:
        opening._open_engine = was
    own_s = engines[0].spent_s - runtime.spent_s
    return {
        "dataset": path.stem, "workers": workers, "requests": requests, "units": runtime.num_units,
        "makespan s": runtime.last_answer_s,
        "computed tokens": runtime.computed_tokens / requests,
        "command s / 1,000": 1000 * total_s / requests, "scheduling s / 1,000": 1000 * own_s / requests,
        "main thread s / 1,000": 1000 * main_s / requests, "wall s / 1,000": 1000 * wall_s / requests,
    }  # fmt: skip


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--workers", default="8,64", help="Numbers of workers.")
@click.option("--add", is_flag=True, help="Put the document into benchmarks/results/cluster.json.")
def main(folder: Path, workers: str, add: bool) -> None:
    settle_collector()  # as the command of a cluster does
    numbers = list(map(int, workers.split(",")))
    rows = [measured(folder / f"{name}.jsonl", number) for name in (*DATASETS, SHORT) for number in numbers]
    click.echo(json.dumps(rows, indent=1))
    if add:
        stored = json.loads(RESULTS.read_text(encoding="utf-8"))
        RESULTS.write_text(json.dumps(stored | {NAME: {"rows": rows}}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
