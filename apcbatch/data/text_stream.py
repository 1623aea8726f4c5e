"""The text of an answer as its tokens come.

Must not know: requests, engines. Invariants: the pieces together are the text of all tokens (Tokenizer.decode), but for
bytes at its end that are no whole character (and, in a tokenizer that falls back to bytes, but for U+FFFD beside bytes
that are no text); a token costs the decoding of a few tokens, however many there are.
"""

from __future__ import annotations

from apcbatch.data.tokenizer import Tokenizer

NOT_A_CHARACTER = "\ufffd"  # what bytes that are no whole character become
_MOST_PENDING = 32  # tokens; a character has four bytes at most, so more are not waiting for their rest


class TextStream:
    """The text of one answer. What a token means depends on the one before it (a space, the rest of a character), so a
    piece is decoded together with the piece before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # of the piece before, and of this one
        self._num_before = 0  # how many of them are of the piece before
        self._num_given = 0  # characters of their text that were given out

    def add(self, token: int) -> str:
        """The text that the next token adds: none for a special token, and for a part of a character until its last
        part comes."""
        if self._tokenizer.drops(token):
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        waits_too_long = len(self._ids) - self._num_before > _MOST_PENDING
        whole = text if waits_too_long else text.rstrip(NOT_A_CHARACTER)
        piece = whole[self._num_given :]
        self._num_given = max(self._num_given, len(whole))
        if len(whole) == len(text):
            self._begin_piece(waits_too_long)
        return piece

    def _begin_piece(self, in_any_case: bool) -> None:
        """What came since the last call is the piece before from now on, if it has a text to lean on."""
        ids = self._ids[self._num_before :]
        text = self._tokenizer.decode(ids)
        if text or in_any_case:
            self._ids, self._num_before, self._num_given = ids, len(ids), len(text)
