"""Why a request got less than the ideal: one row for each reason, and one on each side of each bound."""

from __future__ import annotations

import pytest

from apcbatch.engine.coverage import Match, explain_miss

FORK, END = Match(0, True, True), Match(0, False, True)


@pytest.mark.parametrize(
    ("cached", "ideal", "match", "facts", "reason", "clause"),
    [
        (0, 0, FORK, {}, "cold", "cold"),
        (16, 16, FORK, {}, None, None),
        (32, 20, FORK, {}, None, None),
        (0, 15, FORK, {}, "diverged", "diverged at token 15 (first boundary 16)"),
        (0, 15, END, {}, "shorter_than_block", "shorter_than_block (minimum 16)"),
        (0, 15, END, {"stranded": True, "evicted": True}, "shorter_than_block", "shorter_than_block (minimum 16)"),
        (16, 17, FORK, {}, "below_grid", "below_grid (ideal 17, boundary 16)"),
        (16, 17, FORK, {"resumable": 17}, "below_grid", "below_grid (ideal 17, boundary 16)"),
        (16, 17, FORK, {"resumable": 20}, "below_grid", "below_grid (ideal 17, boundary 16)"),
        (40, 47, FORK, {"stranded": True}, "below_grid", "below_grid (ideal 47, boundary 32)"),
        (15, 17, FORK, {}, "diverged", "diverged at token 17 (no snapshot is kept at 16)"),
        (0, 16, FORK, {"evicted": True}, "evicted", "evicted (the snapshot at 16 was dropped)"),
        (16, 33, END, {"stranded": True, "evicted": True}, "stranded", "stranded (the KV up to 32 is incomplete)"),
        (
            0,
            40,
            FORK,
            {"resumable": 0},
            "disabled",
            "disabled (from token 1 on the prompt is scored, and computed for that)",
        ),
        (
            16,
            40,
            END,
            {"resumable": 20, "evicted": True},
            "disabled",
            "disabled (from token 21 on the prompt is scored, and computed for that)",
        ),
        (0, 40, END, {"resumable": 20, "evicted": True}, "evicted", "evicted (the snapshot at 32 was dropped)"),
        (0, 0, FORK, {"disabled": True}, "disabled", "disabled (the policy keeps nothing)"),
        (16, 16, FORK, {"disabled": True}, "disabled", "disabled (the policy keeps nothing)"),
    ],
)
def test_each_miss_has_its_reason(
    cached: int, ideal: int, match: Match, facts: dict[str, bool], reason: str | None, clause: str | None
) -> None:
    """Catches a reason that is given for another's facts, and a clause with another's number."""
    told = {"resumable": 1000, "disabled": False, "stranded": False, "evicted": False, **facts}
    assert explain_miss(cached, ideal, match, 16, **told) == (reason, clause)
