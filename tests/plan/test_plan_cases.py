"""The acceptance cases of reuse through the planner, and real conversations."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from apcbatch.plan.planner import Planner
from tests.effort import tries
from tests.plan.plan_oracle import Dataset, dataset, make_plan, numbers

ORDERS = ["auto", "file"]


def resumes(*prompts: list[int], order: str = "file") -> list[int]:
    return [todo.resume_at for todo in make_plan(dataset(*prompts), Planner(544, order)).requests]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 1000, 1024, 1025])
def test_the_same_prompt_again(length: int) -> None:
    """Catches a plan that resumes at the whole prompt, where one token is always computed, or computes more."""
    prompt = numbers(length, length)
    assert resumes(prompt, prompt, prompt) == [0, length - 1, length - 1]


def test_a_shared_stem() -> None:
    """Catches a stem that only the first follower finds."""
    stem = numbers(1000, 1)
    assert resumes(*[stem + [1001 + i] + numbers(99, 10 + i) for i in range(5)]) == [0, 1000, 1000, 1000, 1000]


def test_forks_in_the_middle() -> None:
    """Catches reuse that restarts from the end of a prompt only."""
    trunk = numbers(2000, 2)
    forks = [trunk[:1500] + [1001 + i] + numbers(499, 20 + i) for i in range(4)]
    assert resumes(trunk, *forks) == [0, 1500, 1500, 1500, 1500]


@pytest.mark.parametrize("order", ORDERS)
def test_submitted_together(order: str) -> None:
    """Catches a shared prefix that is computed twice."""
    stem = numbers(1000, 4)
    plan = make_plan(dataset(*[stem + [1001 + i] + numbers(99, 40 + i) for i in range(6)]), Planner(16, order))
    assert (plan.computed_tokens, plan.snapshots_written) == (1600, 1)
    assert [leader for leader in plan.leaders if leader is not None] == [plan.order[0]] * 5


def test_the_incremental_agent() -> None:
    """Catches a hit of 0 for B after A."""
    images = [token for image in range(1, 5) for token in [image] * 700]
    tail = numbers(400, 5)
    a = images + numbers(3382 - len(images) - len(tail), 6) + tail
    b = a[:1700] + [a[1700] % 999 + 1] + numbers(4584 - 1701 - len(tail), 7) + tail
    assert resumes(a, a, b, b) == [0, 3381, 1700, 4583]


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
        if order == "auto":
            assert plan.peak_live_snapshots <= 16
    for conversation in random.sample(data.conversations, 7):
        index = data.conversations.index(conversation)
        assert np.array_equal(tree.path_tokens(tree.end_node[index]), data.prompts[index])
