"""Rollout: the turns of one conversation, each prompt built on the answers that were generated before it.

Must not know: engines, jobs, output. Invariant: a prompt begins with the prompt before it and the tokens that were
generated, so the state that decoding reached is reused. The history is rendered again only if the template does not
allow that, or if the answer's text ends within a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apcbatch.data.messages import Message
from apcbatch.data.records import Conversation
from apcbatch.data.render import Prompt, Renderer
from apcbatch.data.tool_calls import parse_answer
from apcbatch.data.turns import Turn, choose_turns
from apcbatch.errors import RequestError
from apcbatch.prefix import TokenArray, as_token_array

# Stands for the answer while the text behind it is rendered; private-use characters that no template trims.
_PLACEHOLDER = "\ue0a9\ue0ac\ue0b8"


class Rollout:
    """The requests of one conversation, one after the other. A `batch` line has one.

    prompt: that of the current request. num_turns: the number of requests in all. After a kill, pass the recorded
    answers to `advance` again to return to the same place. Raises RequestError if the first prompt cannot be made.
    """

    def __init__(self, renderer: Renderer, conversation: Conversation) -> None:
        self._renderer = renderer
        self._conversation = conversation
        self._answers: list[TokenArray] = []
        self._texts: list[str | None] = []  # of answers whose tokens have more text than the answer
        single = conversation.source_format == "batch"
        self._turns: list[Turn] = [] if single else choose_turns(conversation.messages, "rollout")
        self.num_turns = 1 if single else len(self._turns)
        self.prompt = renderer.render(conversation, "each").prompts[0] if single else self._first()

    def advance(self, generated_ids: Sequence[int], stopped: bool, text: str | None = None) -> Prompt | None:
        """The prompt of the next request, after this answer; None if there is none.

        generated_ids: the new tokens of the current request. stopped: the last of them is a stop token (the end of turn
        that the template writes replaces it). text: the answer's, where it was cut within a token: then the history is
        rendered again. Raises RequestError, with the line, if the template refuses the new
        history.
        """
        if self.prompt.turn >= self.num_turns:
            return None
        answer = as_token_array(generated_ids)
        self._answers.append(answer[:-1] if stopped else answer)
        self._texts.append(text)
        now, following = self._turns[self.prompt.turn - 1 : self.prompt.turn + 1]
        try:
            token_ids = self._extend(now, following)
            custom_id = self._conversation.request_id(following.number)
            self.prompt = Prompt(following.number, self._renderer.check_tokens(token_ids), custom_id)
        except RequestError as error:
            raise RequestError(error.code, error.message, self._conversation.line) from None
        return self.prompt

    def _first(self) -> Prompt:
        turn = self._turns[0]
        try:
            token_ids = self._tokenise(self._conversation.messages[: turn.num_messages])
        except RequestError as error:
            raise RequestError(error.code, error.message, self._conversation.line) from None
        return Prompt(turn.number, token_ids, self._conversation.request_id(turn.number))

    def _extend(self, now: Turn, following: Turn) -> TokenArray:
        if self._texts[-1] is not None:
            return self._tokenise(self._generated_history(following))
        tail = self._text_behind(now, following)
        if tail is not None:
            behind = self._renderer.tokenizer.encode_behind(tail)
            return np.concatenate((self.prompt.token_ids, self._answers[-1], as_token_array(behind)))
        self._renderer.warn_once(
            "rollout",
            "the chat template does not keep an answer as it was generated: the history of "
            f"{self._conversation.request_id(following.number)}, and others like it, is rendered again "
            "from the answers' text and reuses less",
        )
        return self._tokenise(self._generated_history(following))

    def _text_behind(self, now: Turn, following: Turn) -> str | None:
        """What the template writes after an answer, up to the end of the next prompt; None if it changes what is
        before.

        That is the end of the turn, the recorded messages that follow, and the generation prompt.
        """
        recorded = self._conversation.messages
        history = recorded[: now.num_messages]
        placeholder = {"role": "assistant", "content": _PLACEHOLDER}
        rest = recorded[now.num_messages + 1 : following.num_messages]
        try:
            before = self._renderer.render_text(self._conversation, history) + _PLACEHOLDER
            text = self._renderer.render_text(self._conversation, [*history, placeholder, *rest])
        except RequestError:
            return None
        return text[len(before) :] if text.startswith(before) else None

    def _generated_history(self, following: Turn) -> list[Message]:
        """The messages before a turn, with the generated answers instead of the recorded ones."""
        history = list(self._conversation.messages[: following.num_messages])
        for turn, answer, text in zip(self._turns, self._answers, self._texts, strict=False):
            if text is None:
                text = self._renderer.decode(answer.tolist())
            history[turn.num_messages] = parse_answer(text).as_message()
        return history

    def _tokenise(self, messages: Sequence[Message]) -> TokenArray:
        text = self._renderer.render_text(self._conversation, messages)
        return self._renderer.check_tokens(as_token_array(self._renderer.tokenizer.encode(text).ids))
