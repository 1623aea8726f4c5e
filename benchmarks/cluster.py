"""A cluster in virtual time: the real planner and the real driver over simulated workers, on real conversations.

    python -m benchmarks.cluster ../shared/data --repeat 10 --workers 1,2,8,64,512

For each dataset, repeated with prefixes of its own each time, and each number of workers: the makespan over
its lower bound max(total / n, longest path); the computed tokens over the plan's own and over its unique tokens; what
travelled; the driver's own CPU seconds for 1,000 requests. Then seeded kills of workers, nodes and the driver: lines
lost, doubled or different. The last line is one JSON document, which --add puts
into benchmarks/results/cluster.json under a name. The workers' speeds are options; a request's answer takes up to
--max-tokens.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from apcbatch.process import settle_collector
from tests.cluster.runs import Planned, check_answers, first, lower_bound, num_sent, planned, repeated, run
from tests.cluster.simulator import Speeds, Trouble
from tests.plan.plan_oracle import Dataset
from tests.plan.test_plan_cases import read_words

RESULTS = Path(__file__).with_name("results") / "cluster.json"
DATASETS = ("tau_bench", "toolbench_dfs")
AHEAD = {"ahead_requests": 1 << 20, "ahead_tokens": 1 << 40}
HEADINGS = (
    "dataset", "block", "workers", "requests", "makespan s", "over bound", "over plan", "over unique", "units",
    "states sent", "GB sent", "own s / 1,000",
)  # fmt: skip


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--datasets", default=",".join(DATASETS), help="Their names.")
@click.option("--repeat", default=10, help="How many times over each dataset is taken.")
@click.option("--least-requests", default=0, help="Repeat each until it has this number of requests.")
@click.option("--workers", default="1,2,8,64,512", help="Numbers of workers.")
@click.option("--blocks", default="1", help="Tokens between the positions at which a plan may cut.")
@click.option("--max-tokens", default=32, help="Of an answer.")
@click.option("--prefill", default=2000.0, help="Tokens a second of a worker.")
@click.option("--decode", default=1000.0, help="Tokens a second of a worker, all answers together.")
@click.option("--state-mib", default=20.0, help="Of a state.")
@click.option("--bandwidth", default=1e9, help="Bytes a second to another node.")
@click.option("--object-gib", default=1.0, help="Of states, for each worker.")
@click.option("--kills", default=200, help="Runs with seeded kills.")
@click.option("--add", default="", help="The name of the document in benchmarks/results/cluster.json.")
def main(
    folder: Path,
    datasets: str,
    repeat: int,
    least_requests: int,
    workers: str,
    blocks: str,
    max_tokens: int,
    prefill: float,
    decode: float,
    state_mib: float,
    bandwidth: float,
    object_gib: float,
    kills: int,
    add: str,
) -> None:
    settle_collector()  # as the command of a cluster does
    speeds = Speeds(prefill, decode, bytes_per_s=bandwidth, state_bytes=int(state_mib * (1 << 20)))
    click.echo("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    rows: list[dict[str, Any]] = []
    for name in datasets.split(","):
        data = read_words(folder / f"{name}.jsonl")
        times = max(repeat, -(-least_requests // len(data.prompts)))
        for block in map(int, blocks.split(",")):
            chosen = planned(repeated(data, times), block, max_tokens)
            for number in map(int, workers.split(",")):
                rows.append(measured(name, block, chosen, number, speeds, object_gib))
                click.echo("| " + " | ".join(shown(value) for value in rows[-1].values()) + " |")
    document: dict[str, Any] = {"speeds": asdict(speeds), "object_gib": object_gib, "rows": rows}
    if kills:
        document["kills"] = killed(first(read_words(folder / "tau_bench.jsonl"), 16), kills, speeds)
        click.echo(", ".join(f"{value} {name}" for name, value in document["kills"].items()))
    click.echo(json.dumps(document))
    if add:
        stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(stored | {add: document}, indent=1) + "\n", encoding="utf-8")


def measured(name: str, block: int, chosen: Planned, number: int, speeds: Speeds, object_gib: float) -> dict[str, Any]:
    """One row of the table."""
    speeds = replace(speeds, node_bytes=int(object_gib * (1 << 30)))
    outcome = run(chosen.requests, number, speeds, audited=False, **AHEAD)
    check_answers(outcome, chosen.requests)
    runtime = outcome.runtime
    bound = max(lower_bound(chosen.requests, speeds, number))
    values = (
        name, block, number, len(chosen.requests), runtime.last_answer_s, runtime.last_answer_s / bound,
        runtime.computed_tokens / chosen.computed_tokens, runtime.computed_tokens / chosen.plan.unique_tokens,
        runtime.num_units, num_sent(outcome.engine), runtime.bytes_sent / 1e9,
        1000 * outcome.own_s / len(chosen.requests),
    )  # fmt: skip
    return dict(zip(HEADINGS, values, strict=True))


def shown(value: Any) -> str:
    """A cell of the table."""
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def killed(data: Dataset, num_runs: int, speeds: Speeds) -> dict[str, int]:
    """Runs in which workers, nodes and the driver die, and what became of the lines. Requests that two kills happened
    to hit are run again, as with --retry-errors."""
    requests = planned(data).requests
    longest = run(requests, 4, speeds).runtime.last_answer_s
    kills = retried = 0
    for seed in range(num_runs):
        source = random.Random(seed)
        left, answered, dies = requests, set[str](), seed % 4 == 0
        while left:
            times = tuple((source.uniform(0, longest), source.random() < 0.4) for _ in range(source.randint(1, 3)))
            trouble = Trouble(times, twice=0.05, delay_s=0.02, seed=seed)
            number, stop = source.choice((1, 2, 4, 8)), source.randrange(1, len(left)) if dies else None
            outcome = run(left, number, speeds, trouble, per_node=source.choice((1, 2)), stop_after=stop)
            check_answers(outcome, [request for request in left if request.id in outcome.by_id])
            assert dies or len(outcome.by_id) == len(left), f"seed {seed}: lines are lost"
            kills += outcome.runtime.num_killed + dies
            retried += sum(result.error is not None for result in outcome.results)
            answered |= {result.id for result in outcome.results if result.error is None}
            left, dies = planned(data, skip=frozenset(map(int, answered))).requests, False
    return {"kills": kills, "runs": num_runs, "requests retried": retried, "lost, doubled or different": 0}


if __name__ == "__main__":
    main()
