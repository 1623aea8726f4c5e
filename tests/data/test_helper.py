"""Helper processes that are killed, stopped or over their bounds: no request fails for what is outside of it."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.data import helper, helper_child
from apcbatch.data.chat.template import ChatTemplate, TemplateProcess
from apcbatch.data.grammar.constraint import GrammarCompiler
from apcbatch.data.grammar.structured_output import StructuredOutput
from apcbatch.data.helper import Helper, LimitExceeded
from apcbatch.data.tokenization.tokenizer import load_tokenizer
from apcbatch.errors import RequestError
from tests.data.conftest import STABLE_TEMPLATE
from tests.effort import table

pytestmark = pytest.mark.usefixtures("own_helpers")
USER = {"role": "user", "content": "hi"}
COUNT = "{{ messages | length }}"


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that the next helpers get, one each, before they are sent a request."""
    signals: list[int] = []
    send = helper._Child.send

    def attacked(child: helper._Child, request: bytes, wall_seconds: float) -> None:
        if signals:
            os.kill(child._process.pid, signals.pop(0))
        send(child, request, wall_seconds)

    monkeypatch.setattr(helper._Child, "send", attacked)
    monkeypatch.setattr(helper, "_wall_seconds", lambda seconds: 1.0 if signals else 60.0)
    yield signals
    assert not signals


KILLS = [[signal.SIGKILL], [signal.SIGTERM], [signal.SIGSTOP], [signal.SIGSEGV]]


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("given", KILLS, ids=[one[0].name for one in KILLS])
def test_a_helper_that_is_lost_once_fails_nothing(attacks: list[int], given: list[int]) -> None:
    """Catches one kill of a template's process that made an error record, and one stop for which the run waited for
    ever."""
    process = TemplateProcess(COUNT, {})
    assert list(process.texts([USER], None, [1])) == ["1"]
    attacks += given
    if given == [signal.SIGSTOP]:
        attacks.append(0)  # so that the first one's wall clock is short
    assert list(process.texts([USER] * 3, None, [3, 2])) == ["3", "2"]


def test_a_helper_that_is_lost_midway_goes_on_behind_its_last_answer() -> None:
    """Catches turns of a conversation that fail because the ones before them were answered by a killed process."""
    process = TemplateProcess("{{ messages | length }}" + "x" * 300_000, {})  # no pipe holds two of them
    texts = process.texts([USER] * 9, None, range(9, 0, -1))
    got = [next(texts)]
    os.kill(_running(), signal.SIGKILL)
    got += texts
    assert [str(text).rstrip("x") for text in got] == [str(count) for count in range(9, 0, -1)]


