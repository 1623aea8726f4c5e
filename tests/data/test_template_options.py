"""What a request tells the chat template: the prompts are those of transformers, and nothing is dropped in silence."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.rollout import Rollout
from apcbatch.data.conversation import Conversation
from apcbatch.data.template_options import MOST_BYTES, MOST_VARIABLES, RESERVED, ChatOptions, check_variables
from apcbatch.errors import RequestError, UsageError
from tests.data.conftest import batch, build_tokenizer, fault, good, save_model
from tests.data.conftest import kept_by_transformers as tokenizer_of
from tests.data.families import TEMPLATES
from tests.effort import table, tries

TEMPLATE = """{%- if reasoning_effort %}{{- 'effort ' + reasoning_effort + '\\n' }}{%- endif %}
{%- for document in documents or [] %}{{- '[' + document.title + '] ' + document.text + '\\n' }}{%- endfor %}
{%- if style is defined %}{{- style | tojson }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content and thinking %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {{- message.content TRIM }}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}
    {%- elif enable_thinking %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}"""
KEPT, TRIMMED = TEMPLATE.replace("TRIM", ""), TEMPLATE.replace("TRIM", "| trim")
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho ", "reasoning_content": "hm"},
    {"role": "user", "content": "  and? "},
    {"role": "assistant", "content": " Once upon a \n"},
]
USERS = MESSAGES[:4]


def by_transformers(renderer: Renderer, messages: list[Any], given: dict[str, Any]) -> str:
    """The prompt of apply_chat_template."""
    own = dict(given)
    variables = own.pop("chat_template_kwargs", {})
    continues = own.pop("continue_final_message", False)
    prompts = own.pop("add_generation_prompt", not continues)
    return tokenizer_of(renderer.tokenizer.source.name_or_path).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompts, continue_final_message=continues, **variables, **own
    )


@pytest.mark.parametrize("template", [KEPT, TRIMMED])
def test_prompts_are_those_of_transformers(make_renderer: Callable[..., Renderer], template: str) -> None:
    """Fault: a switch that does not reach the template, or reaches it with another value."""
    generator = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    renderer, seen = make_renderer("chatml", template), set()
    for _ in range(tries(400)):
        every = {
            "enable_thinking": generator.choice([True, False]),
            "thinking": generator.choice([True, False]),
            "reasoning_effort": generator.choice(["low", "high"]),
            "documents": [{"title": "t", "text": "x y"}] * generator.randint(0, 2),
            "chat_template_kwargs": {"style": generator.choice([1, None, "é", {"a": [1.5]}]), "unknown": 1},
            generator.choice(["add_generation_prompt", "continue_final_message"]): generator.choice([True, False]),
        }
        given = {name: value for name, value in every.items() if generator.random() < 0.6}
        messages = MESSAGES if given.get("continue_final_message") else USERS
        record = good(batch({"messages": messages, **given}))
        [prompt] = renderer.render(record).prompts
        text = by_transformers(renderer, messages, given)
        assert prompt.token_ids.tolist() == renderer.tokenizer.encode(text).ids, given
        seen.add(text)
    assert len(seen) > 20


@pytest.mark.parametrize("shape", ["messages", "sharegpt"])
def test_switches_stand_beside_messages_too(make_renderer: Callable[..., Renderer], shape: str) -> None:
    """Fault: a line's switches do nothing, or hold for its first turn alone."""
    renderer = make_renderer("chatml", KEPT)
    given = {"enable_thinking": False, "reasoning_effort": "low", "documents": [{"title": "t", "text": "x"}]}
    if shape == "messages":
        record = good({"messages": USERS, **given})
    else:
        spoken = [{"from": message["role"], "value": message["content"]} for message in USERS]
        record = good({"conversations": spoken, **given})
    prompts = renderer.render(record).prompts
    assert [prompt.turn for prompt in prompts] == [1, 2]
    for prompt, count in zip(prompts, (2, 4), strict=True):
        text = by_transformers(renderer, record.messages[:count], given)
        assert prompt.token_ids.tolist() == renderer.tokenizer.encode(text).ids
    rollout = Rollout(renderer, record)
    assert rollout.prompt.token_ids.tolist() == prompts[0].token_ids.tolist()


