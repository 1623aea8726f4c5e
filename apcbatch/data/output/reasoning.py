"""Split the reasoning, which is between two markers, from the content of an answer.

Sources: the chat templates of DeepSeek R1, Qwen 3 and Nemotron (`<think>`),
Magistral (`[THINK]`) and Granite 3.2 (words).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

THINK = "think"


@dataclass(frozen=True, slots=True)
class Thought:
    """reasoning: None if there is none. content: the text after it. is_cut: the answer ends within its reasoning."""

    reasoning: str | None
    content: str
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """begins, ends: alternative spellings of the two markers. special: they may be special tokens."""

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    special: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that decoding keeps even if they are special tokens."""
        return (*self.begins, *self.ends) if self.special else ()

    def detects(self, text: str) -> bool:
        """Whether a chat template with this text uses these markers."""
        return any(marker in text for marker in self.begins)

    def is_open(self, text: str) -> bool:
        """Whether a text, such as the end of a prompt, has begun reasoning without ending it."""
        return _last(text, self.begins) > _last(text, self.ends)

    def ends_open(self, prompt_end: str) -> bool:
        """Whether a prompt ends with a marker that begins reasoning."""
        return prompt_end.rstrip().endswith(self.begins)

    def split(self, text: str, is_open: bool) -> Thought:
        """The reasoning at the begin of the text, and the rest without leading line ends.

        is_open: the prompt has begun the reasoning. Without an end marker the whole text is reasoning.
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
    """The parser of a name; None for `none`. `auto`: the first that detects its markers in one of the model's texts."""
    if name == "none":
        return None
    if name != "auto":
        return PARSERS[name]
    found = (parser for text in texts for parser in PARSERS.values() if parser.detects(text))
    return next(found, None)
