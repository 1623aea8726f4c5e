"""A template comes with a checkpoint: whatever is in it, it takes bounded time and memory and is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from apcbatch.data.chat.template import TemplateProcess
from apcbatch.data.chat.template_child import Template
from apcbatch.data.helper import LimitExceeded
from apcbatch.data.helper_child import CPU_SECONDS, DONE, MAX_CHARACTERS, MEMORY_BYTES, TOO_LONG
from apcbatch.errors import ModelError, RequestError
from tests.data.conftest import build_tokenizer, by_transformers, save_model
from tests.data.test_template import template_of
from tests.effort import table

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of processor time for a text."""
    monkeypatch.setattr("apcbatch.data.helper.CPU_SECONDS", 0.5)


LOOPS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 10 ** 10 ** 8 % 7 }}",
    "{% set n = namespace(v=1) %}{% for i in range(60) %}{% set n.v = [n.v, n.v] %}{% endfor %}{{ n.v == n.v }}",
    "{% macro m(n) %}{% for i in range(9) %}{{ m(n + 1) if n < 90 }}{% endfor %}{% endmacro %}{{ m(0) }}",
]


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.usefixtures("half_a_second")
@pytest.mark.parametrize("source", LOOPS)
def test_a_template_gets_bounded_time(model_dir: Callable[..., Path], source: str) -> None:
    """Catches two nested loops of 99,999, and other ways to compute for ever: the job hung at its start."""
    folder = model_dir("gpt2", source)
    try:
        template = template_of(folder)
    except ModelError as error:
        assert str(folder) in str(error)
        assert "cannot be used: it takes more than 0.5 seconds of processor time" in str(error)
    else:  # what Python folds away
        template.render([USER])


SIZES = [
    "{{ 'a' * 10**12 }}", "{{ 'a' * 10**10 }}", "{{ ('a' * 10**9) ~ messages[0].content }}",
    "{{ '%1000000000d' % 1 }}{{ '%1000000000d' % 1 }}",
    "{{ messages[0].content | center(10**10) }}", "{{ messages[0].content.ljust(10**10) }}",
    "{{ messages[0].content | indent(10**10, true) }}",
    "{{ '{:>9999999999}'.format(messages[0].content) }}",
    "{% set n = namespace(v='ab') %}{% for i in range(60) %}{% set n.v = n.v ~ n.v %}{% endfor %}{{ n.v }}",
    "{% set n = namespace(v=[1]) %}{% for i in range(60) %}{% set n.v = [n.v, n.v] %}{% endfor %}{{ n.v }}",
    "{{ lipsum(100000) }}{{ lipsum(100000) }}{{ lipsum(100000) }}",
    "{{ range(10**9) | list }}", "{{ [0] * 10**9 }}", "{{ cycler() }}", "{{ cycler().next() }}", "{{ joiner() }}",
    "{{ 2 ** 100000 }}", "{{ '9' * 5000 | int }}",
]  # fmt: skip


@pytest.mark.drawn(3)
@pytest.mark.slow
@pytest.mark.usefixtures("half_a_second")
@pytest.mark.parametrize("source", SIZES)
def test_a_template_gets_bounded_memory(model_dir: Callable[..., Path], source: str) -> None:
    """Catches one expression that takes all memory: a template of 20 characters ended the process."""
    try:
        text = template_of(model_dir("gpt2", source)).render([USER])
    except ModelError as error:
        assert "the model's chat template, in " in str(error)
        is_folded = source == "{{ 2 ** 100000 }}"  # computed while it is compiled, and has too many digits
        assert ("is not valid Jinja: " if is_folded else "cannot be used: it ") in str(error)
    except RequestError as error:
        assert error.code in ("invalid_request", "out_of_memory", "context_length_exceeded")
    else:
        assert len(text) <= MAX_CHARACTERS


NO_TEMPLATES = {
    "{% for m in messages %}\n{% endif %}": "is not valid Jinja: line 2: ",
    "x\n{{ messages | nosuch }}": "is not valid Jinja: line 2: ",
    "{% for a in [1] %}" * 25 + "{% endfor %}" * 25: "too many statically nested blocks",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "",
    "{{ 1" + " + 1" * 20000 + " }}": "",
    "{% if a %}" * 300 + "{% endif %}" * 300: "",
}


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize(("source", "reason"), NO_TEMPLATES.items())
def test_what_python_cannot_compile_is_told_at_once(model_dir: Callable[..., Path], source: str, reason: str) -> None:
    """Catches 25 nested `for`, and nesting that the parser cannot follow: internal errors before; or a template that is
    no Jinja as an error record of every line."""
    with pytest.raises(ModelError, match="the model's chat template, in .*, (is not valid|cannot be)") as caught:
        template_of(model_dir("gpt2", source))
    assert reason in str(caught.value)


