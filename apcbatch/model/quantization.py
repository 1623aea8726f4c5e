"""Detect quantised checkpoints by config.json and by tensor dtypes, and refuse them with an error that names the method
or the dtype.

Invariant: quantised weights are never loaded silently. Their scales and packing differ from method to method, so none
is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apcbatch.errors import ModelError
from apcbatch.option_values import brief

# The dtypes that weights may have: safetensors' name -> bytes of an element.
FLOATING: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_KEYS = ("quantization_config", "compression_config")  # the second is an older name of compressed-tensors
_METHODS: Mapping[str, str] = {
    "fp8": "8-bit floating point with a scale for each block or channel",
    "fbgemm_fp8": "8-bit floating point with a scale for each channel",
    "gptq": "packed integers of GPTQ",
    "awq": "packed integers of AWQ",
    "bitsandbytes": "8-bit or 4-bit numbers of bitsandbytes",
    "compressed-tensors": "weights of llm-compressor",
    "modelopt": "weights of NVIDIA's Model Optimizer",
    "mxfp4": "4-bit floating point in blocks",
    "hqq": "packed integers of HQQ",
    "quanto": "weights of optimum-quanto",
    "torchao": "weights of torchao",
    "aqlm": "codebooks of AQLM",
    "eetq": "8-bit integers of EETQ",
}
_WAY = "quantised weights are not supported: give the unquantised checkpoint"
# Other dtypes -> what they usually hold.
_MEANT: Mapping[str, str] = {"I8": "int8", "U8": "int8, or packed 4-bit", "I32": "packed integer"}


def check_not_quantised(path: Path, values: Mapping[str, Any]) -> None:
    """Raise ModelError, with the method, if config.json (`values`, read from `path`) declares quantised weights."""
    text_model = values.get("text_config")
    for part, prefix in ((values, ""), (text_model if isinstance(text_model, dict) else {}, "text_config.")):
        for key in _KEYS:
            if part.get(key):
                raise ModelError(f"{path}: {prefix}{key} says that the weights are {_named(part[key])}; {_WAY}")


def check_floating(path: Path, name: str, dtype: str) -> None:
    """Raise ModelError unless the dtype (safetensors' name) of a tensor is in FLOATING. path: the tensor's file."""
    if dtype in FLOATING:
        return
    meant = "8-bit floating point" if dtype.startswith("F8_") else _MEANT.get(dtype)
    if meant is None:
        meant = "packed floating point" if dtype.startswith(("F4", "F6")) else None
    what = f", as {meant} weights have it: {_WAY}" if meant else ""
    raise ModelError(f"{path}: tensor {name:.120} has dtype {dtype}; expected one of {', '.join(FLOATING)}{what}")


def _named(config: object) -> str:
    """Return words for the method of a quantisation config, to follow "the weights are" in a message."""
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method is None and isinstance(config, dict) and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # its older files name no method
    if not isinstance(method, str):
        return "quantised by a method that it does not name"
    described = _METHODS.get(method.lower())
    return f"quantised with {brief(method)}" + (f" ({described})" if described else "")
