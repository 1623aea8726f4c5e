"""Which tokens go into which pass: the scheduler with sequences of made-up tokens, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.drafts.drafter import Drafts
from apcbatch.engine.admission import PassBudget
from apcbatch.engine.drafting import Drafting
from apcbatch.engine.memory import num_live_slots
from apcbatch.engine.scheduler import Scheduler
from apcbatch.engine.sequence import Chunk, Sequence, fork_answers, make_sequence
from apcbatch.types import Policy, Request, RequestPlan
from tests.effort import table
from tests.engine.test_snapshots import OwnSnapshots


class OwnScheduler(Scheduler):
    """A scheduler with the snapshots, and the drafting without drafts, that it is made with. pages: of KV that running
    sequences may hold beside snapshots; 0 for a model without attention."""

    def __init__(self, policy: Policy = "none", pages: int = 0, **options: Any) -> None:
        self.snapshots = OwnSnapshots(None, policy, num_pages=2 * pages + 1 if pages else 0)
        self.drafting = Drafting(Drafts((), 0), None, (), 0)  # type: ignore[arg-type]
        self.num_made = 0
        defaults = {"max_batch_tokens": 64, "max_running": 4, "capacity_bytes": 800, "prompt_cost": 0, "groups": 1}
        super().__init__(self.snapshots, self.snapshots.page_tables, drafting=self.drafting, **defaults | options)


def submit(scheduler: OwnScheduler, *lengths: int, max_tokens: int = 8, **settings: Any) -> list[Sequence]:
    """Queue prompts of these lengths, which share no token."""
    made = []
    for length in lengths:
        scheduler.num_made += 1
        first = scheduler.num_made
        request = Request(f"{first}", [first] * length, max_tokens=max_tokens, **settings)
        made.append(make_sequence(request, 1000, None))
        scheduler.snapshots.prepare(made[-1])
        scheduler.submit(made[-1])
    return made


def compute(scheduler: OwnScheduler, chunks: list[Chunk]) -> None:
    """Do what a pass does to the sequences of its chunks: each that it completes gets a token, or ends."""
    scheduler.advance(chunks)
    for chunk in chunks:
        sequence = chunk.sequence
        if chunk.samples:
            sequence.append(7, 0.0)
            if sequence.num_tokens == sequence.limit:
                sequence.finish_reason = "length"
                scheduler.finish(sequence)


def shown(chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    """The number of each chunk's sequence, where it begins and how many tokens it has."""
    return [(chunk.sequence.number, chunk.begin, chunk.count) for chunk in chunks]


@table(
    "max_tokens, groups, decodes, wanted, prompts",
    [
        # of running sequences; (decodes, left) -> prompt tokens wanted, and those that a pass takes
        (4096, 1, {0: 0, 5: 5, 9: 8}, {(8, 100): 3988, (5000, 0): 1}, {(8, 100): 1024, (8, 5000): 4088, (5000, 9): 1}),
        (4096, 2, {1: 1, 5: 3, 99: 8}, {(8, 100): 3980, (3000, 1): 1}, {(8, 3001): 1501, (8, 5000): 2040}),
        (2000, 4, {4: 1, 5: 2}, {(0, 0): 4096, (24, 7): 3993}, {(0, 99): 1024, (24, 8000): 1000}),
        (100, 4, {8: 2}, {(0, 0): 400, (98, 2): 6, (100, 0): 4}, {(0, 50): 100, (99, 50): 1, (100, 50): 1}),
        (1, 1, {3: 3}, {(0, 0): 1}, {(0, 9): 1}),
    ],
)  # fmt: skip
def test_a_pass_is_filled_up_to_its_limit(
    max_tokens: int, groups: int, decodes: dict[int, int], wanted: dict[tuple[int, int], int],
    prompts: dict[tuple[int, int], int],
) -> None:  # fmt: skip
    """Catches a pass that is larger than was allowed, one without a prompt token while prompts wait, and groups of
    which one takes the others' prompts."""
    budget = PassBudget(max_tokens, 8, groups)
    assert {running: budget.decodes(running) for running in decodes} == decodes
    assert {pair: budget.wanted(*pair) for pair in wanted} == wanted
    assert {pair: budget.prompt_tokens(*pair) for pair in prompts} == prompts


