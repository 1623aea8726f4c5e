"""The description of a model, and a reader of the Hugging Face config.json that it comes from.

Invariant: every size is an integer within its bounds, and every other number but an open end of an interval is at most
LARGEST_NUMBER, so that sums and products cannot overflow. Loading the weights checks that the tensors have these sizes.
Each list is read in linear time.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apcbatch.errors import ModelError
from apcbatch.model.sub_blocks import SubBlock

LARGEST_SIZE = (1 << 31) - 1
LARGEST_NUMBER = 1e18  # so that a product of two numbers is a float32
MOST_LAYERS = 1 << 14


@dataclass(frozen=True)
class Multipliers:
    """Factors in a model's forward pass. embedding: of the embeddings. residual: of the output of each sub-block.
    attention: of the scores q k^T; None for head_dim^-0.5. logits: of the logits."""

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None
    logits: float = 1.0

    @property
    def parts(self) -> Mapping[str, float]:
        """Factor of the results of each part of a layer's products, by the part's name: z, x, B, C, dt of a Mamba-2
        mixer, q, k, v of attention, gate, up of an MLP, and the last projections out_proj, o_proj, down_proj. A part
        that is not listed has the factor 1."""
        return {}


# Sizes and switches that every fingerprint contains, with their values in a model that lacks them.
_ABSENT = {
    **dict.fromkeys(("d_inner", "d_state", "d_conv", "dt_rank", "intermediate_size"), 0),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok"), 0
    ),
    **dict.fromkeys(("conv_bias", "proj_bias"), False),
    "mixer_norm": "none",
    "mixer_norm_eps": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Description of one model.

    family: the model_type of its family, once that is known. mixers, feed_forwards: kind of each layer's mixer, and of
    its feed-forward block, or "none". blocks: the sub-blocks of each of these kinds, in order. norm_eps: of all RMS
    norms but those of Mamba-1's dt, B and C. context_length: None if the architecture has no limit. fields: further
    sizes and switches of the fingerprint, by their names in it; those of the sub-blocks are in SubBlockKind.fields.
    """

    family: str = ""
    vocab_size: int
    hidden_size: int
    mixers: tuple[str, ...]
    feed_forwards: tuple[str, ...]
    blocks: Mapping[str, tuple[SubBlock, ...]]
    norm_eps: float
    tie_word_embeddings: bool
    context_length: int | None = None
    multipliers: Multipliers = Multipliers()
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    def layer(self, i: int) -> tuple[SubBlock, ...]:
        """Return the sub-blocks of a layer, in order: its mixer's, then those of its feed-forward block."""
        kinds = (self.mixers[i], self.feed_forwards[i])
        return tuple(block for kind in kinds if kind != "none" for block in self.blocks[kind])

    def architecture(self) -> dict[str, Any]:
        """Return all sizes and switches that determine the computation, as plain values. They are part of the
        fingerprint, beside the weights."""
        own = ("family", "vocab_size", "hidden_size", "mixers", "feed_forwards", "norm_eps", "tie_word_embeddings")
        found = {**_ABSENT, **{name: getattr(self, name) for name in own}}
        for blocks in self.blocks.values():
            for block in blocks:
                found |= block.kind.fields
        return {**found, **self.fields}


