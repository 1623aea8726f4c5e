"""Keys inside messages: read, refused, harmless, or named in a warning; and no real line is refused for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apcbatch.data.fields import BY_SHAPE, INSIDE
from apcbatch.data.messages import MOST_NAMES
from apcbatch.data.records import Conversation
from apcbatch.data.source import open_source
from tests.data.conftest import USER, batch, fault, good

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def line(shape: str, **keys: object) -> dict[str, Any]:
    """A line with further keys in one object of a shape."""
    if shape == "spoken":
        return {"conversations": [{"from": "human", "value": "hi", **keys}]}
    if shape == "message":
        return {"messages": [{**USER, **keys}]}
    if shape == "part":
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **keys}]}]}
    call = {**CALL, **keys} if shape == "call" else {**CALL, "function": {**CALL["function"], **keys}}  # type: ignore[dict-item]
    return {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": [call]}]}


PLACES = {
    "spoken": "conversations[0]",
    "message": "messages[0]",
    "part": "messages[0].content[0]",
    "call": "messages[1].tool_calls[0]",
    "function": "messages[1].tool_calls[0].function",
}


@pytest.mark.parametrize("shape", INSIDE)
def test_a_key_that_nobody_reads_is_named(shape: str) -> None:
    """Fault: a key that the template might have wanted is dropped in silence, or the line is refused."""
    record = good(line(shape, zzz=1, colour={"a": 1}))
    place = PLACES[shape]
    assert record.warnings == (f'keys that are not read: "zzz" (first in {place}), "colour" (first in {place})',)
    assert record.messages == good(line(shape)).messages
    if shape != "spoken":
        [told] = good(batch(line(shape, zzz=1))).warnings
        assert told == f'keys that are not read: "zzz" (first in body.{place})'


@pytest.mark.parametrize("shape", INSIDE)
def test_what_says_nothing_is_not_named(shape: str) -> None:
    """Fault: a columnar file, or the openai package, which write every key, cause a warning on each line."""
    assert good(line(shape, zzz=None, a="", b=[], c={}, refusal=None, audio=None)).warnings == ()


@pytest.mark.parametrize(
    ("shape", "name"),
    [(shape, name) for shape in INSIDE for name, field in BY_SHAPE[shape].items() if field.kind == "harmless"],
)
def test_a_harmless_key_is_not_named(shape: str, name: str) -> None:
    """Fault: a warning on each line of a training set."""
    for value in (1, "x", {"any": "thing"}):
        record = good(line(shape, **{name: value}))
        assert record.warnings == () and record.messages == good(line(shape)).messages


def test_a_list_of_names_has_an_end() -> None:
    """Fault: a message with a million keys fills the record."""
    [told] = good(line("message", **{f"k{number}": 1 for number in range(10_000)})).warnings
    assert told.count("first in") == MOST_NAMES == 8 and told.endswith(", and further ones")
    [told] = good(line("message", **{"a\nb" * 50_000: 5})).warnings
    assert "\n" not in told and len(told) < 120


@pytest.mark.parametrize("name", ["reasoning", "thinking"])
def test_other_names_of_reasoning_are_read(name: str) -> None:
    """Fault: the reasoning of a dataset is dropped because of its name; or a list of it refuses the line."""
    said = {"role": "assistant", "content": "a"}
    assert good({"messages": [USER, {**said, name: "hm"}]}).messages[1]["reasoning_content"] == "hm"
    both = {**said, name: "other", "reasoning_content": "hm"}
    assert good({"messages": [USER, both]}).messages[1]["reasoning_content"] == "hm"
    record = good({"messages": [USER, {**said, name: [{"text": "hm"}]}]})
    assert record.messages[1] == said and f'"{name}"' in record.warnings[0]


def test_the_old_form_of_a_call_is_refused() -> None:
    """Fault: a call that the template never sees."""
    assert "give it as tool_calls" in fault(line("message", function_call={"name": "f"}))


@pytest.mark.data
@pytest.mark.parametrize("name", ["tau_bench", "toolbench_dfs", "taskmaster4"])
def test_the_shared_datasets_have_no_unread_key(shared_data: Path, name: str) -> None:
    """Fault: a check that is stricter than real files."""
    for record in open_source(str(shared_data / f"{name}.jsonl")):
        assert isinstance(record, Conversation)  # tau_bench has 99 calls whose arguments are no JSON
        assert all("arguments is no JSON text of an object" in sentence for sentence in record.warnings)
