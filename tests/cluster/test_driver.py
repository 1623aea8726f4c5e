"""The driver over simulated workers that live: the plan is done exactly, evenly, and within the bounds."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.cluster import sizing
from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.ray_cluster import Machine
from apcbatch.cluster.runtime import ClusterSettings, Hooks, Ready, WorkerFacts
from apcbatch.cluster.scheduler import GroupScheduler, SubmitBuffer
from apcbatch.cluster.states import StateTable
from apcbatch.cluster.tasks import LEAST_GROUP_S, Cutter, Group, Item, State
from apcbatch.cluster.wire import Unit
from apcbatch.config import Config
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Planner
from apcbatch.types import Request, RequestPlan, Result
from tests.cluster.runs import (
    TO_ITSELF,
    Planned,
    SeenEngine,
    audit,
    check_answers,
    check_plan,
    lower_bound,
    num_sent,
    planned,
    repeated,
    run,
)
from tests.cluster.simulator import SimRuntime, Speeds, Trouble
from tests.effort import seeds, tries
from tests.engine.runs import planned_by_window
from tests.plan.plan_oracle import dataset, numbers, random_dataset, random_windows

STEM = numbers(600, 1)


def stem_and_branches(num_branches: int, branch_tokens: int = 200) -> Planned:
    prompts = [STEM + numbers(branch_tokens, 2 + branch) for branch in range(num_branches)]
    return planned(dataset(*prompts), block_size=10)


@pytest.mark.parametrize("lots", [False, True])
def test_any_forest_is_done_as_planned(lots: bool) -> None:
    """Catches a request that is lost, doubled or resumed elsewhere than in one process, on small trees of every
    shape; a leader that is forgotten, or a state that is not exported, where readers are cut in a later lot; and
    requests that resume above their state where no other group has to wait, or further above than is allowed."""
    speeds = Speeds(prefill_tokens_per_s=20, decode_tokens_per_s=40)
    for seed in seeds(200):
        chosen = planned(random_dataset(seed), block_size=1 + seed % 5)
        least, ahead = 1 + seed % 3, 1 + seed % 4 if lots else 1 << 15
        outcome = run(chosen.requests, 1 + seed % 7, speeds, ahead_requests=ahead, least_sent_tokens=least)
        check_answers(outcome, chosen.requests)
        again = check_plan(outcome, chosen.requests, least)
        assert outcome.runtime.computed_tokens == chosen.computed_tokens + again


def test_a_shared_stem_is_computed_once() -> None:
    """Catches workers that each compute the stem that their requests share."""
    chosen = stem_and_branches(32)
    outcome = run(chosen.requests, 8, Speeds(prefill_tokens_per_s=100))
    check_plan(outcome, chosen.requests)
    assert outcome.runtime.computed_tokens == 600 + 32 * 200
    assert num_sent(outcome.engine) == 7


def test_no_group_waits_for_a_few_tokens() -> None:
    """Catches a state that is sent for each few branches that share some tokens more than the stem, whose groups wait
    for each other; and more tokens that are computed again than those."""
    branches = [STEM + numbers(9, branch // 8) + numbers(200, 50 + branch) for branch in range(64)]
    chosen = planned(dataset(*branches), block_size=1)
    sent, extra = {}, {}
    for least in (1, 16):
        outcome = run(chosen.requests, 8, Speeds(prefill_tokens_per_s=100), least_sent_tokens=least)
        check_answers(outcome, chosen.requests)
        sent[least] = num_sent(outcome.engine)
        extra[least] = outcome.runtime.computed_tokens - chosen.computed_tokens
    assert sent[1] > sent[16] == 7, "the stem goes to seven workers"
    assert extra[1] == 0 < extra[16] <= 9 * 56


@pytest.mark.parametrize("num_workers", [1, 4])
def test_windows_hand_states_on(num_workers: int) -> None:
    """Catches a state that is released before the next window has read it, one that is made twice, and one that is
    held for ever."""
    for _ in range(tries(15)):
        data, requests = random_dataset(random.randrange(10**6)), list[Request]()
        windows = random_windows(data)

        def submit(engine: ClusterEngine, data=data, windows=windows, requests=requests) -> Iterator[Request]:
            for request, _ in planned_by_window(engine, data, windows, Planner(2)):
                requests.append(request)
                yield request

        outcome = run(submit, num_workers, least_sent_tokens=1)
        check_answers(outcome, requests)
        check_plan(outcome, requests)
        assert outcome.runtime.computed_tokens == sum(
            len(one.token_ids) - one.plan.resume_at for one in requests if one.plan is not None
        )
        assert len(outcome.engine.states) == 0, "states are left that nobody reads"


def test_work_is_shared_evenly() -> None:
    """Catches units that are too long at the end, or handed out in the wrong order."""
    data = repeated(random_dataset(3), 60)
    speeds = Speeds(prefill_tokens_per_s=10)
    chosen = planned(data, block_size=4)
    for num_workers, most in ((2, 1.1), (8, 1.15)):
        outcome = run(chosen.requests, num_workers, speeds, audited=False)
        bound = max(lower_bound(chosen.requests, speeds, num_workers))
        assert outcome.runtime.last_answer_s <= most * bound


def test_a_node_holds_what_it_has_room_for() -> None:
    """Catches states that pile up on the machine whose worker makes them all, because the cluster as a whole has room
    (the audit compares each node's at every event)."""
    data = dataset(*(STEM + numbers(100, 50 + one) + numbers(100, 90 + two) for one in range(12) for two in range(6)))
    chosen = planned(data, block_size=10)
    speeds = Speeds(prefill_tokens_per_s=1000, node_bytes=3 * Speeds().state_bytes)
    outcome = run(chosen.requests, 4, speeds, least_unit_s=0.01)
    check_answers(outcome, chosen.requests)
    assert num_sent(outcome.engine) > 0, "no state travels"


def test_a_worker_that_computes_something_else_gets_nothing() -> None:
    """Catches answers of another checkpoint that lies under the same path on one machine, and answers and states with
    the last bits of another processor."""
    for fact, sentence in [
        ("weights_digest", "the model's weights on node1 differs from that on node0; put the same on every machine"),
        ("numerics", "the arithmetic of the kernels on node1 differs from that on node0; take machines alike"),
        ("fingerprint", "the fingerprint on node1 differs"),
    ]:
        requests = stem_and_branches(40).requests
        lines = list[str]()
        runtime = SimRuntime()
        runtime.facts_of[2] = {fact: "another"}
        engine = SeenEngine(runtime, ClusterSettings(3), Hooks(to_wire=lambda request: request, say=lines.append))
        results = list(engine.run(requests))
        assert sorted(result.id for result in results) == sorted(request.id for request in requests)
        assert all(result.error is None for result in results)
        assert engine.counters.workers[1]["requests"] == 0 and len(engine.workers) == 2, (
            "it is ended and not asked for again"
        )
        assert any(sentence in line for line in lines), lines


def test_requests_without_a_plan() -> None:
    """Catches rollouts that go from worker to worker, and one that never comes back."""
    requests = [r for r in stem_and_branches(40).requests]
    for request in requests:
        request.plan = None
    hooks = Hooks(to_wire=lambda request: request, conversation_of=lambda request: request.tag[1] // 4)
    outcome = run(requests, 4, hooks=hooks)
    check_answers(outcome, requests)
    assert outcome.runtime.num_units < 40


def test_stored_snapshots_are_left_to_the_workers() -> None:
    """Catches a position that the stores hold and that the driver takes for a state of this run."""
    request = stem_and_branches(1).requests[0]
    request.plan = RequestPlan(resume_at=10, ideal=10)
    seen = []
    hooks = Hooks(to_wire=lambda request: seen.append(request) or request)
    with pytest.raises(AssertionError, match="neither made in its unit nor imported"):
        run([request], 1, hooks=hooks)  # the simulated workers have no store
    assert seen == [request]


def test_dropped_requests_do_not_come_back(tau: Planned) -> None:
    """Catches a first Ctrl-C after which waiting requests are computed all the same, or running ones are lost."""
    runtime = SimRuntime()
    engine = SeenEngine(runtime, ClusterSettings(3))
    for request in tau.requests:
        engine.submit(request)
    results = engine.step()
    while len(engine.states) < 3:
        results += engine.step()
    before = engine.num_unfinished
    engine.drop_waiting()
    assert all(state.is_wanted for state in engine.states), "what only dropped ones would read goes at once"
    left = engine.num_unfinished + len(results)
    assert engine.num_unfinished < before
    assert 0 < left < len(tau.requests)
    while engine.num_unfinished:
        results += engine.step()
    assert len(results) == left and len(engine.states) == 0


def test_states_whose_readers_are_dropped_are_not_wanted() -> None:
    """Fault: a state is held to the end of a run for readers that a Ctrl-C has dropped, or that a later window does not
    have."""
    engine, maker = SeenEngine(SimRuntime(), ClusterSettings(1)), RequestPlan(keep=(8,), reads=(1,))
    engine.submit(Request("maker", [1] * 9, plan=maker))
    while engine.num_unfinished:
        engine.step()
    [state] = engine.states
    for more, left in ((1, [state]), (-1, [state]), (-1, [])):
        engine.add_readers(state.key, more)
        assert list(engine.states) == left
    buffer = SubmitBuffer(b"k")
    read = buffer.add(Request("maker", [2] * 9, plan=maker)).keeps[8]
    assert buffer.add(Request("reader", [2] * 12, plan=RequestPlan(resume_at=8))).resume is read
    assert engine.submitted.add_readers(state.key, 1) is None and buffer.add_readers(read.key, 1) is None
    made = buffer.add(Request("maker", [1] * 9, plan=RequestPlan(keep=(8,), reads=(2,)))).keeps[8]
    buffer.add(Request("reader", [1] * 12, plan=RequestPlan(resume_at=8)))
    made.readers.clear()
    assert made.is_wanted and made.future_readers == 1
    assert len(buffer.drop()) == 4 and not made.is_wanted and made.future_readers == 0
    assert buffer.add(Request("late", [1] * 12, plan=RequestPlan(resume_at=8))).resume is None


def test_what_a_failed_request_leaves_is_made_by_a_reader() -> None:
    """Fault: a request failed, and every group that waited for its states computed them again, from its very beginning:
    a reader beside it makes them, or the first one that waits, from the state that the failed one resumed from."""
    plans = [RequestPlan(), RequestPlan(resume_at=4), RequestPlan(resume_at=8), RequestPlan(resume_at=8)]
    items = [Item(number, Request(str(number), [1] * 9, plan=plan)) for number, plan in enumerate(plans)]
    states, scheduler = StateTable(), GroupScheduler()
    source = State(b"4", 4, 0, 0, items[0], None, readers={items[1]})
    state = State(b"8", 8, 1, 0, items[1], source, readers={items[2], items[3]})
    items[1].resume, items[2].resume, items[3].resume, items[1].keeps[8] = source, state, state, state
    states.put(source, "handle", 1, "node", 1 << 20)
    groups = [Group(items[1:3]), Group([items[3]])]
    for group in groups:
        scheduler.add(group)
    scheduler.orphaned(states.ended(items[1], has_failed=True))
    assert state.maker is items[2] and list(scheduler.waiting) == [groups[1]]
    scheduler.orphaned(states.ended(items[2], has_failed=True))
    assert state.maker is items[3] and items[3].resume is source and not scheduler.waiting
    states.release_unwanted(source)
    assert source.handle == "handle", "it is held for the one that resumes from it now"


def test_an_aborted_run_leaves_nothing(tau: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second Ctrl-C after which requests, states or workers are left, or what was at a worker comes back."""
    runtime = SimRuntime()
    engine = SeenEngine(runtime, ClusterSettings(3))
    for request in tau.requests:
        engine.submit(request)
    results = []
    while len(results) < 50:
        results += engine.step()
    assert engine.num_unfinished and len(engine.states)
    submit = runtime.submit

    def interrupted(*arguments: Any) -> None:
        if engine.num_unfinished > len(engine.unanswered):
            raise KeyboardInterrupt  # within a step that has results
        submit(*arguments)

    monkeypatch.setattr(runtime, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    busy = [worker.id for worker in engine.workers if worker.load]
    engine.abort()
    assert busy and all(runtime.workers[id].ends <= runtime.now for id in busy)
    assert engine.num_unfinished == 0 and engine.step() == [] and not {one.id for one in engine.workers} & {*busy}
    engine.submitted.items.clear()  # what was at a worker has no result
    audit(engine)
    assert len(engine.states) == 0 and not engine.submitted.buffered and not list(engine.scheduler)


def test_groups_that_wait_for_each_other_go_on() -> None:
    """Catches a ring of groups, each of which waits for what the next one makes, that waits for ever, and one that is
    broken while a unit is at work that may make a state."""
    engine = SeenEngine(SimRuntime(longest_s=1e3), ClusterSettings(2))
    makes, reads = RequestPlan(keep=(2,), reads=(1,)), RequestPlan(resume_at=2, ideal=2)
    prompts = [[7] * 5000, [1, 2, 3], [4, 5, 6], [1, 2, 9], [4, 5, 9]]
    for number, (prompt, plan) in enumerate(zip(prompts, (RequestPlan(), makes, makes, reads, reads), strict=True)):
        engine.submit(Request(str(number), prompt, max_tokens=1, plan=plan))
    other, *items = engine.submitted.take()
    ring, scheduler = [Group([items[0], items[3]]), Group([items[1], items[2]])], engine.scheduler
    for group in (Group([other]), *ring):
        scheduler.add(group)
    results: list[Result] = []
    while engine.num_unfinished:
        assert results or list(scheduler.waiting) == ring
        results += engine.step()
    assert [result.id for result in results] == list("01423"), "the first group of the ring goes first"


def test_a_cluster_is_opened_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches workers of another number or size than were asked for, options that do not reach them, a salt that is
    lost, and a cluster that stays where no worker can be had."""
    made: list[tuple] = []
    runtimes: list[SimRuntime] = []
    closed: list[bool] = []
    cluster = SimpleNamespace(machines=lambda: [Machine(4), Machine(4)], close=lambda: closed.append(True))

    def make_seam(*arguments: object) -> SimRuntime:
        made.append(arguments)
        runtime = SimRuntime(trouble=trouble)
        runtime.held = lambda keys: set()
        runtimes.append(runtime)
        return runtime

    joined: list[tuple[str, int | None]] = []

    def join(address: str, cpus: int | None) -> SimpleNamespace:
        joined.append((address, cpus))
        return cluster

    monkeypatch.setattr(sizing, "RayCluster", join)
    monkeypatch.setattr(sizing, "RayRuntime", make_seam)
    lines: list[str] = []
    trouble, config = Trouble(), Config(model="demo", store="here", adapter="lora", ray="auto")

    def opened(address: str = "auto", most: int | None = 3) -> ClusterEngine:
        return sizing.open_cluster(config, address, "secret", lines.append, lines.append, lambda request: None, most)

    engine = opened()
    assert len(runtimes[0].workers) == 2 and lines[0] == "2 workers with 4 cores and 0 GPUs each are asked for"
    ((_, kind, options, _),) = made
    assert (kind.cpus, kind.gpus, options["threads"], options["salt"]) == (4, 0, 4, "secret")
    paths = [options["config"][name] for name in ("store", "adapter")]
    assert paths == [os.path.abspath("here"), os.path.abspath("lora")] and "cache_salt" not in options["config"]
    assert engine.can_run(Request("a", [1])) and not engine.can_run(Request("b", [1] * 3, max_tokens=1 << 31))
    for most in (None, 1):
        opened("10.0.0.1:6379", most)
    assert [len(runtime.workers) for runtime in runtimes] == [2, 2, 1]
    opened("local")
    assert joined == [("auto", None), *[("10.0.0.1:6379", None)] * 2, ("local", len(os.sched_getaffinity(0)))]
    assert not closed
    monkeypatch.setattr(SimRuntime, "spawn", lambda runtime: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opened()
    assert closed


def state(num_bytes: int, *nodes: str) -> State:
    """A state of this size with copies on these nodes."""
    return State(os.urandom(4), 1, 0, 0, None, None, num_bytes=num_bytes, nodes={*nodes})


def test_only_what_a_lost_node_made_is_lost() -> None:
    """Fault: states of another node go with a lost one, or a copy that was on it is still counted on."""
    states = StateTable()
    made = [state(0) for _ in range(3)]
    for one, name in zip(made, ("a", "b", "c"), strict=True):
        one.readers.add(Item(0, Request("r", [1])))
        states.put(one, f"handle {name}", 1, name, 1 << 20)
    made[2].nodes.add("b")
    states.forget_node("b")
    assert [one.handle for one in made] == ["handle a", None, "handle c"] and len(states) == 2
    assert [one.nodes for one in made] == [{"a"}, set(), {"c"}]


def test_states_that_nobody_reads_any_more_are_released() -> None:
    """Fault: states stay in memory when the requests that were to read them are dropped, or wanted ones go."""
    states = StateTable()
    made = [state(0) for _ in range(3)]
    reader, other = (Item(number, Request("r", [1])) for number in range(2))
    for one, item in zip(made, (other, reader), strict=False):
        one.readers.add(item)
        states.put(one, "handle", 1, "a", 1 << 20)
    made[0].readers.clear()
    states.release_all_unwanted()
    assert [one.handle for one in made] == [None, "handle", None] and len(states) == 1


def test_the_least_valuable_state_of_a_full_node_goes() -> None:
    """Fault: a node that is just full loses a state, another node loses it, or the one with the most readers goes."""
    for most_bytes, gone in ((10, []), (9, ["near"])):
        states, made = StateTable(), {name: state(0) for name in ("far", "near", "new")}
        for name, readers in (("far", 1), ("near", 2), ("new", 3)):
            made[name].readers = {Item(number, Request("r", [1])) for number in range(readers)}
            states.put(made[name], name, 5, "b" if name == "far" else "a", most_bytes)
        assert [name for name, one in made.items() if one.handle is None] == gone


def test_a_group_takes_a_part_of_a_workers_share() -> None:
    """Fault: groups of four workers that are longer than a worker's share near the end, or as short as their messages
    take before."""
    for left_s, expected in [(64.0, 2.0), (8.0, LEAST_GROUP_S), (1.0, 0.5), (0.4, 0.2)]:
        assert LEAST_GROUP_S == 0.5 and Cutter([], 4, left_s, LEAST_GROUP_S, 1).quantum_s == pytest.approx(expected)


def test_the_path_through_a_state_is_its_makers_time_and_the_longest_readers() -> None:
    """Fault: what must be begun first is chosen by the maker's own time alone, or by its last reader's."""
    items = [Item(number, Request("r", [1])) for number in range(3)]
    state = State(b"k", 1, 0, 0, items[0], None, readers=set(items[1:]))
    for item, seconds in zip(items, (2.0, 1.0, 3.0), strict=True):
        item.seconds = item.critical_path_s = seconds
    items[1].resume = items[2].resume = state
    [group] = Cutter(items, 1, 0.0, 7.0, 1).cut()
    assert group.items == items and items[0].critical_path_s == 2.0 + 3.0


@pytest.mark.parametrize("keeps", [True, False])
def test_the_answers_that_were_computed_count_as_computed(keeps: bool) -> None:
    """Fault: tokens of an answer that no state holds are counted as computed, or those that one holds are not."""
    requests = stem_and_branches(1, branch_tokens=10).requests
    requests[0].plan, requests[0].keep_answer = None, keeps
    outcome = run(requests, 1)
    [result] = outcome.results
    assert len(result.token_ids) > 1
    assert outcome.engine.counters.unique_tokens == 610 + keeps * (len(result.token_ids) - 1)


def test_the_end_of_a_run_leaves_its_workers_to_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: workers stay, or the cluster that was begun for them; or one is killed, after its last answer, before its
    snapshots are stored."""
    ended: list[object] = []
    runtime = SimRuntime()
    engine = SeenEngine(runtime, ClusterSettings(2))
    assert len(list(engine.run(stem_and_branches(8).requests))) == 8
    kill, close = runtime.kill, runtime.close
    monkeypatch.setattr(runtime, "kill", lambda worker: ended.append(worker) or kill(worker))
    monkeypatch.setattr(runtime, "close", lambda: ended.append("close") or close())
    engine.abort()
    engine.close()
    assert ended == ["close", 1, 2] and all(one.ends <= runtime.now for one in runtime.workers.values())


def test_a_state_is_worth_the_tokens_above_the_nearest_one_that_is_held() -> None:
    """Fault: what is evicted first is the state that the most tokens would have to be computed for."""
    for is_above_held in (False, True):
        states = StateTable()
        above, reader = State(b"a", 4, 0, 9, None, None), Item(0, Request("r", [1]))
        below = State(b"b", 10, 1, 1, None, above, readers={reader})  # 20 tokens, or 12 if only those above 4 are made
        other = State(b"c", 5, 2, 1, None, None)
        if is_above_held:
            states.put(above, "handle", 0, "node", 3)
        states.put(below, "handle", 3, "node", 3)  # 6.7 tokens a byte, or 4
        states.put(other, "handle", 1, "node", 3)  # 5
        assert set(states) == ({above, other} if is_above_held else {below})


def test_a_group_waits_as_a_whole_for_what_it_reads() -> None:
    """Fault: the request that makes a state counts the longest of its readers alone, where their group runs at once."""
    maker, *readers = (Item(number, Request("r", [1])) for number in range(3))
    state = State(b"k", 1, 0, 0, maker, None)
    for item, seconds in ((maker, 10.0), *((reader, 3.0) for reader in readers)):
        item.seconds = item.critical_path_s = seconds
    for reader in readers:
        reader.resume = state
        state.readers.add(reader)
    groups = Cutter([maker, *readers], 1, 0.0, 7.0, 1).cut()
    assert [group.items for group in groups] == [[maker], readers] and groups[0].priority == 16.0


def test_the_conversations_of_a_lost_worker_go_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the next turns of a conversation wait for ever for the worker that had its states."""
    hooks, runtime = replace(TO_ITSELF, conversation_of=lambda request: "talk"), SimRuntime(longest_s=1e3)
    engine = SeenEngine(runtime, ClusterSettings(2), hooks)
    served, submit = list[int](), runtime.submit
    monkeypatch.setattr(runtime, "submit", lambda worker, *of: served.append(worker) or submit(worker, *of))
    for number in range(4):
        assert [result.error for result in engine.run([Request(str(number), [1])])] == [None]
        if number == 1:
            runtime.at(runtime.now, lambda: runtime.die(served[0], runtime.now, "it was killed"))
    assert served[0] == served[1] and served[-1] not in served[:2]


@pytest.mark.parametrize("poison", [0, 1])
def test_workers_add_up_to_the_run(tau: Planned, poison: int) -> None:
    """Catches a worker that is missing or there twice, and work that is counted for two or for none."""
    ids = frozenset(request.id for request in tau.requests[50 : 50 + poison])
    outcome = run(tau.requests, 4, trouble=Trouble(poison=ids))
    workers = outcome.engine.counters.workers
    assert [one["id"] for one in workers] == list(range(1, 5 + 2 * poison))
    assert [one["ending"] for one in workers].count("lost") == 2 * poison
    answered = [result for result in outcome.results if result.error is None]
    assert sum(one["requests"] for one in workers) == len(answered) == len(tau.requests) - poison
    for name in ("cached_tokens", "computed_tokens"):
        found = sum(one["prefill_tokens" if name == "computed_tokens" else name] for one in workers)
        assert found == sum(getattr(result, name) for result in answered)
    assert bool(poison) == bool(sum(one["requests_unfinished"] for one in workers))
    not_ended = outcome.runtime.num_units - sum(one["units"] for one in workers)
    assert 2 * poison <= not_ended <= 4 * poison
    assert all(one["node"] and one["device"] == "cpu" for one in workers)


def test_a_worker_that_is_ready_first_leaves_the_others_their_share() -> None:
    """Fault: the first of four workers gets all requests, since its batch has room for them."""
    facts = WorkerFacts("f", b"k", "node", "cpu", "float32", 1, Footprint(1), None, 1 << 30, 1 << 30, 99, 4 << 30)
    ready, units = [Ready(1, facts)], list[Unit]()
    runtime: Any = SimpleNamespace(
        clock=lambda: 0.0,
        spawn=count(1).__next__,
        wait=lambda seconds: [ready.pop()] if ready else [],
        submit=lambda worker, unit, states: units.append(unit),
    )
    engine = ClusterEngine(runtime, ClusterSettings(4), TO_ITSELF)
    for number in range(40):
        engine.submit(Request(str(number), [number], max_tokens=1000, plan=RequestPlan()))
    engine.step()
    assert [len(unit.pieces) for unit in units] == [1] * 11
