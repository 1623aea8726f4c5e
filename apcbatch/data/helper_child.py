"""The child's side of data/helper.py: frames, bounds and the loop of a helper process, and the letters of its answers.

Must not know: what is asked. A request is a length and `marshal` data from the parent, which is trusted. An answer is a
letter, a length and bytes: the worst that they can be is wrong.
"""

from __future__ import annotations

import marshal
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

CPU_SECONDS = 2  # of one answer
MEMORY_BYTES = 1 << 30  # of addresses, Python itself included
STACK_BYTES = 4 << 20  # half of what the run's own thread has
MAX_CHARACTERS = 4 * 2**20  # of a text: tokenising takes 100 to 200 bytes a character
REASON_CHARACTERS = 500
ANSWER_HEAD = struct.Struct("<cI")
_REQUEST_HEAD = struct.Struct("<Qd")

# What a letter says of its bytes: what was asked for; why there is none; nothing, where memory ran out; how many
# characters a text beyond MAX_CHARACTERS has; why a template is not valid.
DONE, REFUSED, NO_MEMORY, TOO_LONG, INVALID = b"d", b"r", b"m", b"l", b"i"

Answer = tuple[bytes, str | bytes]


def framed(seconds: float, *values: Any) -> bytes:
    """A request, each answer to which may take so much processor time. ValueError for values that are not JSON, or
    nested too deeply."""
    data = marshal.dumps(values)
    return _REQUEST_HEAD.pack(len(data), seconds) + data


def serve(begin: Callable[..., Callable[..., Iterable[Answer]]]) -> None:
    """Bound this process, then answer requests from standard input until it ends.

    begin: makes, of the first request, what gives the answers to each later one. The system ends this process if one
    answer takes more than its processor time or stack; memory beyond the bound is a MemoryError.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    for kind, most in (("AS", MEMORY_BYTES), ("STACK", STACK_BYTES), ("CORE", 0), ("FSIZE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answers_of = None
    while (request := _read_request(requests)) is not None:
        seconds, values = request
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if answers_of is None:
            answers_of = begin(*values)
            continue
        for letter, text in answers_of(*values):
            _write_answer(answers, letter, text)
            signal.setitimer(signal.ITIMER_PROF, seconds)


def _read_request(requests: BinaryIO) -> tuple[float, tuple[Any, ...]] | None:
    head = requests.read(_REQUEST_HEAD.size)
    if len(head) < _REQUEST_HEAD.size:
        return None
    num_bytes, seconds = _REQUEST_HEAD.unpack(head)
    return seconds, marshal.loads(requests.read(num_bytes))


def _write_answer(answers: BinaryIO, letter: bytes, text: str | bytes) -> None:
    """Send one answer at once, so that it is not lost with the process; what is not DONE is cut."""
    if isinstance(text, str):
        text = (text if letter == DONE else text[:REASON_CHARACTERS]).encode(errors="replace")
    answers.write(ANSWER_HEAD.pack(letter, len(text)) + text)
    answers.flush()
