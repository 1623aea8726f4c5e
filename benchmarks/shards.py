"""What `--shard I/N` gives each process: how even the parts are, what is computed twice, what a line of others costs.

    python -m benchmarks.shards ../shared/data/tau_bench.jsonl examples/agents.jsonl

For each file and N: the largest shard's tokens over the mean, with 256 of each answer; the distinct tokens of the
shards' prompts together over those of all prompts, as runs compute them that no memory bounds; and the milliseconds of
processor time, helpers included, that a process with the demo model's tokenizer spends on a request that another shard
answers: reading its line twice, rendering and tokenising it once.
"""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import click

from apcbatch.config import Config
from apcbatch.data.chat.render import Renderer
from apcbatch.data.conversation import Conversation
from apcbatch.data.input.inputs import Inputs, find_inputs
from apcbatch.data.input.source import open_source
from apcbatch.job.feed import Feeder
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.shards import ShardLines
from apcbatch.model.locate import DEMO_DIR
from apcbatch.plan.prefix_tree import PrefixTree


class Elsewhere(ShardLines):
    """A shard that answers no line. found: the shard of each line."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.found: dict[int, int] = {}

    def take(self, line: int) -> int:
        self.found[line] = super().take(line)
        return -1


def spent_s() -> float:
    """Processor seconds of this process and of its helpers that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def divided(inputs: Inputs, config: Config, count: int) -> tuple[dict[int, int], float]:
    """The shard of each line, and the processor milliseconds of a process that answers none of them."""
    gc.collect()  # ends the helpers of earlier renderers, whose time counts then
    begin, renderer = spent_s(), Renderer.load(DEMO_DIR)
    shard = Elsewhere(f"1/{count}", config, open_source(inputs), renderer)
    feeder = Feeder(config, open_source(inputs), renderer, PreviousAnswers(), shard=shard)
    while not feeder.exhausted:
        feeder.next()
    found = shard.found
    del shard, feeder, renderer
    gc.collect()
    return found, 1000 * (spent_s() - begin)


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--counts", default="2,4,8", help="Numbers of shards.")
def main(files: tuple[Path, ...], counts: str) -> None:
    config = Config(max_tokens=256)
    print("| | requests | shards | largest over mean | computed over one process's | ms a request |")
    print("|---|--:|--:|--:|--:|--:|")
    for file in files:
        inputs, renderer = find_inputs([str(file)]), Renderer.load(DEMO_DIR)
        records = [record for record in open_source(inputs) if isinstance(record, Conversation)]
        prompts = {record.line: renderer.render(record).prompts for record in records}
        num_requests = sum(map(len, prompts.values()))
        del renderer
        for count in map(int, counts.split(",")):
            found, ms = divided(inputs, config, count)
            trees, whole, answers = [PrefixTree() for _ in range(count)], PrefixTree(), [0] * count
            for line, rendered in prompts.items():
                answers[found[line]] += len(rendered) * config.max_tokens
                for prompt in rendered:
                    trees[found[line]].add(prompt.token_ids, line)
                    whole.add(prompt.token_ids, line)
            loads = [tree.unique_tokens + answer for tree, answer in zip(trees, answers, strict=True)]
            even = max(loads) * count / sum(loads)
            again = sum(tree.unique_tokens for tree in trees) / whole.unique_tokens
            print(f"| {file.stem} | {num_requests:,} | {count} | {even:.3f} | {again:.3f} | {ms / num_requests:.2f} |")


if __name__ == "__main__":
    main()
