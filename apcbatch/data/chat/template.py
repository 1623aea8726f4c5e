"""Render messages and tools to the text of a prompt with a chat template.

A template is untrusted: it runs in a sandbox in a helper process (data/chat/template_child.py). An error there becomes
a RequestError of one conversation.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import repeat
from pathlib import Path
from typing import Any

from apcbatch.data.conversation import Message, Parts, Tool
from apcbatch.data.helper import Helper, LimitExceeded
from apcbatch.data.helper_child import DONE, INVALID, MAX_CHARACTERS, TOO_LONG
from apcbatch.data.template_options import TemplateOptions, read_template
from apcbatch.data.tokenization.tokenizer import Tokenizer, too_long
from apcbatch.errors import ModelError, RequestError

FALLBACK_NAME = "chat_template.jinja"
SHIPPED_FALLBACK = Path(__file__).with_name(FALLBACK_NAME)
NO_TEMPLATE = (
    "the model has no chat template; conversations are rendered with apcbatch's plain one, which it was not trained "
    f"on, so that answers may be poor: put the {FALLBACK_NAME} that the model was trained with into its folder. "
    "(Completions need none.)"
)
_PROBE: tuple[Message, ...] = ({"role": "user", "content": "probe"},)
_DEFAULT_OPTIONS = TemplateOptions()
_DRAWS = re.compile(r"\|\s*random\b|[\"']random[\"']|\blipsum\b")  # jinja's filter, also by name, and its function
# Keys of a message's reasoning. Most templates read the first, some `thinking`.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Appended to the last message if the answer continues it; the prompt ends before this mark. It is private-use
# characters, and a space that shows whether the template trims content.
_MARK = "\ue0a9\ue0ad\ue0b8 "


class InvalidTemplate(Exception):
    """The template cannot be compiled. The text says why and in which line."""


Outcome = str | RequestError | InvalidTemplate


class ChatTemplate:
    """The chat template of a tokenizer, or the fallback if it has none.

    warn: called once if the fallback is used, by `warn_if_fallback` or at the first conversation. variables: name ->
    value, for every conversation of the run; a request's own variables override them. clock: time that the template
    reads for every text, in ISO 8601; None for now. given: text of a template to use in place of the model's.
    ModelError for a template that cannot be compiled, or that exceeds its time or memory on a short conversation.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        warn: Callable[[str], None],
        variables: Mapping[str, Any] | None = None,
        clock: str | None = None,
        given: str | None = None,
    ) -> None:
        self.clock = clock or datetime.now().astimezone().isoformat(timespec="seconds")
        self._source = tokenizer.source if given is None else replace(tokenizer.source, chat_template=given)
        self._warn: Callable[[str], None] | None = warn
        self._own = bool(self._source.chat_template)
        self._fallback = read_template(SHIPPED_FALLBACK)
        self._variables: dict[str, Any] = dict(self._source.special_tokens_map)
        if not self._own:
            self._variables["add_bos"] = tokenizer.begins_with_bos
        self._run_variables = dict(variables or {})
        self._processes: dict[tuple[str, int], TemplateProcess] = {}  # by text and thread
        self._probe()

    @property
    def is_fallback(self) -> bool:
        """Return whether the fallback is used, since the model has no template."""
        return not self._own

    def warn_if_fallback(self) -> None:
        """Warn at the first call, if the fallback is used."""
        if self.is_fallback and self._warn is not None:
            self._warn(NO_TEMPLATE)
            self._warn = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the texts of the model's templates, or the text of the fallback."""
        chosen = self._source.chat_template if self._own else self._fallback
        texts = chosen.values() if isinstance(chosen, dict) else [chosen]
        return tuple(text for text in texts if isinstance(text, str))

    def reads(self, name: str) -> bool:
        """Return whether the template contains this name. If not, it cannot read a variable of this name."""
        return any(re.search(rf"\b{re.escape(name)}\b", source) for source in self.sources)

    def changes(self, is_dated: bool) -> Iterator[str]:
        """Yield a warning for each input of the template besides the conversation: the time, and random draws.

        is_dated: the time is a given date, which needs no warning."""
        if self.reads("strftime_now") and not is_dated:
            yield (
                f"the chat template puts the date into prompts (strftime_now, here {self.clock} for each): a store of "
                "another day misses; --template-date YYYY-MM-DD sets the date"
            )
        if any(_DRAWS.search(source) for source in self.sources):
            yield (
                "the chat template draws at random (random, lipsum): each prompt gets the same draws, so that equal "
                "conversations have equal prompts; transformers draws anew for each"
            )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        options: TemplateOptions = _DEFAULT_OPTIONS,
    ) -> str:
        """Render the text of the prompt: the messages and, by default, the generation prompt.

        RequestError with the template's own words if it refuses the conversation, or with the limit that it exceeds.
        """
        [outcome] = self.texts(messages, tools, [len(messages)], options)
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def texts(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        counts: Sequence[int],
        options: TemplateOptions = _DEFAULT_OPTIONS,
    ) -> Iterator[str | RequestError]:
        """Yield for each count the prompt after the first `count` messages, or its error."""
        self.warn_if_fallback()
        if options.continue_final_message:
            messages = with_mark(messages)
        for count, outcome in zip(counts, self._outcomes(messages, tools, counts, options), strict=True):
            if options.continue_final_message and isinstance(outcome, str):
                outcome = before_mark(outcome)
            is_beyond = isinstance(outcome, LimitExceeded)
            if isinstance(outcome, InvalidTemplate):
                outcome = RequestError("invalid_request", str(outcome))
            if isinstance(outcome, RequestError) and (is_beyond or outcome.code == "invalid_request"):
                outcome = RequestError(outcome.code, f"the chat template refuses messages[0:{count}]: {outcome}")
            yield outcome

    def _outcomes(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, counts: Sequence[int], options: TemplateOptions
    ) -> Iterator[Outcome]:
        """Yield the template's texts or errors. A count may be 0, unlike in `apply_chat_template`."""
        variables = {
            **self._run_variables,
            **options.variables,
            "documents": options.documents,
            "add_generation_prompt": options.add_generation_prompt,
        }
        try:
            process = self._process(bool(tools))
            yield from process.texts(messages, list(tools) if tools else None, counts, variables)
        except (RequestError, InvalidTemplate) as error:  # raised before the first text
            yield from repeat(error, len(counts))

    def _process(self, has_tools: bool) -> TemplateProcess:
        """Return this thread's helper process of the template for conversations with or without tools, made at first
        use."""
        source: str | None = self._fallback
        if self._own:
            try:
                source = self._source.get_chat_template(has_tools)
            except ValueError as error:
                raise InvalidTemplate(str(error)) from None
        if not isinstance(source, str):
            raise InvalidTemplate(f"it is a {type(source).__name__}; expected a text")
        key = source, threading.get_ident()
        process = self._processes.get(key)
        if process is None:
            process = self._processes[key] = TemplateProcess(source, self._variables, self.clock)
        return process

    def _probe(self) -> None:
        """Render a short conversation, so that a broken template raises ModelError before the run."""
        where = f"the model's chat template, in {self._source.name_or_path},"
        [outcome] = self._outcomes(_PROBE, None, [len(_PROBE)], _DEFAULT_OPTIONS)
        if isinstance(outcome, InvalidTemplate):
            raise ModelError(f"{where} is not valid Jinja: {outcome}; restore the file as the model was published")
        if isinstance(outcome, LimitExceeded):
            raise ModelError(f"{where} cannot be used: {outcome} for one short message; give the model another one")
        if isinstance(outcome, RequestError) and outcome.code == "context_length_exceeded":
            raise ModelError(f"{where} cannot be used for one short message: {outcome}; give the model another one")
        # A template may refuse the probe and still accept the real conversations.


