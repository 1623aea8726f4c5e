"""Texts that end an answer: found as its tokens come, across their borders, and cut off its end.

Must not know: engines, jobs, output. Invariants: an answer ends with the first token after which one of the texts is in
it; a token costs the same however long the answer is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apcbatch.data.text_stream import NOT_A_CHARACTER, TextStream
from apcbatch.data.tokenizer import Tokenizer

Decode = Callable[[Sequence[int]], str]


class StopTexts:
    """Ends one answer with any of these texts: an Ending (see types.py)."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._texts = texts
        self._stream = TextStream(tokenizer)
        self._most_kept = max(map(len, texts)) - 1
        self._kept = ""  # the end of the text so far, which may hold the beginning of a stop text

    def accept(self, token: int, may_end: bool) -> str | None:
        """Take the next token; the stop text that the answer ends with, if it may: of several the one that is complete
        first, the longer one if that does not tell. What was complete when the answer could not end yet is passed
        over."""
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
class StopRule:
    """Makes what ends each answer of a request that has stop texts: what Request.ending is. texts: at least one."""

    tokenizer: Tokenizer
    texts: tuple[str, ...]

    def __call__(self) -> StopTexts:
        """For the next answer."""
        return StopTexts(self.tokenizer, self.texts)


@dataclass(frozen=True, slots=True)
class Cut:
    """An answer without what ended it. text: without special tokens. num_tokens: the fewest of its first tokens that
    have all of the text; a stop token of the model's own is one of them. is_exact: they have no text besides."""

    text: str
    num_tokens: int
    is_exact: bool


def cut_answer(decode: Decode, token_ids: Sequence[int], stop_reason: int | str | None, keeps_stop: bool) -> Cut:
    """The part of an answer that is given back. decode: the text of tokens. stop_reason: as the engine's result has it.
    keeps_stop: with the stop text, or the token of stop_token_ids, that ended it."""
    if isinstance(stop_reason, str):
        return _cut_at_text(decode, token_ids, stop_reason, keeps_stop)
    if stop_reason is not None and not keeps_stop:
        token_ids = token_ids[:-1]
    return Cut(decode(token_ids), len(token_ids), True)


def _cut_at_text(decode: Decode, token_ids: Sequence[int], stop: str, keeps_stop: bool) -> Cut:
    text = decode(token_ids)
    before = len(decode(token_ids[:-1]).rstrip(NOT_A_CHARACTER))  # known before the last token came
    begin = text.find(stop, max(0, before - len(stop) + 1))
    text = text[: begin + (len(stop) if keeps_stop else 0)] if begin >= 0 else text
    counts = range(len(token_ids) + 1)
    num_tokens = bisect_left(counts, len(text), key=lambda count: len(decode(token_ids[:count])))
    num_tokens = min(num_tokens, len(token_ids))
    return Cut(text, num_tokens, decode(token_ids[:num_tokens]) == text)
