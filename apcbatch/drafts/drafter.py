"""Draft the next tokens of one running answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from apcbatch import _C
from apcbatch.types import DRAFT_SOURCES, DraftSource


@dataclass(slots=True)
class Draft:
    """Guessed next tokens of an answer.

    source: where it was found; grammar: the text has no choice. reach: for each token, the estimated probability that
    it and all tokens before it are right; it never rises.
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
        """Append the answer's next tokens, in order. The last guesses of all sources are compared with them, proposed
        or not, so that a source whose drafts are not verified can prove itself again."""
        self._core.append(tokens)

    def propose(self, most: int) -> Draft | None:
        """Return a draft of at most `most` tokens, 64 at most; None if there is no token worth a row.

        Beyond 16 tokens a draft is only as long as its reach is at least a half."""
        found = self._core.propose(most)
        return None if found is None else Draft(found[0], found[1], DRAFT_SOURCES[found[2]])