def test_prompts_fill_what_decodes_leave() -> None:
    """Catches a prompt that is begun twice or out of order, tokens beyond the limit of a pass, and a decode that waits
    for a prompt."""
    scheduler = OwnScheduler()
    submit(scheduler, 30, 30, 30, max_tokens=3)
    passes = []
    while scheduler.waiting or scheduler.places.running:
        chunks, impossible = scheduler.schedule()
        assert not impossible and len(chunks) == len({chunk.sequence for chunk in chunks})
        passes.append(shown(chunks))
        compute(scheduler, chunks)
    assert passes == [
        [(0, 0, 30), (1, 0, 30), (2, 0, 4)],
        [(0, 30, 1), (1, 30, 1), (2, 4, 26)],
        [(0, 31, 1), (1, 31, 1), (2, 30, 1)],
        [(2, 31, 1)],
    ]
    assert scheduler.places.num_begun == 0
    made = submit(scheduler, 1, 1, 1, 1)
    scheduler.schedule()
    assert sorted(sequence.slot for sequence in made) == [0, 1, 2, 3]


@table(
    "max_tokens, lengths, first_pass",
    [
        (30, [29, 5], [(0, 0, 29), (1, 0, 1)]),
        (30, [30, 5], [(0, 0, 30)]),
        (30, [31, 5], [(0, 0, 30)]),
        (1, [3, 5], [(0, 0, 1)]),
    ],
)
def test_prompts_are_admitted_until_a_pass_is_full(
    max_tokens: int, lengths: list[int], first_pass: list[tuple[int, int, int]]
) -> None:
    """Catches a token of room that is left empty, and a prompt that takes a slot long before it is begun."""
    scheduler = OwnScheduler(max_batch_tokens=max_tokens)
    submit(scheduler, *lengths)
    assert shown(scheduler.schedule()[0]) == first_pass
    assert len(scheduler.places.running) == len(first_pass)


def test_what_is_in_flight_is_not_scheduled_again() -> None:
    """Catches a token that is computed by two passes, and a prompt whose rest is left for later than it need be."""
    scheduler = OwnScheduler(max_batch_tokens=20)
    first, second = submit(scheduler, 10, 40)
    chunks, _ = scheduler.schedule()
    assert shown(chunks) == [(0, 0, 10), (1, 0, 10)]
    begun = {chunk.sequence: chunk.end for chunk in chunks}
    assert scheduler.has_prompts(begun)
    ahead, _ = scheduler.schedule(begun)
    assert shown(ahead) == [(1, 10, 20)]
    begun[second] = 30
    ahead, _ = scheduler.schedule(begun)
    assert shown(ahead) == [(1, 30, 10)]
    begun[second] = 39
    assert scheduler.has_prompts(begun)
    begun[second] = 40
    assert not scheduler.has_prompts(begun)
    assert scheduler.schedule(begun) == ([], [])
    compute(scheduler, chunks)
    assert scheduler.schedule(begun) == ([], []), "its decode is in flight"
    del begun[first]
    assert shown(scheduler.schedule(begun)[0]) == [(0, 10, 1)]


def test_no_more_run_than_may() -> None:
    """Catches a slot that two sequences have, one that stays free while others wait, and one that is lost."""
    assert [num_live_slots(count) for count in (1, 2, 3)] == [2, 2, 3]
    for max_running in (1, 2):
        scheduler = OwnScheduler(max_running=max_running)
        submit(scheduler, 2, 2, 2, 2, 2, max_tokens=2)
        most = 0
        for _ in range(20):
            chunks, _ = scheduler.schedule()
            most = max(most, len(scheduler.places.running))
            running = scheduler.places.running
            assert scheduler.places.num_begun == len(running) == len({one.slot for one in running})
            assert scheduler.has_prompts({}) == any(chunk.sequence.in_prefill for chunk in chunks)
            compute(scheduler, chunks)
            if not scheduler.places.running and not scheduler.waiting:
                break
        assert most == max_running and not scheduler.places.running and not scheduler.waiting


