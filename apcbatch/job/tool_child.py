"""Child side of tool_workers.py: run the episodes of the user's code, each in a thread of its own.

Requests and replies are lines of JSON. The main thread reads requests and runs no code of an episode, so that it
answers while a tool hangs.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import resource
import select
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from apcbatch.tools import SHOWN_CHARACTERS, EpisodeCode, ToolError

STACK_BYTES = 4 << 20  # of an episode's thread
Request = dict[str, Any]
Send = Callable[[Request, Any, "str | None"], None]


def json_line(value: dict[str, Any]) -> bytes:
    """Return a request or reply as a line. Not by orjson, since a call's arguments may have any integer."""
    return json.dumps(value, default=str).encode() + b"\n"


def main(number: int, memory: int, timeout: float) -> None:
    """Answer the requests of a socket until the run ends. number: its descriptor. memory: limit of the address space in
    bytes; 0 for none. timeout: of EpisodeCode. The first request names the factory."""
    _end_with(number)
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each loop of coroutines has three
    threading.stack_size(STACK_BYTES)
    run, lock = socket.socket(fileno=number), threading.Lock()

    def send(request: Request, value: Any, error: str | None = None) -> None:
        line = json_line({"op": request["op"], "value": value, "error": error})
        with lock:
            run.sendall(line)

    episodes: dict[int, _Episode] = {}
    factory: Any = None
    for line in run.makefile("rb"):
        request = json.loads(line)
        key, values = request["key"], request["values"]
        try:
            match request["do"]:
                case "load":
                    factory, digest = _load(*values)
                    send(request, digest)
                case "drop":
                    episodes.pop(key).end(*values)
                    send(request, None)
                case do:
                    if do == "make":
                        episodes[key] = _Episode(factory, send, timeout)
                    episodes[key].queue.put(request)
        except BaseException as error:  # of an import, or no memory for a thread
            send(request, None, _reason(request, error))


def _end_with(run: int) -> None:
    """Start a process that ends this process group as soon as the run has ended, even by SIGKILL. run: descriptor of a
    socket whose other end the run has."""
    if not os.fork():
        poll = select.poll()
        poll.register(run, 0)  # POLLHUP alone
        poll.poll()
        os.killpg(0, signal.SIGKILL)


def _load(name: str) -> tuple[Any, str]:
    """Return the factory of a name `PACKAGE.MODULE:FACTORY`, and the digest of the module's file."""
    module_name, _, path = name.partition(":")
    found: Any = importlib.import_module(module_name)
    digest = ""
    if getattr(found, "__file__", None) is not None:
        with open(found.__file__, "rb") as stream:
            digest = hashlib.sha256(stream.read()).hexdigest()
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is no function or class")
    return found, digest


class _Episode:
    """An episode and its thread. queue: requests; None ends the thread."""

    def __init__(self, factory: Any, send: Send, timeout: float) -> None:
        self.queue: SimpleQueue[Request | None] = SimpleQueue()
        self._factory, self._send, self._timeout = factory, send, timeout
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self, hangs: bool) -> None:
        """End the thread. hangs: its code took too long, and is interrupted where Python can do that."""
        self.queue.put(None)
        if hangs and (number := self._thread.ident) is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(number), ctypes.py_object(SystemExit))

    def _run(self) -> None:
        code: Any = None
        while (request := self.queue.get()) is not None:
            try:
                if request["do"] == "make":
                    row, sample = request["values"]
                    code = EpisodeCode(self._factory, row, sample, self._timeout)
                    value: Any = {"tools": code.tools, "replay": code.replay}
                else:
                    value = getattr(code, request["do"])(*request["values"])
            except BaseException as error:
                traceback.print_exc()  # to the log
                self._send(request, None, _reason(request, error))
            else:
                self._send(request, value, None)


def _reason(request: Request, error: BaseException) -> str:
    if isinstance(error, ToolError):
        return str(error)
    what = "" if request["do"] == "load" else f"{request['do']} raised "
    return f"{what}{type(error).__name__}: {error!s:.{SHOWN_CHARACTERS}}"
