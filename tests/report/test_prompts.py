"""Prompts in a report: those that the run had, of the input that it had, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.data.input.inputs import Inputs, find_inputs
from apcbatch.data.input.records import parse_record
from apcbatch.errors import UsageError
from apcbatch.job.inspection import inspect
from apcbatch.job.out_file import find_out
from apcbatch.report.panels import read_run
from apcbatch.report.prompts import PromptReader, _said, _Source, _text
from apcbatch.report.report_file import make_document
from apcbatch.report.texts import ELLIPSIS, shortened_prompt
from apcbatch.resolution import resolve
from apcbatch.types import Request
from tests.chats import conversation, read_records, write_lines
from tests.conftest import SHARED_DATA
from tests.job.conftest import Outcome
from tests.report.conftest import EXAMPLES

Command = Callable[..., Outcome]


def rows_with_prompts(out: Path, *inputs: Path, warned: list[str] | None = None) -> dict[str, Any]:
    reader = PromptReader(find_inputs([str(one) for one in inputs]), "demo", (warned or []).append)
    return make_document([find_out(str(out))], prompts=reader)["runs"][0]["requests"]


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("source", ["examples", pytest.param("taskmaster4", marks=pytest.mark.data)])
def test_they_are_the_conversations_of_the_requests(source: str, apcbatch: Command, tmp_path: Path) -> None:
    """Fault: the prompt beside an answer is of another turn or another line, or it is the template's text and not a
    conversation."""
    data = EXAMPLES if source == "examples" else SHARED_DATA / f"{source}.jsonl"
    done = apcbatch("run", data, "-o", "out.jsonl", "--limit", 5, "--max-tokens", 2, "--policy", "all", "-q")
    assert done.code in (0, 3)
    table = rows_with_prompts(tmp_path / "out.jsonl", data)
    config = resolve({}, {}, {}, "")
    rows = [row for row, error in enumerate(table["error"]) if not error]
    for row in random.sample(rows, 4):
        shown = inspect(config, find_inputs([str(data)]), table["line"][row], table["turn"][row], print)
        messages = [one for one in table["prompt_text"][row] if one[0] not in ("tools", ELLIPSIS)]
        assert shown.text is not None
        recorded = json.loads(data.read_text().splitlines()[table["line"][row] - 1])["messages"]
        ends = [at for at, one in enumerate(recorded) if one["role"] == "assistant"] + [len(recorded)]
        before = recorded[: ends[table["turn"][row] - 1]]
        assert [one["role"] for one in before][len(before) - len(messages) + 1 :] == [role for role, _ in messages][1:]
        last = [line for line in messages[-1][1].split(ELLIPSIS)[-1].splitlines() if line]
        assert all(line in shown.text for line in last if not before[-1].get("tool_calls"))
        assert str(before[-1]["content"] or "").endswith(last[-1])


def test_a_completion_is_its_text(apcbatch: Command, tmp_path: Path) -> None:
    """Fault: a prompt without messages is shown as a conversation of none."""
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    write_lines(tmp_path / "in.jsonl", [line])
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--policy", "all", "-q").code == 0
    assert rows_with_prompts(tmp_path / "out.jsonl", tmp_path / "in.jsonl")["prompt_text"] == ["Once upon a time"]


def test_a_long_conversation_keeps_its_first_and_its_last_messages() -> None:
    """Fault: a shortened prompt has lost what was asked last, or is longer than the limit."""
    assert len(shortened_prompt([["user", ""]] * 50, 8)) == 10, "one that says nothing takes room too"
    draw = random.Random(seed := random.randrange(1 << 30))
    for _ in range(300):
        prompt = [["user", "x" * draw.choice((0, 3, 40, 900))] for _ in range(draw.randint(1, 9))]
        limit = draw.choice((0, 1, 8, 60, 500, 5000))
        kept = shortened_prompt(prompt, limit)
        assert sum(len(text) for _, text in kept) <= limit + len(prompt), f"seed {seed}"
        assert kept == prompt or limit < sum(max(1, len(text)) for _, text in prompt), f"seed {seed}"
        assert kept[0][0] == "user" and len(kept) <= len(prompt), f"seed {seed}"


def test_another_input_is_refused(apcbatch: Command, tmp_path: Path) -> None:
    """Fault: prompts of a file that was changed stand beside answers to what it said before."""
    lines = EXAMPLES.read_text().splitlines()[:4]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2, "--policy", "all", "-q")
    whole = (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "copy.jsonl").write_bytes(whole)
    assert apcbatch("report", "out.jsonl", "--prompts", "copy.jsonl", "-o", "r.html").code == 0
    for other in (whole.replace(b"the", b"teh"), whole + b"\n", whole[:-1]):
        (tmp_path / "in.jsonl").write_bytes(other)
        done = apcbatch("report", "out.jsonl", "--prompts", "in.jsonl", "-o", "other.html")
        assert done.code == 2 and "is not the input of out.jsonl" in done.stderr
        assert f"had {len(whole):,} bytes (it has {len(other):,} bytes)" in done.stderr
    facts = json.loads((run_file := tmp_path / "out.jsonl.run.json").read_text())
    facts["config"] |= {"an_option_of_a_later_version": 1}
    facts["input"] |= {"size_bytes": None, "xxh3_of_ends": None, "name": "user/data/one"}  # as of a dataset of the Hub
    run_file.write_text(json.dumps(facts))
    run = read_run(find_out(str(tmp_path / "out.jsonl")))
    for name, is_refused in (("user/data/one", False), ("user/data/two", True)):
        reader = PromptReader(Inputs((name,), (name,)), "demo", warn=print)
        with pytest.raises(UsageError, match="had no size") if is_refused else nullcontext():
            reader._config(run)
    assert not (tmp_path / "other.html").exists()


def test_an_out_that_was_put_together_of_two(apcbatch: Command, tmp_path: Path) -> None:
    """Fault: records that are there twice end in a traceback, or the second ones have no prompt."""
    (tmp_path / "in.jsonl").write_text("\n".join(EXAMPLES.read_text().splitlines()[:3]) + "\n")
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2, "--policy", "all", "-q")
    once = rows_with_prompts(tmp_path / "out.jsonl", tmp_path / "in.jsonl")["prompt_text"]
    (tmp_path / "out.jsonl").write_bytes(2 * (tmp_path / "out.jsonl").read_bytes())
    assert rows_with_prompts(tmp_path / "out.jsonl", tmp_path / "in.jsonl")["prompt_text"] == once * 2


def test_several_inputs_in_their_order(apcbatch: Command, tmp_path: Path) -> None:
    """Fault: a run over two files cannot be shown with its prompts, or the wrong way round."""
    lines = [json.loads(line) for line in EXAMPLES.read_text().splitlines()[:4]]
    write_lines(tmp_path / "a.jsonl", lines[:2])
    write_lines(tmp_path / "b.jsonl", lines[2:])
    apcbatch("run", "a.jsonl", "b.jsonl", "-o", "out.jsonl", "--max-tokens", 2, "--policy", "all", "-q")
    table = rows_with_prompts(tmp_path / "out.jsonl", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert all(table["prompt_text"])
    done = apcbatch("report", "out.jsonl", "--prompts", "b.jsonl", "--prompts", "a.jsonl")
    assert done.code == 2 and "in the same order" in done.stderr


def test_what_cannot_be_known_is_refused(apcbatch: Command, tmp_path: Path) -> None:
    """Fault: prompts are guessed: without a run file, of a rollout, or with another model's template."""
    (tmp_path / "in.jsonl").write_text("\n".join(EXAMPLES.read_text().splitlines()[:2]) + "\n")
    run = ("run", "in.jsonl", "--max-tokens", 2, "--policy", "all", "-q")
    apcbatch(*run, "-o", "rollout.jsonl", "--turns", "rollout")
    done = apcbatch("report", "rollout.jsonl", "--prompts", "in.jsonl")
    assert done.code == 2 and "--turns rollout" in done.stderr
    apcbatch(*run, "-o", "out.jsonl")
    run_file = tmp_path / "out.jsonl.run.json"
    facts = json.loads(run_file.read_text())
    for other in ("0" * 32, "f" * 32):
        run_file.write_text(json.dumps(facts | {"model_files": other}))
        done = apcbatch("report", "out.jsonl", "--prompts", "in.jsonl")
        assert done.code == 2 and "--model" in done.stderr
    run_file.unlink()
    done = apcbatch("report", "out.jsonl", "--prompts", "in.jsonl")
    assert done.code == 2 and "leave --prompts out" in done.stderr


