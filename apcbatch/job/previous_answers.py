"""Index of the answers that OUT already has, read once when a run resumes and looked up for every request.

A request is known by its custom_id or, if its line has no id of its own, by the digest of the line's content and the
number of equal lines before it. Neither its number nor its line has to be the same.

Invariants: reading changes nothing in OUT; a record answers a request only if its digest says that it was made from the
same line or prompt (records of versions without digests are trusted). Memory: 33 to 40 bytes per finished request, and
25 to 32 more if its line has no id.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from apcbatch.errors import UsageError
from apcbatch.job.input_changes import InputChanges
from apcbatch.job.keys import KeyTable, id_key
from apcbatch.job.record import Ticket, answers_of, read_record, record_number, request_digests, request_id, request_key
from apcbatch.job.sink import LAST, FileSink
from apcbatch.prefix import TokenArray

NUL = b"\0"  # not in JSON; a power cut leaves NULs in place of lost data


class PreviousAnswers:
    """Index of the requests that have a line in OUT; empty for a fresh run.

    stale: offsets of lines that are left out, and that `drop_unusable` removes.

    num_errors, num_retryable: error records, and those that --retry-errors runs again. num_torn: lines that a kill or a
    power cut left incomplete. num_without_digests: records of old versions, which wrote no digests. num_seen: indexed
    requests that were found in the input so far. last_number: largest number of a record, -1 without one. places:
    pairs (number, position in INPUT) of the requests whose number is not their position, one after the other. changes:
    comparison of INPUT with OUT; None for a stream, which is compared while it is read. trusts_lines: whether this same
    version wrote OUT, so that an equal line gives an equal prompt. same_draw_rule: whether the run that began OUT
    seeded its random draws as this version does; also True once compared.
    """

    def __init__(self, sink: FileSink | None = None) -> None:
        self._sink, self._path = sink, "" if sink is None else sink.path
        self._offsets = KeyTable()  # byte offset of the line; ~offset once the request was seen in the input
        self._names = KeyTable()  # custom_ids of records that are known by their line_key
        self._numbers = array("q")  # of all records; sorted by `read_answers`
        self.num_errors = self.num_retryable = self.num_torn = self.num_without_digests = self.num_seen = 0
        self.num_unkeyed = 0  # records of versions that wrote no line_key
        self.places = array("q")
        self.changes: InputChanges | None = None
        self.trusts_lines = self.same_draw_rule = True
        self.stale: set[int] = set()

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, ticket: Ticket) -> bool:
        return self._key_of(ticket) is not None

    @property
    def is_comparing(self) -> bool:
        """Whether INPUT is being compared with OUT, and no request is computed."""
        return self.changes is not None and not self.changes.is_done

    @property
    def is_compared(self) -> bool:
        """Whether all answers were compared with INPUT."""
        return self.changes is not None and self.changes.is_done

    @property
    def has_dropped(self) -> bool:
        """Whether the comparison dropped records, which `drop_unusable` removes from OUT."""
        return self.changes is not None and len(self.changes.dropped) > 0

    @property
    def num_without_line(self) -> int:
        """Answers whose line INPUT does not have."""
        return 0 if self.changes is None else self.changes.num_without_line

    @property
    def last_number(self) -> int:
        return self._numbers[-1] if self._numbers else -1

    def has_number(self, number: int, count: int = 1) -> bool:
        """Return whether a record has this number in its id, or one of the `count` numbers that begin with it."""
        at = bisect_left(self._numbers, number)
        return at < len(self._numbers) and self._numbers[at] < number + count

    def has_name(self, custom_id: str) -> bool:
        """Return whether a record of a line without an id has this custom_id."""
        return id_key(custom_id) in self._names

    def begin_line(self, line: int, first_id: str | None) -> None:
        """Begin a line of INPUT, if it is being compared. first_id: custom_id of its first request; None if no id
        identifies the line."""
        if self.changes is not None and not self.changes.is_done:
            self.changes.begin_line(line, first_id)

    def confirm(self, ticket: Ticket, token_ids: TokenArray | None, by_prompt: bool = False) -> dict[str, Any] | None:
        """Return the record of a request that OUT answers, and mark it as seen. If it was made from other content, drop
        it and return None; UsageError if it cannot be dropped, since the run has begun.

        token_ids: of the prompt; None if it is not made. by_prompt: compare the prompt in place of the line. The prompt
        of a rollout includes earlier answers, so the line alone does not determine it.
        """
        key = self._key_of(ticket)
        assert key is not None
        offset = self._offset(key)
        record = self._record_at(offset)
        self._check_draws(record, ticket)
        if self._is_made_from(record, ticket, token_ids, by_prompt):
            self._keep(key, record, ticket)
            return record
        self._drop(key, offset, record, ticket)
        return None

    def find(self, ticket: Ticket) -> dict[str, Any] | None:
        """Return the record of a request, and mark it as seen; None without one."""
        key = self._key_of(ticket)
        if key is None:
            return None
        record = self._record_at(self._offset(key))
        self._mark_seen(key)
        return record

    def confirm_lines(self, tickets: Sequence[Ticket]) -> bool:
        """Return whether OUT answers all these requests of one line, with records made from the same line. If so, mark
        them as seen; the line need not be rendered."""
        keys = [key for ticket in tickets if (key := self._key_of(ticket)) is not None]
        if len(keys) < len(tickets):
            return False
        if not self.is_compared:
            records = [self._record_at(self._offset(key)) for key in keys]
            for record, ticket in zip(records, tickets, strict=True):
                self._check_draws(record, ticket)
                if not self._is_made_from(record, ticket, None):
                    return False
            for key, record, ticket in zip(keys, records, tickets, strict=True):
                self._keep(key, record, ticket)
        return True

    def settle_unreached(self, tickets: Sequence[Ticket], is_same: bool) -> None:
        """Decide about the later turns of a rollout, whose prompts are not known before an earlier turn is answered:
        keep the records that were made from the same line, and drop the others. is_same: False drops all of them,
        since an earlier answer is dropped."""
        for ticket in tickets:
            key = self._key_of(ticket)
            offset = None if key is None else self._offsets.get(key)
            if key is None or offset is None or offset < 0:
                continue  # not in OUT, or decided before
            record = self._record_at(offset)
            self._check_draws(record, ticket)
            if is_same and record["apcbatch"].get("line_digest") in (None, ticket.line_digest):
                self._keep(key, record, ticket)
            else:
                self._drop(key, offset, record, ticket)

    def settle_rest(self) -> None:
        """Decide about the records of no request, once INPUT is compared to its end."""
        assert self.changes is not None
        self.changes.end_input()
        for offset in self._unseen():
            record = self._record_at(offset)
            if self.changes.settle(offset, record):
                self._place_last(record)

    def count_rest(self) -> int:
        """Return the number of answers to no request, once a stream is read to its end, and place the records of no
        request behind the others."""
        num_answers = 0
        for offset in self._unseen():
            record = self._record_at(offset)
            self._place_last(record)
            num_answers += record["error"] is None
        return num_answers

    def add(self, offset: int, record: dict[str, Any]) -> bool:
        """Index the record at a byte offset. Return False if an earlier line of OUT answers the same request."""
        origin, custom_id = record["apcbatch"], record["custom_id"]
        if not self._offsets.add(_record_key(record), offset):
            return False
        self._numbers.append(record_number(record))
        self.num_unkeyed += "line_key" not in origin
        if origin.get("line_key") is not None and custom_id is not None:
            self._names.add(id_key(custom_id), offset)
        self.num_without_digests += not _is_signed(record)
        if record["error"] is not None:
            self.num_errors += 1
            self.num_retryable += record["error"]["retryable"]
        return True

    def sort_numbers(self) -> int | None:
        """Sort the numbers of all records, for `has_number`. Return a number that two records have, or None."""
        self._numbers = array("q", sorted(self._numbers))
        return next((one for one, other in pairwise(self._numbers) if one == other), None)

    def _key_of(self, ticket: Ticket) -> int | None:
        """Return the key of the record with a request's identity; None without one."""
        if not self._offsets:
            return None
        key = id_key(ticket.key)
        if key in self._offsets:
            return key
        if self.num_unkeyed:
            key = id_key(_unkeyed(ticket.line, ticket.turn))
            return key if key in self._offsets else None
        return None

    def _keep(self, key: int, record: dict[str, Any], ticket: Ticket) -> None:
        self._mark_seen(key)
        number = record_number(record)
        if number != ticket.number:
            self.places.extend((number, ticket.number))
        if self.changes is not None and not self.changes.is_done:
            self.changes.keep(record, ticket)

    def _drop(self, key: int, offset: int, record: dict[str, Any], ticket: Ticket) -> None:
        """Drop the record of a request that was made from other content; UsageError if that cannot be done."""
        path, where = self._path, _line_and_turn(ticket.line, ticket.turn)
        if self._offsets.get(key) != offset:
            return  # seen
        is_answer, digest = record["error"] is None, record["apcbatch"].get("line_digest")
        if is_answer and digest is not None and digest == ticket.line_digest:
            raise UsageError(
                f"line {where} of the input is as it was, but its prompt is not the one that {path} answers: another "
                "version made it, or an answer before it was edited; continue with that version, or give another -o, "
                "or take the line's answers out of OUT, or --overwrite"
            )
        if is_answer and _is_unkeyed(record):
            raise UsageError(
                f"line {where} of the input is not the one that {path} answers; an earlier version began {path}, which "
                "knows a line without an id by its number alone. Give the input of that run, or another -o, or "
                "--overwrite"
            )
        if self.changes is None or self.changes.is_done:
            raise UsageError(
                f"line {where} of the input is not the one that {path} answers, and a corrected line can only be "
                "computed anew if the input can be read twice; give it as a file, or another -o, or --overwrite"
            )
        self._mark_seen(key)
        self.changes.correct(offset, is_answer)

    def _check_draws(self, record: dict[str, Any], ticket: Ticket) -> None:
        """Refuse a sampled answer if the run that began OUT seeded its random draws by another rule."""
        if not self.same_draw_rule and ticket.random_stream is not None and record["error"] is None:
            raise UsageError(
                f"line {_line_and_turn(ticket.line, ticket.turn)} has a drawn answer in {self._path}, which an earlier "
                "version began, whose draws depended on where a line stands in the input; --resume would mix two "
                "rules of draws. Go on with that version, or give another -o, or --overwrite"
            )

    def _is_made_from(
        self, record: dict[str, Any], ticket: Ticket, token_ids: TokenArray | None, by_prompt: bool = False
    ) -> bool:
        """Return whether a record answers this request, judged by its digests."""
        if record["turn"] != ticket.turn:
            return False
        origin, failed = record["apcbatch"], record["error"] is not None
        if failed and origin.get("line_key") is not None:
            return True  # found by the digest of its content
        if (failed or (self.trusts_lines and not by_prompt)) and origin.get("line_digest") == ticket.line_digest:
            return True
        if not _is_signed(record):
            return bool(record["line"] == ticket.line) or not _is_unkeyed(record)
        if token_ids is None:
            return False
        digests = request_digests(ticket, token_ids, record["id"], record["custom_id"])
        return origin["request_digest"] in digests

    def _unseen(self) -> list[int]:
        return sorted(value for value in self._offsets.values() if value >= 0)

    def _place_last(self, record: dict[str, Any]) -> None:
        self.places.extend((record_number(record), LAST))

    def _mark_seen(self, key: int) -> None:
        offset = self._offset(key)
        self.num_seen += self._offsets.get(key) == offset
        self._offsets.set(key, ~offset)

    def _offset(self, key: int) -> int:
        value = self._offsets.get(key)
        assert value is not None
        return value if value >= 0 else ~value

    def _record_at(self, offset: int) -> dict[str, Any]:
        assert self._sink is not None
        record = read_record(self._sink.line_at(offset))
        if record is None:
            raise UsageError(f"output {self._sink.path} was changed by another program while it was read")
        return record


