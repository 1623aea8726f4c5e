"""Decode quantised weights to bfloat16, and encode weights in the formats without zeros and orders.

Invariant: an element is bfloat16((float32(code) - zero) * scale), rounded once to nearest, ties to even, on every
device and whatever is decoded beside it. A product beyond the largest bfloat16 is infinite; NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from apcbatch.kernels.encoded_rows import CodeKind, Codes
from apcbatch.model.quantization import Codec

_PIECE_ITEMS = 1 << 18  # decoded at once on the host, so that they stay in the processor's cache
_DEVICE_ITEMS = 1 << 24
# Scales with which a product of float32 and its bfloat16 are neither denormal nor infinite.
_SCALES_OF_INTEGERS = 2.0**-100, 2.0**100
_SCALES_OF_FP8 = 2.0**-100, 2.0**6  # or 0, as FP8 keeps the sign of a zero
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_LARGEST_E4M3 = 448.0
_LARGEST_WEIGHT = 1e38  # that is encoded, so that no product of a code and a scale is infinite
_EXPONENTS = tuple(2.0 ** (byte - 127) for byte in range(256))


class BadPart(ValueError):
    """A tensor of a weight has values that it must not have. role: of the tensor in Encoded.parts; the message is a
    clause."""

    def __init__(self, role: str, why: str) -> None:
        super().__init__(why)
        self.role = role


def check_parts(codec: Codec, shape: tuple[int, ...], parts: Mapping[str, torch.Tensor]) -> None:
    """Raise BadPart for a scale or another number that is not finite, and for a group that does not exist. parts: by
    role, without the codes."""
    for role, numbers in parts.items():
        if role in ("zero", "order"):
            continue
        is_exponent = role == "scales" and numbers.dtype == torch.uint8
        is_number = bool((numbers != 255).all() if is_exponent else numbers.float().isfinite().all())
        if not is_number or (role == "overall" and not codec.multiplies and not bool(numbers.all())):
            raise BadPart(role, "has NaN, an infinite number, or a zero to divide by; expected the scales")
    if "order" in parts:
        columns = codec.block[1] if codec.block else 0
        groups = -(-shape[-1] // (columns or shape[-1]))
        least, most = map(int, parts["order"].aminmax())
        if least < 0 or most >= groups:
            raise BadPart("order", f"has group {least if least < 0 else most}; expected 0 to {groups - 1}")


def codes_of(
    codec: Codec, shape: tuple[int, ...], kept: tuple[CodeKind, int], parts: Mapping[str, torch.Tensor]
) -> Codes | None:
    """Return a weight's codes as kernels take them, its matrices below each other; None for one with NaN, with columns
    in an order of their own, or with scales beyond those that kernels multiply exactly. shape, kept: see Encoded.
    parts: the weight's tensors by role, checked."""
    (kind, group), columns = kept, shape[-1]
    scales, zero, block = _numbers(codec, shape, parts)
    if "order" in parts and not _is_in_order(parts["order"], group):
        return None
    least, most = _SCALES_OF_FP8 if kind == "fp8" else _SCALES_OF_INTEGERS
    is_taken = (scales >= least) & (scales <= most) | (scales == 0) & (kind == "fp8")
    if not bool(is_taken.all()):
        return None
    codes = _byte_rows(codec, parts["codes"], len(block))
    if codec.layout != "whole":  # integers with an offset, which zeros of transposed layouts have as well
        codes = codes[:, : -(-columns * codec.bits // 8)] ^ (0x88 if codec.bits == 4 else 0x80)
        zero = zero - (1 << (codec.bits - 1)) if zero is not None and codec.is_transposed else zero
    if zero is not None and not bool(((zero >= -128) & (zero < 128)).all()):
        return None
    if kind == "fp8" and bool(((codes & 0x7F) == 0x7F).any()):
        return None
    zeros = None if zero is None else zero.to(torch.int8).index_select(0, block)
    return Codes(kind, columns, group, codes, scales.index_select(0, block), zeros)


def _byte_rows(codec: Codec, codes: torch.Tensor, rows: int) -> torch.Tensor:
    """Return codes as the bytes of each row of the weight, (rows, bytes)."""
    if codec.layout != "awq":
        codes = codes.t() if codec.layout == "gptq" else codes
        return codes.reshape(-1).view(torch.uint8).view(rows, -1)
    # The low and the high nibbles of an item's bytes are those of rows 0 2, 4 6, 1 3, 5 7.
    whole = codes.reshape(-1).view(torch.uint8).view(len(codes), -1).t()
    whole = torch.nn.functional.pad(whole, (0, len(codes) % 2)).contiguous()
    even, odd = whole[:, ::2], whole[:, 1::2]
    both = torch.stack([even & 0xF | odd << 4, even >> 4 | odd & 0xF0], 1)
    return both.view(-1, 2, 2, 2, even.shape[1]).permute(0, 2, 3, 1, 4).reshape(-1, even.shape[1])


def _is_in_order(order: torch.Tensor, columns: int) -> bool:
    """Return whether groups are runs of neighbouring columns. order: group of each column. columns: of a group."""
    return torch.equal(order, torch.arange(len(order), device=order.device, dtype=order.dtype) // columns)


def decode(codec: Codec, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    """Decode a weight into `out` (.., out, in) bfloat16. codec: of an Encoded, with its block. parts: the weight's
    tensors by role, checked, on the device of `out`."""
    assert codec.block is not None
    columns = out.shape[-1]
    block_columns, flat = codec.block[1] or columns, out.view(-1, columns)
    scales, zero, block = _numbers(codec, out.shape, parts)
    codes, table, order = _byte_rows(codec, parts["codes"], len(flat)), _table(codec, out.device), parts.get("order")
    if order is not None and _is_in_order(order, block_columns):
        order = None  # groups of neighbours, which take no gather
    step = max(1, (_PIECE_ITEMS if out.device.type == "cpu" else _DEVICE_ITEMS) // columns)
    for begin in range(0, len(flat), step):
        rows = slice(begin, begin + step)
        values = _values(codec, codes[rows], table)[:, :columns]
        if zero is not None:
            _apply(torch.Tensor.sub_, values, zero.index_select(0, block[rows]), block_columns, order)
        _apply(torch.Tensor.mul_, values, scales.index_select(0, block[rows]), block_columns, order)
        flat[rows].copy_(values)


def encode(codec: Codec, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Encode rows of a weight, (rows, columns) of a floating dtype: codes (rows, items) as bytes, and scales (rows,
    groups) bfloat16, by role. codec: of integers in rows or of e4m3, symmetric, whose groups divide the columns. As in
    compressed_tensors, a scale is the largest weight over half the range of the codes, and codes are the quotients in
    float32, rounded to nearest, ties to even. Raises ValueError, with a clause, for a weight that is not finite."""
    assert codec.block is not None
    groups = weights.float().view(len(weights), -1, codec.block[1] or weights.shape[1])
    largest = groups.abs().amax(-1, keepdim=True)
    if not bool((largest <= _LARGEST_WEIGHT).all()):
        raise ValueError(f"has NaN, an infinite number, or one beyond {_LARGEST_WEIGHT:g}")
    is_float, below = codec.dtype == "F8_E4M3", 1 << (codec.bits - 1)
    scales = (largest / (_LARGEST_E4M3 if is_float else below - 0.5)).bfloat16()
    scales = torch.where(scales > 0, scales, 1.0)  # of zeros
    quotients = (groups / scales.float()).view(weights.shape)
    if is_float:
        codes = quotients.clamp_(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = (quotients.round_().clamp_(-below, below - 1) + below).to(torch.uint8)
    codes = codes[:, ::2] | codes[:, 1::2] << 4 if codec.bits == 4 else codes
    return {"codes": codes, "scales": scales.squeeze(-1)}


def _apply(
    op: Callable[[torch.Tensor, torch.Tensor], object],
    values: torch.Tensor,
    numbers: torch.Tensor,
    block_columns: int,
    order: torch.Tensor | None,
) -> None:
    """Combine values (rows, columns), in place, with the number of each one's block; numbers: (rows, blocks)."""
    if order is not None:
        op(values, numbers.index_select(1, order))
        return
    whole = values.shape[1] // block_columns
    cut = whole * block_columns
    if whole:
        op(values[:, :cut].view(len(values), whole, block_columns), numbers[:, :whole, None])
    if cut < values.shape[1]:
        op(values[:, cut:], numbers[:, whole:])


def _values(codec: Codec, codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the values of rows of bytes in float32 (rows, columns or more)."""
    if codec.dtype == "I8":
        return codes.view(torch.int8).float()
    return table.index_select(0, codes.reshape(-1).int()).view(torch.float32).view(len(codes), -1)


def _numbers(
    codec: Codec, shape: Sequence[int], parts: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return scales and zeros (rows of blocks, blocks of columns) in float32, zeros None if the codec has none, and the
    row of blocks of each row of the weight, int64. shape: of the weight."""
    assert codec.block is not None
    rows, height = math.prod(shape[:-1]), shape[-2]
    block_rows = codec.block[0] or height
    blocks = -(-height // block_rows)
    row = torch.arange(rows, device=parts["codes"].device)
    count = rows // height * blocks
    return (
        _scales(codec, parts, count),
        _zero(codec, parts, count, blocks),
        row // height * blocks + row % height // block_rows,
    )


def _scales(codec: Codec, parts: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
    """Return the scales (rows, blocks of columns) in float32."""
    scales = parts["scales"]
    if scales.dtype == torch.uint8:
        scales = torch.tensor(_EXPONENTS, device=scales.device)[scales.long()]
    scales = (scales.float().t() if codec.is_transposed else scales.float()).reshape(rows, -1)
    if "overall" not in parts:
        return scales
    overall = parts["overall"].reshape(-1)
    overall = overall.repeat_interleave(rows // len(overall))[:, None] if len(overall) > 1 else overall
    return scales * overall if codec.multiplies else scales / overall


def _zero(codec: Codec, parts: Mapping[str, torch.Tensor], rows: int, blocks: int) -> torch.Tensor | None:
    """Return the zeros (rows, blocks of columns) in float32; None if the codec has none. blocks: rows of scales of one
    matrix of the weight."""
    zero = parts.get("zero")
    if zero is None:
        return None
    if zero.dtype == torch.int8:
        return zero.float().reshape(rows, -1)
    table = _table(codec, zero.device)
    if codec.layout == "awq":
        return _values(codec, _byte_rows(codec, zero, blocks), table)[:blocks, : len(zero)]
    if codec.layout == "rows":
        zero = zero.transpose(-1, -2)
    groups = zero.shape[-2]
    values = _values(codec, zero.reshape(-1).view(torch.uint8).view(math.prod(zero.shape[:-1]), -1), table)[:, :blocks]
    return values.view(-1, groups, blocks).transpose(1, 2).reshape(rows, groups) + codec.zero_offset


@cache
def _table(codec: Codec, device: torch.device) -> torch.Tensor:
    """Return the values of each byte of codes: float32 (256,), or two of them as the bits of a float64, low nibble
    first."""
    byte = torch.arange(256, dtype=torch.int32)
    if codec.dtype == "F8_E4M3":
        return byte.to(torch.uint8).view(torch.float8_e4m3fn).float().to(device)
    offset = 1 << (codec.bits - 1) if codec.layout == "rows" else 0
    if codec.bits == 8:
        return (byte - offset).float().to(device)
    pairs = torch.stack([byte & 15, byte >> 4], 1)
    values = torch.tensor(_E2M1)[pairs.long()] if codec.dtype == "U8" else (pairs - offset).float()
    return values.contiguous().view(torch.float64).view(-1).to(device)