def _running() -> int:
    """The one process that this one has begun and not ended."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return max(map(int, children))


def test_a_helper_that_is_lost_twice_is_worker_lost(attacks: list[int]) -> None:
    """Catches a request that can be run again and is said to be wrong; and the next one, which fails with it."""
    process = TemplateProcess(COUNT, {})
    attacks += [signal.SIGKILL, signal.SIGKILL, signal.SIGKILL]
    first, second = process.texts([USER] * 2, None, [2, 1])
    assert isinstance(first, RequestError) and not isinstance(first, LimitExceeded) and second == "1"
    assert first.code == "worker_lost" and first.retryable
    assert first.message == "the process for the chat template ended with status -9, twice; run it again"


def test_a_helper_that_is_lost_twice_at_the_start_is_not_the_models_fault(
    attacks: list[int], model_dir: Callable[..., Path]
) -> None:
    """Catches exit status 2 and "give the model another one" for a template that is as it should be."""
    attacks += [signal.SIGKILL, signal.SIGKILL]
    made = ChatTemplate(load_tokenizer(model_dir("chatml", STABLE_TEMPLATE)), lambda sentence: None)
    assert made.render([USER]).startswith("<|im_start|>user\nhi")


def test_a_lost_helper_of_grammars_makes_no_error_that_stays(
    attacks: list[int], model_dir: Callable[..., Path]
) -> None:
    """Catches one kill after which 60 of 60 requests had a schema that "cannot be used", from what was kept."""
    made, structure = GrammarCompiler(load_tokenizer(model_dir())), StructuredOutput("regex", "ok")
    attacks += [signal.SIGKILL, signal.SIGKILL]
    with pytest.raises(RequestError) as caught:
        made.constraint(structure)
    assert caught.value.code == "worker_lost" and "the process that tries grammars" in caught.value.message
    attacks.append(signal.SIGKILL)
    assert made.constraint(structure) is not None


@table("events, polled", [([[1]], 1), ([[], [1]], 2), ([[], []], 2)])
def test_a_deadline_is_passed_only_if_nothing_is_there_after_it(
    monkeypatch: pytest.MonkeyPatch, events: list[list[int]], polled: int
) -> None:
    """Fault: a run that was stopped for longer than the limit takes its helpers for lost, though they have answered."""
    waits: list[float] = []

    def poll(milliseconds: float) -> list[int]:
        waits.append(milliseconds)
        return events[len(waits) - 1]

    monkeypatch.setattr(helper.select, "poll", lambda: SimpleNamespace(register=lambda *_: None, poll=poll))
    monkeypatch.setattr("apcbatch.data.helper.time.monotonic", lambda: 5.0)
    child: Any = None
    assert helper._wall_seconds(2.5) == 35.0, "ten times as long as it may take, as a machine may be busy"
    for deadline, first in ((0.0, 0.0), (7.5, 2500.0)):
        waits.clear()
        with nullcontext() if events[-1] else pytest.raises(helper._ChildFailed, match="gives no answer"):
            helper._Child._wait(child, 0, 1, deadline)
        assert waits == [first, 0][:polled]


def test_the_bounds_have_codes_of_their_own() -> None:
    """Catches memory that is said to be the request's fault, and time that is not."""
    process = TemplateProcess("{% for m in messages %}{{ m.content }}{% endfor %}{{ 'a' * 10**10 }}", {})
    [outcome] = process.texts([USER], None, [1])
    assert isinstance(outcome, LimitExceeded) and outcome.code == "out_of_memory" and outcome.retryable


def test_the_child_ends_with_its_helper() -> None:
    """Catches processes that stay: one a model that was opened."""
    process = TemplateProcess("x", {})
    assert list(process.texts([USER], None, [1])) == ["x"]
    child = process._helper._child
    assert child is not None and child.exit_status is None
    running = child._process
    del process, child
    assert running.poll() is not None


def test_a_helper_that_cannot_be_started_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback where the system has no process left."""
    monkeypatch.setattr(helper.sys, "executable", "/nowhere/python")
    with pytest.raises(RequestError, match="the helper cannot be started: No such file") as caught:
        Helper("x", "the helper").ask("x")
    assert caught.value.retryable


def test_an_answer_has_at_most_256_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a child that makes the run take all memory by the length that it writes, and a bound that is off."""
    child, size = object.__new__(helper._Child), 256 << 20
    head = helper_child.ANSWER_HEAD
    monkeypatch.setattr(child, "_read", lambda count, deadline: head.pack(b"d", size) if count == head.size else b"x")
    assert child.receive(1.0) == (b"d", b"x")
    size += 1
    with pytest.raises(helper._ChildFailed, match="gave an answer of 268,435,457 bytes"):
        child.receive(1.0)


@table("ends", [True, False])
def test_a_child_that_does_not_end_with_its_pipes_is_killed(ends: bool) -> None:
    """Catches a process at work that outlives its helper, and one that is killed before it could end."""
    calls: list[object] = []

    def wait(timeout: float | None = None) -> None:
        calls.append(timeout)
        if timeout is not None and not ends:
            raise subprocess.TimeoutExpired("child", timeout)

    pipe = SimpleNamespace(close=lambda: calls.append("close"))
    process: Any = SimpleNamespace(stdin=pipe, stdout=pipe, wait=wait, kill=lambda: calls.append("kill"))
    helper._end(process)
    assert calls == ["close", "close", 1, *([] if ends else ["kill", None])]