def read_answers(sink: FileSink, stale: set[int] | None = None) -> PreviousAnswers:
    """Index the lines of OUT; UsageError names the first line that this program did not write. stale:
    offsets of lines to leave out."""
    answers = PreviousAnswers(sink)
    answers.stale = set() if stale is None else stale
    for number, (offset, line) in enumerate(sink.lines(), start=1):
        if offset in answers.stale:
            continue
        if _is_torn(line):
            answers.num_torn += 1
            continue
        record = read_record(line)
        reason = "is not a line that this program wrote"
        if record is not None and record_number(record) < 0:
            record = None
        if record is not None and not answers.add(offset, record):
            record, reason = None, "answers a request that an earlier line answers"
        if record is None:
            raise UsageError(
                f"output {sink.path}, line {number}, {reason}; take it out, or choose another -o, or --overwrite"
            )
    doubled = answers.sort_numbers()
    if doubled is not None:
        raise UsageError(
            f"output {sink.path} has two records with the id {request_id(doubled)}, as joined files have; take one "
            "out, or choose another -o, or --overwrite"
        )
    return answers


def last_answers(sink: FileSink, most_bytes: int, vocab_size: int) -> Iterator[list[int]]:
    """Yield the token ids of each answer in the last `most_bytes` of OUT, in OUT's order. Answers with ids outside the
    vocabulary are left out."""
    for _, line in sink.lines(most_bytes):
        record = read_record(line)
        if record is not None and record["error"] is None:
            for token_ids in answers_of(record):
                if token_ids and max(token_ids) < vocab_size:
                    yield token_ids


