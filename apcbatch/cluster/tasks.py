"""The driver's view of the work: requests (Item), the states between them, and the groups they are cut into.

Invariants:
- States with their makers and readers form a forest. A maker precedes its readers in the plan's order.
- A request is in one group.
- All states that a group reads from other groups are made by one request, so the groups form a forest too.
- When a group is cut, it runs longer than the quantum only if it is a single request.

The quantum is the maximum run time of a group. It shrinks with the remaining work, so the last groups are the smallest.

Example with a quantum of 10 s: three conversations of 6, 3 and 3 s share a prefix of 4 s. Together they take 16 s, so
the prefix becomes a group of its own, followed by groups of 6 + 3 and 3 s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from apcbatch.cluster.wire import Handle, Key
from apcbatch.prefix import TokenArray, checked_tokens
from apcbatch.types import Request, RequestPlan, Result

LEAST_SENT_TOKENS = 16
COMPUTED_AGAIN = 4  # a request computes less than a fourth of its tokens again so as not to wait for a group
GROUPS_PER_SHARE = 8  # groups in a worker's fair share of the remaining work
LEAST_GROUP_S = 0.5
MOST_SHARES = 2  # maximum run time of a group, in fair shares


@dataclass(slots=True, eq=False)
class State:
    """A snapshot that the plan keeps for requests of this run.

    origin: number of the request that makes it by the plan. future_readers: number of readers not submitted yet. maker:
    unfinished request that will make it, or None. parent: the next shallower state that its maker makes or resumes
    from. readers: unfinished requests that resume from it. handle: the runtime's handle of its bytes; None while it is
    not held. home: node that holds it. nodes: nodes with a copy. waiting: groups that cannot start without it.
    """

    key: Key
    position: int
    origin: int
    future_readers: int
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
        """Whether any reader is unfinished or still to be submitted."""
        return bool(self.readers) or self.future_readers > 0

    def substitute(self, least_tokens: int, made: Collection[int]) -> State | None:
        """Return the shallowest ancestor less than `least_tokens` above it, itself if there is none; None for token 0.

        made: numbers of requests. Each ancestor on the way is held, or is made by one of them."""
        state: State | None = self
        while state is not None:
            above = state.parent
            if self.position - (0 if above is None else above.position) >= least_tokens:
                break
            if above is not None and above.handle is None and (above.maker is None or above.maker.number not in made):
                break
            state = above
        return state

    def nearest_held(self) -> State | None:
        """Return its nearest ancestor that is held; None if there is none."""
        state = self.parent
        while state is not None and state.handle is None:
            state = state.parent
        return state


@dataclass(slots=True, eq=False)
class Item:
    """A request from its submission to its result.

    resume: state that it resumes from; None if it starts at token 0 or from a snapshot in the workers' stores.
    from_start: it starts at token 0, although its plan says to resume. keeps: states that it makes, by position.
    seconds: estimated run time. critical_path_s: run time of the longest path that begins with it. deaths: number of
    workers that ended while they computed it.
    """

    number: int
    request: Request
    resume: State | None = None
    from_start: bool = False
    keeps: dict[int, State] = field(default_factory=dict)
    seconds: float = 0.0
    critical_path_s: float = 0.0
    deaths: int = 0
    is_done: bool = False
    group: Group | None = None

    @property
    def plan(self) -> RequestPlan | None:
        return self.request.plan

    @property
    def tokens(self) -> TokenArray:
        """Its prompt, (tokens,) int32."""
        return checked_tokens(self.request.token_ids)

    @property
    def prefill_tokens(self) -> int:
        """Number of prompt tokens that it computes by the plan."""
        return len(self.request.token_ids) - (self.plan.resume_at if self.plan else 0)

    @property
    def max_answer_tokens(self) -> int:
        """Maximum number of tokens of all its answers."""
        request = self.request
        return request.max_tokens * (request.n if request.temperature > 0 else 1)

    @property
    def resume_at(self) -> int:
        """Number of prompt tokens that it does not compute."""
        if self.resume is not None:
            return self.resume.position
        return self.plan.resume_at if self.plan is not None and not self.from_start else 0

    def resume_from(self, state: State | None) -> None:
        """Resume from another state than the one that it resumes from. None: from token 0."""
        if self.resume is not None:
            self.resume.readers.discard(self)
        if state is not None:
            state.readers.add(self)
        self.resume, self.from_start = state, state is None

    def become_maker(self, state: State) -> None:
        """Make a state that has no maker, from its nearest held ancestor, instead of reading it."""
        state.readers.discard(self)
        if self.resume is state:
            self.resume_from(state.nearest_held())
        state.maker = self
        self.keeps[state.position] = state


@dataclass(slots=True, eq=False)
class Group:
    """Requests for one worker, in the plan's order.

    seconds: expected run time. priority: run time of the longest path that begins with it, in seconds. pending: states
    that it waits for. is_alone: its worker gets no other unit.
    """

    items: list[Item]
    seconds: float = 0.0
    priority: float = 0.0
    pending: set[State] = field(default_factory=set)
    is_alone: bool = False

    def __post_init__(self) -> None:
        for item in self.items:
            item.group = self
        self.seconds = sum(item.seconds for item in self.items)
        self.priority = max(self.seconds, max((item.critical_path_s for item in self.items), default=0.0))

    @property
    def number(self) -> int:
        """Number of its first request, which orders groups of equal priority."""
        return self.items[0].number

    def external_states(self) -> list[State]:
        """Return the states that its requests resume from and that no earlier request of the group makes."""
        made, found = set[State](), dict[State, None]()
        for item in self.items:
            if item.resume is not None and item.resume not in made:
                found[item.resume] = None
            made.update(state for state in item.keeps.values() if state.maker is item)
        return list(found)

    def first_reader(self, state: State) -> Item:
        """Return its first request that resumes from a state."""
        return next(item for item in self.items if item.resume is state)


def unfinished(items: Iterable[Item]) -> list[Item]:
    """Return the requests without a result, in the plan's order."""
    return sorted((item for item in items if not item.is_done), key=lambda item: item.number)


