"""Turn the input lines into requests, in input order, except those that OUT already answers.

Invariants: a request's number is its position, from 0, among all requests of the input, answered or not; a line that is
refused as a whole counts as one request. In an input that has changed since OUT was begun, OUT may have that number for
another request; from there on, new requests get the numbers behind all of OUT's. Each request that OUT does not answer
is returned once, as a Request or a Failure.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from apcbatch.config import Config
from apcbatch.data.chat.known_answers import KnownAnswers
from apcbatch.data.chat.recorded_answers import answered_turns, render_answers
from apcbatch.data.chat.render import Prompt, Rendered, Renderer
from apcbatch.data.chat.rollout import Rollout
from apcbatch.data.checks import shown
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.fields import MOST_COLUMNS
from apcbatch.data.output.stop_texts import cut_answer
from apcbatch.display import counted
from apcbatch.errors import RequestError
from apcbatch.job.keys import EqualLines, UsedIds
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.record import Ticket, is_stopped
from apcbatch.job.references import References
from apcbatch.job.request import make_request
from apcbatch.job.shards import ShardLines
from apcbatch.job.work import Failure, OpenRollout, Work
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.types import DraftSource, Result

T = TypeVar("T")
NOT_ANSWERED = RequestError("internal", "OUT has no answer yet")  # where INPUT is compared alone


class Feeder:
    """Work source that reads the input only as far as the next request needs.

    keeps_answers: keep snapshots of all answers, since later requests may build on them. references: source of known
    answers for drafts, or None. shard: the lines to answer; None for all. num_conversations: lines so far that are not
    refused as a whole. num_requests: requests numbered so far. num_elsewhere: those of them that other shards answer.
    num_skipped: those, and requests that OUT answers. num_lines: lines read so far. ignored_columns: number of
    conversations that have each unused column, for the first MOST_COLUMNS columns.
    """

    plan_s = 0.0
    beyond_window_tokens = 0

    def __init__(
        self,
        config: Config,
        records: Iterable[Conversation | BadLine],
        renderer: Renderer,
        answers: PreviousAnswers,
        keeps_answers: bool = False,
        references: References | None = None,
        shard: ShardLines | None = None,
    ) -> None:
        self.num_requests = self.num_skipped = self.num_open_rollouts = self.num_conversations = 0
        self.num_elsewhere = self.num_lines = 0
        self.exhausted = False
        self._config, self._renderer, self._answers = config, renderer, answers
        self._keeps_answers, self._references, self._shard = keeps_answers, references, shard
        self._used_ids, self._equal_lines = UsedIds(), EqualLines()
        self._lines_here = 0  # lines of this shard, those that are error records too: the requests of --turns last
        self.ignored_columns: Counter[str] = Counter()
        self._next_number: int | None = None  # of a new request, once numbers are no longer positions
        self._work = self._all_work(islice(records, config.limit))

    @property
    def total(self) -> int | None:
        return self.num_requests - self.num_skipped if self.exhausted else None

    def opening(self) -> str:
        turns, lines, requests = self._config.turns, self._lines_here, self.num_requests - self.num_elsewhere
        words = f"{counted(self.num_conversations, 'conversation')}, {counted(requests, 'request')}"
        words += " so far" * (not self.exhausted)
        if self._shard is not None:
            words += f" in shard {self._config.shard}"
        if turns == "last" or requests <= lines:
            return words
        if turns == "rollout":
            return f"{words}: each turn, after the answers to those before it"
        return f"{words}: each recorded turn; --turns last asks for {lines:,}"

    def pause(self) -> bool:
        """Always False (see WorkSource.pause): reading one line is quick, so the engine need not run first."""
        return False

    def next(self) -> Work | None:
        """Return the next request or failure; None at the end of the input, and for a request or line that OUT already
        answers."""
        try:
            return next(self._work)
        except StopIteration:
            self.exhausted = True
            return None

    def follow_up(self, result: Result) -> list[Work]:
        """Return the work that depends on a result: the next turn of a rollout, or the failures of all its later
        turns."""
        rollout: OpenRollout | None = result.tag.rollout
        if rollout is None:
            return []
        ticket, stopped = result.tag.ticket, result.finish_reason == "stop"
        error = result.error or self._feed_back(rollout, ticket, result.token_ids, stopped, result.stop_reason)
        work = self._next_turn(rollout) if error is None else self._fail_later_turns(rollout, ticket, error)
        return [one for one in work if one is not None]

    def _all_work(self, records: Iterable[Conversation | BadLine]) -> Iterator[Work | None]:
        for record in records:
            self.num_lines += 1
            if isinstance(record, BadLine):
                self._answers.begin_line(record.line, record.custom_id)
                line_key = self._line_key(record, record.record)  # a later line may have its id
                yield from self._refused(record, record.custom_id, record.conversation, record.error, line_key)
            else:
                yield from self._conversation(record)

    def _conversation(self, conversation: Conversation) -> Iterator[Work | None]:
        self._renderer.complete_without_template(conversation)
        first_id = conversation.request_id(1)
        is_named = conversation.unnamed is None
        self._answers.begin_line(conversation.line, first_id if is_named else None)
        line_key = None if is_named else self._line_key(conversation, conversation.unnamed)
        try:
            turns = self._checked_turns(conversation)
        except RequestError as error:
            if error.code == "duplicate_id":
                line_key = line_key or self._line_key(conversation, None)
            yield from self._refused(conversation, first_id, conversation.id, error, line_key)
            return
        duplicates = self._duplicate_ids(conversation, turns)
        draw_key = self._draw_key(conversation, line_key)
        tickets = [self._ticket(conversation, turn, draw_key, line_key, duplicates) for turn in turns]
        yield from self._if_here(conversation, len(tickets), self._turns_of(conversation, tickets, duplicates))

    def _if_here(
        self, record: Conversation | BadLine, num_requests: int, work: Iterable[Work | None]
    ) -> Iterator[Work | None]:
        """Yield None until the shard of a line is known, and then the line's work if it is this one. The requests of
        the line are numbered before, whichever shard has them."""
        if self._shard is not None:
            yield from self._shard.wait_for(record.line)
            if self._shard.take(record.line) != self._shard.index:
                self.num_elsewhere += num_requests
                self.num_skipped += num_requests
                yield None
                return
        self._lines_here += 1
        yield from work

    def _turns_of(
        self, conversation: Conversation, tickets: list[Ticket], duplicates: dict[int | None, RequestError]
    ) -> Iterator[Work | None]:
        """Yield the work of a conversation's turns. duplicates: as in _duplicate_ids."""
        self.num_conversations += 1
        for name in conversation.columns:
            if name in self.ignored_columns or len(self.ignored_columns) < MOST_COLUMNS:
                self.ignored_columns[name] += 1
        is_rollout = self._config.turns == "rollout"
        if not (is_rollout and not self._answers.is_compared) and self._answers.confirm_lines(tickets):
            self.num_skipped += len(tickets)
            yield None
        elif self._answers.is_comparing and not any(ticket in self._answers for ticket in tickets):
            yield Failure(tickets[0], NOT_ANSWERED)  # there is nothing to compare: not rendered
        elif is_rollout:
            yield from self._begin_rollout(conversation, tickets, duplicates)
        else:
            yield from self._recorded_turns(conversation, tickets, duplicates)

    def _checked_turns(self, conversation: Conversation) -> list[int]:
        """Return the numbers of the turns that are requests, without rendering. RequestError for an id that an earlier
        line used, for another model with --strict-model, and for a line without such a turn."""
        error = self._used_ids.add(conversation.request_id(1), conversation.line)
        if error is not None and conversation.custom_id is None:
            raise RequestError(error.code, f"{error.message}; --id-column none numbers the lines instead")
        if error is not None:
            raise error
        self._check_model(conversation)
        choose = answered_turns if self._config.score else Conversation.requests
        return [turn.number for turn in choose(conversation, self._config.turns)]

    def _duplicate_ids(self, conversation: Conversation, turns: list[int]) -> dict[int | None, RequestError]:
        """Register the ids of the turns, and return turn -> error for those that an earlier line used. The id of turn 1
        is already registered by the caller."""
        found: dict[int | None, RequestError] = {}
        first_id = conversation.request_id(1)
        for turn in turns:
            custom_id = conversation.request_id(turn)
            if custom_id != first_id and (error := self._used_ids.add(custom_id, conversation.line)) is not None:
                found[turn] = error
        return found

    def _line_key(self, record: Conversation | BadLine, content: object) -> str:
        """Count a line that no id identifies, and return its key: the digest of its content and the number of equal
        lines before it."""
        digest, count = self._equal_lines.add(content, record.digest)
        return f"{digest}:{count}"

    def _check_model(self, conversation: Conversation) -> None:
        """Warn once if a line names a model other than the loaded one; with --strict-model, refuse the line instead.
        Only the last components of the names are compared."""
        given, loaded = conversation.model, self._config.model
        if given is None or _last_part(given) == _last_part(os.path.abspath(loaded)):
            return
        names = f"model is {shown(given)}, and the model that is loaded is {shown(loaded)}"
        if self._config.strict_model:
            ways = "name that one, leave model out, or run without --strict-model"
            raise RequestError("invalid_request", f"{names}; {ways}", conversation.line)
        where = f"line {conversation.line}: {names}"
        self._renderer.warn_once("model", f"{where}, which answers; --strict-model refuses such requests")

    def _recorded_turns(
        self, conversation: Conversation, tickets: list[Ticket], errors: dict[int | None, RequestError]
    ) -> Iterator[Work | None]:
        """Yield the requests and failures of a conversation whose prompts contain the recorded answers, not generated
        ones; None for each turn that OUT answers. errors: turn -> error, for turns refused before rendering."""
        prompts: dict[int | None, Prompt] = {}
        source = self._references
        known = source.begin(conversation) if source is not None else None
        try:
            rendered = _guarded(lambda: self._render(conversation, known))
            prompts = {prompt.turn: prompt for prompt in rendered.prompts}
            failed: dict[int | None, RequestError] = {one.turn: one.error for one in rendered.failures}
        except RequestError as error:
            failed = dict.fromkeys((ticket.turn for ticket in tickets), error)
        errors = failed | errors
        asked = [prompts[one.turn] for one in tickets if one.turn not in errors and one not in self._answers]
        references = source.find(known, conversation, asked) if source is not None else {}
        for ticket in tickets:
            if ticket.turn in errors:
                yield self._unless_answered(Failure(ticket, errors[ticket.turn]))
            else:
                prompt = prompts[ticket.turn]
                request = self._request(ticket, conversation, prompt, None, references.get(prompt.turn))
                yield self._unless_answered(request)

    def _render(self, conversation: Conversation, known: KnownAnswers | None) -> Rendered:
        """Render the prompts of a conversation; with --score, each with its recorded answer."""
        turns = self._config.turns
        if not self._config.score:
            return self._renderer.render(conversation, turns, None if known is None else known.note)
        if conversation.params:
            names = ", ".join(sorted(conversation.params))
            self._renderer.warn_once(
                "score",
                f"line {conversation.line} sets {names}: such settings change nothing with --score, which generates "
                "nothing",
            )
        return render_answers(self._renderer, conversation, turns)

    def _unless_answered(self, work: Work) -> Work | None:
        """Return the work, with the grammar of a request compiled (see _with_constraint). If OUT has its answer, count
        it as skipped and return None."""
        ticket = work.ticket if isinstance(work, Failure) else work.tag.ticket
        if ticket not in self._answers:
            return _with_constraint(work)
        token_ids = None if isinstance(work, Failure) else as_token_array(work.token_ids)
        if self._answers.confirm(ticket, token_ids) is None:
            return work
        self.num_skipped += 1
        return None

    def _begin_rollout(
        self, conversation: Conversation, tickets: list[Ticket], duplicates: dict[int | None, RequestError]
    ) -> Iterator[Work | None]:
        """Yield the request of the first turn that OUT does not answer, and the failures of a rollout. duplicates: turn
        -> error. The first turn with a duplicate id ends the rollout: it and all later turns fail."""
        try:
            rollout = _guarded(lambda: Rollout(self._renderer, conversation))
        except RequestError as error:
            yield from self._fail(tickets, error)
            return
        end = next((at for at, ticket in enumerate(tickets) if ticket.turn in duplicates), len(tickets))
        self.num_open_rollouts += 1
        yield from self._next_turn(OpenRollout(conversation, rollout, deque(tickets[:end])))
        if end < len(tickets):
            refused, reason = tickets[end], duplicates[tickets[end].turn]
            yield from self._fail([refused], reason)
            yield from self._fail(tickets[end + 1 :], _no_history(refused, reason))

    def _next_turn(self, rollout: OpenRollout) -> Iterator[Work | None]:
        """Append the answers that OUT has to the conversation, up to the first turn without one, and yield the request
        of that turn. If a turn has no answer to append, because it failed, yield the failures of all later turns."""
        while rollout.remaining:
            ticket = rollout.remaining.popleft()
            prompt = rollout.rollout.prompt
            source = self._references if ticket not in self._answers else None
            known = source.begin(rollout.conversation) if source is not None else None
            references = source.find(known, rollout.conversation, [prompt]) if source is not None else {}
            request = self._request(ticket, rollout.conversation, prompt, rollout, references.get(prompt.turn))
            if ticket not in self._answers:
                work = _with_constraint(request)
                yield work
                if isinstance(work, Failure):
                    yield from self._fail_later_turns(rollout, ticket, work.error)
                return
            ticket = request.ticket if isinstance(request, Failure) else request.tag.ticket
            token_ids = None if isinstance(request, Failure) else prompt.token_ids
            record = self._answers.confirm(ticket, token_ids, by_prompt=True)
            if record is None:
                self._answers.settle_unreached(rollout.remaining, is_same=False)
                yield request
                return
            self.num_skipped += 1
            error: RequestError | None
            if record["error"] is not None:
                error = RequestError(record["error"]["code"], record["error"]["message"], ticket.line)
            else:
                own = record["apcbatch"]
                answer = own["completion_token_ids"], is_stopped(record), own.get("stop_reason")
                error = self._feed_back(rollout, ticket, *answer)
            if error is not None:
                yield from self._fail_later_turns(rollout, ticket, error)
                return
        self.num_open_rollouts -= 1

    def _feed_back(
        self, rollout: OpenRollout, ticket: Ticket, token_ids: list[int], stopped: bool, stop_reason: int | str | None
    ) -> RequestError | None:
        """Append an answer to the conversation, and make the prompt of the next turn. Do nothing after the last turn.
        Return the error if the prompt cannot be made, else None. stopped: the finish reason is `stop`. stop_reason: as
        in Result."""
        if rollout.remaining:
            try:
                answer = as_history(self._renderer, ticket, token_ids, stopped, stop_reason)
                _guarded(lambda: rollout.rollout.advance(*answer))
            except RequestError as error:
                return error
        return None

    def _fail_later_turns(self, rollout: OpenRollout, ticket: Ticket, error: RequestError) -> Iterator[Work | None]:
        """End a rollout at a turn without an answer, and fail all later turns for the same reason."""
        self.num_open_rollouts -= 1
        yield from self._fail(rollout.remaining, _no_history(ticket, error))

    def _fail(self, tickets: Iterable[Ticket], error: RequestError) -> Iterator[Work | None]:
        for ticket in tickets:
            yield self._unless_answered(Failure(ticket, error))

    def _request(
        self,
        ticket: Ticket,
        conversation: Conversation,
        prompt: Prompt,
        rollout: OpenRollout | None,
        references: Mapping[DraftSource, Sequence[TokenArray]] | None,
    ) -> Work:
        keep_answer = self._keeps_answers or rollout is not None  # a rollout builds on the answer
        try:
            request = make_request(
                self._config, self._renderer, ticket, conversation, prompt, rollout, keep_answer=keep_answer
            )
        except RequestError as error:
            return _failure(ticket, error)
        if references is not None:
            request.references = references
        return request

    def _draw_key(self, conversation: Conversation, line_key: str | None) -> list[str | int] | None:
        """Return the values that name a line's random stream, besides turn and seed; None if nothing is sampled (greedy
        decoding, --score).

        The list is empty if the line sets a seed. Otherwise it holds the line's id or, without an id, the digest of its
        content and the number of equal lines before it. The line's number has no effect.
        """
        temperature = conversation.params.get("temperature", self._config.temperature)
        if temperature == 0 or self._config.score:
            return None
        if "seed" in conversation.params:
            return []
        if line_key is None:
            return [conversation.id]
        digest, _, count = line_key.partition(":")
        if count != "0":
            self._renderer.warn_once(
                "equal lines",
                f"line {conversation.line} equals an earlier one, and neither has an id or a seed: equal lines draw "
                'different answers, in their order; with "n" one line gives several, and its prompt is computed once',
            )
        return [digest, int(count)]

    def _ticket(
        self,
        conversation: Conversation,
        turn: int,
        draw_key: list[str | int] | None,
        line_key: str | None,
        duplicates: Mapping[int | None, RequestError],
    ) -> Ticket:
        """Return the ticket of a turn. duplicates: turns whose custom_id an earlier line used."""
        if turn in duplicates and line_key is None:
            line_key = self._line_key(conversation, None)
        ticket = Ticket(
            self.num_requests,
            conversation.line,
            turn,
            conversation.request_id(turn),
            conversation.id,
            conversation.prompt is not None,
            conversation.digest,
            line_key,
            file_line=conversation.file_line,
            random_stream=None if draw_key is None else json.dumps([turn, *draw_key]),
        )
        return self._numbered(ticket)

    def _numbered(self, ticket: Ticket) -> Ticket:
        """Count a request. Return its ticket, with a number and a custom_id that OUT has for no other request. The
        ticket's number is its position before."""
        self.num_requests += 1
        answers, position, name = self._answers, ticket.number, ticket.custom_id
        if answers.is_comparing or not answers or ticket in answers:
            return ticket
        if self._next_number is None and answers.has_number(position):
            self._next_number = max(answers.last_number, position) + 1
        if self._next_number is not None:
            ticket = replace(ticket, number=self._next_number)
            self._next_number += 1
            answers.places.extend((ticket.number, position))
        if ticket.line_key is not None and name is not None and answers.has_name(name):
            line, _, turn = name.rpartition("#")
            ticket = replace(ticket, custom_id=f"{line}.{ticket.number}#{turn}")
        return ticket

    def _refused(
        self,
        record: Conversation | BadLine,
        custom_id: str | None,
        conversation: str | None,
        error: RequestError,
        line_key: str | None,
    ) -> Iterator[Work | None]:
        """Yield the failure of a line as a whole (see _if_here); None if OUT has it already."""
        ticket = Ticket(
            self.num_requests,
            record.line,
            None,
            custom_id,
            conversation,
            line_digest=record.digest,
            line_key=line_key,
            file_line=record.file_line,
        )
        yield from self._if_here(record, 1, [self._unless_answered(_failure(self._numbered(ticket), error))])


