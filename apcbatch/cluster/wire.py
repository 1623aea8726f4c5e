"""Requests as they travel to a worker: taken apart into plain data, and put together there.

Must not know: Ray, engines, tensors. Texts that end an answer, and forms of answers, travel as what they say; the
worker makes them anew with its own tokenizer. Invariant: a request that was put together again runs as the first one
would, with the same random stream and so the same draws; only its tag stays behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np

from apcbatch.data.chat_options import ChatOptions
from apcbatch.data.constraint import Form
from apcbatch.data.grammar_source import Thinking
from apcbatch.data.render import Renderer
from apcbatch.data.stop_texts import StopRule
from apcbatch.data.structure import Structure
from apcbatch.errors import RequestError
from apcbatch.model.locate import locate_model
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.types import Request, RequestPlan

_APART = ("id", "token_ids", "plan", "tag", "ending", "constraint")
_DEFAULTS: Mapping[str, Any] = {
    name: value for name, value in dataclasses.asdict(Request("", ())).items() if name not in _APART
}


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request without its plan and its tag. token_ids: the prompt, little-endian int32. settings: those of Request's
    fields that do not have their defaults. stop: the texts that end an answer. structure, thinking: the form of an
    answer, and the reasoning that may come before it."""

    id: str
    token_ids: bytes
    settings: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    structure: Structure | None = None
    thinking: Thinking | None = None

    @property
    def tokens(self) -> TokenArray:
        """The prompt, (tokens,) int32, read-only."""
        return np.frombuffer(self.token_ids, "<i4")

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids) // 4


def take_apart(request: Request) -> WireRequest:
    """A request as it travels. RequestError for one that only this process can run."""
    ending, constraint = request.ending, request.constraint
    if not isinstance(ending, StopRule | None) or not isinstance(constraint, Form | None):
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
    """A setting without arrays and views: numbers, texts, tuples and dicts."""
    if isinstance(value, Mapping):
        return {int(token): float(bias) for token, bias in value.items()}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return tuple(int(one) for one in value)


class Assembler:
    """Puts requests together. open_renderer: reads the model's tokenizer, at the first request that needs it."""

    def __init__(self, open_renderer: Callable[[], Renderer]) -> None:
        self._open_renderer = open_renderer
        self._renderer: Renderer | None = None

    @classmethod
    def of(cls, model: str, options: ChatOptions) -> Assembler:
        """For a model's own tokenizer and parsers."""
        return cls(lambda: Renderer.load(locate_model(model), options=options))

    def put_together(self, wire: WireRequest, plan: RequestPlan | None) -> Request:
        """The request, with a plan and without a tag."""
        token_ids: Any = wire.tokens  # an array serves as the sequence
        request = Request(wire.id, token_ids, **wire.settings, plan=plan)
        if wire.stop or wire.structure is not None:
            renderer = self._renderer = self._renderer or self._open_renderer()
            request.ending = StopRule(renderer.tokenizer, wire.stop) if wire.stop else None
            if wire.structure is not None:
                request.constraint = Form(renderer.constraints, wire.structure, wire.thinking)
        return request
