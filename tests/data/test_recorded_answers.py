"""Recorded answers as they are scored: whose tokens they have, where they begin and end, and which cannot be scored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from apcbatch.data.chat.recorded_answers import answered_turns, render_answers
from apcbatch.data.chat.render import Renderer
from apcbatch.data.conversation import Conversation
from apcbatch.errors import RequestError
from tests.data.conftest import (
    KINDS,
    STABLE_TEMPLATE,
    UNSTABLE_TEMPLATE,
    batch,
    conversation,
    good,
    kept_by_transformers,
)
from tests.effort import table

AGENT = conversation(
    "system: The policy: an agent books, modifies or cancels flight reservations.",
    "user: Before any action,\n\nlist the details ",
    "assistant:  a yes\n",
    "tool: {}",
    "assistant: \n\nIt's what we're here for",
    "user: 'll",
    "assistant: ",
)
# What a template for reasoning does: its prompt begins a thought that a recorded answer does not have.
THINKING = STABLE_TEMPLATE.replace("<|im_start|>assistant\\n' -}}", "<|im_start|>assistant\\n<think>' -}}")


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_has_the_tokens_of_the_conversation(
    make_renderer: Callable[..., Renderer], model_dir: Callable[..., Path], kind: str
) -> None:
    """Catches a history that is not the prompt which the answer would be generated for, an answer that begins a token
    early or late, and one that is not the whole text of its turn."""
    renderer = make_renderer(kind, STABLE_TEMPLATE)
    prompts = {prompt.turn: prompt.token_ids.tolist() for prompt in renderer.render(AGENT).prompts}
    rendered = render_answers(renderer, AGENT, "each")
    assert [prompt.turn for prompt in rendered.prompts] == [1, 2, 3] and not rendered.failures
    for prompt, count in zip(rendered.prompts, (3, 5, 7), strict=True):
        tokens, begin = prompt.token_ids.tolist(), prompt.answer_begin
        assert begin is not None and tokens[:begin] == prompts[prompt.turn]
        text = kept_by_transformers(model_dir(kind, STABLE_TEMPLATE)).apply_chat_template(
            AGENT.messages[:count], tools=AGENT.tools, add_generation_prompt=False, tokenize=False
        )
        whole = renderer.tokenizer.encode(text).ids
        if whole[:begin] == tokens[:begin]:
            [eos] = renderer.tokenizer.eos_token_ids or [None]
            assert tokens == whole[: len(whole) - whole[::-1].index(eos) if eos in whole else None]
        else:  # a token reaches over the border
            # What the vocabulary cannot write is its unknown token in both.
            answer, known = (renderer.tokenizer.decode_all(ids) for ids in (tokens[begin:], whole))
            assert answer.strip() and known.removesuffix("\n").endswith(answer.removesuffix("\n"))


def test_an_answer_ends_with_its_stop_token(make_renderer: Callable[..., Renderer]) -> None:
    """Catches the line break behind the end of turn, which no model generates, and a stop token that a text of the
    answer spells and that is taken for its end."""
    renderer = make_renderer("chatml", STABLE_TEMPLATE)
    record = conversation("user: hi", "assistant: write <|im_end|> there", "user: why", "assistant: so")
    [eos] = renderer.tokenizer.eos_token_ids
    first, second = render_answers(renderer, record, "each").prompts
    answer = first.token_ids[first.answer_begin :].tolist()
    assert answer.count(eos) == 2 and answer[-1] == eos
    assert second.token_ids[second.answer_begin :].tolist() == [*renderer.tokenizer.encode("so").ids, eos]


def test_turns_share_their_tokens(make_renderer: Callable[..., Renderer]) -> None:
    """Catches a copy of a long history for each of its turns."""
    renderer = make_renderer("chatml", STABLE_TEMPLATE)
    record = conversation("user: hi", "assistant: so", "user: why", "assistant: because", "user: ah")
    bases = {id(prompt.token_ids.base) for prompt in render_answers(renderer, record, "each").prompts}
    assert len(bases) == 1


@table("template", [THINKING, UNSTABLE_TEMPLATE])
def test_a_template_that_goes_on_otherwise_is_said(make_renderer: Callable[..., Renderer], template: str) -> None:
    """Catches the score of an answer behind a prompt that the template never writes before it, and tokens of another
    turn where the head of the text changes with each one."""
    rendered = render_answers(make_renderer("chatml", template), AGENT, "each")
    assert rendered.prompts == [] and [failure.turn for failure in rendered.failures] == [1, 2, 3]
    for failure in rendered.failures:
        assert "does not write the recorded answer behind its prompt" in failure.error.message
        assert (failure.error.code, failure.error.line) == ("invalid_request", 7)


@table(
    "record, turns, expected",
    [
        (AGENT, "each", [(1, 2), (2, 4), (3, 6)]),
        (AGENT, "last", [(3, 6)]),
        (conversation("user: a", "assistant: b", "user: c"), "each", [(1, 1)]),
        (conversation("user: a", "assistant: b", "user: c"), "last", [(1, 1)]),
        (good(batch({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})), "each",
         [(1, 1)]),
    ],
)  # fmt: skip
def test_turns_with_an_answer(record: Conversation, turns: str, expected: list[tuple[int, int]]) -> None:
    """Catches the request for a missing answer, and a turn with another one's number."""
    assert answered_turns(record, turns) == expected  # type: ignore[arg-type]


@table(
    "record, expected",
    [
        (conversation("user: a"), "no message is from the assistant"),
        (good(batch()), "the last message is not from the assistant"),
        (good(batch({"prompt": "x"}, url="/v1/completions")), "a completion has no recorded answer"),
    ],
)
def test_what_has_no_answer_is_said(
    make_renderer: Callable[..., Renderer], record: Conversation, expected: str
) -> None:
    """Catches a line that is scored as if it had an answer."""
    with pytest.raises(RequestError, match=expected):
        answered_turns(record, "each")
    with pytest.raises(RequestError, match=expected) as raised:
        render_answers(make_renderer(), record, "each")
    assert raised.value.line == record.line


def test_an_answer_without_tokens_is_said(make_renderer: Callable[..., Renderer]) -> None:
    """Catches an empty score."""
    bare = "{% for message in messages %}{{ message.content }}{% endfor %}"
    record = conversation("user: a b", "assistant: ")
    [failure] = render_answers(make_renderer("chatml", bare), record, "each").failures
    assert "has no tokens" in failure.error.message
