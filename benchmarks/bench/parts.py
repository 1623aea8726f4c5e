"""Time the parts of a pass: the ops of an engine's backend and the engine's own steps.

The timers are installed for a measurement only. A part's time excludes timed calls nested in it. Untimed work (the
interpreter, small tensors) is `python`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from apcbatch import _C
from apcbatch.engine.persistence import Persistence
from apcbatch.engine.scheduler import Scheduler
from apcbatch.engine.snapshots import Snapshots
from apcbatch.kernels.backend import Backend
from apcbatch.kernels.ops import OPS

PRODUCTS = "matrix products"
REST = "python"
WAITING = "waiting for threads"  # mean time that a thread idles at a barrier; already contained in the other parts
FUSED_PARTS = (  # csrc/parts.h, Part
    PRODUCTS,
    "convolution",
    "scan",
    "norms",
    "gated product",
    "experts",
    "attention",
    "embedding",
    "sampling",
    WAITING,
)
# Part of each op; None for an op that only calls timed ops or the interpreter. An op without a row is a part itself.
OP_PARTS = {
    "linear": PRODUCTS,
    "selective_scan": "scan",
    "head_scan": "scan",
    "causal_conv": "convolution",
    "rms_norm": "norms",
    "add_rms_norm_": "norms",
    "normed": "norms",
    "gated_norm": "norms",
    "silu_mul": "gated product",
    "norm_rope": "attention",
    "paged_attention": "attention",
    "sigmoid_mul": "attention",
    "write_kv": "attention",
    "route": "experts",
    "relu_square": "gated product",
    "argmax": "sampling",
    "greedy": "sampling",
    "token_logprobs": "sampling",
    "residual": None,
    "run_sub_block": None,
}
CHOICES = tuple(name for name, part in OP_PARTS.items() if part == "sampling")  # ops that run after a fused pass
METHODS = (
    (Scheduler, "schedule", "scheduling"),
    (Snapshots, "attach", "restore"),
    (Snapshots, "reserve", "store"),
    (Snapshots, "publish", "store"),
    (Persistence, "drain", "store"),
    (Persistence, "save", "store"),
)


@contextmanager
def recorded_parts() -> Iterator[dict[str, float]]:
    """Record the time of this thread's fused calls inside the `with` block. Yields a mapping from part to seconds,
    filled when the block ends. `experts`: time of a mixture except its matrix products."""
    seconds: dict[str, float] = {}
    _C.record_parts(True)
    try:
        yield seconds
    finally:
        _C.record_parts(False)
        seconds.update(zip(FUSED_PARTS, _C.part_seconds(), strict=True))


class Parts:
    """Seconds by part of a pass, filled inside `recording`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._below: list[float] = []  # stack of running timed calls: seconds of the timed calls nested in each

    def of(self, total_s: float) -> dict[str, float]:
        """Return the seconds by part, the largest first, of a run that took total_s; the untimed rest is `python`."""
        parts = {**self.seconds, REST: max(0.0, total_s - sum(self.seconds.values()))}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))

    @contextmanager
    def recording(self, backend: Backend) -> Iterator[None]:
        """Time every op of the backend and the engine's own steps inside the block."""
        with ExitStack() as stack:
            stack.enter_context(backend.observed(self._time_op, CHOICES if backend.runs_whole else OPS))
            for owner, name, part in METHODS:
                stack.enter_context(self._replaced(owner, name, part))
            fused = stack.enter_context(recorded_parts())
            yield
        for part, seconds in fused.items():
            if seconds and part != WAITING:  # waiting is contained in the other parts
                self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def _time_op(self, name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        part = OP_PARTS.get(name, name)
        return op(*args, **kwargs) if part is None else self._timed(op, part)(*args, **kwargs)

    @contextmanager
    def _replaced(self, owner: type, name: str, part: str) -> Iterator[None]:
        original = getattr(owner, name)
        setattr(owner, name, self._timed(original, part))
        try:
            yield
        finally:
            setattr(owner, name, original)

    def _timed(self, original: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._below.append(0.0)
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - begin
                own = seconds - self._below.pop()
                self.seconds[part] = self.seconds.get(part, 0.0) + own
                if self._below:
                    self._below[-1] += seconds

        return call