@table(
    "policy, lengths, settings, waiting, options, ends",
    [
        ("none", [5, 9], {}, [], {}, [6, 10]),
        ("none", [5, 9], {"max_tokens": 2}, [], {}, []),  # with the token that is being read, all have ended
        ("none", [5, 9], {"max_tokens": 3}, [], {}, [6, 10]),
        ("none", [5, 9], {"temperature": 1.0}, [], {}, []),  # the host draws
        ("all", [5, 13], {}, [], {}, [6, 14]),
        ("all", [5, 14], {}, [], {}, []),  # the foreseen token ends at a boundary
        ("all", [5, 15], {}, [], {}, [6, 16]),
        ("none", [5, 9], {}, [3], {}, []),  # one that waits may join
        ("none", [2] * 13, {}, [3], {"max_running": 16, "prompt_cost": 9}, [3] * 13),  # it has to wait longer
        ("none", [2] * 13, {"max_tokens": 2}, [3], {"max_running": 16, "prompt_cost": 9}, []),
        ("none", [2] * 12, {}, [3], {"max_running": 16, "prompt_cost": 9}, []),
        ("none", [5, 9, 3, 2], {}, [3], {}, [6, 10, 4, 3]),  # no slot is free for it
    ],
)
def test_a_pass_is_foreseen_only_if_no_token_can_change_it(
    policy: Policy, lengths: list[int], settings: dict[str, Any], waiting: list[int], options: dict[str, int],
    ends: list[int],
) -> None:  # fmt: skip
    """Catches a pass that is begun although the tokens before it decide what is in it, and one that is not although
    they do not."""
    scheduler = OwnScheduler(policy, **options)
    submit(scheduler, *lengths, **settings)
    chunks, _ = scheduler.schedule()
    assert scheduler.foresee(chunks) == [], "prompts are unfinished"
    compute(scheduler, chunks)
    chunks, _ = scheduler.schedule()
    assert [chunk.end for chunk in chunks] == [length + 1 for length in lengths]
    submit(scheduler, *waiting)
    assert scheduler.foresee(chunks[:-1]) == [], "another sequence might join"
    if ends and not waiting:
        others = scheduler.foresee(chunks[:-1], [chunks[-1].sequence])
        assert [chunk.begin for chunk in others] == ends[:-1]
    assert [chunk.begin for chunk in scheduler.foresee(chunks)] == ends


def test_a_group_has_a_share_of_the_prompts() -> None:
    """Fault: the first pass takes more sequences than a pass may have, and the other stages have nothing to do."""
    scheduler = OwnScheduler(max_running=2, groups=2)
    submit(scheduler, 3, 4, 5, 6)
    chunks, _ = scheduler.schedule()
    assert shown(chunks) == [(0, 0, 3), (1, 0, 4)] and len(scheduler.places.running) == 4
    begun = {chunk.sequence: chunk.end for chunk in chunks}
    assert shown(scheduler.schedule(begun)[0]) == [(2, 0, 5), (3, 0, 6)]


def end_one(scheduler: Scheduler) -> None:
    """End the first of the running answers."""
    scheduler.places.running[0].finish_reason = "stop"
    scheduler.finish(scheduler.places.running[0])


def test_the_gate_is_closed_once_all_slots_are_taken() -> None:
    """Fault: each slot that gets free costs a pass with prompts, or one that waits is passed over beside prompts that
    are computed in any case."""
    scheduler = OwnScheduler(max_running=16, prompt_cost=9, max_batch_tokens=160)
    submit(scheduler, *[2] * 12, max_tokens=90)
    compute(scheduler, scheduler.schedule()[0])
    submit(scheduler, 2, 2, 2, 150, max_tokens=90)  # a quarter of the slots is free: the gate opens
    chunks, _ = scheduler.schedule()
    assert shown(chunks)[12:] == [(12, 0, 2), (13, 0, 2), (14, 0, 2), (15, 0, 142)]
    compute(scheduler, chunks)
    end_one(scheduler)
    submit(scheduler, 3, max_tokens=90)
    chunks, _ = scheduler.schedule()
    assert shown(chunks)[-2:] == [(15, 142, 8), (16, 0, 3)], "a pass with prompts takes another one along"
    compute(scheduler, chunks)
    end_one(scheduler)
    submit(scheduler, 3, max_tokens=90)
    assert not scheduler.has_prompts({})
    chunks, _ = scheduler.schedule()
    assert len(chunks) == 15 == len(scheduler.places.running) and len(scheduler.waiting) == 1


@table("case", ["drafted", "promising", "one ends, one waits"])
def test_a_pass_is_not_foreseen_where_tokens_matter(case: str) -> None:
    """Fault: a pass is begun ahead where drafts would gain more, or with the slot of an answer that ends missing."""
    scheduler = OwnScheduler()
    submit(scheduler, 5, max_tokens=2)
    submit(scheduler, 9, 3, 2)
    compute(scheduler, scheduler.schedule()[0])
    chunks, _ = scheduler.schedule()
    assert [chunk.begin for chunk in scheduler.foresee(chunks)] == [10, 4, 3]
    if case == "drafted":
        chunks[1].draft = [7]
    elif case == "promising":
        scheduler.drafting.is_promising = lambda sequences: len(sequences) == 3  # type: ignore[method-assign]
    else:
        submit(scheduler, 3)
    assert scheduler.foresee(chunks) == []


