"""Each miss reason has a remedy, the one that docs/caching.md gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from apcbatch.config import OPTIONS
from apcbatch.report.tokens import DIVERGED, REMEDIES, UNKNOWN, remedy
from apcbatch.types import MissReason, Policy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "caching.md"
FLAG = re.compile(r"--([a-z-]+)")


def test_each_reason_has_one_sentence() -> None:
    """Fault: a reason is added, and its remedy is that of none."""
    assert REMEDIES.keys() == {*get_args(MissReason)}
    assert all(text.endswith(".") and text.count(". ") == 0 for text in (*REMEDIES.values(), *DIVERGED.values()))
    assert remedy("a new reason", "all") == UNKNOWN


def test_what_helps_is_not_what_was_done() -> None:
    """Fault: the advice after a run with `--policy planned` is to give it, or there is none after a run whose options
    are not known."""
    assert DIVERGED.keys() == {*get_args(Policy)} - {"none"}
    for policy in get_args(Policy):
        text = remedy("diverged", policy)
        assert ("--policy planned" in text) is (policy != "planned")
    assert remedy("diverged", None) == remedy("diverged", ["all"]) == REMEDIES["diverged"]


def test_they_are_those_of_the_page() -> None:
    """Fault: the report tells to turn another screw than the page on caching, or one that is not there."""
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text().partition("## Why a request missed")[2], re.M))
    whole = REMEDIES | {"diverged": " ".join(DIVERGED.values())}
    for reason, text in whole.items():
        flags = FLAG.findall(text)
        assert all(flag.replace("-", "_") in OPTIONS for flag in flags), text
        for flag in FLAG.findall(rows[reason].rpartition("|")[2]):
            assert flag in flags, f"{reason}: --{flag} is not named"
