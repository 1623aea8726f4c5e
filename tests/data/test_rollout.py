"""Rollout: token by token, what the next prompt is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.rollout import Rollout
from apcbatch.errors import RequestError
from tests.data.conftest import STABLE_TEMPLATE, UNSTABLE_TEMPLATE, conversation
from tests.effort import table

RECORD = conversation(
    "system: The policy",
    "user: one",
    "assistant: recorded",
    "tool: two",
    "assistant: also",
    "assistant: this",
    "user: x",
)
WITH_TOOLS = replace(RECORD, tools=[{"type": "function", "function": {"name": "f"}}])
BEHIND = "<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>\n<|im_start|>assistant\n"


def ids(renderer: Renderer, text: str) -> list[int]:
    """Token ids of a text."""
    return renderer.tokenizer.encode(text).ids


def test_an_answer_that_was_cut_within_a_token_is_written_anew(
    make_renderer: Callable[..., Renderer], warnings: list[str]
) -> None:
    """Fault: the stop text, or what the last token has behind it, is fed back; or the turns after it forget the cut."""
    renderer = make_renderer()
    rollout = Rollout(renderer, RECORD)
    answer = ids(renderer, "Grüße aus Köln")
    second = rollout.advance(answer, stopped=False, text="Grüß")
    history = [*RECORD.messages[:2], {"role": "assistant", "content": "Grüß"}, RECORD.messages[3]]
    assert second is not None
    assert second.token_ids.tolist() == ids(renderer, renderer.render_text(RECORD, history))
    third = rollout.advance(answer, stopped=False)
    assert third is not None and third.token_ids[: len(second.token_ids)].tolist() == second.token_ids.tolist()
    fourth = rollout.advance(answer, stopped=False, text="aus")
    contents = {2: "Grüß", 4: "Grüße aus Köln", 5: "aus"}
    history = [{**one, "content": contents.get(place, one["content"])} for place, one in enumerate(RECORD.messages)]
    assert fourth is not None
    assert fourth.token_ids.tolist() == ids(renderer, renderer.render_text(RECORD, history))
    assert warnings == []


def test_a_prompt_is_the_one_before_the_answer_and_what_follows(
    make_renderer: Callable[..., Renderer], warnings: list[str]
) -> None:
    """The generated tokens stay as they are, in a form that no text of them would be tokenised to."""
    renderer = make_renderer()
    rollout = Rollout(renderer, RECORD)
    first = rollout.prompt
    assert (first.turn, first.custom_id, rollout.num_turns) == (1, "c#1", 4)
    assert first.token_ids.tolist() == renderer.render(RECORD).prompts[0].token_ids.tolist()
    answer = [token for letter in "generated" for token in ids(renderer, letter)]
    assert answer != ids(renderer, "generated")
    second = rollout.advance(answer, stopped=False)
    assert second is not None and second is rollout.prompt
    assert (second.turn, second.custom_id, second.token_ids.dtype) == (2, "c#2", np.int32)
    assert second.token_ids.tolist() == first.token_ids.tolist() + answer + ids(renderer, BEHIND)
    third = rollout.advance([], stopped=False)
    assert third is not None
    between = "<|im_end|>\n<|im_start|>assistant\n"
    assert third.token_ids.tolist() == second.token_ids.tolist() + ids(renderer, between)
    fourth = rollout.advance(answer, stopped=False)
    assert fourth is not None
    assert fourth.token_ids[len(third.token_ids) :].tolist() == answer + ids(
        renderer, "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rollout.advance(answer, stopped=True) is None
    assert warnings == []


@table("stop, stopped", [("<|im_end|>", True), ("<|endoftext|>", True), ("<|im_end|>", False)])
def test_a_stop_token_gives_way_to_the_templates_own(
    make_renderer: Callable[..., Renderer], stop: str, stopped: bool
) -> None:
    """Doubled, the end of a turn reads as an empty turn; any other stop token is no part of the history. With
    --ignore-eos every generated token counts, and the state that was reached has seen it."""
    renderer = make_renderer()
    answer = ids(renderer, "yes")
    rollout = Rollout(renderer, RECORD)
    before = rollout.prompt.token_ids.tolist()
    following = rollout.advance([*answer, *ids(renderer, stop)], stopped=stopped)
    assert following is not None
    kept = [] if stopped else ids(renderer, stop)
    assert following.token_ids.tolist() == before + answer + kept + ids(renderer, BEHIND)


@pytest.mark.parametrize("kind", ["metaspace", "legacy", "llama3"])
def test_what_follows_an_answer_has_no_blank_put_before_it(make_renderer: Callable[..., Renderer], kind: str) -> None:
    """Tokenizers that put a blank before the first word of a text would put one into every turn."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    renderer = make_renderer(kind, template)
    rollout = Rollout(renderer, RECORD)
    before = len(rollout.prompt.token_ids)
    following = rollout.advance([], stopped=False)
    assert following is not None
    assert renderer.tokenizer.decode(following.token_ids[before:].tolist()) == "[tool]two[assistant]"


