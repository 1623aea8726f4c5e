"""Child side of tool_workers.py: run the episodes of the user's code, each in a thread of its own.

A request and a reply are a length and JSON. The main thread reads requests and runs no code of an episode, so that it
answers while a tool hangs.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import importlib
import os
import resource
import signal
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import orjson

from apcbatch.tools import SHOWN_CHARACTERS, EpisodeCode, ToolError

HEAD = struct.Struct("<I")
STACK_BYTES = 4 << 20  # of an episode's thread
Request = dict[str, Any]
Send = Callable[[Request, dict[str, Any]], None]


def frame(value: dict[str, Any]) -> bytes:
    """Return a request or reply as bytes."""
    data = orjson.dumps(value, default=str)
    return HEAD.pack(len(data)) + data


def main(requests: int, replies: int, life: int, memory: int) -> None:
    """Answer requests from one pipe in another until the first ends. life: pipe that ends with the run. memory: limit
    of the address space in bytes; 0 for none. The first request names the factory."""
    _end_with(life, (requests, replies))
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    threading.stack_size(STACK_BYTES)
    lock = threading.Lock()

    def send(request: Request, reply: dict[str, Any]) -> None:
        left = memoryview(frame(reply | {"op": request["op"]}))
        with lock:
            while left:
                left = left[os.write(replies, left) :]

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    episodes: dict[int, _Episode] = {}
    factory: Any = None
    with os.fdopen(requests, "rb") as stream:
        while len(head := stream.read(HEAD.size)) == HEAD.size:
            request = orjson.loads(stream.read(*HEAD.unpack(head)))
            match request["do"]:
                case "load":
                    try:
                        factory, digest = _load(request["factory"])
                        send(request, {"value": digest})
                    except BaseException as error:
                        send(request, {"error": f"{type(error).__name__}: {error}"})
                case "make":
                    episodes[request["key"]] = _Episode(factory, request, send, loop)
                case "drop":
                    if (episode := episodes.pop(request["key"], None)) is not None:
                        episode.end(request["hangs"])
                    loop.call_soon_threadsafe(send, request, {})  # no reply where a coroutine blocks the others
                case _:
                    episodes[request["key"]].queue.put(request)
    os.killpg(0, signal.SIGKILL)


def _end_with(life: int, others: tuple[int, ...]) -> None:
    """Start a process that ends this process group as soon as the run has ended, even by SIGKILL."""
    if os.fork():
        os.close(life)
        return
    for descriptor in others:
        os.close(descriptor)
    os.read(life, 1)
    os.killpg(0, signal.SIGKILL)


def _load(name: str) -> tuple[Any, str]:
    """Return the factory of a name `PACKAGE.MODULE:FACTORY`, and the digest of the module's file."""
    module_name, _, path = name.partition(":")
    found: Any = importlib.import_module(module_name)
    file = getattr(found, "__file__", None)
    digest = ""
    if file is not None:
        with open(file, "rb") as stream:
            digest = hashlib.sha256(stream.read()).hexdigest()
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is no function or class")
    return found, digest


class _Episode:
    """An episode and its thread. queue: requests; None ends the thread."""

    def __init__(self, factory: Any, request: Request, send: Send, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: SimpleQueue[Request | None] = SimpleQueue()
        self._factory, self._send, self._loop = factory, send, loop
        self._code: EpisodeCode | None = None
        self._running: list[Future[None]] = []
        self.queue.put(request)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self, hangs: bool) -> None:
        """End the episode. hangs: its code took too long, and is interrupted where Python can do that."""
        for one in self._running:
            one.cancel()
        self.queue.put(None)
        if hangs and (number := self._thread.ident) is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(number), ctypes.py_object(SystemExit))

    def _wait(self, awaitable: Any) -> Any:
        async def awaited() -> Any:
            return await awaitable

        one = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        self._running = [one]
        return one.result()

    def _run(self) -> None:
        with suppress(SystemExit):
            while (request := self.queue.get()) is not None:
                if request["do"] == "call" and self._code is not None and self._code.is_async:
                    self._running = [one for one in self._running if not one.done()]
                    self._running.append(asyncio.run_coroutine_threadsafe(self._call(request), self._loop))
                else:
                    self._answer(request)

    def _answer(self, request: Request) -> None:
        begin = time.perf_counter()
        try:
            reply: dict[str, Any] = {"value": self._do(request)}
        except BaseException as error:
            reply = _failure(request, error)
        self._send(request, reply | {"seconds": time.perf_counter() - begin})

    async def _call(self, request: Request) -> None:
        assert self._code is not None
        begin = time.perf_counter()
        try:
            reply: dict[str, Any] = {"value": await self._code.call_async(request["name"], request["arguments"])}
        except BaseException as error:
            reply = _failure(request, error)
        self._send(request, reply | {"seconds": time.perf_counter() - begin})

    def _do(self, request: Request) -> Any:
        if request["do"] == "make":
            code = self._code = EpisodeCode(self._factory, request["row"], request["sample"], self._wait)
            return {"tools": code.tools, "replay": code.replay, "is_async": code.is_async}
        assert self._code is not None
        match request["do"]:
            case "call":
                return self._code.call(request["name"], request["arguments"])
            case "next":
                return self._code.next(request["messages"])
            case "score":
                return self._code.score(request["messages"])
            case _:
                return self._code.close()


def _failure(request: Request, error: BaseException) -> dict[str, Any]:
    if isinstance(error, ToolError):
        return {"error": str(error)}
    return {"error": f"{request['do']} raised {type(error).__name__}: {error!s:.{SHOWN_CHARACTERS}}"}
