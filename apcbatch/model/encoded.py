"""The weights of a folder, quantised or not: which stored tensors make one weight.

Invariants: what config.json declares and what the tensors are must agree, by their headers alone, before anything is
allocated. A scale, zero or order without its weight is an error. Importing this module does not load torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from apcbatch.cores import may_have_gpu
from apcbatch.data.model_files import read_model_json
from apcbatch.errors import ModelError
from apcbatch.model.quantization import CODECS, PACKED, Codec, Quantization, read_quantization
from apcbatch.model.weight_files import FLOATING, StoredTensor, WeightFiles

if TYPE_CHECKING:
    import torch

    from apcbatch.kernels.encoded_rows import CodeKind

# Ends of the names of numbers of activations, keys and values, which are not used.
_UNUSED = ("_activation_scale", ".input_scale_ub", *(
    f".{one}_{end}" for one in ("activation", "input", "output", "q", "k", "v", "kv")
    for end in ("scale", "zero_point", "global_scale")
))  # fmt: skip
# Ends of the names of the tensors beside those of codes, and of those of codes that are not named as a weight is.
_BESIDE = tuple(end for one in CODECS for end in (*one.scales, one.zero, one.overall, one.order, one.shape) if end)
_CODES = tuple(one.codes for one in CODECS if one.codes)
# Dtypes of other tensors -> what they usually hold.
_MEANT: Mapping[str, str] = {"I8": "int8", "U8": "int8, or packed 4-bit", "I32": "packed integer"}
# Last parts of the names of modules that `apcbatch convert` encodes. All others stay: embeddings, norms, convolutions,
# gates, routers, the projections of the steps of Mamba-1 and delta nets (dt_proj, in_proj_a, in_proj_b, in_proj_ba).
PROJECTION = re.compile(r"(?!dt_)\w+_(proj(_qkvz?|_z)?|linear)|w[123]")
GROUP = 128  # columns that share a scale of its integers
_CONVERTED = {bits: replace(PACKED, bits=bits, block=(1, GROUP)) for bits in (4, 8)}
_MOST_SHAPE_BYTES = 64
_LEAST_COLUMNS = 32  # of weights that stay encoded: not of convolutions
_BLOCK_INPUTS = 256
_GROUPS_ON_CUDA = (32, 64, 128)
_SLOWER = (("cpu", "fp8"),)  # than decoded, by the benchmarks of docs/models.md


class Encoded(NamedTuple):
    """A weight that has to be decoded. path: of its codes. dtype, shape, num_bytes: of the decoded weight. parts: role
    -> (name, tensor); roles are `codes`, `scales`, of some weights `zero`, `overall` and `order`, and the ends of the
    names of numbers that are not used."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    codec: Codec
    parts: Mapping[str, tuple[str, StoredTensor]]

    @property
    def kept_as(self) -> tuple[CodeKind, int] | None:
        """What the codes are if the weight stays encoded in memory, and the columns that share a scale; None if its
        format is only decoded while it is loaded. Codes: `fp8` (e4m3), `int8`, `int4`."""
        codec, (*_, columns) = self.codec, self.shape
        if codec.is_ordered or codec.overall or codec.dtype == "U8" or codec.block is None or columns < _LEAST_COLUMNS:
            return None
        kind: CodeKind = "fp8" if codec.dtype == "F8_E4M3" else "int8" if codec.bits == 8 else "int4"
        return kind, min(codec.block[1] or columns, columns)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the codes and their scales in memory."""
        kept = self.kept_as
        assert kept is not None
        *rows, columns = self.shape
        codes = -(-columns // 2) if kept[0] == "int4" else columns
        return math.prod(rows) * (codes + -(-columns // kept[1]) * (5 if self.codec.zero else 4))


class Keeping(NamedTuple):
    """Which weights stay encoded in memory. mode: `auto`, `encoded` or `decoded` (--weights). device: `cpu`, `cuda`, or
    `other` for GPUs without kernels that read codes. dtype: of the run. decoded: ends of the names of weights that are
    always decoded: the embedding, and a head that is tied to it."""

    mode: str
    device: str
    dtype: str
    decoded: tuple[str, ...] = ()

    def keeps(self, name: str, weight: StoredTensor | Encoded) -> bool:
        """Return True if a weight stays encoded in memory."""
        if self.mode == "decoded" or not isinstance(weight, Encoded) or name.endswith(self.decoded):
            return False
        if (kept := weight.kept_as) is None or (self.mode == "auto" and (self.device, kept[0]) in _SLOWER):
            return False
        (kind, group), columns = kept, weight.shape[-1]
        if self.device == "cpu":  # groups lie in the kernels' blocks of inputs, or blocks in groups; int4 is in pairs
            return group >= columns or group % _BLOCK_INPUTS == 0 or (group % 2 == 0 and _BLOCK_INPUTS % group == 0)
        return (
            (self.device, self.dtype) == ("cuda", "bfloat16")
            and (group >= columns or group in _GROUPS_ON_CUDA)
            and columns % (32 if kind == "int4" else 16) == 0
            and (kind == "int4" or not weight.codec.zero)
            and weight.parts["scales"][1].dtype not in ("F32", "F16")
        )


def as_converted(name: str, weight: StoredTensor, bits: int) -> StoredTensor | Encoded:
    """Return a weight as `apcbatch convert` would write it, in integers of these bits. name: of the weight."""
    is_projection = PROJECTION.fullmatch(name.removesuffix(".weight").rpartition(".")[2])
    if not is_projection or len(weight.shape) < 2 or weight.shape[-1] % GROUP:
        return weight
    parts = {"scales": ("", weight._replace(dtype="BF16"))}
    return Encoded(weight.path, "BF16", weight.shape, 0, _CONVERTED[bits], parts)


def mode_beside(mode: str, adapter: object | None) -> str:
    """Return Keeping.mode of a run: `decoded` with an adapter, since that is added to decoded weights; otherwise
    `mode`, the value of `--weights`."""
    return mode if adapter is None else "decoded"


def device_of_codes(device: str, gpus: int) -> str:
    """Return Keeping.device of a run. device, gpus: `--device`, `--gpus`. Raises UsageError for a device that is not
    there."""
    if gpus == 1 and (device == "cpu" or (device == "auto" and not may_have_gpu())):
        return "cpu"
    from apcbatch.model.devices import choose_devices

    return kind_of(choose_devices(device, gpus))


def kind_of(devices: Sequence[torch.device]) -> str:
    """Return Keeping.device of these devices."""
    import torch

    if devices[0].type == "cpu":
        return "cpu"
    capabilities = {torch.cuda.get_device_capability(device)[0] for device in devices}
    return "cuda" if capabilities == {9} else "other"


Weights = dict[str, StoredTensor | Encoded]


def quantization_of(folder: Path, files: WeightFiles | None = None) -> Quantization | None:
    """Return what a folder declares about quantised weights; None if it declares nothing, or if only a file beside
    config.json does and no tensor is encoded. files: those of the folder, if they are open. Raises ModelError."""
    config = folder / "config.json"
    declared = read_quantization(config, read_model_json(config, is_optional=True))
    if declared is None or declared.is_in_config:
        return declared
    try:
        with nullcontext(files) if files is not None else WeightFiles(folder) as opened:
            return declared if any(one.dtype not in FLOATING for one in opened.tensors.values()) else None
    except ModelError:  # the weights are not here
        return declared


def weights_of(files: WeightFiles, ignored: tuple[str, ...] = ()) -> Weights:
    """Return the weights of a folder by name. ignored: prefixes of the names of those that are left out. Raises
    ModelError if the tensors are not what the folder declares."""
    declared = quantization_of(files.folder, files)
    tensors = {name: one for name, one in files.tensors.items() if not name.startswith(ignored)}
    weights: Weights = {}
    if declared is None:
        weights.update(tensors)
        return weights
    around = {name for name in tensors if name.endswith(_BESIDE + _UNUSED)}
    used = {name for name in around if name.endswith(_UNUSED)}
    unused = [end for end in _UNUSED if any(name.endswith(end) for name in used)]
    for name, stored in tensors.items():
        if name in around:
            continue
        if stored.dtype not in FLOATING:
            group = _Group(declared, tensors, name)
            if group.weight != name and group.weight in tensors:
                raise ModelError(f"{stored.path}: tensor {name:.120} is the same weight as tensor {group.weight:.120}")
            encoded = weights[group.weight] = group.read(files, unused)
            used.update(part for part, _ in encoded.parts.values())
            used.add(beside(group.weight, encoded.codec.shape))
            continue
        _check_plain(declared, name, stored)
        weights[name] = stored
    for name in sorted(around - used):
        owner = next((one for one in weights if name.startswith(one.removesuffix(".weight"))), None)
        near = f": tensor {owner:.120} has dtype {_dtype(weights[owner])}" if owner else ""
        raise ModelError(
            f"{tensors[name].path}: tensor {name:.120} belongs to no weight that {declared.where} declares{near}"
        )
    return weights


def _check_plain(declared: Quantization, name: str, stored: StoredTensor) -> None:
    """Raise ModelError for a weight that is not encoded although the folder says so by its module's name."""
    module = name.removesuffix(".weight")
    if len(stored.shape) < 2 or module == name:
        return
    codec, said = declared.codec_of(module)
    if codec is not None and said:
        raise ModelError(
            f"{stored.path}: tensor {name:.120} has dtype {stored.dtype}, and {declared.where} {said} "
            f"({codec.described}); they must agree: download the model again"
        )


