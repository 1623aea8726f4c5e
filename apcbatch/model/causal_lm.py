"""CausalLM: the model of any family, made of embedding, layers and head.

The layers are pre-norm and residual. The residual stream is float32 for every dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from apcbatch.errors import ModelError
from apcbatch.fingerprint import model_fingerprint
from apcbatch.kernels.backend import Backend, LayerStack, Pages, Passed, PassStack, StackEntry
from apcbatch.kernels.layer import PreNorm, Residual
from apcbatch.model.arena import StateArena
from apcbatch.model.batch import Batch
from apcbatch.model.families import family_of
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.peer_transfer import Sent
from apcbatch.model.sub_blocks import LoadedSubBlock
from apcbatch.model.tensor_source import TensorSource, pack_scaled
from apcbatch.model.weights import Checkpoint


def check_sizes(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Check the sizes in config.json that determine states and logits against the weights' headers, before memory is
    allocated. Raises ModelError if they differ, or if a tensor's dtype is quantised or unknown."""
    family, h = family_of(config), config.hidden_size
    checkpoint.check_dtypes()
    checkpoint.require(f"{family.embedding}.weight", (config.vocab_size, h))
    last = config.num_layers - 1
    checkpoint.require(f"{family.layers}.{last}.{config.layer(last)[0].norm}.weight", (h,))
    for kind, prefix in family.kinds(config).items():
        for tensor, shape in kind.sizes(h).items():
            checkpoint.require(f"{prefix}.{tensor}", shape)


class _Entry(NamedTuple):
    """A sub-block of a layer. is_beside: whether it runs in parallel with the previous sub-block, on the same normed
    input."""

    block: LoadedSubBlock
    is_beside: bool

    def run(self, residual: Residual, batch: Batch) -> None:
        """Run the sub-block. If is_beside, it reads the previous one's input, and both outputs are added."""
        left = residual.beside() if self.is_beside else None
        self.block(residual, batch)
        if left is not None:
            residual.join(left)


