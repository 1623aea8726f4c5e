"""The answers of one request that asks for several: its prompt is computed once, and each answer starts from its end.

An example with three slots and four answers: the prompt is computed in slot 2, which then holds its state. Answers 0
and 1 start from there into the slots 0 and 1; 2 starts when one of them has ended. The last one needs the state no
more: it goes on in slot 2 itself.

Must not know: tensors, how slots and pages are given out (see scheduler.py). Invariant: the state at the prompt's end
is held, and never written to, until the last answer has begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from apcbatch.engine.policy import Nothing
from apcbatch.engine.pool import Snapshot
from apcbatch.engine.sampler import request_key
from apcbatch.engine.sequence import Sequence
from apcbatch.types import Result


@dataclass(slots=True, eq=False)
class Forks:
    """sequences: the answers, the first of which has computed the prompt. held: the state at the prompt's end, as a
    snapshot that no pool has; None before, and once the last answer has begun. waiting: answers that have their first
    token and no slot. num_running: answers that have a slot. delivered: the result was handed back."""

    sequences: list[Sequence]
    held: Snapshot | None = None
    waiting: deque[Sequence] = field(default_factory=deque)
    num_running: int = 0
    delivered: bool = False

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return all(sequence.finish_reason for sequence in self.sequences)

    def result(self) -> Result:
        """All answers as one result."""
        first, *others = [sequence.own_result() for sequence in self.sequences]
        return replace(first, others=others, decode_ms=sum(one.decode_ms for one in (first, *others)))


def answers_due(sequence: Sequence) -> Items[Sequence]:
    """The sequences of all answers to a prompt whose end a sequence has reached, itself the first; the others are made
    here."""
    forks = Forks([sequence])
    forks.sequences += [_fork(sequence, answer) for answer in range(1, sequence.num_answers)]
    for one in forks.sequences:
        one.forks = forks
    return forks.sequences


def _fork(trunk: Sequence, answer: int) -> Sequence:
    """A further answer to a prompt that is computed; nothing of it is kept."""
    request = trunk.request
    prompt = trunk.tokens[: trunk.num_prompt].copy()
    fork = Sequence(request, prompt, trunk.num_prompt, trunk.num_prompt, trunk.limit, number=trunk.number)
    fork.scores = trunk.scores
    fork.retention = Nothing(request, trunk.num_prompt, block_size=1)
    fork.sampler_key = request_key(request, answer)
    return fork
