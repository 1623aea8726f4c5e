"""docs/reference/formats.md lists each key of the output: compared with the lines and summaries of real runs, both
ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apcbatch.cli.program import main
from apcbatch.cluster.workers import WorkerCounts
from tests.chats import conversation, read_records, write_lines
from tests.job import test_openai_types
from tests.job.conftest import batch_line
from tests.job.test_openai_types import TOOLS, asked, varied_lines
from tools.make_formats_docs import TARGET, document
from tools.output_keys import PROCESSES, RECORD, SUMMARY, Key

LIVE = """
class Tool:
    def __init__(self, row):
        self.id = row["id"]
    def call(self, name, arguments):
        return {"id": self.id} if "good" in self.id else None
"""

scripted = test_openai_types.scripted
PLAIN = {"string": str, "boolean": bool, "null": type(None), "object": dict, "list": list}
ITEMS = {
    "integers": "integer",
    "numbers": "number",
    "strings": "string",
    "objects": "object",
    "entries": "object or null",
    "lists": "list",
}


def is_a(value: Any, kind: str) -> bool:
    """Whether a value is of a type as the page names it."""
    if " or " in kind:
        return any(is_a(value, one) for one in kind.split(" or "))
    whole, _, items = kind.partition(" of ")
    if items:
        inside = value.values() if isinstance(value, dict) else value
        return isinstance(value, PLAIN[whole]) and all(is_a(one, ITEMS[items]) for one in inside)
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, PLAIN[kind])


def keys_in(value: Any, keys: dict[str, Key], path: str = "") -> Iterator[str]:
    """The paths of all keys in a value; each must be listed and have its type."""
    if isinstance(value, list):
        for one in value:
            yield from keys_in(one, keys, f"{path}[]")
    elif isinstance(value, dict):
        for name, one in value.items():
            key = keys.get(below := f"{path}.{name}".removeprefix("."))
            assert key is not None, f"{below} is written, and tools/output_keys.py does not list it"
            assert is_a(one, key.type), f"{below} is {one!r}; the page says {key.type}"
            yield below
            if " of " not in key.type:
                yield from keys_in(one, keys, below)


@pytest.mark.usefixtures("one_thread")
def test_each_key_that_is_written_is_listed_and_the_reverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Fault: a key is added, renamed, dropped or of another type, and the page has the old one."""
    monkeypatch.chdir(tmp_path)
    lines = [conversation(1), conversation(1) | {"id": "again"}, "{", {"messages": []}]
    lines += [asked("l", logprobs=True, top_logprobs=2, stop_token_ids=[9])]
    lines += [batch_line(f"c{count}", prompt="Once", logprobs=count) for count in (0, 2)]
    lines.append(asked("n", n=2, temperature=1))
    lines.append(batch_line("p", prompt="Once upon a time", prompt_logprobs=1, return_token_ids=True))
    write_lines(tmp_path / "real.jsonl", lines)
    write_lines(tmp_path / "more.jsonl", [conversation(7)])
    options = ["-q", "--max-tokens", "60", "--store", "states", "--device", "cpu"]
    main(["run", "real.jsonl", "-o", "real.out", "--summary", "real.summary", *options])
    main(["run", "more.jsonl", "real.jsonl", "-o", "two.out", "--limit", "2", *options])
    main(["run", "more.jsonl", "-o", "score.out", "--summary", "score.summary", "--score", *options])
    request.getfixturevalue("scripted")  # the bundled model calls no tools and does not think
    monkeypatch.setitem(test_openai_types.ANSWERS, "plain", "<think>Hm.</think>It has been sent.")
    options += ["--reasoning-parser", "think"]
    write_lines(tmp_path / "calls.jsonl", varied_lines())
    outcome = request.getfixturevalue("apcbatch")(
        "run", "calls.jsonl", "-o", "calls.out", "--summary", "calls.summary", *options
    )
    assert outcome.code == 3, outcome.stderr
    (tmp_path / "tools_of_keys.py").write_text(LIVE)
    write_lines(
        tmp_path / "live.jsonl",
        [
            {"id": name, "tools": TOOLS, "messages": [{"role": "user", "content": "Hi"}]}
            for name in ("call#good", "call#bad")
        ],
    )
    outcome = request.getfixturevalue("apcbatch")(
        "run",
        "live.jsonl",
        "-o",
        "live.out",
        "--turns",
        "live",
        "--tools",
        "tools_of_keys:Tool",
        "--max-turns",
        2,
        *options,
    )
    assert outcome.code == 3, outcome.stderr
    summaries = [
        json.loads((tmp_path / name).read_text()) for name in ("real.summary", "score.summary", "calls.summary")
    ]
    summaries.append({**summaries[0], "workers": [WorkerCounts(1, "host", "cpu").summary()]})  # only a cluster has them
    names = ("real", "two", "score", "calls", "live")
    run_files = [json.loads((tmp_path / f"{name}.out.run.json").read_text()) for name in names]
    runs = [{name: facts[name] for name in ("begin", "dropped_processes", "processes")} for facts in run_files]
    for run in runs:
        run["processes"][0]["end"]["summary"] = {}  # which has a table of its own
    records = [one for name in names for one in read_records(tmp_path / f"{name}.out")]
    for listed, found in (
        (PROCESSES, runs),
        (RECORD, records),
        (SUMMARY, summaries),
    ):
        keys = {key.path: key for key in listed}
        assert len(keys) == len(listed) and len(found) > 1
        seen = {path for one in found for path in keys_in(one, keys)}
        assert keys.keys() - seen == set(), "listed, and in none of these lines"


def test_the_page_has_the_tables() -> None:
    """Fault: the list changes and docs/reference/formats.md does not (run tools/make_formats_docs.py)."""
    page = TARGET.read_text(encoding="utf-8")
    assert page == document()
    for key in (*RECORD, *SUMMARY, *PROCESSES):
        assert f"\n| `{key.path}` | {key.type} | {key.meaning} |\n" in page
