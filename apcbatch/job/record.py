"""Make the output record of a request as a JSON line: OpenAI's response body and the cache reuse. Read records back.

Invariants: `error` is null if and only if the request succeeded; a body is a ChatCompletion or Completion of the
`openai` package, except that a message with reasoning has the further key `reasoning_content`; a record that
`read_record` accepts has every field that a resumed run uses, with the right type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import orjson
import xxhash

from apcbatch.answer import AnswerWarning
from apcbatch.data.chat.render import Renderer
from apcbatch.data.output.parser import OutputParser
from apcbatch.data.output.stop_texts import cut_answer
from apcbatch.errors import RequestError
from apcbatch.job.logprobs import PromptFields, chat_logprobs, completion_logprobs
from apcbatch.prefix import TokenArray
from apcbatch.sampling import MOST_ANSWERS
from apcbatch.types import Result

PLAIN = OutputParser()
KEYS = ("id", "custom_id", "line", "turn", "response", "error", "apcbatch")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Identity of one request in the job: its position in the input, its names and its digests.

    number: number in its id: its position among all requests of the input, from 0, except for new requests of an input
    that has changed. line: input line, from 1. turn: None if the record answers
    the line as a whole. completion: the prompt is a text or token ids, not messages. line_digest: digest of the line as
    it was read. line_key: digest of the line's content and the number of equal lines before it, if no id of its own
    identifies it. request_digest: see the function of that name; None until the prompt is made. settings: the text of
    the settings in that digest. keeps_stop: the answer
    includes the stop text, or the token of stop_token_ids, that ended it. prompt: the prompt fields that the record
    shows, or None. file_line: the file and the line in it, if the input has several files. random_stream: key of the
    request's random draws; None if nothing is sampled. live: further fields of the record of an episode's turn.
    """

    number: int
    line: int
    turn: int | None
    custom_id: str | None
    conversation: str | None
    completion: bool = False
    line_digest: str = ""
    line_key: str | None = None
    request_digest: str | None = None
    settings: str = ""
    keeps_stop: bool = False
    prompt: PromptFields | None = None
    file_line: tuple[str, int] | None = None
    random_stream: str | None = None
    live: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def request_id(self) -> str:
        """Id of the request in the whole run: `apc-000017` for number 17."""
        return request_id(self.number)

    def packed(self) -> str:
        """Return the ticket, which has no prompt fields, in a third of the memory; see `unpack`."""
        return orjson.dumps(_FIELDS(self)).decode()  # whose bytes have spare room

    @classmethod
    def unpack(cls, data: bytes) -> Ticket:
        """Return the ticket that `packed` has made."""
        fields = orjson.loads(data)
        fields[_FILE_LINE] = None if fields[_FILE_LINE] is None else tuple(fields[_FILE_LINE])
        return cls(*fields)

    @property
    def key(self) -> str:
        """Text that identifies the request in any order of the input's lines."""
        return request_key(self.line_key, self.custom_id, self.turn)

    @property
    def shown(self) -> str:
        """Name on the request's terminal line: its custom_id, or `line-N` without one."""
        return self.custom_id or f"line-{self.line}"


_FIELDS = attrgetter(*Ticket.__slots__)
_FILE_LINE = Ticket.__slots__.index("file_line")


def request_key(line_key: str | None, custom_id: str | None, turn: int | None) -> str:
    """Return the text that identifies a request: its custom_id or, if its line has a line_key, that and the turn."""
    return custom_id or "" if line_key is None else f"\0{line_key}#{turn or 1}"


def request_id(number: int) -> str:
    """Return the id of the request with a number: `apc-000017` for 17."""
    return f"apc-{number:06d}"


