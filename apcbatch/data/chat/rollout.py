"""Rollout: build each prompt of a conversation on the answers generated in its earlier turns.

Invariant: a prompt begins with the previous prompt and the tokens generated for it, so the state after decoding is
reused. There are two exceptions, in which the whole history is rendered again: the template changes the text up to
the answer, or the answer's text ends within a token. Recorded tool messages get the ids of the generated calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apcbatch.answer import AnswerWarning
from apcbatch.data.chat.render import Prompt, Renderer
from apcbatch.data.checks import at_line
from apcbatch.data.conversation import Conversation, Message, Turn
from apcbatch.data.output.parser import ParsedAnswer
from apcbatch.data.output.tool_parser import Call
from apcbatch.errors import RequestError
from apcbatch.formats import Turns
from apcbatch.prefix import TokenArray, as_token_array

# Placeholder of the answer while the text after it is rendered: private-use characters, which no template trims.
_PLACEHOLDER = "\ue0a9\ue0ac\ue0b8"


class Rollout:
    """The requests of one conversation, one after the other. A `batch` line, or one that continues its last message,
    has a single request.

    prompt: prompt of the current request. sampled: its parts [begin, end) that are generated tokens, with the stop
    token where the template ends a turn with it. num_turns: number of requests. To resume after a kill, call `advance`
    with each answer in OUT. RequestError if the first prompt cannot be made.
    """

    def __init__(self, renderer: Renderer, conversation: Conversation, turns: Turns = "rollout") -> None:
        self._renderer = renderer
        self._conversation = conversation
        self._token_ids: list[TokenArray] = []
        self._answers: list[ParsedAnswer] = []
        self._stop_token: int | None = None  # that ended the last answer
        self._is_cut = False  # the tokens of the last answer have more text than the answer
        self._messages = list(conversation.messages)  # tool messages with the ids of generated calls
        self._turns: list[Turn] = conversation.requests(turns)
        self.num_turns = len(self._turns)
        self.sampled: list[tuple[int, int]] = []
        single = conversation.is_single and turns == "rollout"
        self.prompt = renderer.render(conversation, "each").prompts[0] if single else self._first()

    def advance(self, generated_ids: Sequence[int], stopped: bool, text: str | None = None) -> Prompt | None:
        """Take the answer to the current request; return the next prompt, or None after the last request.

        generated_ids: tokens of the answer. stopped: the last of them is a stop token; the template's end of turn
        replaces it. text: the answer's text if it ends within the last token, so that the history must be rendered
        again; otherwise None. RequestError, with the line, if the template refuses the new history.
        """
        done = len(self._answers) + 1
        if done >= self.num_turns:
            return None
        self.take(generated_ids, stopped, text)
        now, following = self._turns[done - 1 : done + 1]
        return self._make_prompt(now, following, self._follow_calls(now, following))

    def take(self, generated_ids: Sequence[int], stopped: bool, text: str | None = None) -> ParsedAnswer:
        """Parse the generated answer to the current request, keep it for the history, and return it. Arguments: see
        `advance`."""
        token_ids = as_token_array(generated_ids)
        output_parser = self._renderer.output_parser(self._conversation, self.prompt)
        whole = self._renderer.tokenizer.decode(generated_ids) if text is None else text
        self._answers.append(output_parser.parse(whole))
        self._token_ids.append(token_ids[:-1] if stopped else token_ids)
        self._stop_token = int(token_ids[-1]) if stopped else None
        self._is_cut = text is not None
        return self._answers[-1]

    def _make_prompt(self, now: Turn, following: Turn, warnings: tuple[AnswerWarning, ...]) -> Prompt:
        try:
            token_ids = self._renderer.check_tokens(self._extend(now, following))
            custom_id = self._conversation.request_id(following.number)
            ids = frozenset(call.id for answer in self._answers for call in answer.calls if call.id is not None)
            self.prompt = Prompt(following.number, token_ids, custom_id, following.num_messages, ids, warnings)
        except RequestError as error:
            raise at_line(error, self._conversation.line) from None
        return self.prompt

    def _first(self) -> Prompt:
        turn = self._turns[0]
        try:
            token_ids = self._tokenise(self._conversation.messages[: turn.num_messages])
        except RequestError as error:
            raise at_line(error, self._conversation.line) from None
        return Prompt(turn.number, token_ids, self._conversation.request_id(turn.number), turn.num_messages)

    def _follow_calls(self, now: Turn, following: Turn) -> tuple[AnswerWarning, ...]:
        """Give each tool message after the last answer the id of a call in that answer; return a warning if there are
        more or fewer calls than messages."""
        recorded = self._conversation.messages
        begin, end = now.num_messages + 1, following.num_messages
        rest, warnings = follow_calls(
            recorded[now.num_messages], self._answers[-1].calls, recorded[begin:end], now.number
        )
        self._messages[begin:end] = rest
        return warnings

    def _extend(self, now: Turn, following: Turn) -> TokenArray:
        if self._is_cut:
            return self._render_again(following)
        tail = self._text_after(now, following)
        if tail is not None:
            return self._append(tail)
        self._renderer.warn_once(
            "rollout",
            "the chat template does not keep an answer as it was generated: the history of "
            f"{self._conversation.request_id(following.number)}, and others like it, is rendered again "
            "from the answers' text and reuses less",
        )
        return self._render_again(following)

    def _append(self, tail: str) -> TokenArray:
        """Return the prompt, its answer's tokens, and those of the text that follows."""
        ids = as_token_array(self._renderer.tokenizer.encode_continuation(tail))
        begin, answer = len(self.prompt.token_ids), self._token_ids[-1]
        has_stop_token = self._stop_token is not None and ids[:1].tolist() == [self._stop_token]
        self.sampled.append((begin, begin + len(answer) + has_stop_token))
        return np.concatenate((self.prompt.token_ids, answer, ids))

    def _render_again(self, following: Turn) -> TokenArray:
        """Render the history before a turn, with the generated answers in place of the recorded ones, and return its
        tokens."""
        self.sampled.clear()
        history = self._messages[: following.num_messages]
        for turn, answer in zip(self._turns, self._answers, strict=False):
            history[turn.num_messages] = answer.as_message()
        return self._tokenise(history)

    def _text_after(self, now: Turn, following: Turn) -> str | None:
        """Render the text from the end of an answer to the end of the next prompt: end of turn, recorded messages,
        generation prompt. Return None if the template changes the text before that, or cannot render it."""
        history = self._messages[: now.num_messages]
        try:
            before = self._renderer.render_text(self._conversation, history) + _PLACEHOLDER
            text = self._text_with_placeholder(now, following)
        except RequestError:
            return None
        return text[len(before) :] if text.startswith(before) else None

    def _text_with_placeholder(self, now: Turn, following: Turn) -> str:
        """Render the prompt of the next turn, with the placeholder as the current turn's answer."""
        messages = self._messages[: following.num_messages]
        messages[now.num_messages] = {"role": "assistant", "content": _PLACEHOLDER}
        return self._renderer.render_text(self._conversation, messages)

    def _tokenise(self, messages: Sequence[Message]) -> TokenArray:
        text = self._renderer.render_text(self._conversation, messages)
        return self._renderer.check_tokens(as_token_array(self._renderer.tokenizer.encode(text).ids))


