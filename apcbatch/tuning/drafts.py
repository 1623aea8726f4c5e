"""Estimate the tokens per pass with drafts, for `plan`, by simulating decode passes over recorded answers.

The answers of a sample of requests are decoded one after the other, each as recorded, without the model. The draft
index begins empty and holds earlier requests of the sample only. Acceptance of the source `recorded` depends on how far
the model agrees with the recorded answers, so it is not estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from apcbatch.config import Config
from apcbatch.data.chat.known_answers import KnownAnswers
from apcbatch.data.chat.render import Renderer
from apcbatch.data.input.records import Conversation
from apcbatch.draft_sources import draft_sources
from apcbatch.drafts.drafter import Drafter
from apcbatch.drafts.drafts import Drafts
from apcbatch.job.references import References
from apcbatch.prefix import TokenArray, as_token_array, common_length
from apcbatch.types import DraftSource, Request

MOST_REQUESTS = 200
MOST_ANSWER_TOKENS = 1 << 15
MOST_PROMPT_TOKENS = 1 << 21
MOST_IN_PASS = 16  # drafted tokens that a pass verifies
LEAST_REACH = 0.3  # minimum reach of a drafted token that is verified


@dataclass
class AnsweredSample:
    """The first requests that have a recorded answer, up to the MOST_* bounds. answers: (prompt, answer), each
    (tokens,) int32."""

    answers: list[tuple[TokenArray, TokenArray]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0

    @property
    def is_full(self) -> bool:
        return (
            len(self.answers) >= MOST_REQUESTS
            or self.num_prompt_tokens >= MOST_PROMPT_TOKENS
            or self.num_answer_tokens >= MOST_ANSWER_TOKENS
        )

    def add(self, request: Request) -> None:
        """Add a request if it has a recorded answer, cut to the request's max_tokens."""
        recorded = request.references.get("recorded")
        if not recorded or self.is_full:
            return
        prompt, answer = as_token_array(request.token_ids), recorded[-1][: request.max_tokens]
        self.answers.append((prompt, answer))
        self.num_prompt_tokens += len(prompt)
        self.num_answer_tokens += len(answer)


class SampleReferences(References):
    """Recorded answers of conversations, until the sample is full."""

    def __init__(self, renderer: Renderer, sample: AnsweredSample) -> None:
        super().__init__(renderer, True, None)
        self._sample = sample

    def begin(self, conversation: Conversation) -> KnownAnswers | None:
        return None if self._sample.is_full else super().begin(conversation)


@dataclass(slots=True)
class Estimate:
    """Sums of a simulation. tokens, passes: without each answer's first token, which the prefill gives."""

    sources: tuple[DraftSource, ...]
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as a JSON object."""
        return {
            "sources": list(self.sources),
            "tokens_per_pass": self.tokens_per_pass,
            "drafted": self.drafted,
            "accepted": self.accepted,
        }


@dataclass(frozen=True)
class DraftForecast:
    """Estimates on a sample of `requests`. has_recorded: the run would draft from recorded answers too."""

    requests: int
    estimates: list[Estimate]
    has_recorded: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast as a JSON object."""
        return {"requests": self.requests, "estimates": [one.as_dict() for one in self.estimates]}


def forecast_drafts(config: Config, sample: AnsweredSample) -> DraftForecast | None:
    """Simulate drafts from `lookup` alone, and from `history` and `lookup` together; a source that the run does not use
    is left out. Return None if the run has no drafts or the sample no answers."""
    sources = draft_sources(config)
    if not sources or not sample.answers:
        return None
    wanted: tuple[tuple[DraftSource, ...], ...] = (("lookup",), ("history", "lookup"))
    found = dict.fromkeys(tuple(one for one in some if one in sources) for some in wanted)
    estimates = [simulate(sample, some, config.draft_memory) for some in found if some]
    return DraftForecast(len(sample.answers), estimates, "recorded" in sources)


def tokens_of_an_answer(config: Config, sample: AnsweredSample | None) -> int:
    """Return the mean tokens of the sample's recorded answers; without any --max-tokens."""
    if sample is None or not sample.answers or config.ignore_eos:
        return config.max_tokens
    return -(-sample.num_answer_tokens // len(sample.answers))


def simulate(sample: AnsweredSample, sources: tuple[DraftSource, ...], memory_bytes: int) -> Estimate:
    """Simulate decoding the sample's recorded answers with drafts from these sources."""
    drafts, estimate = Drafts(sources, memory_bytes), Estimate(sources)
    before = np.zeros(0, dtype=np.int32)
    for prompt, answer in sample.answers:
        _answer(drafts.begin(prompt, {}), answer.tolist(), estimate)
        tokens = np.concatenate([prompt, answer])
        drafts.add(tokens, len(prompt), common_length(before, tokens))
        before = tokens
    return estimate


def _answer(drafter: Drafter, answer: Sequence[int], estimate: Estimate) -> None:
    """Simulate decoding one answer with drafts, alone in its passes."""
    at, new = 1, answer[:1]
    while at < len(answer):
        drafter.append(new)
        draft = drafter.propose(MOST_IN_PASS)
        drafted = accepted = 0
        if draft is not None:
            drafted = sum(reach >= LEAST_REACH for reach in draft.reach)
            wanted = answer[at : at + drafted]
            while accepted < len(wanted) and draft.tokens[accepted] == wanted[accepted]:
                accepted += 1
        new = answer[at : at + accepted + 1]
        at += len(new)
        estimate.tokens += len(new)
        estimate.passes += 1
        estimate.drafted += drafted
        estimate.accepted += accepted
