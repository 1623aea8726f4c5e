"""Rollouts with tools: the recorded messages of tools follow the calls that were generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.rollout import Rollout, follow_calls
from apcbatch.data.output.tool_parser import Call
from tests.data.conftest import good
from tests.effort import table

RECORDED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "r1", "type": "function", "function": {"name": "f", "arguments": {}}},
        {"id": "r2", "type": "function", "function": {"name": "g", "arguments": {}}},
    ],
}


ONE_FOR_TWO = "turn 3 generated 1 tool call, and 2 recorded messages of tools follow"


def tool(call_id: str | None, text: str = "x", **keys: str) -> dict[str, Any]:
    """A recorded message of a tool."""
    return {"role": "tool", "content": text, **({"tool_call_id": call_id} if call_id else {}), **keys}


@table(
    "names, rest, ids, sentence",
    [
        (["f", "g"], [tool("r1"), tool("r2")], ["a0", "a1"], None),
        (["g", "f"], [tool("r1"), tool("r2")], ["a1", "a0"], None),
        (["h", "f"], [tool("r2"), tool("r1")], ["a0", "a1"], None),
        (["f", "f"], [tool("r1"), tool("r2")], ["a0", "a1"], None),
        (["g"], [tool(None, name="g")], ["a0"], None),
        (["f"], [tool("r1"), tool("r2")], ["a0", "r2"], ONE_FOR_TWO),
        (["g"], [tool("r1"), tool("r2")], ["r1", "a0"], ONE_FOR_TWO),
        ([], [tool("r1")], ["r1"], "turn 3 generated 0 tool calls, and 1 recorded message of a tool follows"),
        (["f", "g"], [tool("r2")], ["a1"], "turn 3 generated 2 tool calls, and 1 recorded message of a tool follows"),
        (["f"], [], [], "turn 3 generated 1 tool call, and 0 recorded messages of tools follow"),
        ([], [], [], None),
    ],
)  # fmt: skip
def test_ids_follow_by_name_then_in_order(
    names: list[str], rest: list[Any], ids: list[str], sentence: str | None
) -> None:
    """Fault: an answer of a tool that belongs to no call, or to another tool's, or a count without a warning."""
    calls = [Call(name, {}, f"a{number}") for number, name in enumerate(names)]
    user = {"role": "user", "content": "and?"}
    before = [dict(message) for message in rest]
    messages, warnings = follow_calls(RECORDED, calls, [*rest, user], 3)
    assert [message.get("tool_call_id") for message in messages] == [*ids, None]
    assert messages[-1] is user and rest == before
    assert warnings == ((sentence,) if sentence else ())


# As Mistral's: ids of nine letters and digits, and an answer of a tool names its call.
TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('a call id has nine letters') }}{%- endif %}
        {{- '[RESULT ' + message.tool_call_id + ']' + message.content }}
    {%- else %}{{- '[' + message.role + ']' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}{{- '[assistant]' }}"""
CONVERSATION = {
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [RECORDED["tool_calls"][0] | {"id": "recorded1"}]},  # type: ignore[index]
        tool("recorded1", "one"),
        {"role": "assistant", "content": "", "tool_calls": [RECORDED["tool_calls"][1] | {"id": "recorded2"}]},  # type: ignore[index]
        tool("recorded2", "two"),
        {"role": "assistant", "content": "done"},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}],
}


def test_a_rollout_shows_the_generated_ids(make_renderer: Callable[..., Renderer], warnings: list[str]) -> None:
    """Fault: the history says that a tool answered a call that was not made; or an id is there twice."""
    renderer = make_renderer("gpt2", TEMPLATE)
    record = good(CONVERSATION)
    rollout = Rollout(renderer, record)
    said = [
        '[TOOL_CALLS]f[ARGS]{"a": 1}',
        "[TOOL_CALLS]g[CALL_ID]mine00001[ARGS]{}",
        "[TOOL_CALLS]g[CALL_ID]mine00001[ARGS]{}",
    ]
    made = []
    for text in said:
        answer = renderer.output_parser(record, rollout.prompt).parse(text)
        assert answer.warnings == [] and len(answer.calls) == 1
        made.append(answer.calls[0].id)
        following = rollout.advance(renderer.tokenizer.encode(text).ids, stopped=False)
        if following is not None:
            assert following.warnings == ()
    text = renderer.tokenizer.decode(rollout.prompt.token_ids)
    assert (
        text == f"[user]q[assistant]{said[0]}[RESULT {made[0]}]one[assistant]{said[1]}[RESULT mine00001]two[assistant]"
    )
    assert made[1] == "mine00001" and len(set(made)) == 3 and "recorded" not in "".join(made)  # type: ignore[arg-type]
    assert warnings == [], "the state that decoding reached is reused"


def test_a_rollout_says_where_calls_and_answers_differ(make_renderer: Callable[..., Renderer]) -> None:
    """Fault: a tool answers a call that was not made, and the record does not say so."""
    renderer = make_renderer("gpt2", TEMPLATE)
    record = good(CONVERSATION)
    rollout = Rollout(renderer, record)
    second = rollout.advance(renderer.tokenizer.encode("no call").ids, stopped=False)
    assert second is not None
    sentence = "turn 1 generated 0 tool calls, and 1 recorded message of a tool follows"
    assert second.warnings == (sentence,) == renderer.output_parser(record, second).warnings
    assert renderer.tokenizer.decode(second.token_ids).endswith("no call[RESULT recorded1]one[assistant]")
