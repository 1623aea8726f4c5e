"""Each answer of a resumed run is bound to what its request was made of."""

from __future__ import annotations

import inspect
import io
import json
import sys
from pathlib import Path

import pytest

from apcbatch.config import Config
from apcbatch.data.input.inputs import Inputs
from apcbatch.errors import UsageError
from apcbatch.job.disk import Disk
from apcbatch.job.runfile import RunFile, input_identity
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers, batch_line

OPTIONS = ("--max-tokens", 3)
END = 1 << 20


@pytest.fixture
def piped(apcbatch, tmp_path, monkeypatch):
    """A run with in.jsonl on standard input."""

    def run(*options):
        stdin = io.TextIOWrapper(io.BytesIO((tmp_path / "in.jsonl").read_bytes()))
        monkeypatch.setattr(sys, "stdin", stdin)
        return apcbatch("run", "-", "-o", "out.jsonl", *OPTIONS, *options)

    return run


def changed(tmp_path, old, new, count=-1):
    """Put other words of the same length into the input."""
    assert len(old) == len(new)
    path = tmp_path / "in.jsonl"
    path.write_text(path.read_text().replace(old, new, count))


def test_a_file_changed_in_its_middle_is_compared(apcbatch, tmp_path):
    """Fault: a change between the first and the last MiB, at the same size, is not seen, or not told."""
    long = {"note": "x" * (END // 2)}  # costs few tokens; the digests of the file's ends do not reach the middle
    write_lines(tmp_path / "in.jsonl", [conversation(number, turns=1) | long for number in range(9)])
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--limit", 6)
    changed(tmp_path, "Question 0 of conversation 4", "Question 0 of conversation X")
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume")
    assert done.summary["requests"] == 4 and "INPUT has changed: 1 line corrected" in done.stderr


def test_another_content_on_stdin_is_refused_at_its_line(piped, tmp_path):
    """Fault: --resume takes any standard input for the rest of the same."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(6)])
    assert piped("--limit", 4).code == 0
    changed(tmp_path, "conversation 3", "conversation X")
    done = piped("--resume")
    assert done.code == 2 and "line 4 (turn 1) of the input" in done.stderr, done.stderr
    changed(tmp_path, "conversation X", "conversation 3")
    assert piped("--resume").code == 0
    assert len(answers(read_records(tmp_path / "out.jsonl"))) == 12


def test_a_file_that_was_moved_is_the_same_input(apcbatch, tmp_path):
    """Fault: an input is known by its name, although its content is at hand: moved, it cannot be resumed."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(3)])
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--limit", 2)
    (tmp_path / "in.jsonl").rename(tmp_path / "moved.jsonl")
    done = apcbatch("run", "moved.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume")
    assert done.code == 0 and len(answers(read_records(tmp_path / "out.jsonl"))) == 6


SETTINGS = [
    (batch_line("b", max_tokens=2), batch_line("b", max_tokens=3)),
    (batch_line("b", temperature=0.5), batch_line("b", temperature=0.6)),
    (batch_line("b", temperature=0.5, seed=1), batch_line("b", temperature=0.5, seed=2)),
    (batch_line("b", top_p=0.5), batch_line("b", top_p=0.6)),
    (batch_line("b", logprobs=True), batch_line("b", logprobs=False)),
    (batch_line("b"), batch_line("b") | {"custom_id": "c"}),
    (conversation(1), conversation(1) | {"id": "c-2"}),
]
SHAPES = [
    (conversation(1, turns=3), conversation(1, turns=2)),
    (conversation(1), "{"),
    ("{", conversation(1)),
    ('{"a', '{"b'),
    ({"id": "e", "messages": []}, {"id": "f", "messages": []}),
]


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("then", "now"), SETTINGS + SHAPES)
def test_whatever_makes_another_request_is_computed_again(apcbatch, tmp_path, then, now):
    """Fault: an answer stands for a request with other settings, another name or another number of turns."""
    run = ("run", "in.jsonl", *OPTIONS)
    write_lines(tmp_path / "in.jsonl", [then, conversation(5)])
    apcbatch(*run, "-o", "out.jsonl")
    write_lines(tmp_path / "in.jsonl", [now, conversation(5)])
    assert "INPUT has changed" in apcbatch(*run, "-o", "out.jsonl", "--resume").stderr
    apcbatch(*run, "-o", "fresh.jsonl")
    found, fresh = (
        {one["custom_id"]: one for one in read_records(tmp_path / name)} for name in ("out.jsonl", "fresh.jsonl")
    )
    for name, record in fresh.items():
        assert found[name]["apcbatch"]["request_digest"] == record["apcbatch"]["request_digest"], name
        assert (found[name]["error"], found[name]["turn"]) == (record["error"], record["turn"])
    name = then.get("custom_id") or then.get("id") if isinstance(then, dict) and then.get("messages") != [] else None
    is_gone = name is not None and json.dumps(name) not in json.dumps(now)
    stays = {one for one in found if is_gone and one is not None and one.partition("#")[0] == name}
    assert set(found) - set(fresh) == stays, "an answer whose line is gone stays"


def test_another_spelling_of_the_same_requests_is_the_same(piped, tmp_path):
    """Fault: a space in the line, or a turn that was added behind, makes the answered requests others."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    piped()
    line = json.dumps(conversation(1, turns=3), indent=1).replace("\n", " ")
    write_lines(tmp_path / "in.jsonl", [line])
    done = piped("--resume")
    assert done.code == 0 and (done.summary["requests"], done.summary["already_done"]) == (1, 2)


def test_another_version_compares_the_prompts(apcbatch, tmp_path, monkeypatch):
    """Fault: a version that renders differently takes the answers of the one before for its own."""
    from apcbatch.data.tokenization.tokenizer import Tokenizer

    write_lines(tmp_path / "in.jsonl", [conversation(1), "{"])
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS)
    run_file = tmp_path / "out.jsonl.run.json"
    facts = json.loads(run_file.read_text())
    run_file.write_text(json.dumps(facts | {"version": "0.0.0"}))
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume").code == 3, "the same prompts"
    run_file.write_text(json.dumps(facts | {"version": "0.0.0"}))
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: encode(self, text.replace("short", "brief")))
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume")
    assert done.code == 2 and "line 1 (turn 1) of the input is as it was, but its prompt is not" in done.stderr


def test_an_answered_conversation_is_not_rendered_again(apcbatch, tmp_path, monkeypatch):
    """Fault: continuing with the end of a long run renders all of its beginning."""
    from apcbatch.data.chat.render import Renderer

    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(4)])
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--limit", 3)
    rendered, render = [], Renderer.render

    def watched(self, conversation, *options):
        rendered.append(conversation.id)
        return render(self, conversation, *options)

    monkeypatch.setattr(Renderer, "render", watched)
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume").summary["requests"] == 2
    assert set(rendered) == {"c-3"}


def test_a_stream_that_has_changed_is_compared_while_it_is_read(piped, tmp_path):
    """Fault: a line that is new on standard input is refused or gets the number of an answered one; an answer whose
    line is gone is not counted."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(3)])
    piped()
    before = (tmp_path / "out.jsonl").read_bytes()
    assert piped("--resume", "--limit", 2).summary["answers_without_line"] == 0, "a smaller limit asks for less"
    write_lines(tmp_path / "in.jsonl", [conversation(9), conversation(2), conversation(0)])
    done = piped("--resume", "--ordered")
    assert (done.code, done.summary["requests"], done.summary["answers_without_line"]) == (0, 2, 2), done.stderr
    records = read_records(tmp_path / "out.jsonl")
    assert [one["custom_id"] for one in records] == [f"c-{number}#{turn}" for number in (9, 2, 0, 1) for turn in (1, 2)]
    assert len(answers(records)) == 8 and set(before.splitlines()) < set(
        (tmp_path / "out.jsonl").read_bytes().splitlines()
    )


@pytest.mark.drawn(1)
@pytest.mark.parametrize("turn", [1, 2])
def test_a_rollout_is_bound_to_its_own_answers(apcbatch, tmp_path, turn):
    """Fault: a later turn stands on an answer that OUT does not have, after OUT or INPUT was changed."""
    rollout = ("--turns", "rollout", *OPTIONS)
    write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(2)])
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *rollout, "--ordered")
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *rollout, "--resume").summary["requests"] == 0
    records = read_records(out)
    token_ids = records[turn - 1]["apcbatch"]["completion_token_ids"]
    token_ids[0] = token_ids[0] % 4000 + 1
    write_lines(out, records)
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *rollout, "--resume")
    assert done.code == 2 and f"line 1 (turn {turn + 1}) of the input" in done.stderr
    out.write_bytes(whole)
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *rollout, "--resume").code == 0


