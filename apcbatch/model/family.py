"""A family of models: how to read its config.json, with the sub-blocks of its layers, and its tensor names.

Each module of `families/` defines one. Importing these modules does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from apcbatch.model.encoded import Keeping
from apcbatch.model.hf_config import ConfigReader, ModelConfig
from apcbatch.model.sub_blocks import SubBlockKind

if TYPE_CHECKING:
    import torch

    from apcbatch.model.adapter import Adapter
    from apcbatch.model.weight_files import WeightFiles
    from apcbatch.model.weights import Checkpoint


@dataclass(frozen=True)
class Family:
    """Family of models. model_type: its name. architectures, model_types: its names in config.json, besides model_type.
    read: returns the ModelConfig of a config.json, without its family.

    embedding, layers, final_norm, head: tensor names, without `.weight`. former_names, prefixes, ignored: see
    Checkpoint. norm_offset: number added to the weights of the layers' norms and of the final norm: 1 for a family
    whose norms multiply by 1 + w. rank: position in lists of families; ties are sorted by name.
    """

    model_type: str
    architectures: tuple[str, ...]
    read: Callable[[ConfigReader], ModelConfig]
    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    model_types: tuple[str, ...] = ()
    former_names: Mapping[str, str] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    norm_offset: float = 0.0
    rank: int = 100

    def kinds(self, config: ModelConfig) -> dict[SubBlockKind, str]:
        """Return the kinds of sub-blocks of a model, in the order of their first use, each with the tensor-name prefix
        of its first sub-block."""
        found: dict[SubBlockKind, str] = {}
        for i in range(config.num_layers):
            for block in config.layer(i):
                found.setdefault(block.kind, f"{self.layers}.{i}.{block.name}")
        return found

    def keeping(self, config: ModelConfig, mode: str, device: str, dtype: str) -> Keeping:
        """Return which weights stay encoded in memory. mode, device, dtype: see Keeping."""
        names = [self.embedding, *([self.head] if config.tie_word_embeddings else [])]
        return Keeping(mode, device, dtype, tuple(f"{name.rpartition('.')[2]}.weight" for name in names))

    def checkpoint(
        self, folder: Path, device: torch.device, adapter: Adapter | None = None, files: WeightFiles | None = None
    ) -> Checkpoint:
        """Open a checkpoint of the family. device, adapter, files: see Checkpoint."""
        from apcbatch.model.weights import Checkpoint

        names = self.former_names, self.prefixes, self.ignored
        return Checkpoint(folder, device, *names, None, adapter, files)
