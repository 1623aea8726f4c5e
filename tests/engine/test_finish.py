"""How sequences end: the sentence of each failure, and when a request with several answers has its result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from apcbatch.engine.finish import Completion, failed_choice, failed_pass, no_room, not_finite, requests_of
from apcbatch.engine.sequence import Chunk, Keep, Sequence, fork_answers, make_sequence
from apcbatch.errors import RequestError
from apcbatch.types import Request
from tests.effort import table


class Parts:
    """Notes, in place of an engine's parts, which call each gets for which sequence."""

    def __init__(self, *in_flight: Chunk) -> None:
        self.told: list[tuple[str, Any]] = []
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.forks: list[Any] = []
        self.in_flight = list(in_flight)
        parts: Any = self
        self.places = parts
        self.completion = Completion(parts, parts, parts, parts)

    def __getattr__(self, name: str) -> Any:
        return lambda of: self.told.append((name, of))

    def finish(self, sequence: Sequence) -> None:
        self.told.append(("finish", sequence))
        sequence.slot = -1

    def remove(self, sequence: Sequence) -> list[Chunk]:
        return [chunk for chunk in self.in_flight if chunk.sequence is sequence]

    def of(self, *names: str) -> list[Any]:
        return [of for name, of in self.told if name in names]


def running(answers: int = 1) -> list[Sequence]:
    """The answers of one request, each in a slot."""
    sequence = make_sequence(Request("r", [1, 2, 3], n=answers, temperature=float(answers > 1)), 9, None)
    made = fork_answers(sequence) if answers > 1 else [sequence]
    for slot, one in enumerate(made):
        one.slot = slot
    return made


def test_a_sequence_gives_back_what_later_passes_hold_for_it() -> None:
    """Fault: an answer has ended, and a pass begun ahead keeps slots for it; or one that continues is ended."""
    (sequence,), (other,) = running(), running()
    ahead = Chunk(sequence, 3, 1)
    parts = Parts(ahead, Chunk(other, 3, 1))
    sequence.finish_reason = "stop"
    (result,) = parts.completion.finish(sequence)
    assert (result.id, result.finish_reason) == ("r", "stop")
    assert parts.told == [
        ("complete", sequence), ("finish", sequence), ("cancel", ahead), ("release", ahead), ("count_unique", sequence),
    ]  # fmt: skip
    parts.running = [sequence]
    parts.completion.drop_all()
    assert parts.of("finish") == [sequence], "it has no slot any more"


def test_several_answers_have_one_result() -> None:
    """Fault: a result that lacks an answer, or that is returned for each of them."""
    answers, parts = running(3), Parts()
    results = []
    for sequence in (answers[2], answers[0], answers[1], answers[1]):
        sequence.finish_reason = "length"
        results.append(parts.completion.finish(sequence))
    assert [len(found) for found in results] == [0, 0, 1, 0] and len(results[2][0].others) == 2
    assert parts.of("count_unique") == answers[:1]


def test_a_failure_ends_all_answers_of_its_request_alone() -> None:
    """Fault: an answer runs on after its request's error record, or another request ends with it."""
    answers, (other,), (waits,) = running(2), running(), running()
    chunks = [Chunk(one, 3, 1) for one in (*answers, other)]
    parts, current = Parts(), SimpleNamespace(chunks=chunks, finite_keeps=lambda chunk: chunk.keep[:1])
    finite, broken = Keep(1, b"1", 7), Keep(2, b"2", 8)
    chunks[0].keep = [finite, broken]
    assert requests_of(chunks[1:2]) == set(answers)
    failures = {chunks[0]: not_finite(), chunks[1]: no_room(waits)}
    published: list[Any] = []
    parts.publish = lambda chunk: published.append((chunk, chunk.keep))  # type: ignore[attr-defined]
    current_pass: Any = current
    (result,) = parts.completion.fail(current_pass, failures, was_read=True)
    assert (result.id, result.error) == ("r", failures[chunks[1]])
    assert published == [(chunks[0], [finite]), (chunks[1], [])] and chunks[0].keep == [broken]
    assert parts.of("finish") == answers and parts.of("cancel") == parts.of("release") == chunks[:2]
    assert parts.of("drop_answers") == [answers[0].forks] and other.is_running
    published.clear()
    parts.completion.fail(current_pass, {chunks[2]: not_finite()})
    assert published == [] and parts.of("finish")[2:] == [other], "what a failed pass wrote is published"


def test_all_that_has_begun_is_dropped() -> None:
    """Fault: an abort leaves answers that wait for a slot, a prompt that is being computed, or a preempted one."""
    answers, (other,), (preempted,) = running(2), running(), running()
    parts = Parts()
    answers[1].slot = preempted.slot = -1
    parts.running, parts.preempted, parts.forks = [other], [preempted], [answers[0].forks]
    parts.completion.drop_all()
    assert parts.of("finish") == [other, preempted, answers[0]] and parts.of("drop_answers") == [answers[0].forks]


@table("error, code, sentence", [
    (no_room(make_sequence(Request("r", [1] * 100, max_tokens=28), 9, None)), "out_of_memory", "128 tokens.*(2 p"),
    (no_room(make_sequence(Request("r", [1] * 100, max_tokens=29), 9, None)), "out_of_memory", "129 tokens.*(3 p"),
    (failed_pass(MemoryError()), "out_of_memory", "memory ran out in a pass with this request; run it again"),
    (failed_pass(torch.OutOfMemoryError()), "out_of_memory", "memory ran out"),
    (failed_pass(RuntimeError("DefaultCPUAllocator: no")), "out_of_memory", "memory ran out"),
    (failed_pass(ValueError("odd")), "internal", "ValueError('odd') in a pass with this request; run it again"),
    (failed_choice(ValueError("odd")), "internal", "ValueError('odd') while this request's next token was chosen"),
    (failed_choice(RequestError("invalid_request", "late")), "invalid_request", "late"),
    (not_finite(), "non_finite", "became NaN or infinite for this request"),
])  # fmt: skip
def test_each_failure_has_its_code_and_its_sentence(error: RequestError, code: str, sentence: str) -> None:
    """Fault: a request that needs more memory is called broken, or a broken one too large; or the pages are no whole
    number."""
    begin, _, end = sentence.partition(".*")
    assert error.code == code and begin in error.message and end in error.message
