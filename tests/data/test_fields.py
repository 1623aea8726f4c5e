"""Fields of lines, bodies and messages: each is honoured, refused with a sentence, harmless, or named in a warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apcbatch.data.conversation import Conversation
from apcbatch.data.fields import BY_SHAPE, FIELDS, INSIDE, MOST_COLUMNS, REQUESTS, SHAPES, near_setting
from apcbatch.data.input.layouts import ANY_LINE
from apcbatch.data.input.messages import MOST_WARNINGS
from apcbatch.data.input.records import parse_record
from apcbatch.data.input.source import MOST_NAMES, UnusedColumns, open_source
from apcbatch.formats import CHAT_URL, COMPLETIONS_URL
from tests.data.conftest import USER, batch, fault, good
from tests.effort import table
from tools.make_formats_docs import TARGET, document

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def request(shape: str, **fields: object) -> dict[str, Any]:
    """A sound line with further fields in an object of a shape: the line, its body, or a message and what it holds."""
    if shape in ("messages", "batch"):
        return {"id": "c", "messages": [USER], **fields} if shape == "messages" else batch(**fields)
    if shape in ("sharegpt", "spoken"):
        spoken = {"from": "human", "value": "hi", **(fields if shape == "spoken" else {})}
        return {"id": "c", "conversations": [spoken], **(fields if shape == "sharegpt" else {})}
    if shape == "chat":
        return batch({"messages": [USER], **fields})
    if shape == "completions":
        return batch({"prompt": "once", **fields}, url=COMPLETIONS_URL)
    if shape == "message":
        return {"messages": [{**USER, **fields}]}
    if shape == "part":
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **fields}]}]}
    function = {"name": "f", "arguments": "{}", **(fields if shape == "function" else {})}
    call = {"id": "a", "type": "function", "function": function, **(fields if shape == "call" else {})}
    return {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": [call]}]}


# Where the objects of a shape stand in the lines of `request`.
PLACES = {
    "spoken": "conversations[0]",
    "message": "messages[0]",
    "part": "messages[0].content[0]",
    "call": "messages[1].tool_calls[0]",
    "function": "messages[1].tool_calls[0].function",
}
WHERE = {"chat": "body.", "completions": "body.", **{shape: f"{place}." for shape, place in PLACES.items()}}


@table("shape", SHAPES)
def test_each_field_is_what_its_row_of_the_table_says(shape: str) -> None:
    """Fault: a field is dropped that would change the answer, or a line is refused or warned of for a note, a null or a
    default that a client writes."""
    plain = good(request(shape))
    for name, field in BY_SHAPE[shape].items():  # type: ignore[index]
        taken: list[Any] = [] if field.kind == "content" else [None]
        if field.kind == "refused":
            sentence = fault(request(shape, **{name: {"any": "thing"}}))
            if shape in REQUESTS:
                start = f"{WHERE.get(shape, '')}{name} is an object, which is not supported; leave it out"
                assert sentence.startswith(start), sentence
                taken += field.accepted
            assert field.hint in sentence
            assert all(json.dumps(value) in sentence for value in field.accepted), sentence
        elif field.kind == "harmless":
            taken += ["x", 1, {"any": "thing"}, [True]]
        for value in taken:
            record = good(request(shape, **{name: value}))
            assert (record.params, record.columns, record.warnings) == ({}, (), ()), (name, value)
            assert record.messages == plain.messages, (name, value)


HONOURED = {
    "max_tokens": (5, 5), "temperature": (0.7, 0.7), "top_p": (0.5, 0.5), "seed": (-1, 2**64 - 1),
    "ignore_eos": (True, True), "stop": (["b", "a", "b"], ("b", "a")), "stop_token_ids": ([7, 5, 7], (7, 5)),
    "include_stop_str_in_output": (True, True), "min_tokens": (3, 3), "top_k": (40, 40), "min_p": (0.1, 0.1),
    "presence_penalty": (-2, -2.0), "frequency_penalty": (0.5, 0.5), "repetition_penalty": (1.2, 1.2),
    "logit_bias": ({"50": -100, "7": 1.5}, {7: 1.5, 50: -100.0}),
    "allowed_token_ids": ([9, 3], (9, 3)),
}  # fmt: skip
READ_AS = {"include_stop_str_in_output": "keeps_stop"}  # the others are called the same


@table("shape", REQUESTS)
def test_a_setting_means_the_same_in_a_body_and_on_a_line(shape: str) -> None:
    """Fault: `temperature` beside `messages` does nothing."""
    logprobs = {"logprobs": 2} if shape == "completions" else {"logprobs": True, "top_logprobs": 2}
    given = {name: value for name, (value, _) in HONOURED.items()} | logprobs
    record = good(request(shape, **given, model="org/m"))
    read = {READ_AS.get(name, name): read for name, (_, read) in HONOURED.items()}
    assert record.params == read | {"logprobs": True, "top_logprobs": 2}
    assert list(record.params["logit_bias"]) == [7, 50]
    assert (record.model, record.columns) == ("org/m", ())
    assert good(request(shape, max_tokens=5, max_completion_tokens=7)).params == {"max_tokens": 7}
    assert good(request(shape, temperature=None, typical_p=1.0, stream=False)).params == {}
    assert good(request(shape, temprature=None, zzz=None)).columns == ()
    for given, kept in ((False, False), (True, True), (None, True)):
        record = good(request(shape, draft=given))
        assert (record.draft, record.params, record.columns) == (kept, {}, ())
    assert fault(request(shape, draft="no")) == f'{WHERE.get(shape, "")}draft is "no"; expected true or false'
    assert good(request(shape, stop="x", top_k=-1)).params == {"stop": ("x",), "top_k": 0}
    assert good(request(shape, stop="")).params == good(request(shape, stop=[])).params == {"stop": ()}


@table("shape", ["chat", "messages", "sharegpt"])
def test_tool_choice_none_hides_the_tools_of_every_shape(shape: str) -> None:
    """Fault: a line that forbids calls shows the tools all the same."""
    assert good(request(shape, tools=TOOLS, tool_choice="auto")).tools == TOOLS
    assert good(request(shape, tools=TOOLS, tool_choice="none")).tools is None


@table("shape", REQUESTS)
@table(
    "name, value, sentence",
    [
        ("max_tokens", 0, "max_tokens is 0; expected an integer of at least 1"),
        ("temperature", "hot", 'temperature is "hot"; expected a number from 0 to 2'),
        ("top_p", 0, "top_p is 0; expected a number above 0 and up to 1"),
        ("model", 5, "model is 5; expected a string"),
        ("n", True, "n is true; expected an integer"),
        ("typical_p", True, "typical_p is true, which"),
        ("stream", 0, "stream is 0, which"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_everywhere(
    shape: str, name: str, value: object, sentence: str
) -> None:
    """Fault: a line's value is checked less than a body's, or the sentence names a body that is not there; Python takes
    true for 1, so `n: true` passes."""
    where = "body." if shape in ("chat", "completions") else ""
    assert fault(request(shape, **{name: value})).startswith(where + sentence)


@table(
    "record, sentence",
    [
        (request("chat", temprature=0), 'body has the unknown field "temprature"; did you mean temperature?'),
        (request("completions", max_token=5), 'body has the unknown field "max_token"; did you mean max_tokens?'),
        (
            request("chat", max_new_token=5),
            'body has the unknown field "max_new_token"; max_new_tokens, which is near, is not supported: '
            "the field is max_tokens.",
        ),
        (
            request("messages", doSample=True),
            'the line has the unknown field "doSample"; do_sample, which is near, is not supported: '
            "temperature 0 is greedy, above 0 draws. If it is data, give --ignore-columns doSample",
        ),
        (request("chat", zzz=5), 'body has the unknown field "zzz"; leave it out'),
        (
            request("chat", **{"a\nb" * 50_000: 5}),
            f'body has the unknown field "{"a?b" * 12}a..."; leave it out'.replace("?", r"\n"),
        ),
        (request("chat", nucleus=5), 'body has the unknown field "nucleus"; leave it out'),
        (request("chat", max_length=5), 'body has the unknown field "max_length"; did you mean max_tokens?'),
        (
            request("chat", prompt="x"),
            f"body.prompt is a field of {COMPLETIONS_URL} alone; leave it out, or give that url",
        ),
        (
            request("completions", messages=[USER]),
            f"body.messages is a field of {CHAT_URL} alone; leave it out, or give that url",
        ),
        (
            request("messages", temprature=0),
            'the line has the unknown field "temprature"; did you mean temperature? '
            "If it is data, give --ignore-columns temprature",
        ),
        (
            request("sharegpt", maxTokens=5),
            'the line has the unknown field "maxTokens"; did you mean max_tokens? '
            "If it is data, give --ignore-columns maxTokens",
        ),
        (
            request("chat", functions="f"),
            "body.functions is \"f\", which is not supported; leave it out or give []: its newer form is tools",
        ),
        (batch(temperature=0.5), "temperature stands beside body, where it does nothing; put it into body"),
        (
            request("messages", system="be brief"),
            "system is \"be brief\", which is not supported; leave it out or give \"\": "
            "a system message comes first in messages; if it is data, give --ignore-columns system",
        ),
    ],
)  # fmt: skip
def test_an_unknown_field_is_refused_with_the_nearest_name(record: object, sentence: str) -> None:
    """Fault: a slip is ignored, and the job runs with a default that nobody asked for."""
    assert fault(record) == sentence


NAMES_OF_COLUMNS = """source dataset domain score reward task_id traj_id trial info label split category language prompt
prompt_id num_turns turn turns tokens num_tokens token_count tools_used timestamp created conversation_id tool_calls
target step steps env instance_id exit_status resolved text instruction response responses answer difficulty quality
version type topic mode name author model_name license hash embedding stop_reason finish_reason tool input output
chosen rejected custom_id index idx seed_task user_id session_id system_prompt"""
COLUMNS = NAMES_OF_COLUMNS.split()


@table("shape", ["messages", "sharegpt"])
def test_the_columns_of_a_dataset_are_no_slips(shape: str) -> None:
    """Fault: a dataset is refused because it has a column."""
    record = good(request(shape, **dict.fromkeys(COLUMNS, "x")))
    assert record.columns == tuple(COLUMNS) and record.params == {}


@table(
    "name, setting",
    [
        ("temprature", "temperature"), ("Temperature", "temperature"), ("topP", "top_p"), ("top-k", "top_k"),
        ("max_token", "max_tokens"), ("maxtokens", "max_tokens"), ("max_completion_token", "max_completion_tokens"),
        ("log_probs", "logprobs"), ("logit_biases", "logit_bias"), ("presence_penality", "presence_penalty"),
        ("responseformat", "response_format"), ("ignore_eso", "ignore_eos"), ("stops", "stop"), ("x" * 10_000, None),
        ("step", None), ("mode", None), ("", None), ("completion_tokens", None), ("streaming", None),
        ("temperature" + "_" * 29, "temperature"), ("temperature" + "_" * 30, None),
    ],
)  # fmt: skip
def test_a_name_that_is_nearly_a_setting(name: str, setting: str | None) -> None:
    """Fault: slips pass as columns, or columns as slips."""
    assert near_setting(name) == setting


def test_a_line_has_so_many_columns_and_no_more() -> None:
    """Fault: a line of millions of names takes minutes: each is compared with each setting."""
    names = {f"column_{number}": 1 for number in range(MOST_COLUMNS)}
    assert len(good(request("messages", **names)).columns) == MOST_COLUMNS == 1024
    sentence = "the line has more than 1,024 unknown fields; if they are data, put them into metadata"
    assert fault(request("messages", **names, more=1)) == sentence


def test_each_column_is_named_once() -> None:
    """Fault: a warning for each line, or a column without a warning, or a list without an end."""
    told: list[str] = []
    unused = UnusedColumns(ANY_LINE, told.append)
    for line, columns in enumerate([(), ("a", "b\n"), ("a",), ("a", "c"), ()], start=1):
        unused.note(columns, line)
    assert told == [
        'these columns take no part in the answers: "a", "b\\n" (first on line 2)',
        'these columns take no part in the answers: "c" (first on line 4)',
    ]
    for line in range(100):
        unused.note((f"k{line}",), line)
    assert len(told) == 2 + (MOST_NAMES - 3) + 1
    assert told[-1] == "line 29 has further columns that take no part in the answers; they are not named"


def test_the_columns_of_a_file_are_told(tmp_path: Path) -> None:
    """Fault: the reader of an input drops columns in silence."""
    lines = [request("messages", reward=1), request("sharegpt", reward=0, note="x"), batch(id=5)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told: list[str] = []
    assert len(list(open_source(str(tmp_path / "in.jsonl"), warn=told.append))) == 3
    assert [sentence.partition(": ")[2] for sentence in told] == [
        '"reward" (first on line 1)',
        '"note" (first on line 2)',
        '"id" (first on line 3)',
    ]


@table("shape", INSIDE)
def test_a_key_that_nobody_reads_is_named(shape: str) -> None:
    """Fault: a key that the template might have wanted is dropped in silence, or the line is refused."""
    record = good(request(shape, zzz=1, colour={"a": 1}))
    place = PLACES[shape]
    assert record.warnings == (f'keys that are not read: "zzz" (first in {place}), "colour" (first in {place})',)
    assert record.messages == good(request(shape)).messages
    if shape != "spoken":
        [told] = good(batch(request(shape, zzz=1))).warnings
        assert told == f'keys that are not read: "zzz" (first in body.{place})'


@table("shape", INSIDE)
def test_what_says_nothing_is_not_named(shape: str) -> None:
    """Fault: a columnar file, or the openai package, which write every key, cause a warning on each line."""
    assert good(request(shape, zzz=None, a="", b=[], c={}, refusal=None, audio=None)).warnings == ()


def test_a_list_of_names_has_an_end() -> None:
    """Fault: a message with a million keys fills the record."""
    [told] = good(request("message", **{f"k{number}": 1 for number in range(10_000)})).warnings
    assert told.count("first in") == MOST_WARNINGS == 8 and told.endswith(", and further ones")
    [told] = good(request("message", **{"a\nb" * 50_000: 5})).warnings
    assert "\n" not in told and len(told) < 120


@table("name", ["reasoning", "thinking"])
def test_other_names_of_reasoning_are_read(name: str) -> None:
    """Fault: the reasoning of a dataset is dropped because of its name; or a list of it refuses the line."""
    said = {"role": "assistant", "content": "a"}
    assert good({"messages": [USER, {**said, name: "hm"}]}).messages[1]["reasoning_content"] == "hm"
    both = {**said, name: "other", "reasoning_content": "hm"}
    assert good({"messages": [USER, both]}).messages[1]["reasoning_content"] == "hm"
    record = good({"messages": [USER, {**said, name: [{"text": "hm"}]}]})
    assert record.messages[1] == said and f'"{name}"' in record.warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "package"), [("chat", "openai.types.chat"), ("completions", "openai.types")])
def test_every_field_that_openai_knows_is_in_the_table(shape: str, package: str) -> None:
    """Fault: a request that `openai` writes is refused as misspelt."""
    params = pytest.importorskip(f"{package}.completion_create_params")
    names = {
        *params.CompletionCreateParamsBase.__annotations__, *params.CompletionCreateParamsNonStreaming.__annotations__,
    }  # fmt: skip
    assert {"model", "temperature", "stream"} <= names
    assert names - BY_SHAPE[shape].keys() == set()  # type: ignore[index]


def test_no_name_is_there_twice_in_one_shape() -> None:
    """Fault: of two rows for one field, such as one that refuses it, the later one wins in silence."""
    for shape in SHAPES:
        names = [field.name for field in FIELDS if shape in field.shapes]
        assert len(names) == len(set(names))


def test_the_page_is_what_the_table_says() -> None:
    """Fault: a field changes and docs/reference/formats.md does not (run tools/make_formats_docs.py)."""
    assert TARGET.read_text(encoding="utf-8") == document()


def test_the_rule_of_the_page_is_the_rule() -> None:
    """Fault: the example on the page is answered in another way than it says."""
    page = document()
    example = json.loads(page.partition("```json\n")[2].partition("\n```")[0])
    assert good(example).columns == ("reward",)
    example["temprature"] = 0
    parsed = parse_record(example, 1)
    assert not isinstance(parsed, Conversation) and parsed.error.message in " ".join(page.split())
