"""Tools of live episodes: the protocol of the user's own code, and the checks of what that code returns.

Invariant: what a method of this module returns is JSON: texts in UTF-8, no NaN, no cycles, of bounded length.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

Message = dict[str, Any]

MOST_RESULT_BYTES = 1 << 20  # text of a result, the rest is cut; text of `next` and score, more is an error
MOST_RETURNED_BYTES = 10_000_000  # of one returned value; more is an error
SHOWN_CHARACTERS = 500  # of an exception's text
TOO_LONG = "(--tool-timeout)"  # end of the sentence about code that took too long
UNREAD_CALL = (
    "A tool call in your last message could not be read and was not made. Write the call again, in exactly the format "
    "that the instructions give, with arguments that are valid JSON."
)
"""Content of the user message that answers an assistant message with a call that cannot be read."""


class ToolError(Exception):
    """The user's code cannot go on, or returned what is not allowed. The text is a sentence."""


class Tools:
    """Base class of an episode: the tools of one conversation, which is made for one line of INPUT.

    A class derived from it is a factory: `--tools PACKAGE.MODULE:CLASS`. Any object with `call` will do, and any
    function that returns one. Every method may be `async`. Methods of one episode run in one thread, one after the
    other; where `call` is `async`, the calls of one answer run side by side.

    row: the parsed line. sample: index of the episode among those of the line, from 0. tools: tools in OpenAI's form;
    None for those of the line. replay: whether the same calls in the same order give the same results in a new episode,
    so that a run which was interrupted may make them again; if not, an unfinished episode begins anew.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    replay: bool = True

    def __init__(self, row: dict[str, Any], sample: int = 0) -> None:
        self.row, self.sample = row, sample

    def call(self, name: str, arguments: dict[str, Any]) -> str | Mapping[str, Any]:
        """Return the result of a call: a text, or an object that is written as JSON. An exception ends the episode, so
        return a text that says what is wrong with the arguments. name: one of `tools`."""
        raise NotImplementedError(f"{type(self).__name__}.call is not defined")

    def next(self, messages: list[Message]) -> Message | None:
        """Return the user's message after an answer without a call; None ends the episode.

        messages: all so far, in OpenAI's form."""
        return None

    def score(self, messages: list[Message]) -> Mapping[str, Any]:
        """Return the score of the finished episode, an object that can be written as JSON."""
        return {}

    def close(self) -> None:
        """Free what the episode holds."""


class EpisodeCode:
    """One episode of the user's code, with checked results. All of it runs in the thread that makes this object, its
    coroutines in a loop of their own.

    tools, replay: as in Tools. timeout: seconds that a method may take; what hangs in a plain function is not
    interrupted here. ToolError for code that raises, takes longer, or returns something else.
    """

    def __init__(self, factory: Callable[..., Any], row: Mapping[str, Any], sample: int, timeout: float = math.inf):
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._episode = self._result("the factory", lambda: factory(row, **_sample_of(factory, sample)))
        if not callable(getattr(self._episode, "call", None)):
            kind = type(self._episode).__name__
            raise ToolError(f"the factory returned a {kind}, which has no method call(name, arguments)")
        given = getattr(self._episode, "tools", None)
        self.tools: list[Any] | None = None if given is None else json.loads(_as_json("tools", list(given)))
        self.replay = bool(getattr(self._episode, "replay", True))

    def call(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, bool, float]]:
        """Return (text of the result, whether it was cut, seconds) of each call (name, arguments) of one answer."""
        jobs = [(f"call({name!r})", partial(self._episode.call, name, arguments)) for name, arguments in calls]
        results = zip(jobs, self._results(jobs), strict=True)
        return [(*_result_text(what, value), seconds) for (what, _), (value, seconds) in results]

    def next(self, messages: list[Message]) -> Message | None:
        """Return the user's next message; None at the end of the episode."""
        value = self._optional("next", messages)
        if value is None:
            return None
        if not (isinstance(value, Mapping) and value.get("role") == "user" and isinstance(value.get("content"), str)):
            raise ToolError('next returned neither None nor {"role": "user", "content": a text}')
        return {"role": "user", "content": _checked_text("next", value["content"], MOST_RESULT_BYTES)}

    def score(self, messages: list[Message]) -> dict[str, Any]:
        """Return the score; empty if the episode has none."""
        value = self._optional("score", messages, default={})
        if not isinstance(value, Mapping):
            raise ToolError(f"score returned a {type(value).__name__}; expected a dict")
        found: dict[str, Any] = json.loads(_as_json("score", value, MOST_RESULT_BYTES))
        try:
            orjson.dumps(found)
        except TypeError as error:  # an integer of more than 64 bits, or very deep
            raise ToolError(f"score returned what no record can hold: {error}") from None
        return found

    def close(self) -> None:
        """Close the episode, and its loop."""
        try:
            self._optional("close")
        finally:
            if self._loop is not None:
                self._loop.close()

    def _optional(self, name: str, *values: Any, default: Any = None) -> Any:
        method = getattr(self._episode, name, None)
        return default if method is None else self._result(name, partial(method, *values))

    def _result(self, what: str, function: Callable[[], Any]) -> Any:
        return self._results([(what, function)])[0][0]

    def _results(self, jobs: Sequence[tuple[str, Callable[[], Any]]]) -> list[tuple[Any, float]]:
        """Run jobs, and return the (value, seconds) of each. The functions are called one after the other; the
        coroutines that some return are then awaited side by side. jobs: (clause that names the job, function)."""
        found = []
        for what, function in jobs:
            begin = time.perf_counter()
            try:
                value = function()
            except (Exception, SystemExit) as error:
                raise _raised(what, error) from error
            found.append((value, time.perf_counter() - begin))
            if found[-1][1] > self._timeout:
                raise ToolError(too_long(what, self._timeout))
        if any(inspect.isawaitable(value) for value, _ in found):
            self._loop = self._loop or asyncio.new_event_loop()
            waits = [self._awaited(what, *one) for (what, _), one in zip(jobs, found, strict=True)]
            found = self._loop.run_until_complete(_in_order(waits))
        return found

    async def _awaited(self, what: str, value: Any, seconds: float) -> tuple[Any, float]:
        if not inspect.isawaitable(value):
            return value, seconds
        begin, task = time.perf_counter(), asyncio.ensure_future(value)
        done, _ = await asyncio.wait({task}, timeout=None if self._timeout == math.inf else self._timeout)
        if not done:
            task.cancel()
            raise ToolError(too_long(what, self._timeout))
        try:
            return task.result(), time.perf_counter() - begin
        except Exception as error:
            raise _raised(what, error) from error