def test_a_trimmed_answer_is_still_kept(make_renderer: Callable[..., Renderer], warnings: list[str]) -> None:
    """Templates that trim contents are prefix-stable all the same: the history keeps what was generated."""
    renderer = make_renderer("chatml", STABLE_TEMPLATE.replace("message.content", "message.content | trim"))
    rollout = Rollout(renderer, RECORD)
    before = rollout.prompt.token_ids.tolist()
    answer = ids(renderer, "  yes \n")
    following = rollout.advance(answer, stopped=False)
    assert following is not None and following.token_ids.tolist() == before + answer + ids(renderer, BEHIND)
    assert warnings == []


def test_an_unstable_template_is_rendered_again_with_the_answers(
    make_renderer: Callable[..., Renderer], warnings: list[str]
) -> None:
    """With the answers so far in the place of the recorded ones, calls as calls, and one warning."""
    renderer = make_renderer("chatml", UNSTABLE_TEMPLATE)
    rollout = Rollout(renderer, WITH_TOOLS)
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    rollout.advance(ids(renderer, f"so: {call}<|im_end|>"), stopped=True)
    third = rollout.advance(ids(renderer, "and"), stopped=False)
    messages: list[dict[str, Any]] = [dict(message) for message in RECORD.messages[:5]]
    function = {"name": "f", "arguments": {"a": 1}}
    messages[2] = {"role": "assistant", "content": "so:", "tool_calls": [{"function": function}]}
    messages[4] = {"role": "assistant", "content": "and"}
    assert third is not None
    assert third.token_ids.tolist() == ids(renderer, renderer.template.render(messages))
    assert len(warnings) == 1 and "the history of c#2, and others like it, is rendered again" in warnings[0]
    assert RECORD.messages[2] == {"role": "assistant", "content": "recorded"}


def test_a_refused_history_ends_the_rollout_with_its_line(make_renderer: Callable[..., Renderer]) -> None:
    """A template that counts on calls before a tool's answer may refuse what was generated."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call before a tool') }}{% endif %}{{ m.content }}|{% endfor %}"
    )
    renderer = make_renderer("chatml", template)
    rollout = Rollout(renderer, RECORD)
    with pytest.raises(RequestError, match="no call before a tool") as caught:
        rollout.advance(ids(renderer, "no call"), stopped=False)
    assert caught.value.line == 7
    rollout = Rollout(renderer, WITH_TOOLS)
    following = rollout.advance(ids(renderer, '<tool_call>{"name": "f"}</tool_call>'), stopped=False)
    assert following is not None and renderer.tokenizer.decode(following.token_ids) == "The policy|one||two|"
    with pytest.raises(RequestError, match="refuses") as caught:
        Rollout(make_renderer("chatml", "{{ raise_exception('never') }}"), RECORD)
    assert caught.value.line == 7
