"""How one request's answer is read: its text becomes reasoning, content and tool calls, and words about what is odd.

Must not know: tokens, templates, output records. Which parsers a model has is decided in data/render.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from apcbatch.data.call_ids import call_ids
from apcbatch.data.json_text import write_json
from apcbatch.data.messages import Message, Tool
from apcbatch.data.reasoning import ReasoningParser
from apcbatch.data.tool_parser import Call, ToolParser


@dataclass(slots=True)
class Answer:
    """The parts of an answer's text. calls: with an id each. warnings: sentences about what stayed text or was left
    out."""

    content: str
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_message(self) -> Message:
        """The answer as a message of the history, in the form that templates read: arguments as an object."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_call(call, call.arguments) for call in self.calls]
        return message

    def as_output(self) -> dict[str, Any]:
        """The answer as OpenAI gives it: arguments as JSON text, and no content beside calls if it would be empty.

        `reasoning_content` is not OpenAI's; it is there only if there is reasoning.
        """
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
class Reading:
    """What one request's answer is read with. Without parsers the whole text is the content.

    tools: those that the request gives, if the parser types arguments by them. is_open: its prompt has begun a thought.
    turn: the number of the answer among the assistant's messages, from 1. used_ids: call ids that the conversation has.
    one_call: one call is wanted at most. warnings: sentences about the request itself.
    """

    tool_parser: ToolParser | None = None
    tools: Sequence[Tool] = ()
    reasoning_parser: ReasoningParser | None = None
    is_open: bool = False
    turn: int = 1
    used_ids: frozenset[str] = frozenset()
    one_call: bool = False
    warnings: tuple[str, ...] = ()

    def read(self, text: str, choice: int = 0) -> Answer:
        """The parts of an answer. choice: which of several answers to the request, from 0."""
        answer = Answer(text)
        if self.reasoning_parser is not None:
            thought = self.reasoning_parser.split(text, self.is_open)
            answer.content, answer.reasoning = thought.content, thought.reasoning
            if thought.is_cut:
                answer.warnings.append("the answer ends before its reasoning does, so it has no content")
        if self.tool_parser is not None:
            self._take_calls(self.tool_parser, answer, choice)
        return answer

    def _take_calls(self, parser: ToolParser, answer: Answer, choice: int) -> None:
        found = parser.find(answer.content, self.tools)
        if found.num_malformed:
            places = "1 place" if found.num_malformed == 1 else f"{found.num_malformed:,} places"
            answer.warnings.append(
                f"{places} of the answer begin{'s' * (found.num_malformed == 1)} a tool call that cannot be read as "
                f"{parser.name} writes calls; it stays in the content"
            )
        calls = found.calls
        if not calls:
            return
        if self.one_call and len(calls) > 1:
            answer.warnings.append(
                f"parallel_tool_calls is false: of the {len(calls):,} tool calls in the answer the first one is given"
            )
            calls = calls[:1]
        ids = call_ids(calls, parser.id_form, self.turn, choice, self.used_ids)
        answer.calls = [Call(call.name, call.arguments, own) for call, own in zip(calls, ids, strict=True)]
        answer.content = found.content.strip()
