"""One live episode: a conversation with the user's tools, played turn by turn.

An episode is a generator. It yields the request of a turn and gets its result, or asks the tool workers, yields None,
and gets their reply. Invariant: its records depend on its line, the seed and what its tools return, not on when they
return it. After a kill, and after its worker's end, it is played again from its begin: recorded answers are not
generated again, but their calls are made again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import orjson

from apcbatch.config import Config
from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.rollout import LiveHistory
from apcbatch.data.conversation import Conversation
from apcbatch.data.json_text import write_json
from apcbatch.data.output.parser import ParsedAnswer
from apcbatch.errors import RequestError
from apcbatch.job.feed import as_history
from apcbatch.job.record import Ticket, is_stopped
from apcbatch.job.request import make_request
from apcbatch.job.tool_workers import Reply, ToolWorkers, checked_tools
from apcbatch.job.work import Failure
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.tools import MOST_RESULT_BYTES, UNREAD_CALL, Message, tool_message, unknown_tool
from apcbatch.types import Request, Result

MOST_UNREAD = 3  # answers in a row with a call that cannot be read


class _Restart(Exception):
    """The episode cannot go on from what is recorded, and begins anew."""


class _Lost(Exception):
    """The episode's worker has ended: it is made again, and its calls too."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Recorded answer of the model, which is not generated again. request_digest: as in Ticket. appended_digest: of the
    messages behind it; None while its tools have not answered. The rest is as in Result."""

    token_ids: TokenArray
    stop_reason: int | str | None
    stopped: bool
    request_digest: str | None
    appended_digest: str | None

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Answered | None:
        """Return the answer of a record; None if it has none."""
        ours = record["apcbatch"]
        if record["error"] is not None or not isinstance(digest := ours.get("appended_digest"), str):
            return None
        token_ids, stopped = as_token_array(ours["completion_token_ids"]), is_stopped(record)
        return cls(token_ids, ours.get("stop_reason"), stopped, ours.get("request_digest"), digest)

    @classmethod
    def of_result(cls, result: Result, digest: str | None = None) -> Answered:
        """Return the answer of a result."""
        token_ids, stopped = as_token_array(result.token_ids), result.finish_reason == "stop"
        return cls(token_ids, result.stop_reason, stopped, result.tag.ticket.request_digest, digest)


@dataclass
class Stage:
    """What the episodes of a run share. ended: turns and failures to hand out. making: keys of the episodes whose code
    is not made yet. num_restarted: how often one was begun anew."""

    config: Config
    renderer: Renderer
    workers: ToolWorkers
    ended: list[Result | Failure] = field(default_factory=list)
    making: set[int] = field(default_factory=set)
    num_restarted: int = 0


@dataclass(slots=True, eq=False)
class Episode:
    """An open episode. key: its number among all of the run. line: its conversation, which it does not change.
    ticket_of: turn -> its ticket. past: the turns that are recorded. attempt: how often it was begun, from 1. result:
    answer to the turn after `past`, whose tools have not answered yet. is_over: it is closed next. failed_again: it
    failed while it was played again, and was begun anew; the next time it ends. transcript: messages in OpenAI's form.
    steps: the generator."""

    stage: Stage
    key: int
    name: str
    sample: int
    line: Conversation
    ticket_of: Callable[[int], Ticket]
    past: list[Answered]
    attempt: int
    turn: int = 1
    result: Result | None = None
    is_over: bool = False
    failed_again: bool = False
    transcript: list[Message] = field(default_factory=list)
    steps: Generator[Request | None, Any, None] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = self._play()
        self.stage.making.add(self.key)

    @property
    def is_answered(self) -> bool:
        """Whether it waits for its code alone: its answer is there, or it is closed next."""
        return self.result is not None or self.is_over

    def begin_anew(self) -> None:
        """Forget what is recorded."""
        self.stage.num_restarted += 1
        self.attempt += 1
        self.past, self.result = [], None

    def _play(self) -> Generator[Request | None, Any, None]:
        """Play an episode to its end."""
        while not self.is_over:
            try:
                yield from self._attempt()
                self.is_over = True
            except _Lost:
                continue
            except _Restart:
                self.begin_anew()
            except Exception as raised:  # only this episode fails, even from a fault of this program
                is_again = self.turn <= len(self.past)  # of a call that was made again
                if is_again:
                    self.begin_anew()
                    self.turn = 1
                if not is_again or self.failed_again:
                    self._fail(raised)
                    self.is_over = True
                self.failed_again |= is_again
            if self.stage.workers.has(self.key):
                self.stage.workers.ask(self.key, "close")
                yield None
            self.stage.workers.drop(self.key)
        self.stage.making.discard(self.key)

    def _fail(self, raised: Exception) -> None:
        error = raised if isinstance(raised, RequestError) else RequestError("internal", f"{raised!r}")
        fields = self._fields | {"end": "error", "transcript": list(self.transcript)}
        ticket = replace(self.ticket_of(self.turn), live=fields)
        self.stage.ended.append(Failure(ticket, RequestError(error.code, error.message, ticket.line)))
        self.result = None

    @property
    def _fields(self) -> dict[str, Any]:
        return {"episode": self.name, "attempt": self.attempt, "history": self.stage.config.history}

    def _attempt(self) -> Generator[Request | None, Any, None]:
        """Play an episode from its begin; _Restart if what is recorded does not fit. RequestError ends it."""
        self.turn, line = 1, self.line
        self.transcript = [_shown(message) for message in line.messages]
        made = yield from self._asked("make", line.row, self.sample)
        self.stage.making.discard(self.key)
        if (self.past or self.result is not None) and not made["replay"]:
            raise _Restart
        tools = line.tools if made["tools"] is None else checked_tools(made)
        if not tools:
            self.stage.renderer.warn_once(
                "no tools", f"{self.name}: neither its episode nor its line has tools, and others like it"
            )
        conversation = replace(line, messages=list(line.messages), tools=tools or None)
        history = LiveHistory(self.stage.renderer, conversation, self.stage.config.history == "tokens")
        num_unread = 0
        for self.turn in count(1):
            sampled, end = list(history.sampled), None
            request = self._request_of(conversation, history)
            known, ticket = (yield from self._answered(request)), request.tag.ticket
            del request
            answer = history.take(
                *as_history(self.stage.renderer, ticket, known.token_ids.tolist(), known.stopped, known.stop_reason)
            )
            self.transcript.append(_said(answer))
            is_unread = any(warning.kind == "unread_call" for warning in answer.warnings)
            num_unread = num_unread + 1 if is_unread else 0
            appended, used = yield from self._respond(answer, tools or [], is_unread)
            digest = hashlib.sha256(orjson.dumps(appended)).hexdigest()[:32]
            is_recorded = self.turn <= len(self.past)
            if is_recorded and self.past[self.turn - 1].appended_digest != digest:
                raise _Restart
            self.transcript += appended
            if not appended:
                end = "done"
            elif num_unread >= MOST_UNREAD:
                end = "error"
            elif self.turn >= self.stage.config.max_turns:
                end = "max_turns"
            else:
                history.extend(appended)
                end = "context" if len(history.prompt.token_ids) >= self.stage.config.max_request_tokens else None
            if is_recorded and end is not None:
                raise _Restart
            score = None
            if end is not None:
                score = yield from self._asked("score", self.transcript)
            if not is_recorded:
                fields = {"appended": appended, "appended_digest": digest, "tools": used, "sampled": sampled}
                self._end_turn(fields | {"end": end, "score": score})
            if end is not None:
                return

    def _answered(self, request: Request) -> Generator[Request, Result, Answered]:
        """Return the answer to a request: the recorded one, or the engine's."""
        if self.turn <= len(self.past):
            known = self.past[self.turn - 1]
            if known.request_digest != request.tag.ticket.request_digest:
                raise _Restart
            return known
        if self.result is None:
            result = yield request
            if result.error is not None:
                raise result.error
            self.result = replace(result, tag=replace(result.tag, ended=time.monotonic()))
        return Answered.of_result(self.result)

    def _end_turn(self, fields: dict[str, Any]) -> None:
        """Hand out a turn whose tools have answered. fields: of its record."""
        result, self.result = self.result, None
        assert result is not None
        self.past.append(Answered.of_result(result, fields["appended_digest"]))
        ticket = replace(result.tag.ticket, live=self._fields | fields)
        self.stage.ended.append(replace(result, tag=replace(result.tag, ticket=ticket)))

    def _request_of(self, conversation: Conversation, history: LiveHistory) -> Request:
        ticket = self.ticket_of(self.turn)
        request = make_request(
            self.stage.config, self.stage.renderer, ticket, conversation, history.prompt, self, keep_answer=True
        )
        room = self.stage.config.max_request_tokens - len(request.token_ids)
        request.max_tokens = max(1, min(request.max_tokens, room))
        if request.constraint is not None:
            request.constraint()  # RequestError for a bad grammar
        return request

    def _asked(self, do: str, *values: Any) -> Generator[None, Reply, Any]:
        """Return what the episode's code replies; RequestError with the sentence of its error."""
        if do != "make" and not self.stage.workers.has(self.key):
            raise _Lost
        self.stage.workers.ask(self.key, do, *values)
        reply = yield None
        if reply.is_lost:
            raise _Lost
        if reply.error is not None:
            raise RequestError("tool_failed", reply.error)
        return reply.value

    def _respond(
        self, answer: ParsedAnswer, tools: Sequence[Mapping[str, Any]], is_unread: bool
    ) -> Generator[None, Reply, tuple[list[Message], list[dict[str, Any]]]]:
        """Return the messages behind an answer, none at the episode's end, and an entry for each call."""
        texts = [unknown_tool(call.name, tools) for call in answer.calls]
        calls = [(call.name, call.arguments) for call, text in zip(answer.calls, texts, strict=True) if text is None]
        results = iter((yield from self._asked("call", calls)) if calls else ())
        appended, used = list[Message](), list[dict[str, Any]]()
        for call, unknown in zip(answer.calls, texts, strict=True):
            text, is_cut, seconds = (unknown, False, 0.0) if unknown is not None else next(results)
            error = None if unknown is None else "unknown_tool"
            if is_cut:
                error = f"cut at {MOST_RESULT_BYTES:,} bytes"
                self.stage.renderer.warn_once(
                    "tool result", f"{self.name}: the result of {call.name} is {error}, and others like it"
                )
            appended.append(tool_message(call.id, text))
            used.append({"name": call.name, "seconds": round(seconds, 6), "error": error})
        if is_unread:
            appended.append({"role": "user", "content": UNREAD_CALL})
        elif not answer.calls and (said := (yield from self._asked("next", self.transcript))) is not None:
            appended.append(said)
        return appended, used


def _said(answer: ParsedAnswer) -> Message:
    """Return an answer as a message of the transcript."""
    return {name: value for name, value in answer.as_output().items() if name == "content" or value not in (None, [])}


def _shown(message: Message) -> Message:
    """Return a message of the line in OpenAI's form: arguments are JSON text."""
    calls = [
        call | {"function": call["function"] | {"arguments": given if isinstance(given, str) else write_json(given)}}
        for call in message.get("tool_calls", ())
        for given in [call["function"]["arguments"]]
    ]
    return message | ({"tool_calls": calls} if calls else {})
