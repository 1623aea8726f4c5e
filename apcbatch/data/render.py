"""Conversations to prompts: rendered, tokenised once, and cut at their turns if the template allows it.

Must not know: engines, jobs, output. Invariant: a prompt has the same tokens as its history rendered and tokenised
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from apcbatch.data.constraint import Constraints
from apcbatch.data.messages import Message
from apcbatch.data.records import Conversation
from apcbatch.data.sharing import SharedText, common_length
from apcbatch.data.template import ChatTemplate, read_fallback
from apcbatch.data.template_frames import MAX_CHARACTERS
from apcbatch.data.template_process import too_long
from apcbatch.data.tokenizer import Tokenizer, load_tokenizer
from apcbatch.data.turns import Turn, choose_turns
from apcbatch.errors import RequestError
from apcbatch.formats import Turns
from apcbatch.prefix import TokenArray, as_token_array

_SNIPPET_CHARACTERS = 24


@dataclass(slots=True)
class Prompt:
    """The prompt of one request.

    turn: the assistant's, from 1. token_ids: (tokens,) int32, often a view of one array that all turns of the
    conversation share; must not be written to.
    """

    turn: int
    token_ids: TokenArray
    custom_id: str


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
    """Renders conversations for one model.

    warn: gets one sentence if the model has no chat template, and one if its template is not prefix-stable.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        fallback_template_path: str | Path | None = None,
        warn: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, read_fallback(fallback_template_path), warn)
        self._warn = warn
        self._warned: set[str] = set()

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        fallback_template_path: str | Path | None = None,
        warn: Callable[[str], None] = lambda sentence: None,
    ) -> Renderer:
        """The renderer of a model folder; ModelError if its tokenizer or template is missing or damaged."""
        return cls(load_tokenizer(model_dir), fallback_template_path, warn)

    @cached_property
    def constraints(self) -> Constraints:
        """What makes constraints for answers of a given form."""
        return Constraints(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        """The number of token ids; the ids below it exist in the model."""
        return self.tokenizer.vocab_size

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return self.tokenizer.decode(token_ids)

    def render(self, conversation: Conversation, turns: Turns = "each") -> Rendered:
        """The prompts of a conversation; for `rollout` those of the recorded history (see data/rollout.py).

        Raises RequestError, with the line, if no prompt can be made. Turns that fail alone are in `failures`.
        """
        try:
            if conversation.prompt is not None:
                token_ids = self._completion_ids(conversation.prompt)
                return Rendered([Prompt(1, token_ids, conversation.request_id(1))])
            if conversation.source_format == "batch":
                chosen = [Turn(1, len(conversation.messages))]
            else:
                chosen = choose_turns(conversation.messages, turns)
            rendered = self._render_turns(conversation, chosen)
            if not rendered.prompts:
                raise rendered.failures[0].error
        except RequestError as error:
            raise RequestError(error.code, error.message, conversation.line) from None
        return rendered

    def render_text(self, conversation: Conversation, messages: Sequence[Message]) -> str:
        """The text of the prompt after these messages, with the conversation's tools; raises RequestError."""
        return self.template.render(messages, conversation.tools)

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
        texts = self.template.texts(conversation.messages, conversation.tools, counts)
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
                prompt = Prompt(turn.number, self.check_tokens(base.tokenise(text, common)), custom_id)
                rendered.prompts.append(prompt)
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
