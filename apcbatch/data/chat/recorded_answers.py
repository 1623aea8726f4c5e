"""Tokenise recorded answers for scoring: history and answer in one array, and where the answer begins.

Invariants: the history has the tokens of the prompt from which the answer would be generated. History and answer
together have the tokens of the rendered conversation up to the answer's end. There is one exception: if a token spans
the border between the two, the answer is tokenised separately after the prompt, as if it had been generated.

The answer ends with the last stop token that the template writes in its turn, usually the end of turn: a model would
not generate the text after that. Without a stop token the answer ends with its turn.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from apcbatch.data.chat.common_prefix import BaseText, common_length
from apcbatch.data.chat.render import Prompt, Rendered, Renderer, render_backwards, snippets
from apcbatch.data.checks import at_line
from apcbatch.data.conversation import Conversation, Turn, recorded_turns
from apcbatch.errors import RequestError
from apcbatch.formats import Turns
from apcbatch.prefix import TokenArray, as_token_array


def answered_turns(conversation: Conversation, turns: Turns) -> list[Turn]:
    """Choose the turns of a conversation that have a recorded answer; RequestError if none has."""
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
    """Make a prompt for each recorded answer: the history, then the answer from `answer_begin` on.

    RequestError, with the line, if there is no recorded answer. Turns whose prompt cannot be made are in `failures`."""
    base: BaseText | None = None

    def make_prompt(turn: Turn, custom_id: str) -> Prompt:
        nonlocal base
        history, answered = _texts(renderer, conversation, turn.num_messages)
        base = base or renderer.bases.make(answered)
        token_ids, begin = tokenise_answer(renderer, base, history, answered)
        token_ids = renderer.check_tokens(token_ids)
        return Prompt(turn.number, token_ids, custom_id, turn.num_messages, answer_begin=begin)

    try:
        return render_backwards(conversation, answered_turns(conversation, turns), make_prompt)
    except RequestError as error:
        raise at_line(error, conversation.line) from None


def _texts(renderer: Renderer, conversation: Conversation, num_messages: int) -> tuple[str, str]:
    """Render the prompt after `num_messages` messages, and the prompt with the answer.

    Called for one turn at a time: the texts of all turns together grow with the square of the number of turns."""
    texts = []
    for count, prompts in ((num_messages, True), (num_messages + 1, False)):
        messages = conversation.messages[:count]
        options = replace(conversation.template_options, add_generation_prompt=prompts, continue_final_message=False)
        texts.append(renderer.template.render(messages, conversation.tools, options))
    return texts[0], texts[1]


def tokenise_answer(renderer: Renderer, base: BaseText, history: str, answered: str) -> tuple[TokenArray, int]:
    """Tokenise history and answer; return the tokens of both, (tokens,) int32, and the number of history tokens."""
    if not answered.startswith(history):
        raise RequestError(
            "invalid_request",
            "the chat template does not write the recorded answer behind its prompt, so that it cannot be scored: they "
            f"part at {snippets(history, answered, common_length(history, answered))}",
        )
    prompt = renderer.check_tokens(base.tokenise(history, common_length(history, base.text)))
    whole = base.tokenise(answered, common_length(answered, base.text))
    begin = len(prompt)
    if not np.array_equal(whole[:begin], prompt):
        answer = renderer.tokenizer.encode_continuation(answered[len(history) :])
        whole = np.concatenate((prompt, as_token_array(answer)))
    end = answer_end(whole, begin, renderer.tokenizer.eos_token_ids)
    if end == begin:
        raise RequestError("invalid_request", "the recorded answer has no tokens; there is nothing to score")
    return whole[:end], begin


def answer_end(tokens: TokenArray, begin: int, eos_token_ids: tuple[int, ...]) -> int:
    """Return the position after the last stop token of the answer, or the number of tokens if it has none."""
    stops = stops_in(tokens[begin:], eos_token_ids)
    return begin + int(stops[-1]) + 1 if len(stops) else len(tokens)


def stops_in(tokens: TokenArray, eos_token_ids: tuple[int, ...]) -> npt.NDArray[np.intp]:
    """Return the positions of the stop tokens, ascending."""
    # A model has few of them, for which np.isin takes longer.
    return np.flatnonzero(np.any([tokens == token for token in eos_token_ids], axis=0))
