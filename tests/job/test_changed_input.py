"""Continuing with an INPUT that was corrected, grown, cut or put into another order since OUT was begun."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from apcbatch.job import input_changes, request
from apcbatch.job.disk import Disk
from apcbatch.job.record import request_digests
from apcbatch.job.sink import FileSink
from tests.chats import conversation, read_records, write_lines

RUN = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 3, "--progress", "none")
BAD = {"id": "bad", "messages": "none"}
LINES = [conversation(0), conversation(1), conversation(2), BAD, *(conversation(number) for number in (4, 5, 6))]
A, B = conversation(77), conversation(78)


class Killed(BaseException):
    """The process ends here."""


def edited(line, turn=0):
    """The line with other words in one of its questions."""
    copy = json.loads(json.dumps(line))
    copy["messages"][1 + 2 * turn]["content"] += " Be exact."
    return copy


# name -> the new lines; lines corrected, new, gone; lines whose records leave OUT; lines whose answers stay without one
EDITS = {
    "insert": ([A, *LINES[:5], B, *LINES[5:]], (0, 2, 0), (), ()),
    "delete": (LINES[:1] + LINES[2:], (0, 0, 1), (), (2,)),
    "delete the bad line": (LINES[:3] + LINES[4:], (0, 0, 1), (4,), ()),
    "edit": ([*LINES[:2], edited(LINES[2]), *LINES[3:6], edited(LINES[6])], (2, 0, 0), (3, 7), ()),
    "correct the bad line": ([*LINES[:3], A | {"id": "bad"}, *LINES[4:]], (1, 0, 0), (4,), ()),
    "break a line": ([*LINES[:2], LINES[2] | {"messages": 3}, *LINES[3:]], (1, 0, 0), (3,), ()),
    "append": ([*LINES, A], (0, 1, 0), (), ()),
    "reorder": (LINES[::-1], (0, 0, 0), (), ()),
    "re-serialise": ([dict(reversed(line.items())) for line in LINES], (0, 0, 0), (), ()),
    "insert and edit": ([A, *LINES[:2], edited(LINES[2]), *LINES[3:]], (1, 1, 0), (3,), ()),
    "swap, edit, delete": ([*LINES[2:4], edited(LINES[0]), *LINES[4:6], A], (1, 1, 2), (1,), (2, 7)),
}
MIXED = "swap, edit, delete"  # without ids it is not told which of the lines that are gone was edited
CASES = [(edit, kind, ()) for edit in EDITS for kind in ("ids", "no ids") if kind == "ids" or edit != MIXED]
OPTIONS = (("--ordered",), ("--temperature", 0.8), ("--turns", "rollout"), ("--turns", "last"), ("-o", "out.jsonl.gz"))
CASES += [(edit, "ids", options) for edit in ("insert", MIXED) for options in OPTIONS]
CASES += [(edit, "no ids", options) for edit in ("insert", "reorder", "edit") for options in OPTIONS[:2]]


def write(path: Path, lines, kind, spelling=None):
    named = [{key: one[key] for key in one if kind == "ids" or key != "id"} for one in lines]
    return write_lines(path, [json.dumps(one, separators=spelling) for one in named])


def told(record):
    """What a request is answered or refused, without its number and line."""
    origin = record["apcbatch"]
    return record["turn"] or 0, (record["error"] or {}).get("code", ""), str(origin.get("completion_token_ids"))


def plain(out):
    """The file of plain lines that a run appends to."""
    return out.with_name(out.name + ".part") if out.suffix == ".gz" else out


def lines_of(out):
    part = plain(out)
    data = part.read_bytes() if part.exists() else gzip.decompress(out.read_bytes())
    return data.splitlines(keepends=True)


def kill(patch, at, out):
    """End the process at the rename of OUT (or behind it), or before the line with a number is appended."""
    left, rename, append = [at], Disk.rename, FileSink.append

    def renamed(self, source, target):
        if os.path.basename(target) == out.name and at == "before":
            raise Killed
        rename(self, source, target)
        if os.path.basename(target) == out.name and at == "behind":
            raise Killed

    def appended(self, line):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        append(self, line)

    patch.setattr(Disk, "rename", renamed)
    if not isinstance(at, str):
        patch.setattr(FileSink, "append", appended)


def release(out):
    """Close what this process still has open of OUT, with its lock, as the end of a process does."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(int(fd)), out.stat()):
                os.close(int(fd))


