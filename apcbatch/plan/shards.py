"""Divide the lines of a window among shards, so that all compute about as many tokens, and few prefixes twice.

The lines are sorted by the tokens of their prompts, so that those which share a prefix are neighbours, and cut into one
range for each shard. A range counts the tokens of its prompts, shared ones once, and those of its answers. Invariants:
the largest shard, over all windows so far, is about as small as such cuts allow; a cut lies in the last sixteenth of
its range, where the next range repeats the fewest tokens; the result depends on prompts, answer tokens and the number
of shards alone.

Example without answers: of four lines with 10 tokens each, the first two share 8, the other two 6. Two shards get two
lines each, 12 and 14 tokens. Three get 12, 10 and 10: repeating the 6 makes the largest one smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from apcbatch.plan.prefix_tree import ROOT, PrefixTree

NEARLY = 16  # a cut lies in the last sixteenth of its range
Counts = npt.NDArray[np.int64]


def divide(tree: PrefixTree, answer_tokens: Sequence[int], loads: list[int]) -> dict[int, int]:
    """Return line -> shard, from 0, for the first requests of a tree, whose conversations are their lines.

    answer_tokens: of each request to divide. loads: tokens of each shard so far; the new ones are added."""
    lines, own_tokens, new_tokens = _weigh(tree, answer_tokens)
    sums, shared = np.cumsum(new_tokens), own_tokens - new_tokens
    least, most = 0, max(loads) + int(sums[-1])  # with which the first shard takes all
    while least < most:
        middle = (least + most) // 2
        if _cut(own_tokens, shared, sums, [middle - load for load in loads])[-1] == len(lines):
            most = middle
        else:
            least = middle + 1
    shards: dict[int, int] = {}
    begin = 0
    for shard, end in enumerate(_cut(own_tokens, shared, sums, [most - load for load in loads])):
        if end > begin:
            loads[shard] += int(own_tokens[begin] + sums[end - 1] - sums[begin])
        shards |= dict.fromkeys(lines[begin:end], shard)
        begin = end
    return shards


def _weigh(tree: PrefixTree, answer_tokens: Sequence[int]) -> tuple[list[int], Counts, Counts]:
    """Return the lines in the order of their tokens, the tokens that each computes alone, (lines,), and those that no
    line before it computes, (lines,)."""
    place, requests = _places(tree), dict[int, list[int]]()
    for index in range(len(answer_tokens)):
        requests.setdefault(tree.conversation[index], []).append(index)
    lines = sorted(requests, key=lambda line: max(place[tree.end_node[index]] for index in requests[line]))
    own_tokens, new_tokens, seen_by = [0] * len(lines), [0] * len(lines), [-1] * tree.num_nodes
    for at, line in enumerate(lines):
        for index in requests[line]:
            own_tokens[at] += answer_tokens[index]
            new_tokens[at] += answer_tokens[index]
            node = tree.end_node[index]
            while node != ROOT and seen_by[node] != at:
                tokens = tree.end[node] - tree.begin(node)
                own_tokens[at] += tokens
                new_tokens[at] += tokens if seen_by[node] < 0 else 0
                seen_by[node] = at
                node = tree.parent[node]
    return lines, np.array(own_tokens, np.int64), np.array(new_tokens, np.int64)


def _places(tree: PrefixTree) -> list[int]:
    """Return the place of each node in the order of their tokens, ancestors first."""
    children: dict[int, list[int]] = {}
    for node in sorted(range(1, tree.num_nodes), key=lambda node: int(tree.edge_tokens(node)[0]), reverse=True):
        children.setdefault(tree.parent[node], []).append(node)
    place, stack = [0] * tree.num_nodes, [ROOT]
    for number in range(tree.num_nodes):
        node = stack.pop()
        place[node] = number
        stack += children.get(node, ())
    return place


def _cut(own_tokens: Counts, shared: Counts, sums: Counts, capacities: Sequence[int]) -> list[int]:
    """Cut the lines into one range for each shard, of at most its capacity in tokens. Returns the ends of the ranges;
    if the last one is less than the number of lines, not all fit. own_tokens: of each line. shared: those of them that
    earlier lines compute. sums: running sums of the rest."""
    ends, end = list[int](), 0
    for capacity in capacities:
        begin = end
        if begin < len(sums) and own_tokens[begin] <= capacity:
            before = int(sums[begin] - own_tokens[begin])  # what the running sums have before the range's first token
            end = int(np.searchsorted(sums, before + capacity, "right"))
            if end < len(sums):
                first = max(begin, int(np.searchsorted(sums, before + capacity - capacity // NEARLY, "left"))) + 1
                end -= int(np.argmin(shared[first : end + 1][::-1])) if first <= end else 0
        ends.append(end)
    return ends
