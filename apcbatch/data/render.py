"""Conversations to prompts: rendered, tokenised once, and cut at their turns if the template allows it.

Must not know: engines, jobs, output. Invariant: a prompt has the same tokens as its history rendered and tokenised
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from apcbatch.data.call_ids import recorded_ids
from apcbatch.data.chat_options import ChatOptions
from apcbatch.data.checks import shown
from apcbatch.data.constraint import Constraints, Form
from apcbatch.data.grammar_source import Thinking
from apcbatch.data.helper_child import MAX_CHARACTERS
from apcbatch.data.messages import Message
from apcbatch.data.no_tokenizer import load_any_tokenizer
from apcbatch.data.reading import Reading
from apcbatch.data.reasoning import choose_reasoning_parser
from apcbatch.data.records import Conversation
from apcbatch.data.sharing import SharedText, common_length
from apcbatch.data.structure import Structure
from apcbatch.data.switches import Switches, read_template_kwargs
from apcbatch.data.template import ChatTemplate, read_fallback, too_long
from apcbatch.data.tokenizer import Tokenizer
from apcbatch.data.tool_parsers import choose_tool_parser
from apcbatch.data.turns import Turn
from apcbatch.errors import RequestError
from apcbatch.formats import Turns
from apcbatch.prefix import TokenArray, as_token_array

_SNIPPET_CHARACTERS = 24
_LAST_TOKENS = 32  # of a prompt, among which the marker is that begins a thought
_DEFAULT_OPTIONS = ChatOptions()


@dataclass(slots=True)
class Prompt:
    """The prompt of one request.

    turn: the assistant's, from 1. token_ids: (tokens,) int32, often a view of one array that all turns of the
    conversation share; must not be written to. num_messages: those that it was made from. call_ids: those of tool calls
    that were generated for it. warnings: sentences about how it was made. answer_begin: where the recorded answer
    begins in the tokens, if they have one that is to be scored; see data/recorded.py.
    """

    turn: int
    token_ids: TokenArray
    custom_id: str
    num_messages: int = 0
    call_ids: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()
    answer_begin: int | None = None


@dataclass(slots=True)
class FailedTurn:
    """A turn whose prompt cannot be made, though those of other turns can."""

    turn: int
    custom_id: str
    error: RequestError


@dataclass(slots=True)
class Rendered:
    """The prompts of one conversation in order. prefix_stable: the last prompt begins with each of the others."""

    prompts: list[Prompt]
    failures: list[FailedTurn] = field(default_factory=list)
    prefix_stable: bool = True


class Renderer:
    """Renders conversations for one model, and says how its answers are read.

    tool_parser, reasoning_parser: those of the model, or None. warn: gets one sentence if the model has no chat
    template, and one if its template is not prefix-stable. Raises UsageError for options that are none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        fallback_template_path: str | Path | None = None,
        warn: Callable[[str], None] = lambda sentence: None,
        options: ChatOptions = _DEFAULT_OPTIONS,
    ) -> None:
        self.tokenizer = tokenizer
        variables = read_template_kwargs(options.template_kwargs)
        self.template = ChatTemplate(tokenizer, read_fallback(fallback_template_path), warn, variables)
        texts = (tokenizer.answer_schema, *self.template.sources)
        self.tool_parser = choose_tool_parser(options.tool_parser, *texts)
        self.reasoning_parser = choose_reasoning_parser(options.reasoning_parser, (*texts, *tokenizer.added_texts))
        parsers = [parser for parser in (self.tool_parser, self.reasoning_parser) if parser is not None]
        tokenizer.keep(marker for parser in parsers for marker in parser.markers)
        unread = [name for name in variables if not self.template.reads(name)]
        if unread:
            warn(f"the chat template does not read {', '.join(map(shown, unread))} of --template-kwargs")
        self._warn = warn
        self._warned: set[str] = set()

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        fallback_template_path: str | Path | None = None,
        warn: Callable[[str], None] = lambda sentence: None,
        options: ChatOptions = _DEFAULT_OPTIONS,
    ) -> Renderer:
        """The renderer of a model folder; ModelError if its tokenizer or template is missing or damaged."""
        return cls(load_any_tokenizer(Path(model_dir), warn), fallback_template_path, warn, options)

    @cached_property
    def constraints(self) -> Constraints:
        """Makes constraints for the model; made once."""
        return Constraints(self.tokenizer, self.tool_parser.syntax if self.tool_parser is not None else None)

    def form(self, structure: Structure, reading: Reading) -> Form:
        """What makes the constraints of answers that have a form. reading: how the answer is read. If that takes
        reasoning out, the form begins behind it."""
        parser, thinking = reading.reasoning_parser, None
        if parser is not None:
            thinking = Thinking(parser.begins, parser.ends, reading.is_open)
        return Form(self.constraints, structure, thinking)

    @property
    def vocab_size(self) -> int:
        """The number of token ids; the ids below it exist in the model."""
        return self.tokenizer.vocab_size

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens but those that enclose calls and reasoning."""
        return self.tokenizer.decode(token_ids)

    def reading(self, conversation: Conversation, prompt: Prompt) -> Reading:
        """How the answer to a prompt of the conversation is read."""
        if conversation.prompt is not None:
            return Reading()
        tools = conversation.tools or ()
        parser = self.tool_parser if tools else None
        return Reading(
            parser,
            tools if parser is not None and parser.reads_tools else (),  # a request keeps no more than it needs
            self.reasoning_parser,
            self._is_open(conversation, prompt),
            conversation.place(prompt.num_messages),
            recorded_ids(conversation.messages) | prompt.call_ids,
            conversation.one_call,
            (*conversation.warnings, *self._unread_switches(conversation.switches), *prompt.warnings),
        )

    def _is_open(self, conversation: Conversation, prompt: Prompt) -> bool:
        """Whether the prompt has begun a thought that the answer goes on with."""
        if self.reasoning_parser is None:
            return False
        if conversation.switches.continue_final_message:
            return self.reasoning_parser.is_open(conversation.messages[-1]["content"])
        return self.reasoning_parser.ends_open(self.decode(prompt.token_ids[-_LAST_TOKENS:].tolist()))

    def _unread_switches(self, switches: Switches) -> tuple[str, ...]:
        """A sentence about the switches of a request that the template has no name for."""
        given = [*switches.variables, *(["documents"] if switches.documents else [])]
        if not (switches.add_generation_prompt or switches.continue_final_message):
            given.append("add_generation_prompt")
        unread = [name for name in given if not self.template.reads(name)]
        return (f"the chat template does not read {', '.join(map(shown, unread))}",) if unread else ()

    def render(self, conversation: Conversation, turns: Turns = "each") -> Rendered:
        """The prompts of a conversation; for `rollout` those of the recorded history (see data/rollout.py).

        Raises RequestError, with the line, if no prompt can be made. Turns that fail alone are in `failures`.
        """
        try:
            if not isinstance(conversation.prompt, list):
                self.tokenizer.check_text("a conversation" if conversation.prompt is None else "a text")
            if conversation.params.get("stop"):
                self.tokenizer.check_text("stop")
            if conversation.prompt is not None:
                token_ids = self._completion_ids(conversation.prompt)
                return Rendered([Prompt(1, token_ids, conversation.request_id(1))])
            rendered = self._render_turns(conversation, conversation.requests(turns))
            if not rendered.prompts:
                raise rendered.failures[0].error
        except RequestError as error:
            raise RequestError(error.code, error.message, conversation.line) from None
        return rendered

    def fit(self, conversation: Conversation) -> None:
        """Ask a line's one text as it is, as a completion, if the model has no chat template."""
        if conversation.text is not None and self.template.is_fallback and conversation.make_completion():
            self.warn_once(
                "text",
                f"line {conversation.line}: the model has no chat template, so prompts that are texts are continued as "
                "they are",
            )

    def render_text(self, conversation: Conversation, messages: Sequence[Message]) -> str:
        """The text of the prompt after these messages, with the conversation's tools; raises RequestError."""
        return self.template.render(messages, conversation.tools, conversation.switches)

    def check_tokens(self, token_ids: TokenArray) -> TokenArray:
        """The same ids; RequestError if there are none, or if the model does not know them all."""
        if not len(token_ids):
            raise RequestError("invalid_request", "the prompt has no tokens; expected at least one")
        highest = int(token_ids.max())
        if highest >= self.vocab_size:
            message = f"the tokenizer gives token id {highest}; the model has the ids 0 to {self.vocab_size - 1}"
            raise RequestError("invalid_request", message)
        return token_ids

    def warn_once(self, kind: str, sentence: str) -> None:
        """Pass on the first warning of a kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(sentence)

    def _completion_ids(self, prompt: str | list[int]) -> TokenArray:
        if isinstance(prompt, str):
            check_length(prompt)
            return self.check_tokens(as_token_array(self.tokenizer.encode_prompt(prompt)))
        for index, token_id in enumerate(prompt):
            if not 0 <= token_id < self.vocab_size:
                message = f"body.prompt[{index}] is {token_id}; the model has the ids 0 to {self.vocab_size - 1}"
                raise RequestError("invalid_request", message)
        return self.check_tokens(as_token_array(prompt))

    def _render_turns(self, conversation: Conversation, chosen: list[Turn]) -> Rendered:
        """Render the longest history first: its tokens are the base that the others are cut from."""
        rendered = Rendered([])
        base: SharedText | None = None
        counts = [turn.num_messages for turn in reversed(chosen)]
        texts = self.template.texts(conversation.messages, conversation.tools, counts, conversation.switches)
        for turn, text in zip(reversed(chosen), texts, strict=True):
            custom_id = conversation.request_id(turn.number)
            try:
                if isinstance(text, RequestError):
                    raise text
                if base is None:
                    base = SharedText(self.tokenizer, text)
                common = common_length(text, base.text)
                if common < len(text):
                    rendered.prefix_stable = False
                    self._warn_unstable(custom_id, text, base.text, common)
                token_ids = self.check_tokens(base.tokenise(text, common))
                rendered.prompts.append(Prompt(turn.number, token_ids, custom_id, turn.num_messages))
            except RequestError as error:
                located = RequestError(error.code, error.message, conversation.line)
                rendered.failures.append(FailedTurn(turn.number, custom_id, located))
        rendered.prompts.reverse()
        rendered.failures.reverse()
        return rendered

    def _warn_unstable(self, custom_id: str, text: str, later: str, position: int) -> None:
        here = text[position : position + _SNIPPET_CHARACTERS]
        there = later[position : position + _SNIPPET_CHARACTERS]
        self.warn_once(
            "prefix",
            f"the chat template is not prefix-stable: the prompts of {custom_id} and of the last turn part "
            f"at character {position} ({here!r}, {there!r}); what follows is computed again each turn",
        )


def check_length(text: str) -> None:
    """Raise RequestError for a text that is too long to be tokenised."""
    if len(text) > MAX_CHARACTERS:
        raise too_long(len(text))
