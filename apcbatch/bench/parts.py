"""Where the time of a pass goes: the functions that it calls, replaced by timed ones for the time of a measurement.

Must not know: what is run. The engine's own path carries no timers. A call's time counts for its part alone: time in
timed calls below it is theirs. What is in no part (the interpreter, small tensors, the embedding) is `python`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from apcbatch.engine.persistence import Persistence
from apcbatch.engine.scheduler import Scheduler
from apcbatch.engine.snapshots import Snapshots
from apcbatch.kernels import ops
from apcbatch.kernels.parts import recorded_parts

PRODUCTS = "matrix products"
REST = "python"
OP_PARTS = {
    "linear": PRODUCTS,
    "selective_scan": "scan",
    "causal_conv": "convolution",
    "rms_norm": "norms",
    "add_rms_norm_": "norms",
    "silu_mul": "gated product",
    "paged_attention": "attention",
    "write_kv": "attention",
    "softmax_topk": "experts",
    "argmax": "sampling",
    "greedy": "sampling",
    "token_logprob": "sampling",
}
NOT_TIMED = {
    "PAGE_TOKENS", "PackedLinear", "pack_linear", "isa", "set_isa", "available_isas", "numerics",
    "MixerWeights", "FusedMixer", "FusedMlp", "FusedMixture", "Expert", "PreNorm", "Residual",
}  # fmt: skip
METHODS = (
    (Scheduler, "schedule", "scheduling"),
    (Snapshots, "attach", "restore"),
    (Snapshots, "reserve", "store"),
    (Snapshots, "publish", "store"),
    (Persistence, "drain", "store"),
    (Persistence, "save", "store"),
)


class Parts:
    """Seconds by part, filled while `recording`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._below: list[float] = []  # of each timed call that is under way: seconds in timed calls below it

    def of(self, total_s: float) -> dict[str, float]:
        """Seconds by part of a run that took total_s, the largest first; what was not timed is `python`."""
        parts = {**self.seconds, REST: max(0.0, total_s - sum(self.seconds.values()))}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Time every op and the engine's own steps while it lasts."""
        with ExitStack() as stack:
            for name in ops.__all__:
                if name not in NOT_TIMED:
                    stack.enter_context(self._replaced(ops, name, OP_PARTS.get(name, name)))
            for owner, name, part in METHODS:
                stack.enter_context(self._replaced(owner, name, part))
            fused = stack.enter_context(recorded_parts())
            yield
        for part, seconds in fused.items():
            if seconds:
                self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @contextmanager
    def _replaced(self, owner: Any, name: str, part: str) -> Iterator[None]:
        with replaced(owner, name, lambda original: self._timed(original, part)):
            yield

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


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """owner.name is make(owner.name) while it lasts."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
