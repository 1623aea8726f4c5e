"""What planning should say, by plain Python over tuples of tokens: no tree, no arithmetic on nodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Plan, Planner
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.windows import Window

Prompt = tuple[int, ...]

STATE_ONLY = Footprint(10)
HYBRID = Footprint(100, kv_token_bytes=3, page_tokens=4)


@dataclass
class Dataset:
    """prompts in file order, each with the number of its conversation; where names the seed in failures."""

    prompts: list[Prompt]
    conversations: list[int]
    where: str = ""

    def tree(self) -> PrefixTree:
        tree = PrefixTree()
        for prompt, conversation in zip(self.prompts, self.conversations, strict=True):
            tree.add(np.array(prompt, np.int32), conversation)
        return tree


def dataset(*prompts: Sequence[int], conversations: Sequence[int] | None = None) -> Dataset:
    """A dataset written by hand; each prompt is a conversation unless they are given."""
    return Dataset([tuple(prompt) for prompt in prompts], list(conversations or range(len(prompts))))


def numbers(count: int, seed: int) -> list[int]:
    """`count` random token ids."""
    source = random.Random(seed)
    return [source.randrange(1, 1000) for _ in range(count)]


def random_dataset(seed: int) -> Dataset:
    """Conversations that grow, fork, repeat and rewrite their past, over few tokens so that much is
    shared."""
    source = random.Random(seed)
    vocabulary = source.choice([2, 3, 50])

    def fresh(longest: int) -> Prompt:
        return tuple(source.randrange(vocabulary) for _ in range(source.randint(1, longest)))

    prefixes = [fresh(20) for _ in range(source.randint(1, 3))]
    entries: list[tuple[Prompt, int]] = []
    for conversation in range(source.randint(1, 8)):
        prompt = source.choice(prefixes) + fresh(6)
        for _ in range(source.randint(1, 5)):
            entries.append((prompt, conversation))
            kind = source.random()
            if kind < 0.6:
                prompt += fresh(9)
            elif kind < 0.75:
                prompt = prompt[: source.randint(1, len(prompt))] + fresh(9)
            elif kind < 0.85:
                prompt = source.choice(entries)[0]
    if source.random() < 0.3:
        source.shuffle(entries)
    prompts, conversations = zip(*entries, strict=True)
    return Dataset(list(prompts), list(conversations), f"seed {seed}")


def within_vocabulary(data: Dataset, num_tokens: int, stretch: int = 1) -> Dataset:
    """The same with ids from 1 to `num_tokens` - 1, each of them `stretch` times in a row."""
    prompts = [
        tuple(1 + token % (num_tokens - 1) for token in prompt for _ in range(stretch)) for prompt in data.prompts
    ]
    return replace(data, prompts=prompts)


def random_held(data: Dataset, block_size: int) -> set[Prompt]:
    """Some boundaries of the prompts, as a store might have them from before."""
    boundaries = sorted({p for prompt in data.prompts for p in prefixes_on_grid(prompt, block_size)})
    return set(random.sample(boundaries, random.randint(0, min(4, len(boundaries)))))


def node_at(tree: PrefixTree, index: int, position: int) -> int:
    """The node whose edge holds a position, 1 to its length, of a request."""
    node = tree.end_node[index]
    while tree.begin(node) >= position:
        node = tree.parent[node]
    return node


def make_plan(data: Dataset, planner: Planner, held: set[Prompt] = frozenset()) -> Plan:
    tree = data.tree()
    ends = [(next(i for i, prompt in enumerate(data.prompts) if prompt[: len(p)] == p), len(p)) for p in held]
    return planner.plan(tree, {(node_at(tree, index, end), end) for index, end in ends})


def prefixes_on_grid(prompt: Prompt, block_size: int) -> list[Prompt]:
    return [prompt[:end] for end in range(block_size, len(prompt) + 1, block_size)]


def common(one: Prompt, other: Prompt) -> int:
    """How many leading tokens two prompts share."""
    return next((k for k in range(min(len(one), len(other))) if one[k] != other[k]), min(len(one), len(other)))


def ideals(data: Dataset, order: Sequence[int], held: set[Prompt] = frozenset()) -> dict[int, int]:
    """By request: what earlier requests, or held prefixes, cover of it."""
    found, earlier = {}, []
    for index in order:
        prompt = data.prompts[index]
        covered = [common(prompt, other) for other in earlier]
        covered += [len(prefix) for prefix in held if prompt[: len(prefix)] == prefix and len(prefix) < len(prompt)]
        found[index] = min(max(covered, default=0), len(prompt) - 1)
        earlier.append(prompt)
    return found


@dataclass
class Outcome:
    """One run under policy `all` or `last`. owner: by kept prefix, who computed it."""

    resume_at: dict[int, int] = field(default_factory=dict)
    owner: dict[Prompt, int] = field(default_factory=dict)
    read: list[Prompt] = field(default_factory=list)


def serve(
    data: Dataset, order: Sequence[int], block_size: int, policy: str, held: set[Prompt] = frozenset()
) -> Outcome:
    """One request after the other, with a set of prefixes as the pool."""
    there, outcome = set(held), Outcome()
    for index in order:
        prompt = data.prompts[index]
        usable = [prefix for prefix in prefixes_on_grid(prompt, block_size) if len(prefix) < len(prompt)]
        resume_at = max((len(prefix) for prefix in usable if prefix in there), default=0)
        outcome.resume_at[index] = resume_at
        if resume_at:
            outcome.read.append(prompt[:resume_at])
        computed = [prefix for prefix in prefixes_on_grid(prompt, block_size) if len(prefix) > resume_at]
        for prefix in computed if policy == "all" else computed[-1:]:
            if prefix not in there:
                there.add(prefix)
                outcome.owner[prefix] = index
    return outcome


@dataclass
class Replay:
    """What happens when requests do what a plan says, one after the other."""

    num_written: int = 0
    num_restored: int = 0
    peak_snapshots: int = 0
    peak_bytes: int = 0


def replay(data: Dataset, plan: Plan, footprint: Footprint, held: set[Prompt] = frozenset()) -> Replay:
    """Play a plan through with real page lists; AssertionError where it asks for what is not there, leaves
    something behind, passes by a longer snapshot, or says that another number of bytes is live or added."""
    live: dict[Prompt, list] = {}  # prefix -> [reads left, its pages, whether it was restored, its owner]

    def weight() -> int:
        in_use = {page for _, used, _, _ in live.values() for page in used} if footprint.kv_token_bytes else set()
        return len(live) * footprint.state_bytes + len(in_use) * footprint.page_bytes

    result, next_page, held_read = Replay(), 0, set()
    for index in plan.order:
        prompt, todo, where = data.prompts[index], plan.requests[index], (data.where, index)
        start = prompt[: todo.resume_at]
        usable = [
            len(prefix) for prefix in [*live, *held] if prompt[: len(prefix)] == prefix and len(prefix) < len(prompt)
        ]
        assert todo.resume_at == max(usable, default=0), where
        entry = live.get(start)
        assert (plan.leaders[index] is None) == (entry is None) and (entry is None or entry[3] == plan.leaders[index])
        if entry is None and start:
            held_read.add(start)
        assert todo.live_bytes == weight(), where
        pages = list(entry[1][: todo.resume_at // footprint.page_tokens]) if entry else []
        while len(pages) * footprint.page_tokens < len(prompt):
            pages.append(next_page)
            next_page += 1
        for position, reads in zip(todo.keep, todo.reads, strict=True):
            assert todo.resume_at < position <= len(prompt) and reads > 0, where
            assert prompt[:position] not in live, where
            live[prompt[:position]] = [reads, pages[: -(-position // footprint.page_tokens)], False, index]
            result.num_written += 1
        restored_bytes = 0 if entry is not None or not start else footprint.pool_bytes(len(start))
        assert todo.keep_bytes == weight() - todo.live_bytes + restored_bytes, where
        result.peak_snapshots = max(result.peak_snapshots, len(live))
        result.peak_bytes = max(result.peak_bytes, weight())
        if entry is not None:
            result.num_restored += not entry[2]
            entry[0], entry[2] = entry[0] - 1, True
            if not entry[0]:
                del live[start]
    assert not live, data.where
    result.num_restored += len(held_read)
    return result


def random_windows(data: Dataset) -> list[Window[int]]:
    """Windows of some requests each, with all later requests ahead or with some of them; items are indexes."""
    whole, found, begin, known = random.random() < 0.5, [], 0, 0
    while begin < len(data.prompts):
        count = random.randint(1, random.choice([4, 16]))
        known = min(len(data.prompts), 10**9 if whole else max(known, begin + count + random.randint(0, 4)))
        part = Dataset(data.prompts[begin:known], data.conversations[begin:known])
        found.append(Window(part.tree(), list(range(begin, known)), min(count, known - begin)))
        begin += count
    return found