PRIOR_TOKENS = 256
PRIOR_PREFILL_S, PRIOR_ANSWER_S = 1e-3, 5e-3


class Rates:
    """Measured seconds of a token that prefill computes, and of a token of max_tokens.

    Both begin as if PRIOR_TOKENS had been measured, with the prior's seconds.
    """

    def __init__(self) -> None:
        self._prefill_tokens = self._answer_tokens = PRIOR_TOKENS
        self._prefill_s, self._answer_s = PRIOR_TOKENS * PRIOR_PREFILL_S, PRIOR_TOKENS * PRIOR_ANSWER_S

    def estimate(self, items: Iterable[Item]) -> None:
        """Estimate the run time of each request."""
        prefill_s, answer_s = self._prefill_s / self._prefill_tokens, self._answer_s / self._answer_tokens
        for item in items:
            item.seconds = item.prefill_tokens * prefill_s + item.max_answer_tokens * answer_s
            item.critical_path_s = max(item.critical_path_s, item.seconds)

    def add(self, item: Item, result: Result) -> None:
        """Count an answered request."""
        self._prefill_tokens += result.computed_tokens
        self._prefill_s += result.prefill_ms / 1e3
        self._answer_tokens += item.max_answer_tokens
        self._answer_s += result.decode_ms / 1e3


