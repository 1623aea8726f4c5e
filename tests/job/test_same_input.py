"""Resuming belongs to one input: each answer is bound to what its request was made of."""

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
from apcbatch.job import open
from apcbatch.job.disk import Disk
from apcbatch.job.previous_answers import PreviousAnswers, read_answers
from apcbatch.job.record import Ticket
from apcbatch.job.runfile import RunFile, input_identity
from apcbatch.job.sink import FileSink
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers

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


def padded(number):
    """A long line that costs few tokens: the digests of the file's ends do not reach the middle."""
    return conversation(number, turns=1) | {"note": "x" * (END // 2)}


def test_a_file_changed_in_its_middle_is_refused_with_the_line(apcbatch, tmp_path):
    """Fault: a change between the first and the last MiB, at the same size, is accepted."""
    write_lines(tmp_path / "in.jsonl", [padded(number) for number in range(9)])
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--limit", 6)
    before = (tmp_path / "out.jsonl").read_bytes()
    changed(tmp_path, "Question 0 of conversation 4", "Question 0 of conversation X")
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume")
    assert done.code == 2 and "line 5 (turn 1) of the input is not the one that" in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before, "refused before anything is written"
    changed(tmp_path, "Question 0 of conversation X", "Question 0 of conversation 4")
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume").summary["requests"] == 3


def test_another_content_on_stdin_is_refused_at_its_line(piped, tmp_path):
    """Fault: --resume takes whatever comes on standard input for the rest of the same."""
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


def test_a_stream_is_known_by_its_name(piped, apcbatch, tmp_path):
    """Fault: what comes from one pipe is taken for the rest of what came from another."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(3)])
    assert piped("--limit", 2).code == 0
    run_file = tmp_path / "out.jsonl.run.json"
    run_file.write_text(run_file.read_text().replace('"name": "-"', '"name": "/dev/fd/63"'))
    done = piped("--resume")
    assert done.code == 2 and "input.name  then '/dev/fd/63', now '-'" in done.stderr, done.stderr


def body_line(**body):
    messages = [{"role": "user", "content": "Hi"}]
    return {
        "custom_id": "b",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages} | body,
    }


SETTINGS = [
    (body_line(max_tokens=2), body_line(max_tokens=3)),
    (body_line(temperature=0.5), body_line(temperature=0.6)),
    (body_line(temperature=0.5, seed=1), body_line(temperature=0.5, seed=2)),
    (body_line(top_p=0.5), body_line(top_p=0.6)),
    (body_line(logprobs=True), body_line(logprobs=False)),
    (body_line(), body_line() | {"custom_id": "c"}),
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
@pytest.mark.parametrize(
    ("then", "now", "source"),
    [(*pair, "in.jsonl") for pair in SETTINGS + SHAPES] + [(*pair, "-") for pair in SHAPES],
)
def test_whatever_makes_another_request_is_refused(apcbatch, piped, tmp_path, monkeypatch, then, now, source):
    """Fault: an answer stands for a request with other settings, another name or another number of turns."""

    monkeypatch.setattr(open, "input_identity", lambda name: {"name": "in", "size_bytes": 1})

    def run(line, *options):
        write_lines(tmp_path / "in.jsonl", [line, conversation(5)])
        if source == "-":
            return piped(*options)
        return apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, *options)

    run(then)
    before = (tmp_path / "out.jsonl").read_bytes()
    done = run(now, "--resume")
    assert done.code == 2 and "line 1 " in done.stderr, done.stderr
    assert source == "-" or (tmp_path / "out.jsonl").read_bytes() == before
    assert run(then, "--resume").code in (0, 3), "what was there can still be resumed"


@pytest.mark.parametrize(("then", "now"), [({"messages": []}, conversation(1)), (conversation(1), {"messages": []})])
def test_a_line_of_another_shape_is_refused_before_it_is_answered(piped, tmp_path, then, now):
    """Fault: a stream's line has answers to its turns beside the one to the line as a whole."""
    write_lines(tmp_path / "in.jsonl", [then])
    piped()
    before = (tmp_path / "out.jsonl").read_bytes()
    write_lines(tmp_path / "in.jsonl", [now])
    done = piped("--resume")
    assert done.code == 2 and "line 1 " in done.stderr, done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before


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
    assert done.code == 2 and "line 1 (turn 1) of the input" in done.stderr


def test_an_answered_conversation_is_not_rendered_again(apcbatch, tmp_path, monkeypatch):
    """Fault: going on with the end of a long run renders all of its beginning."""
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


def test_an_input_that_ends_earlier_is_refused(piped, tmp_path):
    """Fault: answers to lines that the input does not have pass for a part of the run."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(3)])
    piped()
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(2)])
    done = piped("--resume")
    assert done.code == 2 and "line 3 (turn 1) of the input" in done.stderr
    assert piped("--resume", "--limit", 2).code == 0, "a smaller limit asks for less"


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
    messages = [{"role": role, "content": "x"} for _ in range(120) for role in ("user", "assistant")]
    write_lines(tmp_path / "in.jsonl", [{"id": "long", "messages": messages}])
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *rollout)
    out = tmp_path / "out.jsonl"
    answered = len([record for record in read_records(out) if not record["error"]])
    assert answered == 120
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[: answered - 1]))
    bound = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 115)
    try:
        done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *rollout, "--resume")
    finally:
        sys.setrecursionlimit(bound)
    assert done.summary["already_done"] == answered - 1 and done.summary["ok"] == 1, done.stderr


def test_a_whole_line_and_its_turns_are_requests_of_their_own():
    """Fault: an answer to a line as a whole stands for its first turn; half of the digests count as both."""
    answers_of_out = PreviousAnswers()
    digests = ({}, {"line_digest": "a"}, {"request_digest": "b"}, {"line_digest": "a", "request_digest": "b"})
    for offset, (turn, origin) in enumerate(zip((None, 1, 2, 3), digests, strict=True)):
        assert answers_of_out.add(offset, {"line": 1, "turn": turn, "error": None, "apcbatch": origin})
    assert (len(answers_of_out), answers_of_out.num_without_digests) == (4, 3)


@pytest.fixture
def indexed(tmp_path):
    """Makes the index of an OUT of these (line, turn)."""
    sinks = []

    def index(*places):
        origin = {"completion_token_ids": [1], "finish_reason": "stop"}
        response = {"body": {"choices": [{"finish_reason": "stop"}]}}
        names = [{"id": f"apc-{line:06d}", "custom_id": f"{line}#{turn}"} for line, turn in places]
        parts = {"response": response, "error": None, "apcbatch": origin}
        lines = [name | {"line": line, "turn": turn} | parts for name, (line, turn) in zip(names, places, strict=True)]
        sinks.append(FileSink(write_lines(tmp_path / "out.jsonl", lines)))
        return read_answers(sinks[-1])

    yield index
    for sink in sinks:
        sink.close()


def test_an_answer_to_a_line_that_the_input_lacks_is_named(indexed):
    """Fault: an answer behind the last line that was read is refused, one before it is not, or another is named."""
    found = indexed((3, 1), (2, 2), (4, 1))
    found.check_all_seen(1, whole=False)
    for last, whole, where in ((2, False, r"2 \(turn 2\)"), (3, False, r"3 \(turn 1\)"), (1, True, r"3 \(turn 1\)")):
        with pytest.raises(UsageError, match=f"^line {where} of the input is not the one that .*out.jsonl answers"):
            found.check_all_seen(last, whole)
    for line, turn in ((3, 1), (2, 2), (4, 1)):
        found.count_unchecked(Ticket(0, line, turn, None, None))
    found.check_all_seen(9, whole=True)


def test_a_turn_is_marked_as_seen_once_and_by_its_own_rule_of_draws(indexed):
    """Fault: a drawn turn of an earlier rule is taken where the turn before it has no answer, or counts twice."""
    found = indexed((1, 2), (1, 3))
    found.same_draw_rule = False
    for turn in (2, 2, 4):
        found.count_unchecked(Ticket(0, 1, turn, None, None))
    assert found.num_seen == 1
    with pytest.raises(UsageError, match=r"line 1 \(turn 3\) has a drawn answer in .*out.jsonl, which an earlier"):
        found.count_unchecked(Ticket(0, 1, 3, None, None, random_stream="x"))
    assert found.num_seen == 1
    found.same_draw_rule = True
    found.count_unchecked(Ticket(0, 1, 3, None, None, random_stream="x"))
    assert found.num_seen == len(found) == 2


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
    lines = [conversation(1, turns=3) | {"id": "x"}, body_line(max_tokens=1) | {"custom_id": "x#2"}]
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
    """Fault: another input goes on where this one stopped: files cut elsewhere, or another last line; or all of a
    terabyte is read before the first answer."""

    def identity(*contents):
        names = tuple(str(tmp_path / f"{number}.jsonl") for number in range(len(contents)))
        for name, data in zip(names, contents, strict=True):
            Path(name).write_bytes(data)
        return input_identity(Inputs(names, names))["xxh3_of_ends"]

    assert identity(b"ab", b"c") != identity(b"a", b"bc")
    middle, long = 3 << 19, bytes(3 << 20)
    changed = {place: long[:place] + b"x" + long[place + 1 :] for place in (0, 700_000, middle, len(long) - 1)}
    assert len({identity(data) for data in (long, *changed.values())}) == 4, "its middle is not read"
    assert identity(changed[middle]) == identity(long)
    assert identity(changed[700_000], b"y") == identity(long, b"y"), "of two files, half as much of each"
