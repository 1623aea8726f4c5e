"""The input as work: each line's requests in order, without those that are answered already.

Must not know: the engine's state, how answers are written. Invariants: a request's number is its place
among all requests of the input, whatever was answered before; every request comes out once, as a Request or
a Failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from apcbatch.config import Config
from apcbatch.data.records import BadLine, Conversation
from apcbatch.data.render import Prompt, Renderer
from apcbatch.data.rollout import Rollout
from apcbatch.data.turns import choose_turns
from apcbatch.errors import RequestError
from apcbatch.job.answered import Answered
from apcbatch.job.keys import KeyTable, id_key
from apcbatch.job.record import Ticket
from apcbatch.types import Request, Result

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed before it reached the engine."""

    ticket: Ticket
    error: RequestError


@dataclass(slots=True)
class Chain:
    """A conversation in rollout: its turns that are not answered yet, each built on the answer before."""

    conversation: Conversation
    rollout: Rollout
    remaining: deque[Ticket]


@dataclass(frozen=True, slots=True)
class Tag:
    """What the feeder needs back with a result."""

    ticket: Ticket
    chain: Chain | None


Work = Request | Failure


class Feeder:
    """Hands out work one by one, reading the input only as far as it is asked.

    num_requests: numbers given so far. num_skipped: those of them that were answered before. exhausted: the
    input is read to its end. num_chains: rollout conversations that are begun and not finished.
    """

    def __init__(
        self,
        config: Config,
        records: Iterable[Conversation | BadLine],
        renderer: Renderer,
        answered: Answered,
    ) -> None:
        self.num_requests = self.num_skipped = self.num_chains = 0
        self.exhausted = False
        self._config, self._renderer, self._answered = config, renderer, answered
        self._lines_of_ids = KeyTable(with_values=True)
        self._work = self._all_work(islice(records, config.limit))

    @property
    def total(self) -> int | None:
        """Requests to be answered in this run, where the whole input is read."""
        return self.num_requests - self.num_skipped if self.exhausted else None

    def next(self) -> Work | None:
        """The next piece of work; None where a line gave none (it is answered) or the input ended."""
        try:
            return next(self._work)
        except StopIteration:
            self.exhausted = True
            return None

    def follow(self, result: Result) -> list[Work]:
        """What a result makes possible: the conversation's next turn, or the failures of all further ones."""
        chain: Chain | None = result.tag.chain
        if chain is None:
            return []
        if result.error is not None:
            return list(self._give_up(chain, result.tag.ticket, result.error))
        return list(self._advance(chain, result.tag.ticket, result.token_ids, result.finish_reason == "stop"))

    def _all_work(self, records: Iterable[Conversation | BadLine]) -> Iterator[Work | None]:
        for record in records:
            if isinstance(record, BadLine):
                yield self._whole_line(record.line, record.custom_id, None, record.error)
            else:
                yield from self._conversation(record)

    def _conversation(self, conversation: Conversation) -> Iterator[Work | None]:
        first_id = conversation.request_id(1)
        key = id_key(first_id)
        if not self._lines_of_ids.add(key, conversation.line):
            name = conversation.custom_id or conversation.id
            message = f"id {name!r} was used by line {self._lines_of_ids.get(key)}; expected each id once"
            yield self._whole_line(
                conversation.line, first_id, conversation.id, RequestError("duplicate_id", message)
            )
            return
        try:
            turns = self._turns_of(conversation)
        except RequestError as error:
            yield self._whole_line(conversation.line, first_id, conversation.id, error)
            return
        tickets = [self._ticket(conversation, turn) for turn in turns]
        if all(ticket in self._answered for ticket in tickets):
            self.num_skipped += len(tickets)
            yield None
        elif self._config.turns == "rollout":
            yield from self._begin_chain(conversation, tickets)
        else:
            yield from self._recorded_turns(conversation, tickets)

    def _turns_of(self, conversation: Conversation) -> list[int]:
        """The turns that are requests, without rendering anything."""
        if conversation.source_format == "batch":
            return [1]
        return [turn.number for turn in choose_turns(conversation.messages, self._config.turns)]

    def _recorded_turns(self, conversation: Conversation, tickets: list[Ticket]) -> Iterator[Work | None]:
        """Requests whose history is the recorded one."""
        prompts: dict[int | None, Prompt] = {}
        try:
            rendered = _guarded(lambda: self._renderer.render(conversation, self._config.turns))
            prompts = {prompt.turn: prompt for prompt in rendered.prompts}
            errors: dict[int | None, RequestError] = {
                failure.turn: failure.error for failure in rendered.failures
            }
        except RequestError as error:
            errors = {ticket.turn: error for ticket in tickets}
        for ticket in tickets:
            if ticket in self._answered:
                self.num_skipped += 1
            elif ticket.turn in prompts:
                yield self._request(ticket, conversation, prompts[ticket.turn], None)
            else:
                yield Failure(ticket, errors[ticket.turn])

    def _begin_chain(self, conversation: Conversation, tickets: list[Ticket]) -> Iterator[Work | None]:
        try:
            rollout = _guarded(lambda: Rollout(self._renderer, conversation))
        except RequestError as error:
            yield from self._fail(tickets, error)
            return
        self.num_chains += 1
        yield from self._next_turn(Chain(conversation, rollout, deque(tickets)))

    def _next_turn(self, chain: Chain) -> Iterator[Work]:
        """The request of the next turn; turns that OUT answers are passed with the answers from there."""
        if not chain.remaining:
            self.num_chains -= 1
            return
        ticket = chain.remaining.popleft()
        record = self._answered.record(ticket)
        if record is None:
            yield self._request(ticket, chain.conversation, chain.rollout.prompt, chain)
            return
        self.num_skipped += 1
        if record["error"] is not None:
            error = RequestError(record["error"]["code"], record["error"]["message"], ticket.line)
            yield from self._give_up(chain, ticket, error)
        else:
            finish_reason = record["response"]["body"]["choices"][0]["finish_reason"]
            token_ids = record["apcbatch"]["completion_token_ids"]
            yield from self._advance(chain, ticket, token_ids, finish_reason == "stop")

    def _advance(self, chain: Chain, ticket: Ticket, token_ids: list[int], stopped: bool) -> Iterator[Work]:
        """Feed an answer back and go on with the next turn."""
        if chain.remaining:
            try:
                _guarded(lambda: chain.rollout.advance(token_ids, stopped))
            except RequestError as error:
                yield from self._give_up(chain, ticket, error)
                return
        yield from self._next_turn(chain)

    def _give_up(self, chain: Chain, ticket: Ticket, error: RequestError) -> Iterator[Work]:
        """The turns after one that has no answer have no history: they fail for the same reason."""
        self.num_chains -= 1
        message = f"there is no history: turn {ticket.turn} was not answered ({error.message})"
        yield from self._fail(chain.remaining, RequestError(error.code, message, ticket.line))

    def _fail(self, tickets: Iterable[Ticket], error: RequestError) -> Iterator[Work]:
        for ticket in tickets:
            if ticket in self._answered:
                self.num_skipped += 1
            else:
                yield Failure(ticket, error)

    def _request(
        self, ticket: Ticket, conversation: Conversation, prompt: Prompt, chain: Chain | None
    ) -> Request:
        config = self._config
        settings: dict[str, Any] = {
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": config.seed,
            "ignore_eos": config.ignore_eos,
            "logprobs": config.logprobs,
        } | conversation.params
        token_ids: Any = prompt.token_ids  # an array serves as the sequence
        keep_answer = chain is not None  # only a rollout builds on the answer
        return Request(ticket.request_id, token_ids, **settings, keep_answer=keep_answer, tag=Tag(ticket, chain))

    def _ticket(self, conversation: Conversation, turn: int) -> Ticket:
        self.num_requests += 1
        return Ticket(
            self.num_requests - 1,
            conversation.line,
            turn,
            conversation.request_id(turn),
            conversation.id,
            conversation.prompt is not None,
        )

    def _whole_line(
        self, line: int, custom_id: str | None, conversation: str | None, error: RequestError
    ) -> Failure | None:
        """The failure of a line that has no turns; None where OUT has it already."""
        self.num_requests += 1
        ticket = Ticket(self.num_requests - 1, line, None, custom_id, conversation)
        if ticket in self._answered:
            self.num_skipped += 1
            return None
        return Failure(ticket, RequestError(error.code, error.message, line))


def _guarded(make: Callable[[], T]) -> T:
    """The value, or a RequestError whatever went wrong: one conversation must never end the job."""
    try:
        return make()
    except RequestError:
        raise
    except Exception as error:  # the place around one request, before the engine
        raise RequestError("internal", f"the prompt could not be made: {error!r}") from error
