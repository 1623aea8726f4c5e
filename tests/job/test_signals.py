"""Ctrl-C, SIGTERM and SIGHUP: what the first and the second one do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from apcbatch.job.signals import Interrupted, Signals

CODES = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of the tests are put back."""
    before = {number: signal.getsignal(number) for number, _ in CODES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), CODES)
def test_the_first_one_ends_what_has_no_requests_yet(number: signal.Signals, code: int) -> None:
    """Fault: Ctrl-C while the weights are read does nothing, has another exit status, or ends the clean-up too."""
    with pytest.raises(Interrupted) as ended, Signals(str) as signals:
        signal.raise_signal(number)
    assert ended.value.exit_code == signals.exit_code == code
    assert [signal.getsignal(one) for one, _ in CODES] == [signal.SIG_IGN] * 3


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """Fault: `nohup apcbatch run ...` stops when its terminal is closed."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals(str) as signals:
        signal.raise_signal(signal.SIGHUP)
        assert signals.exit_code is None


@pytest.mark.parametrize(("number", "code"), CODES)
def test_the_second_one_stops_at_once(number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the requests that run are lost with the first signal, or the second one has to wait or says nothing."""
    calls: list[object] = []
    monkeypatch.setattr(os, "write", lambda fd, data: calls.append((fd, data)))
    monkeypatch.setattr(os, "_exit", calls.append)
    with Signals(lambda: "apcbatch run --resume") as signals:
        signals.drain_on_first()
        assert not signals.take_first() and signals.exit_code is None
        signal.raise_signal(number)
        assert signals.exit_code == code and calls == []
        assert [signals.take_first(), signals.take_first()] == [True, False]
        signal.raise_signal(signal.SIGTERM)
    assert calls[:2] == [(2, b"\napcbatch run --resume\n"), code]
