"""A checked line of INPUT as a conversation: its messages, its tools, and the turns of it that are requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from apcbatch.answer import AnswerWarning
from apcbatch.data.template_options import TemplateOptions
from apcbatch.errors import RequestError
from apcbatch.formats import Format, Turns

# Limit of the messages rendered for a conversation: the sum over its turns of the messages before each.
MAX_RENDERED_MESSAGES = 1 << 24
Message = dict[str, Any]
Tool = dict[str, Any]


class Parts(str):
    """A content of several text parts; as a string, the parts joined by line ends. parts: the texts of the parts, for a
    template that takes them apart (data/chat/template.py)."""

    __slots__ = ("parts",)
    parts: tuple[str, ...]

    def __new__(cls, parts: Iterable[str]) -> Parts:
        texts = tuple(parts)
        made = super().__new__(cls, "\n".join(texts))
        made.parts = texts
        return made


@dataclass(slots=True)
class Conversation:
    """One checked input line.

    id: the line's own id or custom_id, or `line-<n>`. line: number of the line from 1, over all files. messages: as in
    data/input/messages.py; empty for a completion, which has a prompt instead. custom_id: that of a `batch` line, which
    makes exactly one request; otherwise None. prompt: text or token ids of a completion. params: settings given by the
    line, see Settings. model: model name given by the line, or None. template_options: options for the chat template.
    one_call: parallel_tool_calls is false. draft: False turns drafts off for its answers. warnings: sentences about the
    messages and tools, such as keys that are not read. columns: keys that take no part in the answers. digest:
    xxh3-128, in hex, of the line's bytes, or of the Python text of a table's row. file_line: (file, line in that file)
    if the input has several files. unnamed: the parsed line, without `draft`, if it has no id; its content then seeds
    the random draws of its answers. reading: clause that names the columns read, if the layout is another tool's. text:
    the only user message, if the line gives it as a text; models without a chat template continue it. row: the parsed
    line, for a live episode; otherwise None.
    """

    id: str
    line: int
    messages: list[Message]
    tools: list[Tool] | None
    source_format: Format
    custom_id: str | None = None
    prompt: str | list[int] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    template_options: TemplateOptions = field(default_factory=TemplateOptions)
    one_call: bool = False
    draft: bool = True
    warnings: tuple[AnswerWarning, ...] = ()
    columns: tuple[str, ...] = ()
    digest: str = ""
    file_line: tuple[str, int] | None = None
    unnamed: dict[str, Any] | None = None
    reading: str | None = None
    text: str | None = None
    row: dict[str, Any] | None = None

    def request_id(self, turn: int) -> str:
        """Return the custom_id of a turn: the line's own for `batch`, else `<conversation id>#<turn>`."""
        return self.custom_id if self.custom_id is not None else f"{self.id}#{turn}"

    @property
    def is_single(self) -> bool:
        """Return whether the line makes one request: a batch line, a completion, or one that continues its last
        message."""
        return self.source_format == "batch" or self.prompt is not None or self.template_options.continue_final_message

    def requests(self, turns: Turns) -> list[Turn]:
        """Return the turns to answer, in order; RequestError if there is none. A batch line has only turn 1."""
        if turns == "live":
            return [self._first_live_turn()]
        if not self.is_single:
            return choose_turns(self.messages, turns)
        number = 1 if self.source_format == "batch" else self.place(len(self.messages))
        return [Turn(number, len(self.messages))]

    def _first_live_turn(self) -> Turn:
        """Return the turn with which an episode begins, behind the last message; RequestError if none can be there."""
        last = self.messages[-1]["role"] if self.messages else None
        if self.prompt is not None or last in (None, "assistant"):
            given = "a prompt without messages" if last is None else "messages that end with the assistant's"
            raise RequestError("invalid_request", f"a live episode begins after a user's message; the line has {given}")
        if self.params.get("n", 1) != 1:
            raise RequestError("invalid_request", "n is refused in a live episode; --samples gives several episodes")
        return Turn(self.place(len(self.messages)), len(self.messages))

    def make_completion(self) -> bool:
        """Make the only user message the prompt of a completion; return False if `text` is None."""
        if self.text is None:
            return False
        self.prompt, self.messages, self.text = self.text, [], None
        return True

    def place(self, num_messages: int) -> int:
        """Return the number, from 1, of the assistant message that an answer after `num_messages` messages makes or
        continues."""
        made = sum(1 for message in self.messages[:num_messages] if message["role"] == "assistant")
        return made if self.template_options.continue_final_message else made + 1


@dataclass(slots=True)
class BadLine:
    """One input line that cannot be answered.

    custom_id: id of its first request; None if that is unknown. conversation: id of the conversation, likewise. digest,
    file_line: as in Conversation. record: the parsed line, if it is JSON.
    """

    line: int
    error: RequestError
    custom_id: str | None = None
    conversation: str | None = None
    digest: str = ""
    source_format: Format | None = None
    record: object = None
    file_line: tuple[str, int] | None = None


class Turn(NamedTuple):
    """One turn to answer. number: its number among the assistant turns, from 1. num_messages: messages before it."""

    number: int
    num_messages: int


def choose_turns(messages: Sequence[Message], turns: Turns) -> list[Turn]:
    """Choose the turns to answer in a conversation of at least one message, in order.

    turns: with `each` and `rollout`, every assistant turn, and one more if the conversation ends with another role;
    with `last`, the turn after the last message that is not from the assistant. RequestError if there is no such turn,
    or if the messages before each turn, summed over the turns, are more than MAX_RENDERED_MESSAGES.
    """
    if turns == "last":
        return [_last_turn(messages)]
    chosen = _assistant_turns(messages)
    if messages[-1]["role"] != "assistant":
        chosen.append(Turn(len(chosen) + 1, len(messages)))
    return _checked(chosen)


def recorded_turns(messages: Sequence[Message], turns: Turns) -> list[Turn]:
    """Choose the turns with a recorded answer: all, or with `last` the last one.

    RequestError if there is none, or if the messages before each turn, summed over the turns, are more than
    MAX_RENDERED_MESSAGES."""
    chosen = _assistant_turns(messages)
    if not chosen:
        raise RequestError("invalid_request", "no message is from the assistant; there is no recorded answer to score")
    return _checked(chosen[-1:] if turns == "last" else chosen)


def _assistant_turns(messages: Sequence[Message]) -> list[Turn]:
    ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [Turn(number, end) for number, end in enumerate(ends, start=1)]


def _checked(turns: list[Turn]) -> list[Turn]:
    total = sum(turn.num_messages for turn in turns)
    if total > MAX_RENDERED_MESSAGES:
        raise RequestError(
            "invalid_request",
            f"the {len(turns):,} turns have {total:,} messages before them in all; at most "
            f"{MAX_RENDERED_MESSAGES:,} are rendered for one line: split the conversation, or give --turns last",
        )
    return turns


def _last_turn(messages: Sequence[Message]) -> Turn:
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise RequestError("invalid_request", "every message is from the assistant; there is no last turn to answer")
    return Turn(1 + sum(message["role"] == "assistant" for message in messages[:end]), end)
