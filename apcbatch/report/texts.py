"""Shorten the texts of many requests so that their sum stays within a bound.

Invariant: all texts have the same maximum length, and a cut text has an ellipsis at its end or in the middle.
"""

from __future__ import annotations

from typing import Any

ELLIPSIS = "\u2026"
MOST_CHARACTERS = 20_000  # of one text
MOST_HELD = 48 << 20  # characters of all texts
CALL_CHARACTERS = 16  # counted for the frame of a tool call, in addition to its texts

Calls = list[dict[str, str]]
Prompt = str | list[list[str]]  # a text, or messages of a role and a text each


def shortened(text: str, limit: int) -> str:
    """Cut a text to `limit` characters, with an ellipsis at the end."""
    return text if len(text) <= limit else text[: max(0, limit - 1)] + ELLIPSIS * (limit > 0)


def shortened_middle(text: str, limit: int) -> str:
    """Cut a text to `limit` characters: a quarter from its beginning, an ellipsis, the rest from its end. Prompts
    differ at their end; their beginning is often the same."""
    if len(text) <= limit:
        return text
    head = limit // 4
    tail = limit - head - 1
    return text[:head] + ELLIPSIS + text[len(text) - tail :] if tail > 0 else shortened(text, limit)


def shortened_prompt(prompt: Prompt, limit: int) -> Prompt:
    """Cut a prompt to about `limit` characters of text. In a list of messages, a quarter of the limit is reserved for
    the first message. The last messages get the rest, from the end; what they leave goes to the first one too. One
    ellipsis replaces the messages between that do not fit."""
    if isinstance(prompt, str):
        return shortened_middle(prompt, limit)
    (role, first), *rest = prompt
    left = limit - min(len(first), limit // 4)
    kept: list[list[str]] = []
    for one, text in reversed(rest):
        if left <= 0:
            kept.append([ELLIPSIS, ""])
            break
        kept.append([one, shortened_middle(text, left)])
        left -= max(1, len(text))
    return [[role, shortened_middle(first, limit // 4 + max(0, left))], *reversed(kept)]


def shortened_calls(calls: Calls | None, limit: int) -> Calls | None:
    """Cut tool calls to about `limit` characters of names and arguments; later calls are left out."""
    if calls is None:
        return None
    kept, left = Calls(), limit
    for call in calls:
        if left <= 0:
            break
        kept.append({"name": shortened(call["name"], left), "arguments": shortened(call["arguments"], left)})
        left -= len(call["name"]) + len(call["arguments"]) + CALL_CHARACTERS
    return kept


class Texts:
    """Texts of one run's answers and errors, cut so that their sum stays within a bound."""

    def __init__(self, most_held: int = MOST_HELD) -> None:
        self.answers: list[str] = []
        self.calls: list[Calls | None] = []
        self.errors: list[str] = [""]
        self._numbers = {"": 0}
        self._limit, self._held, self._most_held = MOST_CHARACTERS, 0, most_held
        self._was_cut = False

    @property
    def characters(self) -> int | None:
        """Length that texts were cut to; None if all are whole."""
        return self._limit if self._was_cut else None

    def add(self, answer: str, calls: Calls | None) -> None:
        """Append the next request's answer."""
        self.answers.append(self._cut(answer))
        self.calls.append(self._cut_calls(calls))
        self._held += len(self.answers[-1]) + _length(self.calls[-1])
        self._make_room()

    def error(self, sentence: str) -> int:
        """Store the sentence of an error and return its number; equal sentences are stored once."""
        sentence = self._cut(sentence)
        number = self._numbers.setdefault(sentence, len(self.errors))
        if number == len(self.errors):
            self.errors.append(sentence)
            self._held += len(sentence)
            self._make_room()
        return number

    def _make_room(self) -> None:
        """Halve the length until all texts together are within the bound."""
        while self._held > self._most_held and self._limit > 1:
            self._limit //= 2
            self.answers = [self._cut(text) for text in self.answers]
            self.calls = [self._cut_calls(calls) for calls in self.calls]
            self.errors = [self._cut(text) for text in self.errors]
            self._held = sum(map(len, self.answers)) + sum(map(_length, self.calls)) + sum(map(len, self.errors))

    def _cut(self, text: str) -> str:
        self._was_cut |= len(text) > self._limit
        return shortened(text, self._limit)

    def _cut_calls(self, calls: Calls | None) -> Calls | None:
        kept = shortened_calls(calls, self._limit)
        self._was_cut |= kept != calls
        return kept


def _length(calls: Calls | None) -> int:
    return sum(len(call["name"]) + len(call["arguments"]) + CALL_CHARACTERS for call in calls or ())


def cut_columns(requests: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return the columns of a document's requests, with every text cut to `limit`; other columns are not copied."""
    prompts = requests["prompt_text"]
    if prompts is not None:
        prompts = [None if one is None else shortened_prompt(one, limit) for one in prompts]
    earlier = requests["answer_characters"]
    return requests | {
        "answer": [shortened(text, limit) for text in requests["answer"]],
        "calls": [shortened_calls(calls, limit) for calls in requests["calls"]],
        "errors": [shortened(text, limit) for text in requests["errors"]],
        "prompt_text": prompts,
        "answer_characters": limit if earlier is None else min(limit, earlier),
    }
