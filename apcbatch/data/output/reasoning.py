"""Split the reasoning, which stands between two markers, from the content of an answer.

Sources: the chat templates of DeepSeek R1, Qwen 3 and Nemotron (`<think>`), Magistral (`[THINK]`) and Granite 3.2
(a phrase, as in `Here is my thought process:`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

THINK = "think"


@dataclass(frozen=True, slots=True)
class Thought:
    """An answer split in two. reasoning: None without any. content: the text after it. is_cut: the answer ends within
    its reasoning."""

    reasoning: str | None
    content: str
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """Parser of one family's reasoning. begins, ends: alternative spellings of the two markers. special: the markers
    may be special tokens."""

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    special: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that decoding keeps even if they are special tokens."""
        return (*self.begins, *self.ends) if self.special else ()

    def detects(self, text: str) -> bool:
        """Return whether the text, such as a chat template, contains a marker that begins reasoning."""
        return any(marker in text for marker in self.begins)

    def is_open(self, text: str) -> bool:
        """Return whether a text, such as a message to continue, begins reasoning without ending it."""
        return _last(text, self.begins) > _last(text, self.ends)

    def ends_open(self, prompt_end: str) -> bool:
        """Return whether a prompt ends with a marker that begins reasoning. Blanks after the marker do not count."""
        return prompt_end.rstrip().endswith(self.begins)

    def split(self, text: str, is_open: bool) -> Thought:
        """Split an answer into the reasoning at its beginning and the rest. Line ends before the rest are removed.

        is_open: the prompt ends within reasoning, so the answer needs no marker that begins it. If reasoning has no
        end marker, all the text is reasoning.
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
    """Return the parser with this name; None for `none`.

    `auto` chooses by the texts of the model: the first parser that detects its markers in one of them, or None."""
    if name == "none":
        return None
    if name != "auto":
        return PARSERS[name]
    found = (parser for text in texts for parser in PARSERS.values() if parser.detects(text))
    return next(found, None)
