"""Messages between the driver and its workers: encoded requests, units of them, and reports about units.

Stop texts and answer grammars are sent as their definitions; the worker compiles them with its own tokenizer.
Invariant: a decoded request runs as the original would, with the same random stream and so the same samples. Only its
tag is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np

from apcbatch.data.chat.render import Renderer
from apcbatch.data.grammar.constraint import ConstraintFactory
from apcbatch.data.grammar.llguidance import Thinking
from apcbatch.data.grammar.structured_output import StructuredOutput
from apcbatch.data.output.stop_texts import StopTextsFactory
from apcbatch.data.template_options import ChatOptions
from apcbatch.errors import RequestError
from apcbatch.model.locate import locate_model
from apcbatch.prefix import TokenArray, checked_tokens
from apcbatch.types import DraftSource, Request, RequestPlan, Result

_APART = ("id", "token_ids", "plan", "tag", "ending", "constraint", "references")
_DEFAULTS: Mapping[str, Any] = {
    name: value for name, value in dataclasses.asdict(Request("", ())).items() if name not in _APART
}


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request without its plan and tag, as plain data.

    token_ids: the prompt, little-endian int32. settings: fields of Request that differ from their defaults. stop: stop
    texts. structure: grammar of the answer. thinking: reasoning that may precede it. references: known answers by
    source, little-endian int32 each.
    """

    id: str
    token_ids: bytes
    settings: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    structure: StructuredOutput | None = None
    thinking: Thinking | None = None
    references: Mapping[DraftSource, tuple[bytes, ...]] = field(default_factory=dict)

    @property
    def tokens(self) -> TokenArray:
        """The prompt, (tokens,) int32, read-only."""
        return np.frombuffer(self.token_ids, "<i4")


def encode_request(request: Request) -> WireRequest:
    """Encode a request. Raises RequestError if it has an Ending or Constraint object of its own."""
    ending, constraint = request.ending, request.constraint
    if not isinstance(ending, StopTextsFactory | None) or not isinstance(constraint, ConstraintFactory | None):
        raise RequestError(
            "invalid_request",
            "the request brings its own Ending or Constraint, which only the process that made it can run; expected "
            "stop texts and structures, as a line of the input gives them, or a run without --ray",
        )
    settings = {
        name: _plain(value)
        for name, default in _DEFAULTS.items()
        if (value := getattr(request, name)) is not default and not _is_equal(value, default)
    }
    return WireRequest(
        request.id,
        _to_bytes(request.token_ids),
        settings,
        ending.texts if ending is not None else (),
        constraint.structure if constraint is not None else None,
        constraint.thinking if constraint is not None else None,
        {source: tuple(map(_to_bytes, answers)) for source, answers in request.references.items()},
    )


def _to_bytes(token_ids: Sequence[int] | TokenArray) -> bytes:
    return checked_tokens(token_ids).astype("<i4", copy=False).tobytes()


def _is_equal(value: Any, default: Any) -> bool:
    """Return whether a setting has its default value and type."""
    return type(value) is type(default) and bool(value == default)


def _plain(value: Any) -> Any:
    """Convert a setting to numbers, texts, tuples and dicts, without arrays and views."""
    if isinstance(value, Mapping):
        return {int(token): float(bias) for token, bias in value.items()}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return tuple(int(one) for one in value)


class RequestDecoder:
    """Decodes requests. open_renderer: loads the model's tokenizer; called for the first request that needs it."""

    def __init__(self, open_renderer: Callable[[], Renderer]) -> None:
        self._open_renderer = open_renderer
        self._renderer: Renderer | None = None

    @classmethod
    def of(cls, model: str, options: ChatOptions) -> RequestDecoder:
        """Make a decoder with the model's own tokenizer and parsers."""
        return cls(lambda: Renderer.load(locate_model(model), options=options))

    def decode(self, wire: WireRequest, plan: RequestPlan | None) -> Request:
        """Decode a request and attach a plan to it."""
        references = {
            source: [np.frombuffer(answer, "<i4") for answer in answers] for source, answers in wire.references.items()
        }
        request = Request(wire.id, wire.tokens, **wire.settings, plan=plan, references=references)
        if wire.stop or wire.structure is not None:
            renderer = self._renderer = self._renderer or self._open_renderer()
            request.ending = StopTextsFactory(renderer.tokenizer, wire.stop) if wire.stop else None
            if wire.structure is not None:
                request.constraint = ConstraintFactory(renderer.grammar_compiler, wire.structure, wire.thinking)
        return request


Key = bytes  # a prefix key
Handle = Any  # the runtime's handle of a state: an object reference, or its bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A request of a unit.

    number: assigned by the driver, unique in a run. plan: plan within the unit; None for a request without one. Its
    `keep` holds the snapshots that are read, and `reads` their readers in the unit, plus 1 for an export.
    """

    number: int
    request: WireRequest
    plan: RequestPlan | None


@dataclass(frozen=True, slots=True)
class Export:
    """A snapshot that other units read. number: number of the piece that makes it. position: in tokens."""

    number: int
    position: int


@dataclass(frozen=True, slots=True)
class Import:
    """A snapshot of another unit. position: in tokens. readers: indexes of the pieces that resume from it."""

    position: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Requests for one worker, in the plan's order.

    number: unique in a run, even if the same requests are sent again. exports: snapshots that other units read, each
    sent as soon as it is published. imports: snapshots made in other units; their bytes are sent with this unit.
    """

    number: int
    pieces: tuple[Piece, ...]
    exports: Mapping[Key, Export] = field(default_factory=dict)
    imports: Mapping[Key, Import] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exported:
    """Message: an export of the unit has been published. Sent before the Answer of the piece that makes it.

    position: in tokens. num_bytes: size of the serialized state.
    """

    unit: int
    key: Key
    position: int
    num_bytes: int
    state: Handle


@dataclass(frozen=True, slots=True)
class Answer:
    """Message: the result of a request of the unit. result.error is set if it failed; result.tag has no meaning
    here."""

    unit: int
    number: int
    result: Result


@dataclass(frozen=True, slots=True)
class ImportFailed:
    """Message: an import was missing or damaged. Its readers are computed without it."""

    unit: int
    key: Key


@dataclass(frozen=True, slots=True)
class Alive:
    """Message: the worker is computing. Sent every ALIVE_EVERY_S seconds (worker.py), for any one of its units."""

    unit: int


@dataclass(frozen=True, slots=True)
class Done:
    """Message: the unit has ended; its last message.

    seconds: run time. prefill_tokens, decode_tokens: tokens computed for its answers. counters: increments of the
    engine's counters since the last Done; for counters that begin with `peak_`, the maximum so far. The entries of the
    engine's counter `seconds` are named `prefill_s`, `decode_s` and `store_s`; those of `drafts` have DRAFTED or
    ACCEPTED before the source's name. If states of other nodes were imported, `import_bytes` is their size, and
    `import_s` the seconds in which the unit's states were fetched.
    """

    unit: int
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    counters: Mapping[str, float] = field(default_factory=dict)


DRAFTED, ACCEPTED = "drafted_tokens_", "accepted_tokens_"  # name prefixes of Done's counters by draft source
Message = Exported | Answer | ImportFailed | Alive | Done
