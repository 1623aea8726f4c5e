"""Write a quantised copy of a model folder in the format of compressed-tensors: projections encoded, the rest copied.

Invariants: of a weight, only a piece of bounded size is in memory. The files are written in a folder of their own in
the target and renamed when all are whole, config.json last, so that a killed process leaves no folder that loads.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from apcbatch.data.model_files import MAX_FILE_BYTES, MAX_JSON_BYTES, model_files
from apcbatch.errors import ModelError, UsageError
from apcbatch.model.decoding import encode
from apcbatch.model.encoded import GROUP, PROJECTION, beside, check_floating, quantization_of
from apcbatch.model.families import family_of, load_model_config
from apcbatch.model.feed_forward import Mixture
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.quantization import Codec, read_quantization
from apcbatch.model.weight_files import INDEX, SINGLE, StoredTensor, WeightFiles
from apcbatch.option_values import rounded_size
from apcbatch.regular_files import read_regular_file

UNFINISHED = ".unfinished-"  # beginning of the name of a folder with the files until all are written
_MOST_SHARD_BYTES = 5 * 10**9  # of a file with several weights
_PIECE_ITEMS = 1 << 20
_INTEGERS = {"type": "int", "strategy": "group", "group_size": GROUP}
SCHEMES: Mapping[str, tuple[str, dict[str, Any]]] = {  # --to: the format of compressed-tensors, its weights' arguments
    "int8": ("pack-quantized", {"num_bits": 8, **_INTEGERS}),
    "int4": ("pack-quantized", {"num_bits": 4, **_INTEGERS}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
}
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.md", "LICEN[CS]E*", "NOTICE*", "COPYING*")
_NOT_COPIED = ("config.json", "hf_quant_config.json", "quantize_config.json", INDEX)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Weight(NamedTuple):
    """A tensor that is read. name: its name in the copy. codec: codec that encodes it; None: it is copied."""

    name: str
    stored: StoredTensor
    codec: Codec | None

    def parts(self) -> dict[str, tuple[str, str, tuple[int, ...], int]]:
        """Return the tensors that are written for it, by role (see Encoded.parts): name, dtype, shape, bytes."""
        name, (_, dtype, shape, _, num_bytes), codec = self
        if codec is None:
            return {"codes": (name, dtype, shape, num_bytes)}
        assert codec.block is not None
        *lead, columns = shape
        rows, groups = math.prod(lead), columns // (codec.block[1] or columns)
        items = columns if codec.layout == "whole" else columns * codec.bits // 32
        parts = {
            "codes": (beside(name, codec.codes), codec.dtype, (*lead, items), rows * columns * codec.bits // 8),
            "scales": (beside(name, codec.scales[0]), "BF16", (*lead, groups), rows * groups * 2),
        }
        if codec.shape:
            parts["shape"] = (beside(name, codec.shape), "I64", (len(shape),), 8 * len(shape))
        return parts

    @property
    def num_bytes(self) -> int:
        return sum(part[-1] for part in self.parts().values())

    def pieces(self, files: WeightFiles) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the content of the parts: role, next values. Raises ModelError for a weight that is not finite."""
        stored, codec = self.stored, self.codec
        if codec is not None and codec.shape:
            yield "shape", torch.tensor(stored.shape)
        rows = math.prod(stored.shape[:-1]) if stored.num_bytes else 0
        dtype = _DTYPES.get(stored.dtype, torch.uint8)
        for begin in range(0, rows, step := max(1, _PIECE_ITEMS * rows // max(1, math.prod(stored.shape)))):
            count, row_bytes = min(step, rows - begin), stored.num_bytes // rows
            raw = bytearray(count * row_bytes)
            piece = stored._replace(offset=stored.offset + begin * row_bytes, num_bytes=len(raw))
            files.read_into(piece, memoryview(raw))
            values = torch.frombuffer(raw, dtype=dtype).view(count, -1)
            try:
                if codec is None and dtype.is_floating_point and not bool(values.isfinite().all()):
                    raise ValueError("has NaN or an infinite number")
                yield from {"codes": values}.items() if codec is None else encode(codec, values).items()
            except ValueError as error:
                raise ModelError(f"{stored.path}: tensor {self.name:.120} {error}; download the model again") from None


def convert(
    folder: Path, target: Path, to: str, head: str, warn: Callable[[str], None], advance: Callable[[int], object]
) -> str:
    """Write the model in `folder` to the new or empty folder `target`, and return a sentence about it. to: a key of
    SCHEMES. head: `keep`, or `int8`: then a head that is the embedding becomes a tensor of its own. warn: called with a
    sentence about projections that stay. advance: called with numbers of bytes that were read. Raises ModelError and
    UsageError."""
    _check_target(folder, target)
    with WeightFiles(folder) as files:
        if (quantised := quantization_of(folder, files)) is not None:
            raise ModelError(f"{folder} is quantised already, {quantised.described}; give the unquantised checkpoint")
        weights, values, described = _plan(files, to, head, target / "config.json", warn)
        shards, copied, size = _shards(weights), _copied(folder), sum(one.num_bytes for one in weights)
        needed = size + sum(path.stat().st_size for path in copied.values())
        if needed > (free := shutil.disk_usage(target if target.exists() else target.absolute().parent).free):
            sizes = f"takes {rounded_size(needed)}, and its disk has {rounded_size(free)} free"
            raise UsageError(f"DIR {target} {sizes}; free some, or give a DIR on another disk")
        target.mkdir(exist_ok=True)
        with TemporaryDirectory(prefix=UNFINISHED, dir=target) as made:
            for name, several in shards.items():
                _write(Path(made, name), files, several, advance)
            files.check_unchanged()
            for name, path in copied.items():
                Path(made, name).parent.mkdir(exist_ok=True)  # of further templates
                Path(made, name).write_bytes(read_regular_file(path, MAX_FILE_BYTES))
            if len(shards) > 1:
                pairs = [(one, name) for name, several in shards.items() for one in several]
                files_of = {part[0]: name for one, name in pairs for part in one.parts().values()}
                index = {"metadata": {"total_size": size}, "weight_map": files_of}
                Path(made, INDEX).write_text(json.dumps(index, indent=2))
            Path(made, "config.json").write_text(json.dumps(values, indent=2))
            for path in sorted(Path(made).iterdir(), key=lambda path: path.name == "config.json"):
                path.rename(target / path.name)
    before, count = sum(one.num_bytes for one in files.tensors.values()), sum(1 for one in weights if one.codec)
    return f"{target}: {count} weights in {described}; {rounded_size(before)} of tensors became {rounded_size(size)}"


def _check_target(folder: Path, target: Path) -> None:
    """Raise UsageError unless `target` is a new or an empty folder outside of `folder`."""
    around = target.absolute().parent
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(folder)):
        why = f"is MODEL or lies in it; expected a folder outside of {folder}"
    elif target.is_dir() and (left := next(target.glob(f"{UNFINISHED}*"), None)) is not None:
        why = f"has {left.name} of a conversion that did not end; remove it, or give a new folder"
    elif os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        why = f"is {'not empty' if target.is_dir() else 'no folder'}; expected a new or an empty folder"
    elif not around.is_dir():
        why = f"cannot be made, as {around} is no folder; expected an existing one"
    else:
        return
    raise UsageError(f"DIR {target} {why}")


def _plan(
    files: WeightFiles, to: str, head: str, path: Path, warn: Callable[[str], None]
) -> tuple[list[_Weight], dict[str, Any], str]:
    """Return the tensors, each with its codec, the content of the new config.json at `path`, and the formats in words.
    warn: see convert."""
    config = load_model_config(files.folder)
    values: Any = json.loads(read_regular_file(files.folder / "config.json", MAX_JSON_BYTES))
    family = family_of(config)
    ignored = {name: one for name, one in files.tensors.items() if name.startswith(family.ignored)}
    tensors = {name: one for name, one in files.tensors.items() if name not in ignored}
    for name, stored in tensors.items():
        check_floating(stored.path, name, stored.dtype)
    tensors = dict(_one_by_one(tensors, config))
    heads = {family.head} if head == "int8" else set()
    output = f"{family.head}.weight"
    if heads and config.tie_word_embeddings:
        embedding = re.compile(r".*\bembed(dings?|_tokens)\.weight")
        tensors.update([(output, one) for name, one in tensors.items() if embedding.fullmatch(name)])
        for part in (values, values.get("text_config") or {}):
            part.update(dict.fromkeys({"tie_word_embeddings", "tie_embedding"} & part.keys(), False))
        values["tie_word_embeddings"] = False
    if heads and output not in tensors:
        raise ModelError(f"{files.folder}: tensor {output} is missing; download the model again")
    matrices = {
        name[:-7]: one for name, one in tensors.items() if name.endswith(".weight") and one.shape[1:] and one.num_bytes
    }
    wanted = {one for one in matrices if one in heads or PROJECTION.fullmatch(one.rpartition(".")[2])}
    left = [one for one in sorted(wanted) if (to != "fp8" or one in heads) and matrices[one].shape[-1] % GROUP]
    wanted -= set(left)
    if blocked := [one for one in left if one in heads or not wanted]:
        raise ModelError(
            f"{files.folder}: {blocked[0]:.120} has {matrices[blocked[0]].shape[-1]} columns; expected a multiple of "
            f"{GROUP} for integers: give --to fp8 and --head keep"
        )
    schemes = [("Linear", *SCHEMES[to]), *((f"re:.*{one}$", *SCHEMES["int8"]) for one in heads)]
    groups = {
        f"group_{i}": {
            "targets": [target],
            "format": layout,
            "weights": {"symmetric": True, "dynamic": False, **weights},
        }
        for i, (target, layout, weights) in enumerate(schemes)
    }
    values["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if heads else SCHEMES[to][0],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [f"re:{re.escape(one)}.*" for one in family.ignored if any(name.startswith(one) for name in ignored)]
        + sorted(set(map(_pattern, {*matrices, family.head} - wanted))),
    }
    declared = read_quantization(path, {"quantization_config": values["quantization_config"]})
    assert declared is not None
    codecs = {f"{one}.weight": declared.codec_of(one)[0] for one in wanted}
    if left:
        warn(f"{len(left)} projections stay, as their columns are no multiple of {GROUP}, such as {left[0]:.120}")
    weights = [_Weight(name, one, codecs.get(name)) for name, one in (ignored | tensors).items()]
    return weights, values, declared.described


def _pattern(module: str) -> str:
    """Return the pattern of compressed-tensors for a module in all layers, such as `re:.*\\.mlp\\.gate$`."""
    tail = re.split(r"\.\d+(?=\.)", module)[1:]
    return "re:.*" + r"\.\d+".join(map(re.escape, tail)) + "$" if tail else module


def _one_by_one(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors, and of packed experts the matrices of each expert, as quantised checkpoints have them."""
    kinds = [block.kind for blocks in config.blocks.values() for block in blocks]
    expert = next((kind.expert for kind in kinds if isinstance(kind, Mixture) and kind.stacked is None), None)
    packed = {"gate_up_proj": expert.inputs, "down_proj": (expert.output,)} if expert else {}
    for name, stored in tensors.items():
        experts, _, last = name.rpartition(".")
        if last not in packed or len(stored.shape) != 3 or stored.shape[1] % len(packed[last]):
            yield name, stored
            continue
        names, (count, rows, columns) = packed[last], stored.shape
        shape, size = (rows // len(names), columns), stored.num_bytes // max(1, count * len(names))
        for i, (j, one) in ((i, pair) for i in range(count) for pair in enumerate(names)):
            offset = stored.offset + (i * len(names) + j) * size
            yield f"{experts}.{i}.{one}.weight", stored._replace(shape=shape, offset=offset, num_bytes=size)


def _copied(folder: Path) -> dict[str, Path]:
    """Return the files that are copied, by name: the tokenizer, its template, generation_config.json, the licence."""
    found = [path for pattern in _COPIED for path in folder.glob(pattern) if path.is_file()]
    files = model_files(folder) | {path.name: path for path in found if path.stat().st_size <= MAX_FILE_BYTES}
    return {name: path for name, path in files.items() if name not in _NOT_COPIED and not name.startswith(".")}


def _shards(weights: list[_Weight]) -> dict[str, list[_Weight]]:
    """Return the weights of each file, by its name."""
    shards: list[list[_Weight]] = []
    left = 0
    for weight in weights:
        if weight.num_bytes > left or not shards:
            shards.append([])
            left = _MOST_SHARD_BYTES
        shards[-1].append(weight)
        left -= weight.num_bytes
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    return dict(zip(names if len(shards) > 1 else [SINGLE], shards, strict=True))


def _write(path: Path, files: WeightFiles, weights: list[_Weight], advance: Callable[[int], object]) -> None:
    """Write a file of safetensors. Tensors of large elements come first, so that each is aligned."""
    parts = [part for weight in weights for part in weight.parts().values()]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name, dtype, shape, num_bytes in sorted(parts, key=lambda part: -part[3] // max(1, math.prod(part[2]))):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + num_bytes]}
        places[name] = end - num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "xb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for weight in weights:
            names = {role: part[0] for role, part in weight.parts().items()}
            for role, piece in weight.pieces(files):
                content = piece.contiguous().view(torch.uint8).numpy().data
                file.seek(8 + len(raw) + places[names[role]])
                file.write(content)
                places[names[role]] += content.nbytes
            advance(weight.stored.num_bytes)
