"""Live episodes (--turns live): conversations whose tools answer while the engine runs other requests.

An episode is a generator. It yields the request of a turn and gets its result, or asks the tool workers, yields None,
and gets their reply. Invariants: the records of an episode depend on its line, the seed and what its tools return, not
on when they return it; the engine never waits for a tool while it has requests; a turn's record is handed out when its
tools have answered.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import orjson

from apcbatch.config import Config
from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.rollout import LiveHistory
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.output.parser import ParsedAnswer
from apcbatch.engine.serving import LOOK_AHEAD
from apcbatch.errors import RequestError, UsageError
from apcbatch.job.feed import Feeder
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.record import Ticket, is_stopped, read_record, record_number
from apcbatch.job.request import make_request
from apcbatch.job.sink import FileSink
from apcbatch.job.tool_workers import Reply, ToolWorkers, checked_tools
from apcbatch.job.work import Failure, JobEngine, Work
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.tools import MOST_RESULT_BYTES, UNREAD_CALL, Message, tool_message, unknown_tool
from apcbatch.types import Request, Result

MOST_OPEN = 1 << 12  # episodes
MOST_UNREAD = 3  # answers in a row with a call that cannot be read
WAIT_S = 0.2
Steps = Generator[Request | None, Any, None]


class _Restart(Exception):
    """The episode cannot go on from what is recorded, and begins anew."""


class _Lost(Exception):
    """The episode's worker has ended: it is made again, and its calls too."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """An answer of the model that needs not be generated again. request_digest: as in Ticket. appended_digest: of the
    messages behind it; None while its tools have not answered. The rest is as in Result."""

    token_ids: TokenArray
    stop_reason: int | str | None
    stopped: bool
    request_digest: str | None
    appended_digest: str | None

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> _Answered | None:
        """Return the answer of a record; None if it has none."""
        ours = record["apcbatch"]
        if record["error"] is not None or not isinstance(digest := ours.get("appended_digest"), str):
            return None
        token_ids, stopped = as_token_array(ours["completion_token_ids"]), is_stopped(record)
        return cls(token_ids, ours.get("stop_reason"), stopped, ours.get("request_digest"), digest)

    @classmethod
    def of_result(cls, result: Result, digest: str | None = None) -> _Answered:
        """Return the answer of a result."""
        token_ids, stopped = as_token_array(result.token_ids), result.finish_reason == "stop"
        return cls(token_ids, result.stop_reason, stopped, result.tag.ticket.request_digest, digest)


@dataclass(slots=True)
class Episode:
    """An open episode. key: its number among all of the run. ticket: of the line. past: the turns that are recorded.
    transcript: messages in OpenAI's form."""

    key: int
    name: str
    sample: int
    conversation: Conversation
    ticket: Ticket
    past: list[_Answered]
    attempt: int
    turn: int = 1
    result: Result | None = None
    transcript: list[Message] = field(default_factory=list)
    steps: Steps | None = None
    is_made: bool = False


