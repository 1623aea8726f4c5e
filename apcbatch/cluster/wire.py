"""What the driver and its workers send each other: requests as plain data, units of them, and messages about units.

Must not know: Ray, engines, tensors. Stop texts and answer grammars travel as their definitions; the worker compiles
them with its own tokenizer. Invariant: a decoded request runs as the original would, with the same random stream and so
the same draws; only its tag is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np

from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.template_options import ChatOptions
from apcbatch.data.grammar.constraint import ConstraintFactory
from apcbatch.data.grammar.llguidance import Thinking
from apcbatch.data.grammar.structured_output import StructuredOutput
from apcbatch.data.output.stop_texts import StopTextsFactory
from apcbatch.errors import RequestError
from apcbatch.model.locate import locate_model
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.types import Request, RequestPlan, Result

_APART = ("id", "token_ids", "plan", "tag", "ending", "constraint")
_DEFAULTS: Mapping[str, Any] = {
    name: value for name, value in dataclasses.asdict(Request("", ())).items() if name not in _APART
}


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request without its plan and its tag. token_ids: the prompt, little-endian int32. settings: the fields of
    Request that differ from their defaults. stop: the stop texts. structure, thinking: the grammar of an answer, and
    the reasoning that may precede it."""

    id: str
    token_ids: bytes
    settings: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    structure: StructuredOutput | None = None
    thinking: Thinking | None = None

    @property
    def tokens(self) -> TokenArray:
        """The prompt, (tokens,) int32, read-only."""
        return np.frombuffer(self.token_ids, "<i4")


def encode_request(request: Request) -> WireRequest:
    """A request as plain data. RequestError for one with its own Ending or Constraint object."""
    ending, constraint = request.ending, request.constraint
    if not isinstance(ending, StopTextsFactory | None) or not isinstance(constraint, ConstraintFactory | None):
        raise RequestError(
            "invalid_request",
            "the request brings its own Ending or Constraint, which only the process that made it can run; expected "
            "stop texts and structures, as a line of the input gives them, or a run without --ray",
        )
    settings = {name: getattr(request, name) for name in _DEFAULTS}
    return WireRequest(
        request.id,
        np.ascontiguousarray(as_token_array(request.token_ids), "<i4").tobytes(),
        {name: _plain(value) for name, value in settings.items() if not _is_default(name, value)},
        ending.texts if ending is not None else (),
        constraint.structure if constraint is not None else None,
        constraint.thinking if constraint is not None else None,
    )


def _is_default(name: str, value: Any) -> bool:
    default = _DEFAULTS[name]
    return value is default or (type(value) is type(default) and bool(value == default))


def _plain(value: Any) -> Any:
    """A setting as numbers, texts, tuples and dicts, without arrays and views."""
    if isinstance(value, Mapping):
        return {int(token): float(bias) for token, bias in value.items()}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return tuple(int(one) for one in value)


class RequestDecoder:
    """Decodes requests. open_renderer: loads the model's tokenizer; called at the first request that needs it."""

    def __init__(self, open_renderer: Callable[[], Renderer]) -> None:
        self._open_renderer = open_renderer
        self._renderer: Renderer | None = None

    @classmethod
    def of(cls, model: str, options: ChatOptions) -> RequestDecoder:
        """A decoder with a model's own tokenizer and parsers."""
        return cls(lambda: Renderer.load(locate_model(model), options=options))

    def decode(self, wire: WireRequest, plan: RequestPlan | None) -> Request:
        """The request, with a plan and without a tag."""
        request = Request(wire.id, wire.tokens, **wire.settings, plan=plan)
        if wire.stop or wire.structure is not None:
            renderer = self._renderer = self._renderer or self._open_renderer()
            request.ending = StopTextsFactory(renderer.tokenizer, wire.stop) if wire.stop else None
            if wire.structure is not None:
                request.constraint = ConstraintFactory(renderer.grammar_compiler, wire.structure, wire.thinking)
        return request


Key = bytes  # a prefix key
Handle = Any  # where a state lies, as the runtime says it: an object reference, bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """One request of a unit. number: the driver's, never used twice in a run. plan: within the unit: `keep` holds the
    snapshots that are read, and `reads` counts their readers in the unit, an export as one more; None for a request
    without a plan."""

    number: int
    request: WireRequest
    plan: RequestPlan | None


@dataclass(frozen=True, slots=True)
class Export:
    """number: of the piece that publishes the snapshot. position: of the snapshot."""

    number: int
    position: int


@dataclass(frozen=True, slots=True)
class Import:
    """position: of the snapshot. readers: indexes of the pieces that resume from it."""

    position: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Requests for one worker, in the plan's order. number: never used twice, not even for the same requests. exports:
    snapshots that other units read, to be sent as soon as they are published. imports: snapshots of other units; the
    state of each is sent with the unit."""

    number: int
    pieces: tuple[Piece, ...]
    exports: Mapping[Key, Export] = field(default_factory=dict)
    imports: Mapping[Key, Import] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exported:
    """An export of the unit has been published; sent before the Answer of the piece that makes it. num_bytes: of the
    serialized state."""

    unit: int
    key: Key
    position: int
    num_bytes: int
    state: Handle


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request of the unit, whose result.error is set if it failed. result.tag has no meaning here."""

    unit: int
    number: int
    result: Result


@dataclass(frozen=True, slots=True)
class ImportFailed:
    """An import was missing or damaged; its readers are computed without it."""

    unit: int
    key: Key


@dataclass(frozen=True, slots=True)
class Alive:
    """The worker is computing: sent for any of its units after some seconds without another message."""

    unit: int


@dataclass(frozen=True, slots=True)
class Done:
    """The last message of a unit. seconds: its run time. prefill_tokens, decode_tokens: computed in its passes.
    counters: increments of the engine's counters, under their names, with `seconds` as `prefill_s`, `decode_s`,
    `store_s`; those that begin with `peak_` are the highest so far instead. import_bytes, import_s: size of the states
    fetched from another node, and the seconds that took."""

    unit: int
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    counters: Mapping[str, float] = field(default_factory=dict)


Message = Exported | Answer | ImportFailed | Alive | Done
