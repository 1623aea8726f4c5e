"""Known answers that requests are drafted from: the recorded ones, those of --draft-from, and those that OUT has."""

from __future__ import annotations

import gzip
import json
import os
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from apcbatch import llm
from apcbatch.cli.program import main
from apcbatch.data.chat import known_answers
from apcbatch.data.chat.render import Renderer
from apcbatch.data.model_files import model_files_digest
from apcbatch.drafts.drafter import Draft
from apcbatch.engine import parts
from apcbatch.engine.drafting import RowCosts
from apcbatch.errors import UsageError
from apcbatch.job import references
from apcbatch.job.previous_answers import last_answers
from apcbatch.job.record import Ticket, line_of, result_record
from apcbatch.job.sink import FileSink
from apcbatch.model.locate import DEMO_DIR
from apcbatch.types import Request
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers, batch_line
from tests.job.fakes import VOCAB_SIZE
from tests.job.test_record import RENDERER, RESULT

RUN = ("run", "in.jsonl", "--max-tokens", 5, "--progress", "none", "-q")
CALL = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
}


@pytest.fixture
def lines(tmp_path: Path) -> list[dict[str, Any]]:
    """Conversations of two turns each, batch lines with one and with two answers, completions."""
    made = [
        *(conversation(number) for number in range(3)),
        {"id": "s", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        batch_line("one"),
        batch_line("two", n=2, temperature=1),
        batch_line("text", prompt="Once upon", echo=True),
        batch_line("ids", prompt=[5, 6, 7]),
    ]
    write_lines(tmp_path / "in.jsonl", made)
    return made


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(DEMO_DIR)


def known(requests: list[Request], source: str) -> dict[str, list[list[int]]]:
    """custom_id -> the known answers of a source, of the requests that have any."""
    return {
        request.tag.ticket.custom_id: [one.tolist() for one in request.references[source]]  # type: ignore[index]
        for request in requests
        if source in request.references
    }


def begin(apcbatch: Any, tmp_path: Path, *options: Any) -> list[dict[str, Any]]:
    """Make old.jsonl, the OUT of an earlier run, and return its records; the fake engine's one answer to a request for
    two is followed by another one."""
    assert apcbatch(*RUN, "-o", "old.jsonl", *options).code == 0
    records = read_records(tmp_path / "old.jsonl")
    [two] = [record for record in records if record["custom_id"] == "two"]
    ours, choices = two["apcbatch"], two["response"]["body"]["choices"]
    ours["choices"] = [{"completion_token_ids": one} for one in (ours["completion_token_ids"], [9, 8, 7])]
    choices.append(json.loads(json.dumps(choices[0])) | {"index": 1})
    write_lines(tmp_path / "old.jsonl", records)
    return records


def record_line(custom_id: str) -> bytes:
    """A line of OUT without its end."""
    return line_of(result_record(Ticket(1, 1, None, custom_id, None), RESULT, RENDERER, "m", 0)).rstrip(b"\n")


def token_ids(path: Path) -> dict[str, list[list[int]]]:
    """custom_id -> the token ids of its answers, of each record that succeeded."""
    return {
        record["custom_id"]: [
            one["completion_token_ids"] for one in record["apcbatch"].get("choices", [record["apcbatch"]])
        ]
        for record in read_records(path)
        if record["error"] is None
    }


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ((), {"c-0#1", "c-0#2", "c-1#1", "c-1#2", "c-2#1", "c-2#2", "s#1"}),
        (("--draft", "recorded"), {"c-0#1", "c-0#2", "c-1#1", "c-1#2", "c-2#1", "c-2#2", "s#1"}),
        (("--turns", "last"), {"c-0#2", "c-1#2", "c-2#2", "s#1"}),
        (("--draft", "lookup,history"), set()),
        (("--draft", "none"), set()),
        (("--turns", "rollout"), set()),
        (("--fast",), set()),
        (("--score",), set()),
    ],
)
def test_a_recorded_answer_is_known_where_it_is_a_source(
    apcbatch: Any, engines: Any, lines: Any, renderer: Renderer, options: tuple[str, ...], found: set[str]
) -> None:
    """Fault: the answer of another turn is drafted, or answers are rendered that nothing drafts from."""
    apcbatch(*RUN, "-o", "out.jsonl", *options)
    recorded = known(engines[-1].submitted, "recorded")
    assert set(recorded) == found
    for custom_id, [tokens] in recorded.items():
        name, _, turn = custom_id.partition("#")
        said = "Hello" if name == "s" else lines[int(name[2:])]["messages"][2 * int(turn)]["content"]
        assert renderer.tokenizer.decode(tokens).strip().startswith(said), custom_id


