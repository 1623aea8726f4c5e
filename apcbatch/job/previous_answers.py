"""Index of the answers that OUT already has, read once when a run resumes and looked up for every request.

Invariants: reading changes nothing in OUT; a record answers a request only if its digest says that it was made from the
same line or prompt (records of versions without digests are trusted). Memory: 25 to 32 bytes per finished request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from apcbatch.errors import UsageError
from apcbatch.job.keys import KeyTable, turn_key
from apcbatch.job.record import Ticket, answers_of, read_record
from apcbatch.job.sink import FileSink

NUL = b"\0"  # not in JSON; a power cut leaves NULs in place of lost data


class PreviousAnswers:
    """Index of the requests that have a line in OUT; empty for a fresh run.

    num_errors, num_retryable: error records, and those that --retry-errors runs again. num_torn: lines that a kill or a
    power cut left incomplete. num_without_digests: records of old versions, which wrote no digests. num_seen: indexed
    requests that were found in the input so far. confirmed: whether all of them were compared with the input.
    trusts_lines: whether this same version wrote OUT, so that an equal line gives an equal prompt. same_draw_rule:
    whether the run that began OUT seeded its random draws as this version does; also True once confirmed.
    """

    def __init__(self, sink: FileSink | None = None) -> None:
        self._sink = sink
        self._offsets = KeyTable()  # byte offset of the line; ~offset once the request was seen in the input
        self.num_errors = self.num_retryable = self.num_torn = self.num_without_digests = self.num_seen = 0
        self.confirmed = False
        self.trusts_lines = self.same_draw_rule = True

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, ticket: Ticket) -> bool:
        return _key(ticket.line, ticket.turn) in self._offsets

    def confirm(self, ticket: Ticket, by_prompt: bool = False) -> dict[str, Any]:
        """Return the record of a request that OUT answers, and mark it as seen; UsageError if it was made from another
        request.

        by_prompt: compare the prompt in place of the line. The prompt of a rollout includes earlier answers, so the
        line alone does not determine it.
        """
        key = _key(ticket.line, ticket.turn)
        record = self._record_at(self._offset(key))
        self._check_draws(record, ticket)
        if not self._is_made_from(record, ticket, by_prompt):
            self.check_all_seen(ticket.line - 1, whole=False)  # a missing earlier line shifts the numbers: report that
            raise UsageError(f"line {_line_and_turn(ticket.line, ticket.turn)} {self._mismatch}")
        self._mark_seen(key)
        return record

    def confirm_lines(self, tickets: Sequence[Ticket]) -> bool:
        """Return whether OUT answers all these requests of one line, with records made from the same line. If so, mark
        them as seen; the line need not be rendered."""
        keys = [_key(ticket.line, ticket.turn) for ticket in tickets]
        if not all(key in self._offsets for key in keys):
            return False
        if not self.confirmed:
            for key, ticket in zip(keys, tickets, strict=True):
                record = self._record_at(self._offset(key))
                self._check_draws(record, ticket)
                if not self._is_made_from(record, ticket):
                    return False
            for key in keys:
                self._mark_seen(key)
        return True

    def check_shape(self, line: int, turn: int | None) -> None:
        """Raise UsageError if OUT answers a line as a whole but its turns are now requests, or the reverse.

        turn: first turn of the line that is a request; None if the line fails as a whole.
        """
        other = 1 if turn is None else None
        if _key(line, other) in self._offsets:
            raise UsageError(f"line {_line_and_turn(line, other)} {self._mismatch}")

    def count_unchecked(self, ticket: Ticket) -> None:
        """Mark a request, if OUT answers it, as seen without comparing its prompt, which is not known before the
        previous turn is answered."""
        if ticket in self:
            key = _key(ticket.line, ticket.turn)
            self._check_draws(self._record_at(self._offset(key)), ticket)
            self._mark_seen(key)

    def check_all_seen(self, last_line: int, whole: bool) -> None:
        """Refuse answers to requests that the input does not have. whole: the input was read to its end; otherwise only
        answers to lines up to last_line are checked."""
        for offset in sorted(value for value in self._offsets.values() if value >= 0):
            record = self._record_at(offset)
            if whole or record["line"] <= last_line:
                raise UsageError(f"line {_line_and_turn(record['line'], record['turn'])} {self._mismatch}")

    def add(self, offset: int, record: dict[str, Any]) -> bool:
        """Index the record at a byte offset. Return False if an earlier line of OUT answers the same request."""
        if not self._offsets.add(_key(record["line"], record["turn"]), offset):
            return False
        self.num_without_digests += not _is_signed(record)
        if record["error"] is not None:
            self.num_errors += 1
            self.num_retryable += record["error"]["retryable"]
        return True

    def _check_draws(self, record: dict[str, Any], ticket: Ticket) -> None:
        """Refuse a sampled answer if the run that began OUT seeded its random draws by another rule."""
        if not self.same_draw_rule and ticket.random_stream is not None and record["error"] is None:
            path = self._sink.path if self._sink else ""
            raise UsageError(
                f"line {_line_and_turn(ticket.line, ticket.turn)} has a drawn answer in {path}, which an earlier "
                "version began, whose draws depended on where a line stands in the input; --resume would mix two "
                "rules of draws. Go on with that version, or give another -o, or --overwrite"
            )

    def _is_made_from(self, record: dict[str, Any], ticket: Ticket, by_prompt: bool = False) -> bool:
        """Return whether a record answers this request, judged by its ids and digests."""
        if (record["id"], record["custom_id"]) != (ticket.request_id, ticket.custom_id):
            return False
        origin, failed = record["apcbatch"], record["error"] is not None
        by_line = failed or (self.trusts_lines and not by_prompt)
        same_line = by_line and origin.get("line_digest") == ticket.line_digest
        same_prompt = ticket.request_digest and origin.get("request_digest") == ticket.request_digest
        return bool(same_line or same_prompt or not _is_signed(record))

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

    @property
    def _mismatch(self) -> str:
        path = self._sink.path if self._sink else ""
        return (
            f"of the input is not the one that {path} answers, or not with the same settings; "
            "give the input of that run, or another -o, or take the line's answers out of OUT, or --overwrite"
        )


def read_answers(sink: FileSink) -> PreviousAnswers:
    """Index the lines of OUT; UsageError names the first line that this program did not write."""
    answers = PreviousAnswers(sink)
    for number, (offset, line) in enumerate(sink.lines(), start=1):
        if _is_torn(line):
            answers.num_torn += 1
            continue
        record = read_record(line)
        reason = "is not a line that this program wrote"
        if record is not None and not answers.add(offset, record):
            record, reason = None, "answers a request that an earlier line answers"
        if record is None:
            raise UsageError(
                f"output {sink.path}, line {number}, {reason}; take it out, or choose another -o, or --overwrite"
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
    """Remove torn lines from OUT and, with retry_errors, the error records that may be retried; return the index of the
    remaining records."""
    sink.cut_torn_line()
    if not answers.num_torn and not (retry_errors and answers.num_retryable):
        return answers
    sink.keep(lambda line: not _is_torn(line) and not (retry_errors and _is_retryable(line)))
    left = read_answers(sink)
    left.confirmed, left.trusts_lines, left.same_draw_rule = (
        answers.confirmed,
        answers.trusts_lines,
        answers.same_draw_rule,
    )
    return left


def _is_signed(record: dict[str, Any]) -> bool:
    return "line_digest" in record["apcbatch"] and "request_digest" in record["apcbatch"]


def _is_torn(line: bytes) -> bool:
    return NUL in line or not line.endswith(b"\n")


def _is_retryable(line: bytes) -> bool:
    record = read_record(line)
    return record is not None and record["error"] is not None and bool(record["error"]["retryable"])


def _key(line: int, turn: int | None) -> int:
    return turn_key(line, turn or 0)


def _line_and_turn(line: int, turn: int | None) -> str:
    return f"{line}" if turn is None else f"{line} (turn {turn})"
