"""The stack of all three families: embedding, layers, head.

Must not know: requests. Pre-norm residual layers; the residual stream is float32 whatever the weights' dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from apcbatch.errors import ModelError
from apcbatch.fingerprint import model_fingerprint
from apcbatch.kernels import ops
from apcbatch.model.attention import AttentionMixer
from apcbatch.model.batch import Batch
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.mamba import MambaMixer
from apcbatch.model.moe import load_mixture, load_mlp
from apcbatch.model.state import StateArena
from apcbatch.model.weights import Checkpoint


@dataclass(frozen=True)
class _Names:
    """How a family names its tensors."""

    embedding: str
    layer: str
    mamba: str
    norm: str
    final_norm: str


_NAMES = {
    "jamba": _Names(
        "model.embed_tokens", "model.layers", "mamba", "input_layernorm", "model.final_layernorm"
    ),
    "mamba": _Names("backbone.embeddings", "backbone.layers", "mixer", "norm", "backbone.norm_f"),
    "falcon_mamba": _Names("backbone.embeddings", "backbone.layers", "mixer", "norm", "backbone.norm_f"),
}


def check_sizes(model_dir: Path, config: ModelConfig) -> None:
    """ModelError where the weights' headers do not have the sizes of config.json that a state and a row of logits are
    made of; nothing is allocated for what the weights would contradict."""
    names, h, d = _NAMES[config.family], config.hidden_size, config.d_inner
    with Checkpoint(model_dir, torch.device("cpu")) as checkpoint:
        checkpoint.require(f"{names.embedding}.weight", (config.vocab_size, h))
        checkpoint.require(f"{names.layer}.{len(config.mixers) - 1}.{names.norm}.weight", (h,))
        mixer = f"{names.layer}.{config.mixers.index('mamba')}.{names.mamba}"
        checkpoint.require(f"{mixer}.A_log", (d, config.d_state))
        checkpoint.require(f"{mixer}.conv1d.weight", (d, 1, config.d_conv))
        if config.num_attention_layers:
            mixer = f"{names.layer}.{config.mixers.index('attention')}.self_attn"
            checkpoint.require(f"{mixer}.k_proj.weight", (config.num_key_value_heads * config.head_dim, h))


@dataclass
class _Layer:
    mixer: MambaMixer | AttentionMixer
    feed_forward: Callable[[ops.Residual], None] | None


class CausalLM:
    """A language model over an arena of states. `forward(batch)` returns logits (rows, vocabulary) float32."""

    def __init__(self, model_dir: Path, config: ModelConfig, dtype: torch.dtype, arena: StateArena) -> None:
        self.config = config
        self.dtype = dtype
        names = _NAMES[config.family]
        shape = (config.vocab_size, config.hidden_size)
        with Checkpoint(model_dir, arena.ssm.device) as checkpoint:
            embedding = checkpoint.take(f"{names.embedding}.weight", shape)
            self.embedding = None if config.tie_word_embeddings else embedding.to(dtype)
            self.layers = self._load_layers(checkpoint, names, arena)
            self.final_norm = self._norm(checkpoint, f"{names.final_norm}.weight")
            self.lm_head = ops.pack_linear(self._load_head(checkpoint, embedding, shape).to(dtype))
            self.weights_digest = checkpoint.finish()
        self._decode = self._decode_stack()
        self.fingerprint = model_fingerprint(
            config.architecture(),
            self.weights_digest,
            str(dtype).removeprefix("torch."),
            ops.numerics(dtype, arena.ssm.device),
        )

    def _load_layers(self, checkpoint: Checkpoint, names: _Names, arena: StateArena) -> list[_Layer]:
        config, layers = self.config, []
        mamba_index = attention_index = 0
        for i, (mixer_kind, ff_kind) in enumerate(zip(config.mixers, config.feed_forwards, strict=True)):
            prefix = f"{names.layer}.{i}"
            norm = self._norm(checkpoint, f"{prefix}.{names.norm}.weight")
            mixer: MambaMixer | AttentionMixer
            if mixer_kind == "mamba":
                states = arena.ssm[:, mamba_index], arena.conv[:, mamba_index]
                mixer = MambaMixer(config, checkpoint, f"{prefix}.{names.mamba}", self.dtype, norm, *states)
                mamba_index += 1
            else:
                k_cache, v_cache = arena.kv[attention_index]
                mixer = AttentionMixer(
                    config, checkpoint, f"{prefix}.self_attn", self.dtype, norm, k_cache, v_cache
                )
                attention_index += 1
            feed_forward = None
            if ff_kind != "none":
                norm = self._norm(checkpoint, f"{prefix}.pre_ff_layernorm.weight")
                load = load_mlp if ff_kind == "mlp" else load_mixture
                feed_forward = load(config, checkpoint, f"{prefix}.feed_forward", self.dtype, norm)
            layers.append(_Layer(mixer, feed_forward))
        return layers

    def _norm(self, checkpoint: Checkpoint, name: str) -> ops.PreNorm:
        weight = checkpoint.take(name, (self.config.hidden_size,)).float()
        return ops.pre_norm(weight, self.config.norm_eps)

    def _load_head(
        self, checkpoint: Checkpoint, embedding: torch.Tensor, shape: tuple[int, int]
    ) -> torch.Tensor:
        if not self.config.tie_word_embeddings:
            return checkpoint.take("lm_head.weight", shape)
        if "lm_head.weight" in checkpoint and not torch.equal(
            checkpoint.take("lm_head.weight", shape), embedding
        ):
            raise ModelError(
                f"{checkpoint.model_dir}: lm_head.weight differs from the embedding although config.json ties them; "
                "set tie_word_embeddings to false or remove the tensor"
            )
        return embedding

    @property
    def most_captured(self) -> int:
        """The most sequences of a decode pass that a CUDA graph can hold: one that never waits for the device."""
        mixtures = (part for part in (x.feed_forward for x in self.layers) if isinstance(part, ops.DeviceMixture))
        return min((part.most_captured for part in mixtures), default=sys.maxsize)

    def _decode_stack(self) -> ops.DecodeStack | None:
        """On a CUDA device, what runs the decode passes of a few sequences; None where attention or experts stand
        between the mixers."""
        parts = [layer.mixer.part for layer in self.layers if isinstance(layer.mixer, MambaMixer)]
        mixers = [part for part in parts if isinstance(part, ops.DeviceMixer)]
        if len(mixers) != len(self.layers) or any(layer.feed_forward for layer in self.layers):
            return None
        assert isinstance(self.lm_head, ops.DeviceLinear)
        return ops.DecodeStack(mixers, self.final_norm, self.lm_head)

    @property
    def most_decoded(self) -> int:
        """The most sequences that `decode` takes."""
        return 0 if self._decode is None else self._decode.most_rows

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(t,) -> (t, h) float32; a tied embedding is read from the packed head, so that there is one copy."""
        rows = self.lm_head.rows(token_ids) if self.embedding is None else self.embedding[token_ids]
        return rows.float()

    @torch.inference_mode()
    def decode(self, batch: Batch) -> torch.Tensor:
        """Like `forward`, for a power of two of sequences, most_decoded at most, of one token each, all of whose logits
        are wanted."""
        assert self._decode is not None
        return self._decode(self._embed(batch.tokens), cast(Any, batch.ragged))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Run the packed batch; states, KV and snapshots are written where the batch says."""
        residual = ops.residual(self._embed(batch.tokens), batch.present)
        for layer in self.layers:
            layer.mixer(residual, batch)
            if layer.feed_forward is not None:
                layer.feed_forward(residual)
        normed = residual.rows(batch.logits_rows).normed(self.final_norm, self.dtype)
        return ops.linear(normed, self.lm_head, out_dtype=torch.float32)  # (r, h) -> (r, v)
