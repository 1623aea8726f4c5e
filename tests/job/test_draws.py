"""What a drawn answer depends on: a line's seed, or its id or content; never on where it stands."""

from __future__ import annotations

import io
import json
import random
import sys

import pytest

from apcbatch import Request
from apcbatch.engine.sampler import request_key
from apcbatch.job.feed import EqualLines
from apcbatch.job.runfile import DRAWS
from apcbatch.llm import LLM
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import batch_line
from tests.job.fakes import FakeEngine

OPTIONS = ("--max-tokens", 4, "--temperature", 1, "-q", "--progress", "none")


def without_id(number, **fields):
    return {"messages": conversation(number)["messages"], **fields}


def named(number, **fields):
    """A line of any format, with an id, a seed of its own or neither. Its note says which line it is."""
    note = {"note": f"line {number}", **fields}
    said = [{"from": "human", "value": f"Say {number}."}, {"from": "gpt", "value": "1"}]
    kinds = [
        lambda: conversation(number) | note,
        lambda: without_id(number, **note),
        lambda: {"id": number, "conversations": said, **note},
        lambda: {"conversations": said, **note},
        lambda: batch_line(f"b-{number}", metadata=note, **fields),
        lambda: without_id(number, seed=number % 3, **note),
    ]
    return kinds[number % len(kinds)]()


def drawn(path, lines):
    """What each request was answered, by its line's content and its turn."""
    found = {}
    for record in read_records(path):
        key = json.dumps(lines[record["line"] - 1], sort_keys=True), record["turn"]
        assert key not in found and record["error"] is None, record
        found[key] = record["apcbatch"]["completion_token_ids"]
    return found


@pytest.fixture
def answered(apcbatch, tmp_path):
    """Runs lines, and gives (their answers by content and turn, stderr)."""

    def run(lines, *options, out="out.jsonl"):
        write_lines(tmp_path / "in.jsonl", lines)
        done = apcbatch("run", "in.jsonl", "-o", out, *OPTIONS, "--overwrite", *options)
        assert done.code == 0, done.stderr
        return drawn(tmp_path / out, lines), done.stderr

    return run


def test_draws_do_not_depend_on_where_a_line_stands(answered, apcbatch, tmp_path):
    """Fault: a line on top, another order, several files, --limit or --turns last draw all answers anew."""
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
    lines = [named(number) for number in source.sample(range(40), 18)]
    whole, _ = answered(lines)
    other = [named(99), *source.sample(lines, len(lines))]
    moved, _ = answered(other)
    assert {key: moved[key] for key in whole} == whole, f"seed {seed}"
    last, _ = answered(other, "--turns", "last")
    assert {key: whole[key] for key in last.keys() & whole.keys()} == {
        key: last[key] for key in last.keys() & whole.keys()
    }, f"seed {seed}"
    assert last.keys() & whole.keys(), f"seed {seed}"
    assert answered(other, "--limit", 5)[0].items() <= moved.items(), f"seed {seed}"
    assert answered(lines, "--seed", 1)[0] != whole, f"seed {seed}"
    write_lines(tmp_path / "a.jsonl", other[:7])
    write_lines(tmp_path / "b.jsonl", other[7:])
    assert apcbatch("run", "a.jsonl", "b.jsonl", "-o", "two.jsonl", *OPTIONS).code == 0
    assert drawn(tmp_path / "two.jsonl", other) == moved, f"seed {seed}"
    reordered = [dict(reversed(line.items())) for line in lines]
    assert answered(reordered)[0] == whole, f"seed {seed}"


def test_a_seed_of_its_own_is_all_that_names_the_draws(answered):
    """Fault: the same body under another id answers otherwise; the run's --seed moves a line that has its own; turns
    draw alike."""
    seeds = {"a": {"seed": 7}, "b": {"seed": 7}, "c": {"seed": 8}, "d": {}, "e": {}}
    lines = [batch_line(name, **seed) for name, seed in seeds.items()]
    first, _ = answered(lines)
    a, b, c, d, e = first.values()
    assert a == b and len({tuple(one) for one in (a, c, d, e)}) == 4
    second, _ = answered(lines, "--seed", 5)
    assert [one == other for one, other in zip(first.values(), second.values(), strict=True)] == [
        True, True, True, False, False,
    ]  # fmt: skip
    twice = without_id(1, seed=7)
    turns, told = answered([twice | {"id": "x"}, twice | {"note": "x"}])
    assert "equals an earlier" not in told
    one, two, other_one, other_two = turns.values()
    assert (one, two) == (other_one, other_two) and one != two


def test_equal_lines_draw_one_after_the_other(answered, apcbatch, tmp_path):
    """Fault: equal lines without an id give one answer many times, in silence; the key order or an id in another line
    changes which is which."""
    line = without_id(1)
    lines = [line, without_id(2), dict(reversed(line.items())), named(12), line, line]
    write_lines(tmp_path / "in.jsonl", lines)
    done = apcbatch("run", "in.jsonl", "-o", "whole.jsonl", *OPTIONS)
    assert done.code == 0 and done.stderr.count("line 3 equals an earlier one") == 1 and '"n"' in done.stderr
    assert done.stderr.count("equals an earlier") == 1
    whole = {(one["line"], one["turn"]): one["apcbatch"]["completion_token_ids"]
             for one in read_records(tmp_path / "whole.jsonl")}  # fmt: skip
    equal = [whole[number, turn] for number in (1, 3, 5, 6) for turn in (1, 2)]
    assert len({tuple(tokens) for tokens in equal}) == 8


