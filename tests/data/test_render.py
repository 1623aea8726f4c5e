"""Rendering: prompts of each kind of conversation, cut where the template allows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apcbatch.data.chat.render import Prompt, Renderer, snippets
from apcbatch.data.conversation import Conversation
from apcbatch.data.helper_child import MAX_CHARACTERS
from apcbatch.data.input.records import parse_record
from apcbatch.errors import RequestError
from apcbatch.prefix import as_token_array
from tests.chats import DROPS_THOUGHTS
from tests.data.conftest import (
    KINDS,
    STABLE_TEMPLATE,
    UNSTABLE_TEMPLATE,
    USER,
    by_transformers,
    completion,
    conversation,
    good,
    kept_by_transformers,
)
from tests.effort import table, tries

AGENT = conversation(
    "system: The policy: an agent books, modifies or cancels flight reservations.",
    "user: Before any action,\n\nlist the details ",
    "assistant:  a yes\n",
    "tool: {}",
    "assistant: ",
    "user: 'll",
)


def alone(renderer: Renderer, record: Conversation, num_messages: int) -> list[int]:
    """The prompt after `num_messages` messages, as `transformers` makes it from nothing."""
    return kept_by_transformers(renderer.tokenizer.source.name_or_path).apply_chat_template(
        record.messages[:num_messages], tools=record.tools, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning", None, "no begin"])
def test_thoughts_that_are_taken_out_are_found(key: str | None, make_renderer: Callable[..., Renderer]) -> None:
    """Catches thoughts of one spelling that are overlooked, and a history whose thoughts stay, or that has none."""
    thought = "It asks for a word."
    turns = ["user: a", "assistant: b", "tool: c", "assistant: d", "user: e"]
    for has_thought, kept, is_dropped in ((True, False, True), (True, True, False), (False, False, False)):
        record = conversation(*turns, chat_template_kwargs={"preserve_thinking": kept})
        if has_thought:
            for message in (record.messages[1], record.messages[3]):
                if key in (None, "no begin"):
                    message["content"] = f"{'' if key else '<think>'}{thought}</think>{message['content']}"
                else:
                    message[key] = thought
        rendered = make_renderer("chatml", DROPS_THOUGHTS).render(record)
        assert (rendered.drops_thoughts, rendered.prefix_stable) == (is_dropped, not is_dropped)
        assert len(rendered.prompts) == 3


@pytest.mark.drawn(6)
@pytest.mark.parametrize("template", [STABLE_TEMPLATE, UNSTABLE_TEMPLATE])
@pytest.mark.parametrize("kind", KINDS)
def test_each_turn_is_a_prompt_with_the_tokens_it_has_alone(
    make_renderer: Callable[..., Renderer], warnings: list[str], kind: str, template: str
) -> None:
    """Wherever tokens come from, a prompt is what `transformers` would give for its history."""
    renderer = make_renderer(kind, template)
    rendered = renderer.render(AGENT)
    assert [(prompt.turn, prompt.custom_id) for prompt in rendered.prompts] == [(1, "c#1"), (2, "c#2"), (3, "c#3")]
    for prompt, num_messages in zip(rendered.prompts, (2, 4, 6), strict=True):
        assert prompt.token_ids.dtype == np.int32
        assert prompt.token_ids.tolist() == alone(renderer, AGENT, num_messages)
    assert rendered.prefix_stable == (template is STABLE_TEMPLATE) == (not warnings)
    assert rendered.failures == []


def test_a_text_is_continued_where_the_model_has_no_template(
    make_renderer: Callable[..., Renderer], warnings: list[str]
) -> None:
    """Fault: a chat becomes a completion, or is said to be one; a text is continued where there is a template."""
    told = "line 3: the model has no chat template, so prompts that are texts are continued as they are"
    for template in (None, STABLE_TEMPLATE):
        renderer = make_renderer("chatml", template)
        warnings.clear()
        chat = good({"messages": [USER]})
        renderer.complete_without_template(chat)
        assert chat.prompt is None and chat.messages == [USER] and not warnings
        for _ in range(2):
            text = good({"prompt": "hi"})
            renderer.complete_without_template(text)
            assert (text.prompt, text.messages) == ((None, [USER]) if template else ("hi", []))
        assert warnings == ([] if template else [told])


def test_the_turns_of_a_stable_conversation_share_one_array(make_renderer: Callable[..., Renderer]) -> None:
    """A conversation of 60 turns must not hold its history 60 times."""
    prompts = make_renderer().render(AGENT).prompts
    assert all(np.shares_memory(prompt.token_ids, prompts[-1].token_ids) for prompt in prompts)


def test_an_unstable_template_is_told_once_with_the_first_difference(
    make_renderer: Callable[..., Renderer], warnings: list[str]
) -> None:
    """The place that costs reuse is named once, not for each conversation."""
    renderer = make_renderer("chatml", UNSTABLE_TEMPLATE)
    for _ in range(3):
        renderer.render(AGENT)
    (warning,) = warnings
    assert warning == (
        "the chat template is not prefix-stable: the prompts of c#2 and of the last turn part at character 0 "
        "('4 messages<|im_start|>sy', '6 messages<|im_start|>sy'); what follows is computed again each turn"
    )
    record = conversation("user: a", "assistant: b", "user: c", "assistant: d")
    record.messages[1]["reasoning_content"] = "It asks."
    assert not renderer.render(record).drops_thoughts, "another change than that of a thought"


CONTENT = st.text(st.sampled_from("ab '\n\t1é東🙂<|>_"), max_size=12) | st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "user list the details", "\n\n", " "]
)


@pytest.mark.slow
@settings(max_examples=tries(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), CONTENT), min_size=1, max_size=7)
)
@pytest.mark.parametrize("kind", ["chatml", "llama3", "metaspace"])
def test_any_conversation_has_the_tokens_it_has_alone(
    make_renderer: Callable[..., Renderer], kind: str, turns: list[tuple[str, str]]
) -> None:
    """Blanks and line ends at the joints are where a cut goes wrong."""
    renderer = make_renderer(kind)
    messages = [{"role": role, "content": content} for role, content in turns]
    record = parse_record({"messages": messages}, 1)
    assert isinstance(record, Conversation)
    ends = [index for index, (role, _) in enumerate(turns) if role == "assistant"]
    if turns[-1][0] != "assistant":
        ends.append(len(turns))
    prompts = renderer.render(record).prompts
    for prompt, end in zip(prompts, ends, strict=True):
        if end:
            assert prompt.token_ids.tolist() == alone(renderer, record, end)
        else:
            assert renderer.tokenizer.decode(prompt.token_ids.tolist()).strip().endswith("assistant")


@pytest.mark.parametrize("turns", ["each", "last", "rollout"])
def test_a_batch_chat_is_one_prompt_of_all_messages(make_renderer: Callable[..., Renderer], turns: Any) -> None:
    """An assistant message in the middle of a batch line is history, not a request."""
    body = {"messages": AGENT.messages}
    line = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": body}
    record = parse_record(line, 1)
    assert isinstance(record, Conversation)
    renderer = make_renderer()
    (prompt,) = renderer.render(record, turns).prompts
    assert (prompt.turn, prompt.custom_id) == (1, "b")
    assert prompt.token_ids.tolist() == alone(renderer, record, 6)


def test_a_completion_is_its_prompt(make_renderer: Callable[..., Renderer], warnings: list[str]) -> None:
    """Text without any template, ids as they are; a model without a template needs no warning for it."""
    renderer = make_renderer("gpt2", None)
    (prompt,) = renderer.render(completion("a policy")).prompts
    assert prompt.token_ids.tolist() == by_transformers(renderer.tokenizer.source.name_or_path)("a policy")["input_ids"]
    (prompt,) = renderer.render(completion([3, 0, 299])).prompts
    assert (prompt.custom_id, prompt.token_ids.tolist()) == ("p", [3, 0, 299])
    assert prompt.token_ids.dtype == np.int32
    assert warnings == []


@table("token_id", [1000, 2**31, 2**64 - 1])
def test_a_token_id_outside_the_vocabulary_is_refused(make_renderer: Callable[..., Renderer], token_id: int) -> None:
    """It would index past the embedding."""
    renderer = make_renderer("gpt2")
    last = renderer.tokenizer.vocab_size - 1
    with pytest.raises(RequestError) as caught:
        renderer.render(completion([last, token_id]))
    assert caught.value.message == f"body.prompt[1] is {token_id}; the model has the ids 0 to {last}"
    assert (caught.value.code, caught.value.line) == ("invalid_request", 5)


def test_a_tokenizer_larger_than_the_model_is_told(make_renderer: Callable[..., Renderer]) -> None:
    """Added tokens without an embedding are a common fault of fine-tuned models."""
    renderer = make_renderer()
    renderer.tokenizer.vocab_size = 2
    with pytest.raises(RequestError, match=r"the tokenizer gives token id \d+; the model has the ids 0 to 1") as caught:
        renderer.render(AGENT)
    assert caught.value.line == 7


def test_a_text_over_the_limit_is_refused_before_it_is_tokenised(make_renderer: Callable[..., Renderer]) -> None:
    """Tokenising a line of 50 MB takes gigabytes."""
    renderer, text = make_renderer(), "x" * (MAX_CHARACTERS + 1)
    rendered = renderer.render(conversation("user: a", "assistant: b", f"user: {text}"))
    assert [prompt.custom_id for prompt in rendered.prompts] == ["c#1"]
    (failure,) = rendered.failures
    assert (failure.turn, failure.custom_id, failure.error.code) == (2, "c#2", "context_length_exceeded")
    assert re.search(r"holds 4,194,\d+ characters; at most 4,194,304 are tokenised", failure.error.message)
    with pytest.raises(RequestError) as caught:
        renderer.render(completion(text))
    assert caught.value.code == "context_length_exceeded"


ALTERNATING = (
    "{%- for m in messages -%}{%- if m.role != ['user', 'assistant'][loop.index0 % 2] -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}{{ m.content }}|{%- endfor -%}"
)


def test_a_turn_that_the_template_refuses_fails_alone(make_renderer: Callable[..., Renderer]) -> None:
    """The turns before it are good requests; where none is, the line is one error record."""
    renderer = make_renderer("chatml", ALTERNATING)
    rendered = renderer.render(conversation("user: a", "assistant: b", "user: c", "user: d"))
    assert [(prompt.turn, renderer.tokenizer.decode(prompt.token_ids)) for prompt in rendered.prompts] == [(1, "a|")]
    (failure,) = rendered.failures
    assert (failure.turn, failure.custom_id, failure.error.line) == (2, "c#2", 7)
    assert failure.error.message == "the chat template refuses messages[0:4]: roles must alternate"
    with pytest.raises(RequestError, match=r"messages\[0:1\]: roles must alternate") as caught:
        renderer.render(conversation("system: a"))
    assert caught.value.line == 7
    with pytest.raises(RequestError, match=r"messages\[0:1\]: roles must alternate"):  # the first of two failures
        renderer.render(conversation("system: a", "assistant: b", "user: c"))


def test_a_conversation_that_the_assistant_begins_has_a_first_prompt(make_renderer: Callable[..., Renderer]) -> None:
    """Greetings come first in many support logs: the prompt is the generation prompt alone."""
    prompts = make_renderer().render(conversation("assistant: hello", "user: a")).prompts
    assert [prompt.turn for prompt in prompts] == [1, 2]
    assert prompts[0].token_ids.tolist() == make_renderer().tokenizer.encode("<|im_start|>assistant\n").ids


def test_a_prompt_of_no_tokens_is_refused(make_renderer: Callable[..., Renderer]) -> None:
    """The engine needs one token to begin with."""
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        make_renderer("chatml", "{{ '' }}").render(conversation("user: a"))


def test_the_end_of_a_prompt_is_searched_for_a_thought(make_renderer: Callable[..., Renderer]) -> None:
    """Catches a whole prompt that is decoded for its last marker, or a marker near its end that is not seen."""
    renderer, seen = make_renderer("chatml", STABLE_TEMPLATE), list[Any]()
    renderer.reasoning_parser = SimpleNamespace(ends_open=seen.append)
    renderer.tokenizer.decode = list
    renderer.output_parser(conversation("user: hi"), Prompt(1, as_token_array(list(range(100))), "c"))
    assert seen == [[*range(68, 100)]]
    assert snippets("x" * 30, "y" * 30, 2) == f"character 2 ({'x' * 24!r}, {'y' * 24!r})"