def record_number(record: Mapping[str, Any]) -> int:
    """Return the number in a record's id: 17 for `apc-000017`; -1 for another id."""
    prefix, _, digits = record["id"].partition("-")
    is_ours = prefix == "apc" and digits.isascii() and digits.isdigit() and len(digits) < 19
    return int(digits) if is_ours else -1


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return the text of settings that `request_digest` covers. settings: numbers, texts, tuples, and mappings whose
    key order is fixed."""
    return repr(sorted(settings.items()))


def request_digest(settings: str, token_ids: TokenArray) -> str:
    """Return the xxh3-128, in hex, of a request's settings and prompt tokens: neither its names nor its line.
    settings: as `settings_text` makes it."""
    digest = xxhash.xxh3_128(settings.encode("utf-8", "surrogatepass") + b"\0")
    digest.update(token_ids.astype("<i4", copy=False).tobytes())
    return digest.hexdigest()


def request_digests(ticket: Ticket, token_ids: TokenArray, id: str, custom_id: str | None) -> tuple[str, str]:
    """Return the digests of a request: this version's, and that of versions whose digest covered its names too."""
    named = f"({id!r}, {custom_id!r}, {ticket.settings})"
    return request_digest(ticket.settings, token_ids), request_digest(named, token_ids)


def error_record(ticket: Ticket, error: RequestError, end_s: float | None = None) -> dict[str, Any]:
    """Make the record of a request that failed, or of an input line that failed as a whole. end_s: as in
    `result_record`."""
    described = {
        "code": error.code,
        "message": error.message,
        "line": ticket.line if error.line is None else error.line,
        "retryable": error.retryable,
    }
    return _record(ticket, None, described, _source_fields(ticket) | _times(end_s, None))


def result_record(
    ticket: Ticket,
    result: Result,
    renderer: Renderer,
    model: str,
    created: int,
    output_parser: OutputParser = PLAIN,
    end_s: float | None = None,
) -> dict[str, Any]:
    """Make the record of a request that succeeded. created: time in the body, in seconds since 1970 (UTC). end_s:
    seconds from the begin of OUT's first process to now; None without an OUT. The body of a scored request has the
    recorded answer, though nothing was generated."""
    prompt = ticket.prompt
    answers = result.answers
    if prompt is not None and prompt.answer_begin is not None:
        answers = [prompt.recorded_answer(result, renderer.tokenizer.eos_token_ids)]
    num_tokens = sum(len(answer.token_ids) for answer in result.answers)
    warnings = list(output_parser.warnings)
    choices = [
        {"index": index} | _choice(ticket, one, renderer, output_parser, warnings, index)
        for index, one in enumerate(answers)
    ]
    reuse = {
        **_source_fields(ticket),
        "cached_from": result.cached_from,
        "cached_tokens": result.cached_tokens,
        "computed_tokens": result.computed_tokens,
        "ideal_cached_tokens": None if result.ideal_is_bound else result.ideal_cached_tokens,
        "boundary": result.boundary,
        "miss_reason": result.miss_reason,
        "finish_reason": answers[0].finish_reason,
        "stop_reason": answers[0].stop_reason,
        "prefill_ms": round(result.prefill_ms, 3),
        "decode_ms": round(result.decode_ms, 3),
        **_times(end_s, result.running_s),
        "drafted_tokens": result.drafted_tokens,
        "accepted_tokens": result.accepted_tokens,
        "warnings": warnings,
        "warning_kinds": [warning.kind for warning in warnings],
        "completion_token_ids": result.token_ids,
    }
    if len(answers) > 1:
        reuse["choices"] = [
            {
                "completion_token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for answer in answers
        ]
    if prompt is not None:
        reuse |= prompt.record_fields(result, renderer)
    body = {
        "id": ticket.request_id,
        "object": "text_completion" if ticket.completion else "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": result.prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        },
    }
    if prompt is not None and prompt.shows_ids:
        body["prompt_token_ids"] = prompt.token_ids.tolist()
        for choice, answer in zip(choices, answers, strict=True):
            choice["token_ids"] = answer.token_ids
    response = {"status_code": 200, "request_id": ticket.request_id, "body": body}
    return _record(ticket, response, None, reuse)


def _times(end_s: float | None, running_s: float | None) -> dict[str, float | None]:
    """Return the times at which a request was admitted and ended, in seconds. running_s: None for a failed request."""
    begin_s = None if end_s is None or running_s is None else round(max(0.0, end_s - running_s), 6)
    return {"begin_s": begin_s, "end_s": None if end_s is None else round(end_s, 6)}


def _source_fields(ticket: Ticket) -> dict[str, Any]:
    """Return the request's file and its line there, if the input has several files, and the fields by which a resumed
    run recognises the request."""
    place = dict(zip(("file", "file_line"), ticket.file_line, strict=True)) if ticket.file_line else {}
    return place | {
        "conversation": ticket.conversation,
        "line_digest": ticket.line_digest,
        "line_key": ticket.line_key,
        "request_digest": ticket.request_digest,
    }