@table("turns", ["each", "last", "rollout"])
def test_a_line_that_continues_its_last_message_is_one_request(
    make_renderer: Callable[..., Renderer], turns: Any
) -> None:
    """Fault: the recorded turns before are requests too, or the number of the turn is another."""
    renderer = make_renderer("chatml", KEPT)
    record = good({"id": "c", "messages": MESSAGES, "continue_final_message": True})
    [prompt] = renderer.render(record, turns).prompts
    assert (prompt.turn, prompt.custom_id) == (2, "c#2") and [one.number for one in record.requests(turns)] == [2]
    assert renderer.tokenizer.decode(prompt.token_ids).endswith("assistant\n Once upon a \n")
    rollout = Rollout(renderer, record)
    assert rollout.num_turns == 1 and rollout.prompt.token_ids.tolist() == prompt.token_ids.tolist()
    assert rollout.advance([5], stopped=False) is None
    assert renderer.output_parser(record, prompt).turn == 2


def test_a_template_that_leaves_the_last_message_out_is_refused(make_renderer: Callable[..., Renderer]) -> None:
    """Fault: the prompt ends somewhere, and the answer continues something else."""
    from apcbatch.errors import RequestError

    renderer = make_renderer("chatml", "{{ messages[0].content }}")
    with pytest.raises(RequestError, match="the chat template leaves out the end of the last message"):
        renderer.render(good({"messages": MESSAGES, "continue_final_message": True}))


CALLING = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}


@table(
    "given, sentence",
    [
        *(
            (
                {"chat_template_kwargs": {name: 1}},
                f'chat_template_kwargs has the name "{name}", which is not its to set; give it as a field of its own',
            )
            for name in RESERVED
        ),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is a list; expected an object"),
        (
            {"chat_template_kwargs": {"a b": 1}},
            'chat_template_kwargs has the name "a b"; expected a name that a template can read',
        ),
        (
            {"chat_template_kwargs": {f"n{number}": 1 for number in range(MOST_VARIABLES + 1)}},
            "chat_template_kwargs has 65 names; at most 64 are taken",
        ),
        (
            {"chat_template_kwargs": {"a": "x" * (MOST_BYTES - 7)}},  # with {"a":""} one more than is taken
            "chat_template_kwargs holds more than 1,048,576 bytes as JSON",
        ),
        (
            {"chat_template_kwargs": {"a": json.loads("[" * 300 + "]" * 300)}},
            "chat_template_kwargs is nested too deeply, or holds a value that JSON does not have",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
            "enable_thinking is false, and true in chat_template_kwargs; give one of them",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
            "enable_thinking is true, and false in chat_template_kwargs; give one of them",
        ),
        ({"enable_thinking": "no"}, 'enable_thinking is "no"; expected true or false'),
        ({"thinking": {"type": "enabled"}}, "thinking is an object; expected true or false"),
        ({"reasoning_effort": 3}, "reasoning_effort is 3; expected a string"),
        ({"documents": {"title": "t"}}, "documents is an object; expected a list of objects"),
        ({"documents": ["t"]}, 'documents[0] is "t"; expected an object'),
        ({"add_generation_prompt": 1}, "add_generation_prompt is 1; expected true or false"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt and continue_final_message are both true; the prompt ends either with the beginning "
            "of an answer or inside the last message",
        ),
        (
            {"continue_final_message": True, "messages": USERS},
            "continue_final_message is true, and the last message is of the role user; expected assistant",
        ),
        (
            {"continue_final_message": True, "messages": [*USERS, CALLING]},
            "continue_final_message is true, and the last message ends with tool calls, not with content",
        ),
        (
            {"continue_final_message": True, "messages": [*MESSAGES, {"role": "tool", "content": "x"}]},
            "continue_final_message is true, and the last message is of the role tool; expected assistant",
        ),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls is 0; expected true or false"),
    ],
)
def test_a_switch_that_cannot_be_used_is_refused(given: dict[str, Any], sentence: str) -> None:
    """Fault: a template gets what is not its to get, or a switch does nothing."""
    assert fault({"messages": MESSAGES, **given}) == sentence
    own_place = "continue_final_message is true, and" in sentence
    assert fault(batch({"messages": MESSAGES, **given})) == ("" if own_place else "body.") + sentence


