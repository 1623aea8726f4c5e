"""Pipeline parallelism: a model whose layers are split over several devices, in consecutive stages. Each stage has its
own states, kernels and graphs; the residual stream goes from stage to stage.

Invariants: a stage adds the output of its last sub-block to the stream as the next norm would, so that no bit depends
on where the model is split. Passes go through every stage in submission order, and the host does not wait between
stages, so that a stage computes one pass while the stage before it computes the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeAlias

import torch

from apcbatch.errors import UsageError
from apcbatch.kernels.backend import Backend
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.families import family_of
from apcbatch.model.graphs import GraphedLM
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.peer_transfer import Hop, Sent
from apcbatch.model.pipeline_arena import SpreadArena
from apcbatch.model.weights import Checkpoint


def stage_layers(checkpoint: Checkpoint, config: ModelConfig, count: int) -> list[range]:
    """Split the layers into `count` consecutive, non-empty stages so that the largest stage has the fewest bytes of
    weights; the embedding counts for the first stage, the head for the last. Raises ModelError, UsageError."""
    layers, family = config.num_layers, family_of(config)
    if count > layers:
        raise UsageError(f"--gpus {count}: the model has {layers} layers; give as many GPUs at most")
    if count == 1:
        return [range(layers)]
    sizes = checkpoint.sizes()
    weights = [0] * layers
    for name, size in sizes.items():
        number = name.removeprefix(f"{family.layers}.").split(".")[0]
        weights[min(int(number), layers - 1) if number.isdecimal() else layers - 1] += size
    embedding = sizes.get(f"{family.embedding}.weight", 0)
    weights[0] += embedding
    if not config.tie_word_embeddings:  # a tied embedding counts for the last stage too, which needs it for the head
        weights[-1] -= embedding
    return balanced(weights, count)


def balanced(weights: Sequence[int], count: int) -> list[range]:
    """Split the weights' indices into `count` consecutive, non-empty ranges so that the largest sum is minimal; on
    ties, the last range begins as early as possible, then the one before it, and so on."""
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    # best[end]: (largest sum of the ranges that cover [0, end), begin of the last range)
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
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    arena: SpreadArena,
    layers: Sequence[range],
    backends: Sequence[Backend],
) -> list[CausalLM]:
    """Load the stages of a model, each onto the device of its arena. Each gets the fingerprint of the whole model.
    Raises ModelError, UsageError."""
    kinds = [kind.name for kind in family_of(config).kinds(config)]
    numerics = {backend.numerics(dtype, kinds) for backend in backends}
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
    checkpoint.device_of = device_of
    for states, part, backend in zip(arena.stages, layers, backends, strict=True):
        embedding = stages[-1].taken_embedding if stages else None
        stages.append(CausalLM(checkpoint, config, dtype, states, backend, part, embedding))
    digest = checkpoint.finish()
    for stage in stages:
        stage.taken_embedding = None
        stage.identify(digest, arena.layout.description)
    return stages


class SpreadLM:
    """CausalLM over several devices: `forward(batch)` is CausalLM's, for batches made on the host. The logits, and all
    tensors returned with them, are on the last stage's device."""

    def __init__(self, stages: Sequence[CausalLM | GraphedLM], devices: Sequence[torch.device]) -> None:
        first, last = stages[0], stages[-1]
        self.fingerprint, self.backend = first.fingerprint, last.backend
        self.numerics, self.weights_digest = first.numerics, first.weights_digest
        self._stages, self._devices = stages, devices
        self._hops = [Hop(source, target) for source, target in zip(devices, devices[1:], strict=False)]
        self._back = Hop(devices[-1], devices[0])

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Return logits (rows, vocabulary) float32 on the last device."""
        batch, entering = self._up_to_last(batch)
        with _on(self._devices[-1]):
            return self._stages[-1].forward(batch, entering)

    @torch.inference_mode()
    def forward_scored(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        batch, entering = self._up_to_last(batch)
        with _on(self._devices[-1]):
            return self._stages[-1].forward_scored(batch, entering)

    def send_back(self, tokens: torch.Tensor) -> Sent:
        """See CausalLM; the tokens go from the last device to the first."""
        return self._back.send(tokens)

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        with _on(self._devices[-1]):
            return self._stages[-1].head(normed)

    def _up_to_last(self, batch: Batch) -> tuple[Batch, torch.Tensor]:
        """Run all stages but the last. Return the batch and the residual stream for the last stage."""
        entering = None
        for stage, device, hop in zip(self._stages, self._devices, self._hops, strict=False):
            with _on(device):
                sent = hop.send(stage.forward(batch, entering))
            entering = sent.receive()
            batch = replace(batch, chosen=None)  # only the first stage reads tokens
        assert entering is not None
        return batch, entering


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launch kernels on this device inside the block."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


Model: TypeAlias = CausalLM | GraphedLM | SpreadLM
