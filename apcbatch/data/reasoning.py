"""Reasoning in an answer: what a model thinks before it speaks, between two markers.

Must not know: tokens, templates, records. Sources: the chat templates of DeepSeek R1, Qwen 3 and Nemotron (`<think>`),
Magistral (`[THINK]`) and Granite 3.2 (words).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

THINK = "think"


@dataclass(frozen=True, slots=True)
class Thought:
    """reasoning: None if there is none. content: what is behind it. is_cut: the answer ends before its reasoning."""

    reasoning: str | None
    content: str
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """begins, ends: the markers, each of which may be written in several ways. special: they may be special tokens."""

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    special: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that are kept when an answer is decoded, even if they are special tokens."""
        return (*self.begins, *self.ends) if self.special else ()

    def tells(self, text: str) -> bool:
        """Whether a chat template with this text lets its model think in this way."""
        return any(marker in text for marker in self.begins)

    def is_open(self, text: str) -> bool:
        """Whether a text, such as a prompt's end, leaves a thought open."""
        return _last(text, self.begins) > _last(text, self.ends)

    def ends_open(self, prompt_end: str) -> bool:
        """Whether a prompt ends with the marker that begins a thought."""
        return prompt_end.rstrip().endswith(self.begins)

    def split(self, text: str, is_open: bool) -> Thought:
        """The reasoning that the text begins with, and the rest without the line ends before it.

        is_open: the prompt has begun the thought. Without a marker that ends it, the whole text is reasoning.
        """
        begin = 0
        stripped = text.lstrip()
        marker = next((one for one in self.begins if stripped.startswith(one)), None)
        if marker is not None:
            begin = len(text) - len(stripped) + len(marker)
        elif not is_open:
            return Thought(None, text)
        ends = [(place, marker) for marker in self.ends if (place := text.find(marker, begin)) >= 0]
        if not ends:
            return Thought(text[begin:].strip() or None, "", is_cut=True)
        end, marker = min(ends)
        return Thought(text[begin:end].strip() or None, text[end + len(marker) :].lstrip("\r\n"))


def _last(text: str, markers: tuple[str, ...]) -> int:
    return max(text.rfind(marker) for marker in markers)


PARSERS = {
    parser.name: parser
    for parser in (
        ReasoningParser(THINK, ("<think>",), ("</think>",)),
        ReasoningParser("mistral", ("[THINK]",), ("[/THINK]",)),
        ReasoningParser(
            "granite",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            special=False,
        ),
    )
}


def choose_reasoning_parser(name: str, texts: Iterable[str]) -> ReasoningParser | None:
    """The parser of a name; None for `none`. `auto`: the one that some text of the model tells, if one does."""
    if name == "none":
        return None
    if name != "auto":
        return PARSERS[name]
    found = (parser for text in texts for parser in PARSERS.values() if parser.tells(text))
    return next(found, None)
