"""Rollout: the turns of one conversation, each prompt built on the answers that were generated before it.

Must not know: engines, jobs, output. Invariant: a prompt begins with the prompt before it and the tokens that were
generated, so the state that decoding reached is reused. The history is rendered again only if the template does not
allow that, or if the answer's text ends within a token. Recorded messages of tools have the ids of the calls that were
generated, not of those recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apcbatch.data.messages import Message
from apcbatch.data.reading import Answer
from apcbatch.data.records import Conversation
from apcbatch.data.render import Prompt, Renderer
from apcbatch.data.tool_turns import follow_calls
from apcbatch.data.turns import Turn
from apcbatch.errors import RequestError
from apcbatch.prefix import TokenArray, as_token_array

# Stands for the answer while the text behind it is rendered; private-use characters that no template trims.
_PLACEHOLDER = "\ue0a9\ue0ac\ue0b8"


class Rollout:
    """The requests of one conversation, one after the other. A `batch` line has one, and so has a line that continues
    its last message.

    prompt: that of the current request. num_turns: the number of requests in all. After a kill, pass the recorded
    answers to `advance` again to return to the same place. Raises RequestError if the first prompt cannot be made.
    """

    def __init__(self, renderer: Renderer, conversation: Conversation) -> None:
        self._renderer = renderer
        self._conversation = conversation
        self._token_ids: list[TokenArray] = []
        self._answers: list[Answer] = []
        self._is_cut = False  # the tokens of the last answer have more text than the answer
        self._messages = list(conversation.messages)  # with ids of tool calls as they were generated
        self._turns: list[Turn] = conversation.requests("rollout")
        self.num_turns = len(self._turns)
        single = conversation.is_single
        self.prompt = renderer.render(conversation, "each").prompts[0] if single else self._first()

    def advance(self, generated_ids: Sequence[int], stopped: bool, text: str | None = None) -> Prompt | None:
        """The prompt of the next request, after this answer; None if there is none.

        generated_ids: the new tokens of the current request. stopped: the last of them is a stop token (the end of turn
        that the template writes replaces it). text: the answer's, where it was cut within a token: then the history is
        rendered again. Raises RequestError, with the line, if the template refuses the new
        history.
        """
        done = len(self._answers) + 1
        if done >= self.num_turns:
            return None
        token_ids = as_token_array(generated_ids)
        reading = self._renderer.reading(self._conversation, self.prompt)
        self._answers.append(reading.read(self._renderer.decode(generated_ids) if text is None else text))
        self._token_ids.append(token_ids[:-1] if stopped else token_ids)
        self._is_cut = text is not None
        now, following = self._turns[done - 1 : done + 1]
        warnings = self._follow_calls(now, following)
        try:
            token_ids = self._renderer.check_tokens(self._extend(now, following))
            custom_id = self._conversation.request_id(following.number)
            ids = frozenset(call.id for answer in self._answers for call in answer.calls if call.id is not None)
            self.prompt = Prompt(following.number, token_ids, custom_id, following.num_messages, ids, warnings)
        except RequestError as error:
            raise RequestError(error.code, error.message, self._conversation.line) from None
        return self.prompt

    def _first(self) -> Prompt:
        turn = self._turns[0]
        try:
            token_ids = self._tokenise(self._conversation.messages[: turn.num_messages])
        except RequestError as error:
            raise RequestError(error.code, error.message, self._conversation.line) from None
        return Prompt(turn.number, token_ids, self._conversation.request_id(turn.number), turn.num_messages)

    def _follow_calls(self, now: Turn, following: Turn) -> tuple[str, ...]:
        """Give the messages behind the last answer the ids of its calls; a sentence if their numbers differ."""
        recorded = self._conversation.messages
        begin, end = now.num_messages + 1, following.num_messages
        rest, warnings = follow_calls(
            recorded[now.num_messages], self._answers[-1].calls, recorded[begin:end], now.number
        )
        self._messages[begin:end] = rest
        return warnings

    def _extend(self, now: Turn, following: Turn) -> TokenArray:
        if self._is_cut:
            return self._tokenise(self._generated_history(following))
        tail = self._text_behind(now, following)
        if tail is not None:
            behind = self._renderer.tokenizer.encode_behind(tail)
            return np.concatenate((self.prompt.token_ids, self._token_ids[-1], as_token_array(behind)))
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
        history = self._messages[: now.num_messages]
        placeholder = {"role": "assistant", "content": _PLACEHOLDER}
        rest = self._messages[now.num_messages + 1 : following.num_messages]
        try:
            before = self._renderer.render_text(self._conversation, history) + _PLACEHOLDER
            text = self._renderer.render_text(self._conversation, [*history, placeholder, *rest])
        except RequestError:
            return None
        return text[len(before) :] if text.startswith(before) else None

    def _generated_history(self, following: Turn) -> list[Message]:
        """The messages before a turn, with the generated answers instead of the recorded ones."""
        history = self._messages[: following.num_messages]
        for turn, answer in zip(self._turns, self._answers, strict=False):
            history[turn.num_messages] = answer.as_message()
        return history

    def _tokenise(self, messages: Sequence[Message]) -> TokenArray:
        text = self._renderer.render_text(self._conversation, messages)
        return self._renderer.check_tokens(as_token_array(self._renderer.tokenizer.encode(text).ids))
