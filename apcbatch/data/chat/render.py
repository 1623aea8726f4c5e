"""Render conversations to prompts, and tokenise the common prefix of a conversation's turns once.

Invariant: a prompt has the same tokens as if its messages were rendered and tokenised alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from apcbatch.answer import AnswerWarning
from apcbatch.data.chat.common_prefix import BaseText, BaseTexts, common_length
from apcbatch.data.chat.template import ChatTemplate, reasoning_of
from apcbatch.data.checks import at_line, shown
from apcbatch.data.conversation import Conversation, Message, Turn
from apcbatch.data.grammar.constraint import ConstraintFactory, GrammarCompiler
from apcbatch.data.grammar.llguidance import Thinking
from apcbatch.data.grammar.structured_output import StructuredOutput
from apcbatch.data.output.call_ids import recorded_ids
from apcbatch.data.output.parser import OutputParser
from apcbatch.data.output.reasoning import choose_reasoning_parser
from apcbatch.data.output.tool_parsers import choose_tool_parser
from apcbatch.data.template_options import ChatOptions, TemplateOptions, read_template_kwargs
from apcbatch.data.tokenization.no_tokenizer import load_any_tokenizer
from apcbatch.data.tokenization.tokenizer import Tokenizer
from apcbatch.errors import RequestError
from apcbatch.formats import Turns
from apcbatch.prefix import TokenArray, as_token_array, first_true

_SNIPPET_CHARACTERS = 24
_MARKER_CHARACTERS = 64  # most that a template writes between the place where prompts differ and a thought
# Variables with which some templates keep earlier reasoning: that of Qwen3.6, that of Nemotron 3.
_KEEP_THOUGHTS = {"preserve_thinking": True, "truncate_history_thinking": False}
_LAST_TOKENS = 32  # number of last prompt tokens searched for the marker that begins reasoning
_DEFAULT_OPTIONS = ChatOptions()
Texts = Iterator[BaseText | str | RequestError]  # of a conversation's prompts, the last turn's first, as their base
NotePrompt = Callable[[Turn, str, BaseText], None]  # (turn, text of its prompt, text that its tokens are taken from)


@dataclass(slots=True)
class Prompt:
    """The prompt of one request.

    turn: number of the assistant turn, from 1. token_ids: (tokens,) int32, read-only, often a view of one array that
    all turns of the conversation share. num_messages: number of messages rendered; 0 for a completion. call_ids: ids of
    the tool calls generated in earlier turns. warnings: sentences about how the prompt was made. answer_begin: position
    of the first token of the recorded answer, if one is scored (data/chat/recorded_answers.py).
    """

    turn: int
    token_ids: TokenArray
    custom_id: str
    num_messages: int = 0
    call_ids: frozenset[str] = frozenset()
    warnings: tuple[AnswerWarning, ...] = ()
    answer_begin: int | None = None


@dataclass(slots=True)
class FailedTurn:
    """A turn whose prompt cannot be made. Other turns of the conversation may have prompts."""

    turn: int
    custom_id: str
    error: RequestError


@dataclass(slots=True)
class Rendered:
    """The prompts of one conversation, in order. prefix_stable: whether the text of every prompt is a prefix of the
    last prompt's text. drops_thoughts: whether the last prompt leaves out reasoning that an earlier one contains."""

    prompts: list[Prompt]
    failures: list[FailedTurn] = field(default_factory=list)
    prefix_stable: bool = True
    drops_thoughts: bool = False


