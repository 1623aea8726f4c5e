"""Weights that stay encoded on a CUDA device: the bits of the same weights decoded, in every product of them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from apcbatch.kernels.backend import StackEntry
from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.kernels.cuda.coded import CodedWeight
from apcbatch.kernels.cuda.experts import GroupedExperts
from apcbatch.kernels.cuda.feed_forward import DeviceMlp
from apcbatch.kernels.cuda.program import DeviceStack
from apcbatch.kernels.cuda.residual import DeviceResidual
from apcbatch.kernels.encoded_rows import CodeKind, Codes, EncodedRows
from apcbatch.kernels.layer import Expert, PreNorm
from tests.kernels.recurrent import ragged, same_bits

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda", 0)
KINDS: list[CodeKind] = ["fp8", "int8", "int4"]
GROUPS = [128, 64, 32, 0]  # 0: all columns
ROWS = [1, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 200]  # of x
# out, in: few rows of weights in several pieces, many in one, tails of tiles and of slices, pieces without whole groups
SHAPES = [(16, 32), (48, 160), (81, 1056), (192, 5120), (305, 288), (2049, 512), (2560, 192), (5000, 1024)]


def draw_codes(kind: CodeKind, rows: int, columns: int, group: int, scale: float = 0.02) -> Codes:
    """All codes but NaN, with scales of bfloat16 between a quarter of this one and four times it, some negative."""
    group = group or columns
    codes = torch.randint(256, (rows, columns // (2 if kind == "int4" else 1)), dtype=torch.uint8, device=DEVICE)
    if kind == "fp8":
        codes[codes & 0x7F == 0x7F] = 0x3C
    groups = -(-columns // group)
    scales = scale * torch.exp2(torch.rand(rows, groups, device=DEVICE) * 4 - 2)
    scales = (scales * (torch.rand_like(scales) - 0.1).sign()).bfloat16().float()
    has_zeros = kind == "int4" and random.random() < 0.5
    zeros = torch.randint(-8, 8, scales.shape, dtype=torch.int8, device=DEVICE) if has_zeros else None
    return Codes(kind, columns, group, codes, scales, zeros)


def packed_twice(weight: EncodedRows, exact: bool = True) -> tuple[object, object]:
    """The weights encoded, and decoded."""
    backend = CudaBackend(DEVICE, exact)
    kept = backend.pack_linear(weight)
    assert isinstance(kept.weight, CodedWeight)
    return kept, backend.pack_linear(weight.decoded())


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_decode_to_the_bits_of_the_codec(kind: CodeKind, group: int) -> None:
    """Catches a code, a sign or a subnormal that is decoded otherwise, a rounding to another side, a scale of another
    row or group, and rows or columns that are left out."""
    for rows, columns in [(256, 32), (16, 128), (77, 1056), (1000, 288), (3, 96)]:
        codes = draw_codes(kind, rows, columns, group)
        every = torch.tensor([i for i in range(256) if i != 0x7F], device=DEVICE)
        codes.codes.view(-1)[:255] = every[: codes.codes.numel()]
        if kind == "fp8":
            codes.codes[codes.codes == 0xFF] = 0xFE
        codes.scales.mul_(torch.exp2(torch.randint(-90, 5, codes.scales.shape, device=DEVICE).float()))
        codes.scales.view(-1)[1::7] = 0.0
        kept, _ = packed_twice(EncodedRows.of(codes))
        kept.weight._scratch.memory.fill_(torch.nan)
        expected = codes.decoded()
        assert same_bits(kept.weight.decoded(), expected), (rows, columns)
        some = torch.tensor([rows - 1, 0], device=DEVICE)
        assert same_bits(kept.rows(some), expected[some])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_has_the_bits_of_decoded_weights(outputs: int, inputs: int, kind: CodeKind, group: int) -> None:
    """Catches weights or scales that are read from another row, group, slice, piece or stage of the ring, tails that
    are left out, results in another column, and a number of rows with other bits."""
    kept, plain = packed_twice(EncodedRows.of(draw_codes(kind, outputs, inputs, group)))
    backend = CudaBackend(DEVICE, True)
    x = torch.randn(max(ROWS), inputs, device=DEVICE).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        expected = backend.linear(x, plain, out_dtype=dtype)
        for rows in ROWS:
            assert same_bits(backend.linear(x[:rows], kept, out_dtype=dtype), expected[:rows]), (rows, dtype)
    columns = torch.cat([x, x], dim=1)[:, :inputs]
    assert torch.equal(backend.linear(columns[:5], kept), backend.linear(x[:5], kept))


@pytest.mark.parametrize("exact", [True, False])
def test_rows_of_several_kinds_make_one_matrix(exact: bool) -> None:
    """Catches runs in another order, a run in the columns of another one, and rows that are not encoded and are decoded
    or left out."""
    inputs, scale = 512, torch.rand(20_000, device=DEVICE)
    for sizes in [(1, 1, 1), (96, 16, 5), (1030, 32, 3000), (33, 2, 64)]:
        parts = [
            EncodedRows.of(draw_codes("fp8", sizes[0], inputs, 128)),
            EncodedRows.of(torch.randn(sizes[1], inputs, device=DEVICE).bfloat16()),
            EncodedRows.of(draw_codes("int8", sizes[2], inputs, 0))[torch.randperm(sizes[2])],
        ]
        weight, backend = torch.cat(parts), CudaBackend(DEVICE, exact)
        if min(sizes) < 16:
            weight = torch.cat([EncodedRows.of(draw_codes("int8", 64, inputs, 128)), weight])
        kept, plain = packed_twice(weight, exact)
        assert len(kept.weight.parts) > 1 and torch.equal(kept.weight.decoded(), plain.weight)
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
            assert torch.equal(backend.linear(x, kept), backend.linear(x, plain)), (sizes, rows)
        scales = scale[: len(weight)]
        scaled = [backend.pack_linear(one, scales) for one in (weight, weight.decoded())]
        assert torch.equal(*(backend.linear(x, one) for one in scaled))


def draw_experts(kind: CodeKind, group: int, count: int, hidden: int, inner: int, is_gated: bool) -> list[list[Expert]]:
    """The same experts encoded and decoded, with a scale of the down projection or without."""
    scale = torch.rand(hidden, device=DEVICE) if random.random() < 0.5 else None
    backend, both = CudaBackend(DEVICE, True), [[], []]  # type: ignore[var-annotated]
    for _ in range(count):
        gate_up = EncodedRows.of(draw_codes(kind, (2 if is_gated else 1) * inner, hidden, group, 0.01 * hidden**-0.5))
        down = EncodedRows.of(draw_codes(kind, hidden, inner, group))
        for experts, weights in zip(both, [(gate_up, down), (gate_up.decoded(), down.decoded())], strict=True):
            experts.append(Expert(backend.pack_linear(weights[0]), backend.pack_linear(weights[1], scale), is_gated))
    return both


@pytest.mark.parametrize(("hidden", "inner"), [(32, 32), (288, 96), (96, 1056), (512, 1056), (1536, 544), (2048, 512)])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_have_the_bits_of_decoded_ones(kind: CodeKind, is_gated: bool, hidden: int, inner: int) -> None:
    """Catches, in tiles of 8, 32 and more tokens, codes and scales of another row, group, expert or stage, rows of gate
    in place of up, and tails of rows, inputs and tokens."""
    counts = [0, 1, 15, 16, 17, 0, 127, 128, 129, 700, 31, 33, 0]
    backend = CudaBackend(DEVICE, True)
    for group in GROUPS:
        kept, plain = map(GroupedExperts, draw_experts(kind, group, len(counts), hidden, inner, is_gated))
        assert kept.is_supported and plain.is_supported
        chosen = torch.arange(len(counts), device=DEVICE).repeat_interleave(torch.tensor(counts, device=DEVICE))
        chosen = chosen[torch.randperm(len(chosen), device=DEVICE)].unsqueeze(1)
        x = torch.randn(len(chosen), hidden, device=DEVICE).bfloat16()
        weights = torch.rand(chosen.shape, device=DEVICE)
        expected = plain.mixture(x, weights, chosen, None)
        assert expected.isfinite().all() and expected.any()
        assert torch.equal(kept.mixture(x, weights, chosen, None), expected), group
        for t in (1, 5, 8, 9, 32, 100, 300):
            some = slice(random.randrange(len(x) - t), None)
            mine = [one[some][:t] for one in (x, weights, chosen)]
            assert torch.equal(kept.mixture(*mine, None), expected[some][:t]), (group, t)
    for experts in (2, 64):  # several choices, as a router makes them
        kept, plain = map(GroupedExperts, draw_experts(kind, 128, experts, hidden, inner, is_gated))
        for t in (1, 8, 31, 200):
            x = torch.randn(t, hidden, device=DEVICE).bfloat16()
            routed = backend.route(torch.randn(t, experts, device=DEVICE) * 2, 2)
            assert torch.equal(kept.mixture(x, *routed, None), plain.mixture(x, *routed, None)), (experts, t)


def test_experts_that_are_encoded_otherwise_run_one_by_one() -> None:
    """Catches one expert's codes read by another's kind or group, or as bfloat16."""
    one, other = draw_experts("fp8", 128, 1, 256, 256, True), draw_experts("int8", 128, 1, 256, 256, True)
    apart = draw_experts("fp8", 64, 1, 256, 256, True)
    assert GroupedExperts(one[0]).is_supported
    for second in (other[0], apart[0], one[1]):
        assert not GroupedExperts([*one[0], *second]).is_supported


@pytest.mark.parametrize("group", [128, 64, 0])
def test_listed_launches_and_a_graph_have_the_same_bits(group: int) -> None:
    """Catches a matrix that is decoded after the product that reads it, or over one that is still read, and an address
    that a list or a captured graph keeps."""
    hidden, inner = 256, 1536
    norm = PreNorm(torch.rand(hidden, device=DEVICE), 1e-6)
    both: list[list[DeviceMlp]] = [[], []]
    backend = CudaBackend(DEVICE, True)
    for _ in range(4):
        rows = 2 * inner - (64 if group == 64 else 0)
        gate_up = EncodedRows.of(draw_codes("fp8", rows, hidden, group, 0.002))
        if rows < 2 * inner:
            gate_up = torch.cat([gate_up, torch.randn(64, hidden, device=DEVICE).bfloat16()])  # type: ignore[list-item]
        down = EncodedRows.of(draw_codes(random.choice(KINDS), hidden, inner, group))
        for parts, weights in zip(both, [(gate_up, down), (gate_up.decoded(), down.decoded())], strict=True):
            parts.append(DeviceMlp(norm, Expert(*map(backend.pack_linear, weights))))
    for lengths in ([3], [40, 2], [20, 50], [150, 90]):
        begin, batch = torch.randn(sum(lengths), hidden, device=DEVICE), ragged(lengths)

        def passed(parts: list[DeviceMlp], run: object, begin: torch.Tensor = begin) -> torch.Tensor:
            residual = DeviceResidual(begin.clone(), begin)
            run(parts, residual)  # type: ignore[operator]
            return residual.settled()

        def one_by_one(parts: list[DeviceMlp], residual: DeviceResidual, batch: object = batch) -> None:
            for part in parts:
                part(residual, batch)  # type: ignore[arg-type]

        def listed(parts: list[DeviceMlp], residual: DeviceResidual, batch: object = batch) -> None:
            entries = [StackEntry(part, False, lambda *_: pytest.fail("op by op")) for part in parts]
            DeviceStack(entries, hidden, DEVICE)(residual, SimpleNamespace(ragged=batch))

        expected = passed(both[1], one_by_one)
        assert torch.equal(passed(both[0], one_by_one), expected), lengths
        assert torch.equal(passed(both[0], listed), expected), lengths
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = passed(both[0], one_by_one)
        both[0][0]._expert.gate_up.weight._scratch.memory.fill_(torch.nan)
        for _ in range(2):
            made.fill_(torch.nan)
            graph.replay()
            assert torch.equal(made, expected), lengths


def test_what_is_kept() -> None:
    """Catches values that the kernels read wrongly, and codes that take more memory than they should."""
    rows = 256
    backend, weight = CudaBackend(DEVICE, True), EncodedRows.of(draw_codes("fp8", rows, 2048, 128))
    assert backend.pack_linear(weight).weight.bytes <= 1.04 * rows * 2048
    four = EncodedRows.of(draw_codes("int4", rows, 2048, 128))
    assert backend.pack_linear(four).weight.bytes <= 1.07 * rows * 1024
    assert backend.pack_linear(weight, dtype=torch.float32).weight.dtype == torch.float32
    for change in ({"scales": 0.3}, {"scales": 2.0**8}, {"scales": 2.0**-120}, {"scales": torch.nan}, {"codes": 0xFF}):
        codes = draw_codes("fp8", rows, 256, 128)
        for name, value in change.items():
            getattr(codes, name)[-1, -1] = value
        other = backend.pack_linear(EncodedRows.of(codes)).weight
        assert torch.equal(other.nan_to_num(), codes.decoded().nan_to_num()), change