class TemplateProcess:
    """The helper process of one template. variables: name -> value, for every text. clock: time that it reads for every
    text, in ISO 8601."""

    def __init__(self, source: str, variables: Mapping[str, Any], clock: str = "1970-01-01") -> None:
        module, name = "apcbatch.data.chat.template_child", "the process for the chat template"
        self._helper = Helper(module, name, source, dict(variables), clock)
        self._part_roles: dict[str, bool] = {}  # role -> whether its messages may have text parts

    def texts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        counts: Sequence[int],
        variables: Mapping[str, Any] | None = None,
    ) -> Iterator[Outcome]:
        """Yield for each count the text of the first `count` messages, or its error. variables: the request's own; they
        override those of the run.

        Raises RequestError for messages that cannot be sent to the helper process.
        """
        given = [self._given(message, variables or {}) for message in messages]
        try:
            for answer in self._helper.answers(counts, given, tools, dict(variables or {})):
                yield answer if isinstance(answer, RequestError) else _outcome(*answer)
        except ValueError as error:
            reason = "are nested too deeply" if "nested" in str(error) else "hold a value that JSON does not have"
            raise RequestError("invalid_request", f"the messages or tools {reason}") from None

    def _given(self, message: Mapping[str, Any], variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message in the form that templates read: with its reasoning under their keys, and with text
        parts as parts if the template takes them."""
        message, content = _with_reasoning(message), message.get("content")
        if not isinstance(content, Parts):
            return message
        parts = [{"type": "text", "text": text} for text in content.parts]
        return {**message, "content": parts if self._takes_parts(message["role"], variables) else str(content)}

    def _takes_parts(self, role: str, variables: Mapping[str, Any]) -> bool:
        """Return whether the template writes a content of one text part as it writes the text; found once for each
        role. variables: the first request's own."""
        if role not in self._part_roles:
            user: Message = {"role": "user", "content": "probe"}
            calls = [{"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": {}}}]
            asked: Message = {"role": "assistant", "content": "", "tool_calls": calls}
            before = {"system": [], "user": [], "tool": [user, asked]}.get(role, [user])
            texts: list[Outcome] = []
            for content in ("probe", [{"type": "text", "text": "probe"}]):
                message = {"role": role, "content": content, "tool_call_id": "probe0001"}
                probe = [*before, message, *[user] * (role == "system")]
                texts += self.texts(probe, None, [len(probe)], variables)
            self._part_roles[role] = isinstance(texts[0], str) and texts[0] == texts[1]
        return self._part_roles[role]


