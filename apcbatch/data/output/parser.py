"""Parse the answers to one request: split the text into reasoning, content and tool calls, with warnings.

data/chat/render.py chooses the parsers of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from apcbatch.answer import AnswerWarning, WarningKind
from apcbatch.data.checks import shown
from apcbatch.data.conversation import Message, Tool
from apcbatch.data.json_text import write_json
from apcbatch.data.output.call_ids import call_ids
from apcbatch.data.output.reasoning import ReasoningParser
from apcbatch.data.output.tool_parser import Call, ToolParser

_MOST_NAMES = 8


@dataclass(slots=True)
class ParsedAnswer:
    """An answer parsed into content, reasoning and tool calls.

    reasoning: None without any. calls: tool calls, each with its id. warnings: sentences about calls that were dropped,
    left in the content or not offered, and about reasoning without an end.
    """

    content: str
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)
    warnings: list[AnswerWarning] = field(default_factory=list)

    def warn(self, kind: WarningKind, sentence: str) -> None:
        """Add a warning."""
        self.warnings.append(AnswerWarning(kind, sentence))

    def as_message(self) -> Message:
        """Return the answer as a message of the history, in the form that templates read: arguments are an object."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_call(call, call.arguments) for call in self.calls]
        return message

    def as_output(self) -> dict[str, Any]:
        """Return the answer as a message in OpenAI's form.

        Arguments are JSON text, and empty content beside calls is null. `reasoning_content`, which OpenAI's form does
        not have, is added if there is reasoning."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.content if self.content or not self.calls else None,
            "refusal": None,
            "tool_calls": [_call(call, write_json(call.arguments)) for call in self.calls],
        }
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message


def _call(call: Call, arguments: object) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class OutputParser:
    """Parser of the answers to one request. Without a tool parser and a reasoning parser the whole text is content.

    tools: the request's tools, if the tool parser converts arguments by their schemas. is_open: the prompt ends within
    reasoning. turn: number of the answer among the assistant's messages, from 1. used_ids: call ids in the
    conversation. one_call: parallel_tool_calls is false. warnings: sentences about the request itself. offered: names
    of the request's tools; None if they are not known.
    """

    tool_parser: ToolParser | None = None
    tools: Sequence[Tool] = ()
    reasoning_parser: ReasoningParser | None = None
    is_open: bool = False
    turn: int = 1
    used_ids: frozenset[str] = frozenset()
    one_call: bool = False
    warnings: tuple[AnswerWarning, ...] = ()
    offered: frozenset[str] | None = None

    def parse(self, text: str, choice: int = 0) -> ParsedAnswer:
        """Split an answer's text into reasoning, content and tool calls. choice: index among the answers of the
        request."""
        answer = ParsedAnswer(text)
        if self.reasoning_parser is not None:
            thought = self.reasoning_parser.split(text, self.is_open)
            answer.content, answer.reasoning = thought.content, thought.reasoning
            if thought.is_cut and not self._ends_with_calls(answer):
                answer.warn("cut_reasoning", "the answer ends before its reasoning does, so it has no content")
        if self.tool_parser is not None:
            self._take_calls(self.tool_parser, answer, choice)
        return answer

    def _ends_with_calls(self, answer: ParsedAnswer) -> bool:
        """Let the marker of the first call end reasoning that has no end marker; return False if no call is there."""
        if self.tool_parser is None or answer.reasoning is None:
            return False
        begin = self.tool_parser.find(answer.reasoning, self.tools).begin
        if begin is None:
            return False
        answer.content, answer.reasoning = answer.reasoning[begin:], answer.reasoning[:begin].strip() or None
        return True

    def _take_calls(self, parser: ToolParser, answer: ParsedAnswer, choice: int) -> None:
        found = parser.find(answer.content, self.tools)
        if found.num_malformed:
            places = "1 place" if found.num_malformed == 1 else f"{found.num_malformed:,} places"
            answer.warn(
                "unread_call",
                f"{places} of the answer begin{'s' * (found.num_malformed == 1)} a tool call that cannot be read as "
                f"{parser.name} writes calls; it stays in the content",
            )
        calls = found.calls
        if not calls:
            return
        offered = self.offered
        if offered is not None and (unknown := dict.fromkeys(call.name for call in calls if call.name not in offered)):
            named = ", ".join(map(shown, list(unknown)[:_MOST_NAMES])) + ", and others" * (len(unknown) > _MOST_NAMES)
            answer.warn("unknown_tool", f"the answer calls {named}, which the request does not offer as a tool")
        if self.one_call and len(calls) > 1:
            answer.warn(
                "dropped_calls",
                f"parallel_tool_calls is false: of the {len(calls):,} tool calls in the answer the first one is given",
            )
            calls = calls[:1]
        ids = call_ids(calls, parser.id_format, self.turn, choice, self.used_ids)
        answer.calls = [Call(call.name, call.arguments, own) for call, own in zip(calls, ids, strict=True)]
        answer.content = found.content.strip()
