"""Draft the next tokens of one running answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from apcbatch import _C
from apcbatch.types import DRAFT_SOURCES, DraftSource


@dataclass(slots=True)
class Draft:
    """Guessed next tokens of an answer.

    reach: for each token, the estimated probability that it and all tokens before it are right; it never rises.
    """

    tokens: list[int]
    reach: list[float]
    source: DraftSource


@dataclass(slots=True)
class DraftCount:
    """Tokens that one source drafted and that were verified, and those of them that were right."""

    drafted: int = 0
    accepted: int = 0


class Drafter:
    """Drafts of one running answer. Made by `Drafts.begin`; not thread-safe."""

    __slots__ = ("_core", "_counts")

    def __init__(self, core: _C.Drafter, counts: dict[DraftSource, DraftCount]) -> None:
        self._core, self._counts = core, counts

    @property
    def held_bytes(self) -> int:
        """Bytes of the index of its own tokens and of its references; freed with the drafter."""
        return self._core.bytes()

    def append(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Append the answer's next tokens, in order. The last guesses of all sources are compared with them, proposed
        or not, so that a source whose drafts are not verified can prove itself again."""
        self._core.append(tokens)

    def propose(self, most: int) -> Draft | None:
        """Return a draft of at most `most` tokens, 64 at most; None if there is no token worth a row.

        Beyond 16 tokens a draft is only as long as its reach is at least a half."""
        found = self._core.propose(most)
        return None if found is None else Draft(found[0], found[1], DRAFT_SOURCES[found[2]])

    def settle(self, draft: Draft, num_drafted: int, num_accepted: int) -> None:
        """Count a verified draft: of its first num_drafted tokens the first num_accepted were right. Call it before
        `append` of the tokens."""
        count = self._counts[draft.source]
        count.drafted += num_drafted
        count.accepted += num_accepted
