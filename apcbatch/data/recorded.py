"""Recorded answers as they are scored: the history and the answer as one text of tokens, and where the answer begins.

Must not know: engines, jobs, output. Invariants: the history has the tokens of the prompt that the answer would be
generated for, and the whole text those of the rendered conversation up to the answer's end. Where a token of the
conversation reaches over the border between the two, the answer is tokenised behind the prompt, as if it had been
generated.

The answer ends with the last stop token of the model that the template writes in its turn, the end of turn as a rule;
what the template writes behind that nobody generates. Without one it ends where its turn does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apcbatch.data.records import Conversation
from apcbatch.data.render import FailedTurn, Prompt, Rendered, Renderer
from apcbatch.data.sharing import SharedText, common_length
from apcbatch.data.turns import Turn, recorded_turns
from apcbatch.errors import RequestError
from apcbatch.formats import Turns
from apcbatch.prefix import TokenArray, as_token_array

_SNIPPET_CHARACTERS = 24


def answered_turns(conversation: Conversation, turns: Turns) -> list[Turn]:
    """The turns of a conversation that have a recorded answer; RequestError if none has."""
    if conversation.prompt is not None:
        raise RequestError(
            "invalid_request", "a completion has no recorded answer to score; give it echo and logprobs without --score"
        )
    if conversation.source_format != "batch":
        return recorded_turns(conversation.messages, turns)
    if conversation.messages[-1]["role"] != "assistant":
        raise RequestError(
            "invalid_request", "the last message is not from the assistant; there is no recorded answer to score"
        )
    return [Turn(1, len(conversation.messages) - 1)]


def render_answers(renderer: Renderer, conversation: Conversation, turns: Turns) -> Rendered:
    """Each recorded answer behind its history, as a prompt that says where the answer begins. Raises RequestError, with
    the line, if there is none; turns that fail alone are in `failures`."""
    try:
        chosen = answered_turns(conversation, turns)
    except RequestError as error:
        raise RequestError(error.code, error.message, conversation.line) from None
    rendered = Rendered([])
    base: SharedText | None = None
    for turn in reversed(chosen):
        custom_id = conversation.request_id(turn.number)
        try:
            history, answered = _texts(renderer, conversation, turn.num_messages)
            base = base or SharedText(renderer.tokenizer, answered)
            token_ids, begin = _tokenise(renderer, base, history, answered)
            token_ids = renderer.check_tokens(token_ids)
            prompt = Prompt(turn.number, token_ids, custom_id, turn.num_messages, answer_begin=begin)
            rendered.prompts.append(prompt)
        except RequestError as error:
            located = RequestError(error.code, error.message, conversation.line)
            rendered.failures.append(FailedTurn(turn.number, custom_id, located))
    rendered.prompts.reverse()
    rendered.failures.reverse()
    return rendered


def _texts(renderer: Renderer, conversation: Conversation, num_messages: int) -> tuple[str, str]:
    """The prompt after so many messages, and the same with the answer behind it. One turn at a time: the texts of all
    turns together grow with the square of their number."""
    texts = []
    for count, prompts in ((num_messages, True), (num_messages + 1, False)):
        messages = conversation.messages[:count]
        switches = replace(conversation.switches, add_generation_prompt=prompts, continue_final_message=False)
        [text] = renderer.template.texts(messages, conversation.tools, [count], switches)
        if isinstance(text, RequestError):
            raise text
        texts.append(text)
    return texts[0], texts[1]


def _tokenise(renderer: Renderer, base: SharedText, history: str, answered: str) -> tuple[TokenArray, int]:
    """The tokens of history and answer, and how many of them are the history's."""
    if not answered.startswith(history):
        common = common_length(history, answered)
        here = history[common : common + _SNIPPET_CHARACTERS]
        there = answered[common : common + _SNIPPET_CHARACTERS]
        raise RequestError(
            "invalid_request",
            "the chat template does not write the recorded answer behind its prompt, so that it cannot be scored: they "
            f"part at character {common} ({here!r}, {there!r})",
        )
    prompt = renderer.check_tokens(base.tokenise(history, common_length(history, base.text)))
    whole = base.tokenise(answered, common_length(answered, base.text))
    begin = len(prompt)
    if not np.array_equal(whole[:begin], prompt):
        behind = renderer.tokenizer.encode_behind(answered[len(history) :])
        whole = np.concatenate((prompt, as_token_array(behind)))
    end = _end(whole, begin, renderer.tokenizer.eos_token_ids)
    if end == begin:
        raise RequestError("invalid_request", "the recorded answer has no tokens; there is nothing to score")
    return whole[:end], begin


def _end(tokens: TokenArray, begin: int, eos_token_ids: tuple[int, ...]) -> int:
    """The position behind the last stop token of the answer, or the end of the text if it has none."""
    stops = np.flatnonzero(np.isin(tokens[begin:], eos_token_ids))
    return begin + int(stops[-1]) + 1 if len(stops) else len(tokens)
