"""ClusterEngine: an engine that sends its requests to workers in units and collects the results.

`step` cuts submitted requests into groups (tasks.py), assigns groups to free workers as units (scheduler.py,
plan_view.py), waits for messages, and requeues the unfinished requests of lost workers (recovery.py).

Invariants:
- Each submitted request is returned once.
- Every wait is bounded.
- As long as no worker is lost and no object store is full, the workers compute only the tokens that the plan computes,
  and those that ClusterSettings.least_sent_tokens allows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from apcbatch.cluster.plan_view import pack
from apcbatch.cluster.recovery import recover, worker_lost
from apcbatch.cluster.runtime import (
    ClusterCounters,
    ClusterSettings,
    Hooks,
    Lost,
    Ready,
    Received,
    Runtime,
    WorkerId,
)
from apcbatch.cluster.scheduler import GroupScheduler, SubmitBuffer, UnplannedQueue
from apcbatch.cluster.states import StateTable
from apcbatch.cluster.tasks import Cutter, Group, Item, unfinished
from apcbatch.cluster.wire import Answer, Done, Exported, ImportFailed, Key, Message
from apcbatch.cluster.workers import Worker, WorkerTable
from apcbatch.engine.counters import Counters
from apcbatch.engine.coverage import CoverageTree
from apcbatch.engine.serving import answered
from apcbatch.engine.validation import check_request
from apcbatch.errors import RequestError, StoppedError
from apcbatch.types import Request, Result

LONGEST_WAIT_S = 0.25
WATCH_EVERY_S = 1.0


class ClusterEngine:
    """A JobEngine (job/work.py) over the workers of a runtime.

    The constructor waits for the first worker. Raises StoppedError if none becomes ready.
    """

    def __init__(self, runtime: Runtime, settings: ClusterSettings, hooks: Hooks) -> None:
        self._runtime, self._settings, self._hooks = runtime, settings, hooks
        self._workers = WorkerTable(runtime, settings.workers, hooks.say)
        self._states = StateTable()
        self._scheduler = GroupScheduler()
        self._unplanned = UnplannedQueue(hooks.conversation_of)
        self._counters: dict[WorkerId, Counters] = {}
        self._coverage = CoverageTree()  # the tokens that any worker has computed
        self._results: list[Result] = []
        self._num_unfinished = self._num_units = 0
        self._watch_again = 0.0
        while not self._workers.ready:
            self._poll()
        facts = self._facts = self._workers.ready[0].known
        self.fingerprint, self.key_fingerprint = facts.fingerprint, facts.key_fingerprint
        self.footprint, self.dtype, self.device = facts.footprint, facts.dtype, facts.device
        self.context_length, self.vocab_size = facts.context_length, facts.vocab_size
        self.reading_tokens = facts.reading_tokens
        self._submitted = SubmitBuffer(facts.key_fingerprint)

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        return answered(self, requests)

    @property
    def num_unfinished(self) -> int:
        """Number of submitted requests whose results `step` has not returned yet."""
        return self._num_unfinished + len(self._results)

    @property
    def wants_more(self) -> bool:
        """Whether fewer requests and tokens are buffered than the read-ahead limits allow."""
        submitted = self._submitted
        return (
            len(submitted.buffered) + len(self._unplanned) < self._settings.ahead_requests
            and submitted.buffered_tokens < self._settings.ahead_tokens
        )

    @property
    def counters(self) -> ClusterCounters:
        """Counters of all workers so far, summed."""
        counters = ClusterCounters.total(self._counters.values())
        counters.workers = [counts.summary() for counts in self._workers.all_counts if counts.node or counts.ending]
        counters.unique_tokens = self._coverage.unique_tokens
        counters.unique_tokens_is_bound = self._coverage.has_forgotten
        return counters

    def can_run(self, request: Request) -> bool:
        facts = self._facts
        try:
            check_request(request, facts.vocab_size, facts.context_length, facts.max_request_tokens)
        except RequestError:
            return False
        return True

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Return the subset of the prefix keys whose snapshot is in the store of every node with a worker."""
        return self._hooks.held(keys)

    def submit(self, request: Request) -> None:
        """Queue a request. Requests with a plan must be submitted in the plan's order."""
        item = self._submitted.add(request)
        if request.plan is None:
            self._unplanned.add(item)
        self._num_unfinished += 1

    def add_readers(self, key: Key, count: int) -> None:
        if (state := self._submitted.add_readers(key, count)) is not None:
            self._states.release_unwanted(state)

    def learn_answer(self, token_ids: list[int]) -> None:
        """Do nothing: each worker drafts from its own answers only."""

    def step(self) -> list[Result]:
        """Assign units to free workers, wait shortly for messages, and return the results of finished requests."""
        self._cut()
        self._assign_units()
        if not self._results and self._num_unfinished:
            self._poll()
            self._assign_units()
        results, self._results = self._results, []
        return results

    def drop_waiting(self) -> None:
        """Drop all requests that are not assigned to a worker."""
        items = self._submitted.drop() + self._unplanned.clear()
        for group in self._scheduler.clear():
            items += group.items
        for item in items:
            item.is_done = True
            self._states.ended(item)
        self._num_unfinished -= len(items)
        self._states.release_all_unwanted()

    def abort(self) -> None:
        """Drop all unfinished requests, and end the workers that compute some. `close` ends the others."""
        self.drop_waiting()
        self._workers.kill_busy()
        self._states.clear()
        self._num_unfinished = 0
        self._results.clear()

    def flush(self) -> None:
        """Do nothing: a worker flushes its snapshots to disk before it sends Done."""

    def close(self) -> None:
        """End all workers and close the runtime."""
        self._runtime.close()

    def _cut(self) -> None:
        """Cut the submitted requests into groups if a worker is ready and there are fewer ready groups than workers."""
        scheduler, workers, settings = self._scheduler, self._workers, self._settings
        if not self._submitted.buffered or not workers.ready or scheduler.num_ready >= len(workers):
            return
        items = self._submitted.take()
        workers.rates.estimate(items)
        queued_s = sum(group.seconds for group in scheduler)
        cutter = Cutter(items, len(workers), queued_s, settings.least_unit_s, settings.least_sent_tokens)
        for group in cutter.cut():
            scheduler.add(group)

    def _assign_units(self) -> None:
        """Assign units to workers until none of them may have more, or nothing is ready."""
        scheduler, workers = self._scheduler, self._workers
        if scheduler.waiting and not (scheduler.num_ready or len(self._unplanned)):
            if any(worker.assignments for worker in workers):
                return
            scheduler.break_deadlock()
        while scheduler.num_ready and any([self._assign(worker) for worker in workers.free()]):
            pass  # each round gives one group to each free worker
        while len(self._unplanned) and any([self._assign_unplanned(worker) for worker in workers.free()]):
            pass

    def _assign(self, worker: Worker) -> bool:
        """Assign the next planned group to a worker, unless it has more than its fair share of the unfinished requests.
        Return False if it gets none."""
        if worker.assignments and worker.load * len(self._workers) > self._num_unfinished:
            return False
        group = self._scheduler.take(worker.known.node, is_idle=not worker.assignments)
        if group is not None:
            self._submit(worker, group)
        return group is not None

    def _assign_unplanned(self, worker: Worker) -> bool:
        """Assign requests without a plan to a worker. Return False if there are none for it."""
        items = self._unplanned.take(worker.id, len(self._workers.ready))
        if items:
            self._submit(worker, Group(items))
        return bool(items)

    def _submit(self, worker: Worker, group: Group) -> None:
        """Send a group to a worker as a unit."""
        node = worker.known.node
        self._num_units += 1
        unit, assignment = pack(self._num_units, group, worker.known.footprint, self._hooks.to_wire)
        self._workers.begin(worker, assignment)
        self._runtime.submit(worker.id, unit, {key: state.handle for key, state in assignment.imports.items()})
        for state in assignment.imports.values():
            worker.counts.states_received += node not in state.nodes
            state.nodes.add(node)

    def _poll(self) -> None:
        """Wait at most LONGEST_WAIT_S for events, and handle them. Every WATCH_EVERY_S, also end workers that were
        silent for too long. Raises StoppedError if no worker is left."""
        for event in self._runtime.wait(LONGEST_WAIT_S):
            worker = self._workers.get(event.worker)
            if worker is None:  # already ended
                continue
            if isinstance(event, Ready):
                self._workers.add_ready(worker, event.facts)
            elif isinstance(event, Lost):
                if event.with_node and worker.facts is not None:
                    self._states.forget_node(worker.known.node)
                in_flight = () if event.with_node else self._runtime.in_flight(worker.id)
                self._lose(worker, event.reason, in_flight)
            elif isinstance(event, Received):
                worker.heard = self._runtime.clock()
                self._on_message(worker, event.message)
        now, settings = self._runtime.clock(), self._settings
        if now >= self._watch_again:
            self._watch_again = now + WATCH_EVERY_S
            for worker, reason in self._workers.silent(now, settings.worker_timeout_s, settings.start_timeout_s):
                in_flight = self._runtime.in_flight(worker.id)
                self._runtime.kill(worker.id)
                self._lose(worker, reason, in_flight)
        if not len(self._workers):
            work = f"{self.num_unfinished} unanswered requests" if self.num_unfinished else "the first request"
            raise StoppedError(
                f"no worker is left: {self._workers.last_reason}; expected at least one to continue with {work}. "
                "See what ended them, and continue with --resume"
            )

    def _on_message(self, worker: Worker, message: Message) -> None:
        assignment = next((assignment for assignment in worker.assignments if assignment.unit == message.unit), None)
        if assignment is None:  # the unit is done; this message is a duplicate
            return
        if isinstance(message, Answer):
            item = assignment.items.get(message.number)
            if item is None or item.is_done:
                return
            result = message.result
            worker.counts.add(result)
            if result.error is None:
                self._workers.rates.add(item, result)
            self._end(item, result)
            self._workers.answered(worker, assignment)
        elif isinstance(message, Exported):
            state = assignment.exports.pop(message.key, None)
            if state is not None:
                self._states.put(state, message.state, message.num_bytes, worker.known.node, worker.known.state_bytes)
                self._scheduler.made(state)
        elif isinstance(message, ImportFailed):
            worker.counts.states_missing += 1
            if (state := assignment.imports.get(message.key)) is not None:
                self._states.lose(state)
        elif isinstance(message, Done):
            self._workers.end(worker, assignment)
            worker.counts.units += 1
            self._counters[worker.id] = message.counters
            self._retry([unfinished(assignment.items.values())], None, "the unit ended without it")

    def _lose(self, worker: Worker, reason: str, in_flight: Collection[int] | None) -> None:
        """Requeue the unfinished requests of a lost worker, and let any worker serve its conversations. The states that
        it has exported stay. in_flight: see recover."""
        self._workers.lose(worker, reason)
        self._unplanned.forget_worker(worker.id)
        units = [unfinished(assignment.items.values()) for assignment in worker.assignments]
        worker.counts.requests_unfinished += sum(map(len, units))
        self._retry(units, in_flight, reason)

    def _retry(self, units: Iterable[list[Item]], in_flight: Collection[int] | None, reason: str) -> None:
        """Requeue or fail requests whose unit ended without their result. See recover."""
        failed, groups = recover(units, in_flight)
        for item in failed:
            self._end(item, worker_lost(item, reason))
        for group in groups:
            self._scheduler.add(group)

    def _end(self, item: Item, result: Result) -> None:
        """Queue the result of a request, and release the states it used."""
        item.is_done = True
        result.tag = item.request.tag
        self._results.append(result)
        self._num_unfinished -= 1
        self._scheduler.orphaned(self._states.ended(item, has_failed=result.error is not None))
        if item.resume is not None:
            self._states.release_unwanted(item.resume)
        if result.error is None:
            self._record(item, result)

    def _record(self, item: Item, result: Result) -> None:
        """Count the tokens of an answered request as computed."""
        tokens, request = item.tokens, item.request
        if request.keep_answer and result.token_ids:  # the last token was sampled, but no pass has consumed it
            tokens = np.concatenate((tokens, np.asarray(result.token_ids[:-1], np.int32)))
        self._coverage.insert(tokens, counts=True)