def test_a_record_of_another_prompt_shows_none(apcbatch: Command, tmp_path: Path) -> None:
    """Fault: a prompt beside an answer that was not made from it."""
    bad = '{"id": "bad", "messages": []}'  # has no prompt; those after it have
    (tmp_path / "in.jsonl").write_text("\n".join([bad, *EXAMPLES.read_text().splitlines()[:3]]) + "\n")
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2, "--policy", "all", "-q")
    records = sorted(read_records(tmp_path / "out.jsonl"), key=lambda record: record["error"] is None)
    chosen = random.randrange(1, len(records))
    records[chosen]["apcbatch"]["request_digest"] = "ab" * 16
    write_lines(tmp_path / "out.jsonl", records)
    warned: list[str] = ["the first"]
    table = rows_with_prompts(tmp_path / "out.jsonl", tmp_path / "in.jsonl", warned=warned)
    assert [row for row, text in enumerate(table["prompt_text"]) if text is None] == [0, chosen]
    assert any(sentence.endswith("are not shown: 1") for sentence in warned)


def test_an_answer_whose_line_moved_has_its_own_prompt(apcbatch: Command, tmp_path: Path) -> None:
    """Fault: after --resume of a changed INPUT a prompt is looked for by its earlier place, and not shown."""
    first, second, third = (conversation(number) for number in range(3))
    run = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2, "--turns", "last", "--policy", "all", "-q")
    shown: list[dict[int, Any]] = []
    for lines in ([second, third], [third, first, second]):
        write_lines(tmp_path / "in.jsonl", lines)
        assert apcbatch(*run, *["--resume"] * len(shown)).code == 0
        table = rows_with_prompts(tmp_path / "out.jsonl", tmp_path / "in.jsonl")
        shown.append(dict(zip(table["id"], table["prompt_text"], strict=True)))
    assert None not in shown[1].values() and len(shown[1]) == 3
    assert shown[0].items() <= shown[1].items()


