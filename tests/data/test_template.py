"""Templates: the model's own, the fallback, what they refuse, and what they must not be able to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest

from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.template import ChatTemplate, before_mark, with_mark
from apcbatch.data.chat.template_child import Template
from apcbatch.data.helper_child import DONE
from apcbatch.data.input.messages import check_messages
from apcbatch.data.template_options import ChatOptions, read_template
from apcbatch.data.tokenization.tokenizer import load_tokenizer
from apcbatch.errors import RequestError, UsageError
from tests.data.conftest import STABLE_TEMPLATE, build_tokenizer, by_transformers, save_model
from tests.effort import table

USER = {"role": "user", "content": "hi\n"}
TOOLS = [{"type": "function", "function": {"name": "get", "description": "Gets <it> & 'more'."}}]


def template_of(folder: Path, warnings: list[str] | None = None) -> ChatTemplate:
    """The template of a model folder with the shipped fallback."""
    told = [] if warnings is None else warnings
    return ChatTemplate(load_tokenizer(folder), told.append)


WROTE = "{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
ENDED = "{% endif %};"
ITEMS = "{% for one in m.content %}{{ one.text }}{% endfor %}"
JOINED = "{% for one in m.content %}{{ '\\n' if not loop.first }}{{ one.text }}{% endfor %}"
PARTED = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]


@table(
    "body, roles, between",
    [
        (WROTE + ITEMS + ENDED, "system user assistant tool", ""),
        (WROTE + JOINED + ENDED, "system user assistant tool", "\n"),
        ("{{ m.role }}:{{ m.content | trim }};", "", "\n"),
        ("{{ m.role + ':' + m.content + ';' }}", "", "\n"),
        ("{{ m.role }}:{% if m.role == 'user' and m.content is not string %}" + ITEMS
         + "{% else %}{{ m.content }}{% endif %};", "user", ""),
    ],
)  # fmt: skip
def test_text_parts_are_parts_where_the_template_takes_them(
    tmp_path: Path, body: str, roles: str, between: str
) -> None:
    """Fault: parts are joined before a template that joins them itself, so that its prompt lacks a line end; or one
    that takes texts alone is given a list."""
    folder = save_model(tmp_path, build_tokenizer("chatml"), "{% for m in messages %}" + body + "{% endfor %}")
    template, calls = template_of(folder), [{"function": {"name": "f"}, "id": "1"}]
    source = by_transformers(folder)
    for role in ("system", "user", "assistant", "tool"):
        given: list[dict[str, Any]] = [{"role": role, "content": PARTED}]
        given = [USER, {"role": "assistant", "tool_calls": calls}, *given] if role == "tool" else given
        messages = check_messages(given)
        text = template.render(messages).split(";")[-2].strip()
        joint = between if role in roles.split() else "\n"
        assert text == f"{role}:first{joint}second", role
        if role in roles.split() and role != "tool":
            assert template.render(messages) == source.apply_chat_template(given, tokenize=False)
    marked = with_mark(check_messages([{"role": "user", "content": PARTED}]))
    assert before_mark(template.render(marked)) == f"user:first{between}second"


def test_the_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path) -> None:
    """Some models have two templates by name."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = save_model(tmp_path, build_tokenizer("chatml"), chat_template=named)
    template = template_of(folder)
    assert (template.render([USER]), template.render([USER], TOOLS)) == ("plain", "tools")


def test_a_template_reads_one_time_and_draws_the_same(tmp_path: Path) -> None:
    """Fault: prompts of equal conversations differ by the moment at which each is rendered, or by a draw."""
    drawn = "{{ range(9999) | random }} {{ [range(9999)] | map('random') | first }} {{ lipsum(1) }}"
    folder = save_model(tmp_path, build_tokenizer("chatml"), "{{ strftime_now('%Y-%m-%d %H:%M:%S%z') }} " + drawn)
    clock, warned = "2026-01-05T23:59:59+14:00", []
    renderers = [Renderer.load(folder, warn=warned.append, options=ChatOptions(clock=clock)) for _ in range(2)]
    texts = [renderer.template.render([USER]) for renderer in renderers for _ in range(2)]
    assert len(set(texts)) == 1 and texts[0].startswith("2026-01-05 23:59:59 ")
    assert [f"strftime_now, here {clock} for each" in warned[0], "draws at random" in warned[1]] == [True, True]
    dated = Renderer.load(folder, warn=warned.append, options=ChatOptions(clock="2026-01-05", is_dated=True))
    assert dated.template.render([USER]).startswith("2026-01-05 00:00:00 ")
    assert [sentence[:30] for sentence in warned[4:]] == [warned[1][:30]]


