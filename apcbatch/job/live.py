"""Live episodes (--turns live): conversations whose tools answer while the engine runs other requests.

An episode is a generator. It yields the request of a turn and gets its result, or yields the numbers of requests to the
tool workers and gets their replies. Invariants: the records of an episode depend on its line, the seed and what its
tools return, not on when they return it; the engine never waits for a tool while it has requests; a turn's record is
handed out when its tools have answered.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from apcbatch.config import Config
from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.rollout import LiveHistory
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.input.messages import ContentWarnings
from apcbatch.data.input.tools import check_tools
from apcbatch.data.output.parser import ParsedAnswer
from apcbatch.data.output.stop_texts import cut_answer
from apcbatch.display import counted
from apcbatch.engine.serving import LOOK_AHEAD
from apcbatch.errors import RequestError, UsageError
from apcbatch.job.feed import Feeder
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.record import Ticket, is_stopped, read_record, record_number
from apcbatch.job.request import make_request
from apcbatch.job.sink import FileSink
from apcbatch.job.tool_workers import Reply, ToolWorkers
from apcbatch.job.work import Failure, JobEngine, TurnDone, Work
from apcbatch.tools import MOST_RESULT_BYTES, UNREAD_CALL, Message, tool_message, unknown_tool
from apcbatch.types import Request, Result

TOOLS_LOG_SUFFIX = ".tools.log"
MOST_OPEN = 1 << 12  # episodes
MOST_UNREAD = 3  # answers in a row with a call that cannot be read
WAIT_S = 0.2
Steps = Generator[Request | list[int], Any, None]


class _Restart(Exception):
    """The episode cannot go on from what is recorded, and begins anew."""


class _Lost(Exception):
    """The worker ended while an episode was made again."""


@dataclass(slots=True)
class _Answered:
    """A turn whose tools have answered. length: messages of the transcript up to its answer. digest: of the appended
    messages."""

    answer: ParsedAnswer
    length: int
    digest: str


@dataclass(slots=True)
class Episode:
    """An open episode. key: its number among all of the run. ticket: of its first turn, which the line's tickets are
    made from. records: those of OUT by turn. transcript: messages in OpenAI's form. waiting: the requests to workers
    whose replies are missing."""

    key: int
    name: str
    sample: int
    conversation: Conversation
    ticket: Ticket
    records: dict[int, dict[str, Any]]
    attempt: int = 1
    turn: int = 1
    replay: bool = True
    is_async: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    transcript: list[Message] = field(default_factory=list)
    past: list[_Answered] = field(default_factory=list)
    waiting: dict[int, Reply | None] = field(default_factory=dict)
    steps: Steps | None = None
    is_made: bool = False


class LiveFeeder(Feeder):
    """Work source of live episodes: their requests, finished turns and failures. Numbers of requests leave room for
    `max_turns` turns of `samples` episodes a line.

    idle_s: seconds in which the engine had nothing to run. num_restarted: episodes begun anew.
    """

    is_live = True

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
        self._done: list[TurnDone] = []
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

    def take_done(self) -> list[TurnDone]:
        """Return the turns whose tools have answered since the last call."""
        done, self._done = self._done, []
        self._num_handed_out += len(done)
        return done

    def follow_up(self, result: Result) -> list[Work]:
        """Let the episode of a result go on. What comes of it, `next` returns."""
        self._advance(result.tag.rollout, result)
        return []

    @property
    def _may_begin(self) -> bool:
        """Whether another episode may be opened."""
        return (
            not self._is_read
            and len(self._open) < MOST_OPEN
            and self._num_making < LOOK_AHEAD * self._config.max_running
        )

    def _take_replies(self, seconds: float) -> None:
        """Let episodes go on whose tools have answered; wait for the first one at most that long."""
        for reply in self._workers.poll(seconds) if self._open else ():
            episode = self._open.get(reply.key)
            if episode is not None and reply.op in episode.waiting:
                episode.waiting[reply.op] = reply
                if None not in episode.waiting.values():
                    replies, episode.waiting = list(episode.waiting.values()), {}
                    self._advance(episode, replies)

    def _advance(self, episode: Episode, value: Any) -> None:
        assert episode.steps is not None
        was_made = episode.is_made
        try:
            step = episode.steps.send(value)
        except StopIteration:
            self._workers.drop(episode.key)
            del self._open[episode.key]
            step = []
        self._num_making -= episode.is_made and not was_made
        if isinstance(step, Request):
            self._ready.append(step)
        else:
            episode.waiting = dict.fromkeys(step)

    def _numbered(self, ticket: Ticket) -> Ticket:
        """Count a line. Return its ticket with the first of its numbers: the position of its first request, or that
        which OUT has for it, or one behind all of OUT's if another line has that."""
        position = self._num_lines * self._stride
        self._num_lines += 1
        self.num_requests = self._num_lines
        answers = self._answers
        number = position
        for sample in range(self._config.samples if answers and ticket.turn is not None else 0):
            if (record := answers.find(self._ticket_of(ticket, sample, 1))) is not None:
                return replace(ticket, number=record_number(record) - sample * self._config.max_turns)
        if answers and self._next_number is None and answers.has_number(position, self._stride):
            self._next_number = max(answers.last_number, position) + 1
        if self._next_number is not None:
            number, self._next_number = self._next_number, self._next_number + self._stride
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
            last = max(records, default=0)
            is_same = all(one["apcbatch"].get("line_digest") == ticket.line_digest for one in records.values())
            if is_same and records and records[last]["apcbatch"].get("end") is not None:
                self.num_skipped += 1
                yield None
                continue
            attempt = max((one["apcbatch"].get("attempt", 1) for one in records.values()), default=1)
            episode = Episode(
                self._num_episodes, self._name(ticket, sample), sample, conversation, ticket, records, attempt
            )
            if not is_same:
                self._begin_anew(episode)
            self._num_episodes += 1
            self._open[episode.key] = episode
            episode.steps = self._play(episode)
            self._num_making += 1
            self._advance(episode, None)
            yield None

    def _records_of(self, ticket: Ticket, sample: int) -> dict[int, dict[str, Any]]:
        """Return the records that OUT has of an episode, by turn."""
        records: dict[int, dict[str, Any]] = {}
        while self._answers and (record := self._answers.find(self._ticket_of(ticket, sample, len(records) + 1))):
            records[len(records) + 1] = record
        return records

    def _begin_anew(self, episode: Episode) -> None:
        self.num_restarted += 1
        episode.attempt += 1
        episode.records = {}
        self._workers.drop(episode.key)

    def _play(self, episode: Episode) -> Steps:
        """Play an episode to its end."""
        while True:
            try:
                yield from self._attempt(episode)
                break
            except _Restart:
                self._begin_anew(episode)
            except Exception as raised:  # only this episode fails, even from a fault of this program
                error = raised if isinstance(raised, RequestError) else RequestError("internal", f"{raised!r}")
                ticket = self._ticket_of(episode.ticket, episode.sample, episode.turn)
                located = RequestError(error.code, error.message, ticket.line)
                fields = self._fields(episode) | {"end": "error", "transcript": list(episode.transcript)}
                self._ready.append(Failure(ticket, located, fields))
                break
        episode.is_made = True  # or never will be
        if self._workers.has(episode.key):
            yield [self._workers.ask(episode.key, "close")]

    def _fields(self, episode: Episode) -> dict[str, Any]:
        return {"episode": episode.name, "attempt": episode.attempt}

    def _attempt(self, episode: Episode) -> Steps:
        """Play an episode from its begin; _Restart if what is recorded does not fit. RequestError ends it."""
        conversation = episode.conversation
        episode.past, episode.turn = [], 1
        episode.transcript = [_shown(message) for message in conversation.messages]
        yield from self._make(episode)
        if episode.records and not episode.replay:
            raise _Restart
        tools = episode.tools or None
        conversation = replace(conversation, messages=list(conversation.messages), tools=tools)
        history = LiveHistory(self._renderer, conversation, self._config.history == "tokens")
        num_unread = 0
        while True:
            record = episode.records.get(episode.turn)
            request = self._request_of(episode, conversation, history)
            ticket, sampled = request.tag.ticket, list(history.sampled)
            if record is None:
                result: Result = yield request
                ended = time.monotonic()
                if result.error is not None:
                    raise result.error
                token_ids, stop_reason, stopped = result.token_ids, result.stop_reason, result.finish_reason == "stop"
            else:
                ours = record["apcbatch"]
                if record["error"] is not None or ours["request_digest"] != ticket.request_digest:
                    raise _Restart
                token_ids, stop_reason, stopped = ours["completion_token_ids"], ours["stop_reason"], is_stopped(record)
            answer = self._take(history, ticket, token_ids, stop_reason, stopped)
            episode.transcript.append(_said(answer))
            length = len(episode.transcript)
            appended, tools_used, is_done = yield from self._respond(episode, answer, length)
            episode.past.append(_Answered(answer, length, _digest(appended)))
            episode.transcript += appended
            num_unread = num_unread + 1 if _is_unread(answer) else 0
            is_last, end = episode.turn >= self._config.max_turns, None
            if is_done or num_unread >= MOST_UNREAD or is_last:
                end = "done" if is_done else "error" if num_unread >= MOST_UNREAD else "max_turns"
            else:
                history.extend(appended)
                if len(history.prompt.token_ids) >= self._config.max_request_tokens:
                    end = "context"
            fields = self._fields(episode) | {
                "appended": appended,
                "appended_digest": episode.past[-1].digest,
                "tools": tools_used,
                "sampled": sampled,
                "end": end,
                "score": None,
            }
            if end is not None:
                [reply] = yield from self._asked(episode, [("score", {"messages": episode.transcript})])
                fields["score"] = reply.value
            if record is None:
                self._done.append(TurnDone(result, fields, ended))
            elif end is not None or ours.get("appended_digest") != fields["appended_digest"]:
                raise _Restart
            if end is not None:
                return
            episode.turn += 1

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

    def _take(
        self,
        history: LiveHistory,
        ticket: Ticket,
        token_ids: Sequence[int],
        stop_reason: int | str | None,
        stopped: bool,
    ) -> ParsedAnswer:
        """Append an answer to the history, cut as in its record."""
        has_stop_token = stopped and stop_reason is None and token_ids[-1] in self._renderer.tokenizer.eos_token_ids
        cut = cut_answer(self._renderer.decode, list(token_ids), stop_reason, ticket.keeps_stop)
        return history.take(token_ids[: cut.num_tokens], has_stop_token, None if cut.is_exact else cut.text)

    def _make(self, episode: Episode) -> Generator[list[int], list[Reply], None]:
        """Make the episode in a worker. RequestError if its code cannot."""
        reply = None
        while reply is None or reply.is_lost:
            row = episode.conversation.row
            [reply] = yield [self._workers.ask(episode.key, "make", row=row, sample=episode.sample)]
        value = _value(reply)
        episode.replay, episode.is_async = value["replay"], value["is_async"]
        given = value["tools"]
        try:
            found = episode.conversation.tools if given is None else check_tools(given, "tools", ContentWarnings())
        except RequestError as error:
            raise RequestError("tool_failed", f"the episode's {error.message}") from None
        episode.tools, episode.is_made = found or [], True

    def _asked(
        self, episode: Episode, asks: Sequence[tuple[str, Mapping[str, Any]]], is_remaking: bool = False
    ) -> Generator[list[int], list[Reply], list[Reply]]:
        """Return the replies of the episode's code. If its worker is lost, the episode is made again, and then asked
        again. is_remaking: raise _Lost instead."""
        while True:
            if self._workers.has(episode.key):
                replies = yield [self._workers.ask(episode.key, do, **values) for do, values in asks]
                if not any(reply.is_lost for reply in replies):
                    for reply in replies:
                        _value(reply)
                    return replies
            if is_remaking:
                raise _Lost
            yield from self._make_again(episode)

    def _make_again(self, episode: Episode) -> Generator[list[int], list[Reply], None]:
        """Make an episode whose worker is lost, and make its calls again in their order. _Restart if it answers
        otherwise."""
        while True:
            try:
                yield from self._make(episode)
                if episode.past and not episode.replay:
                    raise _Restart
                for one in episode.past:
                    appended, _, _ = yield from self._respond(episode, one.answer, one.length, is_remaking=True)
                    if _digest(appended) != one.digest:
                        raise _Restart
                return
            except _Lost:
                continue

    def _respond(
        self, episode: Episode, answer: ParsedAnswer, length: int, is_remaking: bool = False
    ) -> Generator[list[int], list[Reply], tuple[list[Message], list[dict[str, Any]], bool]]:
        """Return the messages behind an answer, an entry for each call, and whether the episode is over. length:
        messages of the transcript up to the answer."""
        appended: list[Message] = []
        used: list[dict[str, Any]] = []
        texts: list[Any] = [unknown_tool(call.name, episode.tools) for call in answer.calls]
        asks = [
            ("call", {"name": call.name, "arguments": call.arguments})
            for call, text in zip(answer.calls, texts, strict=True)
            if text is None
        ]
        together = episode.is_async and not is_remaking
        replies: list[Reply] = []
        for some in [asks] * bool(asks) if together else [[ask] for ask in asks]:
            replies += yield from self._asked(episode, some, is_remaking)
        left = iter(replies)
        for call, text in zip(answer.calls, texts, strict=True):
            seconds, error = 0.0, "unknown_tool" if text is not None else None
            if text is None:
                reply = next(left)
                (text, is_cut), seconds = reply.value, reply.seconds
                if is_cut:
                    error = f"cut at {MOST_RESULT_BYTES:,} bytes"
                    self._renderer.warn_once(
                        "tool result", f"{episode.name}: the result of {call.name} is {error}, and others like it"
                    )
            appended.append(tool_message(call.id, text))
            used.append({"name": call.name, "seconds": round(seconds, 6), "error": error})
        if _is_unread(answer):
            return [*appended, {"role": "user", "content": UNREAD_CALL}], used, False
        if answer.calls:
            return appended, used, False
        messages = episode.transcript[:length]
        [reply] = yield from self._asked(episode, [("next", {"messages": messages})], is_remaking)
        return ([], used, True) if reply.value is None else ([reply.value], used, False)


