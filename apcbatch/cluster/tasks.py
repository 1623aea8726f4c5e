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

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from apcbatch.cluster.wire import Handle, Key
from apcbatch.prefix import TokenArray, checked_tokens
from apcbatch.types import Request, RequestPlan

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

    resume: state that it resumes from; None if it starts at token 0 or from a snapshot in the workers' stores. remakes:
    state that it was to resume from and now computes itself, from a held ancestor or token 0. keeps: states that it
    makes, by position. seconds: estimated run time. critical_path_s: run time of the longest path that begins with it.
    deaths: number of workers that ended while they computed it.
    """

    number: int
    request: Request
    resume: State | None = None
    remakes: State | None = None
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
        return len(self.request.token_ids) - (self.request.plan.resume_at if self.request.plan else 0)

    @property
    def max_answer_tokens(self) -> int:
        """Maximum number of tokens of all its answers."""
        request = self.request
        return request.max_tokens * (request.n if request.temperature > 0 else 1)

    def resume_above(self, state: State | None) -> None:
        """Resume from an ancestor of the state that it resumes from, and compute the tokens in between. None: from
        token 0."""
        if self.resume is None or self.resume is state:
            return
        self.resume.readers.discard(self)
        if state is None:
            self.remakes = self.resume
        else:
            state.readers.add(self)
        self.resume = state

    def become_maker(self, state: State) -> None:
        """Make a state that has no maker instead of reading it, and resume from the state's parent."""
        state.readers.discard(self)
        if self.resume is state:
            self.resume, self.remakes = state.parent, state
            if state.parent is not None and state.parent.handle is not None:
                state.parent.readers.add(self)
            else:
                self.resume = None
        state.maker = self
        self.keeps[state.position] = state


@dataclass(slots=True, eq=False)
class Group:
    """Requests for one worker, in the plan's order.

    seconds: expected run time. priority: run time of the longest path that begins with it, in seconds. needs: external
    state -> number of its requests that resume from it. num_made: number of states that it makes for other groups.
    (Both are updated when the group is added to the scheduler.) pending: states that it waits for. is_alone: its worker
    gets no other unit.
    """

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
        self.priority = max(self.seconds, max((item.critical_path_s for item in self.items), default=0.0))

    @property
    def number(self) -> int:
        """Number of its first request, which orders groups of equal priority."""
        return self.items[0].number

    @property
    def growth(self) -> int:
        """Net change in the number of held states once it has run: states made for others, minus states read for the
        last time."""
        return self.num_made - sum(
            not state.future_readers and len(state.readers) == readers for state, readers in self.needs.items()
        )

    def update_states(self) -> None:
        """Recompute `needs` and `num_made`."""
        self.needs = self.external_states()
        made = (state for item in self.items for state in item.keeps.values() if state.maker is item)
        self.num_made = sum(state.future_readers > 0 or self._is_read_elsewhere(state) for state in made)

    def _is_read_elsewhere(self, state: State) -> bool:
        return any(reader.group is not self for reader in state.readers)

    def external_states(self) -> dict[State, int]:
        """Return each state that its requests resume from and that no earlier request of the group makes, with the
        number of its readers in the group."""
        made, found = set[State](), dict[State, int]()
        for item in self.items:
            state = item.resume
            if state is not None and state not in made:
                found[state] = found.get(state, 0) + 1
            made.update(state for state in item.keeps.values() if state.maker is item)
        return found

    def first_reader(self, state: State) -> Item:
        """Return its first request that resumes from a state."""
        return next(item for item in self.items if item.resume is state)


def unfinished(items: Iterable[Item]) -> list[Item]:
    """Return the requests without a result, in the plan's order."""
    return sorted((item for item in items if not item.is_done), key=lambda item: item.number)


FADING = 0.98  # factor on the weight of earlier measurements, per new one
PRIOR_PREFILL_TOKENS_PER_S = 1000.0
PRIOR_DECODE_TOKENS_PER_S = 200.0
PRIOR_BYTES_PER_S = 1e9
PRIOR_LATENCY_S = 2e-3
PRIOR_TOKENS = 256.0  # weight of the prior, as if this many tokens had been measured
PRIOR_BYTES = 1e6  # weight of the prior, as if this many bytes had been sent
SMALLEST = 1e-9  # lower bound of both rates, seconds per token