class Renderer:
    """Renderer of conversations for one model. It also makes the parsers and constraints of the answers.

    tool_parser, reasoning_parser: parsers for the model's answers, chosen by the options or by the model's files; None
    without a parser. texts_ahead: a conversation that is rendered in another thread (data/chat/render_ahead.py), with
    its texts; None for none. bases: maker of the base texts of prompts. warn: called with warnings about the chat
    template and the options, once for each kind.
    UsageError for invalid options, ModelError for an unusable template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        warn: Callable[[str], None] = lambda sentence: None,
        options: ChatOptions = _DEFAULT_OPTIONS,
    ) -> None:
        self.tokenizer = tokenizer
        tokenizer.max_tokens = options.max_tokens
        variables = read_template_kwargs(options.template_kwargs)
        self.template = ChatTemplate(tokenizer, warn, variables, options.clock, options.chat_template)
        texts = (tokenizer.answer_schema, *self.template.sources)
        self.tool_parser = choose_tool_parser(options.tool_parser, *texts, "\n".join(tokenizer.added_texts))
        self.reasoning_parser = choose_reasoning_parser(options.reasoning_parser, (*texts, *tokenizer.added_texts))
        parsers = [parser for parser in (self.tool_parser, self.reasoning_parser) if parser is not None]
        tokenizer.keep_markers(marker for parser in parsers for marker in parser.markers)
        unread = [name for name in variables if not self.template.reads(name)]
        if unread:
            warn(f"the chat template does not read {', '.join(map(shown, unread))} of --template-kwargs")
        for sentence in self.template.changes(options.is_dated):
            warn(sentence)
        self.texts_ahead: tuple[object, Texts] | None = None
        self.bases = BaseTexts(tokenizer)
        self._latest_parser = OutputParser()
        self._warn = warn
        self._warned: set[str] = set()

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        warn: Callable[[str], None] = lambda sentence: None,
        options: ChatOptions = _DEFAULT_OPTIONS,
    ) -> Renderer:
        """Load the renderer of a model folder; ModelError if its tokenizer or template is damaged. A folder without a
        tokenizer gets a NoTokenizer, one without a template the fallback template."""
        return cls(load_any_tokenizer(Path(model_dir), warn), warn, options)

    @cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        """Return the compiler of structured output, made at first use."""
        return GrammarCompiler(self.tokenizer, self.tool_parser.syntax if self.tool_parser is not None else None)

    def constraint_factory(self, wanted: StructuredOutput, output_parser: OutputParser) -> ConstraintFactory:
        """Return the factory of the constraints that force structured output.

        If output_parser splits off reasoning, the constraint begins after the reasoning."""
        parser, thinking = output_parser.reasoning_parser, None
        if parser is not None:
            thinking = Thinking(parser.begins, parser.ends, output_parser.is_open)
        return ConstraintFactory(self.grammar_compiler, wanted, thinking)

    @property
    def keeps_thoughts_with(self) -> dict[str, bool]:
        """Return the variables of --template-kwargs with which the template keeps earlier reasoning; empty if it reads
        none that is known."""
        return {name: value for name, value in _KEEP_THOUGHTS.items() if self.template.reads(name)}

    def output_parser(self, conversation: Conversation, prompt: Prompt) -> OutputParser:
        """Return the parser of the answer to a prompt of the conversation. Equal parsers in a row are one object, since
        many requests wait at a time."""
        made = self._make_parser(conversation, prompt)
        if made != self._latest_parser:
            self._latest_parser = made
        return self._latest_parser

    def _make_parser(self, conversation: Conversation, prompt: Prompt) -> OutputParser:
        if conversation.prompt is not None:
            return OutputParser()
        tools = conversation.tools or ()
        parser = self.tool_parser if tools else None
        return OutputParser(
            parser,
            tools if parser is not None and parser.reads_tools else (),  # not kept if unread, to save memory
            self.reasoning_parser,
            self._is_open(conversation, prompt),
            conversation.place(prompt.num_messages),
            recorded_ids(conversation.messages) | prompt.call_ids,
            conversation.one_call,
            (*conversation.warnings, *self._unread_options(conversation.template_options), *prompt.warnings),
            frozenset(tool.get("function", tool)["name"] for tool in tools) if parser is not None else None,
        )

    def _is_open(self, conversation: Conversation, prompt: Prompt) -> bool:
        """Return whether the prompt ends within reasoning, which the answer then continues."""
        if self.reasoning_parser is None:
            return False
        if conversation.template_options.continue_final_message:
            return self.reasoning_parser.is_open(conversation.messages[-1]["content"])
        return self.reasoning_parser.ends_open(self.tokenizer.decode(prompt.token_ids[-_LAST_TOKENS:].tolist()))

    def _unread_options(self, template_options: TemplateOptions) -> tuple[AnswerWarning, ...]:
        """Return a tuple with one warning that names the request's options which the template does not read; an empty
        tuple if it reads them all."""
        given = [*template_options.variables, *(["documents"] if template_options.documents else [])]
        if not (template_options.add_generation_prompt or template_options.continue_final_message):
            given.append("add_generation_prompt")
        unread = [name for name in given if not self.template.reads(name)]
        if not unread:
            return ()
        return (AnswerWarning("unread_options", f"the chat template does not read {', '.join(map(shown, unread))}"),)

    def render(self, conversation: Conversation, turns: Turns = "each", note: NotePrompt | None = None) -> Rendered:
        """Render and tokenise the prompts of a conversation.

        turns: with `rollout`, the prompts have the recorded answers; data/chat/rollout.py makes those with generated
        answers. note: called for each rendered prompt, but not for a completion's. RequestError, with the line, if no
        prompt can be made; if only some cannot, their turns are in `failures`.
        """
        try:
            if not isinstance(conversation.prompt, list):
                self.tokenizer.require_for("a conversation" if conversation.prompt is None else "a text")
            if conversation.params.get("stop"):
                self.tokenizer.require_for("stop")
            if conversation.prompt is not None:
                token_ids = self._completion_ids(conversation.prompt)
                return Rendered([Prompt(1, token_ids, conversation.request_id(1))])
            rendered = self._render_turns(conversation, conversation.requests(turns), note)
            if not rendered.prompts:
                raise rendered.failures[0].error
        except RequestError as error:
            raise at_line(error, conversation.line) from None
        return rendered

    def texts_of(self, conversation: Conversation, turns: Turns) -> Callable[[], Texts] | None:
        """Return a function that renders the prompts of a conversation, for another thread; None if they must be
        rendered in turn."""
        if conversation.prompt is not None or self.template.is_fallback or not self.tokenizer.reads_text:
            return None
        try:
            chosen = conversation.requests(turns)
        except RequestError:
            return None
        return lambda: self._texts(conversation, chosen)

    def _texts(self, conversation: Conversation, chosen: Sequence[Turn]) -> Texts:
        counts = [turn.num_messages for turn in reversed(chosen)]
        has_base = False
        for text in self.template.texts(
            conversation.messages, conversation.tools, counts, conversation.template_options
        ):
            if has_base or isinstance(text, RequestError):
                yield text
                continue
            try:
                yield self.bases.make(text)
                has_base = True
            except RequestError as error:
                yield error

    def complete_without_template(self, conversation: Conversation) -> None:
        """Make a conversation of one user text a completion, if the model has no chat template."""
        if self.template.is_fallback and conversation.make_completion():
            self.warn_once(
                "text",
                f"line {conversation.line}: the model has no chat template, so prompts that are texts are continued as "
                "they are",
            )

    def render_text(self, conversation: Conversation, messages: Sequence[Message]) -> str:
        """Render the prompt after these messages, with the conversation's tools and options. Raises RequestError."""
        return self.template.render(messages, conversation.tools, conversation.template_options)

    def check_tokens(self, token_ids: TokenArray) -> TokenArray:
        """Return the ids unchanged; RequestError if there are none, or if one is outside the vocabulary."""
        if not len(token_ids):
            raise RequestError("invalid_request", "the prompt has no tokens; expected at least one")
        most = self.tokenizer.vocab_size - 1
        if first_true(token_ids > most) is not None:
            message = f"the tokenizer gives token id {token_ids.max()}; the model has the ids 0 to {most}"
            raise RequestError("invalid_request", message)
        return token_ids

    def warn_once(self, kind: str, sentence: str) -> None:
        """Warn, unless a warning of this kind was given before."""
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(sentence)

    def _completion_ids(self, prompt: str | list[int]) -> TokenArray:
        if isinstance(prompt, str):
            return self.check_tokens(as_token_array(self.tokenizer.encode_prompt(prompt)))
        most = self.tokenizer.vocab_size - 1
        for index, token_id in enumerate(prompt):
            if not 0 <= token_id <= most:
                message = f"body.prompt[{index}] is {token_id}; the model has the ids 0 to {most}"
                raise RequestError("invalid_request", message)
        return self.check_tokens(as_token_array(prompt))

    def _render_turns(self, conversation: Conversation, chosen: list[Turn], note: NotePrompt | None) -> Rendered:
        base: BaseText | None = None
        is_stable, drops_thoughts = True, False
        if self.texts_ahead is not None and self.texts_ahead[0] is conversation:
            texts = self.texts_ahead[1]
        else:
            texts = self._texts(conversation, chosen)

        def make_prompt(turn: Turn, custom_id: str) -> Prompt:
            nonlocal base, is_stable, drops_thoughts
            text = next(texts)
            if isinstance(text, RequestError):
                raise text
            if isinstance(text, BaseText):
                base, text = text, text.text
            assert base is not None, "the first text is a base"
            common = common_length(text, base.text)
            if common < len(text):
                is_stable = False
                drops_thoughts |= self._part_at_thought(text, base.text, common, conversation.messages)
                self.warn_once(
                    "prefix",
                    f"the chat template is not prefix-stable: the prompts of {custom_id} and of the last turn part "
                    f"at {snippets(text, base.text, common)}; what follows is computed again each turn",
                )
            token_ids = self.check_tokens(base.tokenise(text, common))
            if note is not None:
                note(turn, text, base)
            return Prompt(turn.number, token_ids, custom_id, turn.num_messages)

        rendered = render_backwards(conversation, chosen, make_prompt)
        rendered.prefix_stable, rendered.drops_thoughts = is_stable, drops_thoughts
        return rendered

    def thought_of(self, message: Message) -> Any:
        """Return the reasoning of a message, beside its content or within it; None if it has none."""
        thought, content, parser = reasoning_of(message), message.get("content"), self.reasoning_parser
        if thought is None and isinstance(content, str) and parser and any(end in content for end in parser.ends):
            return parser.split(content, is_open=True).reasoning
        return thought

    def _part_at_thought(self, text: str, later: str, common: int, messages: Sequence[Message]) -> bool:
        """Return whether two prompts first differ at the reasoning of a message, which the later one leaves out.
        common: number of characters at the beginning of both."""
        for message in messages:
            thought = self.thought_of(message)
            if isinstance(thought, str) and (thought := thought.strip()):
                window = max(0, common - len(thought)), common + _MARKER_CHARACTERS + len(thought)
                if text.find(thought, *window) >= 0 > later.find(thought, *window):
                    return True
        return False


def render_backwards(
    conversation: Conversation, turns: Sequence[Turn], make_prompt: Callable[[Turn, str], Prompt]
) -> Rendered:
    """Make the prompts of turns from the last to the first, so that the longest text is the base of the others.

    The result is in the order of the turns. make_prompt: (turn, custom_id) -> prompt of the turn; if it raises
    RequestError, the turn is in `failures`."""
    rendered = Rendered([])
    for turn in reversed(turns):
        custom_id = conversation.request_id(turn.number)
        try:
            rendered.prompts.append(make_prompt(turn, custom_id))
        except RequestError as error:
            rendered.failures.append(FailedTurn(turn.number, custom_id, at_line(error, conversation.line)))
    rendered.prompts.reverse()
    rendered.failures.reverse()
    return rendered


def snippets(one: str, other: str, position: int) -> str:
    """Show the place where two texts differ: `character POSITION ('...', '...')`."""
    end = position + _SNIPPET_CHARACTERS
    return f"character {position} ({one[position:end]!r}, {other[position:end]!r})"