def as_history(
    renderer: Renderer, ticket: Ticket, token_ids: list[int], stopped: bool, stop_reason: int | str | None
) -> tuple[list[int], bool, str | None]:
    """Return the arguments of Rollout.advance: an answer, cut as in its record."""
    # An answer that completes its grammar ends without a stop token: its last token is text.
    has_stop_token = stopped and stop_reason is None and token_ids[-1] in renderer.tokenizer.eos_token_ids
    cut = cut_answer(renderer.tokenizer.decode, token_ids, stop_reason, ticket.keeps_stop)
    return token_ids[: cut.num_tokens], has_stop_token, None if cut.is_exact else cut.text


def _with_constraint(work: Work) -> Work:
    """Compile the grammar of a request, so that a request with a bad grammar fails before its prompt is computed.
    Return the work, or a Failure if the grammar cannot be compiled."""
    if isinstance(work, Failure) or work.constraint is None:
        return work
    try:
        work.constraint()
    except RequestError as error:
        return _failure(work.tag.ticket, error)
    return work


def _failure(ticket: Ticket, error: RequestError) -> Failure:
    """Return the failure of a request, with its line in the error."""
    return Failure(ticket, RequestError(error.code, error.message, ticket.line))


def _last_part(name: str) -> str:
    """Return the last component of a model's name: `org/name` -> `name`."""
    return name.rstrip("/").rpartition("/")[2]


def _no_history(ticket: Ticket, error: RequestError) -> RequestError:
    """Return the error of the turns after a failed one, which have no history."""
    message = f"there is no history: turn {ticket.turn} was not answered ({error.message})"
    return RequestError(error.code, message, ticket.line)


def _guarded(make: Callable[[], T]) -> T:
    """Call `make`, and turn every exception into a RequestError, so that one conversation never ends the job."""
    try:
        return make()
    except RequestError:
        raise
    except Exception as error:  # only this conversation fails, even from a fault of this program
        raise RequestError("internal", f"the prompt could not be made: {error!r}") from error