@pytest.mark.drawn(12)
@pytest.mark.slow
@pytest.mark.parametrize(("edit", "kind", "options"), CASES)
def test_what_changed_is_computed_and_the_rest_stays(apcbatch, tmp_path, edit, kind, options):
    """Fault: a corrected or grown INPUT is refused, an answer of it is computed again or written anew, one of the old
    content stays beside the new one, an id is there twice, or a kill at some moment leaves both or neither."""
    lines, counts, left, without_line = EDITS[edit]
    run = (*RUN, *options)
    out, run_file = tmp_path / "out.jsonl", tmp_path / "out.jsonl.run.json"
    if "-o" in options:
        out, run_file = tmp_path / "out.jsonl.gz", tmp_path / "out.jsonl.gz.run.json"
    changes = "INPUT has changed: {} line{s} corrected, {} new, {} gone".format(*counts, s="s" * (counts[0] != 1))
    changes = changes if any(counts) else "INPUT has changed: no line is corrected, new or gone"
    write(tmp_path / "in.jsonl", LINES, kind)
    assert apcbatch(*run).code == 3
    before = out.read_bytes(), run_file.read_bytes()
    records = {line: json.loads(line) for line in lines_of(out)}
    kept = {line for line, one in records.items() if one["line"] not in left}
    orphans = [one for one in records.values() if one["line"] in without_line]
    write(tmp_path / "in.jsonl", lines, kind, (" , ", " : "))
    code = apcbatch(*run, "-o", "fresh.jsonl").code
    fresh = read_records(tmp_path / "fresh.jsonl")
    computed = len(fresh) + len(orphans) - len(kept)
    for at in ("before", "behind", 0, computed // 2, computed):
        out.write_bytes(before[0])
        run_file.write_bytes(before[1])
        with pytest.MonkeyPatch.context() as patch:
            kill(patch, at, plain(out))
            try:
                done = apcbatch(*run, "--resume")
                assert changes in done.stderr and done.summary["requests"] == computed, done.stderr
            except Killed:
                done = None
        if done is None:
            release(plain(out))
            there = set(lines_of(out))
            assert kept <= there and (there.isdisjoint(set(records) - kept) or there == set(records)), at
            done = apcbatch(*run, "--resume")
        assert (done.code, done.summary["answers_without_line"]) == (code, len(orphans)), done.stderr
        there = lines_of(out)
        found = list(map(json.loads, there))
        assert kept <= set(there) and sorted(map(told, found)) == sorted(map(told, fresh + orphans)), at
        assert "--ordered" not in options or list(map(told, found)) == list(map(told, fresh + orphans))
        for name in ("id", "custom_id"):
            assert len({one[name] for one in found}) == len(found), sorted(one[name] for one in found)
        again = apcbatch(*run, "--resume")
        assert (again.code, again.summary["requests"]) == (code, 0) and "INPUT has" not in again.stderr, again.stderr
        assert lines_of(out) == there


def test_more_moves_than_are_listed_are_compared_again(apcbatch, tmp_path, monkeypatch):
    """Fault: a run file of any size, or an answer computed again whose move it does not list."""
    monkeypatch.setattr(input_changes, "MOST_MOVED", 1)
    write(tmp_path / "in.jsonl", LINES, "no ids")
    assert apcbatch(*RUN).code == 3
    write(tmp_path / "in.jsonl", LINES[::-1], "no ids")
    assert [apcbatch(*RUN, "--resume").summary["requests"] for _ in range(2)] == [0, 0]


def test_a_changed_turn_of_a_rollout_takes_the_later_ones_out(apcbatch, tmp_path):
    """Fault: a turn stands on an answer that is not there any more, or an unchanged first turn is computed again."""
    run = (*RUN, "--turns", "rollout", "--ordered")
    lines = [conversation(number, turns=3) for number in range(3)]
    write_lines(tmp_path / "in.jsonl", lines)
    assert apcbatch(*run).code == 0
    before = lines_of(tmp_path / "out.jsonl")
    write_lines(tmp_path / "in.jsonl", [lines[0], edited(lines[1], turn=1), lines[2]])
    done = apcbatch(*run, "--resume")
    assert done.code == 0 and done.summary["requests"] == 2 and "1 line corrected, 0 new, 0 gone" in done.stderr
    apcbatch(*run, "-o", "fresh.jsonl")
    after, fresh = lines_of(tmp_path / "out.jsonl"), read_records(tmp_path / "fresh.jsonl")
    assert list(map(told, map(json.loads, after))) == list(map(told, fresh))
    assert [one == other for one, other in zip(before, after, strict=True)] == [True] * 4 + [False] * 2 + [True] * 3


@pytest.mark.parametrize("turns", ["each", "last"])
def test_a_line_with_more_or_fewer_turns_is_corrected(apcbatch, tmp_path, turns):
    """Fault: the answer to a turn that the line has no more, or asks for no more, stays beside those of its turns."""
    run = (*RUN, "--turns", turns)
    write_lines(tmp_path / "in.jsonl", [conversation(0, turns=3), conversation(1, turns=2), conversation(2)])
    assert apcbatch(*run).code == 0
    write_lines(tmp_path / "in.jsonl", [conversation(0, turns=2), conversation(1, turns=3), conversation(2)])
    done = apcbatch(*run, "--resume")
    assert done.code == 0 and done.summary["answers_without_line"] == 0
    apcbatch(*run, "-o", "fresh.jsonl")
    found, fresh = (read_records(tmp_path / name) for name in ("out.jsonl", "fresh.jsonl"))
    assert sorted(one["custom_id"] for one in found) == sorted(one["custom_id"] for one in fresh)
    assert done.summary["requests"] == (1 if turns == "each" else 2)


@pytest.mark.parametrize("has_ids", [True, False])
def test_another_input_is_no_correction(apcbatch, tmp_path, has_ids):
    """Fault: a wrong file with the same ids, or with as many lines, costs all answers. One answer, or errors alone, may
    be corrected."""

    def write_texts(*texts):
        ids = [{"id": f"a{number}"} if has_ids else {} for number in range(len(texts))]
        messages = [[] if text is None else [{"role": "user", "content": text}] for text in texts]
        write_lines(tmp_path / "in.jsonl", [own | {"messages": one} for own, one in zip(ids, messages, strict=True)])

    out = tmp_path / "out.jsonl"
    write_texts("one", "two", "three")
    assert apcbatch(*RUN).code == 0
    before = out.read_bytes()
    write_texts("four", "five", "six")
    done = apcbatch(*RUN, "--resume")
    assert done.code == 2 and "no line of in.jsonl is as it was" in done.stderr and "--overwrite" in done.stderr
    assert out.read_bytes() == before
    for earlier, later in ((["one"], ["two"]), ([None, None], ["one", "two"])):
        write_texts(*earlier)
        apcbatch(*RUN, "--overwrite")
        write_texts(*later)
        assert apcbatch(*RUN, "--resume").summary["ok"] == len(later)


def test_a_limit_asks_for_fewer_lines_of_a_changed_input(apcbatch, tmp_path):
    """Fault: an answer whose line moved behind the limit counts as gone, or leaves OUT; or more is computed."""
    lines = [conversation(number) for number in range(5)]
    write_lines(tmp_path / "in.jsonl", [{"messages": line["messages"]} for line in lines])
    assert apcbatch(*RUN, "--limit", 3).code == 0
    before = set(lines_of(tmp_path / "out.jsonl"))
    changed = [A, *lines[:2], B, *lines[2:]]
    write_lines(tmp_path / "in.jsonl", [{"messages": line["messages"]} for line in changed])
    done = apcbatch(*RUN, "--limit", 4, "--resume")
    assert "0 lines corrected, 4 new, 0 gone" in done.stderr, done.stderr
    assert (done.summary["requests"], done.summary["answers_without_line"]) == (4, 0)
    assert before < set(lines_of(tmp_path / "out.jsonl"))
    assert apcbatch(*RUN, "--resume").summary["requests"] == 4


def test_errors_are_retried_in_a_changed_input(apcbatch, tmp_path, monkeypatch):
    """Fault: --retry-errors counts on the lines of the earlier input, or drops another line's record."""
    monkeypatch.setenv("FAKE_FAIL_ONCE", str(tmp_path / "healthy"))
    write(tmp_path / "in.jsonl", LINES, "ids")
    assert apcbatch(*RUN).code == 3
    failed = [one for one in read_records(tmp_path / "out.jsonl") if one["error"] and one["error"]["retryable"]]
    assert failed
    (tmp_path / "healthy").touch()
    write(tmp_path / "in.jsonl", [A, *LINES], "ids")
    done = apcbatch(*RUN, "--resume", "--retry-errors")
    assert done.summary["requests"] == len(failed) + 2
    apcbatch(*RUN, "-o", "fresh.jsonl")
    found, fresh = (read_records(tmp_path / name) for name in ("out.jsonl", "fresh.jsonl"))
    assert sorted(map(told, found)) == sorted(map(told, fresh))


def test_the_run_file_says_which_lines_moved(apcbatch, tmp_path):
    """Fault: a record's line is that of an earlier INPUT, and nothing says where it stands now; or a second change
    counts from the first INPUT."""
    lines = [{"messages": line["messages"]} for line in (*LINES[:3], *LINES[4:])]
    extra = [{"messages": line["messages"]} for line in (A, B)]
    now = [*lines]
    for number, (place, added) in enumerate(((0, extra[0]), (3, extra[1]))):
        write_lines(tmp_path / "in.jsonl", now)
        assert apcbatch(*RUN, *["--resume"] * number).code == 0
        now.insert(place, added)
    write_lines(tmp_path / "in.jsonl", now)
    assert apcbatch(*RUN, "--resume").summary["requests"] == 2
    now[4] = {"messages": edited(now[4])["messages"]}  # a line of the first input, moved twice
    write_lines(tmp_path / "in.jsonl", now)
    done = apcbatch(*RUN, "--resume")
    assert "1 line corrected, 0 new, 0 gone" in done.stderr and done.summary["requests"] == 2, done.stderr
    facts = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    found = {}
    for one in read_records(tmp_path / "out.jsonl"):
        number = int(one["id"].removeprefix("apc-"))
        shift = sum(distance for first, last, distance in facts["moved"] if first <= number <= last)
        found.setdefault(one["line"] + shift, set()).add(one["apcbatch"]["line_key"].partition(":")[0])
    assert sorted(found) == list(range(1, 9)) and all(len(keys) == 1 for keys in found.values())
    assert facts["moved"] == [[0, 3, 1], [6, 11, 2]], "neighbours are one stretch"
    assert len(facts["earlier_inputs"]) == 3


def test_equal_lines_without_an_id_are_told_apart_by_their_order(apcbatch, tmp_path):
    """Fault: one more equal line makes the answers of the others those of other draws."""
    line = {"messages": conversation(1)["messages"]}
    run = (*RUN, "--temperature", 1)
    write_lines(tmp_path / "in.jsonl", [line, line])
    assert apcbatch(*run).code == 0
    before = set(lines_of(tmp_path / "out.jsonl"))
    write_lines(tmp_path / "in.jsonl", [A, line, line, line])
    assert apcbatch(*run, "--resume").summary["requests"] == 4
    assert before < set(lines_of(tmp_path / "out.jsonl"))
    apcbatch(*run, "-o", "fresh.jsonl")
    found, fresh = (read_records(tmp_path / name) for name in ("out.jsonl", "fresh.jsonl"))
    assert sorted(map(told, found)) == sorted(map(told, fresh))


@pytest.mark.parametrize("kind", ["ids", "no ids"])
@pytest.mark.parametrize("turns", ["each", "rollout"])
def test_an_out_of_an_earlier_version_is_matched_by_prompt_and_settings(apcbatch, tmp_path, monkeypatch, kind, turns):
    """Fault: an OUT whose digests cover number and name is computed again, or its lines without an id are taken for
    others."""
    run = (*RUN, "--turns", turns)
    write(tmp_path / "in.jsonl", LINES, kind)
    signed = request._signed

    def signed_as_before(ticket, prompt, *settings):
        made = signed(ticket, prompt, *settings)
        names = ticket.request_id, ticket.custom_id
        return replace(made, request_digest=request_digests(made, prompt.token_ids, *names)[1])

    with monkeypatch.context() as patch:
        patch.setattr(request, "_signed", signed_as_before)
        assert apcbatch(*run).code == 3
    records = read_records(tmp_path / "out.jsonl")
    for one in records:
        del one["apcbatch"]["line_key"]
    write_lines(tmp_path / "out.jsonl", records)
    before = lines_of(tmp_path / "out.jsonl")
    write(tmp_path / "in.jsonl", [*LINES, A], kind, (" , ", " : "))
    done = apcbatch(*run, "--resume")
    assert done.code == 3 and done.summary["requests"] == 2 + 1, "the error is not known by its prompt"
    answered = [one for one in before if json.loads(one)["error"] is None]
    assert answered == lines_of(tmp_path / "out.jsonl")[: len(answered)]
    write(tmp_path / "in.jsonl", [B, *LINES, A], kind)
    done = apcbatch(*run, "--resume")
    if kind == "ids":
        assert done.code == 3 and done.summary["requests"] == 2, done.stderr
    else:
        assert done.code == 2 and "line 1 (turn 1) of the input is not the one" in done.stderr, done.stderr
        assert "which knows a line without an id by its number alone" in done.stderr


def test_without_room_for_a_second_out_nothing_is_lost(apcbatch, tmp_path, monkeypatch):
    """Fault: a full disk, as OUT is rewritten without a corrected line's answers, takes answers or ends in a
    traceback."""
    write(tmp_path / "in.jsonl", LINES, "ids")
    assert apcbatch(*RUN).code == 3
    before = (tmp_path / "out.jsonl").read_bytes()
    write(tmp_path / "in.jsonl", EDITS["edit"][0], "ids")

    def full(self, fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "write", full)
        done = apcbatch(*RUN, "--resume")
    assert done.code == 1 and "out.jsonl cannot be rewritten: No space left on device" in done.stderr, done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert apcbatch(*RUN, "--resume").summary["requests"] == 4