@pytest.mark.slow
def test_a_template_that_is_no_text_is_told_at_once(tmp_path: Path) -> None:
    """Catches a number or an unknown name where the template should be."""
    folder = save_model(tmp_path, build_tokenizer("chatml"), chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(ModelError, match="no default specified"):
        template_of(folder)
    save_model(tmp_path, build_tokenizer("chatml"), chat_template=5)
    with pytest.raises(ModelError, match="it is a int; expected a text"):
        template_of(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("half_a_second")
def test_one_conversation_beyond_the_bounds_leaves_the_next_one_whole() -> None:
    """Catches a renderer that is of no more use after the child was ended, and turns behind it that fail with it."""
    process = TemplateProcess("{{ messages[-1].content * messages | length ** 60 }}", {})
    assert list(process.texts([USER], None, [1])) == ["hi"]
    loop = TemplateProcess(
        "{% if messages | length == 2 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}{{ messages | length }}",
        {},
    )
    first, second, third = loop.texts([USER] * 3, None, [3, 2, 1])
    assert (first, type(second), third) == ("3", LimitExceeded, "1")
    assert list(loop.texts([USER] * 3, None, [3, 1])) == ["3", "1"]


def test_answers_that_nobody_took_are_not_taken_for_others() -> None:
    """Catches a conversation that is answered with the texts of one that was left midway."""
    process = TemplateProcess("{{ messages | length }}", {})
    left = process.texts([USER] * 50, None, range(50))
    assert next(left) == "0"
    left.close()
    assert list(process.texts([USER] * 3, None, [3, 2])) == ["3", "2"]


SAME = [
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ tools | tojson(sort_keys=true) }}",
    "{{ tools | tojson(separators=(',', ':')) }}{{ 'é<&' | tojson }}{{ 'é' | tojson(ensure_ascii=true) }}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{% set n = namespace(seen=false, self=1) %}{% set n.seen = true %}{{ n.seen }}{{ n.self }}",
    "{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}\n",
    "{{ messages[2].thinking }}{{ messages[2].reasoning_content }}{{ messages[2].reasoning }}{{ messages[2] }}",
    "{{ dict(a=1) }}{{ dict.fromkeys('ab') }}{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}",
    "{{ strftime_now('%Y') }}{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}",
    "{% set ns = namespace() %}{% macro m(x) -%} <{{ x }}> {%- endmacro %}{{ m(1) }}{{ cycler(1, 2).next() }}",
    "{{ messages | map(attribute='role') | join(',') }}{{ messages[::-1] | length }}{{ 'a' * 3 }}",
    "{%- if messages[0]['role'] == 'system' %}\n    {{- messages[0]['content'].strip() }}\n{%- endif %}",
    "{{ messages[0].content is string }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize("source", SAME)
@pytest.mark.parametrize("has_tools", [False, True])
def test_the_texts_are_those_of_transformers(model_dir: Callable[..., Path], source: str, has_tools: bool) -> None:
    """Catches an environment that differs from the one that published templates are written for."""
    folder = model_dir("chatml", source)
    messages = [
        {"role": "system", "content": " s\n"},
        {"role": "user", "content": "é 🙂 <&>"},
        {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"z": 1.5, "a": [None, True, "ü"]}}}
        ]},
    ]  # fmt: skip
    if sys.version_info < (3, 11):  # its newest transformers, 5.20, does not copy the reasoning to this key
        messages[2] = {"thinking": "why", **messages[2]}
    tools = [{"type": "function", "function": {"name": "f", "b": 1, "a": 2}}] if has_tools else None
    expected = by_transformers(folder).apply_chat_template(
        json.loads(json.dumps(messages)), tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert template_of(folder).render(messages, tools) == expected


def test_a_value_that_json_does_not_have_is_an_error_of_the_conversation() -> None:
    """Catches a date or a nested record of a table among the tools: a traceback, or its type's name as text."""
    process = TemplateProcess("{{ tools }}", {})
    with pytest.raises(RequestError, match="the messages or tools hold a value that JSON does not have"):
        list(process.texts([USER], [{"day": datetime(2026, 1, 1)}], [1]))
    assert list(process.texts([USER], [float("nan")], [1])) == ["[nan]"]


def test_a_template_that_makes_a_long_text_of_a_short_message_is_refused(model_dir: Callable[..., Path]) -> None:
    """Catches a template that is taken though no prompt of it can be, and that takes its time for every request."""
    with pytest.raises(ModelError, match="for one short message: the prompt holds 20,000,000 characters"):
        template_of(model_dir("gpt2", "{{ 'x' * 20000000 }}"))


def test_the_page_names_the_bounds() -> None:
    """Catches a bound that is not the one which users are told."""
    assert (CPU_SECONDS, MEMORY_BYTES, MAX_CHARACTERS) == (2, 1 << 30, 4_194_304)
    page = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
    assert f"{CPU_SECONDS} s of processor time for one text, {MEMORY_BYTES >> 30} GiB of memory" in page
    assert f"a text of {MAX_CHARACTERS:,} characters" in page


@table("length, answer", [(1, DONE), (4_194_304, DONE), (4_194_305, TOO_LONG)])
def test_the_longest_text_is_one(length: int, answer: bytes) -> None:
    """Catches a text of just so many characters that is refused, and one more that is not."""
    kind, text = Template("{{ 'a' * length }}", {"length": length}).answer(0, [], None)
    assert (kind, len(text) if kind == DONE else int(text)) == (answer, length)
