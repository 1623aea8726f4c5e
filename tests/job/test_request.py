"""How the options of a run and the settings of a line become one request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.config import Config
from apcbatch.data.chat.template_options import TemplateOptions
from apcbatch.errors import RequestError, UsageError
from apcbatch.job import request as request_module
from apcbatch.job.request import read_salt, settings_of

MOST = 4096  # bytes of a salt


def test_a_salt_is_one_line_of_a_file(tmp_path: Path) -> None:
    """Fault: another salt than the file holds, so that its cache is not found; or none at all in silence."""
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
    ]:
        path = tmp_path / "salt"
        path.write_bytes(content)
        config = Config(cache_salt=f"@{path}", origins={"cache_salt": "--cache-salt"})
        if salt is not None:
            assert read_salt(config) == salt
        else:
            with pytest.raises(UsageError, match=f"--cache-salt: the file {path} holds no salt of 1 to {MOST} bytes"):
                read_salt(config)


def test_a_salt_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Fault: a run without the file of its salt, or with one that is no text, ends in a traceback."""
    (tmp_path / "no text").write_bytes(b"\xff")
    for name in ("no text", "gone"):
        config = Config(cache_salt=f"@{tmp_path / name}", origins={"cache_salt": "--cache-salt"})
        with pytest.raises(UsageError, match=f"--cache-salt: the file {tmp_path / name} cannot be read as UTF-8 text"):
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


def test_a_digest_has_no_setting_that_is_newer_and_not_set() -> None:
    """Fault: the answers of an earlier version are those of other requests, as a new setting is in their digests."""
    assert set(settings_of(Config(), {})) == set(request_module.FIRST)
    assert set(settings_of(Config(), {"keeps_stop": True, "echo": False})) - set(request_module.FIRST) == {"keeps_stop"}


def test_what_a_line_sets_besides_is_in_its_digest() -> None:
    """Fault: an answer with several calls stands for a request of one; or each digest of earlier versions changes."""
    for options, one_call, expected in [
        (TemplateOptions(), False, {}),
        (TemplateOptions(), True, {"one_call": True}),
        (TemplateOptions(add_generation_prompt=False), False, {"switches": {"add_generation_prompt": False}}),
    ]:
        conversation: Any = SimpleNamespace(template_options=options, one_call=one_call)
        assert request_module._further_settings(conversation) == expected


def test_a_prompt_is_scored_as_far_as_its_record_shows() -> None:
    """Fault: likeliest tokens are computed that nobody asked for, or a record lacks those that were asked for."""
    for echo, prompt_logprobs, settings, expected in [
        (True, None, {"logprobs": False, "max_tokens": 4}, {}),
        (True, None, {"logprobs": False, "max_tokens": 0}, {"score_from": 9}),
        (True, None, {"logprobs": False, "max_tokens": 0, "top_logprobs": 3}, {"score_from": 9}),
        (True, None, {"logprobs": True, "max_tokens": 4}, {"score_from": 1, "score_top": 0}),
        (True, None, {"logprobs": True, "max_tokens": 0, "top_logprobs": 3}, {"score_from": 1, "score_top": 3}),
        (True, 1, {"logprobs": True, "max_tokens": 4, "top_logprobs": 3}, {"score_from": 1, "score_top": 3}),
        (True, 5, {"logprobs": True, "max_tokens": 4, "top_logprobs": 3}, {"score_from": 1, "score_top": 5}),
        (False, 0, {"logprobs": True, "max_tokens": 4, "top_logprobs": 3}, {"score_from": 1, "score_top": 0}),
        (False, 2, {"logprobs": False, "max_tokens": 0}, {"score_from": 1, "score_top": 2}),
    ]:
        assert request_module._scored_prompt(9, echo, prompt_logprobs, settings) == expected


def test_a_record_holds_so_many_log_probabilities_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the bound is off by one, or the sentence names other numbers than those that were compared."""
    monkeypatch.setattr(request_module, "MOST_PROMPT_LOGPROBS", 3000)
    settings = {"logprobs": False, "max_tokens": 1}
    assert request_module._scored_prompt(1000, False, 2, settings)["score_top"] == 2
    with pytest.raises(RequestError, match="of 1,001 prompt tokens and the 2 likeliest .* are 3,003; at most 3,000 "):
        request_module._scored_prompt(1001, False, 2, settings)