def read_record(line: bytes) -> dict[str, Any] | None:
    """Parse a line that this program wrote; return None for anything else."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict) or not record.keys() >= set(KEYS) or not isinstance(record["apcbatch"], dict):
        return None
    named = isinstance(record["id"], str) and isinstance(record["custom_id"], str | None)
    placed = _is_count(record["line"]) and (record["turn"] is None or _is_count(record["turn"]))
    placed &= type(record["apcbatch"].get("attempt", 1)) is int  # of a live episode
    answered = _is_answer(record) if record["error"] is None else _is_error(record)
    return record if named and placed and answered else None


def answers_of(record: dict[str, Any]) -> list[list[int]]:
    """Return the token ids of each answer. record: one that `read_record` accepted, of a request that succeeded."""
    ours = record["apcbatch"]
    several: list[Any] = [one["completion_token_ids"] for one in ours.get("choices", ())]
    return several or [ours["completion_token_ids"]]


def is_stopped(record: dict[str, Any]) -> bool:
    """Return whether a stop token, a stop text or a completed grammar ended the first answer, rather than a limit of
    tokens. record: one that `read_record` accepted, of a request that succeeded.

    The body's finish_reason is `tool_calls` for every answer with calls, so the one in the `apcbatch` object decides.
    Older records have only the body's.
    """
    reason = record["response"]["body"]["choices"][0]["finish_reason"]
    return bool(record["apcbatch"].get("finish_reason", reason) == "stop")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 63


def _is_error(record: dict[str, Any]) -> bool:
    error = record["error"]
    if record["response"] is not None or not isinstance(error, dict):
        return False
    texts = isinstance(error.get("code"), str) and isinstance(error.get("message"), str)
    return texts and isinstance(error.get("retryable"), bool)


def _is_answer(record: dict[str, Any]) -> bool:
    try:
        body_choices = record["response"]["body"]["choices"]
        reason = body_choices[0]["finish_reason"]
        token_ids = record["apcbatch"]["completion_token_ids"]
    except (LookupError, TypeError):
        return False
    own_reason, stop_reason = record["apcbatch"].get("finish_reason", reason), record["apcbatch"].get("stop_reason")
    reasons = isinstance(reason, str) and isinstance(own_reason, str) and isinstance(stop_reason, int | str | None)
    choices = record["apcbatch"].get("choices", [])
    if not reasons or not all(isinstance(them, list) and len(them) <= MOST_ANSWERS for them in (body_choices, choices)):
        return False
    if not all(isinstance(one, dict) for one in choices):
        return False
    return all(map(_are_token_ids, (token_ids, *(one.get("completion_token_ids") for one in choices))))


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 31 for one in value)


def _choice(
    ticket: Ticket,
    result: Result,
    renderer: Renderer,
    output_parser: OutputParser,
    warnings: list[AnswerWarning],
    index: int,
) -> dict[str, Any]:
    """Return the answer as a choice of the body, and append its warnings to `warnings`."""
    cut = cut_answer(renderer.tokenizer.decode, result.token_ids, result.stop_reason, ticket.keeps_stop)
    if ticket.completion:
        echoed = ticket.prompt if ticket.prompt is not None and ticket.prompt.echo else None
        logprobs = completion_logprobs(result, cut.num_tokens, renderer, echoed)
        text = cut.text if echoed is None else echoed.shown_text(renderer) + cut.text
        return {"finish_reason": result.finish_reason, "text": text, "logprobs": logprobs}
    answer = output_parser.parse(cut.text, index)
    warnings += answer.warnings
    reason = "tool_calls" if answer.calls else result.finish_reason
    message = answer.as_output()
    logprobs = chat_logprobs(result, cut.num_tokens, renderer)
    return {"finish_reason": reason, "message": message, "logprobs": logprobs}


def _record(ticket: Ticket, response: Any, error: Any, reuse: dict[str, Any]) -> dict[str, Any]:
    values = (ticket.request_id, ticket.custom_id, ticket.line, ticket.turn, response, error, {**reuse, **ticket.live})
    return dict(zip(KEYS, values, strict=True))


def line_of(record: dict[str, Any]) -> bytes:
    """Write a record as its JSON line."""
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
