"""How a window is divided among shards, against sets of prefixes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.shards import divide
from tests.effort import seeds
from tests.plan.plan_oracle import Prompt

Lines = Sequence[Sequence[Prompt]]


def divided(lines: Lines, loads: list[int], answer_tokens: int = 0, num_ahead: int = 0) -> list[int]:
    """The shard of each line but the last `num_ahead`; line 7 is the first."""
    tree, num_requests = PrefixTree(), 0
    for line, prompts in enumerate(lines, start=7):
        num_requests += len(prompts) * (line - 7 < len(lines) - num_ahead)
        for prompt in prompts:
            tree.add(np.array(prompt, np.int32), line)
    tree.finish()
    shards = divide(tree, [answer_tokens] * num_requests, loads)
    assert sorted(shards) == list(range(7, 7 + len(lines) - num_ahead))
    return [shards[line] for line in sorted(shards)]


def tokens(lines: Lines, answer_tokens: int) -> int:
    """What a shard with these lines computes, by the set of their prefixes."""
    prefixes = {prompt[: end + 1] for prompts in lines for prompt in prompts for end in range(len(prompt))}
    return len(prefixes) + answer_tokens * sum(map(len, lines))


def test_cuts_by_hand() -> None:
    """Catches neighbours by the order of the file, a prefix that is computed twice for nothing, or once although that
    makes one shard the slowest, answers that do not count, a line in two shards, and earlier windows forgotten."""
    a, b = [((1,) * 8 + (end, end),) for end in (2, 3)]
    c, d = [((5,) * 6 + (end,) * 4,) for end in (1, 2)]
    turns = [((9,) * 10, (9,) * 20, (9,) * 30), ((8,) * 3,), ((8,) * 2 + (1,),)]
    for lines, count, before, answer_tokens, expected, loads in (
        ([a, b, c, d], 1, 0, 0, [0, 0, 0, 0], [26]),
        ([a, b, c, d], 2, 0, 0, [0, 0, 1, 1], [12, 14]),
        ([a, d, b, c], 2, 0, 0, [0, 1, 0, 1], [12, 14]),
        ([a, b, c, d], 3, 0, 0, [0, 0, 1, 2], [12, 10, 10]),
        ([a, b, c, d], 5, 0, 0, [0, 1, 2, 3], [10, 10, 10, 10, 0]),
        ([a, b, c, d], 2, 10, 0, [0, 0, 1, 1], [22, 14]),
        ([a, b, c, d], 2, 20, 0, [1, 1, 1, 1], [20, 26]),
        ([a, a, a, c], 2, 0, 20, [0, 0, 1, 1], [50, 60]),
        (turns, 2, 0, 0, [1, 0, 0], [4, 30]),
        (turns, 3, 0, 5, [1, 0, 0], [14, 45, 0]),
    ):
        found = [before] + [0] * (count - 1)
        assert (divided(lines, found, answer_tokens), found) == (expected, loads), (lines, count, before)


def test_a_cut_lies_where_little_is_repeated() -> None:
    """Catches a cut within lines that share a prefix where one before them makes the largest shard hardly larger."""
    lines = [((stem, stem, end),) for stem, count in ((1, 400), (2, 406)) for end in range(count)]
    loads = [0, 0]
    assert divided(lines, loads) == [0] * 400 + [1] * 406 and loads == [402, 408]


def test_any_window_is_divided_evenly() -> None:
    """Catches a line of no shard, sums that are not what the shards compute, a largest shard beyond the bound (a
    sixteenth and the largest line over even parts), and a result that depends on the requests ahead."""
    for seed in seeds(60):
        draw = random.Random(seed)
        count, answer_tokens = draw.randint(1, 7), draw.choice([0, 0, 3])
        loads, parts, whole = [0] * count, [list[Sequence[Prompt]]() for _ in range(count)], list[int]()
        for _ in range(draw.randint(1, 3)):
            stems = [tuple(draw.choices(range(3), k=draw.randint(0, 30))) for _ in range(4)]
            lines: list[Sequence[Prompt]] = []  # of one to three prompts, each the beginning of the next
            for _ in range(draw.randint(1, 40)):
                end = draw.choice(stems) + tuple(draw.choices(range(3), k=draw.randint(1, 20)))
                lengths = draw.sample(range(1, len(end) + 1), k=min(len(end), draw.randint(1, 3)))
                lines.append([end[:length] for length in sorted(lengths)])
            alone, before = list(loads), list(loads)
            shards = divided(lines, loads, answer_tokens)
            assert (
                divided([*lines, *lines[:2]], alone, answer_tokens, num_ahead=len(lines[:2])) == shards
                and alone == loads
            )
            whole += [tokens([line], answer_tokens) for line in lines]
            for shard in range(count):
                own = [line for line, of in zip(lines, shards, strict=True) if of == shard]
                parts[shard] += own
                assert tokens(own, answer_tokens) == loads[shard] - before[shard]
            repeated = max(len(stem) for stem in stems)
            even = (sum(before) + tokens(lines, answer_tokens)) / count
            assert max(loads) <= max(max(before), (even + repeated + max(whole)) * 17 / 16), seed
        assert sum(map(len, parts)) == len(whole)
