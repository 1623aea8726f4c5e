"""Messages between the driver and its workers: encoded requests, units of them, and reports about units.

Stop texts and answer grammars are sent as their definitions; the worker compiles them with its own tokenizer.
Invariant: a decoded request runs as the original would, with the same random stream and so the same samples. Only its
tag is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from apcbatch.data.chat.render import Renderer
from apcbatch.data.grammar.constraint import ConstraintFactory
from apcbatch.data.grammar.llguidance import Thinking
from apcbatch.data.grammar.structured_output import StructuredOutput
from apcbatch.data.output.stop_texts import StopTextsFactory
from apcbatch.data.template_options import ChatOptions
from apcbatch.engine.counters import Counters
from apcbatch.errors import RequestError
from apcbatch.model.locate import locate_model
from apcbatch.prefix import checked_tokens
from apcbatch.types import Request, RequestPlan, Result


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request as plain data.

    request: without plan, tag, ending and constraint. stop: stop texts. structure: grammar of the answer. thinking:
    reasoning that may precede it.
    """

    request: Request
    stop: tuple[str, ...] = ()
    structure: StructuredOutput | None = None
    thinking: Thinking | None = None


def encode_request(request: Request) -> WireRequest:
    """Encode a request. Raises RequestError if it has an Ending or Constraint object of its own."""
    ending, constraint = request.ending, request.constraint
    if not isinstance(ending, StopTextsFactory | None) or not isinstance(constraint, ConstraintFactory | None):
        raise RequestError(
            "invalid_request",
            "the request brings its own Ending or Constraint, which only the process that made it can run; expected "
            "stop texts and structures, as a line of the input gives them, or a run without --ray",
        )
    plain = replace(
        request,
        token_ids=checked_tokens(request.token_ids),
        logit_bias=dict(request.logit_bias),
        plan=None,
        tag=None,
        ending=None,
        constraint=None,
    )
    return WireRequest(
        plain,
        ending.texts if ending is not None else (),
        constraint.structure if constraint is not None else None,
        constraint.thinking if constraint is not None else None,
    )


class RequestDecoder:
    """Decodes requests. Loads the tokenizer and parsers of the model for the first request that needs them."""

    def __init__(self, model: str, options: ChatOptions) -> None:
        self._model, self._options = model, options
        self._renderer: Renderer | None = None

    def decode(self, wire: WireRequest) -> Request:
        """Decode a request. Its arrays are copies, since those that Ray delivers keep memory of its object store."""
        plain = wire.request
        request = replace(
            plain,
            token_ids=np.array(plain.token_ids),
            references={source: [np.array(one) for one in answers] for source, answers in plain.references.items()},
        )
        if wire.stop or wire.structure is not None:
            if self._renderer is None:
                self._renderer = Renderer.load(locate_model(self._model), options=self._options)
            renderer = self._renderer
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
class Import:
    """A snapshot of another unit. position: in tokens. readers: indexes of the pieces that resume from it."""

    position: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Requests for one worker, in the plan's order.

    number: unique in a run, even if the same requests are sent again. exports: keys of snapshots that other units read,
    each sent as soon as it is published. imports: snapshots made in other units; their bytes are sent with this unit.
    """

    number: int
    pieces: tuple[Piece, ...]
    exports: frozenset[Key] = frozenset()
    imports: Mapping[Key, Import] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exported:
    """Message: an export of the unit has been published. Sent before the Answer of the piece that makes it.

    num_bytes: size of the serialized state.
    """

    unit: int
    key: Key
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
    """Message: the unit has ended; its last message. counters: those of the worker's engine so far."""

    unit: int
    counters: Counters = field(default_factory=Counters)


Message = Exported | Answer | ImportFailed | Alive | Done
