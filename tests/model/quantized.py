"""Quantised folders made from tiny ones, in every format that is read, and what their weights are decoded to.

Codes and scales are drawn at random and written by loops over the layouts' definitions, so that nothing here is shared
with the package's decoders: `expected` is bfloat16((code - zero) * scale), computed in NumPy's float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from tests.model.folders import copy_of, weights_of

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
Tensors = dict[str, torch.Tensor]


class Written(NamedTuple):
    """A weight in some format. tensors: end of the name (behind the weight's, or behind the module's if it begins with
    a dot) -> tensor. codes, zero, scale: float32, of each element. expected: bfloat16."""

    tensors: Tensors
    codes: np.ndarray
    zero: np.ndarray
    scale: np.ndarray

    @property
    def expected(self) -> torch.Tensor:
        with np.errstate(over="ignore", invalid="ignore"):
            return torch.from_numpy((self.codes - self.zero) * self.scale).bfloat16()


class Format(NamedTuple):
    """A format. config: quantization_config. write(shape, rng, extreme): a random weight. least: columns that every
    weight has a multiple of. only_2d: whether experts stand one by one."""

    config: dict[str, Any]
    write: Callable[[tuple[int, ...], np.random.Generator, float], Written]
    columns: int = 1
    rows: int = 1
    only_2d: bool = False


def spread(numbers: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """The number of each element's block; block: (rows, columns), 0 for all."""
    *_, height, width = shape
    rows, columns = block[0] or height, block[1] or width
    return numbers.repeat(rows, -2)[..., :height, :].repeat(columns, -1)[..., :width]


