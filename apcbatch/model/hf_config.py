"""The architecture of a checkpoint, read from its Hugging Face config.json.

Must not know: weights, requests. One dataclass covers the three families; what a family lacks is 0, None or empty.
Invariant: every size is an integer within its bounds, so that sums and products of them are harmless; whether the
weights have these sizes is for who loads them to see.
"""

from __future__ import annotations

import json
import math
import reprlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from apcbatch.errors import ModelError
from apcbatch.regular_files import read_regular_file

Mixer = Literal["mamba", "attention"]
FeedForward = Literal["none", "mlp", "moe"]
MixerNorm = Literal["none", "weightless", "weighted"]

FAMILIES = {
    "MambaForCausalLM": "mamba",
    "FalconMambaForCausalLM": "falcon_mamba",
    "JambaForCausalLM": "jamba",
}
LARGEST_SIZE = (1 << 31) - 1
MOST_LAYERS = 1 << 14
MOST_JSON_BYTES = 16 << 20


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of one architecture, under the field's names.

    mixers, feed_forwards: one entry a layer. mixer_norm: the RMS norms that FalconMamba (weightless) and Jamba
    (weighted) put on dt, B and C. context_length: None where the architecture has no limit of its own.
    """

    family: str
    vocab_size: int
    hidden_size: int
    mixers: tuple[Mixer, ...]
    feed_forwards: tuple[FeedForward, ...]
    d_inner: int
    d_state: int
    d_conv: int
    dt_rank: int
    conv_bias: bool
    proj_bias: bool
    norm_eps: float
    mixer_norm: MixerNorm
    mixer_norm_eps: float
    tie_word_embeddings: bool
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    context_length: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_mamba_layers(self) -> int:
        """Layers with a recurrent state."""
        return self.mixers.count("mamba")

    @property
    def num_attention_layers(self) -> int:
        """Layers with a KV cache."""
        return self.mixers.count("attention")

    def architecture(self) -> dict[str, Any]:
        """Everything that decides what the weights compute, as plain values (a part of the fingerprint)."""
        fields = asdict(self)
        del fields["eos_token_ids"], fields["context_length"]
        return fields


class _Reader:
    """config.json with errors that name the key, the value and the file."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def wrong(self, key: str, value: Any, expected: str) -> ModelError:
        """The error of a value, which is shown in short however long it is."""
        return ModelError(f"{self.path}: {key} is {reprlib.repr(value)}; expected {expected}")

    def integer(self, key: str, default: int, minimum: int = 1, maximum: int = LARGEST_SIZE) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.wrong(key, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, value, "a number")
        if not abs(value) <= sys.float_info.max:  # NaN, infinity, or an integer that no float holds
            raise self.wrong(key, value, "a finite number")
        return float(value)

    def expanded(self, key: str, hidden_size: int) -> int:
        """The hidden size times a factor, as an integer."""
        factor = self.number(key, 2)
        if not 1 <= factor * hidden_size <= LARGEST_SIZE:
            raise self.wrong(
                key, factor, f"a factor that takes hidden_size {hidden_size} to 1 .. {LARGEST_SIZE}"
            )
        return int(factor * hidden_size)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def dt_rank(self, key: str, hidden_size: int) -> int:
        if self.values.get(key, "auto") == "auto":
            return math.ceil(hidden_size / 16)
        return self.integer(key, 0)

    def activation(self) -> None:
        value = self.values.get("hidden_act", "silu")
        if value not in ("silu", "swish"):
            raise self.wrong("hidden_act", value, "'silu', the only one supported")

    def eos_token_ids(self) -> tuple[int, ...]:
        value = self.values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.wrong("eos_token_id", value, "an integer or a list of integers")
        return tuple(ids)


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; ModelError where it is missing, damaged or something else."""
    try:
        values = json.loads(read_regular_file(path, MOST_JSON_BYTES))
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); expected a Hugging Face model folder"
        ) from None
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ModelError(f"{path} is not valid JSON ({what}); copy the checkpoint again") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}; expected a JSON object")
    return values


def load_model_config(model_dir: Path) -> ModelConfig:
    """The ModelConfig of a checkpoint folder (config.json, and generation_config.json for the stop tokens)."""
    path = model_dir / "config.json"
    reader = _Reader(path, load_json(path))
    architectures = reader.values.get("architectures") or []
    name = (
        architectures[0]
        if isinstance(architectures, list) and architectures
        else reader.values.get("model_type")
    )
    family = FAMILIES.get(str(name)) or (name if name in FAMILIES.values() else None)
    if family is None:
        raise ModelError(
            f"{path}: architecture {reprlib.repr(name)} is not supported; expected one of {', '.join(FAMILIES)}"
        )
    reader.activation()
    config = _jamba(reader) if family == "jamba" else _mamba(reader, str(family))
    generation = model_dir / "generation_config.json"
    if generation.exists():
        eos = _Reader(generation, load_json(generation)).eos_token_ids()
        if eos:
            return ModelConfig(**{**config.__dict__, "eos_token_ids": eos})
    return config


def _mamba(reader: _Reader, family: str) -> ModelConfig:
    hidden_size = reader.integer("hidden_size", 768)
    layers = reader.integer("num_hidden_layers", 32, maximum=MOST_LAYERS)
    falcon = family == "falcon_mamba"
    mixer: Mixer = "mamba"
    feed_forward: FeedForward = "none"
    return ModelConfig(
        family=family,
        vocab_size=reader.integer("vocab_size", 50280),
        hidden_size=hidden_size,
        mixers=(mixer,) * layers,
        feed_forwards=(feed_forward,) * layers,
        d_inner=reader.integer("intermediate_size", reader.expanded("expand", hidden_size)),
        d_state=reader.integer("state_size", 16),
        d_conv=reader.integer("conv_kernel", 4, minimum=2),
        dt_rank=reader.dt_rank("time_step_rank", hidden_size),
        conv_bias=reader.flag("use_conv_bias", True),
        proj_bias=reader.flag("use_bias", False),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        mixer_norm="weightless" if falcon else "none",
        mixer_norm_eps=reader.number("mixer_rms_eps", 1e-6),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        eos_token_ids=reader.eos_token_ids(),
    )


def _jamba(reader: _Reader) -> ModelConfig:
    hidden_size = reader.integer("hidden_size", 4096)
    layers = range(reader.integer("num_hidden_layers", 32, maximum=MOST_LAYERS))
    heads = reader.integer("num_attention_heads", 32)
    kv_heads = reader.integer("num_key_value_heads", heads)
    if hidden_size % heads or heads % kv_heads:
        raise ModelError(
            f"{reader.path}: hidden_size {hidden_size}, num_attention_heads {heads}, num_key_value_heads {kv_heads}; "
            "expected each to be a multiple of the next"
        )
    attention_period, attention_offset = _period(reader, "attn", 8, 4)
    expert_period, expert_offset = _period(reader, "expert", 2, 1)
    experts = reader.integer("num_experts", 16)
    experts_per_tok = reader.integer("num_experts_per_tok", 2)
    if experts > 1 and experts_per_tok > experts:
        raise ModelError(
            f"{reader.path}: num_experts_per_tok is {experts_per_tok}; expected at most {experts} experts"
        )
    mixers: list[Mixer] = [
        "attention" if i % attention_period == attention_offset else "mamba" for i in layers
    ]
    if "mamba" not in mixers:
        raise ModelError(
            f"{reader.path}: attn_layer_period {attention_period} and attn_layer_offset {attention_offset} make all of "
            f"{len(mixers)} layers attention; expected a Mamba layer, whose state can be kept"
        )
    feed_forwards: list[FeedForward] = [
        "moe" if experts > 1 and i % expert_period == expert_offset else "mlp" for i in layers
    ]
    return ModelConfig(
        family="jamba",
        vocab_size=reader.integer("vocab_size", 65536),
        hidden_size=hidden_size,
        mixers=tuple(mixers),
        feed_forwards=tuple(feed_forwards),
        d_inner=reader.expanded("mamba_expand", hidden_size),
        d_state=reader.integer("mamba_d_state", 16),
        d_conv=reader.integer("mamba_d_conv", 4, minimum=2),
        dt_rank=reader.dt_rank("mamba_dt_rank", hidden_size),
        conv_bias=reader.flag("mamba_conv_bias", True),
        proj_bias=reader.flag("mamba_proj_bias", False),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        mixer_norm="weighted",
        mixer_norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        intermediate_size=reader.integer("intermediate_size", 14336),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden_size // heads,
        num_experts=experts,
        num_experts_per_tok=experts_per_tok,
        context_length=reader.integer("max_position_embeddings", 262144),
        eos_token_ids=reader.eos_token_ids(),
    )


def _period(reader: _Reader, kind: str, period_default: int, offset_default: int) -> tuple[int, int]:
    period = reader.integer(f"{kind}_layer_period", period_default)
    offset = reader.integer(f"{kind}_layer_offset", offset_default, minimum=0)
    if offset >= period:
        raise ModelError(
            f"{reader.path}: {kind}_layer_offset is {offset}; expected less than the period, {period}"
        )
    return period, offset
