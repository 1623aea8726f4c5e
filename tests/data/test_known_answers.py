"""Known answers that drafts are made from: whose tokens they have, what they cost, and that none is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from apcbatch.data.chat.known_answers import KnownAnswers
from apcbatch.data.chat.recorded_answers import render_answers
from apcbatch.data.chat.render import Prompt, Renderer
from apcbatch.data.conversation import Conversation
from apcbatch.errors import RequestError
from apcbatch.formats import Turns
from tests.data.conftest import KINDS, STABLE_TEMPLATE, UNSTABLE_TEMPLATE, conversation, good
from tests.data.test_recorded_answers import AGENT, THINKING
from tests.effort import table

REFUSING = STABLE_TEMPLATE.replace(
    "{%- for", "{%- if messages[-1].content == 'bad' -%}{{ raise_exception('no') }}{%- endif -%}{%- for", 1
)


def known_of(renderer: Renderer, record: Conversation, turns: Turns = "each") -> tuple[KnownAnswers, list[Prompt]]:
    known = KnownAnswers(renderer, record)
    return known, renderer.render(record, turns, known.note).prompts


@pytest.mark.drawn(6)
@pytest.mark.parametrize("turns", ["each", "last"])
@pytest.mark.parametrize("template", [STABLE_TEMPLATE, UNSTABLE_TEMPLATE])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_answer_has_the_tokens_that_it_is_scored_with(
    make_renderer: Callable[..., Renderer], monkeypatch: Any, kind: str, template: str, turns: Turns
) -> None:
    """Catches a draft that begins or ends elsewhere than the answer would, and a second rendering of a prompt."""
    renderer = make_renderer(kind, template)
    scored = {
        prompt.turn: prompt.token_ids[prompt.answer_begin :].tolist()
        for prompt in render_answers(renderer, AGENT, turns).prompts
    }
    counts: list[int] = []  # of the messages of each text that the template renders from here on
    texts = renderer.template.texts

    def counted(messages: Any, tools: Any, numbers: Any, *options: Any) -> Any:
        counts.extend(numbers)
        return texts(messages, tools, numbers, *options)

    monkeypatch.setattr(renderer.template, "texts", counted)
    known, prompts = known_of(renderer, AGENT, turns)
    found = {turn: tokens.tolist() for turn, tokens in known.recorded(prompts).items()}
    if turns == "each":  # the last turn of --turns last is the one after the last message of another role
        assert found == scored
    assert found.items() <= scored.items() and bool(found) == (template == STABLE_TEMPLATE)
    # the second answer, which ends with a stop token and has no reasoning, is in the third prompt
    is_in_a_prompt = kind == "chatml" and template == STABLE_TEMPLATE and turns == "each"
    assert len(counts) == 2 * len(prompts) - is_in_a_prompt


@table(
    "record, turns",
    [
        (conversation("user: hi", "assistant: so", "user: and"), [1]),
        (conversation("user: hi", "assistant: so", "user: hi", "assistant: bad"), [1]),
        (good({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}],
               "continue_final_message": True}), []),
        (good({"custom_id": "b", "method": "POST", "url": "/v1/chat/completions",
               "body": {"messages": [{"role": "user", "content": "hi"}]}}), []),
        (good({"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}), []),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_no_answer(
    make_renderer: Callable[..., Renderer], record: Conversation, turns: list[int]
) -> None:
    """Catches an error for an answer that the dataset does not have, or that the template refuses."""
    known, prompts = known_of(make_renderer("chatml", REFUSING), record)
    assert [*known.recorded(prompts)] == turns
    if prompts and record.messages:
        assert known.of_message(prompts[0], {"role": "assistant", "content": "bad"}) is None


def test_an_answer_that_the_template_writes_elsewhere_is_none(make_renderer: Callable[..., Renderer]) -> None:
    """Catches the middle of an answer as the draft of its beginning."""
    known, prompts = known_of(make_renderer("chatml", THINKING), AGENT)
    assert known.recorded(prompts) == {}
    assert known.of_message(prompts[0], {"role": "assistant", "content": "so"}) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_has_the_tokens_of_a_recorded_one(make_renderer: Callable[..., Renderer], kind: str) -> None:
    """Catches an earlier run's answer that is rendered otherwise than the dataset's, with its prompt's text at hand and
    without it, as in a rollout."""
    renderer = make_renderer(kind, STABLE_TEMPLATE)
    record = conversation("user: hi", "assistant: It is what it is", "user: why", "assistant: so")
    known, prompts = known_of(renderer, record)
    recorded = known.recorded(prompts)
    bare = KnownAnswers(renderer, record)
    for prompt in prompts:
        message = record.messages[prompt.num_messages]
        assert known.of_message(prompt, message).tolist() == recorded[prompt.turn].tolist()
        assert bare.of_message(prompt, message).tolist() == recorded[prompt.turn].tolist()


def test_tokens_outside_the_vocabulary_are_no_answer(make_renderer: Callable[..., Renderer]) -> None:
    """Catches a token id that would end the pass which verifies it; and views of one whole conversation for each of its
    turns: memory that grows with their square."""
    renderer = make_renderer("chatml", STABLE_TEMPLATE)
    known, prompts = known_of(renderer, AGENT)
    assert all(tokens.base is None for tokens in known.recorded(prompts).values())
    [last] = known.recorded(prompts[-1:]).values()
    renderer.tokenizer.vocab_size = int(last.max())
    assert known.recorded(prompts[-1:]) == {} and known.of_tokens(last) is None and known.of_tokens(last[:0]) is None
    assert known.of_message(prompts[-1], AGENT.messages[-1]) is None


def test_a_tokenizer_that_refuses_gives_no_answer(make_renderer: Callable[..., Renderer], monkeypatch: Any) -> None:
    """Catches an error record for a request that needs no draft."""
    renderer = make_renderer("chatml", STABLE_TEMPLATE)
    known, prompts = known_of(renderer, AGENT)

    def refuse(*_: object) -> Any:
        raise RequestError("out_of_memory", "no")

    monkeypatch.setattr(renderer.tokenizer, "encode", refuse)
    assert known.recorded(prompts[-1:]) == {} and known.of_text("so") is None