def test_a_rollout_from_a_stream_is_bound_to_its_own_answers(piped, tmp_path):
    """Fault: on standard input a line that is the same is enough, although the prompts hold other answers."""
    write_lines(tmp_path / "in.jsonl", [conversation(0, turns=3)])
    rollout = ("--turns", "rollout", "--ordered")
    assert piped(*rollout).code == 0
    records = read_records(tmp_path / "out.jsonl")
    token_ids = records[0]["apcbatch"]["completion_token_ids"]
    token_ids[0] = token_ids[0] % 4000 + 1
    write_lines(tmp_path / "out.jsonl", records)
    done = piped(*rollout, "--resume")
    assert done.code == 2 and "line 1 (turn 2) of the input" in done.stderr


@pytest.mark.slow
def test_a_long_rollout_is_resumed(apcbatch, tmp_path):
    """Fault: hundreds of answered turns of one conversation end in a RecursionError. Here its bound is lower."""
    rollout = ("--turns", "rollout", "--max-tokens", 1)
    messages = [{"role": role, "content": "x"} for _ in range(60) for role in ("user", "assistant")]
    write_lines(tmp_path / "in.jsonl", [{"id": "long", "messages": messages}])
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *rollout)
    out = tmp_path / "out.jsonl"
    answered = len([record for record in read_records(out) if not record["error"]])
    assert answered == 60
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[: answered - 1]))
    bound = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 80)
    try:
        done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *rollout, "--resume")
    finally:
        sys.setrecursionlimit(bound)
    assert done.summary["already_done"] == answered - 1 and done.summary["ok"] == 1, done.stderr