def reasoning_of(message: Mapping[str, Any]) -> Any:
    """Return the reasoning that a message has beside its content; None if it has none."""
    return next((message[key] for key in _REASONING if message.get(key) is not None), None)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Copy a message's reasoning to the keys `thinking` and `reasoning_content`, which templates read."""
    reasoning = reasoning_of(message)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _outcome(kind: bytes, data: bytes) -> Outcome:
    """Convert a helper's answer to the text or to an error."""
    text = data.decode("utf-8", "replace")
    if kind == DONE:
        return text
    if kind == INVALID:
        return InvalidTemplate(text)
    if kind == TOO_LONG:
        return too_long(f"{int(text):,} characters; at most {MAX_CHARACTERS:,} are tokenised")
    return RequestError("invalid_request", text)


def with_mark(messages: Sequence[Message]) -> list[Message]:
    """Append the mark to the content of the last message."""
    last, content = messages[-1], messages[-1]["content"]
    marked = Parts((*content.parts[:-1], content.parts[-1] + _MARK)) if isinstance(content, Parts) else content + _MARK
    return [*messages[:-1], {**last, "content": marked}]


def before_mark(text: str) -> str | RequestError:
    """Return the text before the mark, or an error if the template left the mark out.

    If the template trimmed the content, trim the text too, as transformers does."""
    place = text.rfind(_MARK.strip())
    if place < 0:
        message = "continue_final_message is true, and the chat template leaves out the end of the last message"
        return RequestError("invalid_request", message)
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()
