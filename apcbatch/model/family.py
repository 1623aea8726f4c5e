"""What a family of models is: how its config.json reads, how it names its tensors, what its layers are made of.

Must not know: torch, any one family. Each module of `families/` has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from apcbatch.model.blocks import FeedForwardKind, MixerKind
from apcbatch.model.hf_config import ConfigReader, ModelConfig


@dataclass(frozen=True)
class Family:
    """model_type, architecture: what config.json calls it. read(reader, family): the description of a model, from its
    config.json and the family's own name.

    embedding, layers, final_norm, head: tensor names, without `.weight`. norm, feed_forward_norm: their names in a
    layer. mixers, feed_forwards: for each kind that ModelConfig names, its name in a layer and what it is; a layer
    without a feed-forward part has the kind `none`. former_names: tensors that some checkpoints have under another name
    than this, and this. rank: where it stands in lists; equal ones go by name.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigReader, str], ModelConfig]
    embedding: str
    layers: str
    norm: str
    final_norm: str
    mixers: Mapping[str, tuple[str, MixerKind]]
    feed_forwards: Mapping[str, tuple[str, FeedForwardKind]] = field(default_factory=dict)
    feed_forward_norm: str = ""
    head: str = "lm_head"
    former_names: Mapping[str, str] = field(default_factory=dict)
    rank: int = 100