def drop_unusable(sink: FileSink, answers: PreviousAnswers, retry_errors: bool) -> PreviousAnswers:
    """Remove from OUT torn lines, records of other content than INPUT has, and, with retry_errors, the error records
    that may be retried. OUT is rewritten as a whole, and only if a line goes. Return the index of the remaining
    records."""
    sink.cut_torn_line()
    changes = answers.changes
    drops = answers.num_torn or answers.has_dropped or answers.stale or (retry_errors and answers.num_retryable)
    if not drops:
        return answers

    def wanted(offset: int, line: bytes) -> bool:
        is_dropped = changes is not None and changes.drops(offset)
        return not (_is_torn(line) or is_dropped or offset in answers.stale or (retry_errors and _is_retryable(line)))

    sink.keep(wanted)
    left = read_answers(sink)
    left.changes, left.places = changes, answers.places
    left.trusts_lines, left.same_draw_rule = answers.trusts_lines, answers.same_draw_rule
    return left


def _record_key(record: dict[str, Any]) -> int:
    """Return the key of a record's request, as `PreviousAnswers._key_of` finds it."""
    line_key, turn = record["apcbatch"].get("line_key"), record["turn"]
    if _is_unkeyed(record):
        return id_key(_unkeyed(record["line"], turn))
    return id_key(request_key(line_key if isinstance(line_key, str) else None, record["custom_id"], turn))


def _unkeyed(line: int, turn: int | None) -> str:
    """Return the identity of a request without an id, in records that have no line_key."""
    return f"\0line {line}#{turn or 1}"


def _is_unkeyed(record: dict[str, Any]) -> bool:
    """Return whether no id identifies a record's request, in a record that has no line_key."""
    if "line_key" in record["apcbatch"]:
        return False
    custom_id, error = record["custom_id"], record["error"]
    has_id = custom_id is not None and not custom_id.startswith(f"line-{record['line']}#")
    return not has_id or record["turn"] is None or (error is not None and error["code"] == "duplicate_id")


def _is_signed(record: dict[str, Any]) -> bool:
    return "line_digest" in record["apcbatch"] and "request_digest" in record["apcbatch"]


def _is_torn(line: bytes) -> bool:
    return NUL in line or not line.endswith(b"\n")


def _is_retryable(line: bytes) -> bool:
    record = read_record(line)
    return record is not None and record["error"] is not None and bool(record["error"]["retryable"])


def _line_and_turn(line: int, turn: int | None) -> str:
    return f"{line}" if turn is None else f"{line} (turn {turn})"