class Cutter:
    """Cuts submitted requests into groups.

    A cluster is a tuple (seconds, requests) whose requests stay in one group. All requests but its first resume from a
    state that another request of the cluster makes, or one a few tokens above it. A request resumes from its own state
    if its group makes that, and otherwise from the one above, so that groups which share a few tokens more than others
    do not wait for each other.
    """

    def __init__(
        self,
        items: list[Item],
        num_workers: int,
        other_s: float,
        least_s: float,
        least_sent_tokens: int,
    ) -> None:
        """items: requests in the plan's order, with estimates. num_workers: workers that share the work. other_s:
        seconds of work that is queued already. least_s, least_sent_tokens: see ClusterSettings."""
        self._least_s, self._least_sent_tokens = least_s, least_sent_tokens
        self._items, self._num_workers = items, num_workers
        self._here = {item.number for item in items}
        self._left_s = other_s + sum(item.seconds for item in items)
        self._groups: list[Group] = []

    @property
    def quantum_s(self) -> float:
        """Maximum run time of the next group: a part of a worker's fair share of the work that is left."""
        share_s = self._left_s / self._num_workers
        return min(max(share_s / GROUPS_PER_SHARE, self._least_s), MOST_SHARES * share_s)

    def cut(self) -> list[Group]:
        """Return the groups, in the plan's order of their first requests."""
        below: dict[int, list[tuple[float, list[Item]]]] = {}  # by maker: clusters that may join it
        roots: dict[int, list[tuple[float, list[Item]]]] = {}  # by the origin of the state they resume from
        for item in reversed(self._items):
            cluster = self._join(item, below.pop(item.number, []))
            state = self._anchor(item)
            if state is not None and state.maker is not None and state.maker.number in self._here:
                below.setdefault(state.maker.number, []).append(cluster)
            else:
                roots.setdefault(-1 if state is None else state.origin, []).append(cluster)
        for clusters in roots.values():
            self._close(clusters)
        return sorted(self._groups, key=lambda group: group.number)

    def _anchor(self, item: Item) -> State | None:
        """Return the state that a request resumes from unless it is in one group with the maker of its own one."""
        state = item.resume
        if state is None or state.maker is None or state.maker.number not in self._here:
            return state
        least_tokens = min(self._least_sent_tokens, item.prefill_tokens // COMPUTED_AGAIN)
        return state.substitute(least_tokens, self._here)

    def _join(self, item: Item, clusters: list[tuple[float, list[Item]]]) -> tuple[float, list[Item]]:
        """Merge a request with the clusters of its readers if they fit the quantum; otherwise close those clusters as
        groups."""
        total = item.seconds + sum(seconds for seconds, _ in clusters)
        if clusters and total > self.quantum_s:
            self._close(clusters)
            return item.seconds, [item]
        joined = max((members for _, members in clusters), key=len, default=[])
        for _, members in clusters:
            if members is not joined:
                joined += members
        joined.append(item)
        return total, joined

    def _close(self, clusters: list[tuple[float, list[Item]]]) -> None:
        """Pack clusters into groups that fit the quantum, the longest cluster first.

        clusters: their first requests either all resume from states of the same earlier request, or all from none.
        """
        bag: list[Item] = []
        bag_s = 0.0
        for seconds, members in sorted(clusters, key=lambda cluster: -cluster[0]):
            if bag and bag_s + seconds > self.quantum_s:
                self._add_group(bag)
                bag, bag_s = [], 0.0
            bag += members
            bag_s += seconds
        if bag:
            self._add_group(bag)

    def _add_group(self, members: list[Item]) -> None:
        """Make a group of requests. Extend the critical paths of the requests that make the states which the group
        reads."""
        members.sort(key=lambda item: item.number)
        own = {item.number for item in members}
        for item in members:
            if item.resume is not None and item.resume.maker is not None and item.resume.maker.number not in own:
                item.resume_from(self._anchor(item))
        for item in reversed(members):  # readers first, then their makers
            _extend_path(item, item.critical_path_s)
        group = Group(members)
        for item in members:
            if item.resume is not None and item.resume.maker is not None and item.resume.maker.group is not group:
                _extend_path(item, group.priority)  # the group starts as a whole
        self._groups.append(group)
        self._left_s -= group.seconds


def _extend_path(item: Item, critical_path_s: float) -> None:
    """Set the critical path of the maker of the state that `item` resumes from to at least the maker's seconds plus
    critical_path_s."""
    maker = item.resume.maker if item.resume is not None else None
    if maker is not None:
        maker.critical_path_s = max(maker.critical_path_s, maker.seconds + critical_path_s)
