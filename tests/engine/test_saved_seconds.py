"""The estimate of the decode seconds that drafts saved, against sums by hand."""

from __future__ import annotations

import pytest

from apcbatch.engine.saved_seconds import SavedSeconds


def test_a_pass_is_compared_with_passes_of_as_many_sequences() -> None:
    """Catches an estimate by rows, by tokens alone, or from passes of another number of sequences."""
    saved = SavedSeconds()
    assert saved.estimate is None
    for _ in range(3):
        saved.add_plain(1, 0.1)
        saved.add_plain(4, 0.2)
    assert saved.estimate is None, "nothing was drafted"
    saved.add_drafted(1, 3, 0.125)  # three passes of one sequence
    saved.add_drafted(4, 6, 0.25)  # one and a half of four
    assert saved.estimate == pytest.approx(3 * 0.1 - 0.125 + 1.5 * 0.2 - 0.25)
    saved.add_drafted(2, 2, 1.0)  # between: 0.1 + (0.2 - 0.1) / 3 seconds
    assert saved.estimate == pytest.approx(0.225 + 0.4 / 3 - 1.0), "drafts may cost more than they bring"


def test_nothing_is_said_where_nothing_was_measured() -> None:
    """Catches an estimate from passes of fewer sequences, which are faster, and one for a small part of the passes."""
    saved = SavedSeconds()
    saved.add_drafted(8, 16, 0.5)
    assert saved.estimate is None
    saved.add_plain(1, 0.1)
    assert saved.estimate is None
    saved.add_drafted(1, 2, 4.4)
    assert saved.estimate is None
    saved.add_drafted(1, 2, 0.1)  # 4.5 s of 5 s are known
    assert saved.estimate == pytest.approx(4 * 0.1 - 4.5)


def test_one_slow_pass_does_not_make_drafts_fast() -> None:
    """Catches an estimate that a pause of the machine in one pass without drafts decides."""
    saved = SavedSeconds()
    for _ in range(9):
        saved.add_plain(1, 0.1)
    saved.add_plain(1, 100.0)
    saved.add_drafted(1, 10, 0.2)
    assert saved.estimate == pytest.approx(10 * 0.1 - 0.2)


def test_a_device_is_compared_with_passes_that_run_ahead() -> None:
    """Catches a device whose passes without drafts are slow because the host waited for drafts before them."""
    saved = SavedSeconds()
    saved.add_plain(1, 0.3)
    saved.add_drafted(1, 4, 0.3)
    assert saved.estimate == pytest.approx(4 * 0.3 - 0.3)
    saved.add_plain(1, 0.1, is_ahead=True)
    assert saved.estimate == pytest.approx(4 * 0.1 - 0.3)