def test_slots_are_left_for_the_answers_of_an_admitted_prompt() -> None:
    """Catches a prompt with several answers that is admitted beside another one whose answers then find no slot."""
    for max_running, is_admitted in ((2, False), (4, False), (5, True)):  # with two slots besides the two that are owed
        scheduler = OwnScheduler(max_running=max_running)
        (prompt,) = submit(scheduler, 4, n=3, temperature=1.0)
        (other,) = submit(scheduler, 5, n=2, temperature=1.0)
        chunks, _ = scheduler.schedule()
        assert shown(chunks) == [(0, 0, 4), (1, 0, 5)][: 1 + is_admitted]
        assert list(scheduler.waiting) == [other][is_admitted:]
    assert (prompt.num_answers, prompt.will_fork, prompt.siblings) == (3, True, [prompt])


def test_one_that_waits_for_a_prefix_holds_up_only_those_who_share_it() -> None:
    """Fault: a prompt that waits for another one's prefix keeps all that come after it from free slots."""
    scheduler = OwnScheduler("all", max_batch_tokens=30)
    stem = [50] * 40
    prompts = [stem, [*stem, 51], [52] * 10, [*stem, 53]]
    made = [make_sequence(Request(f"{prompt[-1]}", prompt, max_tokens=8), 1000, None) for prompt in prompts]
    for sequence in made:
        scheduler.snapshots.prepare(sequence)
        scheduler.submit(sequence)
    assert shown(scheduler.schedule()[0]) == [(0, 0, 30)]
    assert shown(scheduler.schedule({made[0]: 30})[0]) == [(0, 30, 10), (2, 0, 10)]
    assert list(scheduler.waiting) == [made[1], made[3]]


def test_one_that_finds_no_slots_is_not_overtaken_unless_it_has_a_plan() -> None:
    """Fault: an unplanned prompt of several answers waits while later ones compute what it shares with them; or a
    planned one, whose readers wait in any case, holds up the others."""
    for plan, admitted in ((None, [0]), (RequestPlan(), [0, 2])):
        scheduler = OwnScheduler(max_running=4)
        submit(scheduler, 4, n=2, temperature=1.0)
        (second,) = submit(scheduler, 5, n=3, temperature=1.0, plan=plan)
        submit(scheduler, 6)
        chunks, _ = scheduler.schedule()
        assert [chunk.sequence.number for chunk in chunks] == admitted and scheduler.waiting[0] is second


@table(
    "num_running, first_ends, num_owed, begins",
    [
        (4, False, 1, [6, 6, 6, 6]),
        (4, True, 1, []),  # its slot is for an answer that waits
        (4, True, 0, [6, 6, 6]),
        (3, False, 1, []),  # a slot is free for it now
        (3, False, 0, [6, 6, 6]),
    ],
)
def test_no_pass_is_foreseen_that_an_answer_of_a_prompt_might_join(
    num_running: int, first_ends: bool, num_owed: int, begins: list[int]
) -> None:
    """Fault: an answer waits a pass longer than it has to for its slot, or nothing is begun ahead while it waits."""
    scheduler = OwnScheduler()
    submit(scheduler, 5, max_tokens=2 if first_ends else 8)
    submit(scheduler, *[5] * (num_running - 1))
    compute(scheduler, scheduler.schedule()[0])
    chunks, _ = scheduler.schedule()
    scheduler.places.forks = [SimpleNamespace(waiting=range(num_owed + 1))]  # type: ignore[list-item]
    assert [chunk.begin for chunk in scheduler.foresee(chunks)] == begins


def test_a_long_limit_keeps_nothing_from_running() -> None:
    """Fault: the pages of all tokens that an answer may have are reserved, so that a pool of 4 GiB runs 42 of 64
    requests of 500 tokens with KV of 64 KiB a token, though their answers end far earlier."""
    scheduler = OwnScheduler(pages=1024, max_running=64, max_batch_tokens=64 * 500)
    submit(scheduler, *[500] * 64, max_tokens=1024)
    assert len(scheduler.schedule()[0]) == 64