class Rates:
    """Measured speed of the workers and of the network.

    prefill_s, decode_s: seconds per token. answer_share: length of the answers over their maximum length. bytes_per_s,
    latency_s: speed of sending a state to another node.

    The run time of a unit is modelled as prefill_tokens * prefill_s + decode_tokens * decode_s. prefill_s and decode_s
    are the least-squares fit over all units so far, with exponentially decaying weights and a decaying prior.
    """

    def __init__(self) -> None:
        self.prefill_s = 1 / PRIOR_PREFILL_TOKENS_PER_S
        self.decode_s = 1 / PRIOR_DECODE_TOKENS_PER_S
        self.answer_share = 1.0
        self.bytes_per_s, self.latency_s = PRIOR_BYTES_PER_S, PRIOR_LATENCY_S
        weight = PRIOR_TOKENS**2
        self._pp, self._pd, self._dd = weight, 0.0, weight
        self._ps, self._ds = weight * self.prefill_s, weight * self.decode_s
        self._sent_bytes, self._sent_s = PRIOR_BYTES, PRIOR_BYTES / PRIOR_BYTES_PER_S
        self._answered = self._max_answered = 0.0

    def seconds(self, prefill_tokens: int, max_answer_tokens: int) -> float:
        """Return the expected run time of this many tokens."""
        return prefill_tokens * self.prefill_s + max_answer_tokens * self.answer_share * self.decode_s

    def transfer_s(self, num_bytes: int) -> float:
        """Return the expected seconds to send a state to another node."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def add_unit(self, seconds: float, prefill_tokens: int, decode_tokens: int) -> None:
        """Add the measured run time of a unit, and fit the rates again."""
        p, d = float(prefill_tokens), float(decode_tokens)
        self._pp, self._pd, self._dd = FADING * self._pp + p * p, FADING * self._pd + p * d, FADING * self._dd + d * d
        self._ps, self._ds = FADING * self._ps + p * seconds, FADING * self._ds + d * seconds
        determinant = self._pp * self._dd - self._pd * self._pd
        if determinant <= 1e-6 * self._pp * self._dd:
            # all units have the same ratio of prefill to decode tokens: scale both rates
            scale = self._ps * self.prefill_s + self._ds * self.decode_s
            predicted = self._pp * self.prefill_s**2 + 2 * self._pd * self.prefill_s * self.decode_s
            predicted += self._dd * self.decode_s**2
            if predicted > 0:
                self.prefill_s *= scale / predicted
                self.decode_s *= scale / predicted
            return
        self.prefill_s = max(SMALLEST, (self._dd * self._ps - self._pd * self._ds) / determinant)
        self.decode_s = max(SMALLEST, (self._pp * self._ds - self._pd * self._ps) / determinant)

    def add_answer(self, tokens: int, most: int) -> None:
        """Count the answers of one request. tokens: their total length. most: the maximum of that length."""
        self._answered, self._max_answered = self._answered + tokens, self._max_answered + most
        if self._max_answered:
            self.answer_share = self._answered / self._max_answered

    def add_transfer(self, num_bytes: float, seconds: float) -> None:
        """Add a measured import of states."""
        if num_bytes and seconds > 0:
            self._sent_bytes, self._sent_s = FADING * self._sent_bytes + num_bytes, FADING * self._sent_s + seconds
            self.bytes_per_s = self._sent_bytes / self._sent_s


@dataclass(frozen=True)
class Quantum:
    """Maximum run time of a group. num_workers: workers that share the remaining work. least_s: lower bound."""

    num_workers: int
    least_s: float = LEAST_GROUP_S

    def of(self, left_s: float) -> float:
        """Return the maximum seconds of a group while left_s of work remain."""
        share = left_s / self.num_workers
        return min(max(share / GROUPS_PER_SHARE, self.least_s), MOST_SHARES * share)


def estimate(items: Iterable[Item], rates: Rates) -> None:
    """Estimate the run time of each request."""
    for item in items:
        item.seconds = rates.seconds(item.prefill_tokens, item.max_answer_tokens)
        item.critical_path_s = max(item.critical_path_s, item.seconds)


class Cutter:
    """Cuts submitted requests into groups.

    A cluster is a tuple (seconds, requests) whose requests stay in one group. All requests but its first resume from a
    state that another request of the cluster makes, or one a few tokens above it. A request resumes from its own state
    if its group makes that, and otherwise from the one above, so that groups which share a few tokens more than others
    do not wait for each other.
    """

    def __init__(self, items: list[Item], quantum: Quantum, other_s: float = 0.0, least_sent_tokens: int = 1) -> None:
        """items: requests in the plan's order, with estimates. other_s: seconds of work that is queued already.
        least_sent_tokens: see ClusterSettings."""
        self._least_sent_tokens = least_sent_tokens
        self._items, self._quantum = items, quantum
        self._here = {item.number for item in items}
        self._left_s = other_s + sum(item.seconds for item in items)
        self._groups: list[Group] = []

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
        if clusters and total > self._quantum.of(self._left_s):
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
            if bag and bag_s + seconds > self._quantum.of(self._left_s):
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
                item.resume_above(self._anchor(item))
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
