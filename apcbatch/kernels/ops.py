"""What a model asks of a device: its ops, and the parts of a layer over its own packed weights.

Must not know: models, requests. Each device has one class here (apcbatch.kernels.cpu.backend and cuda.backend); what an
op takes and returns stands in the docstring of the CPU's. A model is given one backend and reaches every op through
it, so that whoever observes that backend sees them all. Two engines of a process share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from apcbatch.kernels.layer import AttentionWeights, Expert, Linear, LinearT, MixerWeights, PreNorm, Residual
from apcbatch.kernels.ragged import Ragged

Mixer: TypeAlias = Callable[[Residual, Ragged], None]
MixerT = TypeVar("MixerT", bound=Mixer)
UsedLinear = TypeVar("UsedLinear", bound=Linear, contravariant=True)


class FeedForward(Protocol):
    """An MLP or a mixture. most_captured: the most tokens of a call that a CUDA graph can hold."""

    @property
    def most_captured(self) -> int: ...

    def __call__(self, residual: Residual, /) -> None: ...


class Pages(NamedTuple):
    """Where the sequences of a pass have their keys and values: page_table (b, pages) int64, context (b,) int64 tokens
    cached before this piece, token_slots (t,) int64, page x PAGE_TOKENS + offset of each token."""

    page_table: torch.Tensor
    context: torch.Tensor
    token_slots: torch.Tensor


class MixerStack(Protocol):
    """Mixers one after the other in one call. The bits are those of the mixers one by one."""

    def __call__(self, residual: Residual, ragged: Ragged, /) -> bool:
        """Run them, or return False: this batch is left to the mixers."""


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


class StackLayer(NamedTuple):
    """The parts of a layer as the kernels have them; feed_forward: None for none."""

    mixer: Any
    feed_forward: FeedForward | None


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

    def run_mixer(self, mixer: Mixer, residual: Residual, ragged: Ragged) -> None:
        """Run a mixer of this backend, over the states that the batch names."""
        mixer(residual, ragged)

    def run_feed_forward(self, part: FeedForward, residual: Residual) -> None:
        """Run an MLP or a mixture of this backend."""
        part(residual)


OPS = tuple(name for name in vars(Ops) if not name.startswith("_"))
Around: TypeAlias = Callable[..., Any]  # (name of an op, the op, its arguments ...) -> what the op returns


class BackendOf(Ops[LinearT], Protocol[LinearT, MixerT]):
    """The ops of a device, and what is made once for a model. exact: whether a row's bits never depend on the rows that
    come with it. runs_whole: whether a pass is one call, whose parts apcbatch.kernels.fused_seconds tells apart."""

    exact: bool
    runs_whole: bool

    def numerics(self, dtype: torch.dtype) -> str:
        """The name of the arithmetic of weights of this dtype: snapshots are of use only where it is the same."""

    def pack_linear(self, weight: torch.Tensor) -> LinearT: ...

    def mixer(self, norm: PreNorm, weights: MixerWeights[LinearT], ssm: torch.Tensor, conv: torch.Tensor) -> MixerT: ...

    def mixer_stack(self, mixers: Sequence[MixerT]) -> MixerStack | None:
        """What runs one or more mixers of this backend in one call; None where the device has no such call."""

    def mlp(self, norm: PreNorm, expert: Expert[LinearT]) -> FeedForward: ...

    def mixture(
        self, norm: PreNorm, router: LinearT, experts: Sequence[Expert[LinearT]], experts_per_token: int
    ) -> FeedForward: ...

    def attention(
        self, norm: PreNorm, weights: AttentionWeights[LinearT], k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> Any:
        """An attention mixer for `pass_stack`; None where the device has none."""

    def pass_stack(
        self, layers: Sequence[StackLayer], norm: PreNorm, head: LinearT, embedding: torch.Tensor | None
    ) -> PassStack | None:
        """What runs whole passes in one call; None where the device has no such call. norm: the final one. embedding:
        (vocabulary, h) in the head's dtype; None: the head's rows."""

    @property
    def is_observed(self) -> bool:
        """Whether somebody wants to see each op: then a pass is to be made of them."""
        return all(map(vars(self).__contains__, OPS))

    @contextmanager
    def observed(self, around: Around, names: Collection[str] = OPS) -> Iterator[None]:
        """Each op that is called through this backend while it lasts is left to around(name, op, *arguments). names:
        the ops to see; a pass is made of single ops only if they are all."""
        for name in names:
            setattr(self, name, partial(around, name, getattr(self, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(self, name)


Backend: TypeAlias = BackendOf[Any, Any]  # which one, and so how it packs, is known when the program runs