def test_the_last_admitted_gives_its_pages_to_the_first() -> None:
    """Fault: the oldest sequence is preempted, a younger one goes on in place of an older one, one that waits is
    admitted before one that has begun, tokens are computed more often than that, or none comes to its end."""
    scheduler = OwnScheduler(pages=11, max_batch_tokens=1000)
    made = submit(scheduler, *[64] * 4, max_tokens=400)
    events, ended, num_tokens, places = [], [], 0, scheduler.places
    while scheduler.waiting or places.preempted or places.running:
        oldest = places.running[:1]
        chunks, impossible = scheduler.schedule()
        assert chunks and not impossible and places.running[: len(oldest)] == oldest
        assert all(len(one.pages) == 0 and not one.is_running for one in places.preempted)
        assert places.num_begun == len(places.running) + len(places.preempted)
        num_tokens += sum(chunk.count for chunk in chunks)
        events += [(number, count) for number, begin, count in shown(chunks) if not begin]
        compute(scheduler, chunks)
        ended += [one.number for one in made if one.finish_reason and one.number not in ended]
    # with 12 pages for three sequences of 4, each of which wants a fifth after 256 tokens
    assert events == [(0, 64), (1, 64), (2, 64), (1, 385), (2, 257), (3, 64), (3, 257)] and ended == [0, 1, 2, 3]
    assert all(one.num_tokens == 464 for one in made)
    assert places.num_preempted == 3 and num_tokens == 4 * 463 + 384 + 2 * 256
    assert scheduler.snapshots.pages.num_free == 23


def test_what_is_in_flight_is_not_preempted() -> None:
    """Fault: a sequence loses the pages that a pass in flight writes; or a pass is foreseen for which one would have
    to be preempted."""
    scheduler = OwnScheduler(pages=7, max_batch_tokens=1000)
    first, second = submit(scheduler, 64, 64, max_tokens=400)
    while second.num_tokens < 256:
        chunks, _ = scheduler.schedule()
        compute(scheduler, chunks)
    chunks, _ = scheduler.schedule()
    assert scheduler.foresee(chunks) == [], "both want a fifth page, and there are eight"
    compute(scheduler, chunks[:1])
    assert scheduler.schedule({second: 256}) == ([], []) and second.is_running
    compute(scheduler, chunks[1:])
    assert shown(scheduler.schedule()[0]) == [(0, 256, 1)] and scheduler.places.preempted == [second]
    assert not scheduler.has_prompts({first: 257})


def test_answers_that_give_way_to_a_preempted_sequence_are_queued_before_it() -> None:
    """Fault: such an answer is taken for the sequence that goes on, and is lost, while that one is admitted again."""
    scheduler = OwnScheduler(pages=8, max_running=3, max_batch_tokens=1000)
    (prompt,) = submit(scheduler, 200, max_tokens=20, n=3, temperature=1.0)
    chunks, _ = scheduler.schedule()
    answers = fork_answers(prompt)
    for answer in answers[1:]:
        answer.append(7, 0.0)
    compute(scheduler, chunks)
    (second,) = submit(scheduler, 700, max_tokens=90)
    scheduler.places.preempted.append(scheduler.waiting.pop())
    assert shown(scheduler.schedule()[0]) == [(1, 0, 700)]
    assert (scheduler.places.running, scheduler.places.preempted) == ([second], answers)


def test_states_that_wait_for_their_answers_give_way_to_what_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a deadlock where the state of a prompt holds the pages that the only running answer needs, or an answer
    that is lost with such a state, or counted twice."""
    monkeypatch.setattr(PassBudget, "decodes", lambda budget, num_running: 1)  # the oldest
    scheduler = OwnScheduler(pages=8, max_running=3, max_batch_tokens=1000)
    (first,) = submit(scheduler, 64, max_tokens=960)
    submit(scheduler, 200, max_tokens=20, n=3, temperature=1.0)
    answers: list[Sequence] = []
    for _ in range(1020):
        chunks, _ = scheduler.schedule()
        for chunk in chunks:
            if chunk.samples and chunk.sequence.will_fork:
                answers = fork_answers(chunk.sequence)
                for answer in answers[1:]:
                    answer.append(7, 0.0)
        compute(scheduler, chunks)
    assert first.finish_reason and all(one.finish_reason for one in answers) and len(answers) == 3
    assert scheduler.snapshots.pages.num_free == 17
    assert (scheduler.places.num_begun, scheduler.places.num_preempted) == (0, 3)
