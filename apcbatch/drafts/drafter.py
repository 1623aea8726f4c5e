"""The draft index of one engine: texts in which the next tokens of running answers are looked up.

Each source is searched for the longest match of an answer's last tokens, as in prompt lookup decoding and in
SuffixDecoding (arXiv 2411.04975). The most frequent next token among the occurrences of that match is drafted, the
newest one on ties. The source with the largest expected number of accepted tokens provides the draft. Acceptance is
estimated while running, by source, match length and share of the occurrences that agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from apcbatch import _C
from apcbatch.drafts.siblings import Siblings
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.types import DRAFT_SOURCES, DraftSource

MOST_LOOKUP = 1 << 16  # last tokens of a prompt that lookup searches
LOOKUP_OF_A_TOKEN = 32  # the same, for each token that the answer may have: indexing more costs more than it saves
SIBLINGS_SHARE = 8  # siblings get max_bytes / SIBLINGS_SHARE if history is used too


@dataclass(slots=True)
class Draft:
    """Likely next tokens of an answer.

    source: where it was found; `grammar`: forced by the request's constraint. reach: for each token, the estimated
    probability that it and all tokens before it are accepted; it never rises.
    """

    tokens: list[int]
    reach: list[float]
    source: DraftSource | Literal["grammar"]


class Drafter:
    """Drafts of one running answer. Made by `Drafts.begin`; not thread-safe."""

    __slots__ = ("_core",)

    def __init__(self, core: _C.Drafter) -> None:
        self._core = core

    @property
    def held_bytes(self) -> int:
        """Bytes of the index of its own tokens and of its references; freed with the drafter."""
        return self._core.bytes()

    def append(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Append the answer's next tokens, in order. They update the acceptance estimates of all sources, also of
        those whose drafts were not proposed."""
        self._core.append(tokens)

    def propose(self, most: int) -> Draft | None:
        """Return a draft of at most `most` tokens, 64 at most; None if no token is likely enough.

        From the 17th token on, only tokens with a reach of at least 0.5 are drafted."""
        found = self._core.propose(most)
        return None if found is None else Draft(found[0], found[1], DRAFT_SOURCES[found[2]])


class Drafts:
    """Drafts for the answers of one engine; not thread-safe.

    sources: those in use. max_bytes: limit on held_bytes. History takes 44 bytes per token of its capacity, which
    doubles as needed; the oldest tokens are dropped. Siblings take 4 bytes per token and 512 for each answer and each
    prompt; if both are in use, siblings get an eighth of max_bytes. The index of a running answer (Drafter.held_bytes)
    is not counted.
    """

    def __init__(self, sources: Collection[DraftSource], max_bytes: int) -> None:
        self._sources = frozenset(sources)
        history, siblings = "history" in self._sources, "siblings" in self._sources
        for_siblings = 0 if not siblings else max_bytes // SIBLINGS_SHARE if history else max_bytes
        self._siblings = Siblings(for_siblings)
        self._state = _C.DraftState(max_bytes - for_siblings if history else 0)

    @property
    def held_bytes(self) -> int:
        """Bytes of history and siblings, at most max_bytes."""
        return self._state.bytes() + self._siblings.held_bytes

    def begin(
        self,
        prompt: TokenArray,
        references: Mapping[DraftSource, Sequence[TokenArray]],
        most_tokens: int = MOST_LOOKUP,
    ) -> Drafter:
        """Begin an answer of at most most_tokens. prompt: (tokens,) int32.

        references: for each source (recorded, previous) a list of known answers to this request, each (tokens,) int32.
        The likeliest answer is the last of its list. Sources not in use are ignored."""
        prompt = as_token_array(prompt)
        core = _C.Drafter(self._state, "history" in self._sources, "lookup" in self._sources)
        searched = prompt[-min(MOST_LOOKUP, LOOKUP_OF_A_TOKEN * most_tokens) :]
        core.prompt(searched.ctypes.data, len(searched))
        known = {source: list(answers) for source, answers in references.items() if source in self._sources}
        if "siblings" in self._sources:
            known["siblings"] = [*self._siblings.find(prompt), *known.get("siblings", [])]
        for source, answers in known.items():
            for answer in map(as_token_array, answers):
                core.reference(DRAFT_SOURCES.index(source), answer.ctypes.data, len(answer))
        return Drafter(core)

    def add(self, tokens: TokenArray, num_prompt: int, begin: int) -> None:
        """Add a finished answer with its prompt. tokens: (tokens,) int32, prompt and answer.

        num_prompt: tokens of the prompt; siblings keep those after it. begin: history indexes tokens[begin:]; what
        comes before was indexed with an earlier request, and only gives context."""
        tokens = as_token_array(tokens)
        if "history" in self._sources:
            self._state.add(tokens.ctypes.data, len(tokens), min(begin, len(tokens)))
        if "siblings" in self._sources:
            self._siblings.add(tokens[:num_prompt], tokens[num_prompt:])
