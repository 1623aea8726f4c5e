"""Which earlier requests share the beginning of a prompt: compared with looking at all of them."""

from __future__ import annotations

import pytest

from apcbatch.plan.sharers import first_sharers
from tests.plan.plan_oracle import random_dataset


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                min(len(one), len(other)))  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_each_is_the_first_with_so_many_tokens(seed: int) -> None:
    """Fault: a later request is named, a longer prefix is missed, or one that begins otherwise is taken."""
    data = random_dataset(seed)
    tree = data.tree()
    for index, prompt in enumerate(data.prompts):
        expected: list[tuple[int, int]] = []
        for other in range(index):
            tokens = common(data.prompts[other], prompt)
            if tokens and all(tokens > before for before, _ in expected):
                expected.append((tokens, other))
        assert first_sharers(tree, index) == expected, (data.where, index)
