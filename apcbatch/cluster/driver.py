"""ClusterEngine: an engine that sends its requests to workers in units and collects the results.

`step` cuts submitted requests into groups (tasks.py), assigns groups to free workers as units (scheduler.py,
plan_view.py), waits for messages, and requeues the unfinished requests of lost workers (recovery.py).

Invariants:
- Each submitted request is returned once.
- Every wait is bounded.
- As long as no worker is lost, the workers compute only the tokens that the plan computes, and those that
  ClusterSettings.least_sent_tokens and send_slack_s allow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from apcbatch.cluster.plan_view import Assignment, pack
from apcbatch.cluster.recovery import recover, worker_lost
from apcbatch.cluster.runtime import (
    ClusterCounters,
    ClusterSettings,
    Hooks,
    Lost,
    Ready,
    Received,
    Runtime,
    WorkerFacts,
)
from apcbatch.cluster.scheduler import GroupScheduler, SubmitBuffer, UnplannedQueue
from apcbatch.cluster.states import StateTable
from apcbatch.cluster.tasks import Cutter, Group, Item, Quantum, estimate, unfinished
from apcbatch.cluster.wire import Answer, Done, Exported, ImportFailed, Key, Message
from apcbatch.cluster.workers import Autoscaler, Worker, WorkerTable
from apcbatch.engine.coverage import CoverageTree
from apcbatch.engine.serving import answered
from apcbatch.errors import StoppedError
from apcbatch.types import Request, Result

LONGEST_WAIT_S = 0.25
WATCH_EVERY_S = 1.0


class ClusterEngine:
    """A JobEngine (job/work.py) over the workers of a runtime.

    The constructor waits for the first worker. Raises StoppedError if none becomes ready.
    """

    def __init__(self, runtime: Runtime, settings: ClusterSettings, hooks: Hooks) -> None:
        self._runtime, self._settings, self._hooks = runtime, settings, hooks
        self._workers = WorkerTable(runtime, settings.workers, settings.most_replaced, hooks.say)
        self._states = StateTable(settings.most_states)
        self._scheduler = GroupScheduler()
        self._unplanned = UnplannedQueue(hooks.conversation_of)
        self._autoscaler = Autoscaler(self._workers, self._scheduler, self._unplanned, settings.idle_s)
        self._counters = ClusterCounters()
        self._coverage = CoverageTree()  # the tokens that any worker has computed
        self._results: list[Result] = []
        self._num_unfinished = 0
        self._num_units = self._num_assignments = 0
        self._look_again = 0.0  # time of the next search for free workers
        self._watch_again = 0.0
        self._facts = self._first_facts()
        facts = self._facts
        self.fingerprint, self.key_fingerprint = facts.fingerprint, facts.key_fingerprint
        self.footprint, self.dtype, self.device = facts.footprint, facts.dtype, facts.device
        self.context_length, self.vocab_size = facts.context_length, facts.vocab_size
        self.reading_tokens = facts.reading_tokens
        self._submitted = SubmitBuffer(facts.key_fingerprint)

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Pull requests lazily and yield results as they finish, failures included."""
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
        counters = self._counters
        counters.workers = [counts.summary() for counts in self._workers.all_counts if counts.node or counts.ending]
        counters.unique_tokens = self._coverage.unique_tokens
        counters.unique_tokens_is_bound = self._coverage.has_forgotten
        return counters

    def can_run(self, request: Request) -> bool:
        """Return whether `submit` would accept a request."""
        return self._hooks.can_run(request, self._facts)

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Return the subset of the prefix keys whose snapshot is in the store of every node with a worker."""
        return self._hooks.held(keys)

    def submit(self, request: Request) -> None:
        """Queue a request. Requests with a plan must be submitted in the plan's order."""
        item = self._submitted.add(request)
        if request.plan is None:
            self._unplanned.add(item)
            self._look_again = 0.0
        self._num_unfinished += 1

    def add_readers(self, key: Key, count: int) -> None:
        """Count more pending readers of a state, planned requests that are submitted later; -1: drop one."""
        if (state := self._submitted.add_readers(key, count)) is not None:
            self._states.release_unwanted(state)

    def learn_answer(self, token_ids: list[int]) -> None:
        """Do nothing: each worker drafts from its own answers only."""

    def step(self) -> list[Result]:
        """Assign units to free workers, wait shortly for messages, and return the results of finished requests."""
        self._cut()
        self._assign_units()
        if not self._results and self._num_unfinished:
            self._poll(max(0.0, min(LONGEST_WAIT_S, self._look_again - self._runtime.clock())))
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
        """Drop all unfinished requests and end all workers."""
        self.drop_waiting()
        for worker in self._workers:
            for assignment in worker.assignments:
                self._forget_assignment(worker, assignment)
        self._workers.kill_all()
        self._states.clear()
        self._num_unfinished = 0
        self._results.clear()

    def flush(self) -> None:
        """Do nothing: a worker flushes its snapshots to disk before it sends Done."""

    def close(self) -> None:
        """End all workers and close the runtime."""
        self._workers.kill_all()
        self._runtime.close()

    def _first_facts(self) -> WorkerFacts:
        """Wait until a worker is ready, and return its facts."""
        while not self._workers.ready:
            self._poll(LONGEST_WAIT_S)
        return self._workers.ready[0].known

    def _cut(self) -> None:
        """Cut the submitted requests into groups if a worker is ready and there are fewer ready groups than workers."""
        scheduler, workers = self._scheduler, self._workers
        if not self._submitted.buffered or not workers.ready or len(scheduler.queue) >= len(workers):
            return
        items = self._submitted.take()
        estimate(items, workers.rates)
        quantum = Quantum(max(len(workers), 1), self._settings.least_unit_s)
        for group in Cutter(items, quantum, scheduler.seconds, self._settings.least_sent_tokens).cut():
            scheduler.add(group)
        self._look_again = 0.0

    def _assign_units(self) -> None:
        """Assign units to free workers until none of them may have more, or none can take a group that is left."""
        now = self._runtime.clock()
        if now < self._look_again:
            return
        workers, scheduler = self._workers, self._scheduler
        self._break_deadlock()
        if not len(scheduler.queue) and not len(self._unplanned):
            self._look_again = float("inf")  # until something is submitted or a message comes
            return
        while (worker := workers.first_free()) is not None and self._may_have_more(worker):
            if not self._assign(worker) and not any(self._assign(other) for other in workers.free_workers()):
                break  # no ready group fits any node's capacity for states
        while len(self._unplanned) and any([self._assign_unplanned(worker) for worker in workers.free_workers()]):
            pass  # each round gives one share to each free worker
        self._look_again = workers.next_free()

    def _may_have_more(self, worker: Worker) -> bool:
        """Return whether a worker has no unit, or at most its fair share of all unfinished requests."""
        return not worker.assignments or worker.load * len(self._workers) <= self._num_unfinished

    def _assign(self, worker: Worker) -> bool:
        """Assign the next planned group to a worker. Return False if no group suits it."""
        group = self._scheduler.take(worker.known.node, self._state_room(worker), is_idle=not worker.assignments)
        if group is None:
            return False
        self._submit(worker, group)
        return True

    def _assign_unplanned(self, worker: Worker) -> bool:
        """Assign requests without a plan to a worker. Return False if there are none for it."""
        items = self._unplanned.take(worker.id, len(self._workers.ready))
        if not items:
            return False
        self._submit(worker, Group(items))
        return True

    def _state_room(self, worker: Worker) -> float:
        """Return how many states a group may add to the worker's node.

        Workers of a nearly full node wait for other units to finish, so that no new state is evicted before it is read.
        Once fewer units are assigned than half the number of workers, the room is infinite: idle workers cost more than
        computing a state twice.
        """
        is_waiting_worth_it = 2 * self._num_assignments >= len(self._workers)
        facts = worker.known
        return self._states.room(facts.node, facts.state_bytes) if is_waiting_worth_it else float("inf")

    def _break_deadlock(self) -> None:
        """If groups wait for each other in a cycle, start the first one without the states it waits for."""
        if (
            not self._num_assignments
            and not len(self._scheduler.queue)
            and not len(self._unplanned)
            and self._scheduler.waiting
        ):
            self._scheduler.break_deadlock()

    def _submit(self, worker: Worker, group: Group) -> None:
        """Send a group to a worker as a unit."""
        facts = worker.known
        self._num_units += 1
        unit, assignment = pack(
            self._num_units, group, facts, self._workers.rates, self._hooks.to_wire, self._settings.send_slack_s
        )
        self._workers.begin(worker, assignment)
        self._num_assignments += 1
        for state in assignment.exports.values():
            self._states.reserve(facts.node, facts.footprint.pool_bytes(state.position))
        self._runtime.submit(worker.id, unit, {key: state.handle for key, state in assignment.imports.items()})
        for state in assignment.imports.values():
            worker.counts.states_received += facts.node not in state.nodes
            state.nodes.add(facts.node)

    def _poll(self, seconds: float) -> None:
        """Wait at most `seconds` for events, and handle them. Every WATCH_EVERY_S, also end workers that were silent
        for too long, and release or spawn workers. Raises StoppedError if no worker is left."""
        for event in self._runtime.wait(seconds):
            worker = self._workers.get(event.worker)
            if worker is None:  # already ended
                continue
            if isinstance(event, Ready):
                if self._workers.add_ready(worker, event.facts):
                    self._look_again = 0.0
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
            for worker in self._autoscaler.scale(now) if self._num_unfinished else ():
                self._forget(worker)
        if not len(self._workers):
            work = f"{self.num_unfinished} unanswered requests" if self.num_unfinished else "the first request"
            raise StoppedError(
                f"no worker is left: {self._workers.last_reason}; expected at least one to go on with {work}. "
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
            if result.error is None and item.max_answer_tokens:
                tokens = sum(len(answer.token_ids) for answer in result.answers)
                self._workers.rates.add_answer(tokens, item.max_answer_tokens)
            self._end(item, result)
            if self._workers.answered(worker, assignment):
                self._look_again = 0.0
        elif isinstance(message, Exported):
            state = assignment.exports.pop(message.key, None)
            if state is None:
                return
            facts = worker.known
            self._states.unreserve(facts.node, facts.footprint.pool_bytes(state.position))
            self._states.put(state, message.state, message.num_bytes, facts.node, facts.state_bytes)
            if state.waiting:
                self._scheduler.made(state)
                self._look_again = 0.0
        elif isinstance(message, ImportFailed):
            worker.counts.states_missing += 1
            if (state := assignment.imports.get(message.key)) is not None:
                self._states.lose(state)
        elif isinstance(message, Done):
            self._done(worker, assignment, message)

    def _done(self, worker: Worker, assignment: Assignment, message: Done) -> None:
        self._forget_assignment(worker, assignment)
        self._workers.end(worker, assignment)
        worker.counts.units += 1
        rates = self._workers.rates
        rates.add_unit(message.seconds, message.prefill_tokens, message.decode_tokens)
        rates.add_transfer(message.counters.get("import_bytes", 0), message.counters.get("import_s", 0))
        self._counters.add(message.counters)
        self._retry([unfinished(assignment.items.values())], None, "the unit ended without it")
        self._look_again = 0.0

    def _forget_assignment(self, worker: Worker, assignment: Assignment) -> None:
        """Free the capacity that was reserved for the exports of an assignment."""
        self._num_assignments -= 1
        for state in assignment.exports.values():
            self._states.unreserve(worker.known.node, worker.known.footprint.pool_bytes(state.position))

    def _lose(self, worker: Worker, reason: str, in_flight: Collection[int] | None) -> None:
        """Requeue the unfinished requests of a lost worker. in_flight: see recover."""
        self._workers.lose(worker, reason)
        self._forget(worker)
        units = [unfinished(assignment.items.values()) for assignment in worker.assignments]
        worker.counts.requests_unfinished += sum(map(len, units))
        self._retry(units, in_flight, reason)

    def _forget(self, worker: Worker) -> None:
        """Free the capacity reserved for the units of a worker that has ended, and let any worker serve its
        conversations. The states that it has exported stay."""
        self._unplanned.forget_worker(worker.id)
        for assignment in worker.assignments:
            self._forget_assignment(worker, assignment)

    def _retry(self, units: Iterable[list[Item]], in_flight: Collection[int] | None, reason: str) -> None:
        """Requeue or fail requests whose unit ended without their result. See recover."""
        recovery = recover(units, in_flight)
        for item in recovery.failed:
            self._end(item, worker_lost(item, reason))
        for group in recovery.groups:
            self._scheduler.add(group)
        self._look_again = 0.0

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
