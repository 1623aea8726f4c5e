"""A model over random states, and passes of it in one call and op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from apcbatch.kernels.backend import Backend
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model import families
from apcbatch.model.arena import StateArena
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.devices import backend_for
from apcbatch.model.families import family_of, load_model_config, state_layout
from apcbatch.model.family import Family
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.sub_blocks import SubBlock
from tests.kernels.recurrent import ragged, same_bits
from tests.tiny import VOCAB

CPU = torch.device("cpu")

# Tokens that each sequence has before the pass, and in it.
PASSES = {
    "one token": ([7], [1]),
    "a decode pass": ([3, 64, 130, 1, 0], [1, 1, 1, 1, 1]),
    "prompts and decodes": ([0, 64, 70, 0, 1], [70, 1, 60, 3, 129]),
}


class Loaded:
    """A model, and passes over random states. tensors: in place of those of the folder."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        config: ModelConfig | None = None,
        tensors: Any = None,
        backend: Backend | None = None,
    ) -> None:
        config = config or load_model_config(folder)
        layout = state_layout(config, str(dtype).removeprefix("torch."))
        self.arena = StateArena(layout, 16, 24, CPU)
        given, layers = (config, dtype, self.arena, backend or backend_for(CPU)), range(config.num_layers)
        if tensors is None:
            with family_of(config).checkpoint(folder, CPU) as checkpoint:
                self.model = CausalLM(checkpoint, *given)
        else:
            self.model = CausalLM(tensors, *given, layers)
        self.num_layers = config.num_layers
        for part in (*self.arena.slots.values(), *self.arena.pages.values()):
            part.copy_(torch.randn(part.shape))

    @property
    def states(self) -> dict[str, torch.Tensor]:
        """Every slot and page."""
        return {**self.arena.slots, **self.arena.pages}

    def batch(self, before: list[int], lengths: list[int]) -> Batch:
        """Sequences that continue after that number of tokens each, with a snapshot of the last one."""
        b, total = len(lengths), sum(lengths)
        initial = [i if context else -1 for i, context in enumerate(before)]
        keeps = [[]] * (b - 1) + [[(lengths[-1], b)]]
        pages = torch.arange(4 * b).view(b, 4)  # of 64 tokens each
        owner = torch.arange(b).repeat_interleave(torch.tensor(lengths))
        positions = torch.cat([torch.arange(n) + context for n, context in zip(lengths, before, strict=True)])
        ends = torch.tensor(lengths).cumsum(0)
        return Batch(
            token_ids=torch.randint(VOCAB, (total,)),
            ragged=ragged(lengths, initial, list(range(b)), keeps),
            logits_rows=ends - 1,
            page_table=pages,
            context=torch.tensor(before),
            token_slots=pages[owner, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS,
            scored_rows=torch.arange(0, total, 2),
        )

    def op_by_op(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The pass as an observer of the backend sees it."""
        seen = set()

        def around(name: str, op: Callable[..., object], *args: object, **kwargs: object) -> object:
            seen.add(name)
            return op(*args, **kwargs)

        with self.model.backend.observed(around):
            answer = self.model.forward_scored(batch)
        assert {"linear", "normed"} <= seen
        return answer

    def assert_one_call_is_its_ops(self, batch: Batch) -> None:
        """The pass as a user runs it has the bits of `op_by_op`: logits, hidden states, states, snapshots, pages."""
        begin = {role: part.clone() for role, part in self.states.items()}
        expected = self.op_by_op(batch)
        after = {role: part.clone() for role, part in self.states.items()}
        self.restore(begin)
        answer = self.model.forward_scored(batch)
        assert all(same_bits(one, other) for one, other in zip(answer, expected, strict=True))
        assert all(same_bits(part, after[role]) for role, part in self.states.items())

    def restore(self, states: dict[str, torch.Tensor]) -> None:
        """Make every slot and page what it was."""
        for role, part in self.states.items():
            part.copy_(states[role])


def arranged(
    monkeypatch: pytest.MonkeyPatch,
    layers: Sequence[tuple[SubBlock, ...]],
    hidden: int,
    dtype: torch.dtype,
    tensors: Any,
    backend: Backend | None,
) -> Loaded:
    """A model of a family that has these sub-blocks in each layer."""
    family = Family(
        model_type="arranged",
        architectures=("ArrangedForCausalLM",),
        read=lambda reader, name: config,
        embedding="embeddings",
        layers="layers",
        final_norm="norm_f",
    )
    mixers = tuple(map(str, range(len(layers))))
    config = ModelConfig(
        family="arranged", vocab_size=VOCAB, hidden_size=hidden, mixers=mixers, feed_forwards=("none",) * len(layers),
        blocks=dict(zip(mixers, layers, strict=True)), norm_eps=1e-6, tie_word_embeddings=True,
    )  # fmt: skip
    monkeypatch.setattr(families, "families", lambda: (family,))
    loaded = Loaded(Path(), dtype, config, tensors, backend)
    loaded.config, loaded.taken = config, tensors.taken
    return loaded
