"""The driver: an engine to the job, which has workers do the plan unit by unit.

Must not know: where workers run, text, files, tensors. Invariants: every request that was submitted comes back once;
nothing waits without a bound; while nobody dies, nothing is computed that the plan does not compute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from apcbatch.cluster.crew import Crew, Errand, Worker
from apcbatch.cluster.intake import Intake
from apcbatch.cluster.items import Group, Item, unfinished
from apcbatch.cluster.loose import LooseItems
from apcbatch.cluster.packing import Packer
from apcbatch.cluster.placing import Placing
from apcbatch.cluster.recovery import judge, worker_lost
from apcbatch.cluster.seam import Lost, Ready, Said, Seam, WorkerFacts
from apcbatch.cluster.settings import ClusterCounters, ClusterSettings, Hooks
from apcbatch.cluster.staffing import Staffing
from apcbatch.cluster.states import States
from apcbatch.cluster.unit import Answer, Done, Key, Made, Message, Without
from apcbatch.cluster.units import Cutter, Quantum, estimate
from apcbatch.engine.coverage import CoverageTree
from apcbatch.engine.serving import answered
from apcbatch.errors import StoppedError
from apcbatch.types import Request, Result

if TYPE_CHECKING:
    from apcbatch.engine.observer import Observer

LONGEST_WAIT_S = 0.25
WATCH_EVERY_S = 1.0


class ClusterEngine:
    """The face of an engine (job/engine.py::JobEngine) over the workers of a seam. Opening it waits for the first
    worker; StoppedError if none comes."""

    def __init__(self, seam: Seam, settings: ClusterSettings, hooks: Hooks) -> None:
        self._seam, self._settings, self._hooks = seam, settings, hooks
        self._crew = Crew(seam, settings.workers, settings.most_replaced, hooks.say)
        self._states = States(settings.most_states)
        self._placing = Placing()
        self._loose = LooseItems(hooks.conversation_of)
        self._staffing = Staffing(self._crew, self._placing, self._loose, settings.idle_s)
        self._counters = ClusterCounters()
        self._coverage = CoverageTree()  # of what all workers have computed
        self._observer: Observer | None = None
        self._results: list[Result] = []
        self._num_unfinished = 0
        self._num_errands = 0  # units at workers
        self._look_again = 0.0  # when to look for workers that could be given something
        self._watch_again = 0.0
        self._facts = self._first_facts()
        facts = self._facts
        self.fingerprint, self.key_fingerprint = facts.fingerprint, facts.key_fingerprint
        self.footprint, self.dtype, self.device = facts.footprint, facts.dtype, facts.device
        self.context_length, self.vocab_size = facts.context_length, facts.vocab_size
        self._intake = Intake(facts.key_fingerprint)
        self._packer = Packer(hooks.to_wire, settings.send_slack_s)

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Pull requests lazily and yield results as they finish, failures included."""
        return answered(self, requests)

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and not yet handed back."""
        return self._num_unfinished + len(self._results)

    @property
    def wants_more(self) -> bool:
        """Whether more can be read ahead."""
        intake = self._intake
        return (
            len(intake.buffered) + len(self._loose) < self._settings.ahead_requests
            and intake.buffered_tokens < self._settings.ahead_tokens
        )

    @property
    def counters(self) -> ClusterCounters:
        """What the workers and the driver have done so far."""
        counters = self._counters
        counters.states_dropped, counters.states_lost = self._states.num_dropped, self._states.num_lost
        counters.workers_lost = self._crew.num_lost
        counters.workers = [tally.summary() for tally in self._crew.tallies if tally.node or tally.ending]
        counters.unique_tokens = self._coverage.unique_tokens
        return counters

    def can_run(self, request: Request) -> bool:
        """Whether `submit` would take a request."""
        return self._hooks.can_run(request, self._facts)

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Those of the prefix keys whose snapshot every worker finds in its store."""
        return self._hooks.held(keys)

    def observe(self, observer: Observer) -> None:
        """Tell an observer from now on of each prompt that is answered. Steps and snapshots are the workers' own."""
        self._observer = observer

    def submit(self, request: Request) -> None:
        """Queue a request; those with a plan come in the plan's order."""
        item = self._intake.add(request)
        if request.plan is None:
            self._loose.add(item)
            self._look_again = 0.0
        self._num_unfinished += 1

    def step(self) -> list[Result]:
        """Hand out what can be handed out, wait a little for what workers say, and return the requests that ended."""
        self._cut()
        self._hand_out()
        if not self._results and self._num_unfinished:
            self._listen(max(0.0, min(LONGEST_WAIT_S, self._look_again - self._seam.clock())))
            self._hand_out()
        results, self._results = self._results, []
        return results

    def drop_waiting(self) -> None:
        """Drop the requests that are at no worker."""
        items = self._intake.drop() + self._loose.clear()
        for group in self._placing.clear():
            items += group.items
        for item in items:
            item.is_done = True
            self._states.ended(item)
        self._num_unfinished -= len(items)
        self._states.release_all_unwanted()

    def abort(self) -> None:
        """Drop every request that is not finished. The workers that have some are ended."""
        self.drop_waiting()
        for worker in self._crew:
            for errand in worker.errands:
                self._forget_errand(worker, errand)
        self._crew.kill_all()
        self._states.clear()
        self._num_unfinished = 0
        self._results.clear()

    def flush(self) -> None:
        """Nothing to wait for: a worker has its snapshots on disk before it says that a unit is done."""

    def close(self) -> None:
        """End the workers."""
        self._crew.kill_all()
        self._seam.close()

    def _first_facts(self) -> WorkerFacts:
        while not self._crew.ready:
            self._listen(LONGEST_WAIT_S)
        return self._crew.ready[0].known

    def _cut(self) -> None:
        """Cut what is buffered once little is left to hand out."""
        placing, crew = self._placing, self._crew
        if not self._intake.buffered or not crew.ready or len(placing.queue) >= len(crew):
            return
        items = self._intake.take()
        estimate(items, crew.rates)
        quantum = Quantum(max(len(crew), 1), self._settings.least_unit_s)
        for group in Cutter(items, quantum, placing.seconds).cut():
            placing.place(group)
        self._look_again = 0.0

    def _hand_out(self) -> None:
        """Give units to the workers that can take one."""
        now = self._seam.clock()
        if now < self._look_again:
            return
        crew, placing = self._crew, self._placing
        self._force_if_stuck()
        if not len(placing.queue) and not len(self._loose):
            self._look_again = float("inf")  # whatever comes says so
            return
        while (worker := crew.taker()) is not None and self._may_have_more(worker):
            if not self._give(worker) and not any(self._give(other) for other in crew.takers()):
                break  # what is ready leaves more states than any node has room for
        while len(self._loose) and any([self._give_loose(worker) for worker in crew.takers()]):
            pass  # each gets some before anybody gets more
        self._look_again = crew.next_free()

    def _may_have_more(self, worker: Worker) -> bool:
        """Whether a worker has no more than its fair share of all unanswered requests."""
        return not worker.errands or worker.load * len(self._crew) <= self._num_unfinished

    def _give(self, worker: Worker) -> bool:
        """Give a worker a unit; False if there is none for it."""
        group = self._placing.take(worker.known.node, self._room(worker), is_idle=not worker.errands)
        if group is None:
            return False
        self._send(worker, group)
        return True

    def _give_loose(self, worker: Worker) -> bool:
        """Give a worker requests without a plan; False if there are none for it."""
        items = self._loose.take(worker.id, len(self._crew.ready))
        if not items:
            return False
        self._send(worker, Group(items))
        return True

    def _room(self, worker: Worker) -> float:
        """How many states a group may leave on a worker's node. Where there is little room, a worker rather waits for
        another one than makes a state that goes before it is read, but not once half of them wait: then a state that
        is computed twice costs less."""
        is_waiting_worth_it = 2 * self._num_errands >= len(self._crew)
        facts = worker.known
        return self._states.room(facts.node, facts.state_bytes) if is_waiting_worth_it else float("inf")

    def _force_if_stuck(self) -> None:
        """If groups wait for each other in a ring, the first one goes on alone."""
        if not self._num_errands and not len(self._placing.queue) and not len(self._loose) and self._placing.waiting:
            self._placing.force()

    def _send(self, worker: Worker, group: Group) -> None:
        """Give a group to a worker."""
        facts = worker.known
        package = self._packer.pack(group, facts, self._crew.rates)
        unit, items = package.unit, {item.number: item for item in group.items}
        import_bytes = sum(facts.footprint.pool_bytes(state.position) for state in package.imports.values())
        errand = Errand(unit.number, group, items, package.exports, package.imports, package.expected_s, import_bytes)
        self._crew.begin(worker, errand)
        self._num_errands += 1
        for state in package.exports.values():
            self._states.promise(facts.node, facts.footprint.pool_bytes(state.position))
        self._counters.units += 1
        self._counters.states_sent += package.num_sent
        self._seam.submit(worker.id, unit, {key: state.handle for key, state in package.imports.items()})
        for state in package.imports.values():
            state.nodes.add(facts.node)

    def _listen(self, seconds: float) -> None:
        """Wait for what workers say, and give up those that say nothing."""
        for event in self._seam.wait(seconds):
            worker = self._crew.get(event.worker)
            if worker is None:
                self._counters.messages_ignored += 1
            elif isinstance(event, Ready):
                if self._crew.welcome(worker, event.facts):
                    self._look_again = 0.0
            elif isinstance(event, Lost):
                if event.with_node and worker.facts is not None:
                    self._states.forget_node(worker.known.node)
                at_work = () if event.with_node else self._seam.at_work(worker.id)
                self._lose(worker, event.reason, at_work)
            elif isinstance(event, Said):
                worker.heard = self._seam.clock()
                self._hear(worker, event.message)
        now, settings = self._seam.clock(), self._settings
        if now >= self._watch_again:
            self._watch_again = now + WATCH_EVERY_S
            for worker, reason in self._crew.silent(now, settings.worker_timeout_s, settings.start_timeout_s):
                at_work = self._seam.at_work(worker.id)
                self._seam.kill(worker.id)
                self._lose(worker, reason, at_work)
            for worker in self._staffing.settle(now) if self._num_unfinished else ():
                self._forget(worker)
        if not len(self._crew):
            work = f"{self.num_unfinished} unanswered requests" if self.num_unfinished else "the first request"
            raise StoppedError(
                f"no worker is left: {self._crew.last_reason}; expected at least one to go on with {work}. "
                "See what ended them, and continue with --resume"
            )

    def _hear(self, worker: Worker, message: Message) -> None:
        errand = next((errand for errand in worker.errands if errand.unit == message.unit), None)
        if errand is None:
            self._counters.messages_ignored += 1
        elif isinstance(message, Answer):
            item = errand.items.get(message.number)
            if item is None or item.is_done:
                self._counters.messages_ignored += 1
                return
            result = message.result
            worker.tally.answered(result)
            if result.error is None and item.most_answer_tokens:
                tokens = sum(len(answer.token_ids) for answer in result.answers)
                self._crew.rates.add_answer(tokens, item.most_answer_tokens)
            self._end(item, result)
            if self._crew.answered(worker, errand):
                self._look_again = 0.0
        elif isinstance(message, Made):
            state = errand.exports.pop(message.key, None)
            if state is None:
                self._counters.messages_ignored += 1
                return
            facts = worker.known
            self._states.settle(facts.node, facts.footprint.pool_bytes(state.position))
            self._states.put(state, message.state, message.num_bytes, facts.node, facts.state_bytes)
            if state.waiting:
                self._placing.made(state)
                self._look_again = 0.0
        elif isinstance(message, Without):
            self._counters.imports_missed += 1
            if (state := errand.imports.get(message.key)) is not None:
                self._states.lose(state)
        elif isinstance(message, Done):
            self._done(worker, errand, message)

    def _done(self, worker: Worker, errand: Errand, message: Done) -> None:
        self._forget_errand(worker, errand)
        self._crew.end(worker, errand)
        worker.tally.units += 1
        rates = self._crew.rates
        rates.add_unit(message.seconds, message.prefill_tokens, message.decode_tokens)
        rates.add_transfer(message.counters.get("import_bytes", 0), message.counters.get("import_s", 0))
        self._counters.prefill_tokens += message.prefill_tokens
        self._counters.decode_tokens += message.decode_tokens
        self._counters.add(message.counters)
        self._again([unfinished(errand.items.values())], None, "the unit ended without it")
        self._look_again = 0.0

    def _forget_errand(self, worker: Worker, errand: Errand) -> None:
        """A worker is no longer at a unit: what it has not said of it will not come."""
        self._num_errands -= 1
        for state in errand.exports.values():
            self._states.settle(worker.known.node, worker.known.footprint.pool_bytes(state.position))

    def _lose(self, worker: Worker, reason: str, at_work: Collection[int] | None) -> None:
        """A worker is gone: what it had goes back. at_work: see judge."""
        self._crew.lose(worker, reason)
        self._forget(worker)
        self._again([unfinished(errand.items.values()) for errand in worker.errands], at_work, reason)

    def _forget(self, worker: Worker) -> None:
        """What a worker had that is not there any more is nobody's; the states that it made stay."""
        self._loose.forget_worker(worker.id)
        for errand in worker.errands:
            self._forget_errand(worker, errand)

    def _again(self, units: Iterable[list[Item]], at_work: Collection[int] | None, reason: str) -> None:
        """Requests that came back without a result are done again, or given up. See judge."""
        verdict = judge(units, at_work)
        for item in verdict.guilty:
            self._end(item, worker_lost(item, reason))
        for group in verdict.groups:
            self._counters.requests_again += len(group.items)
            self._placing.place(group)
        self._look_again = 0.0

    def _end(self, item: Item, result: Result) -> None:
        """A request has its result."""
        item.is_done = True
        result.tag = item.request.tag
        self._results.append(result)
        self._num_unfinished -= 1
        self._placing.forsaken(self._states.ended(item, has_failed=result.error is not None))
        if item.resume is not None:
            self._states.release_unwanted(item.resume)
        if result.error is None:
            self._note(item, result)

    def _note(self, item: Item, result: Result) -> None:
        """A request was answered: note what is computed now, as an engine does."""
        tokens, request = item.tokens, item.request
        if request.keep_answer and result.token_ids:  # the last token is chosen and not computed
            tokens = np.concatenate((tokens, np.asarray(result.token_ids[:-1], np.int32)))
        self._coverage.insert(tokens)
        self._coverage.count(tokens)
        if self._observer is not None:
            self._observer.answered(tokens[: result.prompt_tokens], result.cached_tokens, result.cached_from)
