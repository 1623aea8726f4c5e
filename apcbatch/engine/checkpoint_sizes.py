"""Compute what a checkpoint's weights need in memory, from the headers of its files: as they are, and with each remedy
by which fewer of their bytes are in memory. `MemoryPlan` adds what a run takes besides. Importing this module does not
load torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from apcbatch.errors import ModelError
from apcbatch.model.adapter import WEIGHTS
from apcbatch.model.encoded import Encoded, Weights, as_converted, mode_beside, weights_of
from apcbatch.model.families import family_of
from apcbatch.model.feed_forward import Mixture
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.weight_files import FLOATING, WeightFiles

_BLOCK, _NUMBER = re.compile(r"(.*?\.\d+\.[^.]+)(.*)"), re.compile("[0-9]+")  # of the names of tensors


@dataclass(frozen=True)
class CheckpointSizes:
    """Sizes of a checkpoint, from the headers of its files. num_weights: weights that are loaded. num_kept: those of
    them that stay encoded. kept_bytes: bytes of these. num_decoded: upper bound of the weights of one decoded matrix.
    num_in_block: those of the largest sub-block. num_in_embedding: those of the largest tensor outside the sub-blocks.
    width: columns of the working memory of the widest sub-block, for each token. tokenizer_bytes: size of
    tokenizer.json. adapter_bytes: those of an adapter's tensors."""

    num_weights: int
    num_kept: int
    kept_bytes: int
    num_decoded: int
    num_in_block: int
    num_in_embedding: int
    width: int
    tokenizer_bytes: int
    adapter_bytes: int


def smaller_sizes(
    folder: Path, config: ModelConfig, mode: str, device: str, dtype: str, weights: Weights | None
) -> dict[str, CheckpointSizes]:
    """Return the sizes of a checkpoint with each remedy by which fewer bytes of its weights are in memory, by the
    remedy in words. The parameters are those of checkpoint_sizes."""
    found = {"--weights encoded": checkpoint_sizes(folder, config, "encoded", device, dtype, weights)}
    for bits in (8, 4):
        remedy = f"MODEL as a copy that `apcbatch convert --to int{bits}` makes"
        found[remedy] = checkpoint_sizes(folder, config, mode, device, dtype, weights, bits=bits)
    return {remedy: sizes for remedy, sizes in found.items() if sizes}


def checkpoint_sizes(
    folder: Path,
    config: ModelConfig,
    mode: str,
    device: str,
    dtype: str,
    weights: Weights | None,
    adapter: str | Path | None = None,
    bits: int = 0,
) -> CheckpointSizes | None:
    """Return the sizes of a checkpoint and an adapter. A tied head does not count. mode: `--weights`. device, dtype:
    see Keeping. weights: of the folder, by tensor; see weights_in. bits: of the integers of a copy that `apcbatch
    convert` would make; 0: the checkpoint itself. Return None if weights is None, or a copy cannot be made as it is
    quantised. ModelError for a bad adapter."""
    family, adapter_bytes = family_of(config), 0
    keeping, num_kept, kept_bytes = family.keeping(config, mode_beside(mode, adapter), device, dtype), 0, 0
    if adapter is not None:
        with WeightFiles(Path(adapter), WEIGHTS) as files:
            adapter_bytes = sum(tensor.num_bytes for tensor in files.tensors.values())
    matrices: dict[str, dict[str, int]] = {}  # of each sub-block, one of each kind that stays encoded
    per_token = max((kind.per_token for kind in family.kinds(config) if isinstance(kind, Mixture)), default=1)
    blocks, widths, outside = Counter[str](), Counter[str](), 0
    inputs, counts = set[tuple[str, int]](), Counter[str]()
    if weights is None:
        return None
    for name, tensor in weights.items():
        is_tied = config.tie_word_embeddings and name == f"{family.head}.weight"
        if tensor.dtype not in FLOATING or is_tied:
            continue
        if bits:
            if isinstance(tensor, Encoded):
                return None
            tensor = as_converted(name, tensor, bits)
        found = _BLOCK.match(name)
        block, part = found.groups() if found else ("", "")
        count = math.prod(tensor.shape)
        blocks[block] += count
        outside = max(outside, 0 if block else count)
        part = f"{block}{_NUMBER.sub('', part)}"  # the same for all experts
        if isinstance(tensor, Encoded) and keeping.keeps(name, tensor):
            num_kept, kept_bytes = num_kept + count, kept_bytes + tensor.kept_bytes
            matrices.setdefault(block, {})[part] = math.prod(tensor.shape[-2:])
        counts[part] += 1
        if len(tensor.shape) < 2 or counts[part] > per_token:
            continue
        *stacked, rows, columns = tensor.shape
        is_experts = len(stacked) > 0 and rows > 1  # else taps: (channels, 1, taps)
        widths[block] += rows * per_token if is_experts else math.prod((*stacked, rows))
        if (block, columns) not in inputs:
            inputs.add((block, columns))
            widths[block] += columns
    tokenizer, total = folder / "tokenizer.json", blocks.total()
    del blocks[""], widths[""]
    return CheckpointSizes(
        num_weights=total,
        num_kept=num_kept,
        kept_bytes=kept_bytes,
        num_decoded=max((sum(parts.values()) for parts in matrices.values()), default=0),
        num_in_block=max(blocks.values(), default=0),
        num_in_embedding=outside,
        width=max(widths.values(), default=0),
        tokenizer_bytes=tokenizer.stat().st_size if tokenizer.is_file() else 0,
        adapter_bytes=adapter_bytes,
    )


def weights_in(folder: Path, config: ModelConfig) -> Weights | None:
    """Read the headers of a folder's weights and return them by tensor; None if there are none, or one is damaged."""
    try:
        with WeightFiles(folder) as files:
            return weights_of(files, family_of(config).ignored)
    except ModelError:
        return None