class LiveFeeder(Feeder):
    """Work source of live episodes: their requests, finished turns and failures. Numbers of requests leave room for
    `max_turns` turns of `samples` episodes a line.

    idle_s: seconds in which the engine had nothing to run. num_restarted: episodes begun anew.
    """

    def __init__(
        self,
        config: Config,
        records: Iterable[Conversation | BadLine],
        renderer: Renderer,
        answers: PreviousAnswers,
        engine: JobEngine,
        workers: ToolWorkers,
    ) -> None:
        most = min(config.max_request_tokens, config.max_episode_tokens, engine.context_length or 1 << 62)
        super().__init__(replace(config, max_request_tokens=most), records, renderer, answers, keeps_answers=True)
        self._engine, self._workers = engine, workers
        self._ready: deque[Work] = deque()
        self._ended: list[Result | Failure] = []
        self._open: dict[int, Episode] = {}
        self._stride = config.max_turns * config.samples
        self._num_episodes = self._num_making = self._num_handed_out = self._num_lines = 0
        self.idle_s = 0.0
        self.num_restarted = 0
        self._is_read = False

    @property
    def total(self) -> int | None:
        """Records of this run; None until all are handed out."""
        return self._num_handed_out if self.exhausted else None

    def opening(self) -> str:
        """Return the opening line."""
        words = f"{self.num_conversations:,} conversations so far, with {self._workers.factory} as tools"
        if self._config.samples > 1 and self._config.temperature == 0:
            words += f"; at temperature 0 the {self._config.samples} episodes of a line differ by their tools alone"
        return words

    def pause(self) -> bool:
        """Return whether the engine should run, as nothing can be handed out before a tool answers."""
        self._take_replies(0.0)
        return not (self._ready or self._may_begin) and self._engine.num_unfinished > 0

    def next(self) -> Work | None:
        """Return the next work; None if there is none at the moment. Waits a moment for tools if the engine has
        nothing to run."""
        if not self._ready and self._may_begin:
            try:
                work = next(self._work)
            except StopIteration:
                self._is_read = True
            else:
                if work is not None:
                    self._ready.append(work)
        elif not self._ready and self._open and not self._engine.num_unfinished:
            begin = time.perf_counter()
            self._take_replies(WAIT_S)
            self.idle_s += time.perf_counter() - begin
        work = self._ready.popleft() if self._ready else None
        self._num_handed_out += isinstance(work, Failure)
        self.exhausted = self._is_read and not self._open and not self._ready
        return work

    def take_ended(self) -> list[Result | Failure]:
        """Return the turns whose tools have answered, and the episodes that failed, since the last call."""
        ended, self._ended = self._ended, []
        self._num_handed_out += len(ended)
        return ended

    def drain(self) -> None:
        """Wait for the tools of the answers that are there, and begin no further turn."""
        while any(episode.result is not None for episode in self._open.values()):
            self._take_replies(WAIT_S)

    def follow_up(self, result: Result) -> list[Work]:
        """Let the episode of a result go on. What comes of it, `next` and `take_ended` return."""
        self._advance(result.tag.rollout, result)
        return []

    @property
    def _may_begin(self) -> bool:
        """Whether another episode may be opened."""
        most_making = LOOK_AHEAD * self._config.max_running
        return not self._is_read and len(self._open) < MOST_OPEN and self._num_making < most_making

    def _take_replies(self, seconds: float) -> None:
        """Let episodes go on whose tools have answered; wait for the first one at most that long."""
        for reply in self._workers.poll(seconds) if self._open else ():
            if (episode := self._open.get(reply.key)) is not None:
                self._advance(episode, reply)

    def _advance(self, episode: Episode, value: Result | Reply | None) -> None:
        assert episode.steps is not None
        try:
            request = episode.steps.send(value)
        except StopIteration:
            del self._open[episode.key]
        else:
            if request is not None:
                self._ready.append(request)

    def _numbered(self, ticket: Ticket) -> Ticket:
        """Count a line. Return its ticket with the first of its numbers: the position of its first request, or that
        which OUT has for it, or one behind all of OUT's if another line has that."""
        position = self._num_lines * self._stride
        self._num_lines += 1
        self.num_requests = self._num_lines
        answers, number = self._answers, position
        for sample in range(self._config.samples if answers and ticket.turn is not None else 0):
            if (record := answers.find(self._ticket_of(ticket, sample, 1))) is not None:
                number = record_number(record) - sample * self._config.max_turns
                break
        else:
            if answers and self._next_number is None and answers.has_number(position, self._stride):
                self._next_number = max(answers.last_number, position) + 1
            if self._next_number is not None:
                number, self._next_number = self._next_number, self._next_number + self._stride
        if number != position:
            answers.places.extend(one + k for k in range(self._stride) for one in (number, position))
        return replace(ticket, number=number)

    def _name(self, ticket: Ticket, sample: int) -> str:
        return f"{ticket.conversation}/{sample}" if self._config.samples > 1 else str(ticket.conversation)

    def _ticket_of(self, ticket: Ticket, sample: int, turn: int) -> Ticket:
        """Return the ticket of a turn of an episode. ticket: of the line."""
        line_key, stream = ticket.line_key, ticket.random_stream
        if line_key is not None and self._config.samples > 1:
            line_key = f"{line_key}/{sample}"
        if stream is not None:
            stream = json.dumps([turn, *json.loads(stream)[1:]]) + f"\0{sample}" * (sample > 0)
        return replace(
            ticket,
            number=ticket.number + sample * self._config.max_turns + turn - 1,
            turn=turn,
            custom_id=f"{self._name(ticket, sample)}#{turn}",
            line_key=line_key,
            random_stream=stream,
        )

    def _turns_of(
        self, conversation: Conversation, tickets: list[Ticket], duplicates: dict[int | None, RequestError]
    ) -> Iterator[Work | None]:
        """Open the episodes of a line, and yield None for each; an episode that has ended in OUT is left out."""
        self.num_conversations += 1
        [ticket] = tickets
        for sample in range(self._config.samples):
            records = self._records_of(ticket, sample)
            is_same = all(one["apcbatch"].get("line_digest") == ticket.line_digest for one in records)
            if is_same and records and records[-1]["apcbatch"].get("end") is not None:
                self.num_skipped += 1
                yield None
                continue
            attempt = max((one["apcbatch"].get("attempt", 1) for one in records), default=1)
            past = [answered for one in records if (answered := _Answered.of_record(one)) is not None]
            name = self._name(ticket, sample)
            episode = Episode(self._num_episodes, name, sample, conversation, ticket, past, attempt)
            if not is_same or len(past) < len(records):
                self._begin_anew(episode)
            self._num_episodes += 1
            self._open[episode.key] = episode
            episode.steps = self._play(episode)
            self._num_making += 1
            self._advance(episode, None)
            yield None

    def _records_of(self, ticket: Ticket, sample: int) -> list[dict[str, Any]]:
        """Return the records that OUT has of an episode."""
        records: list[dict[str, Any]] = []
        while self._answers and (record := self._answers.find(self._ticket_of(ticket, sample, len(records) + 1))):
            records.append(record)
        return records

    def _begin_anew(self, episode: Episode) -> None:
        self.num_restarted += 1
        episode.attempt += 1
        episode.past, episode.result = [], None

    def _play(self, episode: Episode) -> Steps:
        """Play an episode to its end."""
        is_over = False
        while not is_over:
            try:
                yield from self._attempt(episode)
                is_over = True
            except _Lost:
                continue
            except _Restart:
                self._begin_anew(episode)
            except Exception as raised:  # only this episode fails, even from a fault of this program
                if episode.turn <= len(episode.past):  # of a call that was made again
                    self._begin_anew(episode)
                else:
                    self._fail_episode(episode, raised)
                    is_over = True
            if self._workers.has(episode.key):
                self._workers.ask(episode.key, "close")
                yield None
            self._workers.drop(episode.key)
        self._note_made(episode)

    def _fail_episode(self, episode: Episode, raised: Exception) -> None:
        error = raised if isinstance(raised, RequestError) else RequestError("internal", f"{raised!r}")
        fields = self._fields(episode) | {"end": "error", "transcript": list(episode.transcript)}
        ticket = replace(self._ticket_of(episode.ticket, episode.sample, episode.turn), live=fields)
        self._ended.append(Failure(ticket, RequestError(error.code, error.message, ticket.line)))
        episode.result = None

    def _fields(self, episode: Episode) -> dict[str, Any]:
        return {"episode": episode.name, "attempt": episode.attempt}

    def _note_made(self, episode: Episode) -> None:
        """Note that the episode's code is made, or never will be."""
        self._num_making -= not episode.is_made
        episode.is_made = True

    def _attempt(self, episode: Episode) -> Steps:
        """Play an episode from its begin; _Restart if what is recorded does not fit. RequestError ends it."""
        line = episode.conversation
        episode.turn = 1
        episode.transcript = [_shown(message) for message in line.messages]
        made = yield from self._asked(episode, "make", line.row, episode.sample)
        self._note_made(episode)
        if (episode.past or episode.result is not None) and not made["replay"]:
            raise _Restart
        tools = line.tools if made["tools"] is None else checked_tools(made)
        conversation = replace(line, messages=list(line.messages), tools=tools or None)
        history = LiveHistory(self._renderer, conversation, self._config.history == "tokens")
        num_unread = 0
        for episode.turn in count(1):
            sampled, end = list(history.sampled), None
            request = self._request_of(episode, conversation, history)
            known, ticket = (yield from self._answered(episode, request)), request.tag.ticket
            del request
            answer = history.take(*self._as_history(ticket, known.token_ids.tolist(), known.stopped, known.stop_reason))
            episode.transcript.append(_said(answer))
            is_unread = any(warning.kind == "unread_call" for warning in answer.warnings)
            num_unread = num_unread + 1 if is_unread else 0
            appended, used = yield from self._respond(episode, answer, tools or [], is_unread)
            digest = hashlib.sha256(orjson.dumps(appended)).hexdigest()[:32]
            is_recorded = episode.turn <= len(episode.past)
            if is_recorded and episode.past[episode.turn - 1].appended_digest != digest:
                raise _Restart
            episode.transcript += appended
            if not appended:
                end = "done"
            elif num_unread >= MOST_UNREAD:
                end = "error"
            elif episode.turn >= self._config.max_turns:
                end = "max_turns"
            else:
                history.extend(appended)
                end = "context" if len(history.prompt.token_ids) >= self._config.max_request_tokens else None
            if is_recorded and end is not None:
                raise _Restart
            score = None
            if end is not None:
                score = _checked_score((yield from self._asked(episode, "score", episode.transcript)))
            if not is_recorded:
                fields = {"appended": appended, "appended_digest": digest, "tools": used, "sampled": sampled}
                self._end_turn(episode, fields | {"end": end, "score": score})
            if end is not None:
                return

    def _answered(self, episode: Episode, request: Request) -> Generator[Request, Result, _Answered]:
        """Return the answer to a request: the recorded one, or the engine's."""
        if episode.turn <= len(episode.past):
            known = episode.past[episode.turn - 1]
            if known.request_digest != request.tag.ticket.request_digest:
                raise _Restart
            return known
        if episode.result is None:
            result = yield request
            if result.error is not None:
                raise result.error
            episode.result = replace(result, tag=replace(result.tag, ended=time.monotonic()))
        return _Answered.of_result(episode.result)

    def _end_turn(self, episode: Episode, fields: dict[str, Any]) -> None:
        """Hand out a turn whose tools have answered. fields: of its record."""
        result, episode.result = episode.result, None
        assert result is not None
        episode.past.append(_Answered.of_result(result, fields["appended_digest"]))
        ticket = replace(result.tag.ticket, live=self._fields(episode) | fields)
        self._ended.append(replace(result, tag=replace(result.tag, ticket=ticket)))

    def _request_of(self, episode: Episode, conversation: Conversation, history: LiveHistory) -> Request:
        ticket = self._ticket_of(episode.ticket, episode.sample, episode.turn)
        request = make_request(
            self._config, self._renderer, ticket, conversation, history.prompt, episode, keep_answer=True
        )
        room = self._config.max_request_tokens - len(request.token_ids)
        request.max_tokens = max(1, min(request.max_tokens, room))
        if request.constraint is not None:
            request.constraint()  # RequestError for a bad grammar
        return request

    def _asked(self, episode: Episode, do: str, *values: Any) -> Generator[None, Reply, Any]:
        """Return what the episode's code replies; RequestError with the sentence of its error."""
        if do != "make" and not self._workers.has(episode.key):
            raise _Lost
        self._workers.ask(episode.key, do, *values)
        reply = yield None
        if reply.is_lost:
            raise _Lost
        if reply.error is not None:
            raise RequestError("tool_failed", reply.error)
        return reply.value

    def _respond(
        self, episode: Episode, answer: ParsedAnswer, tools: Sequence[Mapping[str, Any]], is_unread: bool
    ) -> Generator[None, Reply, tuple[list[Message], list[dict[str, Any]]]]:
        """Return the messages behind an answer, none at the episode's end, and an entry for each call."""
        texts = [unknown_tool(call.name, tools) for call in answer.calls]
        calls = [(call.name, call.arguments) for call, text in zip(answer.calls, texts, strict=True) if text is None]
        results = iter((yield from self._asked(episode, "call", calls)) if calls else ())
        appended, used = list[Message](), list[dict[str, Any]]()
        for call, text in zip(answer.calls, texts, strict=True):
            is_cut, seconds = False, 0.0
            error = "unknown_tool" if text is not None else None
            if text is None:
                text, is_cut, seconds = next(results)
            if is_cut:
                error = f"cut at {MOST_RESULT_BYTES:,} bytes"
                self._renderer.warn_once(
                    "tool result", f"{episode.name}: the result of {call.name} is {error}, and others like it"
                )
            appended.append(tool_message(call.id, text))
            used.append({"name": call.name, "seconds": round(seconds, 6), "error": error})
        if is_unread:
            appended.append({"role": "user", "content": UNREAD_CALL})
        elif not answer.calls and (said := (yield from self._asked(episode, "next", episode.transcript))) is not None:
            appended.append(said)
        return appended, used


