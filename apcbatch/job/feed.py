"""The input as work: each line's requests in order, without those that are answered already.

Must not know: the engine's state, how answers are written. Invariants: a request's number is its place
among all requests of the input, whatever was answered before; every request comes out once, as a Request or
a Failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
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
from apcbatch.job.record import Ticket, request_digest
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
    input is read to its end. num_chains: rollout conversations that are begun and not finished. last_line: the
    last line that was read.
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
        self._lines_of_ids = KeyTable()
        self.last_line = 0
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
        error = result.error or self._feed_back(chain, result.token_ids, result.finish_reason == "stop")
        ticket = result.tag.ticket
        work = self._next_turn(chain) if error is None else self._give_up(chain, ticket, error)
        return [one for one in work if one is not None]

    def _all_work(self, records: Iterable[Conversation | BadLine]) -> Iterator[Work | None]:
        for record in records:
            self.last_line = record.line
            if isinstance(record, BadLine):
                yield self._whole_line(record, record.custom_id, None, record.error)
            else:
                yield from self._conversation(record)

    def _conversation(self, conversation: Conversation) -> Iterator[Work | None]:
        first_id = conversation.request_id(1)
        error = self._enter_id(first_id, conversation)
        turns: list[int] = []
        try:
            turns = [] if error else self._turns_of(conversation)
        except RequestError as refused:
            error = refused
        if error is not None:
            yield self._whole_line(conversation, first_id, conversation.id, error)
            return
        self._answered.check_shape(conversation.line, turns[0])
        tickets = [self._ticket(conversation, turn) for turn in turns]
        doubled = self._doubled(conversation, tickets)
        rollout = self._config.turns == "rollout" and not self._answered.confirmed
        if not rollout and self._answered.confirm_lines(tickets):
            self.num_skipped += len(tickets)
            yield None
        elif self._config.turns == "rollout":
            yield from self._begin_chain(conversation, tickets, doubled)
        else:
            yield from self._recorded_turns(conversation, tickets, doubled)

    def _enter_id(self, custom_id: str, conversation: Conversation) -> RequestError | None:
        """Note the id of a request; the error of one that another line has used."""
        key = id_key(custom_id)
        if self._lines_of_ids.add(key, conversation.line):
            return None
        line = self._lines_of_ids.get(key)
        return RequestError(
            "duplicate_id", f"id {custom_id!r} was used by line {line}; expected each id once"
        )

    def _doubled(self, conversation: Conversation, tickets: list[Ticket]) -> dict[int | None, RequestError]:
        """The error of each turn whose id another line has used; the first turn's id is entered already."""
        found: dict[int | None, RequestError] = {}
        first_id = conversation.request_id(1)
        for ticket in tickets:
            if ticket.custom_id is not None and ticket.custom_id != first_id:
                error = self._enter_id(ticket.custom_id, conversation)
                if error is not None:
                    found[ticket.turn] = error
        return found

    def _turns_of(self, conversation: Conversation) -> list[int]:
        """The turns that are requests, without rendering anything."""
        if conversation.source_format == "batch":
            return [1]
        return [turn.number for turn in choose_turns(conversation.messages, self._config.turns)]

    def _recorded_turns(
        self, conversation: Conversation, tickets: list[Ticket], errors: dict[int | None, RequestError]
    ) -> Iterator[Work | None]:
        """Requests whose history is the recorded one; errors: those of turns that are refused already."""
        prompts: dict[int | None, Prompt] = {}
        try:
            rendered = _guarded(lambda: self._renderer.render(conversation, self._config.turns))
            prompts = {prompt.turn: prompt for prompt in rendered.prompts}
            failed: dict[int | None, RequestError] = {one.turn: one.error for one in rendered.failures}
        except RequestError as error:
            failed = dict.fromkeys((ticket.turn for ticket in tickets), error)
        errors = failed | errors
        for ticket in tickets:
            if ticket.turn in errors:
                yield self._unless_answered(Failure(ticket, errors[ticket.turn]))
            else:
                request = self._request(ticket, conversation, prompts[ticket.turn], None)
                yield self._unless_answered(request)

    def _unless_answered(self, work: Work) -> Work | None:
        """The work, or None where OUT has its answer."""
        ticket = work.ticket if isinstance(work, Failure) else work.tag.ticket
        if ticket not in self._answered:
            return work
        self._answered.confirm(ticket)
        self.num_skipped += 1
        return None

    def _begin_chain(
        self, conversation: Conversation, tickets: list[Ticket], doubled: dict[int | None, RequestError]
    ) -> Iterator[Work | None]:
        """The first turn of a rollout; it ends before a turn that is refused already."""
        try:
            rollout = _guarded(lambda: Rollout(self._renderer, conversation))
        except RequestError as error:
            yield from self._fail(tickets, error)
            return
        end = next((at for at, ticket in enumerate(tickets) if ticket.turn in doubled), len(tickets))
        self.num_chains += 1
        yield from self._next_turn(Chain(conversation, rollout, deque(tickets[:end])))
        if end < len(tickets):
            refused, reason = tickets[end], doubled[tickets[end].turn]
            yield from self._fail([refused], reason)
            yield from self._fail(tickets[end + 1 :], _no_history(refused, reason))

    def _next_turn(self, chain: Chain) -> Iterator[Work | None]:
        """The request of the next turn; turns that OUT answers are passed with the answers from there."""
        while chain.remaining:
            ticket = chain.remaining.popleft()
            request = self._request(ticket, chain.conversation, chain.rollout.prompt, chain)
            if ticket not in self._answered:
                yield request
                return
            record = self._answered.confirm(request.tag.ticket, by_prompt=True)
            self.num_skipped += 1
            error: RequestError | None
            if record["error"] is not None:
                error = RequestError(record["error"]["code"], record["error"]["message"], ticket.line)
            else:
                reason = record["response"]["body"]["choices"][0]["finish_reason"]
                error = self._feed_back(chain, record["apcbatch"]["completion_token_ids"], reason == "stop")
            if error is not None:
                yield from self._give_up(chain, ticket, error)
                return
        self.num_chains -= 1

    def _feed_back(self, chain: Chain, token_ids: list[int], stopped: bool) -> RequestError | None:
        """Make the next turn's prompt, if there is one; the error where that cannot be done."""
        if chain.remaining:
            try:
                _guarded(lambda: chain.rollout.advance(token_ids, stopped))
            except RequestError as error:
                return error
        return None

    def _give_up(self, chain: Chain, ticket: Ticket, error: RequestError) -> Iterator[Work | None]:
        """The turns after one that has no answer fail for the same reason."""
        self.num_chains -= 1
        yield from self._fail(chain.remaining, _no_history(ticket, error))

    def _fail(self, tickets: Iterable[Ticket], error: RequestError) -> Iterator[Work | None]:
        for ticket in tickets:
            yield self._unless_answered(Failure(ticket, error))

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
        digest = request_digest(ticket, prompt.token_ids, settings)
        ticket = replace(ticket, request_digest=digest)
        token_ids: Any = prompt.token_ids  # an array serves as the sequence
        keep_answer = chain is not None  # only a rollout builds on the answer
        return Request(
            ticket.request_id, token_ids, **settings, keep_answer=keep_answer, tag=Tag(ticket, chain)
        )

    def _ticket(self, conversation: Conversation, turn: int) -> Ticket:
        self.num_requests += 1
        return Ticket(
            self.num_requests - 1,
            conversation.line,
            turn,
            conversation.request_id(turn),
            conversation.id,
            conversation.prompt is not None,
            conversation.digest,
        )

    def _whole_line(
        self,
        record: Conversation | BadLine,
        custom_id: str | None,
        conversation: str | None,
        error: RequestError,
    ) -> Work | None:
        """The failure of a line that has no turns; None where OUT has it already."""
        self.num_requests += 1
        self._answered.check_shape(record.line, None)
        number = self.num_requests - 1
        ticket = Ticket(number, record.line, None, custom_id, conversation, line_digest=record.digest)
        return self._unless_answered(Failure(ticket, RequestError(error.code, error.message, record.line)))


def _no_history(ticket: Ticket, error: RequestError) -> RequestError:
    """Why the turns after one that failed cannot be asked for."""
    message = f"there is no history: turn {ticket.turn} was not answered ({error.message})"
    return RequestError(error.code, message, ticket.line)


def _guarded(make: Callable[[], T]) -> T:
    """The value, or a RequestError whatever went wrong: one conversation must never end the job."""
    try:
        return make()
    except RequestError:
        raise
    except Exception as error:  # the place around one request, before the engine
        raise RequestError("internal", f"the prompt could not be made: {error!r}") from error
