"""The acceptance cases of reuse through the planner, and real conversations."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from apcbatch.plan.planner import Planner
from apcbatch.plan.tree_shape import ORDERS
from tests.effort import table, tries
from tests.plan.plan_oracle import Dataset, dataset, make_plan, numbers

PREFIX, LONG, TAIL = numbers(1000, 1), numbers(2000, 2), numbers(400, 5)
IMAGES = [token for image in range(1, 5) for token in [image] * 700]
AGENT = IMAGES + numbers(3382 - len(IMAGES) - len(TAIL), 6) + TAIL
NEXT = AGENT[:1700] + [AGENT[1700] % 999 + 1] + numbers(4584 - 1701 - len(TAIL), 7) + TAIL


@table("prompts, resumed", [
    # the same prompt again: its last token is always computed, and no other
    *(([numbers(length, length)] * 3, [0, length - 1, length - 1]) for length in (1, 2, 15, 16, 17, 1000, 1024, 1025)),
    # a prefix that each follower finds; forks in the middle of a prompt; an agent whose prompts change in their middle
    ([PREFIX + [1001 + i] + numbers(99, 10 + i) for i in range(5)], [0, 1000, 1000, 1000, 1000]),
    ([LONG, *(LONG[:1500] + [1001 + i] + numbers(499, 20 + i) for i in range(4))], [0, 1500, 1500, 1500, 1500]),
    ([AGENT, AGENT, NEXT, NEXT], [0, 3381, 1700, 4583]),
])  # fmt: skip
def test_where_the_prompts_of_a_case_resume(prompts: list[list[int]], resumed: list[int]) -> None:
    """Catches a plan that computes a token too many, or reuse that begins at the ends of prompts alone."""
    assert [todo.resume_at for todo in make_plan(dataset(*prompts), Planner(544, "file")).requests] == resumed


def read_words(path: Path, num_conversations: int | None = None) -> Dataset:
    """Every assistant turn as a request, tokenised by words; the tools and the messages before it are its prompt."""
    numbers_of: dict[str, int] = {}

    def words(text: str) -> list[int]:
        return [numbers_of.setdefault(word, len(numbers_of)) for word in re.findall(r"\s*\w+|\s*[^\w\s]+", text)]

    data = Dataset([], [], path.name)
    for conversation, line in enumerate(path.read_text(encoding="utf-8").splitlines()[:num_conversations]):
        record = json.loads(line)
        tokens = words(json.dumps(record.get("tools", [])))
        ends = []
        for message in record["messages"]:
            if message["role"] == "assistant":
                ends.append(len(tokens))
            tokens += words(json.dumps(message))
        shared = np.array(tokens, np.int32)
        data.prompts += [shared[:end] for end in ends if end]
        data.conversations += [conversation] * sum(end > 0 for end in ends)
    return data


@pytest.mark.slow
@pytest.mark.data
def test_tau_bench(shared_data: Path) -> None:
    """Catches a plan of real agent conversations that computes a token twice, writes snapshots without a reader, or
    keeps ever more of them."""
    data = read_words(shared_data / "tau_bench.jsonl", tries(400))
    tree = data.tree()
    for order in ORDERS:
        plan = Planner(64, order).plan(tree)
        assert plan.snapshots_written == plan.snapshots_read
        assert plan.ideal_tokens == plan.cached_tokens
        assert plan.unique_tokens <= plan.computed_tokens <= plan.unique_tokens + len(data.prompts)
        assert order == "file" or plan.peak_live_snapshots <= (16 if order == "short first" else 64)
    for conversation in random.sample(data.conversations, 7):
        index = data.conversations.index(conversation)
        assert np.array_equal(tree.path_tokens(tree.end_node[index]), data.prompts[index])
