"""What a model asks of a device: its ops, and the parts of a layer over its own packed weights.

Must not know: models, requests. Each device has one class here (apcbatch.kernels.cpu.backend and cuda.backend); what an
op takes and returns stands in the docstring of the CPU's. A model is given one backend and reaches every op through
it, so that whoever observes that backend sees them all. Two engines of a process share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from apcbatch.kernels.layer import Linear, LinearT, PreNorm, Residual
from apcbatch.kernels.ragged import Ragged

UsedLinear = TypeVar("UsedLinear", bound=Linear, contravariant=True)


class FusedSubBlock(Protocol):
    """A sub-block of a layer in one call, over the weights and the state that it was made of: it norms the residual
    and leaves its result to be added. most_captured: the most tokens of a call that a CUDA graph can hold."""

    @property
    def most_captured(self) -> int: ...

    def __call__(self, residual: Residual, ragged: Ragged, /) -> None: ...


class KindOnDevice(NamedTuple):
    """How a device has one kind of sub-block.

    make(norm, what the kind is made of ...): its fused form; None: it runs by its ops. version: of its arithmetic; it
    counts up with every change of a bit of this kind's results alone.
    """

    make: Callable[..., Any] | None
    version: int = 1


NOT_FUSED = KindOnDevice(None)


class StackEntry(NamedTuple):
    """A sub-block of a layer for a stack. is_beside: it reads what the one before it reads, under the same norm, and
    its result is added to that one's."""

    part: Any
    is_beside: bool


class Pages(NamedTuple):
    """Where the sequences of a pass have their keys and values: page_table (b, pages) int64, context (b,) int64 tokens
    cached before this piece, token_slots (t,) int64, page x PAGE_TOKENS + offset of each token."""

    page_table: torch.Tensor
    context: torch.Tensor
    token_slots: torch.Tensor


class LayerStack(Protocol):
    """All layers of a model in one call. The bits are those of the sub-blocks one by one."""

    def __call__(self, residual: Residual, ragged: Ragged, /) -> bool:
        """Run them, or return False: this batch is left to the sub-blocks."""


class Passed(NamedTuple):
    """What a whole pass gives. logits: (r, vocabulary) float32. hidden: the normed hidden states (s, h) of the rows
    they are wanted of, or None. likeliest: the token that `argmax` gives for each row of logits. logprobs: what
    `greedy` gives beside them, None if that is not wanted."""

    logits: torch.Tensor
    hidden: torch.Tensor | None
    likeliest: list[int]
    logprobs: list[float] | None


class PassStack(Protocol):
    """A whole pass in one call: embedding, layers, final norm, head, the likeliest tokens. The bits are those of the
    ops one by one."""

    def __call__(
        self,
        tokens: torch.Tensor,
        ragged: Ragged,
        pages: Pages,
        logits_rows: torch.Tensor,
        hidden_rows: torch.Tensor | None = None,
        with_logprobs: bool = False,
        on_layer: Callable[[], None] | None = None,
        /,
    ) -> Passed:
        """The logits of tokens logits_rows (r,) int64, the likeliest tokens, and with_logprobs their log-probabilities;
        the normed hidden states of hidden_rows (s,) int64. tokens: (t,) int64. on_layer: called before each layer. The
        tensors are overwritten by the next call. Raises ValueError."""


class Ops(Protocol[UsedLinear]):
    """What a pass is made of."""

    def linear(
        self,
        x: torch.Tensor,
        packed: UsedLinear,
        out_dtype: torch.dtype | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def causal_conv(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, ragged: Ragged
    ) -> torch.Tensor: ...

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        state: torch.Tensor,
        ragged: Ragged,
    ) -> torch.Tensor: ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype
    ) -> torch.Tensor: ...

    def add_rms_norm_(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor: ...

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...

    def softmax_topk(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def argmax(self, logits: torch.Tensor) -> torch.Tensor: ...

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def token_logprob(self, logits: torch.Tensor, token: int) -> float: ...

    def token_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor: ...

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        token_slots: torch.Tensor,
    ) -> None: ...

    def paged_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        context: torch.Tensor,
        scale: float,
    ) -> torch.Tensor: ...

    def residual(self, begin: torch.Tensor, present: torch.Tensor | None = None) -> Residual: ...

    def normed(self, residual: Residual, norm: PreNorm, dtype: torch.dtype) -> torch.Tensor: ...

    def run_sub_block(self, part: FusedSubBlock, residual: Residual, ragged: Ragged) -> None:
        """Run a sub-block of this backend, over the states that the batch names."""
        part(residual, ragged)


OPS = tuple(name for name in vars(Ops) if not name.startswith("_"))
Around: TypeAlias = Callable[..., Any]  # (name of an op, the op, its arguments ...) -> what the op returns


class BackendOf(Ops[LinearT], Protocol[LinearT]):
    """The ops of a device, and what is made once for a model. exact: whether a row's bits never depend on the rows that
    come with it. kinds: the kinds of sub-blocks that it has in one call, by name. runs_whole: whether the model's pass
    is one call, whose parts apcbatch.kernels.kernel_seconds tells apart; the model sets it."""

    exact: bool
    kinds: ClassVar[Mapping[str, KindOnDevice]]
    runs_whole: bool = False

    def arithmetic(self, dtype: torch.dtype) -> str:
        """The name of what all kinds share: products, norms, sums, of weights of this dtype."""

    def numerics(self, dtype: torch.dtype, kinds: Iterable[str] = ()) -> str:
        """The name of the arithmetic of a model of these kinds: snapshots are of use only where it is the same. A
        kind's version stands in it from 2 on: the name is the one of before the kind had a version of its own, and
        a change of one kind leaves the stores of models without it."""
        versions = ((kind, self.kinds.get(kind, NOT_FUSED).version) for kind in sorted(set(kinds)))
        return self.arithmetic(dtype) + "".join(f"-{kind}{version}" for kind, version in versions if version > 1)

    def pack_linear(self, weight: torch.Tensor) -> LinearT: ...

    def sub_block(self, kind: str, norm: PreNorm, *made_of: Any) -> Any:
        """The fused form of a sub-block, from its norm, weights and state; None where the device has none."""
        make = self.kinds.get(kind, NOT_FUSED).make
        return None if make is None else make(norm, *made_of)

    def layer_stack(self, layers: Sequence[Sequence[StackEntry]]) -> LayerStack | None:
        """What runs all layers in one call; None where the device has no such call for them."""

    def pass_stack(
        self,
        layers: Sequence[Sequence[StackEntry]],
        norm: PreNorm,
        head: LinearT,
        embedding: torch.Tensor | None,
    ) -> PassStack | None:
        """What runs whole passes in one call; None where the device has no such call. norm: the final one. embedding:
        (vocabulary, h) in the head's dtype; None: the head's rows."""

    @property
    def is_observed(self) -> bool:
        """Whether every op is observed: a pass is then run op by op."""
        return all(map(vars(self).__contains__, OPS))

    @contextmanager
    def observed(self, around: Around, names: Collection[str] = OPS) -> Iterator[None]:
        """Inside the block, route each call of an op in `names` through around(name, op, *arguments). A pass is run op
        by op only if `names` are all ops."""
        for name in names:
            setattr(self, name, partial(around, name, getattr(self, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(self, name)


Backend: TypeAlias = BackendOf[Any]  # which one, and so how it packs, is known when the program runs
