"""Finished answers by prompt, for the most recently used prompts, within a limit on bytes."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import xxhash

from apcbatch.prefix import TokenArray

MOST_ANSWERS = 8  # answers kept for one prompt, the newest
ENTRY_BYTES = 512  # Python objects of one answer besides its tokens; also those of one prompt's entry


class Siblings:
    """Answers to equal prompts. held_bytes: tokens, and ENTRY_BYTES for each answer and each prompt."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._answers: OrderedDict[bytes, list[TokenArray]] = OrderedDict()
        self.held_bytes = 0

    def find(self, prompt: TokenArray) -> list[TokenArray]:
        """Return the answers to a prompt, the oldest first; each (tokens,) int32."""
        digest = _digest(prompt)
        answers = self._answers.get(digest)
        if answers is None:
            return []
        self._answers.move_to_end(digest)
        return list(answers)

    def add(self, prompt: TokenArray, answer: TokenArray) -> None:
        """Add an answer to a prompt, and evict the least recently used prompts beyond the limit."""
        if not len(answer) or 2 * ENTRY_BYTES + answer.nbytes > self._max_bytes:
            return
        digest = _digest(prompt)
        if digest not in self._answers:
            self._answers[digest] = []  # a deque takes 600 bytes
            self.held_bytes += ENTRY_BYTES
        self._answers.move_to_end(digest)
        answers = self._answers[digest]
        if len(answers) == MOST_ANSWERS:
            self._drop_oldest(answers)
        self.held_bytes += ENTRY_BYTES + answer.nbytes
        while self.held_bytes > self._max_bytes:
            oldest = next(iter(self._answers))
            if oldest == digest:  # the only prompt left: drop its own oldest answer
                self._drop_oldest(answers)
                continue
            for one in self._answers.pop(oldest):
                self.held_bytes -= ENTRY_BYTES + one.nbytes
            self.held_bytes -= ENTRY_BYTES
        answers.append(np.array(answer, dtype=np.int32))

    def _drop_oldest(self, answers: list[TokenArray]) -> None:
        self.held_bytes -= ENTRY_BYTES + answers.pop(0).nbytes


def _digest(prompt: TokenArray) -> bytes:
    return xxhash.xxh3_128_digest(prompt.data)