def check_floating(path: Path, name: str, dtype: str) -> None:
    """Raise ModelError unless the dtype (safetensors' name) of a tensor that is not Encoded is in FLOATING. path: the
    tensor's file."""
    if dtype in FLOATING:
        return
    meant = "8-bit floating point" if dtype.startswith("F8_") else _MEANT.get(dtype)
    if meant is None:
        meant = "packed floating point" if dtype.startswith(("F4", "F6")) else None
    what = f", as {meant} weights have it: config.json declares none" if meant else ""
    raise ModelError(f"{path}: tensor {name:.120} has dtype {dtype}; expected one of {', '.join(FLOATING)}{what}")


def _dtype(weight: StoredTensor | Encoded) -> str:
    return weight.parts["codes"][1].dtype if isinstance(weight, Encoded) else weight.dtype


def beside(weight: str, end: str) -> str:
    """Return the name of a tensor beside a weight."""
    return weight.removesuffix(".weight") + end if end.startswith(".") else weight + end


class _Group:
    """The tensors of one weight. codes: name of the tensor with its codes. Raises ModelError."""

    def __init__(self, declared: Quantization, tensors: Mapping[str, StoredTensor], codes: str) -> None:
        self._tensors, self._name, self._codes = tensors, codes, tensors[codes]
        end = next((one for one in _CODES if codes.endswith(one)), "")
        self.weight = codes.removesuffix(end) + (".weight" if end == ".qweight" else "")
        codec, said = declared.codec_of(self.weight.removesuffix(".weight"))
        found = f"{self._codes.path}: tensor {codes:.120} has dtype {self._codes.dtype}"
        if codec is None:
            raise ModelError(f"{found}, and {declared.where} {said}; they must agree: download the model again")
        if codes != beside(self.weight, codec.codes) or self._codes.dtype != codec.dtype:
            expected = f"{beside(self.weight, codec.codes):.120} of dtype {codec.dtype}"
            raise ModelError(f"{found}; expected {expected}, by {declared.where} ({codec.described})")
        self.codec = codec

    def read(self, files: WeightFiles, unused: Collection[str]) -> Encoded:
        """Return the weight, whose tensors have been checked by their headers. unused: those of _UNUSED that any weight
        has."""
        codec = self.codec
        found = [part for end in codec.scales if (part := beside(self.weight, end)) in self._tensors]
        if len(found) > 1:
            raise ModelError(f"{self._codes.path}: tensor {self._name:.120} has scales twice, {' and '.join(found)}")
        order = beside(self.weight, codec.order) if codec.order else ""
        parts = {"codes": self._name, "scales": found[0] if found else self._find(codec.scales[0])}
        parts |= {role: self._find(end) for role, end in (("zero", codec.zero), ("overall", codec.overall)) if end}
        parts |= {"order": self._find(codec.order)} if codec.is_ordered or order in self._tensors else {}
        shape = self._shape(files, parts.get("order"))
        block, scales = self._check_scales(parts["scales"], shape)
        *lead, rows, columns = scales
        if "zero" in parts:
            per = 32 // codec.bits
            if codec.is_transposed:
                self._check(parts["zero"], ("I32",), (columns, -(-rows // per)))
            elif codec.layout == "rows" and block != (0, 0) and self._tensors[parts["zero"]].dtype != "I8":
                self._check(parts["zero"], ("I32",), (*lead, -(-rows // per), columns))
            else:
                self._check(parts["zero"], ("I8",), scales)
        if "overall" in parts:
            self._check(parts["overall"], ("F32",), (1,), tuple(lead))
        for end in unused:
            if (part := beside(self.weight, end)) in self._tensors:
                parts[end] = part
                self._check(part, (*FLOATING, "I8", "F8_E4M3"), (1,), tuple(lead))
        held = {role: (part, self._tensors[part]) for role, part in parts.items()}
        size, codec = 2 * math.prod(shape), codec if block == codec.block else replace(codec, block=block)
        return Encoded(self._codes.path, "BF16", shape, size, codec, held)

    def _find(self, end: str) -> str:
        part = beside(self.weight, end)
        if part not in self._tensors:
            raise ModelError(
                f"{self._codes.path}: tensor {self._name:.120} lacks tensor {part:.120} ({self.codec.described}); "
                "download the model again"
            )
        return part

    def _check(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[object, ...]) -> None:
        """Raise ModelError unless a tensor has one of the dtypes, and one of the shapes but for ones at the end."""
        stored = self._tensors[part]
        if stored.dtype not in dtypes or (
            stored.shape not in shapes and _trimmed(stored.shape) not in map(_trimmed, shapes)
        ):
            expected = " or ".join(f"[{', '.join(map(str, one))}]" for one in dict.fromkeys(shapes))
            raise ModelError(
                f"{stored.path}: tensor {part:.120} has dtype {stored.dtype} and shape {list(stored.shape)}; expected "
                f"{' or '.join(dtypes)} {expected}, as tensor {self._name:.120} has shape {list(self._codes.shape)} "
                f"({self.codec.described})"
            )

    def _check_scales(self, part: str, shape: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Return the rows and columns that share a scale, and the shape of the scales as (.., rows, columns)."""
        *lead, rows, columns = shape
        blocks = [self.codec.block] if self.codec.block is not None else [(0, 0), (1, 0)]
        shapes = [(*lead, -(-rows // (r or rows or 1)), -(-columns // (c or columns or 1))) for r, c in blocks]
        stored_as = [one[::-1] if self.codec.is_transposed else one for one in shapes]
        self._check(part, self.codec.scale_dtypes, *stored_as)
        fits = list(map(_trimmed, stored_as)).index(_trimmed(self._tensors[part].shape))
        return blocks[fits], shapes[fits]

    def _shape(self, files: WeightFiles, order: str | None) -> tuple[int, ...]:
        """Return the shape of the weight. order: name of the tensor of its columns' groups."""
        codec, stored = self.codec, self._codes.shape
        per = {"U8": 8, "I32": 32}.get(codec.dtype, codec.bits) // codec.bits
        if len(stored) < 2 or codec.is_transposed and len(stored) > 2 or codec.codes == "_blocks" and len(stored) < 3:
            self._check(self._name, (codec.dtype,), ("out", "in"))
        shape: tuple[int, ...] = (*stored[:-1], stored[-1] * per)
        if codec.layout == "gptq":
            shape = (stored[1], stored[0] * per)
        elif codec.layout == "awq":
            shape = (stored[1] * per, stored[0])
        elif codec.codes == "_blocks":
            shape = (*stored[:-2], stored[-2] * stored[-1] * per)
        if codec.shape:
            part = self._find(codec.shape)
            given = _numbers(files, self._tensors[part])
            if given[:-1] != shape[:-1] or not max(0, shape[-1] - per) < given[-1] <= shape[-1]:
                raise ModelError(
                    f"{self._tensors[part].path}: tensor {part:.120} gives the shape {list(given)}; expected "
                    f"{list(shape)}, or up to {per - 1} columns fewer, as tensor {self._name:.120} has shape "
                    f"{list(stored)} ({codec.described})"
                )
            shape = given
        if order is not None:
            columns = self._tensors[order].shape[-1:]
            if codec.layout == "gptq" and columns and shape[1] - per < columns[0] <= shape[1]:
                shape = (shape[0], *columns)
            self._check(order, ("I32",), shape[-1:])
        if 0 in shape:
            raise ModelError(f"{self._codes.path}: tensor {self._name:.120} has shape {list(stored)}; expected no zero")
        return shape


def _numbers(files: WeightFiles, stored: StoredTensor) -> tuple[int, ...]:
    """Return the numbers in a tensor of a few integers; (0,) if it is no such tensor."""
    size = {"I32": 4, "I64": 8}.get(stored.dtype, 0)
    if not size or len(stored.shape) != 1 or not 0 < stored.num_bytes <= _MOST_SHAPE_BYTES:
        return (0,)
    raw = bytearray(stored.num_bytes)
    files.read_into(stored, memoryview(raw))
    return tuple(int.from_bytes(raw[i : i + size], "little", signed=True) for i in range(0, len(raw), size))


def _trimmed(shape: tuple[object, ...]) -> tuple[object, ...]:
    """Return a shape without ones at its end."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