@pytest.mark.slow
def test_a_stopped_child_ends_with_a_killed_run() -> None:
    """Catches a stopped process that stays for ever, as it never reads that the run that it worked for has ended."""
    program = (
        "import os, signal; from apcbatch.data import helper; from tests.data import test_helper as here; "
        "process = here.TemplateProcess(here.COUNT, {}); assert list(process.texts([here.USER], None, [1])) == ['1']; "
        "child = here._running(); os.kill(child, signal.SIGSTOP); print(child, flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    child, end = int(run.stdout), time.monotonic() + 30
    while Path(f"/proc/{child}/stat").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < end, os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


@table(
    "status, failures, code, sentence",
    [
        (-signal.SIGPROF, 1, "invalid_request", "it takes more than 2.5 seconds of processor time"),
        (-signal.SIGABRT, 1, "out_of_memory", "it needs more than 1.0 GiB of memory"),
        (-signal.SIGSEGV, 1, None, None),
        (-signal.SIGKILL, 1, None, None),
        (-signal.SIGKILL, 2, "worker_lost", "the helper ended with status -9, twice; run it again"),
        (-signal.SIGTERM, 2, "worker_lost", "the helper ended with status -15, twice; run it again"),
        (-signal.SIGTRAP, 2, "worker_lost", "the helper ended with status -5, twice; run it again"),
        (-signal.SIGSYS, 2, "worker_lost", "the helper ended with status -31, twice; run it again"),
        (-signal.SIGSEGV, 2, "invalid_request", "it is nested too deeply"),
        (1, 2, "worker_lost", "the helper ended with status 1, twice; run it again"),
    ],
)
def test_how_a_helper_died_decides_the_error(status: int, failures: int, code: str | None, sentence: str) -> None:
    """Catches a request that is blamed for a lost process, and one that is tried again though it can never end."""
    error = Helper("x", "the helper")._error(status, "", failures, 2.5)
    assert (error and error.code, error and error.message) == (code, sentence)


def test_a_child_limits_itself_and_times_the_start_and_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the start or an item has no limit of processor time or the rest of another's, or memory has no limit."""
    requests = [(2.5, "model"), (7.0, ["a", "b"], 3), (0.5, ["c"], 4)]
    data = b"".join(helper_child.pack_request(*one) for one in requests)
    answers, timers, limits = io.BytesIO(), [], {}
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=answers))
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    monkeypatch.setattr(signal, "signal", lambda *given: timers.append(given))
    monkeypatch.setattr(signal, "setitimer", lambda *given: timers.append(given))

    def start(name: str) -> Callable[[str, int], helper_child.Reply]:
        assert timers[1:] == [(signal.ITIMER_PROF, 2.5)]
        return lambda item, count: (helper_child.DONE, f"{name} {item * count}")

    helper_child.serve(start)
    assert timers[0] == (signal.SIGPROF, signal.SIG_DFL)
    assert timers[1:] == [(signal.ITIMER_PROF, seconds) for seconds in (2.5, 7.0, 7.0, 7.0, 0.5, 0.5)]
    assert limits == {
        resource.RLIMIT_AS: (1 << 30, 1 << 30),
        resource.RLIMIT_STACK: (4 << 20, 4 << 20),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_FSIZE: (0, 0),
    }
    head = helper_child.ANSWER_HEAD.pack
    assert answers.getvalue() == b"".join(head(b"d", len(s)) + s for s in (b"model aaa", b"model bbb", b"model cccc"))


@table(
    "error, answer",
    [
        (MemoryError(), (b"m", b"")),
        (RecursionError("x"), (b"i", b"it is nested too deeply")),
        (ValueError(" x\n"), (b"i", b"x")),
        (ValueError(" "), (b"i", b"ValueError")),
        (ValueError("x" * 501), (b"i", b"x" * 500)),
        (SystemExit("over"), (b"i", b"over")),
    ],
)
def test_a_start_that_fails_answers_each_item(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, answer: tuple[bytes, bytes]
) -> None:
    """Fault: an error of the start ends the child, is taken for a refusal of an item, or is sent whole."""
    answers = io.BytesIO()
    data = helper_child.pack_request(1.0, "model") + helper_child.pack_request(1.0, ["a", "b"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=answers))
    for module, name in ((resource, "setrlimit"), (signal, "signal"), (signal, "setitimer")):
        monkeypatch.setattr(module, name, lambda *given: None)

    def start(name: str) -> Callable[..., helper_child.Reply]:
        raise error

    helper_child.serve(start)
    assert answers.getvalue() == 2 * (helper_child.ANSWER_HEAD.pack(answer[0], len(answer[1])) + answer[1])
