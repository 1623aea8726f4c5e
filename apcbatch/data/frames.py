"""What a child process and its parent say to each other, and how the child is bounded: see data/child_process.py.

Must not know: what is asked. A request is a length and `marshal` data from the parent, which is trusted. An answer is a
letter, a length and UTF-8: the worst that it can be is a wrong text.
"""

from __future__ import annotations

import marshal
import resource
import signal
import struct
from typing import Any, BinaryIO

REASON_CHARACTERS = 500
REQUEST_HEAD, ANSWER_HEAD = struct.Struct("<Q"), struct.Struct("<cI")
DONE, REFUSED = b"d", b"r"  # what an answer's letter says of its text: it is what was asked for; why there is none


def framed(value: tuple[Any, ...]) -> bytes:
    """A request. ValueError for values that are not JSON, or nested too deeply."""
    data = marshal.dumps(value)
    return REQUEST_HEAD.pack(len(data)) + data


def read_request(requests: BinaryIO) -> Any:
    """The next request of the child's standard input; None at its end."""
    head = requests.read(REQUEST_HEAD.size)
    return marshal.loads(requests.read(REQUEST_HEAD.unpack(head)[0])) if len(head) == REQUEST_HEAD.size else None


def write_answer(answers: BinaryIO, letter: bytes, text: str) -> None:
    """Send one answer at once, so that it is not lost with the child; what is not DONE is cut."""
    data = (text if letter == DONE else text[:REASON_CHARACTERS]).encode(errors="replace")
    answers.write(ANSWER_HEAD.pack(letter, len(data)) + data)
    answers.flush()


def bound_this_process(memory_bytes: int) -> None:
    """No more memory than that, Python itself included, no core file, and no byte into any file."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def begin_clock(seconds: float) -> None:
    """Have the system end this process after this many more seconds of processor time; 0 stops the clock."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
