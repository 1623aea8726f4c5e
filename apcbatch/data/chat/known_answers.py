"""Tokenise known answers to the prompts of a conversation, for drafts: recorded ones, and messages of an earlier run.

Invariants: an answer has at most its first MOST_KNOWN_TOKENS tokens; one that cannot be rendered or tokenised is left
out, without an error. An answer is rendered once, or not at all if the next turn's prompt has its tokens; its prompt is
rendered again only in a rollout. A recorded answer has the tokens that it is scored with
(data/chat/recorded_answers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from apcbatch.data.chat.common_prefix import BaseText, common_length
from apcbatch.data.chat.recorded_answers import answer_end, stops_in, tokenise_answer
from apcbatch.data.chat.render import Prompt, Renderer
from apcbatch.data.conversation import Conversation, Message, Turn
from apcbatch.errors import RequestError
from apcbatch.prefix import TokenArray, as_token_array

# Limit of the known answers to one request from one source. The index of a running answer takes 44 bytes a token.
MOST_KNOWN_TOKENS = 1 << 17


class KnownAnswers:
    """Known answers to the turns of one conversation. The renderer calls `note` for each prompt that it makes."""

    def __init__(self, renderer: Renderer, conversation: Conversation) -> None:
        self._renderer, self._conversation = renderer, conversation
        self._borders: dict[int, tuple[int, int]] = {}  # turn -> characters of its prompt, and their hash
        self._base: BaseText | None = None
        self._options = replace(
            conversation.template_options, add_generation_prompt=False, continue_final_message=False
        )

    def note(self, turn: Turn, text: str, base: BaseText) -> None:
        """Note the text of a turn's prompt. base: the text whose tokens the conversation's prompts share."""
        self._borders[turn.number] = len(text), hash(text)
        self._base = base

    def recorded(self, prompts: Sequence[Prompt]) -> dict[int, TokenArray]:
        """Return turn -> tokens of the recorded answer, for the prompts that have one."""
        conversation, messages = self._conversation, self._conversation.messages
        answered = [
            prompt
            for prompt in prompts
            if prompt.turn in self._borders
            and prompt.num_messages < len(messages)
            and messages[prompt.num_messages]["role"] == "assistant"
        ]
        following = dict(zip((prompt.turn for prompt in prompts), prompts[1:], strict=False))
        found: dict[int, TokenArray] = {}
        for prompt in answered:
            tokens = self._in_prompt(prompt, following.get(prompt.turn))
            if tokens is not None:
                found[prompt.turn] = tokens
        left = [prompt for prompt in answered if prompt.turn not in found]
        counts = [prompt.num_messages + 1 for prompt in left]
        texts = self._renderer.template.texts(messages, conversation.tools, counts, self._options) if left else ()
        for prompt, text in zip(left, texts, strict=True):
            tokens = None if isinstance(text, RequestError) else self._behind(prompt, text)
            if tokens is not None:
                found[prompt.turn] = tokens
        return found

    def of_message(self, prompt: Prompt, message: Message) -> TokenArray | None:
        """Tokenise a message (data/input/messages.py) as the answer to a prompt."""
        history = self._conversation.messages[: prompt.num_messages]
        try:
            text = self._renderer.template.render([*history, message], self._conversation.tools, self._options)
            if prompt.turn in self._borders:
                return self._behind(prompt, text)
            before = self._renderer.render_text(self._conversation, history)
            tokens, begin = tokenise_answer(self._renderer, BaseText(self._renderer.tokenizer, text), before, text)
        except RequestError:
            return None
        return self.of_tokens(tokens[begin:])

    def of_text(self, text: str) -> TokenArray | None:
        """Tokenise a text as the answer to a prompt."""
        try:
            tokens = as_token_array(self._renderer.tokenizer.encode_continuation(text))
        except RequestError:
            return None
        return self.of_tokens(tokens[: answer_end(tokens, 0, self._renderer.tokenizer.eos_token_ids)])

    def of_tokens(self, tokens: TokenArray) -> TokenArray | None:
        """Return a copy of an answer's tokens; None if there are none, or one is outside the vocabulary."""
        tokens = tokens[:MOST_KNOWN_TOKENS]
        return tokens.copy() if len(tokens) and int(tokens.max()) < self._renderer.tokenizer.vocab_size else None

    def _in_prompt(self, prompt: Prompt, later: Prompt | None) -> TokenArray | None:
        """Return the tokens of a recorded answer, stop token included, from the history in the next turn's prompt.

        None if that prompt does not begin with this one, or may leave out the answer's reasoning."""
        message, begin = self._conversation.messages[prompt.num_messages], len(prompt.token_ids)
        if later is None or self._renderer.thought_of(message) is not None:
            return None
        tokens = later.token_ids
        if not np.array_equal(tokens[:begin], prompt.token_ids):
            return None
        stops = stops_in(tokens[begin:], self._renderer.tokenizer.eos_token_ids)
        return self.of_tokens(tokens[begin : begin + int(stops[0]) + 1]) if len(stops) else None

    def _behind(self, prompt: Prompt, answered: str) -> TokenArray | None:
        """Tokenise the answer at the end of a rendered text. answered: the text of prompt and answer."""
        assert self._base is not None
        length, digest = self._borders[prompt.turn]
        begin = len(prompt.token_ids)
        try:
            whole = self._base.tokenise(answered, common_length(answered, self._base.text))
        except RequestError:
            return None
        if not np.array_equal(whole[:begin], prompt.token_ids):  # a token spans the border, or the prompt differs
            return self.of_text(answered[length:]) if hash(answered[:length]) == digest else None
        return self.of_tokens(whole[begin : answer_end(whole, begin, self._renderer.tokenizer.eos_token_ids)])
