"""Live episodes (--turns live): conversations whose tools answer while the engine runs other requests.

Invariants: the engine never waits for a tool while it has requests; a turn's record is handed out when its tools have
answered. A record's `apcbatch.attempt` counts how often its episode was begun; those of earlier attempts are stale, and
stay in OUT until the run ends.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from apcbatch.config import Config
from apcbatch.data.chat.render import Renderer
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.display import counted
from apcbatch.engine.serving import LOOK_AHEAD
from apcbatch.errors import RequestError, UsageError
from apcbatch.job.episode import Answered, Episode, Stage
from apcbatch.job.feed import Feeder
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.record import Ticket, read_record, record_number
from apcbatch.job.tool_workers import Reply, ToolWorkers, most_open
from apcbatch.job.work import Failure, JobEngine, Work
from apcbatch.tools import Message
from apcbatch.types import Result

WAIT_S = 0.2


class LiveFeeder(Feeder):
    """Work source of live episodes: their requests, finished turns and failures. A line takes `max_turns`
    numbers of requests for each of its `samples` episodes.

    idle_s: seconds in which the engine had nothing to run.
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
        self.stage = Stage(self._config, renderer, workers)
        self._open: dict[int, Episode] = {}
        self._stride = config.max_turns * config.samples
        self._keys, self._num_handed_out = count(), 0
        self.idle_s = 0.0
        self._is_read, self._most_open = False, most_open(config)

    @property
    def total(self) -> int | None:
        """Records of this run; None until all are handed out."""
        return self._num_handed_out if self.exhausted else None

    def opening(self) -> str:
        """Return the opening line."""
        samples = self._config.samples
        is_greedy = samples > 1 and self._config.temperature == 0
        alike = f"; at temperature 0 the {samples} episodes of a line differ by their tools alone"
        return f"{counted(self.num_conversations, 'conversation')} so far, with their tools" + alike * is_greedy

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
        ended, self.stage.ended = self.stage.ended, []
        self._num_handed_out += len(ended)
        self.exhausted = self._is_read and not self._open and not self._ready
        return ended

    def drain(self) -> Iterator[None]:
        """Wait for the tools of the answers that are there; yield after each reply. No further turn begins, so the
        workers of the other episodes are free for those that wait for one."""
        while answered := {key: episode for key, episode in self._open.items() if episode.is_answered}:
            for key in self._open.keys() - answered.keys():
                self._workers.drop(key)
            for reply in self._workers.poll(WAIT_S):
                if reply.key in answered:
                    self._advance(answered[reply.key], reply)
            yield

    def follow_up(self, result: Result) -> list[Work]:
        """Continue the episode of a result. `next` and `take_ended` return what follows from it."""
        self._advance(result.tag.rollout, result)
        return []

    @property
    def _may_begin(self) -> bool:
        """Whether another episode may be opened."""
        most_making = LOOK_AHEAD * self._config.max_running
        return not self._is_read and len(self._open) < self._most_open and len(self.stage.making) < most_making

    def _take_replies(self, seconds: float) -> None:
        """Continue the episodes whose tools have answered. Wait for the first answer, at most `seconds`."""
        for reply in self._workers.poll(seconds) if self._open else ():
            if (episode := self._open.get(reply.key)) is not None:
                self._advance(episode, reply)

    def _advance(self, episode: Episode, value: Result | Reply | None) -> None:
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
        position = self.num_requests * self._stride
        self.num_requests += 1
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
        if number != position and self._config.ordered:
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
            records: list[dict[str, Any]] = []  # of the episode, in OUT
            while self._answers and (record := self._answers.find(self._ticket_of(ticket, sample, len(records) + 1))):
                records.append(record)
            is_same = all(one["apcbatch"].get("line_digest") == ticket.line_digest for one in records)
            if is_same and records and records[-1]["apcbatch"].get("end") is not None:
                self.num_skipped += 1
                yield None
                continue
            attempt = max((one["apcbatch"].get("attempt", 1) for one in records), default=1)
            past = [answered for one in records if (answered := Answered.of_record(one)) is not None]
            name, ticket_of = self._name(ticket, sample), partial(self._ticket_of, ticket, sample)
            key = next(self._keys)
            episode = self._open[key] = Episode(self.stage, key, name, sample, conversation, ticket_of, past, attempt)
            if not is_same or len(past) < len(records):
                episode.begin_anew()
            self._advance(episode, None)
            yield None


def stale_records(lines: Iterable[tuple[int, bytes]], retry_errors: bool) -> set[int]:
    """Return the byte offsets of stale records; with retry_errors, also of those of episodes that have a retryable
    error. lines: (offset, line) of OUT."""
    found: list[tuple[int, str, int]] = []
    latest: dict[str, int] = {}
    failed: set[str] = set()
    for offset, line in lines:
        record = read_record(line) if b'"attempt":' in line else None
        if record is not None and (attempt := record["apcbatch"].get("attempt")) is not None:
            name = f"{record['apcbatch'].get('line_key')}\0{record['apcbatch'].get('episode')}"
            found.append((offset, name, attempt))
            latest[name] = max(attempt, latest.get(name, 0))
            if retry_errors and record["error"] is not None and record["error"]["retryable"]:
                failed.add(name)
    return {offset for offset, name, attempt in found if attempt < latest[name] or name in failed}


def read_episode(name: str, lines: Iterable[bytes | None]) -> tuple[list[Message], dict[str, Any]]:
    """Return what OUT has of an episode's latest attempt: the messages behind those of its line, all if it failed, and
    its last record. lines: of OUT. UsageError without such an episode."""
    found: dict[int, dict[str, Any]] = {}
    latest = 0
    for line in lines:
        record = read_record(line) if line is not None and b'"episode":' in line else None
        if record is None or record["apcbatch"].get("episode") != name or record["turn"] is None:
            continue
        attempt = record["apcbatch"].get("attempt", 0)
        if attempt > latest:
            found, latest = {}, attempt
        if attempt == latest:
            found[record["turn"]] = record
    if not found:
        raise UsageError(
            f"no record has the episode {name!r}; give the OUT of a run with --turns live, and the custom_id of one of "
            "its records without #TURN"
        )
    last = found[max(found)]
    if last["error"] is not None:
        return last["apcbatch"].get("transcript") or [], last
    messages: list[Message] = []
    for _, record in sorted(found.items()):
        appended = record["apcbatch"].get("appended")
        messages += [record["response"]["body"]["choices"][0].get("message"), *(appended or ())]
    return messages, last