class CausalLM:
    """A language model over an arena of states. `forward(batch)` returns logits (rows, vocabulary) float32. on_layer:
    called before each layer of a forward pass.

    layers: those of one pipeline stage; None: all. The arena of a stage has the states of its layers only. The first
    stage also has the embedding, the last one the final norm and the head. embedding: None for the first stage; for a
    later one the first stage's embedding, which a tied head shares. Every stage but the first takes the previous
    stage's residual stream (t, h) float32 and changes it in place; every stage but the last returns it in place of
    logits. The caller calls `identify` on each stage after all stages are loaded.
    """

    weights_digest: bytes
    fingerprint: bytes

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        arena: StateArena,
        backend: Backend,
        layers: range | None = None,
        embedding: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.backend = backend
        self.on_layer: Callable[[], None] | None = None
        self.has_pages = arena.layout.has_tokens
        self._family = family = family_of(config)
        shape = (config.vocab_size, config.hidden_size)
        is_whole, layers = layers is None, layers or range(config.num_layers)
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        if embedding is None:
            embedding = checkpoint.take(f"{family.embedding}.weight", shape)
        self.taken_embedding = None if self.is_last else embedding
        shares_head = self.is_last and config.tie_word_embeddings
        self.embedding = embedding.to(dtype) if self.is_first and not shares_head else None
        if self.is_last:  # before the layers, as these large tensors are in memory twice while they are packed
            tied = embedding.to(arena.device) if config.tie_word_embeddings else None
            del embedding
            head = self._load_head(checkpoint, tied, shape)
            self.lm_head = pack_scaled(backend, head, dtype, config.multipliers.logits)
            del head, tied
        self.layers = [self._load_layer(checkpoint, i, arena) for i in layers]
        if self.is_last:
            self.final_norm = self._norm(checkpoint, f"{family.final_norm}.weight")
        self.numerics = backend.numerics(dtype, [kind.name for kind in family.kinds(config)])
        if is_whole:
            self.identify(checkpoint.finish(), arena.layout.description)
        self._stack, self._layer_stack = self._stacks()
        backend.runs_whole = self._stack is not None

    def identify(self, weights_digest: bytes, layout: str) -> None:
        """Set weights_digest and fingerprint, those of the whole model. layout: description of the whole model's state
        layout."""
        self.weights_digest = weights_digest
        dtype = str(self.dtype).removeprefix("torch.")
        self.fingerprint = model_fingerprint(self.config.architecture(), weights_digest, dtype, layout, self.numerics)

    def _load_layer(self, checkpoint: Checkpoint, i: int, arena: StateArena) -> list[_Entry]:
        prefix, state = f"{self._family.layers}.{i}", arena.layer(i)
        factors = self.config.multipliers
        source = TensorSource(checkpoint, prefix, self.dtype, self.backend, factors.residual, factors.parts)
        entries: list[_Entry] = []
        norm_name = ""
        for block in self.config.layer(i):
            is_beside = block.norm == norm_name
            if not is_beside:
                norm_name, norm = block.norm, self._norm(checkpoint, f"{prefix}.{block.norm}.weight")
            entries.append(_Entry(block.kind.load(source.below(block.name), norm, state), is_beside))
        return entries

    def _norm(self, checkpoint: Checkpoint, name: str) -> PreNorm:
        weight = checkpoint.take(name, (self.config.hidden_size,)).float()
        offset = self._family.norm_offset
        return PreNorm(weight + offset if offset else weight, self.config.norm_eps)

    def _load_head(
        self, checkpoint: Checkpoint, embedding: torch.Tensor | None, shape: tuple[int, int]
    ) -> torch.Tensor:
        """Return the head's weights. embedding: the embedding of the checkpoint if it ties the head to it; None for a
        head of its own."""
        head = f"{self._family.head}.weight"
        if embedding is None:
            return checkpoint.take(head, shape)
        if head in checkpoint and not torch.equal(checkpoint.take(head, shape).to(embedding.device), embedding):
            raise ModelError(
                f"{checkpoint.model_dir}: {head} differs from the embedding although config.json ties them; "
                "set tie_word_embeddings to false or remove the tensor"
            )
        return embedding

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can capture a pass, as none of its sub-blocks makes the host wait for the device."""
        parts = (entry.block.part for layer in self.layers for entry in layer)
        return all(part.can_capture for part in parts if part is not None)

    def _stacks(self) -> tuple[PassStack | None, LayerStack | None]:
        """Return the fused call for a whole pass and the one for all layers. Each is None if the device has none. The
        first is None, too, for a pipeline stage or if a sub-block has no fused form."""
        layers = [
            [StackEntry(entry.block.part, entry.is_beside, entry.run) for entry in layer] for layer in self.layers
        ]
        layer_stack = self.backend.layer_stack(layers, self.config.hidden_size)
        is_fused = all(entry.part is not None for layer in layers for entry in layer)
        if not (is_fused and self.is_first and self.is_last):
            return None, layer_stack
        scale = self.config.multipliers.embedding
        return self.backend.pass_stack(layers, self.final_norm, self.lm_head, self.embedding, scale), layer_stack

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids (t,) -> (t, h) float32. A tied embedding is read from the packed head, so it is in memory
        only once."""
        rows = self.lm_head.rows(token_ids) if self.embedding is None else self.embedding[token_ids]
        scale = self.config.multipliers.embedding
        return rows.float() if scale == 1 else rows.float() * scale

    def forward(self, batch: Batch, entering: torch.Tensor | None = None) -> torch.Tensor:
        """Run the packed batch and return its logits, or for a stage other than the last the residual stream, valid
        until the next call. States, KV and snapshots are written to the batch's slots and pages. entering: residual
        stream from the previous stage; None for the first stage."""
        return self.passed(batch).logits if self.runs_whole else self._forward(batch, entering)

    def forward_scored(self, batch: Batch, entering: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `forward`, but also return the normed hidden states (s, h) of the batch's scored rows. The caller
        computes their logits with `head`, in slices that fit into memory."""
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
        """Whether a pass is one fused call. False while the ops are observed, since a fused call hides them."""
        return self._stack is not None and not self.backend.is_observed

    def passed(self, batch: Batch) -> Passed:
        """Run a pass as one fused call and return its results, for a model that `runs_whole`. The next pass overwrites
        them."""
        assert self._stack is not None
        pages = Pages(batch.page_table, batch.context, batch.token_slots)
        rows = batch.logits_rows, batch.scored_rows, batch.with_logprobs, batch.kept_rows
        return self._stack(batch.tokens, batch.ragged, pages, *rows, self.on_layer)

    @property
    def replays(self) -> bool:
        """Whether a pass can keep the inputs of drafted tokens, for `replay`."""
        return self.runs_whole

    def replay(self, replays: Sequence[tuple[int, int, int]]) -> None:
        """Advance states by accepted tokens of the last pass. replays: (slot, index in kept_rows of the first token,
        number of tokens) for each state."""
        assert self._stack is not None
        self._stack.replay(replays)

    @torch.inference_mode()
    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the logits (r, vocabulary) float32 of normed hidden states (r, h)."""
        return self.backend.linear(normed, self.lm_head, out_dtype=torch.float32)

    def send_back(self, tokens: torch.Tensor) -> Sent:
        """Send the tokens sampled from a pass's logits to the first stage, for a next pass that begins before the host
        reads them."""
        return Sent(tokens)

    def _normed(self, residual: Residual, rows: torch.Tensor) -> torch.Tensor:
        return self.backend.normed(residual.rows(rows), self.final_norm, self.dtype)

    def _run(self, batch: Batch, entering: torch.Tensor | None) -> Residual:
        """Run the embedding and the layers."""
        ops = self.backend
        batch = replace(batch)  # a copy without positions yet, since a batch's lists may be refilled between passes
        residual = ops.residual(self._embed(batch.tokens) if entering is None else entering, batch.present)
        is_watched = ops.is_observed or self.on_layer is not None
        if self._layer_stack is not None and not is_watched:
            self._layer_stack(residual, batch)
            return residual
        for layer in self.layers:
            if self.on_layer is not None:
                self.on_layer()
            for entry in layer:
                entry.run(residual, batch)
        return residual
