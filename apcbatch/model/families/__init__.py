"""The families of models: each module of this folder defines one, as a `Family` named FAMILY.

The modules are discovered: no list names them. Importing one does not load torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from functools import cache
from pathlib import Path

from apcbatch.data.model_files import read_model_json
from apcbatch.errors import ModelError
from apcbatch.layout import StateLayout
from apcbatch.model.encoded import Encoded, quantization_of, weights_of
from apcbatch.model.family import Family
from apcbatch.model.hf_config import ConfigReader, ModelConfig
from apcbatch.model.quantization import read_quantization
from apcbatch.model.weight_files import WeightFiles
from apcbatch.option_values import AUTO, brief


@cache
def families() -> tuple[Family, ...]:
    """Return all families, in the order in which they are listed to users."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    found: list[Family] = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in names]
    return tuple(sorted(found, key=lambda family: (family.rank, family.model_type)))


def family_of(config: ModelConfig) -> Family:
    """Return the family of a ModelConfig."""
    return next(family for family in families() if family.model_type == config.family)


def load_model_config(model_dir: Path) -> ModelConfig:
    """Return the ModelConfig of the config.json in a checkpoint folder."""
    path = model_dir / "config.json"
    reader = ConfigReader(path, read_model_json(path))
    architectures = reader.values.get("architectures") or []
    name = architectures[0] if isinstance(architectures, list) and architectures else reader.values.get("model_type")
    family = next((one for one in families() if name in (*one.architectures, one.model_type, *one.model_types)), None)
    if family is None:
        expected = f"one of {', '.join(name for one in families() for name in one.architectures)}"
        raise ModelError(f"{path} {_why_not(name, reader)}; expected {expected} (docs/models.md)")
    read_quantization(path, reader.values)  # refuses what is not read
    reader.activation()
    return replace(family.read(reader), family=family.model_type)


def quantised_weights(folder: Path, mode: str, device: str, dtype: str) -> str | None:
    """Return a sentence about the format of a folder's quantised weights and their size in memory, if they are here;
    None if the weights are not quantised. mode, device, dtype: see Keeping. Raises ModelError."""
    declared = quantization_of(folder)
    if declared is None:
        return None
    config = load_model_config(folder)
    family = family_of(config)
    keeping = family.keeping(config, mode, device, "bfloat16" if dtype == AUTO else dtype)
    found = f"the weights are {declared.described}"
    try:
        with WeightFiles(folder) as files:
            weights = weights_of(files, family.ignored)
    except ModelError:  # the weights are not here, or `run` says what is wrong with them
        return found
    size = encoded = kept = 0
    for name, weight in weights.items():
        if isinstance(weight, Encoded) and keeping.keeps(name, weight):
            size, encoded, kept = size + weight.kept_bytes, encoded + 1, kept + 1
        else:
            size, encoded = size + weight.num_bytes, encoded + isinstance(weight, Encoded)
    if not encoded:
        return f"{found}, and none of them is encoded: {size / 2**30:.2f} GiB"
    if kept == encoded:
        how = "encoded in memory too"
    else:
        how = "decoded to bfloat16 when they are loaded" + f", but for {kept} of {encoded} tensors" * bool(kept)
    return f"{found}, {how}: {size / 2**30:.2f} GiB"


def _why_not(name: object, reader: ConfigReader) -> str:
    """Return why no family matches a config.json, as the middle of a sentence."""
    if name is not None:
        return f"names the architecture {brief(name)}, which is not supported"
    if "ssm_cfg" not in reader.values:
        return "names no architecture"
    return "is of the mamba_ssm package and names no architecture: give the checkpoint converted for transformers (-hf)"


def state_layout(config: ModelConfig, dtype: str) -> StateLayout:
    """Return the layout of a model's state. dtype: of weights and activations, by torch's name."""
    blocks = ((i, block) for i in range(config.num_layers) for block in config.layer(i))
    return StateLayout.of(part for i, block in blocks for part in block.kind.state(i, dtype))
