"""A model whose layers are spread over several devices: consecutive stages, each with its states, its kernels, its
graphs. The residual stream goes from stage to stage.

Must not know: requests, how many passes are under way. Invariants: a stage adds what its last part left to the stream
as the norm after it would, so that no bit depends on where a model is parted; passes go through every stage in the
order in which they are begun, and the host waits for none of them, so that one stage computes a pass while the stage
before it computes the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from apcbatch.errors import UsageError
from apcbatch.kernels.ops import Backend
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM, Part
from apcbatch.model.families import family_of
from apcbatch.model.graphs import GraphedLM
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.hop import Hop, Sent
from apcbatch.model.spread_arena import SpreadArena
from apcbatch.model.weights import Checkpoint


def stage_layers(folder: Path, config: ModelConfig, count: int) -> list[range]:
    """The layers of each of `count` stages, consecutive ones, at least one each: those whose largest stage has the
    fewest bytes of weights, the embedding with the first and the head with the last. ModelError, UsageError."""
    layers, family = len(config.mixers), family_of(config)
    if count > layers:
        raise UsageError(f"--gpus {count}: the model has {layers} layers; give as many GPUs at most")
    if count == 1:
        return [range(layers)]
    with Checkpoint(folder, torch.device("cpu"), former_names=family.former_names) as checkpoint:
        sizes = checkpoint.sizes()
    weights = [0] * layers
    for name, size in sizes.items():
        number = name.removeprefix(f"{family.layers}.").split(".")[0]
        weights[min(int(number), layers - 1) if number.isdecimal() else layers - 1] += size
    embedding = sizes.get(f"{family.embedding}.weight", 0)
    weights[0] += embedding
    if not config.tie_word_embeddings:  # else the last stage has it too
        weights[-1] -= embedding
    return balanced(weights, count)


def balanced(weights: Sequence[int], count: int) -> list[range]:
    """So many consecutive ranges of the weights' indices, none empty, whose largest sum is the smallest that can be; of
    several such, the ones that end first."""
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    # best[end]: (the largest sum of the ranges up to `end`, where the last of them begins)
    rounds = [[(total[end], 0) for end in range(len(total))]]
    for parts in range(2, count + 1):
        before, best = rounds[-1], [(0, 0)] * len(total)
        for end in range(parts, len(total)):
            best[end] = min((max(before[cut][0], total[end] - total[cut]), cut) for cut in range(parts - 1, end))
        rounds.append(best)
    found, end = list[range](), len(weights)
    for best in reversed(rounds):
        begin = best[end][1]
        found.insert(0, range(begin, end))
        end = begin
    return found


def load_stages(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    arena: SpreadArena,
    layers: Sequence[range],
    backends: Sequence[Backend],
) -> list[CausalLM]:
    """The stages of a model, each with its weights on the device of its arena, and the name of the whole model.
    ModelError, UsageError."""
    numerics = {backend.numerics(dtype) for backend in backends}
    if len(numerics) > 1:
        raise UsageError(
            f"--gpus {len(backends)}: the GPUs compute differently ({', '.join(sorted(numerics))}), so that no two "
            "parts would fit each other; choose GPUs of one kind with CUDA_VISIBLE_DEVICES"
        )
    family, devices = family_of(config), [stage.device for stage in arena.stages]
    places = {
        f"{family.layers}.{layer}": device for device, part in zip(devices, layers, strict=True) for layer in part
    } | {family.embedding: devices[0]}

    def device_of(name: str) -> torch.device:
        found = (places.get(name.rsplit(".", cut)[0]) for cut in range(1, name.count(".") + 1))
        return next((device for device in found if device is not None), devices[-1])

    stages: list[CausalLM] = []
    with Checkpoint(folder, devices[0], device_of, family.former_names) as checkpoint:
        for states, part, backend in zip(arena.stages, layers, backends, strict=True):
            embedding = stages[-1].taken_embedding if stages else None
            stages.append(CausalLM(folder, config, dtype, states, backend, Part(checkpoint, part, embedding)))
        digest = checkpoint.finish()
    for stage in stages:
        stage.taken_embedding = None
        stage.identify(digest, arena.layout.description)
    return stages


class SpreadLM:
    """`forward(batch)` like CausalLM's, for batches made on the host; the logits are on the last stage's device, which
    is the device of everything that is asked for beside them."""

    def __init__(self, stages: Sequence[CausalLM | GraphedLM], devices: Sequence[torch.device]) -> None:
        first, last = stages[0], stages[-1]
        self.fingerprint, self.backend = first.fingerprint, last.backend
        self.numerics, self.weights_digest = first.numerics, first.weights_digest
        self._stages, self._devices = stages, devices
        self._hops = [Hop(source, target) for source, target in zip(devices, devices[1:], strict=False)]
        self._back = Hop(devices[-1], devices[0])

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits (rows, vocabulary) float32 on the last device."""
        batch, entering = self._up_to_last(batch)
        with _on(self._devices[-1]):
            return self._stages[-1].forward(batch, entering)

    @torch.inference_mode()
    def forward_scored(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """See CausalLM."""
        batch, entering = self._up_to_last(batch)
        with _on(self._devices[-1]):
            return self._stages[-1].forward_scored(batch, entering)

    def send_back(self, tokens: torch.Tensor) -> Sent:
        """See CausalLM; they go to the first device as soon as the last one has chosen them."""
        return self._back.send(tokens)

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """See CausalLM."""
        with _on(self._devices[-1]):
            return self._stages[-1].head(normed)

    def _up_to_last(self, batch: Batch) -> tuple[Batch, torch.Tensor]:
        """Run all stages but the last, which is given these."""
        entering = None
        for stage, device, hop in zip(self._stages, self._devices, self._hops, strict=False):
            with _on(device):
                sent = hop.send(stage.forward(batch, entering))
            entering = sent.receive()
            batch = replace(batch, chosen=None)  # the first stage alone reads tokens
        assert entering is not None
        return batch, entering


def _on(device: torch.device) -> AbstractContextManager[object]:
    """While it lasts, kernels are launched on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


Model: TypeAlias = CausalLM | GraphedLM | SpreadLM
