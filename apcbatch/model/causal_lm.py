"""The stack of layers of any family: embedding, layers, head.

Must not know: requests, families, what its layers are made of. Pre-norm residual layers; the residual stream is float32
whatever the weights' dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from apcbatch.errors import ModelError
from apcbatch.fingerprint import model_fingerprint
from apcbatch.kernels.layer import PreNorm, Residual
from apcbatch.kernels.ops import Backend, FeedForward, MixerStack, Pages, Passed, PassStack, StackLayer
from apcbatch.model.arena import StateArena
from apcbatch.model.batch import Batch
from apcbatch.model.blocks import Mixer
from apcbatch.model.families import family_of
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.hop import Sent
from apcbatch.model.tensor_source import TensorSource
from apcbatch.model.weights import Checkpoint


def check_sizes(model_dir: Path, config: ModelConfig) -> None:
    """ModelError where the weights' headers do not have the sizes of config.json that a state and a row of logits are
    made of, or a dtype of quantised weights; nothing is allocated for what the weights would contradict."""
    family, h = family_of(config), config.hidden_size
    with Checkpoint(model_dir, torch.device("cpu"), former_names=family.former_names) as checkpoint:
        checkpoint.check_dtypes()
        checkpoint.require(f"{family.embedding}.weight", (config.vocab_size, h))
        checkpoint.require(f"{family.layers}.{len(config.mixers) - 1}.{family.norm}.weight", (h,))
        for kind, (name, mixer) in family.mixers.items():
            if kind in config.mixers:
                prefix = f"{family.layers}.{config.mixers.index(kind)}.{name}"
                for tensor, shape in mixer.sizes(config).items():
                    checkpoint.require(f"{prefix}.{tensor}", shape)


@dataclass
class _Layer:
    mixer: Mixer
    feed_forward: FeedForward | None


@dataclass(frozen=True)
class Part:
    """What one stage of a model takes of the checkpoint that all stages share: these layers; the first stage the
    embedding too, the last one the final norm and the head. embedding: as the first stage took it, for the others."""

    checkpoint: Checkpoint
    layers: range
    embedding: torch.Tensor | None = None


class CausalLM:
    """A language model over an arena of states. `forward(batch)` returns logits (rows, vocabulary) float32. on_layer:
    called before each layer of a forward pass.

    part: for one stage of a model, whose arena has the states of its layers. A stage that is not the first begins with
    what the one before returned, the residual stream (t, h) float32, which it changes; one that is not the last returns
    it. `identify` gives the model's names then, when the whole checkpoint was taken.
    """

    weights_digest: bytes
    fingerprint: bytes

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        arena: StateArena,
        backend: Backend,
        part: Part | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.backend = backend
        self.on_layer: Callable[[], None] | None = None
        self.has_pages = arena.layout.has_tokens
        self._family = family = family_of(config)
        shape = (config.vocab_size, config.hidden_size)
        layers = range(len(config.mixers)) if part is None else part.layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(config.mixers)
        with (
            Checkpoint(model_dir, arena.device, former_names=family.former_names)
            if part is None
            else nullcontext(part.checkpoint)
        ) as checkpoint:
            embedding = None if part is None else part.embedding
            if embedding is None:
                embedding = checkpoint.take(f"{family.embedding}.weight", shape)
            self.taken_embedding = None if self.is_last else embedding
            shares_head = self.is_last and config.tie_word_embeddings
            self.embedding = embedding.to(dtype) if self.is_first and not shares_head else None
            self.layers = [self._load_layer(checkpoint, i, arena) for i in layers]
            if self.is_last:
                self.final_norm = self._norm(checkpoint, f"{family.final_norm}.weight")
                head = self._load_head(checkpoint, embedding, shape)
                self.lm_head = backend.pack_linear(head.to(arena.device, dtype))
            self.numerics = backend.numerics(dtype)
            if part is None:
                self.identify(checkpoint.finish(), arena.layout.description)
        self._stack, self._mixers = self._pass_stack(), self._mixer_stack()

    def identify(self, weights_digest: bytes, layout: str) -> None:
        """Note what the weights are, and name the whole model. layout: the description of all of its state."""
        self.weights_digest = weights_digest
        dtype = str(self.dtype).removeprefix("torch.")
        self.fingerprint = model_fingerprint(self.config.architecture(), weights_digest, dtype, layout, self.numerics)

    def _load_layer(self, checkpoint: Checkpoint, layer: int, arena: StateArena) -> _Layer:
        config, family, prefix = self.config, self._family, f"{self._family.layers}.{layer}"
        source = TensorSource(checkpoint, prefix, self.dtype, self.backend)
        name, mixer_kind = family.mixers[config.mixers[layer]]
        norm = self._norm(checkpoint, f"{prefix}.{family.norm}.weight")
        mixer = mixer_kind.load(config, source.below(name), norm, arena.layer(layer))
        if config.feed_forwards[layer] == "none":
            return _Layer(mixer, None)
        name, kind = family.feed_forwards[config.feed_forwards[layer]]
        norm = self._norm(checkpoint, f"{prefix}.{family.feed_forward_norm}.weight")
        return _Layer(mixer, kind.load(config, source.below(name), norm))

    def _norm(self, checkpoint: Checkpoint, name: str) -> PreNorm:
        weight = checkpoint.take(name, (self.config.hidden_size,)).float()
        return PreNorm(weight, self.config.norm_eps)

    def _load_head(self, checkpoint: Checkpoint, embedding: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        head = f"{self._family.head}.weight"
        if not self.config.tie_word_embeddings:
            return checkpoint.take(head, shape)
        if head in checkpoint and not torch.equal(checkpoint.take(head, shape).to(embedding.device), embedding):
            raise ModelError(
                f"{checkpoint.model_dir}: {head} differs from the embedding although config.json ties them; "
                "set tie_word_embeddings to false or remove the tensor"
            )
        return embedding

    @property
    def most_captured(self) -> int:
        """The most sequences of a decode pass that a CUDA graph can hold: one that never waits for the device."""
        parts = (layer.feed_forward for layer in self.layers)
        return min((part.most_captured for part in parts if part is not None), default=sys.maxsize)

    def _pass_stack(self) -> PassStack | None:
        """What runs a whole pass in one call; None where a device has no such thing, or these are not all layers."""
        if not (self.is_first and self.is_last):
            return None
        layers = [StackLayer(layer.mixer.part, layer.feed_forward) for layer in self.layers]
        return self.backend.pass_stack(layers, self.final_norm, self.lm_head, self.embedding)

    def _mixer_stack(self) -> MixerStack | None:
        """What runs all layers in one call; None where something stands between the mixers, a mixer is made of several
        operations, or a device has no such thing."""
        mixers = [layer.mixer.part for layer in self.layers]
        if None in mixers or any(layer.feed_forward for layer in self.layers):
            return None
        return self.backend.mixer_stack(mixers)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(t,) -> (t, h) float32; a tied embedding is read from the packed head, so that there is one copy."""
        rows = self.lm_head.rows(token_ids) if self.embedding is None else self.embedding[token_ids]
        return rows.float()

    def forward(self, batch: Batch, entering: torch.Tensor | None = None) -> torch.Tensor:
        """Run the packed batch; states, KV and snapshots are written where the batch says. The logits are those of the
        last call alone. entering: what a stage begins with that is not the first."""
        return self.passed(batch).logits if self.runs_whole else self._forward(batch, entering)

    def forward_scored(self, batch: Batch, entering: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `forward`, and the normed hidden states (s, h) of the batch's scored rows: `head` makes logits of them,
        of as many at a time as there is room for."""
        if not self.runs_whole:
            return self._forward_scored(batch, entering)
        passed = self.passed(batch)
        assert passed.hidden is not None
        return passed.logits, passed.hidden

    @torch.inference_mode()
    def _forward(self, batch: Batch, entering: torch.Tensor | None) -> torch.Tensor:
        residual = self._run(batch, entering)
        return self.head(self._normed(residual, batch.logits_rows)) if self.is_last else residual.settled()

    @torch.inference_mode()
    def _forward_scored(self, batch: Batch, entering: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch.scored_rows is not None
        residual = self._run(batch, entering)
        scored = self._normed(residual, batch.scored_rows)
        return self.head(self._normed(residual, batch.logits_rows)), scored

    @property
    def runs_whole(self) -> bool:
        """Whether a pass is one call; nobody sees its ops then."""
        return self._stack is not None and not self.backend.is_observed

    def passed(self, batch: Batch) -> Passed:
        """All that a pass gives, from one call, for a model that `runs_whole`; overwritten by the next one."""
        assert self._stack is not None
        pages = Pages(batch.page_table, batch.context, batch.token_slots)
        rows = batch.logits_rows, batch.scored_rows
        return self._stack(batch.tokens, batch.ragged, pages, *rows, batch.with_logprobs, self.on_layer)

    @torch.inference_mode()
    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """The logits (r, vocabulary) float32 of normed hidden states (r, h)."""
        return self.backend.linear(normed, self.lm_head, out_dtype=torch.float32)

    def send_back(self, tokens: torch.Tensor) -> Sent:
        """What was chosen from a pass's logits, for a pass that begins with it before anybody has read it."""
        return Sent(tokens)

    def _normed(self, residual: Residual, rows: torch.Tensor) -> torch.Tensor:
        return self.backend.normed(residual.rows(rows), self.final_norm, self.dtype)

    def _run(self, batch: Batch, entering: torch.Tensor | None) -> Residual:
        """Embedding and layers."""
        ops = self.backend
        residual = ops.residual(self._embed(batch.tokens) if entering is None else entering, batch.present)
        is_watched = ops.is_observed or self.on_layer is not None
        if self._mixers is not None and not is_watched and self._mixers(residual, batch.ragged):
            return residual
        for layer in self.layers:
            if self.on_layer is not None:
                self.on_layer()
            layer.mixer(residual, batch)
            if layer.feed_forward is not None:
                ops.run_feed_forward(layer.feed_forward, residual)
        return residual
