"""The matrix products of a pass, done again alone: the share of a pass that they are is its distance from the best.

Must not know: models, engines. A product is done again with the same weights, on other numbers of the same shape,
strides and type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from apcbatch.job.bench.parts import OP_PARTS, PRODUCTS, replaced
from apcbatch.kernels import ops

Call = Callable[[], object]


class Products:
    """The calls of matrix products that were made while `recording`; `again` makes them once more, in order."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._stand_ins: dict[tuple[Any, ...], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note every product while it lasts."""
        with ExitStack() as stack:
            for name, part in OP_PARTS.items():
                if part == PRODUCTS:
                    stack.enter_context(replaced(ops, name, self._noting))
            yield

    def again(self) -> None:
        """All products, without what was between them."""
        for call in self._calls:
            call()

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            own = [self._stand_in(value) for value in args]
            named = {name: self._stand_in(value) for name, value in kwargs.items()}
            self._calls.append(lambda: original(*own, **named))
            return original(*args, **kwargs)

        return call

    def _stand_in(self, value: Any) -> Any:
        """For an activation a tensor of the same layout, shared by all that are alike; anything else itself."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        key = (tuple(value.shape), value.stride(), value.dtype)
        if key not in self._stand_ins:
            stand_in = torch.empty_strided(*key[:2], dtype=value.dtype)
            self._stand_ins[key] = stand_in.copy_(torch.randn(value.shape))
        return self._stand_ins[key]
