"""What a folder declares about quantised weights, and the codecs of the formats that are read.

Invariant: a method, a format or a choice that is not in these tables is refused by its name. Importing this module does
not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from apcbatch.data.model_files import read_model_json
from apcbatch.errors import ModelError
from apcbatch.model.hf_config import ConfigReader
from apcbatch.model.name_patterns import Patterns
from apcbatch.option_values import brief

CODEC_VERSION = 1  # of what the codecs compute; part of the weights' digest
_FLOATS = ("F32", "BF16", "F16")
_EXPONENTS = ("U8", "F8_E8M0")  # 2^(byte - 127)


@dataclass(frozen=True)
class Codec:
    """How weights (.., out, in) are written.

    name: of the format. codes: end of the name of the tensor that has the codes. dtype: its dtype. bits: of a code.
    layout: `whole` (.., out, in), a code in each item; `rows` (.., out, items), several codes in an item, lowest bits
    first; `gptq` (items, out), the same along the other axis; `awq` (in, items), in AWQ's order. A code is an integer,
    or for F8_E4M3 and U8 a float (e4m3, e2m1). scales: end of the name of the tensor of scales, or several of which one
    is there. block: (rows, columns) that share a scale, 0 for all of them; None: all, or a row, by the scales' shape.
    zero: end of the name of the tensor of zeros; zero_offset is added to them. overall: end of the name of a second
    scale: scales are divided by it, or multiplied with it if `multiplies`. order: end of the name of the tensor (in,)
    that has each column's group; it must be there if the folder says that columns are ordered (is_ordered). shape: end
    of the name of the tensor that has the weight's shape.
    """

    name: str
    codes: str
    dtype: str
    bits: int
    layout: str
    scales: tuple[str, ...]
    scale_dtypes: tuple[str, ...] = _FLOATS
    block: tuple[int, int] | None = None
    zero: str = ""
    zero_offset: int = 0
    overall: str = ""
    multiplies: bool = False
    order: str = ""
    is_ordered: bool = False
    shape: str = ""

    @property
    def described(self) -> str:
        """The format in words."""
        rows, columns = self.block or (1, 0)
        shared = "" if not columns else f", groups of {columns}" if rows == 1 else f", blocks of {rows} x {columns}"
        return f"{self.name}{shared}{', with zeros' * bool(self.zero)}"

    @property
    def is_transposed(self) -> bool:
        """Whether codes, scales and zeros are stored with the inputs first."""
        return self.layout in ("gptq", "awq")


_FP8 = Codec("FP8", "", "F8_E4M3", 8, "whole", ("_scale_inv", "_scale"), (*_FLOATS, *_EXPONENTS))
_CHANNEL_FP8 = replace(_FP8, scales=("_scale",), scale_dtypes=_FLOATS)
_INT8 = replace(_CHANNEL_FP8, name="int8", dtype="I8")
PACKED = Codec("int4", "_packed", "I32", 4, "rows", ("_scale",), shape="_shape", order="_g_idx")
_NVFP4 = Codec("NVFP4", "_packed", "U8", 4, "rows", ("_scale",), ("F8_E4M3",), (1, 16), overall="_global_scale")
_MXFP4 = replace(_NVFP4, name="MXFP4", scale_dtypes=_EXPONENTS, block=(1, 32), overall="")
_GPTQ = Codec("GPTQ int4", ".qweight", "I32", 4, "gptq", (".scales",), zero=".qzeros", zero_offset=1, order=".g_idx")
# quant_algo of modelopt -> codec
_MODELOPT: Mapping[str, Codec] = {
    "FP8": _CHANNEL_FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _CHANNEL_FP8,
    "NVFP4": (_MODELOPT_NVFP4 := replace(_NVFP4, codes="", overall="_scale_2", multiplies=True)),
    "W4A16_NVFP4": _MODELOPT_NVFP4,
}
# format of compressed-tensors, type of the codes -> codec
_COMPRESSED: Mapping[tuple[str, str], Codec] = {
    ("float-quantized", "float"): _CHANNEL_FP8,
    ("naive-quantized", "float"): _CHANNEL_FP8,
    ("int-quantized", "int"): _INT8,
    ("naive-quantized", "int"): _INT8,
    ("pack-quantized", "int"): PACKED,
    ("nvfp4-pack-quantized", "float"): _NVFP4,
    ("mxfp4-pack-quantized", "float"): _MXFP4,
}
_FBGEMM = replace(_CHANNEL_FP8, block=(1, 0))
_STACKED_MXFP4 = replace(_MXFP4, codes="_blocks", scales=("_scales",))
_AWQ = replace(_GPTQ, name="AWQ int4", layout="awq", zero_offset=0, order="")
CODECS = (_FP8, replace(_INT8, zero="_zero_point"), PACKED, _STACKED_MXFP4, _GPTQ, *_MODELOPT.values(), _NVFP4)
_KEYS = ("quantization_config", "compression_config")  # the second is an older name of compressed-tensors
_EMBEDDINGS = r"re:(.*\.)?embed(dings?|_tokens)$"
# Files beside config.json: name, key, and the methods whose tools write it.
_BESIDE_CONFIG = (
    ("hf_quant_config.json", "quantization", ("modelopt", "modelopt_fp4")),
    ("quantize_config.json", "", ("gptq", "awq")),
)
_GPTQ_KEYS = ("bits", "group_size", "desc_act", "sym", "checkpoint_format")


@dataclass(frozen=True)
class Quantization:
    """What a folder declares. method: its quant_method. where: the file and the key. codecs: of the modules that match
    a pattern of `targets`, by the pattern; None: of all others. stays: modules that are not quantised. is_in_config:
    whether config.json says so, and not only a file beside it, which may be left over."""

    method: str
    where: str
    codecs: Mapping[str | None, Codec]
    targets: Patterns
    stays: Patterns
    is_in_config: bool

    @property
    def described(self) -> str:
        """The formats in words."""
        return f"{'; '.join(dict.fromkeys(codec.described for codec in self.codecs.values()))} ({self.method})"

    def codec_of(self, module: str) -> tuple[Codec | None, str]:
        """Return the codec of a module, None if it is not quantised, and a clause that names the pattern by which it is
        so; empty if no pattern matches its name. Raises ModelError if the patterns take too long."""
        try:
            if (stay := self.stays.matching(module)) is not None:
                return None, f"leaves out {brief(stay)}"
            if (target := self.targets.matching(module)) is not None:
                return self.codecs[target], f"has the target {brief(target)}"
        except ValueError as error:
            raise ModelError(f"{self.where}: {error}; give the unquantised checkpoint") from None
        found = self.codecs.get(None)
        return found, "" if found else "has no target for it"


def read_quantization(path: Path, values: Mapping[str, Any]) -> Quantization | None:
    """Return what a folder declares about quantised weights; None if it declares nothing. path: of config.json, whose
    content is `values`. Raises ModelError for a method or a choice that is not supported, and for files that
    disagree."""
    found = _declared(path, values)
    if not found.values or _has_plain_weights(found):
        return None
    where = f"{found.path}: {found.prefix.rstrip('.')}".removesuffix(": ")
    method: Any = found.values.get("quant_method")
    if method is None and (found.values.get("load_in_4bit") or found.values.get("load_in_8bit")):
        method = "bitsandbytes"  # its older files name no method
    if not isinstance(method, str):
        raise _refused(where, "quantised by a method that it does not name")
    reads = _READERS.get(method.lower())
    if reads is None:
        raise _refused(where, f"quantised with {brief(method)}")
    try:
        codecs, targets, stays = reads(found)
    except ValueError as error:
        raise ModelError(f"{where}: {error}; give the unquantised checkpoint") from None
    return Quantization(method.lower(), where, codecs, targets, stays, found.path == path)


def _declared(path: Path, values: Mapping[str, Any]) -> ConfigReader:
    """Return the config of quantisation in config.json, or in a file beside it; an empty one if there is none."""
    found = ConfigReader(path, {})
    text_model = values.get("text_config")
    for part, prefix in ((values, ""), (text_model if isinstance(text_model, dict) else {}, "text_config.")):
        for key in _KEYS:
            if not part.get(key):
                continue
            if found.values and part[key] != found.values:
                raise ModelError(f"{path}: {prefix}{key} and {found.prefix.rstrip('.')} disagree; download it again")
            if not isinstance(part[key], dict):
                raise _refused(f"{path}: {prefix}{key}", "quantised by a method that it does not name")
            found = ConfigReader(path, part[key], f"{prefix}{key}.")
    for name, key, methods in _BESIDE_CONFIG:
        other = ConfigReader(path.parent / name, read_model_json(path.parent / name, is_optional=True))
        if not other.values:
            continue
        other = other.below(key) if key else other
        if _has_plain_weights(other):
            continue
        if not found.values:
            found = ConfigReader(other.path, {"quant_method": methods[0], **other.values}, other.prefix)
        _check_agree(found, other, methods)
    return found


def _has_plain_weights(reader: ConfigReader) -> bool:
    """Return whether a config of modelopt names no algorithm for weights, as where only KV is quantised."""
    return "quant_algo" in reader.values and reader.values["quant_algo"] is None


def _refused(where: str, what: str) -> ModelError:
    return ModelError(
        f"{where} says that the weights are {what}; expected {', '.join(_READERS)} (docs/models.md), or the "
        "unquantised checkpoint"
    )


def _check_agree(found: ConfigReader, other: ConfigReader, methods: tuple[str, ...]) -> None:
    """Raise ModelError if two files declare different values. methods: those whose tools write the other file."""
    method = found.values.get("quant_method")
    if str(method).lower() not in methods:
        raise ModelError(
            f"{found.path}: {found.prefix}quant_method is {brief(method)}, and {other.path} is a file of {methods[0]}; "
            "they must agree: download the model again"
        )
    pairs = [(key, key) for key in ("quant_algo", "ignore", "exclude_modules", *_GPTQ_KEYS)]
    for ours, theirs in (*pairs, ("ignore", "exclude_modules")):
        one, two = found.values.get(ours), other.values.get(theirs)
        if isinstance(one, list) and isinstance(two, list):
            one, two = sorted(map(str, one)), sorted(map(str, two))
        if one is not None and two is not None and one != two:
            raise ModelError(
                f"{found.path}: {found.prefix}{ours} is {brief(found.values[ours])}, and {other.path}: "
                f"{other.prefix}{theirs} is {brief(other.values[theirs])}; they must agree: download the model again"
            )


_Read = tuple[Mapping[str | None, Codec], Patterns, Patterns]  # codecs, targets and stays of Quantization


def _names(reader: ConfigReader, *keys: str) -> list[str]:
    """Return the names or patterns listed under the first of the keys that is there."""
    key = next((key for key in keys if reader.values.get(key) is not None), keys[0])
    names = reader.values.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise reader.wrong(key, names, "a list of names")
    return names


def _read_fp8(reader: ConfigReader) -> _Read:
    reader.require("fmt", "e4m3", "e4m3", "float8_e4m3fn", None)
    block = reader.values.get("weight_block_size")
    codec = replace(_FP8, block=_block(reader, "weight_block_size") if block is not None else None)
    return {None: codec}, Patterns(), Patterns(_names(reader, "modules_to_not_convert", "ignored_layers"))


def _read_one(codec: Codec, reader: ConfigReader) -> _Read:
    return {None: codec}, Patterns(), Patterns(_names(reader, "modules_to_not_convert"))


def _read_modelopt(reader: ConfigReader) -> _Read:
    stays = Patterns(_names(reader, "ignore", "exclude_modules", "modules_to_not_convert"))
    if reader.values.get("quant_algo") != "MIXED_PRECISION":
        return {None: _modelopt_codec(reader)}, Patterns(), stays
    layers = reader.below("quantized_layers")
    if not layers.values:
        raise reader.wrong("quantized_layers", reader.values.get("quantized_layers"), "the algorithm of each layer")
    return {name: _modelopt_codec(layers.below(name)) for name in layers.values}, Patterns(layers.values), stays


def _modelopt_codec(reader: ConfigReader) -> Codec:
    algorithm = reader.values.get("quant_algo")
    codec = _MODELOPT.get(algorithm) if isinstance(algorithm, str) else None
    if codec is None:
        raise reader.wrong("quant_algo", algorithm, f"one of {', '.join(_MODELOPT)}")
    if codec.block is not None:
        reader.require("group_size", None, codec.block[1], None)
    return codec


def _read_compressed(reader: ConfigReader) -> _Read:
    reader.require("quantization_status", "compressed", "compressed", "frozen", None)
    if (sparsity := reader.below("sparsity_config")).values:
        sparsity.require("format", "dense", "dense")
    if reader.values.get("transform_config"):
        raise reader.wrong("transform_config", reader.values["transform_config"], "no transforms of weights")
    groups, codecs = reader.below("config_groups"), dict[str | None, Codec]()
    names: list[str] = []
    for group in map(groups.below, groups.values):
        if (weights := group.below("weights")).values:
            named = group if group.values.get("format") is not None else reader
            codec = _compressed_codec(named, weights)
            for target in _names(group, "targets"):
                target = _EMBEDDINGS if target == "Embedding" else target
                is_class = target[:1].isupper()  # such as Linear, all that no name or expression matches
                names += [] if is_class else [target]
                codecs[None if is_class else target.removeprefix("re:")] = codec
    if not codecs:
        raise reader.wrong("config_groups", reader.values.get("config_groups"), "groups with weights and targets")
    # Sorted, as the tool tries expressions in this order.
    return codecs, Patterns(*_split(sorted(names))), Patterns(*_split(_names(reader, "ignore")))


def _compressed_codec(named: ConfigReader, weights: ConfigReader) -> Codec:
    """Return the codec of a group. named: has the format. weights: the arguments of its weights."""
    layout, kind, strategy = named.values.get("format"), weights.values.get("type"), weights.values.get("strategy")
    codec = _COMPRESSED.get((layout, kind)) if isinstance(layout, str) and isinstance(kind, str) else None
    if codec is None:
        formats = dict.fromkeys(one for one, _ in _COMPRESSED)
        raise named.wrong("format", layout, f"{', '.join(formats)}, and the type of weights that it has")
    bits = weights.integer("num_bits", codec.bits)
    if bits not in ((4, 8) if kind == "int" else (codec.bits,)):
        raise weights.wrong("num_bits", bits, "4 or 8" if kind == "int" else str(codec.bits))
    weights.require("dynamic", False, False)
    weights.require("actorder", None, None, False, "weight", "static", *("group", "dynamic", True) * bool(codec.order))
    codec = replace(codec, is_ordered=weights.values.get("actorder") in ("group", "dynamic", True))
    if not weights.flag("symmetric", True):
        if kind != "int":
            raise weights.wrong("symmetric", False, "true for floating-point weights")
        codec = replace(codec, zero="_zero_point")
    if kind == "int":
        codec = replace(codec, bits=bits if codec.layout == "rows" else 8, name=f"int{bits}")
    if codec.block is not None:
        weights.require("group_size", codec.block[1], codec.block[1])
        return codec
    blocks: dict[object, Callable[[], tuple[int, int]]] = {
        "tensor": lambda: (0, 0),
        "channel": lambda: (1, 0),
        "group": lambda: (1, weights.integer("group_size", 0)),
        "block": lambda: _block(weights, "block_structure"),
    }
    if not isinstance(strategy, str) or strategy not in blocks:
        raise weights.wrong("strategy", strategy, f"one of {', '.join(map(str, blocks))}")
    return replace(codec, block=blocks[strategy]())


def _read_gptq(reader: ConfigReader) -> _Read:
    for key in ("checkpoint_format", "format"):
        reader.require(key, None, "gptq", "gptq_v2", None)
    reader.require("is_marlin_format", False, False, None)
    versions = {reader.values.get(key) for key in ("checkpoint_format", "format")} - {None}
    if len(versions) > 1:
        raise reader.wrong("format", reader.values["format"], "the checkpoint_format")
    codec = _integers(reader, replace(_GPTQ, zero_offset=0 if versions == {"gptq_v2"} else 1))
    codec = replace(codec, is_ordered=reader.flag("desc_act", False))
    dynamic = reader.below("dynamic")
    for key, value in dynamic.values.items():
        if value and not key.startswith("-:"):
            raise dynamic.wrong(key, value, "no other choices for some modules")
    stays = [key.removeprefix("-:") for key in dynamic.values if key.startswith("-:")]
    return {None: codec}, Patterns(), Patterns(_names(reader, "modules_to_not_convert"), stays)


def _read_awq(reader: ConfigReader) -> _Read:
    version = reader.values.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise reader.wrong("version", version, '"gemm", the only one supported')
    reader.require("zero_point", True, True)
    return _read_one(_integers(reader, _AWQ, 4), reader)


def _integers(reader: ConfigReader, codec: Codec, *widths: int) -> Codec:
    """Return the codec with the bits and the group of a config of GPTQ or AWQ."""
    bits, widths = reader.integer("bits", 4), widths or (4, 8)
    if bits not in widths:
        raise reader.wrong("bits", bits, " or ".join(map(str, widths)))
    group = 0 if reader.values.get("group_size") == -1 else reader.integer("group_size", 128)
    return replace(codec, bits=bits, name=codec.name.replace("4", str(bits)), block=(1, group))


def _block(reader: ConfigReader, key: str) -> tuple[int, int]:
    sizes = reader.values.get(key)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in sizes):
        raise reader.wrong(key, sizes, "the rows and columns of a block")
    return sizes[0], sizes[1]


def _split(names: list[str]) -> tuple[list[str], list[str]]:
    """Split names of compressed-tensors into plain ones and regular expressions."""
    return (
        [one for one in names if not one.startswith("re:")],
        [one.removeprefix("re:") for one in names if one.startswith("re:")],
    )


_READERS: Mapping[str, Callable[[ConfigReader], _Read]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": partial(_read_one, _FBGEMM),
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "compressed-tensors": _read_compressed,
    "mxfp4": partial(_read_one, _STACKED_MXFP4),
    "gptq": _read_gptq,
    "awq": _read_awq,
}
