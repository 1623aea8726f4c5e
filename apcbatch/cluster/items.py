"""What the driver remembers: requests on their way, the states between them, and the groups that travel as units.

Must not know: workers, the seam, the order of work. Invariants: the states and their makers and readers make a forest;
a maker comes before its readers in the plan's order; a request that has ended holds no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from apcbatch.cluster.unit import Handle, Key
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.types import Request, RequestPlan


@dataclass(slots=True, eq=False)
class State:
    """A snapshot that the plan keeps for requests of this run.

    origin: the number of the request that the plan has make it.
    maker: the unfinished request that will make it, None for nobody. parent: the state that its maker resumed from.
    readers: unfinished requests that resume from it. unseen: readers of the plan that have not been submitted yet.
    handle: where it lies; None if it is not there for others. home: the node whose end is its end. nodes: where a
    copy lies. waiting: groups that cannot begin before it is there.
    """

    key: Key
    position: int
    origin: int
    unseen: int
    maker: Item | None
    parent: State | None
    readers: set[Item] = field(default_factory=set)
    handle: Handle = None
    num_bytes: int = 0
    home: str = ""
    nodes: set[str] = field(default_factory=set)
    waiting: set[Group] = field(default_factory=set)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody will still read it."""
        return bool(self.readers) or self.unseen > 0

    def nearest_held(self) -> State | None:
        """The nearest state above it that is there."""
        state = self.parent
        while state is not None and state.handle is None:
            state = state.parent
        return state


@dataclass(slots=True, eq=False)
class Item:
    """A request between submit and its result.

    resume: the state that it resumes from; None for none, or for one that the workers' stores hold. above: for a
    request that makes a lost state again, that state: it resumes from what is left above it. keeps: the states that it
    makes. seconds: estimated. below_s: the longest path from its beginning on. deaths: workers that ended while their
    engine was at it.
    """

    number: int
    request: Request
    resume: State | None = None
    above: State | None = None
    keeps: dict[int, State] = field(default_factory=dict)
    seconds: float = 0.0
    below_s: float = 0.0
    deaths: int = 0
    is_done: bool = False
    group: Group | None = None

    @property
    def plan(self) -> RequestPlan | None:
        return self.request.plan

    @property
    def tokens(self) -> TokenArray:
        """Its prompt. An int32 array was looked at by whoever made it; anything else is looked at here."""
        ids = self.request.token_ids
        return ids if isinstance(ids, np.ndarray) and ids.dtype == np.int32 else as_token_array(ids)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of its prompt that the plan has it compute."""
        return len(self.request.token_ids) - (self.request.plan.resume_at if self.request.plan else 0)

    @property
    def most_answer_tokens(self) -> int:
        """Tokens that its answers can have."""
        request = self.request
        return request.max_tokens * (request.n if request.temperature > 0 else 1)

    def lead(self, state: State) -> None:
        """Make a state that nobody will make, instead of reading it, from the one that its maker resumed from."""
        state.readers.discard(self)
        if self.resume is state:
            self.resume, self.above = state.parent, state
            if state.parent is not None and state.parent.handle is not None:
                state.parent.readers.add(self)
            else:
                self.resume = None
        state.maker = self
        self.keeps[state.position] = state


@dataclass(slots=True, eq=False)
class Group:
    """Items that travel together, in the plan's order. needs: states from outside, and how many of its requests resume
    from each; num_made: states that it makes for others; both as of when it was placed. pending: those that it waits
    for. priority: the longest path from its beginning on, in seconds. is_alone: the worker that has it gets nothing
    beside it."""

    items: list[Item]
    seconds: float = 0.0
    priority: float = 0.0
    needs: Mapping[State, int] = field(default_factory=dict)
    num_made: int = 0
    pending: set[State] = field(default_factory=set)
    is_alone: bool = False

    def __post_init__(self) -> None:
        for item in self.items:
            item.group = self
        self.seconds = sum(item.seconds for item in self.items)
        self.priority = max(self.seconds, max((item.below_s for item in self.items), default=0.0))

    @property
    def number(self) -> int:
        """Its place among groups of the same priority: that of its first request."""
        return self.items[0].number

    @property
    def growth(self) -> int:
        """The states that it makes for others, less those that it is the last to read."""
        return self.num_made - sum(
            not state.unseen and len(state.readers) == readers for state, readers in self.needs.items()
        )

    def note_states(self) -> None:
        """Find out what it needs and what it makes for others."""
        self.needs = self.outside()
        made = (state for item in self.items for state in item.keeps.values() if state.maker is item)
        self.num_made = sum(state.unseen > 0 or self._is_read_elsewhere(state) for state in made)

    def _is_read_elsewhere(self, state: State) -> bool:
        return any(reader.group is not self for reader in state.readers)

    def outside(self) -> dict[State, int]:
        """The states that its requests resume from and that no request before them in it makes, and how many do."""
        made, found = set[State](), dict[State, int]()
        for item in self.items:
            state = item.resume
            if state is not None and state not in made:
                found[state] = found.get(state, 0) + 1
            made.update(state for state in item.keeps.values() if state.maker is item)
        return found

    def first_reader(self, state: State) -> Item:
        """The first of its requests that resumes from a state."""
        return next(item for item in self.items if item.resume is state)


def unfinished(items: Iterable[Item]) -> list[Item]:
    """Those that have no result yet, in the plan's order."""
    return sorted((item for item in items if not item.is_done), key=lambda item: item.number)
