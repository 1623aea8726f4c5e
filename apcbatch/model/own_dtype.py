"""Resolve --dtype auto to the checkpoint's own dtype: what config.json declares, else what most of the weights are.

Reads config.json and the headers of the weights, which need not be there. Importing this module does not load torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from apcbatch.config import Config
from apcbatch.data.model_files import read_model_json
from apcbatch.model.encoded import quantization_of
from apcbatch.model.hf_config import ConfigReader
from apcbatch.model.locate import locate_model
from apcbatch.model.weight_files import WeightFiles, weights_if_there
from apcbatch.option_values import AUTO
from apcbatch.resolution import DEFAULT

OWN = "auto: the checkpoint's own"  # origin of --dtype
# Dtype of a checkpoint -> the one it is computed in.
_COMPUTED = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16", "float64": "float32"}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def with_own_dtype(
    config: Config, warn: Callable[[str], None] = lambda sentence: None, files: WeightFiles | None = None
) -> Config:
    """Replace --dtype auto by the dtype of the model's checkpoint. warn, files: see own_dtype. Raises ModelError."""
    if config.dtype != AUTO:
        return config
    given = config.origins.get("dtype", DEFAULT)
    origin = OWN if given == DEFAULT else f"{given} {OWN}"
    dtype = own_dtype(locate_model(config.model), warn, files)
    return replace(config, dtype=dtype, origins={**config.origins, "dtype": origin})


def own_dtype(folder: Path, warn: Callable[[str], None], files: WeightFiles | None = None) -> str:
    """Return the dtype that a checkpoint is computed in, `float32` or `bfloat16`: bfloat16 for float16 and for
    quantised weights, float32 for float64 and where neither config.json nor any weights tell. warn: called with a
    sentence if float16 weights are rounded, or if config.json declares another dtype than most of the weights' bytes
    have. files: those of the folder, if they are open. Raises ModelError."""
    if quantization_of(folder, files) is not None:
        return "bfloat16"
    declared, stored = _declared(folder), _stored(folder, files)
    own = declared or stored or "float32"
    computed, other = _COMPUTED[own], _COMPUTED[stored or own]
    if other != computed:
        warn(
            f"config.json of the model declares {own}, and most of its weights are {stored}: they are computed in "
            f"{computed}; --dtype {other} computes them in {other}"
        )
    elif (stored or own) == "float16":
        warn(
            "the weights of the model are float16 and are rounded to bfloat16; --dtype float32 keeps all of their bits"
        )
    return computed


def _declared(folder: Path) -> str | None:
    """Return the dtype that config.json declares for the text model; None if it names none, or another kind."""
    path = folder / "config.json"
    whole = ConfigReader(path, read_model_json(path))
    for values in (whole.text_model().values, whole.values):
        for key in ("dtype", "torch_dtype"):
            name = values.get(key)
            if isinstance(name, str) and (name := name.removeprefix("torch.")) in _COMPUTED:
                return name
    return None


def _stored(folder: Path, files: WeightFiles | None) -> str | None:
    """Return the dtype of most bytes of the weights; None if there are none, or a file of them cannot be read."""
    sizes: Counter[str] = Counter()
    with nullcontext(files) if files is not None else weights_if_there(folder) as opened:
        for tensor in opened.tensors.values() if opened is not None else ():
            sizes[tensor.dtype] += tensor.num_bytes
    return next((_STORED[dtype] for dtype, _ in sizes.most_common() if dtype in _STORED), None)