class ConfigReader:
    """config.json, or an object inside it, with errors that name the key, the value and the file.

    prefix: path of the object in the file, such as `text_config.`; empty for the file itself.
    """

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def wrong(self, key: str, value: Any, expected: str) -> ModelError:
        """Return the error for a bad value; its message abbreviates the value."""
        return ModelError(f"{self.path}: {self.prefix}{key} is {reprlib.repr(value)}; expected {expected}")

    def below(self, key: str) -> ConfigReader:
        """Return a reader of the object under a key, or of an empty object if the key is missing or null. Raises
        ModelError."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return ConfigReader(self.path, value or {}, f"{self.prefix}{key}.")

    def text_model(self) -> ConfigReader:
        """Return a reader of the text model's config: `text_config` in a multimodal checkpoint, otherwise this
        object."""
        return self if self.values.get("text_config") is None else self.below("text_config")

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """Return a reader in which `defaults` are the values of missing keys."""
        return ConfigReader(self.path, {**defaults, **self.values}, self.prefix)

    def require(self, key: str, default: object, *allowed: object) -> None:
        """Raise ModelError unless a value is in `allowed`; the message names the first allowed value. default: value of
        a missing key."""
        value = self.values.get(key, default)
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self.wrong(key, value, f"{json.dumps(allowed[0])}, the only one supported")

    def integer(self, key: str, default: int, minimum: int = 1, maximum: int = LARGEST_SIZE) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.wrong(key, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float, minimum: float = -LARGEST_NUMBER) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= LARGEST_NUMBER:
            raise self.wrong(key, value, f"a number from {minimum:g} to {LARGEST_NUMBER:g}")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` finite numbers; ones if the key is missing or null. Raises ModelError."""
        values = self.values.get(key)
        if values is None:
            return (1.0,) * count
        if not isinstance(values, list) or len(values) != count:
            raise self.wrong(key, values, f"{count} numbers")
        items = ConfigReader(self.path, {f"{key}[{i}]": value for i, value in enumerate(values)}, self.prefix)
        return tuple(items.number(name, 1.0) for name in items.values)

    def interval(self, key: str, default: tuple[float, float]) -> tuple[float, float]:
        """Return the least and the largest value of an interval of numbers from 0 on; the largest may be infinite.
        Raises ModelError."""
        value = self.values.get(key)
        if value is None:
            return default
        ends: list[Any] = value if isinstance(value, list) else []
        if len(ends) != 2 or not all(type(end) in (int, float) for end in ends):
            raise self.wrong(key, value, "two numbers")
        least, largest = ends
        if not 0 <= least <= largest or not least <= LARGEST_NUMBER:
            raise self.wrong(key, value, "two ascending numbers from 0 on, of which only the second may be infinite")
        return float(least), float(largest) if largest <= LARGEST_NUMBER else float("inf")

    def layer_types(self, layers: int, kinds: Mapping[str, str], *keys: str) -> tuple[str, ...] | None:
        """Return the kind of each layer's mixer, from the list under the first of the keys that is there; None if none
        is. kinds: name in the list -> kind; errors name the first two. Raises ModelError."""
        key = next((key for key in keys if self.values.get(key) is not None), None)
        if key is None:
            return None
        types = self.values[key]
        if not isinstance(types, list) or len(types) != layers:
            raise self.wrong(key, types, f"a list with the type of each of the {layers} layers")
        for number, name in enumerate(types):
            if not isinstance(name, str) or name not in kinds:
                raise self.wrong(f"{key}[{number}]", name, " or ".join(list(kinds)[:2]))
        return tuple(kinds[name] for name in types)

    def experts_per_token(self, experts: int, default: int) -> int:
        """Return num_experts_per_tok, at most `experts`. Raises ModelError."""
        count = self.integer("num_experts_per_tok", default)
        if count > experts:
            raise self.wrong("num_experts_per_tok", count, f"at most {experts} experts")
        return count

    def places(self, key: str, layers: int) -> frozenset[int]:
        """Return the layer numbers listed under a key, counted from 0. Raises ModelError."""
        listed: Any = self.values.get(key)
        is_short = isinstance(listed, list) and len(listed) <= layers
        if not is_short or not all(type(i) is int and 0 <= i < layers for i in listed):
            raise self.wrong(key, listed, f"a list of numbers of the {layers} layers, from 0")
        return frozenset(listed)

    def require_state(self, mixers: Collection[str], expected: str = "linear_attention") -> None:
        """Raise ModelError if all mixers are attention. expected: a layer type with a recurrent state."""
        if set(mixers) == {"attention"}:
            raise ModelError(
                f"{self.path}: all of {len(mixers)} layers are attention, so that the model has no recurrent state to "
                f"cache; expected a {expected} layer (docs/models.md)"
            )

    def require_multiple(self, key: str, value: int, divisor_key: str, divisor: int) -> None:
        """Raise ModelError unless a value is a multiple of another one."""
        if value % divisor:
            raise self.wrong(key, value, f"a multiple of {divisor_key}, {divisor}")

    def kv_heads(self, heads: int, default: int) -> int:
        """Return the number of key and value heads, a divisor of that of query heads, `heads`; null stands for it.
        default: for a missing key. Raises ModelError."""
        key = "num_key_value_heads"
        kv_heads = heads if self.values.get(key, default) is None else self.integer(key, default)
        self.require_multiple("num_attention_heads", heads, key, kv_heads)
        return kv_heads

    def head_dim(self, hidden_size: int, heads: int) -> int:
        """Return the columns of an attention head; by default they divide hidden_size. Raises ModelError."""
        if self.values.get("head_dim") is not None:
            return self.integer("head_dim", 64)
        self.require_multiple("hidden_size", hidden_size, "num_attention_heads", heads)
        return hidden_size // heads

    def expanded(self, key: str, hidden_size: int) -> int:
        """Return hidden_size times the factor under the key (2 if it is missing), rounded down. Raises ModelError."""
        factor = self.number(key, 2)
        if not 1 <= factor * hidden_size <= LARGEST_SIZE:
            raise self.wrong(key, factor, f"a factor that takes hidden_size {hidden_size} to 1 .. {LARGEST_SIZE}")
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
