"""`plan`: the input as a prefix tree, and the numbers that `run` then reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from apcbatch.cli.program import main
from apcbatch.data.input.inputs import find_inputs
from apcbatch.model.locate import locate_model
from apcbatch.resolution import load
from apcbatch.tuning.documents import forecast_document
from apcbatch.tuning.occupancy import MemoryForecast, Occupancy, memory_limit
from apcbatch.tuning.prediction import of_policies
from apcbatch.tuning.survey import survey
from apcbatch.tuning.text import forecast_lines
from tests.chats import DROPS_THOUGHTS, conversation, write_lines


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Six conversations of three turns that begin alike."""
    return write_lines(tmp_path / "chats.jsonl", [conversation(number, turns=3) for number in range(6)])


def report(path: Path, **flags: object) -> tuple[list[str], dict]:
    """The lines and the document for an input."""
    config = load({"device": "cpu"} | flags, None, {})
    occupancy = Occupancy(config, "planned", lambda: 9)
    surveyed = survey(config, find_inputs([str(path)]), of_policies(config, [16, 64], occupancy), pytest.fail)
    memory = MemoryForecast(surveyed.memory, occupancy.use(surveyed.forecast, surveyed.footprint), memory_limit(config))
    document = forecast_document(surveyed.forecast, "planned", config, memory)
    return list(forecast_lines(surveyed, config)), document


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "order"), [("all", "auto"), ("last", "auto"), ("planned", "auto"), ("planned", "file")]
)
def test_what_is_planned_is_what_run_reports(
    policy: str, order: str, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: the plan reads, renders or counts the input in another way than the run: it took the order of the tree for
    policies that have no plan, and counted a prompt whose token ids the model does not know."""
    lines = [conversation(number, turns=3) for number in (3, 1, 2, 1, 3)]
    lines[4]["prompt_logprobs"], lines[1]["n"], lines[1]["temperature"] = 0, 3, 1
    for number, line in enumerate(lines):
        line["id"] = f"c{number}"
    body = {"prompt": [5, 6, 1 << 20], "max_tokens": 1}
    lines.append({"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body})
    write_lines(chats, lines)
    common = [str(chats), "--block-size", "16", "--order", order]
    assert main(["plan", *common, "--policy", policy, "--json", str(tmp_path / "plan.json")]) == 0
    capsys.readouterr()
    out = str(tmp_path / "out.jsonl")
    assert main(["run", *common, "--policy", policy, "-o", out, "--max-tokens", "1", "--max-running", "8"]) == 3
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    document = json.loads((tmp_path / "plan.json").read_text())
    candidate = next(one for one in document["candidates"] if one["block_size"] == 16)
    assert candidate["cached_tokens"] > 0
    for name in ("cached_tokens", "computed_tokens", "snapshots_written", "snapshots_read"):
        assert candidate[name] == summary[name], name
    assert document["dataset"]["requests"] == summary["ok"]
    for name in ("prompt_tokens", "unique_tokens", "ideal_hit_rate"):
        assert document["dataset"][name] == summary[name], name


def test_what_cannot_be_answered_is_counted_and_left_out(tmp_path: Path) -> None:
    """Fault: a bad line, a second use of an id or a prompt that is too long is planned as a request."""
    long = conversation(3)
    long["messages"][1]["content"] = "far too long " * 20_000
    path = write_lines(
        tmp_path / "in.jsonl", [conversation(1), "not an object", conversation(1), {"messages": 3}, long]
    )
    lines, document = report(path, max_request_tokens="32768")
    assert document["dataset"]["requests"] == 2
    assert lines[1] == (
        "5 requests cannot be answered or planned: 2 context_length_exceeded, 1 duplicate_id, "
        "1 invalid_json, 1 invalid_request"
    )


def test_an_input_without_requests_is_planned(tmp_path: Path) -> None:
    """Fault: no requests end in a division by zero."""
    lines, document = report(write_lines(tmp_path / "in.jsonl", [conversation(1)]), limit="0")
    assert lines[0].startswith("0 requests on 0 lines: 0 prompt tokens")
    assert [candidate["hit_rate"] for candidate in document["candidates"]] == [0.0, 0.0]


def test_what_limits_the_rate_is_told(tmp_path: Path, chats: Path) -> None:
    """Fault: a user with a low rate is not told whether the grid, the history or the template is the reason; or a plan
    asks for weights."""
    lines, _ = report(chats)
    assert lines[0].startswith("18 requests on 6 lines: ") and not any("memory:" in line for line in lines)
    assert "  the chat template: prefix-stable" in lines
    assert any("computed again, as 0 prompts of 18" in line for line in lines)
    lines, _ = report(chats, pool_size="1")
    told = "  memory: `all` keeps more than --pool-size 1 B at block 16, 64, so that its real rate is lower without a "
    assert told + "store" in lines
    assert any("in 6 windows, each of at most --window-t" in line for line in report(chats, window_tokens="1")[0])
    model = Path(shutil.copytree(locate_model("demo"), tmp_path / "model", ignore=lambda *_: ["model.safetensors"]))
    template = "{% for m in messages %}[{{ loop.revindex }} {{ m.role }}] {{ m.content }} {% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    config = load({"model": str(model)}, None, {})
    warnings: list[str] = []
    surveyed = survey(config, find_inputs([str(chats)]), of_policies(config, [64]), warnings.append)
    assert (surveyed.num_unstable, surveyed.forecast.rewritten_prompts) == (6, 12)
    lines = list(forecast_lines(surveyed, config))
    assert any("not prefix-stable in 6 conversations" in line for line in lines)
    assert any("computed again, as 12 prompts of 18" in line for line in lines)
    assert len(warnings) == 1


@pytest.mark.parametrize("kept", [False, True])
def test_what_dropped_thoughts_cost_is_told(kept: bool, tmp_path: Path) -> None:
    """Fault: a template takes the thoughts of a reasoning model out of the history, and nothing says that this, and not
    the grid, costs the reuse, or which option keeps them."""
    lines = [conversation(number, turns=1) for number in range(4)]
    more = [("tool", "7"), ("assistant", "It is 7."), ("user", "Thanks."), ("assistant", "Bye.")]
    for line in lines[:3]:
        line["messages"][2] |= {"reasoning": f"Conversation {line['id']} asks for a number, and a tool knows it."}
        line["messages"] += [{"role": role, "content": text} for role, text in more]
    model = Path(shutil.copytree(locate_model("demo"), tmp_path / "model", ignore=lambda *_: ["model.safetensors"]))
    (model / "chat_template.jinja").write_text(DROPS_THOUGHTS)
    given = {"template_kwargs": '{"preserve_thinking": true}'} if kept else {}
    config = load({"model": str(model), **given}, None, {})
    inputs = find_inputs([str(write_lines(tmp_path / "in.jsonl", lines))])
    surveyed = survey(config, inputs, of_policies(config, [64]), lambda sentence: None)
    made, told = surveyed.forecast, list(forecast_lines(surveyed, config))
    assert ("  the chat template: prefix-stable" in told) is kept
    assert [line.partition(" tokens")[0] for line in told if "thoughts" in line] == (
        [] if kept else [f"  thoughts: {made.thought_tokens}"]
    )
    if not kept:
        assert made.thought_tokens == made.rewritten_tokens > 0 and surveyed.without_thoughts == 3
        [line] = [line for line in told if "thoughts" in line]
        assert line.endswith("in 3 conversations; --template-kwargs '{\"preserve_thinking\": true}' keeps them")
