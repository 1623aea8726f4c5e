"""Which earlier requests share the beginning of a prompt: compared with looking at all of them."""

from __future__ import annotations

from apcbatch.plan.prefix_tree import common_prefixes
from tests.plan.plan_oracle import Dataset, common


def test_each_is_the_first_with_so_many_tokens(data: Dataset) -> None:
    """Fault: a later request is named, a longer prefix is missed, or one that begins otherwise is taken."""
    tree = data.tree()
    for index, prompt in enumerate(data.prompts):
        expected: list[tuple[int, int]] = []
        for other in range(index):
            tokens = common(data.prompts[other], prompt)
            if tokens and all(tokens > before for before, _ in expected):
                expected.append((tokens, other))
        assert common_prefixes(tree, index) == expected, (data.where, index)
