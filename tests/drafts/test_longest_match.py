"""The history's longest match and its draft, against the definition in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from apcbatch import _C
from tests.effort import seeds

LEVELS = (16, 8, 4, 2, 1)
LONGEST, NEWEST = 64, 32
SLOT_BYTES = 44


@dataclass
class Oracle:
    """All that was added, one slot a token, and the definition of a match over the last `slots` of them.

    stream: (token, whether it is a continuation); None is the border between two texts."""

    slots: int
    stream: list[tuple[int, bool] | None] = field(default_factory=list)

    def add(self, tokens: list[int], begin: int) -> None:
        if self.stream and self.stream[-1] is not None:
            self.stream.append(None)
        self.stream += [(token, index >= begin) for index, token in enumerate(tokens)][max(0, begin - LONGEST) :]

    def match(self, query: list[int], most: int) -> tuple[list[int], int, int]:
        """The draft, the length of the longest match, and how many occurrences have it."""
        live = self.stream[-self.slots :]
        lengths = {at: self._length(live, at, query) for at, one in enumerate(live) if one is not None and one[1]}
        found: list[int] = []
        for level in LEVELS:
            found = [at for at in sorted(lengths, reverse=True) if lengths[at] >= level][:NEWEST]
            if found:
                break
        if not found:
            return [], 0, 0
        longest = max(lengths[at] for at in found)
        found = [at for at in found if lengths[at] == longest]
        count, draft = len(found), []
        while len(draft) < most:
            following = [(at, live[at][0]) for at in found if at < len(live) and live[at] is not None]
            if not following:
                break
            tokens = [token for _, token in following]
            draft.append(max(tokens, key=tokens.count))  # the first of equals, which is the newest
            found = [at + 1 for at, token in following if token == draft[-1]]
        return draft, longest, count

    def _length(self, live: list, at: int, query: list[int]) -> int:
        length = 0
        while length < min(LONGEST, at, len(query)):
            before = live[at - 1 - length]
            if before is None or before[0] != query[-1 - length]:
                break
            length += 1
        return length


def text(vocabulary: int) -> list[int]:
    """Random tokens, one token again and again, or a period; with copied pieces, as agents write."""
    count = random.randrange(120)
    kind = random.randrange(4)
    if kind == 0:
        return [random.randrange(vocabulary)] * count
    if kind == 1:
        period = [random.randrange(vocabulary) for _ in range(random.randint(1, 20))]
        return (period * count)[:count]
    tokens = [random.randrange(vocabulary) for _ in range(count)]
    for _ in range(kind - 1):
        begin = random.randrange(count + 1)
        tokens += tokens[begin : begin + random.randrange(60)]
    return tokens


def matched(state: _C.DraftState, query: list[int], most: int) -> tuple[list[int], int, int, bool]:
    """Also returns whether all occurrences were visited."""
    tokens = np.array(query, dtype=np.int32)
    return state.match(tokens.ctypes.data, len(tokens), most)


def test_matches_are_those_of_the_definition() -> None:
    """Fault: a longer match is overlooked, occurrences are counted that do not match or have left, a draft continues
    behind a text's end, or the oldest of equals decides; also in a ring that has wrapped, grown, or is tiny."""
    num_queries = num_cut = 0
    for _ in seeds(80):
        slots = random.choice([32, 100, 1000, 100_000])
        vocabulary = random.choice([2, 5, 40, 1 << 31])
        state, oracle = _C.DraftState(slots * SLOT_BYTES), Oracle(slots)
        texts: list[list[int]] = [[]]
        for _ in range(25):
            tokens = [*random.choice(texts)[: random.randrange(80)], *text(vocabulary)]
            begin = random.choice([0, 0, random.randrange(len(tokens) + 1)])
            array = np.array(tokens, dtype=np.int32)
            state.add(array.ctypes.data, len(array), begin)
            oracle.add(tokens, begin)
            texts.append(tokens)
            assert state.bytes() <= slots * SLOT_BYTES
            for _ in range(4):
                source = random.choice(texts)
                end = random.randrange(len(source) + 1)
                query = [*text(vocabulary)[:70], *source[max(0, end - random.choice([1, 3, 9, 30, 90])) : end]]
                *found, visited_all = matched(state, query, 20)
                num_queries, num_cut = num_queries + 1, num_cut + (not visited_all)
                assert not visited_all or tuple(found) == oracle.match(query, 20)
    assert num_cut < num_queries / 2  # where a rare token shares its chain with a frequent one


def test_what_left_is_never_drafted() -> None:
    """Fault: a link to an overwritten place is followed, so that a draft has tokens of a text that left, or of another
    text than the one that matched."""
    for _ in seeds(30):
        slots = random.randrange(64, 400)
        state = _C.DraftState(slots * SLOT_BYTES)
        for number in range(50):
            tokens = [*([7] * random.randrange(3)), *range(1000 * number, 1000 * number + random.randrange(2, 90))]
            array = np.array(tokens, dtype=np.int32)
            state.add(array.ctypes.data, len(array), 0)
            for earlier in range(max(0, number - 8), number):
                draft, *_ = matched(state, [1000 * earlier, 1000 * earlier + 1], 30)
                assert draft == list(range(1000 * earlier + 2, 1000 * earlier + 2 + len(draft)))
            assert not matched(state, [1000 * (number - slots), 1000 * (number - slots) + 1], 30)[0]
        gone = 1000 * (50 - slots // 2)
        assert not matched(state, [gone, gone + 1], 30)[0]


def test_no_memory_no_match() -> None:
    """Fault: a history without memory writes somewhere, or holds bytes."""
    state = _C.DraftState(31 * SLOT_BYTES)
    array = np.arange(1000, dtype=np.int32)
    state.add(array.ctypes.data, len(array), 0)
    assert state.bytes() == 0
    assert matched(state, [1, 2, 3], 5) == ([], 0, 0, True)
