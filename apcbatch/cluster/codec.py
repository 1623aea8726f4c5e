"""What a worker's process says, as JSON text and back.

Must not know: pipes, processes, engines. A driver reads it, so nothing in it can be code: what is not exactly a known
message is a ValueError. Numbers arrive bit for bit; a state travels as its name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from apcbatch.cluster.seam import WorkerFacts
from apcbatch.cluster.unit import Alive, Answer, Done, Made, Message, Without
from apcbatch.errors import ERROR_CODES, RequestError
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Result, Scores


@dataclasses.dataclass(frozen=True, slots=True)
class Notice:
    """A sentence for the user. is_last: why the worker ends."""

    text: str
    is_last: bool = False


Word = WorkerFacts | Notice | Made | Answer | Without | Alive | Done


def encode(word: Word) -> bytes:
    """A word as JSON text. Made.state must be a text."""
    return json.dumps([type(word).__name__, _ENCODERS.get(type(word), _fields)(word)]).encode()


def decode(data: bytes) -> Word:
    """The word of a text; ValueError says that it is none."""
    try:
        name, fields = json.loads(data)
        return _DECODERS[name](fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{data[:80]!r} is nothing that a worker says ({error!r})") from None


def _fields(word: Any) -> dict[str, Any]:
    return {one.name: getattr(word, one.name) for one in dataclasses.fields(word)}


def _facts(facts: WorkerFacts) -> dict[str, Any]:
    return _fields(facts) | {
        "key_fingerprint": facts.key_fingerprint.hex(),
        "footprint": dataclasses.asdict(facts.footprint),
        "eos_token_ids": sorted(facts.eos_token_ids),
        "counters": dict(facts.counters),
    }


def _facts_back(fields: Mapping[str, Any]) -> WorkerFacts:
    changed = {
        "key_fingerprint": bytes.fromhex(fields["key_fingerprint"]),
        "footprint": Footprint(**fields["footprint"]),
        "eos_token_ids": frozenset(fields["eos_token_ids"]),
    }
    return WorkerFacts(**{**fields, **changed})


def _answer(answer: Answer) -> dict[str, Any]:
    return _fields(answer) | {"result": _result(answer.result)}


def _result(result: Result) -> dict[str, Any]:
    error = result.error
    fields = _fields(result)
    del fields["tag"]
    return fields | {
        "error": None if error is None else [error.code, error.message, error.line],
        "others": [_result(other) for other in result.others],
        "scores": None if result.scores is None else _fields(result.scores),
    }


def _result_back(fields: Mapping[str, Any]) -> Result:
    error, scores = fields["error"], fields["scores"]
    if error is not None and error[0] not in ERROR_CODES:
        raise ValueError("its error has a code that is not known")
    changed = {
        "error": None if error is None else RequestError(*error),
        "others": [_result_back(other) for other in fields["others"]],
        "scores": None if scores is None else Scores(**{**scores, "top": _pairs(scores["top"])}),
        "top_logprobs": None if fields["top_logprobs"] is None else _pairs(fields["top_logprobs"]),
    }
    return Result(**{**fields, **changed})


def _pairs(rows: list[list[list[Any]]]) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities, which JSON has as lists."""
    return [[(token, logprob) for token, logprob in row] for row in rows]


def _keyed(word: Made | Without) -> dict[str, Any]:
    return _fields(word) | {"key": word.key.hex()}


def _keyed_back(kind: Callable[..., Message]) -> Callable[[Mapping[str, Any]], Message]:
    return lambda fields: kind(**{**fields, "key": bytes.fromhex(fields["key"])})


_ENCODERS: Mapping[type, Callable[[Any], dict[str, Any]]] = {
    WorkerFacts: _facts,
    Answer: _answer,
    Made: _keyed,
    Without: _keyed,
}
_DECODERS: Mapping[str, Callable[[Mapping[str, Any]], Word]] = {
    "WorkerFacts": _facts_back,
    "Notice": lambda fields: Notice(**fields),
    "Made": _keyed_back(Made),
    "Without": _keyed_back(Without),
    "Answer": lambda fields: Answer(**{**fields, "result": _result_back(fields["result"])}),
    "Alive": lambda fields: Alive(**fields),
    "Done": lambda fields: Done(**fields),
}
