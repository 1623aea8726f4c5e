"""Queues of the driver: submitted requests, groups of planned requests, and requests without a plan.

A worker gets the group with the longest remaining path. Among nearly equal groups it gets the one with the most bytes
of needed states on the worker's node, which sends fewer states: on a network of 1 Gbit/s that saves up to a sixth of a
short run (benchmarks/cluster.py --bandwidth 1.25e8).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator

from apcbatch.cluster.runtime import WorkerId
from apcbatch.cluster.tasks import Group, Item, State
from apcbatch.cluster.wire import Key
from apcbatch.prefix import PrefixHasher
from apcbatch.types import Request

MOST_LOOKED_AT = 8
NEARLY = 0.8  # groups with at least this share of the longest path count as equal


class GroupScheduler:
    """Groups that are not assigned to a worker.

    waiting: groups that wait for a state, in the order in which they were added. The other groups are ready.
    """

    def __init__(self) -> None:
        self.waiting: dict[Group, None] = {}
        self._alone: deque[Group] = deque()  # ready groups that get a worker for themselves
        self._others: list[tuple[float, int, Group]] = []  # heap: (-priority, number, group)

    def __iter__(self) -> Iterator[Group]:
        yield from self.waiting
        yield from self._alone
        yield from (entry[2] for entry in self._others)

    @property
    def num_ready(self) -> int:
        """Number of ready groups."""
        return len(self._alone) + len(self._others)

    def add(self, group: Group) -> None:
        """Queue a group, or make it wait for the states that other groups are making.

        If a state has no maker, its first reader in the group becomes its maker.
        """
        self._forget(group)
        for state in group.external_states():
            if state.handle is not None:
                continue
            if state.maker is None:
                group.first_reader(state).become_maker(state)
            elif state.maker.group is not group:
                group.pending.add(state)
        for state in group.pending:
            state.waiting.add(group)
        if group.pending:
            self.waiting[group] = None
        elif group.is_alone:
            self._alone.append(group)
        else:
            heapq.heappush(self._others, (-group.priority, group.number, group))

    def take(self, node: str, is_idle: bool) -> Group | None:
        """Take the next group for a worker on a node, with all states held that it needs; None if there is none.

        is_idle: the worker has no unit, so a group with is_alone may be taken.
        """
        while self._others or (is_idle and self._alone):
            group = self._alone.popleft() if is_idle and self._alone else self._pop(node)
            if all(state.handle is not None for state in group.external_states()):
                return group
            self.add(group)
        return None

    def _pop(self, node: str) -> Group:
        """Remove a group from the heap: of those with nearly the longest path, the one with the most bytes of needed
        states on a node."""
        entries = [heapq.heappop(self._others)]
        while self._others and len(entries) < MOST_LOOKED_AT and self._others[0][0] <= NEARLY * entries[0][0]:
            entries.append(heapq.heappop(self._others))
        best = max(entries, key=lambda entry: sum(s.num_bytes for s in entry[2].external_states() if node in s.nodes))
        for entry in entries:
            if entry is not best:
                heapq.heappush(self._others, entry)
        return best[2]

    def made(self, state: State) -> None:
        """Queue the groups that waited only for this state, which is now held."""
        for group in sorted(state.waiting, key=lambda group: group.number):
            state.waiting.discard(group)
            group.pending.discard(state)
            if not group.pending:
                self.add(group)

    def orphaned(self, states: Iterable[State]) -> None:
        """For each state that lost its maker, let the first group that waits for it make it."""
        for state in states:
            for group in sorted(state.waiting, key=lambda group: group.number):
                self.add(group)

    def break_deadlock(self) -> None:
        """Make the first waiting group compute the states it waits for. Call it when nothing runs and no group is
        ready."""
        group = min(self.waiting, key=lambda group: group.number)
        for state in list(group.pending):
            group.first_reader(state).become_maker(state)
        self.add(group)

    def clear(self) -> list[Group]:
        """Remove and return all groups."""
        groups = list(self)
        for group in groups:
            self._forget(group)
        self._alone.clear()
        self._others.clear()
        return groups

    def _forget(self, group: Group) -> None:
        """Remove a group from the waiting ones."""
        self.waiting.pop(group, None)
        for state in group.pending:
            state.waiting.discard(group)
        group.pending.clear()


class SubmitBuffer:
    """Links submitted requests by the states between them, and buffers them until they are cut into groups.

    buffered: requests with a plan that are not cut yet, in the plan's order. buffered_tokens: their prompt tokens.
    """

    def __init__(self, key_fingerprint: bytes) -> None:
        self._key_fingerprint = key_fingerprint
        self._latest: dict[Key, State] = {}  # states with readers still to be submitted, by key
        self._num_submitted = 0
        self.buffered: list[Item] = []
        self.buffered_tokens = 0

    def add(self, request: Request) -> Item:
        """Number a request. If it has a plan, buffer it and link it to the state it resumes from."""
        number = self._num_submitted
        self._num_submitted += 1
        item = Item(number, request)
        if request.plan is not None:
            self._link(item)
            self.buffered.append(item)
            self.buffered_tokens += len(request.token_ids)
        return item

    def take(self) -> list[Item]:
        """Remove and return all buffered requests."""
        taken, self.buffered, self.buffered_tokens = self.buffered, [], 0
        return taken

    def drop(self) -> list[Item]:
        """Remove and return all buffered requests, and expect no more readers of any state."""
        for state in self._latest.values():
            state.future_readers = 0
        self._latest.clear()
        return self.take()

    def add_readers(self, key: Key, count: int) -> State | None:
        """Expect more readers of a state, or -1: one less. Return the state; None if it has no readers to come."""
        state = self._latest.get(key)
        if state is not None:
            state.future_readers += count
            if not state.future_readers:
                del self._latest[key]
        return state

    def _link(self, item: Item) -> None:
        """Link a request to the state it resumes from and to the states it makes."""
        plan = item.request.plan
        assert plan is not None, "only a request with a plan has states"
        positions = sorted({plan.resume_at, *plan.keep} - {0})
        if not positions:
            return
        keys = dict(PrefixHasher(self._key_fingerprint, item.tokens).keys_at(positions))
        state = self._latest.get(keys[plan.resume_at]) if plan.resume_at else None
        if state is not None:
            item.resume = state
            state.readers.add(item)
            state.future_readers -= 1
            if not state.future_readers:
                del self._latest[state.key]
        parent = item.resume
        for position, reads in zip(plan.keep, plan.reads, strict=True):
            if reads:
                key = keys[position]
                made = State(key, position, item.number, reads, item, parent)
                if (before := self._latest.get(key)) is not None:  # made before, for a reader of the next window
                    made.future_readers, before.future_readers = reads + before.future_readers, 0
                item.keeps[position] = self._latest[key] = parent = made


MOST_TOGETHER = 32  # maximum requests without a plan in one unit
MOST_CONVERSATIONS = 1 << 17  # maximum conversations whose worker is remembered


class UnplannedQueue:
    """Waiting requests without a plan, in one queue per conversation.

    A queue waits for the worker that served its conversation before, because that worker has the states. A request
    without a conversation gets a queue of its own, with the request for its name.
    """

    def __init__(self, conversation_of: Callable[[Request], Hashable]) -> None:
        """conversation_of: see Hooks."""
        self._conversation_of = conversation_of
        self._worker_of: OrderedDict[Hashable, WorkerId] = OrderedDict()
        self._queues: dict[Hashable, deque[Item]] = {}
        self._owned: dict[WorkerId | None, dict[Hashable, None]] = {}  # names of the queues by worker; None: any worker
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Item]:
        return (item for queue in self._queues.values() for item in queue)

    def add(self, item: Item) -> None:
        """Add a request to the queue of its conversation."""
        conversation = self._conversation_of(item.request)
        name = item if conversation is None else conversation
        if name not in self._queues:
            self._queues[name] = deque()
            self._owned.setdefault(self._worker_of.get(name), {})[name] = None
        self._queues[name].append(item)
        self._num_waiting += 1

    def take(self, worker: WorkerId, num_workers: int) -> list[Item]:
        """Take requests for a worker: first from its own conversations, then up to its share from new ones."""
        most = max(1, min(MOST_TOGETHER, -(-self._num_waiting // max(1, num_workers))))
        taken = self._take_from(worker, MOST_TOGETHER, worker)
        taken += self._take_from(None, most - len(taken), worker)
        while len(self._worker_of) > MOST_CONVERSATIONS:
            self._worker_of.popitem(last=False)
        return sorted(taken, key=lambda item: item.number)

    def forget_worker(self, worker: WorkerId) -> None:
        """Let any worker serve the conversations of a worker that has ended."""
        for conversation in [one for one, owner in self._worker_of.items() if owner == worker]:
            del self._worker_of[conversation]
        self._owned.setdefault(None, {}).update(self._owned.pop(worker, {}))

    def clear(self) -> list[Item]:
        """Remove and return all requests."""
        items = list(self)
        self._queues.clear()
        self._owned.clear()
        self._num_waiting = 0
        return items

    def _take_from(self, owner: WorkerId | None, most: int, first_free: WorkerId) -> list[Item]:
        """Take at most `most` requests from the queues of an owner (None: queues for any worker).

        Requests that are left in such a queue then wait for the worker `first_free`.
        """
        owned = self._owned.get(owner, {})
        taken: list[Item] = []
        while owned and len(taken) < most:
            name = next(iter(owned))
            del owned[name]
            queue = self._queues[name]
            while queue and len(taken) < most:
                taken.append(queue.popleft())
            if queue:
                self._owned.setdefault(first_free, {})[name] = None
            else:
                del self._queues[name]
            if not isinstance(name, Item):
                self._worker_of[name] = first_free
                self._worker_of.move_to_end(name)
        self._num_waiting -= len(taken)
        return taken