async def _in_order(waits: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return the results; of several exceptions, raise that of the first, not the earliest."""
    found = await asyncio.gather(*waits, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def too_long(what: str, timeout: float) -> str:
    """Return the sentence about code that took too long."""
    return f"{what} took more than {timeout:g} s {TOO_LONG}"


def error_text(error: BaseException) -> str:
    """Return an exception's text, with what UTF-8 cannot write escaped; a long text ends with a note that it is cut."""
    text = str(error).encode(errors="backslashreplace").decode()
    cut = f"{text[:SHOWN_CHARACTERS]}... (the first {SHOWN_CHARACTERS} of {len(text):,} characters)"
    return text if len(text) <= SHOWN_CHARACTERS else cut


def unknown_tool(name: str, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the result of a call of a tool that is not offered; None if it is offered."""
    names = [tool.get("function", tool)["name"] for tool in tools]
    return None if name in names else json.dumps({"error": f"there is no tool {name!r}", "tools": names})


def tool_message(call_id: str | None, text: str) -> Message:
    """Return the message with a call's result."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _sample_of(factory: Callable[..., Any], sample: int) -> dict[str, int]:
    """Return the keyword argument `sample` if the factory takes it."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return {}
    takes = any(one.name == "sample" or one.kind is one.VAR_KEYWORD for one in parameters)
    return {"sample": sample} if takes else {}


def _raised(what: str, error: BaseException) -> ToolError:
    return ToolError(f"{what} raised {type(error).__name__}: {error_text(error)}".rstrip(": "))


def _result_text(what: str, value: Any) -> tuple[str, bool]:
    if isinstance(value, str):
        return _cut(_checked_text(what, value))
    if not isinstance(value, Mapping):
        raise ToolError(f"{what} returned a {type(value).__name__}; expected a str or a dict")
    return _cut(_as_json(what, value))


def _as_json(what: str, value: Any, most: int = MOST_RETURNED_BYTES) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_object)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"{what} returned what cannot be written as JSON: {error_text(error)}") from None
    return _checked_text(what, text, most)


def _as_object(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a {type(value).__name__}")


def _checked_text(what: str, text: str, most: int = MOST_RETURNED_BYTES) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ToolError(f"{what} returned a text that UTF-8 cannot write: it holds half of a surrogate pair") from None
    if size > most:
        raise ToolError(f"{what} returned {size:,} bytes; at most {most:,} are taken, so shorten it")
    return str(text)


def _cut(text: str) -> tuple[str, bool]:
    """Return at most MOST_RESULT_BYTES of a text, and whether it was cut."""
    data = text.encode()
    return (data[:MOST_RESULT_BYTES].decode(errors="ignore"), True) if len(data) > MOST_RESULT_BYTES else (text, False)
