"""How the options of a run and the settings of a line become one request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apcbatch.config import Config
from apcbatch.errors import UsageError
from apcbatch.job import request as request_module
from apcbatch.job.request import read_salt, settings_of
from tests.chats import read_records, write_lines
from tests.job.conftest import batch_line

MOST = 4096  # bytes of a salt


def test_a_salt_is_one_line_of_a_file(tmp_path: Path) -> None:
    """Fault: another salt than the file holds, so that its cache is not found; none in silence; a file that cannot be
    read ends in a traceback."""
    for content, salt in [
        (b"s", "s"),
        (b"a b\r\n\n", "a b"),
        (b"x" * MOST, "x" * MOST),
        (b"x" * MOST + b"\n", "x" * MOST),
        (b"x" * (MOST + 1), None),
        (b"x" * (MOST + 900), None),
        ("é".encode() * (MOST // 2), "é" * (MOST // 2)),
        (b"", None),
        (b"\r\n", None),
        (b"\xff", "no text"),
        (None, "no text"),
    ]:
        path = tmp_path / "salt"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        config = Config(cache_salt=f"@{path}", origins={"cache_salt": "--cache-salt"})
        why = f"holds no salt of 1 to {MOST} bytes" if salt is None else "cannot be read as UTF-8 text"
        why += r" \(No such file or directory\); give @" if content is None else ""
        if salt not in (None, "no text"):
            assert read_salt(config) == salt
        else:
            with pytest.raises(UsageError, match=f"--cache-salt: the file {path} {why}"):
                read_salt(config)
    assert read_salt(Config()) is None and read_salt(Config(cache_salt="text")) == "text"


def test_a_line_overrides_the_options() -> None:
    """Fault: --top-logprobs gives none, or turns on what a line turned off."""
    for options, params, logprobs, top in [
        ({}, {}, False, 0),
        ({"logprobs": True}, {}, True, 0),
        ({"top_logprobs": 1}, {}, True, 1),
        ({"top_logprobs": 2}, {"logprobs": True}, True, 2),
        ({"top_logprobs": 2}, {"logprobs": False}, False, 0),
        ({"logprobs": True}, {"logprobs": False}, False, 0),
        ({"logprobs": True, "top_logprobs": 2}, {"top_logprobs": 3}, True, 3),
        ({}, {"logprobs": False, "top_logprobs": 3}, False, 3),
        ({"top_logprobs": 2}, {"top_logprobs": 0}, True, 0),
    ]:
        found = settings_of(Config(**options), params)
        assert (found["logprobs"], found.get("top_logprobs", 0)) == (logprobs, top)


def test_a_prompt_is_scored_as_far_as_its_record_shows(
    apcbatch: Any, engines: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Fault: likeliest tokens are computed without being asked for, or a record lacks those that were asked for; more
    are given than a record can hold, 1.4 GB of memory for `prompt_logprobs: 20` on 100,000 tokens."""
    monkeypatch.setattr(request_module, "MOST_PROMPT_LOGPROBS", 54)
    many = "of 11 prompt tokens and the 4 likeliest beside each are 55; at most 54 are given: ask for fewer"
    rows: list[tuple[int, dict[str, Any], Any]] = [
        (9, {"echo": True, "max_tokens": 4}, (None, 0)),
        (60, {"echo": True, "max_tokens": 0}, (60, 0)),
        (9, {"echo": True, "max_tokens": 4, "logprobs": 0}, (1, 0)),
        (9, {"echo": True, "max_tokens": 0, "logprobs": 3}, (1, 3)),
        (9, {"echo": True, "max_tokens": 4, "logprobs": 3, "prompt_logprobs": 1}, (1, 3)),
        (9, {"echo": True, "max_tokens": 4, "logprobs": 3, "prompt_logprobs": 5}, (1, 5)),
        (9, {"max_tokens": 4, "logprobs": 3, "prompt_logprobs": 0}, (1, 0)),
        (9, {"max_tokens": 0, "prompt_logprobs": 2}, (1, 2)),
        (11, {"max_tokens": 4, "prompt_logprobs": 4}, many),
        (11, {"max_tokens": 0, "echo": True, "logprobs": 4}, many),
    ]
    lines = [batch_line(str(number), prompt=[5] * count, **body) for number, (count, body, _) in enumerate(rows)]
    apcbatch("run", write_lines(tmp_path / "in.jsonl", lines), "-o", "out.jsonl")
    found = {one.tag.ticket.custom_id: (one.score_from, one.score_top) for one in engines[-1].submitted}
    errors = {one["custom_id"]: one["error"] for one in read_records(tmp_path / "out.jsonl") if one["error"]}
    for number, (_, body, expected) in enumerate(rows):
        if expected == many:
            assert errors[str(number)]["code"] == "invalid_request" and many in errors[str(number)]["message"], body
        else:
            assert found[str(number)] == expected, body
