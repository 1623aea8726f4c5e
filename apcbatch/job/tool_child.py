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
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from apcbatch.tools import EpisodeCode, ToolError, error_text

STACK_BYTES = 4 << 20  # of an episode's thread
Request = dict[str, Any]
Send = Callable[[Request, Any, "str | None"], None]


def json_line(value: dict[str, Any]) -> bytes:
    """Return a request or reply as a line. Not by orjson, since a call's arguments may have any integer."""
    return json.dumps(value, default=str).encode() + b"\n"


def main(run_number: int, memory: int, timeout: float) -> None:
    """Answer the requests of a socket until the run ends. run_number: its descriptor. memory: limit of the address
    space in bytes; 0 for none. timeout: of EpisodeCode. The first request names the factory."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # KeyboardInterrupt would end this thread alone
    _end_with(run_number)
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # of a system that has no such number
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each loop of coroutines has three
    threading.stack_size(STACK_BYTES)
    run, lock = socket.socket(fileno=run_number), threading.Lock()

    def send(request: Request, value: Any, error: str | None = None) -> None:
        line = json_line({"op": request["op"], "value": value, "error": error})
        with lock:
            run.sendall(line)

    episodes: dict[int, tuple[threading.Thread, SimpleQueue[Request | None]]] = {}
    factory, reason = None, ""
    for line in run.makefile("rb"):
        request = json.loads(line)
        key, values = request["key"], request["values"]
        try:
            match request["do"]:
                case "load":
                    factory, digest = _load(*values)
                    send(request, digest)
                case "drop":
                    thread, queue = episodes.pop(key)
                    queue.put(None)
                    if values[0]:  # its code took too long, and is interrupted where Python can do that
                        number = ctypes.c_ulong(thread.ident or 0)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))
                    send(request, None)
                case do if factory is None:
                    send(request, None, reason)
                case do:
                    if do == "make":
                        queue = SimpleQueue()
                        thread = threading.Thread(target=_play, args=(queue, factory, send, timeout), daemon=True)
                        thread.start()
                        episodes[key] = thread, queue
                    episodes[key][1].put(request)
        except BaseException as error:  # of an import, or no memory for a thread
            traceback.print_exc()  # to the log
            reason = reason or _reason(error)
            send(request, None, _reason(error))


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


def _play(queue: SimpleQueue[Request | None], factory: Any, send: Send, timeout: float) -> None:
    """Answer the requests of one episode, in its thread; None ends it."""
    code: Any = None
    while (request := queue.get()) is not None:
        try:
            if request["do"] == "make":
                row, sample = request["values"]
                code = EpisodeCode(factory, row, sample, timeout)
                value: Any = {"tools": code.tools, "replay": code.replay}
            elif code is None:  # it was not made
                value = None
            else:
                value = getattr(code, request["do"])(*request["values"])
        except BaseException as error:
            traceback.print_exc()  # to the log
            send(request, None, _reason(error))
        else:
            send(request, value, None)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error_text(error)}"