def test_an_out_without_digests_is_taken_with_a_warning(apcbatch, tmp_path):
    """Fault: an OUT of an earlier version cannot be resumed, or is without a word."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(3)])
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--limit", 2)
    records = read_records(tmp_path / "out.jsonl")
    for record in records:
        del record["apcbatch"]["request_digest"], record["apcbatch"]["line_digest"]
    write_lines(tmp_path / "out.jsonl", records)
    run_file = tmp_path / "out.jsonl.run.json"
    facts = json.loads(run_file.read_text())
    del facts["config"]["max_request_tokens"]  # that version did not have it
    run_file.write_text(json.dumps(facts))
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume")
    assert done.code == 0 and "4 lines of" in done.stderr and "of a version that did not note" in done.stderr
    assert len(answers(read_records(tmp_path / "out.jsonl"))) == 6


@pytest.mark.drawn(2)
@pytest.mark.parametrize("turns", ["each", "rollout"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_name_belongs_to_one_request_of_the_run(apcbatch, tmp_path, turns, reverse):
    """Fault: turn 2 of `x` and a batch line `x#2` make two answers of one name."""
    lines = [conversation(1, turns=3) | {"id": "x"}, batch_line("b", max_tokens=1) | {"custom_id": "x#2"}]
    write_lines(tmp_path / "in.jsonl", lines[::-1] if reverse else lines)
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--turns", turns).code == 3
    records = read_records(tmp_path / "out.jsonl")
    ok = [record["custom_id"] for record in records if not record["error"]]
    doubled = [record for record in records if record["error"]]
    assert len(set(ok)) == len(ok) and len(records) == 4
    assert {record["error"]["code"] for record in doubled} == {"duplicate_id"}
    assert doubled[0]["custom_id"] == "x#2"
    assert "id 'x#2' was used by line 1" in doubled[0]["error"]["message"]
    if turns == "rollout" and reverse:
        assert sorted(ok) == ["x#1", "x#2"] and "no history" in doubled[1]["error"]["message"]
    else:
        assert sorted(ok) == ["x#1", "x#2", "x#3"]
    before = (tmp_path / "out.jsonl").read_bytes()
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--turns", turns, "--resume").code == 3
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_run_file_that_cannot_be_written_is_a_sentence(tmp_path):
    """Fault: a run begins whose --resume would be refused, or ends in a traceback."""
    run_file = RunFile(tmp_path / "gone" / "out.jsonl", Config(), {"name": "in.jsonl"}, "", Disk())
    with pytest.raises(UsageError, match="out.jsonl.run.json cannot be written: No such file or directory; choose"):
        run_file.write()


def test_the_identity_is_of_both_ends_of_each_file(tmp_path):
    """Fault: another input continues where this one stopped: files cut elsewhere, or another last line; or all of a
    terabyte is read before the first answer."""

    def identity(*contents):
        names = tuple(str(tmp_path / f"{number}.jsonl") for number in range(len(contents)))
        for name, data in zip(names, contents, strict=True):
            Path(name).write_bytes(data)
        return input_identity(Inputs(names, names))["xxh3_of_ends"]

    assert identity(b"ab", b"c") != identity(b"a", b"bc") and identity(b"aa", b"a") != identity(b"a", b"aa")
    middle, long = 3 << 19, bytes(3 << 20)
    changed = {place: long[:place] + b"x" + long[place + 1 :] for place in (0, 700_000, middle, len(long) - 1)}
    assert len({identity(data) for data in (long, *changed.values())}) == 4, "its middle is not read"
    assert identity(changed[middle]) == identity(long)
    assert identity(changed[700_000], b"y") == identity(long, b"y"), "of two files, half as much of each"