def _value(reply: Reply) -> Any:
    """Return a reply's value; RequestError with the sentence of its error."""
    if reply.error is not None:
        raise RequestError("tool_failed", reply.error)
    return reply.value


def _is_unread(answer: ParsedAnswer) -> bool:
    return any(warning.kind == "unread_call" for warning in answer.warnings)


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


def _digest(messages: Sequence[Message]) -> str:
    return hashlib.sha256(orjson.dumps(messages)).hexdigest()[:32]


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


@contextmanager
def opened_workers(config: Config, output: str | None, warn: Callable[[str], None]) -> Iterator[ToolWorkers | None]:
    """Open the tool workers of a run, and end them at the end of the block; None without --tools. output: path of OUT,
    beside which the log of what tools print lies; None for standard error. UsageError if the tools cannot be used."""
    if config.tools is None:
        yield None
        return
    if output is None:
        log = os.dup(2)
    else:
        path, flags = output + TOOLS_LOG_SUFFIX, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            log = os.open(path, flags | (os.O_TRUNC if config.overwrite else 0), 0o666)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}; choose another -o") from None
    workers = ToolWorkers(config.tools, config.tool_workers, config.tool_timeout, config.tool_memory or 0, log)
    try:
        workers.open()
        yield workers
        if workers.num_lost:
            warn(
                f"{counted(workers.num_lost, 'worker')} of --tools ended during the run; their episodes were made again"
            )
    finally:
        workers.close()
        os.close(log)


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
