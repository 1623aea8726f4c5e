"""Weights that stay encoded: products with codes have the bits of products with the decoded weights."""

from __future__ import annotations

import random

import pytest
import torch

from apcbatch.kernels.cpu.linear import pack_linear
from apcbatch.kernels.cpu.ops import ops
from apcbatch.kernels.encoded_rows import CodeKind, Codes, EncodedRows
from apcbatch.kernels.processor import set_isa
from tests.effort import tries

INPUTS = (1, 2, 31, 70, 128, 255, 256, 257, 300, 511, 512, 1025)
ROWS = (1, 5, 16, 17, 32, 48, 100, 200)
SCALES = torch.float32, torch.bfloat16, torch.float16
TOKENS = (1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 33, 150)


def drawn(kind: CodeKind, rows: int, columns: int, group: int, has_zeros: bool, dtype: torch.dtype) -> Codes:
    """Random codes. dtype: of the scales."""
    groups = -(-columns // group)
    codes = torch.randint(0, 256, (rows, -(-columns // 2) if kind == "int4" else columns), dtype=torch.uint8)
    if kind == "fp8":
        codes[(codes & 127) == 127] = 0
    scales = torch.exp(torch.randn(rows, groups) * 4 - 5)
    scales = scales.clamp(2.0**-14 if dtype == torch.float16 else 2.0**-60, 2.0**5).to(dtype).float()
    zeros = torch.randint(-8, 9, (rows, groups), dtype=torch.int8) if has_zeros else None
    return Codes(kind, columns, group, codes, scales, zeros)


def bits(one: torch.Tensor) -> torch.Tensor:
    return one.view(torch.int16 if one.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.slow
@pytest.mark.drawn(3)
def test_a_product_with_codes_has_the_bits_of_one_with_decoded_weights(every_isa: list[str]) -> None:
    """Catches a rounding, a zero's sign, a group, a short block, a padded input, a row beside a run of codes, or a
    number of rows, at which a product in some instruction set is not that of the decoded weights."""
    for _ in range(tries(30)):
        columns, parts, decoded = random.choice(INPUTS), [], []
        for _ in range(random.choice((1, 1, 2, 3))):
            rows, kind = random.choice(ROWS), random.choice(("int8", "int4", "fp8", None))
            if kind is None:
                parts.append(torch.randn(rows, columns).bfloat16())
                decoded.append(parts[-1])
                continue
            group = min(random.choice((2, 8, 32, 64, 128, 256, 512, columns)), columns)
            has_zeros = kind != "fp8" and random.random() < 0.4
            codes = drawn(kind, rows, columns, group, has_zeros, random.choice(SCALES))
            parts.append(EncodedRows.of(codes))
            decoded.append(codes.decoded())
        matrix = torch.cat([EncodedRows.of(parts[0]) if isinstance(parts[0], torch.Tensor) else parts[0], *parts[1:]])
        expected = torch.cat(decoded)
        assert torch.equal(bits(matrix.decoded()), bits(expected))
        for dtype in (torch.bfloat16, torch.float32):
            scale = torch.rand(len(expected)) + 0.5 if random.random() < 0.3 else None
            codes, plain = pack_linear(matrix, scale, dtype), pack_linear(expected, scale, dtype)
            for tokens in random.sample(TOKENS, 4):
                x = torch.randn(tokens, columns).to(dtype)
                for isa in every_isa:
                    set_isa(isa)
                    assert torch.equal(bits(ops.linear(x, codes)), bits(ops.linear(x, plain))), (
                        isa, columns, [len(one) for one in parts], dtype, tokens,
                    )  # fmt: skip


def test_rows_are_selected_as_those_of_a_tensor() -> None:
    """Catches a row of another matrix, group or source after what families do with weights before they pack them."""
    first, second = drawn("int4", 48, 70, 32, True, torch.float16), drawn("fp8", 24, 70, 70, False, torch.float32)
    rows, others = EncodedRows.of(first, 4, 12), EncodedRows.of(second)
    plain, beside = first.decoded().view(4, 12, 70), second.decoded()
    left, right = torch.split(rows, [5, 7], 1)
    cut = torch.split(plain, [5, 7], 1)
    found = torch.cat([right.reshape(-1, 70), torch.zeros(3, 70).bfloat16(), others, left.view(-1, 70), rows[2]])
    expected = torch.cat(
        [cut[1].reshape(-1, 70), torch.zeros(3, 70).bfloat16(), beside, cut[0].reshape(-1, 70), plain[2]]
    )
    assert found.shape == expected.shape and len(found) == len(expected) and torch.equal(found.decoded(), expected)
    runs = list(found.runs(16))
    assert [(begin, end) for begin, end, _ in runs] == [(0, 16), (16, 32), (32, 48), (48, 64), (64, 87)]
    kinds = [one.kind if isinstance(one, Codes) else None for _, _, one in runs]
    assert kinds == ["int4", None, "fp8", None, "int4"]
    for begin, end, one in runs:
        assert torch.equal(one.decoded() if isinstance(one, Codes) else one, expected[begin:end])