class LiveHistory(Rollout):
    """The requests of a live episode: messages behind an answer become known when its tools have answered.

    conversation: of this episode alone; its messages grow. keeps_tokens: an answer is never rendered again.
    """

    def __init__(self, renderer: Renderer, conversation: Conversation, keeps_tokens: bool) -> None:
        super().__init__(renderer, conversation, "live")
        self._messages = conversation.messages
        self._keeps_tokens = keeps_tokens

    def extend(self, appended: Sequence[Message]) -> Prompt:
        """Return the next prompt, with these messages behind the answer. RequestError if it cannot be made."""
        now = self._turns[-1]
        self._messages += [self._answers[-1].as_message(), *appended]
        following = Turn(now.number + 1, len(self._messages))
        self._turns.append(following)
        num_sampled = len(self.sampled)
        prompt = self._make_prompt(now, following, ())
        if len(self.sampled) <= num_sampled:
            reason = "the answer ends within a token" if self._is_cut else "the template does not keep it as generated"
            prompt.warnings = (AnswerWarning("rendered_again", f"the history is rendered from its text: {reason}"),)
        return prompt

    def _extend(self, now: Turn, following: Turn) -> TokenArray:
        if not self._keeps_tokens:
            return super()._extend(now, following)
        text = self._text_with_placeholder(now, following)
        before, _, tail = text.partition(_PLACEHOLDER)
        if before == text or _PLACEHOLDER in tail:
            raise RequestError(
                "invalid_request",
                "the chat template leaves out an answer, or shows it twice; --history tokens needs it once",
            )
        return self._append(tail)


def follow_calls(
    recorded: Message, calls: Sequence[Call], rest: Sequence[Message], turn: int
) -> tuple[list[Message], tuple[AnswerWarning, ...]]:
    """Give each tool message after an answer the id of a call in that answer.

    Return the changed `rest`, and a warning if there are more or fewer calls than tool messages. recorded: the
    assistant's message that the answer replaces. calls: the generated calls. rest: messages up to the next answer. Each
    tool message gets the id of the first unused call of its tool. Then the messages without such a call get the ids of
    the unused calls, in order. A tool message for which no call is left stays unchanged.
    """
    places = [place for place, message in enumerate(rest) if message["role"] == "tool"]
    names = {
        call["id"]: call["function"]["name"] for call in recorded.get("tool_calls", ()) if call.get("id") is not None
    }
    left = list(calls)
    chosen: dict[int, Call] = {}
    for place in places:
        name = rest[place].get("name") or names.get(rest[place].get("tool_call_id"))
        call = next((call for call in left if call.name == name), None)
        if call is not None:
            left.remove(call)
            chosen[place] = call
    for place in places:
        if place not in chosen and left:
            chosen[place] = left.pop(0)
    messages = [
        {**message, "tool_call_id": chosen[place].id} if place in chosen else message
        for place, message in enumerate(rest)
    ]
    if len(calls) == len(places):
        return messages, ()
    made = "1 tool call" if len(calls) == 1 else f"{len(calls):,} tool calls"
    answers = (
        "1 recorded message of a tool follows"
        if len(places) == 1
        else (f"{len(places):,} recorded messages of tools follow")
    )
    return messages, (AnswerWarning("tool_results", f"turn {turn} generated {made}, and {answers}"),)
