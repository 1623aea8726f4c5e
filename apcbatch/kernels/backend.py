"""Interface between a model and a device: the device's ops, and its fused sub-blocks over packed weights.

The implementations are apcbatch.kernels.cpu.backend and apcbatch.kernels.cuda.backend. A model calls every op through
its one backend, so `observed` sees all calls. Two engines of one process share no backend.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch

from apcbatch.kernels.layer import LinearT, PreNorm, Residual
from apcbatch.kernels.ops import OPS, Ops


class KindOnDevice(NamedTuple):
    """One device's implementation of one kind of sub-block.

    make(norm, *weights_and_state): constructor of the fused form; None: the sub-block runs op by op. version: version
    of its arithmetic, incremented by a change that alters bits of this kind's results only.
    """

    make: Callable[..., Any] | None
    version: int = 1


NOT_FUSED = KindOnDevice(None)


class StackEntry(NamedTuple):
    """Sub-block in a stack. part: its fused form, or None. is_beside: whether it runs in parallel with the previous
    sub-block, on the same residual, so that both outputs are added. run(residual, batch): the call that runs it."""

    part: Any
    is_beside: bool
    run: Callable[[Residual, Any], None]


class Pages(NamedTuple):
    """Locations of a pass's keys and values in the paged KV cache. page_table: (b, pages) int64. context: (b,) int64,
    tokens cached before this chunk. token_slots: (t,) int64, page x PAGE_TOKENS + offset of each token."""

    page_table: torch.Tensor
    context: torch.Tensor
    token_slots: torch.Tensor


class Passed(NamedTuple):
    """Results of a pass. logits: (r, vocabulary) float32. hidden: normed hidden states (s, h) of the rows in
    hidden_rows, in the head's dtype; None if not requested. likeliest: result of `argmax` for each row of logits.
    logprobs: the log-probabilities of these tokens as `greedy` computes them, None if not requested."""

    logits: torch.Tensor
    hidden: torch.Tensor | None
    likeliest: list[int]
    logprobs: list[float] | None


class PassStack(Protocol):
    """A whole pass in one call. replay: advance states by drafted tokens that were accepted, from the inputs that the
    pass kept. See apcbatch.kernels.cpu.stack."""

    def __call__(self, *inputs: Any) -> Passed: ...

    def replay(self, replays: Sequence[tuple[int, int, int]], /) -> None: ...


LayerStack: TypeAlias = Callable[[Residual, Any], None]
Around: TypeAlias = Callable[..., Any]  # (name of an op, the op, its arguments ...) -> what the op returns


class BackendOf(Ops[LinearT]):
    """A device's ops, and the constructors that a model calls once. exact: a row's bits never depend on the rest of
    the batch. kinds: kind of sub-block -> its implementation here. runs_whole: the model's pass is one call; set by
    the model. record_parts of the compiled module measures the parts of such a call."""

    exact: bool
    kinds: ClassVar[Mapping[str, KindOnDevice]]
    runs_whole: bool = False

    @abstractmethod
    def arithmetic(self, dtype: torch.dtype) -> str:
        """Name the arithmetic that all kinds share, for weights of this dtype: products, norms, sums."""

    def numerics(self, dtype: torch.dtype, kinds: Iterable[str] = ()) -> str:
        """Name the arithmetic of a model with these kinds of sub-blocks. Snapshots match only where the name is equal.

        The name contains each kind's version if it is above 1. So a new version of one kind leaves the snapshots of
        models without that kind valid, and snapshots from before kinds had versions stay valid at version 1.
        """
        versions = ((kind, self.kinds.get(kind, NOT_FUSED).version) for kind in sorted(set(kinds)))
        return self.arithmetic(dtype) + "".join(f"-{kind}{version}" for kind, version in versions if version > 1)

    @abstractmethod
    def pack_linear(
        self, weight: torch.Tensor, scale: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> LinearT:
        """Prepare weights (out, in), any row stride, for `linear`. scale: (out,) float32, factors of the float32 sums.
        dtype: of the packed weights, float32 or bfloat16; by default the weight's own. Raises ValueError."""

    def sub_block(self, kind: str, norm: PreNorm, *weights_and_state: Any) -> Any:
        """Make a sub-block's fused form, bound to its norm, weights and state. Returns None if the device has none.

        A call of it with a Residual and a Ragged norms the residual and stores its output as the residual's delta. Its
        can_capture: whether a CUDA graph can capture calls of MOST_CAPTURED tokens.
        """
        make = self.kinds.get(kind, NOT_FUSED).make
        return None if make is None else make(norm, *weights_and_state)

    def layer_stack(self, layers: Sequence[Sequence[StackEntry]], hidden: int) -> LayerStack | None:
        """Make the call that runs all layers on a residual and a model's Batch. It launches several sub-blocks at once,
        with the same bits as one by one. Returns None if the device has none. hidden: columns of the residual."""
        return None

    def pass_stack(
        self,
        layers: Sequence[Sequence[StackEntry]],
        norm: PreNorm,
        head: LinearT,
        embedding: torch.Tensor | None,
        embedding_scale: float,
    ) -> PassStack | None:
        """Make the call that runs a whole pass (apcbatch.kernels.cpu.stack). Returns None if the device has none.

        norm: the final norm. embedding: (vocabulary, h) in the head's dtype; None: tied, the head's rows.
        embedding_scale: factor of the embeddings.
        """
        return None

    @property
    def is_observed(self) -> bool:
        """True if every op is observed. A pass then runs op by op."""
        return all(map(vars(self).__contains__, OPS))

    @contextmanager
    def observed(self, around: Around) -> Iterator[None]:
        """Inside the `with` block, a pass runs op by op, and each op's call goes through around(name, op,
        *arguments)."""
        for name in OPS:
            setattr(self, name, partial(around, name, getattr(self, name)))
        try:
            yield
        finally:
            for name in OPS:
                delattr(self, name)


Backend: TypeAlias = BackendOf[Any]  # the type of its packed weights is known only at run time