def test_only_lines_without_an_id_are_digested_and_drawn_ones_warned_of(answered, apcbatch, tmp_path, monkeypatch):
    """Fault: equal greedy lines, or equal lines with a seed, are warned of; or lines with an id pay for a digest of
    their content."""
    line = without_id(1)
    write_lines(tmp_path / "in.jsonl", [without_id(2, temperature=0)] * 2 + [without_id(3, seed=1)] * 2)
    assert "equals" not in apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS).stderr
    write_lines(tmp_path / "in.jsonl", [line, line])
    assert "equals" not in apcbatch("run", "in.jsonl", "-o", "0.jsonl", *OPTIONS, "--temperature", 0).stderr
    monkeypatch.setattr(EqualLines, "add", lambda self, record, digest: pytest.fail("digested"))
    answered([conversation(1), conversation(2)])


def of_an_earlier_version(out):
    """Make an OUT one of the rule that came before: its run file names none."""
    path = out.with_name(out.name + ".run.json")
    facts = json.loads(path.read_text())
    assert facts.pop("draws") == DRAWS
    path.write_text(json.dumps(facts))
    return path


@pytest.mark.parametrize("turns", ["each", "rollout"])
def test_drawn_answers_of_the_earlier_rule_are_not_added_to(apcbatch, tmp_path, turns):
    """Fault: --resume mixes answers that were drawn by a request's number with those drawn by its line; or a greedy
    OUT of an earlier version cannot be finished."""
    greedy = [conversation(number) for number in range(4)]
    write_lines(tmp_path / "in.jsonl", [*greedy, conversation(4) | {"temperature": 0.5}])
    out, options = tmp_path / "out.jsonl", ("--max-tokens", 4, "-q", "--turns", turns)
    assert apcbatch("run", "in.jsonl", "-o", "whole.jsonl", *options).code == 0
    whole = {(one["line"], one["turn"]): one["response"]["body"]["choices"]
             for one in read_records(tmp_path / "whole.jsonl")}  # fmt: skip
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *options).code == 0
    path = of_an_earlier_version(out)
    before = out.read_bytes(), path.read_bytes()
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *options, "--resume")
    assert done.code == 2 and "line 5 (turn 1) has a drawn answer in" in done.stderr, done.stderr
    assert "-o" in done.stderr and "--overwrite" in done.stderr and (out.read_bytes(), path.read_bytes()) == before
    unreached = [line for line in out.read_bytes().splitlines(keepends=True) if b'"line":5,"turn":1' not in line]
    out.write_bytes(b"".join(unreached))
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *options, "--resume")
    assert done.code == 2 and "line 5 (turn 2) has a drawn answer in" in done.stderr, done.stderr
    lines = [line for line in out.read_bytes().splitlines(keepends=True) if b'"line":5' not in line]
    out.write_bytes(b"".join(lines[:5]))
    for _ in range(2):
        done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *options, "--resume")
        assert done.code == 0, done.stderr
    found = {(one["line"], one["turn"]): one["response"]["body"]["choices"] for one in read_records(out)}
    assert found == whole and json.loads(path.read_text())["draws"] == DRAWS


def test_a_stream_keeps_the_rule_that_its_out_was_begun_with(apcbatch, tmp_path, monkeypatch):
    """Fault: standard input cannot be compared before the run, so the run file already names the new rule when the
    first drawn answer of the old one comes, and the next --resume lets it pass."""
    lines = [conversation(0), conversation(1) | {"temperature": 1}]
    text = write_lines(tmp_path / "in.jsonl", lines).read_bytes()

    def piped(*options):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        return apcbatch("run", "-", "-o", "out.jsonl", "--max-tokens", 3, "-q", *options)

    assert piped().code == 0
    of_an_earlier_version(tmp_path / "out.jsonl")
    for _ in range(2):
        done = piped("--resume")
        assert done.code == 2 and "line 2 (turn 1) has a drawn answer in" in done.stderr, done.stderr


def test_an_id_is_not_taken_for_another_answer():
    """Fault: the second answer of "a" draws as the first of an id with a null character."""
    [first, second] = [json.dumps([1, name]) for name in ("a", "a\0" + "1")]
    request = Request("apc-000000", (), random_stream=first)
    assert request_key(request, 1) != request_key(Request("apc-000000", (), random_stream=second))
    assert request_key(Request("x", ())) == request_key(Request("y", (), random_stream="x"))


def test_calls_of_a_program_draw_by_the_same_rule(engines, monkeypatch):
    """Fault: a conversation in Python draws by its place among the others; equal calls differ, or seeds do not."""
    monkeypatch.setattr("apcbatch.llm.make_engine", lambda config, warn: FakeEngine(config, warn))
    told: list[str] = []
    with LLM(temperature=1.0, max_tokens=4, warn=told.append) as llm:
        asked = [{"role": "user", "content": "Say a number."}]
        assert llm.chat(asked).token_ids == llm.chat(asked).token_ids != llm.chat(asked, seed=3).token_ids
        many = [conversation(number)["messages"] for number in range(4)] + [conversation(9)]
        first = {one.line: one.token_ids for one in llm.run(many)}
        second = {len(many) + 1 - one.line: one.token_ids for one in llm.run(many[::-1])}
        assert first == second
        one, two = (answer.token_ids for answer in llm.run([asked, asked]))
        assert one != two and sum("equals an earlier one" in sentence for sentence in told) == 1
