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
