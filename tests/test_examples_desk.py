"""examples/desk: its tasks can be solved with its tools, and only by solving them; the bundled model calls them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apcbatch.cli.program import main
from apcbatch.testing import play
from examples.desk.desk import SCHEMAS, TODAY, Desk
from tests.chats import read_records

DESK = Path(__file__).parents[1] / "examples" / "desk"
ROLLOUTS = DESK.parents[1] / "docs" / "rollouts.md"
DEMO = ("--model", "demo", "--device", "cpu", "-q")
TASKS = [json.loads(line) for line in (DESK / "tasks.jsonl").open(encoding="utf-8")]
OPENED = {"return": "open_return", "claim": "open_claim"}
DELIVERED = {
    "number": "A-1",
    "status": "delivered",
    "delivered": "2026-05-10",
    "tracking": "NL1",
    "items": {"KT-204": 1},
}
SHIPPED = {"number": "A-2", "status": "shipped", "tracking": "NL2", "items": {"KT-231": 2}}
PLACE = {"street": "1 Mill Lane", "town": "Larkham", "zip": "LK1 2AB"}


def answers(row: dict[str, Any]) -> Iterator[Any]:
    """What an agent says that knows the task: a question for each reply of the customer, look-ups, changes, the end."""
    task = row["metadata"]
    yield from ["What else should I know?"] * len(task["replies"])
    looks: list[Any] = [("search_items", {"text": ""})]
    for order in task["orders"]:
        looks.append(("get_order", {"order": order["number"]}))
        if order.get("tracking"):
            looks.append(("get_tracking", {"tracking": order["tracking"]}))
    yield looks
    changes: list[Any] = []
    for number, new in task["expect"]["orders"].items():
        place = {"order": number, "street": new.get("street"), "town": new.get("town"), "zip": new.get("postcode")}
        changes.append(("cancel", {"order": number}) if new == {"status": "cancelled"} else ("set_address", place))
    for kind, number, item in task["expect"]["cases"]:
        note = {"description": "It is broken."} if kind == "claim" else {}
        case = (OPENED.get(kind, ""), {"order": number, "item": item, **note})
        changes.append(("escalate", {"summary": "Please call."}) if kind == "person" else case)
    if changes:
        yield changes
    yield " ".join(["That is all.", *task["said"]])


def test_40_tasks_with_8_tools_that_say_what_is_wanted():
    """A task that is there twice, that wants nothing, or whose customer keeps back what the agent has to know."""
    assert len({row["id"] for row in TASKS}) == len(TASKS) == 40 and len(SCHEMAS) == 8
    [rules] = {row["messages"][0]["content"] for row in TASKS}
    assert f"Today is {TODAY}." in rules
    for row in TASKS:
        task, told = row["metadata"], " ".join([row["messages"][1]["content"], *row["metadata"]["replies"]])
        expect = task["expect"]
        assert expect["orders"] or expect["cases"] or task["said"], row["id"]
        assert len(set(task["replies"])) == len(task["replies"]), row["id"]
        places = [text for new in expect["orders"].values() for text in new.values() if new.keys() >= {"street"}]
        wanted = [*expect["orders"], *(number for _, number, _ in expect["cases"]), *places]
        assert all(text in told for text in wanted), row["id"]


def test_a_scripted_player_solves_every_task():
    """A task that cannot be solved, or asks for a fact that neither a tool nor the system prompt gives."""
    for row in TASKS:
        played = play(Desk, row, answers(row))
        assert (played.end, played.score["reward"]) == ("done", 1.0), (row["id"], played)
        known = " ".join(m["content"] or "" for m in played.messages if m["role"] in ("system", "tool"))
        assert all(text in known for text in row["metadata"]["said"]) and '"error"' not in known, row["id"]
        assert played == play(Desk, row, answers(row)), row["id"]


def test_nothing_else_is_a_solution():
    """A checker that is content when nothing was done, when too much was done, or when the agent knew it by itself."""
    for row in TASKS:
        silent = play(Desk, row, ["Bye."])
        assert (silent.end, silent.score["reward"]) == ("done", 0), row["id"]
        task, (*work, end) = row["metadata"], answers(row)
        if ["person", "", ""] not in task["expect"]["cases"]:
            assert play(Desk, row, [*work, [("escalate", {"summary": "?"})], end]).score["state"] == 0, row["id"]
        for order in task["orders"]:
            if order["status"] == "processing" and order["number"] not in task["expect"]["orders"]:
                changed = play(Desk, row, [*work, [("cancel", {"order": order["number"]})], end])
                assert changed.score["reward"] == 0, row["id"]


def test_what_cannot_be_done_is_a_sentence():
    """An exception for arguments that a model makes up, or a change although the tool said no."""
    rows = [
        ("get_order", {}, "needs order"),
        ("get_order", {"order": 1}, "takes texts for order"),
        ("get_order", {"order": "A-1", "why": "?"}, "takes texts for order"),
        ("get_order", {"order": "A-3"}, "no order A-3"),
        ("get_order", {"order": "A-\ud800"}, "surrogates not allowed"),
        ("get_tracking", {"tracking": "NL3"}, "no parcel NL3"),
        ("cancel", {"order": "A-2"}, "is shipped, not processing"),
        ("set_address", {"order": "A-1", **PLACE}, "is delivered, not processing"),
        ("open_return", {"order": "A-2", "item": "KT-231"}, "is shipped, not delivered"),
        ("open_claim", {"order": "A-1", "item": "KT-231", "description": "?"}, "no item KT-231"),
    ]
    line = {"metadata": {"orders": [DELIVERED, SHIPPED], "replies": [], "expect": {}, "said": []}}
    desk = Desk(line)
    for name, arguments, said in rows:
        assert said in desk.call(name, arguments)["error"], (name, arguments)
    assert desk.changes() == {"orders": {}, "cases": []}
    shown = desk.call("get_order", {"order": "A-1"})
    assert (shown["days_since_delivery"], shown["total"]) == (3, "€39")
    twice = [desk.call("open_return", {"order": "A-1", "item": "KT-204"}) for _ in range(2)]
    assert twice[0] == twice[1] and desk.changes()["cases"] == [["return", "A-1", "KT-204"]]
    desk.close()


@pytest.mark.slow
def test_the_bundled_model_calls_the_tools_and_its_tokens_train(tmp_path, monkeypatch):
    """Wording, or names of tools, that leave the page's command with less than the page says, a script of the page on
    rollouts that marks a token that was not sampled or leaves one out, or an answer that later prompts do not have."""
    monkeypatch.chdir(DESK)
    command = ("run", "tasks.jsonl", "--turns", "live", "--tools", "desk:Desk", "--dtype", "float32", *DEMO)
    assert main([*command, "-o", str(tmp_path / "out.jsonl"), "--token-ids"]) == 0
    monkeypatch.chdir(tmp_path)
    records = read_records(tmp_path / "out.jsonl")
    ends = {one["apcbatch"]["episode"]: one["apcbatch"] for one in records if one["apcbatch"]["end"]}
    assert [end["end"] for end in ends.values()] == ["done"] * len(TASKS)
    appended = {
        (one["apcbatch"]["episode"], text["role"], text["content"])
        for one in records
        for text in one["apcbatch"]["appended"]
    }
    called = {episode for episode, role, text in appended if role == "tool" and not text.startswith('{"error"')}
    solved = {episode for episode, end in ends.items() if end["score"]["reward"]}
    page = " ".join((DESK / "README.md").read_text(encoding="utf-8").split())
    assert f"the result of a tool in {len(called)} of the 40 episodes and solves {len(solved)}." in page
    assert len(called) >= len(TASKS) // 2

    [script] = re.findall(r"^```python\n(# out.jsonl ->.*?)^```", ROLLOUTS.read_text(encoding="utf-8"), re.M | re.S)
    subprocess.run([sys.executable, "-c", script], check=True)
    sampled: dict[str, list[int]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record["turn"]):
        sampled[record["apcbatch"]["episode"]] += record["apcbatch"]["completion_token_ids"]
    trained = read_records(tmp_path / "training.jsonl")
    assert {one["id"] for one in trained} == solved
    for one in trained:
        tokens = zip(one["token_ids"], one["loss_mask"], strict=True)
        assert [token for token, is_sampled in tokens if is_sampled] == sampled[one["id"]], one["id"]