def blocks_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    *lead, height, width = shape
    return (*lead, -(-height // (block[0] or height)), -(-width // (block[1] or width)))


def packed(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes (.., n), not negative, as int32 items, lowest bits first; order: place in an item of each of its codes."""
    per = 32 // bits
    padded = np.concatenate([codes, np.zeros((*codes.shape[:-1], -codes.shape[-1] % per), codes.dtype)], -1)
    items = np.zeros((*padded.shape[:-1], padded.shape[-1] // per), np.uint32)
    for i in range(per):
        items |= padded[..., i::per].astype(np.uint32) << np.uint32(bits * (order[i] if order else i))
    return torch.from_numpy(items.view(np.int32))


def scales_of(shape: tuple[int, ...], rng: np.random.Generator, dtype: torch.dtype, extreme: float) -> torch.Tensor:
    """Random scales of about 0.01; extreme: share of them that are 0, tiny or huge, and then some are negative."""
    scales = np.exp(rng.normal(-5, 1, shape)) * (rng.choice([-1, 1], shape, p=[0.1, 0.9]) if extreme else 1)
    huge = rng.choice([0.0, 1e-38, 3e-41, 1e38, 3e35, -1e-30, 6e4, 6e-8], shape)
    chosen = torch.from_numpy(np.where(rng.random(shape) < extreme, huge, scales)).float()
    limit = torch.finfo(dtype).max
    return chosen.clamp(-limit, limit).to(dtype)


def fp8(block: tuple[int, int], end: str, dtype: torch.dtype, scale_shape: Any = None) -> Any:
    def write(shape: tuple[int, ...], rng: np.random.Generator, extreme: float) -> Written:
        raw = rng.integers(0, 256, shape, dtype=np.uint8)
        if not extreme:  # without NaN codes
            raw = np.where(raw & 127 == 127, 3, raw).astype(np.uint8)
        codes = torch.from_numpy(raw).view(torch.float8_e4m3fn)
        scales = scales_of(blocks_of(shape, block), rng, dtype, extreme)
        shown = scales if scale_shape is None else scales.reshape(scale_shape)
        scale = spread(scales.float().numpy(), shape, block)
        return Written({"": codes, end: shown}, codes.float().numpy(), np.float32(0), scale)

    return write


def fp8_exponents(shape: tuple[int, ...], rng: np.random.Generator, extreme: float) -> Written:
    one = fp8((128, 128), "_scale_inv", torch.float32)(shape, rng, extreme)
    raw = rng.integers(0 if extreme else 118, 255 if extreme else 124, blocks_of(shape, (128, 128)), dtype=np.uint8)
    scale = spread(np.exp2(raw.astype(np.float64) - 127).astype(np.float32), shape, (128, 128))
    return one._replace(tensors=one.tensors | {"_scale_inv": torch.from_numpy(raw)}, scale=scale)


def integers(bits: int, block: tuple[int, int], dtype: torch.dtype, symmetric: bool, is_packed: bool) -> Any:
    def write(shape: tuple[int, ...], rng: np.random.Generator, extreme: float) -> Written:
        half, grid = 1 << (bits - 1), blocks_of(shape, block)
        codes = rng.integers(-half, half, shape)
        zero = np.zeros(grid, np.int64) if symmetric else rng.integers(-half, half, grid)
        scales = scales_of(grid, rng, dtype, extreme)
        tensors: Tensors = {"_scale": scales}
        if is_packed:
            tensors |= {"_packed": packed(codes + half, bits), "_shape": torch.tensor(shape)}
        else:
            tensors[""] = torch.from_numpy(codes.astype(np.int8))
        if not symmetric and is_packed and block != (0, 0):
            tensors["_zero_point"] = packed((zero + half).swapaxes(-1, -2), bits).transpose(-1, -2).contiguous()
        elif not symmetric:
            tensors["_zero_point"] = torch.from_numpy(zero.astype(np.int8))
        numbers = (codes.astype(np.float32), zero.astype(np.float32), scales.float().numpy())
        return Written(tensors, numbers[0], spread(numbers[1], shape, block), spread(numbers[2], shape, block))

    return write


def unpacked_zeros(shape: tuple[int, ...], rng: np.random.Generator, extreme: float) -> Written:
    """Packed int4 of compressed-tensors before 0.9, whose zeros are not packed."""
    one = integers(4, (1, 16), torch.bfloat16, False, True)(shape, rng, extreme)
    zeros = one.zero[..., ::16].astype(np.int8)
    return one._replace(tensors=one.tensors | {"_zero_point": torch.from_numpy(zeros)})


def act_order(shape: tuple[int, ...], rng: np.random.Generator, extreme: float) -> Written:
    """int4 of compressed-tensors whose columns belong to groups in any order."""
    one = integers(4, (1, 32), torch.bfloat16, True, True)(shape, rng, extreme)
    order = rng.permutation(np.arange(shape[-1]) // 32)
    scale = one.tensors["_scale"].float().numpy()[..., order]
    return one._replace(tensors=one.tensors | {"_g_idx": torch.from_numpy(order.astype(np.int32))}, scale=scale)


def e2m1(group: int, codes_end: str, scales_end: str, overall: str, multiplies: bool = False) -> Any:
    def write(shape: tuple[int, ...], rng: np.random.Generator, extreme: float) -> Written:
        raw = rng.integers(0, 16, shape)
        items = (raw[..., ::2] | raw[..., 1::2] << 4).astype(np.uint8)
        if codes_end == "_blocks":
            items = items.reshape(*items.shape[:-1], -1, 16)
        tensors: Tensors = {codes_end: torch.from_numpy(items)}
        grid = blocks_of(shape, (1, group))
        if overall:
            scales = torch.from_numpy(rng.integers(0, 127, grid, dtype=np.uint8)).view(torch.float8_e4m3fn)
            second = np.float32(rng.uniform(1e-4, 1e-3) if multiplies else rng.uniform(900, 9000))
            number = scales.float().numpy() * second if multiplies else scales.float().numpy() / second
            tensors |= {scales_end: scales, overall: torch.tensor(second).reshape([] if multiplies else [1])}
        else:
            exponents = rng.integers(0 if extreme else 118, 255 if extreme else 124, grid, dtype=np.uint8)
            number = np.exp2(exponents.astype(np.float64) - 127).astype(np.float32)
            tensors[scales_end] = torch.from_numpy(exponents)
        return Written(tensors, E2M1[raw], np.float32(0), spread(number, shape, (1, group)))

    return write


def gptq(bits: int, group: int, first_format: bool, is_ordered: bool) -> Any:
    def write(shape: tuple[int, ...], rng: np.random.Generator, extreme: float) -> Written:
        height, width = shape
        groups, most = -(-width // group), 1 << bits
        codes, zero = rng.integers(0, most, shape), rng.integers(0, most, (height, groups))
        order = np.arange(width) // group
        order = rng.permutation(order) if is_ordered else order
        scales = scales_of((groups, height), rng, torch.float16, extreme)
        tensors = {".qweight": packed(codes, bits).t().contiguous(), ".scales": scales,
                   ".qzeros": packed(zero.T, bits), ".g_idx": torch.from_numpy(order.astype(np.int32))}  # fmt: skip
        zeros = (zero + first_format).astype(np.float32)[:, order]
        return Written(tensors, codes.astype(np.float32), zeros, scales.float().numpy().T[:, order])

    return write


def awq(shape: tuple[int, ...], rng: np.random.Generator, extreme: float) -> Written:
    height, width = shape
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    codes, zero = rng.integers(0, 16, shape), rng.integers(0, 16, (height, -(-width // 32)))
    scales = scales_of((zero.shape[1], height), rng, torch.float16, extreme)
    tensors = {".qweight": packed(codes.T, 4, order), ".qzeros": packed(zero.T, 4, order), ".scales": scales}
    zeros, scale = spread(zero.astype(np.float32), shape, (1, 32)), scales.float().numpy().T
    return Written(tensors, codes.astype(np.float32), zeros, spread(scale, shape, (1, 32)))


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """The quantization_config of a folder of compressed-tensors with one group."""
    weights = {"dynamic": False, "symmetric": True, "observer": "minmax"} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}  # fmt: skip


def _of_gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False,
            "checkpoint_format": "gptq"} | changes  # fmt: skip


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT, FLOAT = {"type": "int", "num_bits": 4}, {"type": "float", "num_bits": 8}
BF16, F32 = torch.bfloat16, torch.float32
FORMATS: Mapping[str, Format] = {
    "fp8 blocks": Format(BLOCKS, fp8((128, 128), "_scale_inv", BF16)),
    "fp8 small blocks": Format(BLOCKS | {"weight_block_size": [5, 7]}, fp8((5, 7), "_scale_inv", F32)),
    "fp8 exponents": Format(BLOCKS | {"scale_fmt": "ue8m0"}, fp8_exponents),
    "fp8 tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static"}, fp8((0, 0), "_scale", F32, ()), only_2d=True),
    "fbgemm_fp8": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8((1, 0), "_scale", F32)),
    "modelopt FP8": Format({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8((0, 0), "_scale", F32)),
    "modelopt NVFP4": Format({"quant_method": "modelopt", "quant_algo": "NVFP4"},
                             e2m1(16, "", "_scale", "_scale_2", multiplies=True), columns=2),
    "float channel": Format(compressed("float-quantized", **FLOAT, strategy="channel"), fp8((1, 0), "_scale", BF16)),
    "float block": Format(compressed("float-quantized", **FLOAT, strategy="block", block_structure=[16, 8]),
                          fp8((16, 8), "_scale", BF16)),
    "naive tensor": Format(compressed("naive-quantized", **FLOAT, strategy="tensor"), fp8((0, 0), "_scale", BF16)),
    "int8 channel": Format(compressed("int-quantized", **INT | {"num_bits": 8}, strategy="channel"),
                           integers(8, (1, 0), BF16, True, False)),
    "int8 group, zeros": Format(
        compressed("naive-quantized", **INT | {"num_bits": 8}, strategy="group", group_size=24, symmetric=False),
        integers(8, (1, 24), F32, False, False)),
    "pack int4": Format(compressed("pack-quantized", **INT, strategy="group", group_size=32),
                        integers(4, (1, 32), BF16, True, True)),
    "pack int4, zeros": Format(
        compressed("pack-quantized", **INT, strategy="group", group_size=16, symmetric=False),
        integers(4, (1, 16), BF16, False, True)),
    "pack int4, int8 zeros": Format(
        compressed("pack-quantized", **INT, strategy="group", group_size=16, symmetric=False), unpacked_zeros),
    "pack int8 channel, zeros": Format(
        compressed("pack-quantized", **INT | {"num_bits": 8}, strategy="channel", symmetric=False),
        integers(8, (1, 0), F32, False, True)),
    "pack int8 tensor, zeros": Format(
        compressed("pack-quantized", **INT | {"num_bits": 8}, strategy="tensor", symmetric=False),
        integers(8, (0, 0), F32, False, True)),
    "pack int4, ordered": Format(
        compressed("pack-quantized", **INT, strategy="group", group_size=32, actorder="group"), act_order,
        only_2d=True),
    "nvfp4": Format(compressed("nvfp4-pack-quantized", **FLOAT | {"num_bits": 4}, strategy="tensor_group",
                               group_size=16), e2m1(16, "_packed", "_scale", "_global_scale"), columns=2),
    "mxfp4 packed": Format(compressed("mxfp4-pack-quantized", **FLOAT | {"num_bits": 4}, strategy="group",
                                      group_size=32), e2m1(32, "_packed", "_scale", ""), columns=2),
    "mxfp4": Format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
                    e2m1(32, "_blocks", "_scales", ""), columns=32),
    "gptq": Format(_of_gptq(), gptq(4, 32, True, False), columns=8, only_2d=True),
    "gptq int8": Format(_of_gptq(bits=8), gptq(8, 32, True, False), columns=4, only_2d=True),
    "gptq_v2 int8, ordered": Format(_of_gptq(bits=8, checkpoint_format="gptq_v2", desc_act=True),
                                    gptq(8, 32, False, True), columns=4, only_2d=True),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq,
                  rows=8, only_2d=True),
}  # fmt: skip


def named(weight: str, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a weight by their whole names."""
    for end, tensor in tensors.items():
        yield (weight.removesuffix(".weight") if end.startswith(".") else weight) + end, tensor.contiguous()


def encoded_tensors(plain: Tensors, form: Format, rng: np.random.Generator) -> tuple[Tensors, Tensors]:
    """(the tensors with random quantised weights in a format, the same decoded). All matrices that fit the format are
    quantised, but for embedding, head, routers and convolutions; the others are bfloat16."""
    encoded, decoded = Tensors(), Tensors()
    for name, tensor in sorted(plain.items()):
        *_, rows, columns = (1, 1, *tensor.shape)
        is_kept = not 2 <= tensor.dim() <= (2 if form.only_2d else 3) or not name.endswith((".weight", "_proj"))
        is_kept |= rows % form.rows > 0 or columns % form.columns > 0
        if is_kept or any(one in name for one in ("embed", "lm_head", "gate.", "router", "conv", "norm")):
            encoded[name] = decoded[name] = tensor.bfloat16()
            continue
        written = form.write(tuple(tensor.shape), rng, 0.0)
        decoded[name] = written.expected
        encoded |= dict(named(name, written.tensors))
    return encoded, decoded


def quantised(folder: Path, target: Path, which: str, seed: int = 0) -> tuple[Path, Path]:
    """(a copy with random quantised weights in a format, the same decoded to bfloat16): see encoded_tensors."""
    form = FORMATS[which]
    both = encoded_tensors(weights_of(folder), form, np.random.default_rng(seed))
    folders = copy_of(folder, target / "encoded"), copy_of(folder, target / "decoded")
    for one, tensors in zip(folders, both, strict=True):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, one / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    return folders
