"""Child side of data/helper.py: limit the process, answer requests in a loop, and frame requests and answers.

A request is a length, the processor time per answer and `marshal` data. `marshal` is safe here, since the parent is
trusted. An answer is a kind, a length and bytes, which the parent never executes: at worst they are wrong.
"""

from __future__ import annotations

import ctypes
import marshal
import resource
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

CPU_SECONDS = 2  # processor time per answer
MEMORY_BYTES = 1 << 30  # limit of the address space, Python itself included
STACK_BYTES = 4 << 20  # half the stack of the run's own thread
MAX_CHARACTERS = 4 * 2**20  # limit of a text: tokenising takes 100 to 200 bytes of memory per character
REASON_CHARACTERS = 500
ANSWER_HEAD = struct.Struct("<cI")
_REQUEST_HEAD = struct.Struct("<Qd")

# Kinds of answers, and their bytes. DONE: the result. REFUSED: the reason why there is no result. NO_MEMORY: none.
# TOO_LONG: the number of characters of a text beyond MAX_CHARACTERS. INVALID: the reason why the start request failed.
DONE, REFUSED, NO_MEMORY, TOO_LONG, INVALID = b"d", b"r", b"m", b"l", b"i"

Reply = tuple[bytes, str | bytes]


def end_with_parent() -> None:
    """Let the system kill this process when the thread that started it ends: a stopped process (SIGSTOP) does not read
    that its requests have ended. Without Linux's prctl this does nothing."""
    set_parent_death_signal = 1
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def pack_request(seconds: float, *values: Any) -> bytes:
    """Frame a request. seconds: processor time per answer. ValueError for values that `marshal` cannot write, or that
    are nested too deeply."""
    data = marshal.dumps(values)
    return _REQUEST_HEAD.pack(len(data), seconds) + data


def serve(start: Callable[..., Callable[..., Reply]]) -> None:
    """Limit this process, then answer requests from standard input until it ends.

    start: called with the values of the first request; returns the function that answers one item of a later request.
    An exception of `start` becomes the answer to each item; an exception of that function becomes the answer to its
    item. The system kills this process if one answer takes more than its processor time or stack. Memory beyond the
    limit raises MemoryError.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    for kind, most in (("AS", MEMORY_BYTES), ("STACK", STACK_BYTES), ("CORE", 0), ("FSIZE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answer: Callable[..., Reply] | None = None
    while (request := _read_request(requests)) is not None:
        seconds, values = request
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if answer is None:
            try:
                answer = start(*values)
            except BaseException as error:
                answer = partial(_always, _failure(error, INVALID))
            continue
        items, *common = values
        for item in items:
            try:
                reply = answer(item, *common)
            except BaseException as error:  # panics of libraries in Rust are not derived from Exception
                reply = _failure(error, REFUSED)
            _write_answer(answers, *reply)
            signal.setitimer(signal.ITIMER_PROF, seconds)


def _always(reply: Reply, *values: Any) -> Reply:
    return reply


def _failure(error: BaseException, kind: bytes) -> Reply:
    if isinstance(error, MemoryError):
        return NO_MEMORY, ""
    if isinstance(error, RecursionError):
        return kind, "it is nested too deeply"
    return kind, str(error).strip() or type(error).__name__


def _read_request(requests: BinaryIO) -> tuple[float, tuple[Any, ...]] | None:
    head = requests.read(_REQUEST_HEAD.size)
    if len(head) < _REQUEST_HEAD.size:
        return None
    num_bytes, seconds = _REQUEST_HEAD.unpack(head)
    return seconds, marshal.loads(requests.read(num_bytes))


def _write_answer(answers: BinaryIO, kind: bytes, text: str | bytes) -> None:
    """Send one answer and flush, so that it is not lost if the process dies. A reason is cut to REASON_CHARACTERS."""
    if isinstance(text, str):
        text = (text if kind == DONE else text[:REASON_CHARACTERS]).encode(errors="replace")
    answers.write(ANSWER_HEAD.pack(kind, len(text)) + text)
    answers.flush()