def test_a_null_and_a_default_switch_nothing() -> None:
    """Fault: a client that writes every default makes other requests than one that does not."""
    defaults = {
        "chat_template_kwargs": {}, "documents": [], "add_generation_prompt": True, "continue_final_message": False,
        "enable_thinking": None, "thinking": None, "reasoning_effort": None, "parallel_tool_calls": True,
    }  # fmt: skip
    record = good({"messages": MESSAGES, **defaults})
    assert record.template_options.given() == {} and not record.one_call


def test_the_run_gives_variables_and_a_line_wins(model_dir: Callable[..., Path], warnings: list[str]) -> None:
    """Fault: --template-kwargs does nothing, or wins over the line."""
    text = '{"enable_thinking": true, "reasoning_effort": "low", "colour": 1}'
    folder = model_dir("chatml", KEPT)
    renderer = Renderer.load(folder, warn=warnings.append, options=ChatOptions(template_kwargs=text))
    prompts = []
    for given in ({}, {"enable_thinking": False}, {"chat_template_kwargs": {"reasoning_effort": "high"}}):
        record = good(batch({"messages": USERS, **given}))
        prompts.append(renderer.tokenizer.decode(renderer.render(record).prompts[0].token_ids))
    assert [prompt.startswith("effort low") for prompt in prompts] == [True, True, False]
    assert [prompt.endswith("<think>\n") for prompt in prompts] == [True, False, True]
    assert warnings == ['the chat template does not read "colour" of --template-kwargs']


@table(
    "text, sentence",
    [
        ("{", "--template-kwargs is not JSON: "),
        ("[1]", "--template-kwargs is a list; expected an object; give an object, as in"),
        ('{"tools": []}', '--template-kwargs has the name "tools", which is not its to set'),
    ],
)
def test_variables_of_the_run_that_are_none(model_dir: Callable[..., Path], text: str, sentence: str) -> None:
    """Fault: a run begins with variables that nobody can read."""
    with pytest.raises(UsageError) as caught:
        Renderer.load(model_dir("chatml", KEPT), options=ChatOptions(template_kwargs=text))
    assert str(caught.value).startswith(sentence)


def test_what_the_template_does_not_read_is_said(make_renderer: Callable[..., Renderer]) -> None:
    """Fault: a switch is taken without a warning that the template has no name for it."""
    given = {
        "enable_thinking": True, "documents": [{"title": "t"}], "chat_template_kwargs": {"colour": 1},
        "add_generation_prompt": False,
    }  # fmt: skip
    bare = "{% for message in messages %}{{ message.content }}{% endfor %}"
    unread_by_bare = '"colour", "enable_thinking", "documents", "add_generation_prompt"'
    for template, unread in ((KEPT, '"colour"'), (bare, unread_by_bare)):
        renderer = make_renderer("chatml", template)
        record = good(batch({"messages": USERS, **given, "documents": [{"title": "t", "text": "x"}]}))
        [prompt] = renderer.render(record).prompts
        assert renderer.output_parser(record, prompt).warnings == (f"the chat template does not read {unread}",)


