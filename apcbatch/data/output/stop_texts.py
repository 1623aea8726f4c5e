"""Find stop texts while tokens are generated, even if they span several tokens, and cut them off the answer.

Invariants: an answer ends with the first token that completes a stop text. The time per token does not depend on the
length of the answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apcbatch.data.tokenization.tokenizer import Tokenizer

Decode = Callable[[Sequence[int]], str]


class StopTexts:
    """The stop condition of one answer: an Ending (see types.py). texts: the stop texts, at least one."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._texts = texts
        self._stream = TextStream(tokenizer)
        self._most_kept = max(map(len, texts)) - 1
        self._kept = ""  # the end of the text so far, in which a stop text may begin

    def accept(self, token: int, may_end: bool) -> str | None:
        """Take the next token; return the stop text that it completes, or None.

        If it completes several, return the one that ends first; if these end together, the longest. A stop text that is
        completed while may_end is false does not count."""
        piece = self._stream.add(token)
        if not piece:
            return None
        text, before = self._kept + piece, len(self._kept)
        ends = []
        for stop in self._texts:
            begin = text.find(stop, max(0, before - len(stop) + 1)) if may_end else -1
            if begin >= 0:
                ends.append((begin + len(stop), -len(stop), stop))
        self._kept = text[-self._most_kept :] if self._most_kept else ""
        return min(ends)[2] if ends else None


@dataclass(frozen=True, slots=True)
class StopTextsFactory:
    """Factory of the stop conditions of a request's answers: a Request.ending. texts: the stop texts, at least one."""

    tokenizer: Tokenizer
    texts: tuple[str, ...]

    def __call__(self) -> StopTexts:
        return StopTexts(self.tokenizer, self.texts)


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """The returned part of an answer.

    text: its text, without special tokens. num_tokens: number of tokens that are returned, from the first. If a stop
    text ended the answer, they are the fewest tokens that contain `text`; otherwise all kept tokens, the model's own
    stop token included. is_exact: whether the text of these tokens is exactly `text`.
    """

    text: str
    num_tokens: int
    is_exact: bool


def cut_answer(decode: Decode, token_ids: Sequence[int], stop_reason: int | str | None, keeps_stop: bool) -> CutAnswer:
    """Cut an answer to the part that is returned.

    stop_reason: as in the engine's result: the stop text, the token of stop_token_ids, or None. keeps_stop: keep that
    text or token."""
    if isinstance(stop_reason, str):
        return _cut_at_text(decode, token_ids, stop_reason, keeps_stop)
    if stop_reason is not None and not keeps_stop:
        token_ids = token_ids[:-1]
    return CutAnswer(decode(token_ids), len(token_ids), True)


def _cut_at_text(decode: Decode, token_ids: Sequence[int], stop: str, keeps_stop: bool) -> CutAnswer:
    text = decode(token_ids)
    before = len(decode(token_ids[:-1]).rstrip(NOT_A_CHARACTER))  # characters before the last token
    begin = text.find(stop, max(0, before - len(stop) + 1))
    text = text[: begin + (len(stop) if keeps_stop else 0)] if begin >= 0 else text
    counts = range(len(token_ids) + 1)
    num_tokens = bisect_left(counts, len(text), key=lambda count: len(decode(token_ids[:count])))
    num_tokens = min(num_tokens, len(token_ids))
    return CutAnswer(text, num_tokens, decode(token_ids[:num_tokens]) == text)


NOT_A_CHARACTER = "\ufffd"  # replacement character: incomplete UTF-8 decodes to it
_MOST_PENDING = 32  # maximum tokens to wait for the end of a character, which has at most four bytes


class TextStream:
    """Incremental decoder of one answer.

    The text of a token depends on the previous token: it may begin with a space, or complete a character. So each
    piece is decoded together with the piece before it. A piece is the fewest tokens that end with a whole character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # tokens of the previous piece and of the current one
        self._num_before = 0  # number of tokens of the previous piece
        self._num_given = 0  # number of characters of both that were returned

    def add(self, token: int) -> str:
        """Take the next token; return the text that it adds. Empty for a special token and an incomplete character."""
        if self._tokenizer.is_dropped(token):
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
        """Begin a new piece: the current piece becomes the previous one. If the current piece has no text, continue it
        instead, since without a text it gives no context for decoding the next piece.

        in_any_case: begin a new piece even then."""
        ids = self._ids[self._num_before :]
        text = self._tokenizer.decode(ids)
        if text or in_any_case:
            self._ids, self._num_before, self._num_given = ids, len(ids), len(text)