def test_a_prompt_is_the_messages_before_its_turn() -> None:
    """Fault: a prompt holds the answer that is beside it, or is that of another turn."""
    for score, turns, turn, expected in [
        (False, "each", 1, "U"),
        (False, "each", 3, "UAUAU"),
        (False, "each", None, "UAUAU"),
        (False, "last", 3, "UAUAU"),
        (True, "each", 1, "U"),
        (True, "each", 2, "UAU"),
        (True, "each", None, "UAU"),
        (True, "last", 2, "UAU"),
    ]:
        roles = {"U": "user", "A": "assistant"}
        messages = [{"role": roles[letter], "content": f"{letter}{number}"} for number, letter in enumerate("UAUAU")]
        good: Any = parse_record({"messages": messages, "tools": [{"name": "f"}]}, 1)
        [_] = source = _Source(iter([good]))
        config: Any = SimpleNamespace(score=score, turns=turns)
        told = [[roles[letter], f"{letter}{number}"] for number, letter in enumerate(expected)]
        assert source.history(turn, config) == [["tools", "f"], *told]
        good.tools = None
        assert source.history(turn, config) == told


def test_of_a_long_prompt_the_beginning_and_the_end_are_decoded() -> None:
    """Fault: a prompt of a million tokens is decoded whole, or one without a tokenizer has no text."""
    tokenizer: Any = SimpleNamespace(reads_text=True, decode_all=lambda ids: (len(ids), ids[0], ids[7_999], ids[-1]))
    renderer: Any = SimpleNamespace(tokenizer=tokenizer)
    for count, expected in ((16_000, (16_000, 0, 7_999, 15_999)), (16_001, (16_000, 0, 7_999, 16_000))):
        found: Any = _text(Request("r", list(range(count))), renderer)
        assert found == expected
    tokenizer.reads_text = False
    assert _text(Request("r", [5, 6]), renderer) == "5 6"


def test_a_message_is_its_thought_its_text_and_its_calls() -> None:
    """Fault: a call that the prompt had is left out beside the answer."""
    call = {"function": {"name": "f", "arguments": {"é": 1}}}
    message = {"role": "assistant", "reasoning_content": "why", "content": "so", "tool_calls": [call, call]}
    assert _said(message) == ["assistant", 'why\nso\nf {"é":1}\nf {"é":1}']
    assert _said({"role": "tool", "content": None}) == ["tool", ""]