@table(
    "given, answer, parts",
    [
        ({"enable_thinking": True}, "a\n</think>\n\nb", ("a", "b")),
        ({"enable_thinking": False}, "b", (None, "b")),
        ({}, "<think>a</think>b", ("a", "b")),
        ({}, "a</think>b", (None, "a</think>b")),
        ({"continue_final_message": True, "end": "<think>I am"}, " here</think>b", ("here", "b")),
        ({"continue_final_message": True, "end": "<think>I am</think>so"}, " b", (None, " b")),
        ({"continue_final_message": True, "end": "so"}, " b", (None, " b")),
    ],
)
def test_a_thought_that_the_prompt_began(
    make_renderer: Callable[..., Renderer], given: dict[str, Any], answer: str, parts: tuple[str | None, str]
) -> None:
    """Fault: the answer of a template that opens the thought has its reasoning in its content."""
    renderer, given = make_renderer("chatml", KEPT), dict(given)
    messages = [*USERS, {"role": "assistant", "content": given.pop("end")}] if "end" in given else USERS
    record = good(batch({"messages": messages, **given}))
    [prompt] = renderer.render(record).prompts
    read = renderer.output_parser(record, prompt).parse(answer)
    assert (read.reasoning, read.content) == parts


@pytest.mark.parametrize("special", [True, False])
def test_markers_of_thoughts_may_be_special_tokens(tmp_path: Path, special: bool) -> None:
    """Fault: the text of an answer has lost where its reasoning ends; or a model thinks by its tokenizer alone."""
    from tokenizers import AddedToken

    tokenizer = build_tokenizer("chatml")
    tokenizer.add_tokens([AddedToken(text, special=special) for text in ("<think>", "</think>")])
    renderer = Renderer.load(save_model(tmp_path, tokenizer, "{{ messages[0].content }}"))
    record = good(batch())
    output_parser = renderer.output_parser(record, renderer.render(record).prompts[0])
    ids = renderer.tokenizer.encode("<think>a</think>b<|im_end|>").ids
    read = output_parser.parse(renderer.tokenizer.decode(ids))
    assert (read.reasoning, read.content) == ("a", "b")
    plain = Renderer.load(tmp_path, options=ChatOptions(reasoning_parser="none"))
    assert plain.tokenizer.decode(ids) == ("ab" if special else "<think>a</think>b")


def test_a_completion_is_read_as_it_is(make_renderer: Callable[..., Renderer]) -> None:
    """Fault: a completion's text is taken for a chat's answer."""
    renderer = make_renderer("chatml", KEPT)
    record = good(batch({"prompt": "x"}, url="/v1/completions"))
    assert isinstance(record, Conversation)
    output_parser = renderer.output_parser(record, renderer.render(record).prompts[0])
    assert output_parser.parse("<think>a</think>b").content == "<think>a</think>b"


@pytest.mark.parametrize("name", ["hermes", "qwen-coder"])
def test_a_request_keeps_the_tools_that_its_parser_reads(make_renderer: Callable[..., Renderer], name: str) -> None:
    """Fault: calls are looked for without tools; arguments are not typed; or a window of requests keeps all schemas."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = "<function=f><parameter=n>5</parameter></function>"
    text = text if name == "qwen-coder" else '<tool_call>{"name": "f", "arguments": {"n": 5}}</tool_call>'
    renderer = make_renderer("chatml", TEMPLATES[name])
    for given, calls in ((tools, 1), (None, 0)):
        record = good({"messages": USERS, "tools": given})
        output_parser = renderer.output_parser(record, renderer.render(record).prompts[0])
        assert list(output_parser.tools) == (given if given and name == "qwen-coder" else [])
        assert [call.arguments for call in output_parser.parse(text).calls] == [{"n": 5}] * calls


@table(
    "variables", [{f"n{number}": 1 for number in range(64)}, {"n" * 64: 1}, {"a": "x" * ((1 << 20) - len('{"a":""}'))}]
)
def test_the_most_variables_are_taken(variables: dict[str, Any]) -> None:
    """Fault: a bound that refuses its own value."""
    assert check_variables(variables, "x") == variables
    with pytest.raises(RequestError, match="x has|x holds more than 1,048,576 bytes"):
        check_variables({name + "n" * (len(variables) == 1): one for name, one in variables.items()} | {"b": 1}, "x")