def test_a_line_may_turn_it_off(apcbatch: Any, engines: Any, lines: Any, tmp_path: Path) -> None:
    """Fault: answers are looked for that a request does not want."""
    write_lines(tmp_path / "in.jsonl", [conversation(0) | {"draft": False}, conversation(1)])
    apcbatch(*RUN, "-o", "old.jsonl")
    assert set(known(engines[-1].submitted, "recorded")) == {"c-1#1", "c-1#2"}
    apcbatch(*RUN, "-o", "out.jsonl", "--draft-from", "old.jsonl")
    assert set(known(engines[-1].submitted, "previous")) == {"c-1#1", "c-1#2"}


def test_an_answer_that_cannot_be_rendered_is_no_error(
    apcbatch: Any, lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a request that needs no draft is an error record, whatever goes wrong with the draft."""

    def fail(*_: object) -> Any:
        raise random.choice([ValueError, MemoryError, KeyError])("no")

    assert apcbatch(*RUN, "-o", "whole.jsonl", "--draft", "none").code == 0
    for name in ("recorded", "of_tokens"):
        monkeypatch.setattr(known_answers.KnownAnswers, name, fail)
    assert apcbatch(*RUN, "-o", "out.jsonl", "--draft-from", "whole.jsonl").code == 0
    assert answers(read_records(tmp_path / "out.jsonl")) == answers(read_records(tmp_path / "whole.jsonl"))


def test_a_plan_without_drafts_looks_for_no_answer(apcbatch: Any, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: `plan` and `show` render each answer for drafts that they never make."""
    monkeypatch.setattr(references.References, "__init__", lambda *_: pytest.fail("answers are looked for"))
    planned = apcbatch("plan", "in.jsonl", "--draft", "none")
    assert planned.code == 0 and "11 requests" in planned.stdout, planned.stdout
    assert apcbatch("show", "in.jsonl").code == 0


@pytest.mark.drawn(2)
@pytest.mark.parametrize("turns", ["each", "rollout"])
@pytest.mark.parametrize("pack", [None, gzip.compress, zstandard.compress])
def test_earlier_answers_are_found_by_their_names(
    apcbatch: Any, engines: Any, lines: Any, tmp_path: Path, turns: str, pack: Callable[[bytes], bytes] | None
) -> None:
    """Fault: an answer goes to another request; an error record, a torn line or an overlong one ends the run or hides
    the lines behind it; one of several answers is dropped; a compressed file is not read."""
    begin(apcbatch, tmp_path, "--turns", turns)
    expected = token_ids(tmp_path / "old.jsonl")
    assert len(expected) == 11 and len(expected["two"]) == 2
    own = (tmp_path / "old.jsonl").read_bytes().splitlines(keepends=True)
    random.shuffle(own)
    error = {"code": "internal", "message": "no", "retryable": True}
    failed = json.loads(own[0]) | {"response": None, "error": error, "apcbatch": {}}
    torn = [own[1][:70] + b"\n", b"\0" * 90 + b"\n", b"\n", b"[]\n", json.dumps(failed).encode() + b"\n"]
    mixed = [line for pair in zip(own, torn * 3, strict=False) for line in pair] + [own[2][:-9]]
    data = b"".join(mixed)
    (tmp_path / "old.jsonl").write_bytes(pack(data) if pack else data)
    done = apcbatch(*RUN, "-o", "out.jsonl", "--turns", turns, "--draft-from", (tmp_path / "old.jsonl").as_uri())
    assert done.code == 0 and done.summary["warnings"] == [], done.stderr
    assert known(engines[-1].submitted, "previous") == expected


def test_a_file_that_changes_meanwhile_gives_no_other_answer(apcbatch: Any, lines: Any, tmp_path: Path) -> None:
    """Fault: the answer of another request, which stands now where the wanted one stood, or a traceback; and of two
    answers with one name the older one."""
    begin(apcbatch, tmp_path)
    path = tmp_path / "old.jsonl"
    first, second = json.loads(path.read_bytes().splitlines()[0]), path.read_bytes().splitlines()[1]
    newer = json.loads(json.dumps(first))
    newer["apcbatch"]["completion_token_ids"] = [7]
    write_lines(path, [first, second.decode(), newer])
    earlier = references.EarlierAnswers(str(path), "--draft-from", DEMO_DIR, pytest.fail)
    found = earlier.find(first["custom_id"])
    assert found is not None and found["apcbatch"]["completion_token_ids"] == [7]
    size = path.stat().st_size
    for content in (second + b"\n", b"x"):
        with path.open("r+b") as file:
            file.seek(size - len(json.dumps(newer)) - 1)
            file.write(content + b" " * 99)
        assert earlier.find(first["custom_id"]) is None
    assert (len(earlier), earlier.num_wanted, earlier.num_found) == (2, 3, 1)


def test_the_file_of_earlier_answers_is_closed_with_them(tmp_path: Path) -> None:
    """Fault: each run of one process leaves the OUT of an earlier run open."""
    (tmp_path / "old.jsonl").write_bytes(b"")
    before = os.listdir("/proc/self/fd")
    earlier = references.EarlierAnswers(str(tmp_path / "old.jsonl"), "--draft-from", DEMO_DIR, pytest.fail)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del earlier
    assert os.listdir("/proc/self/fd") == before


def test_tokens_are_taken_from_a_run_of_the_same_model_alone(tmp_path: Path) -> None:
    """Fault: the token ids of another model's run are drafts, whatever they mean in this one."""
    for model_files in ["", "0", "~", None, "same"]:
        (tmp_path / "old.jsonl").write_bytes(b"")
        written = model_files_digest(DEMO_DIR) if model_files == "same" else model_files
        facts: dict[str, Any] = {"version": "1", "config": {}, "input": {}, "model_files": written}
        for content in (facts, None):
            if content is not None:
                (tmp_path / "old.jsonl.run.json").write_text(json.dumps(content))
            else:
                (tmp_path / "old.jsonl.run.json").unlink()
            earlier = references.EarlierAnswers(str(tmp_path / "old.jsonl"), "--draft-from", DEMO_DIR, pytest.fail)
            assert earlier.has_same_tokens == (model_files == "same" and content is not None)


@pytest.mark.parametrize("other", ["a", "c"])
def test_a_record_that_takes_the_place_of_another_is_not_its_answer(
    apcbatch: Any, lines: Any, tmp_path: Path, other: str
) -> None:
    """Fault: the answer of a request whose name sorts before or behind the wanted one is its draft."""
    begin(apcbatch, tmp_path)
    record = read_records(tmp_path / "old.jsonl")[0]
    write_lines(tmp_path / "old.jsonl", [record | {"custom_id": "b"}])
    earlier = references.EarlierAnswers(str(tmp_path / "old.jsonl"), "--draft-from", DEMO_DIR, pytest.fail)
    assert earlier.find("b") is not None and earlier.find(other) is None
    with (tmp_path / "old.jsonl").open("r+") as file:
        file.write(json.dumps(record | {"custom_id": other}))
    assert earlier.find("b") is None and (earlier.num_wanted, earlier.num_found) == (3, 1)


@pytest.mark.parametrize("turns", ["each", "rollout"])
def test_answers_of_another_tokenizer_are_their_text(
    apcbatch: Any, engines: Any, lines: Any, tmp_path: Path, renderer: Renderer, turns: str
) -> None:
    """Fault: token ids of one vocabulary are drafts in another; reasoning, calls or the prompt's echo are lost or put
    into the draft."""
    records = begin(apcbatch, tmp_path, "--turns", turns)
    for record in records:
        record["apcbatch"]["completion_token_ids"] = [3]
        for number, choice in enumerate(record["response"]["body"]["choices"]):
            if "text" in choice:
                choice["text"] = ("Once upon" if record["custom_id"] == "text" else "") + " a time"
            else:
                choice["message"] |= {"content": f"It has been sent, {number}."}
    write_lines(tmp_path / "old.jsonl", records)
    facts = json.loads((tmp_path / "old.jsonl.run.json").read_text()) | {"model_files": "another"}
    (tmp_path / "old.jsonl.run.json").write_text(json.dumps(facts))
    assert apcbatch(*RUN, "-o", "out.jsonl", "--turns", turns, "--draft-from", "old.jsonl").code == 0
    found = known(engines[-1].submitted, "previous")
    assert len(found) == 11 and len(found["two"]) == 2
    for custom_id, several in found.items():
        for number, tokens in enumerate(several):
            if custom_id in ("text", "ids"):
                assert renderer.tokenizer.decode_all(tokens) == " a time"
            else:
                assert renderer.tokenizer.decode(tokens).strip() == f"It has been sent, {number}."
                assert tokens[-1] in renderer.tokenizer.eos_token_ids


def test_calls_of_another_tokenizer_are_rendered(
    apcbatch: Any, engines: Any, tmp_path: Path, renderer: Renderer
) -> None:
    """Fault: the draft of an answer with calls is its content alone."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "Hi"}, CALL]
    write_lines(tmp_path / "in.jsonl", [{"id": "t", "messages": messages, "tools": tools}])
    assert apcbatch(*RUN, "-o", "old.jsonl").code == 0
    [recorded] = known(engines[-1].submitted, "recorded")["t#1"]
    [record] = read_records(tmp_path / "old.jsonl")
    call = CALL["tool_calls"][0] | {"function": {"name": "f", "arguments": '{"x": 1}'}}  # type: ignore[operator]
    record["response"]["body"]["choices"][0]["message"] |= {"content": CALL["content"], "tool_calls": [call]}
    write_lines(tmp_path / "old.jsonl", [record])
    (tmp_path / "old.jsonl.run.json").unlink()
    assert apcbatch(*RUN, "-o", "out.jsonl", "--draft-from", "old.jsonl").code == 0
    assert known(engines[-1].submitted, "previous") == {"t#1": [recorded]}


def test_ids_that_the_model_does_not_have_are_not_passed_on(
    apcbatch: Any, engines: Any, lines: Any, tmp_path: Path
) -> None:
    """Fault: a token id that a user's file has ends the pass of other requests."""
    records = begin(apcbatch, tmp_path)
    for record in records:
        if record["custom_id"] in ("one", "two"):
            for one in record["apcbatch"].get("choices", [record["apcbatch"]])[:1]:
                one["completion_token_ids"][-1] = VOCAB_SIZE
    write_lines(tmp_path / "old.jsonl", records)
    assert apcbatch(*RUN, "-o", "out.jsonl", "--draft-from", "old.jsonl").code == 0
    found = known(engines[-1].submitted, "previous")
    assert "one" not in found and len(found["two"]) == 1 and len(found) == 10
    for record in records:
        record["apcbatch"]["completion_token_ids"] = [VOCAB_SIZE]
        record["apcbatch"].pop("choices", None)
    write_lines(tmp_path / "old.jsonl", records)
    done = apcbatch(*RUN, "-o", "out.jsonl", "--draft-from", "old.jsonl", "--overwrite")
    assert done.summary["warnings"] == [
        "--draft-from old.jsonl: the answers to 11 requests of this run hold no token of this model's vocabulary, so "
        "that no draft was made from them"
    ]


@pytest.mark.parametrize("same_tokens", [True, False])
def test_known_answers_have_bounded_sizes(
    apcbatch: Any, engines: Any, lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_tokens: bool
) -> None:
    """Fault: a record with 300,000 answers stalls the run; one answer of 20 million tokens takes 868 MiB, or 44 bytes a
    token of each running answer's index, whatever --draft-memory is."""
    records = begin(apcbatch, tmp_path)
    if not same_tokens:
        (tmp_path / "old.jsonl.run.json").unlink()
    for record in records:
        ours, body = record["apcbatch"], record["response"]["body"]
        if record["custom_id"] == "one":  # more answers than any request may have
            ours["choices"] = [{"completion_token_ids": [7]}] * (129 if same_tokens else 1)
            body["choices"] *= 1 if same_tokens else 129
        if record["custom_id"] == "two":
            ours["choices"] = [{"completion_token_ids": [number] * 4} for number in range(20)]
            body["choices"] = [
                {**body["choices"][0], "message": {"role": "assistant", "content": "a b" * number}}
                for number in range(20)
            ]
        if record["custom_id"] == "text":
            ours["completion_token_ids"], body["choices"][0]["text"] = [7] * 100, "Once upon" + " a b c" * 100
    write_lines(tmp_path / "old.jsonl", records)
    for module in (known_answers, references):
        monkeypatch.setattr(module, "MOST_KNOWN_TOKENS", 45)
    assert apcbatch(*RUN, "-o", "out.jsonl", "--draft-from", "old.jsonl").code == 0
    found = known(engines[-1].submitted, "previous")
    assert "one" not in found and len(found["text"][0]) == 45
    assert 0 < sum(map(len, found["two"])) <= 45
    if same_tokens:
        assert [one[0] for one in found["two"]] == [*range(9, 20)], "the last ones, in their order"


@pytest.mark.parametrize("content", [b"", b"no JSON\n", None])
def test_no_answer_that_fits_is_a_warning(
    apcbatch: Any, engines: Any, lines: Any, tmp_path: Path, content: bytes | None
) -> None:
    """Fault: the OUT of another input is given by mistake, and nobody says that it does nothing."""
    if content is None:
        write_lines(tmp_path / "other.jsonl", [conversation(9)])
        assert apcbatch("run", "other.jsonl", *RUN[2:], "-o", "old.jsonl").code == 0
    else:
        (tmp_path / "old.jsonl").write_bytes(content)
    done = apcbatch(*RUN, "-o", "out.jsonl", "--draft-from", "old.jsonl")
    number = 0 if content is not None else 2
    assert done.code == 0 and done.summary["warnings"] == [
        f"--draft-from old.jsonl: none of its {number} answers has the custom_id of a request of this run, so that "
        "no draft was made from them"
    ]
    write_lines(tmp_path / "in.jsonl", [{"messages": []}])
    done = apcbatch(*RUN, "-o", "out.jsonl", "--draft-from", "old.jsonl", "--overwrite")
    assert done.code == 3 and done.summary["warnings"] == []


def test_a_compressed_file_that_breaks_off_is_read_so_far(
    apcbatch: Any, engines: Any, lines: Any, tmp_path: Path
) -> None:
    """Fault: a file that a full disk cut ends the run, or is taken for a whole one in silence."""
    assert apcbatch(*RUN, "-o", "old.jsonl").code == 0
    data = gzip.compress((tmp_path / "old.jsonl").read_bytes())
    (tmp_path / "old.jsonl").write_bytes(data[: -len(data) // 3])
    done = apcbatch(*RUN, "-o", "out.jsonl", "--draft-from", "old.jsonl")
    assert done.code == 0 and 0 < len(known(engines[-1].submitted, "previous")) < 11
    [warning] = done.summary["warnings"]
    assert warning.startswith("--draft-from old.jsonl cannot be read to its end: the compressed data ends too early")


def test_drafts_may_change_on_the_way(apcbatch: Any, engines: Any, lines: Any, tmp_path: Path) -> None:
    """Fault: --resume refuses another --draft; the run file or the command that continues loses it; answers that OUT
    has are looked for again, or nothing is drafted from them."""
    assert apcbatch(*RUN, "-o", "old.jsonl").code == 0
    write_lines(tmp_path / "in.jsonl", [*lines[:5], "{", *lines[5:]])
    drafts = ("--draft", "lookup,previous", "--draft-from", "old.jsonl", "--draft-memory", "1MiB", "--max-running", "1")
    done = apcbatch(*RUN, "-o", "out.jsonl", "--strict", *drafts)
    assert done.code == 1 and " ".join(drafts) in done.final_line
    values = json.loads((tmp_path / "out.jsonl.run.json").read_text())["config"]
    assert (values["draft"], values["draft_from"], values["draft_memory"]) == ("lookup,previous", "old.jsonl", 1 << 20)
    there = token_ids(tmp_path / "out.jsonl")
    words = [word for word in shlex.split(done.final_line)[1:] if word != "--strict"]
    assert apcbatch(*words).code == 3
    again = engines[-1]
    assert 0 < len(there) < 11 and again.learnt == [tokens for several in there.values() for tokens in several]
    assert set(known(again.submitted, "previous")) == set(token_ids(tmp_path / "out.jsonl")) - set(there)
    own = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(own[:-1]))
    assert apcbatch(*RUN, "-o", "out.jsonl", "--resume", "--draft", "none").code == 3 and engines[-1] is not again
    assert engines[-1].learnt == []


def test_answers_that_are_there_fill_no_more_than_the_memory(
    apcbatch: Any, engines: Any, lines: Any, tmp_path: Path
) -> None:
    """Fault: a large OUT is read whole for an index that holds its end; or its first line in the middle."""
    assert apcbatch(*RUN, "-o", "out.jsonl").code == 0
    own = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(own[:-1]))
    every = [tokens for several in token_ids(tmp_path / "out.jsonl").values() for tokens in several]
    last = len(own[-2]) + len(own[-3])
    for memory, count in ((10**9, len(every)), (last, 2), (last + 1, 2), (last - 1, 1), (0, 0)):
        (tmp_path / "out.jsonl").write_bytes(b"".join(own[:-1]))
        assert apcbatch(*RUN, "-o", "out.jsonl", "--resume", "--draft-memory", memory).code == 0
        assert engines[-1].learnt == every[len(every) - count :], memory


def test_lines_up_to_the_limit_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a line over the limit is held in memory; a piece of it is taken for a line, the lines behind it are lost,
    or the place of the next one is wrong."""
    empty, path = len(record_line("")), tmp_path / "old.jsonl"
    monkeypatch.setattr(references, "MOST_RECORD_BYTES", empty + 100)
    ends = [(0, b"\n", 1), (1, b"\n", 0), (0, b"", 0), (-1, b"", 1), (700, b"\n", 0), (9999, b"\n", 0)]
    for over, end, is_read in ends:
        name = "a" * (100 + over - len(end))
        path.write_bytes(b"\n".join([record_line("b"), record_line(name) + end]) + record_line("c") * bool(end))
        earlier = references.EarlierAnswers(str(path), "--draft-from", DEMO_DIR, pytest.fail)
        found = [earlier.find(custom_id) is not None for custom_id in ("b", name, "c")]
        assert found == [True, bool(is_read), bool(end)] and len(earlier) == sum(found), (over, end)


def test_what_a_choice_is_drafted_as() -> None:
    """Fault: a begun answer is rendered as a message of its own, an echoed prompt is drafted, or one that only looks
    echoed is cut off."""
    for prompt, settings, choice, draft in [
        (None, "", {"message": {"role": "assistant", "content": "Hi"}}, "message Hi"),
        (None, "continues", {"message": {"role": "assistant", "content": "Hi"}}, "text Hi"),
        (None, "", {"message": {"role": "nobody", "content": "Hi"}}, None),
        ("Once", "echo", {"text": "Once upon"}, "text  upon"),
        ("Once", "", {"text": "Once upon"}, "text Once upon"),
        ([1, 2], "echo", {"text": "Once upon"}, "text Once upon"),
        ("Once", "", {}, None),
    ]:
        known: Any = SimpleNamespace(
            of_message=lambda prompt, message: f"message {message['content']}", of_text=lambda text: f"text {text}"
        )
        earlier: Any = SimpleNamespace(
            find=lambda custom_id, choice=choice: {"response": {"body": {"choices": [choice]}}},
            has_same_tokens=False,
            num_used=0,
        )
        conversation: Any = SimpleNamespace(
            prompt=prompt,
            params={"echo": "echo" in settings},
            template_options=SimpleNamespace(continue_final_message="continues" in settings),
        )
        rendered: Any = SimpleNamespace(turn=1, custom_id="a")
        renderer: Any = None
        found = references.References(renderer, False, earlier).find(known, conversation, [rendered])
        assert found == ({1: {"previous": [draft]}} if draft else {})


def test_which_answers_of_out_are_drafted_from(apcbatch: Any, lines: Any, tmp_path: Path) -> None:
    """Fault: an answer of another model ends the run, an empty one is a text of the index, or an error hides others."""
    assert apcbatch(*RUN, "-o", "out.jsonl").code == 0
    record = read_records(tmp_path / "out.jsonl")[0]
    error = {"code": "internal", "message": "no", "retryable": True}
    records = [record | {"apcbatch": record["apcbatch"] | {"completion_token_ids": one}} for one in ([], [9, 3], [10])]
    write_lines(tmp_path / "out.jsonl", ["{", record | {"response": None, "error": error, "apcbatch": {}}, *records])
    sink = FileSink(tmp_path / "out.jsonl")
    assert list(last_answers(sink, 1 << 20, vocab_size=10)) == [[9, 3]]
    sink.close()


class FromReferences:
    """Drafts that are the known answers, as far as they agree."""

    def __init__(self, sources: Any, max_bytes: int) -> None:
        self.sources, self.texts, self.held_bytes = sources, [], 11 * bool(sources)

    def begin(self, prompt: Any, references: Any, most_tokens: int) -> FromReferences.Drafter:
        assert set(references) <= set(self.sources)
        return FromReferences.Drafter([(source, list(one)) for source, all in references.items() for one in all])

    def add(self, tokens: Any, num_prompt: int, begin: int) -> None:
        self.texts.append((list(tokens), num_prompt))

    class Drafter:
        def __init__(self, known: list[tuple[str, list[int]]]) -> None:
            self.known, self.done = known, []

        def append(self, tokens: Any) -> None:
            self.done += list(tokens)

        def propose(self, most: int) -> Draft | None:
            for source, tokens in self.known:
                rest = tokens[len(self.done) :][:most]
                if rest and tokens[: len(self.done)] == self.done:
                    return Draft(rest, [0.99] * len(rest), source)
            return None


@pytest.fixture
def known_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that draft from known answers, whatever it costs."""
    monkeypatch.setattr(parts, "Drafts", FromReferences)
    monkeypatch.setattr(RowCosts, "of", lambda self, rows: 1.0)
    monkeypatch.setattr("apcbatch.engine.drafting.PLAIN_RUN", 0)


@pytest.mark.usefixtures("one_thread", "known_drafts")
@pytest.mark.parametrize("turns", ["each", "rollout"])
def test_a_run_drafts_from_its_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Any, turns: str
) -> None:
    """Fault: on the way from OUT to the engine a draft is lost, or it changes an answer; or what was drafted is not in
    the records and the summary."""
    monkeypatch.chdir(tmp_path)
    options = [*map(str, RUN), "--turns", turns, "--device", "cpu", "--max-tokens", "20", "--ignore-eos"]
    assert main([*options, "-o", "none.jsonl", "--draft", "none", "--summary", "none.json"]) == 0
    summary = ["--summary", "drafts.json"]
    assert main([*options, "-o", "drafts.jsonl", "--draft-from", "none.jsonl", "--draft", "previous", *summary]) == 0
    plain, drafted = (read_records(tmp_path / name) for name in ("none.jsonl", "drafts.jsonl"))
    assert answers(plain) == answers(drafted)
    found = json.loads((tmp_path / "drafts.json").read_text())
    sums = [sum(record["apcbatch"][f"{what}_tokens"] for record in drafted) for what in ("drafted", "accepted")]
    assert found["drafts"] == {"previous": {"drafted": sums[0], "accepted": sums[1]}}
    assert sums[0] >= sums[1] > 100 and found["tokens_per_pass"] > 3 and found["peak_draft_bytes"] == 11
    before = json.loads((tmp_path / "none.json").read_text())
    assert (before["drafts"], before["tokens_per_pass"], before["peak_draft_bytes"]) == ({}, 1.0, 0)
    assert all(record["apcbatch"]["drafted_tokens"] == 0 for record in plain)


@pytest.mark.usefixtures("one_thread", "known_drafts")
def test_an_llm_takes_the_options_of_a_run(tmp_path: Path, apcbatch: Any, lines: Any) -> None:
    """Fault: an LLM ignores `draft` and `draft_from`, or a single call cannot turn drafts off."""
    messages = lines[0]["messages"][:2]
    with llm.LLM("demo", device="cpu", max_tokens=8, draft="none") as one:
        plain = one.chat(messages)
        write_lines(tmp_path / "old.jsonl", [plain.record])
    told: list[str] = []
    with llm.LLM("demo", device="cpu", max_tokens=8, draft_from=str(tmp_path / "old.jsonl"), warn=told.append) as one:
        drafted, silent = one.chat(messages), one.chat(messages, draft=False)
    assert drafted.token_ids == silent.token_ids == plain.token_ids and told == []
    numbers = [answer.record["apcbatch"]["accepted_tokens"] for answer in (plain, drafted, silent)]
    assert numbers[0] == numbers[2] == 0 < numbers[1]
    with pytest.raises(UsageError, match="draft_from .* cannot be read: no such file"):
        llm.LLM("demo", draft_from=str(tmp_path / "gone.jsonl"))