def test_the_fallback_is_chatml_in_plain_text(model_dir: Callable[..., Path], warnings: list[str]) -> None:
    """Every role, tools and calls, with nothing escaped or trimmed, and one warning for all conversations."""
    template = template_of(model_dir("gpt2"), warnings)
    assert warnings == []
    function = {"name": "get", "arguments": {"q": "<é>"}}
    messages = [
        {"role": "system", "content": "be brief"},
        USER,
        {"role": "assistant", "content": "let me", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}, {"function": function}]},
    ]
    text = template.render(messages, TOOLS)
    call = '<tool_call>{"name": "get", "arguments": {"q": "<é>"}}</tool_call>'
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nbe brief\n\n# Tools\n")
    assert json.dumps(TOOLS[0]) + "\n" in system and system.endswith("</tool_call>")
    assert rest == (
        "<|im_start|>user\nhi\n<|im_end|>\n"
        f"<|im_start|>assistant\nlet me\n{call}<|im_end|>\n"
        "<|im_start|>tool\n3<|im_end|>\n"
        f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render([]) == "<|im_start|>assistant\n"
    assert template.render([USER]) == "<|im_start|>user\nhi\n<|im_end|>\n<|im_start|>assistant\n"
    assert len(warnings) == 1 and warnings[0].startswith("the model has no chat template; ")


def test_the_fallback_begins_with_bos_where_the_model_expects_it(tmp_path: Path) -> None:
    """A base model that was trained with a first token must get it in conversations too."""
    from tokenizers.processors import TemplateProcessing

    for adds_bos in (False, True):
        folder = tmp_path / str(adds_bos)
        folder.mkdir()
        tokenizer = build_tokenizer("gpt2")
        if adds_bos:
            tokenizer.post_processor = TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
        save_model(folder, tokenizer, bos_token="<|endoftext|>")
        assert template_of(folder).render([USER]).startswith("<|endoftext|>") == adds_bos


REFUSALS = {
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
    "{{ messages[5].content }}": "has no element 5",
    "{{ messages[0].content + 1 }}": "can only concatenate str",
    "{{ 1 // 0 }}": "division",
    "{{ nothing.at.all }}": "'nothing' is undefined",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "nested too deeply",
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("source", "reason"), REFUSALS.items())
def test_what_a_template_raises_is_an_error_of_the_conversation(
    model_dir: Callable[..., Path], source: str, reason: str
) -> None:
    """With the template's words: often the only description of what the model expects."""
    with pytest.raises(RequestError, match=r"^the chat template refuses messages\[0:1\]: ") as caught:
        template_of(model_dir("gpt2", source)).render([USER])
    assert caught.value.code == "invalid_request" and reason in caught.value.message


ATTACKS = [
    "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% for n in range(10 ** 12) %}{{ n }}{% endfor %}",
    "{{ messages.append(1) }}{{ messages.clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ ''.format.__self__.__class__ }}",
    "{{ '{0.__class__.__init__}'.format(messages).x }}",
]


@table("source", ATTACKS)
def test_a_template_reaches_nothing_but_its_data(source: str) -> None:
    """A template comes with a downloaded model and runs for every conversation.

    No attribute of Python's, no file, no change of the messages, and no endless loop may come of it.
    """
    messages = [dict(USER)]
    try:
        assert Template(source, {}).answer(1, messages, None) == (DONE, "")
    except (ImportError, OverflowError, TypeError, jinja2.TemplateError) as error:
        assert "<built-in" not in str(error)
    assert messages == [USER]


@pytest.mark.slow
def test_deep_nesting_ends_one_conversation(model_dir: Callable[..., Path]) -> None:
    """Walking what a line holds by recursion must not end the job, however deep an interpreter can go."""
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(RequestError, match="nested too deeply"):
        template_of(model_dir("gpt2")).render([USER], [deep])


def test_a_template_that_is_no_text_is_told(tmp_path: Path) -> None:
    """Catches a UnicodeDecodeError for a file that is no text in UTF-8."""
    path = tmp_path / "chat.jinja"
    path.write_bytes(b"{{ messages }}\xff")
    with pytest.raises(UsageError, match=r"the chat template .*chat.jinja cannot be read: .* can't decode byte 0xff"):
        read_template(path)


def test_an_empty_last_message_is_continued() -> None:
    """A prompt that begins where the message does: its text before the mark is empty, which is no error."""
    [message] = with_mark([{"role": "assistant", "content": ""}])
    assert before_mark(message["content"]) == ""
    assert before_mark(f"said: {message['content']}\n") == "said: "
    assert isinstance(before_mark("another text"), RequestError)


@table("source", ["{% set n = namespace(_x=1) %}", "{% set n = namespace() %}{% set n._x = 1 %}"])
def test_names_that_begin_with_an_underscore_are_refused(source: str) -> None:
    """A namespace must not be a way to attributes of Python's."""
    with pytest.raises(jinja2.TemplateError, match="_x"):
        Template(source, {}).answer(0, [], None)


def test_a_template_that_becomes_no_text_fails_its_conversation(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's method decides which of several templates is used, and may give anything."""
    template = template_of(folder := model_dir("chatml", STABLE_TEMPLATE))
    monkeypatch.setattr(type(load_tokenizer(folder).source), "get_chat_template", lambda self, has_tools: 5)
    with pytest.raises(RequestError, match="it is a int; expected a text"):
        template.render([USER])