def _checked_score(score: Any) -> Any:
    try:
        orjson.dumps(score)
    except TypeError as error:  # an integer of more than 64 bits, or very deep
        raise RequestError("tool_failed", f"score returned what no record can hold: {error}") from None
    return score


def _said(answer: ParsedAnswer) -> Message:
    """Return an answer as a message of the transcript."""
    return {name: value for name, value in answer.as_output().items() if name == "content" or value not in (None, [])}


def _shown(message: Message) -> Message:
    """Return a message of the line in OpenAI's form: arguments are JSON text."""
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        call | {"function": call["function"] | {"arguments": _text_of(call["function"].get("arguments"))}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def drop_stale(sink: FileSink) -> None:
    """Remove the records of episodes that were begun anew."""
    stale = stale_records(sink.lines(), False)
    if stale:
        sink.keep(lambda offset, line: offset not in stale)


def factory_name(tools: str | Callable[..., Any]) -> str:
    """Return the name `PACKAGE.MODULE:FACTORY` of a factory. UsageError if workers could not import it by that."""
    if isinstance(tools, str):
        return tools
    module, name = getattr(tools, "__module__", None), getattr(tools, "__qualname__", "<")
    if module in (None, "__main__") or "<" in name:
        raise UsageError(
            f"tools is {name} of {module}, which the processes of tools cannot import; define it at the top of a module"
        )
    return f"{module}:{name}"


def read_episode(name: str, lines: Iterable[bytes | None]) -> tuple[list[Message], dict[str, Any]]:
    """Return what OUT has of an episode: the messages behind those of its line, all if it failed, and its last record;
    if it was begun anew, those of the last time. lines: of OUT. UsageError without such an episode."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        record = None if line is None or b'"episode":' not in line else read_record(line)
        ours = record["apcbatch"] if record is not None else {}
        if record is None or ours.get("episode") != name:
            continue
        if found and ours.get("attempt", 1) > next(iter(found.values()))["apcbatch"].get("attempt", 1):
            found.clear()
        found[record["turn"]] = record
    if not found:
        raise UsageError(f"OUT has no episode {name!r}; give the custom_id of a record without its #TURN")
    messages: list[Message] = []
    last = found[max(found)]
    if last["error"] is not None:
        return last["apcbatch"].get("transcript", []), last
    for _, record in sorted(found.items()):
        messages.append(record["response"]["body"]["choices"][0]["message"])
        messages += record["apcbatch"].get("appended", [])
    return messages, last


def stale_records(lines: Iterable[tuple[int, bytes]], retry_errors: bool) -> set[int]:
    """Return the byte offsets of the records of episodes that were begun anew; with retry_errors, also of those that
    have a retryable error. lines: (offset, line) of OUT."""
    found: list[tuple[int, str, int]] = []
    latest: dict[str, int] = {}
    failed: set[str] = set()
    for offset, line in lines:
        if b'"attempt":' not in line:
            continue
        try:
            record = orjson.loads(line)
            ours, error = record["apcbatch"], record["error"]
            name, attempt = f"{ours['line_key']}\0{ours['episode']}", int(ours["attempt"])
        except (orjson.JSONDecodeError, LookupError, TypeError, ValueError):
            continue
        found.append((offset, name, attempt))
        latest[name] = max(attempt, latest.get(name, 0))
        if retry_errors and error is not None and error.get("retryable"):
            failed.add(name)
    return {offset for offset, name, attempt in found if attempt < latest[name] or name in failed}
