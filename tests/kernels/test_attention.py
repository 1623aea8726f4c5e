"""Paged attention: right against float64, and a query's bits a function of its position and its past
alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.arguments import PAGE_TOKENS as PAGE
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.layer import AttentionWeights, PreNorm
from apcbatch.kernels.processor import set_isa
from tests.effort import table, tries

ops = CpuBackend()

pytestmark = pytest.mark.pairwise

FLOATS = [torch.float32, torch.bfloat16]


@dataclass
class Case:
    """Sequences whose pages lie in random order in a cache that is NaN wherever nothing was written: the arguments of
    paged_attention, in its order."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    cu_seqlens: torch.Tensor
    context: torch.Tensor
    scale: float

    def attend(self) -> torch.Tensor:
        return ops.paged_attention(*vars(self).values())

    def expected(self) -> torch.Tensor:
        """The reference in float64."""
        return reference.paged_attention(*vars(replace(self, q=self.q.double())).values())

    def piece(self, sequence: int, begin: int, end: int) -> torch.Tensor:
        """Queries [begin, end) of one sequence's piece, attended alone."""
        first, one = int(self.cu_seqlens[sequence]), slice(sequence, sequence + 1)
        return replace(
            self, q=self.q[first + begin : first + end], page_table=self.page_table[one],
            cu_seqlens=torch.tensor([0, end - begin]), context=self.context[one] + begin,
        ).attend()  # fmt: skip


def make_case(
    lengths: list[int], context: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Case:
    torch.manual_seed(sum(lengths) + head_dim)
    totals = [a + b for a, b in zip(lengths, context, strict=True)]
    needed = [(total + PAGE - 1) // PAGE for total in totals]
    pages = torch.randperm(sum(needed) + 3)
    page_table = torch.full((len(lengths), max(needed) + 1), -7)
    k_cache = torch.full((len(pages), PAGE, kv_heads, head_dim), torch.nan, dtype=dtype)
    v_cache = k_cache.clone()
    new_slots = []
    for i, total in enumerate(totals):
        page_table[i, : needed[i]] = pages[sum(needed[:i]) : sum(needed[: i + 1])]
        positions = torch.arange(total)
        slots = page_table[i, positions // PAGE] * PAGE + positions % PAGE
        old, new = slots[: context[i]], slots[context[i] :]
        k_cache.flatten(0, 1)[old] = torch.randn(len(old), kv_heads, head_dim).to(dtype)
        v_cache.flatten(0, 1)[old] = torch.randn(len(old), kv_heads, head_dim).to(dtype)
        new_slots.append(new)
    qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, head_dim).to(dtype) * 2
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    ops.write_kv(k, v, k_cache, v_cache, torch.cat(new_slots))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return Case(q, k_cache, v_cache, page_table, cu_seqlens, torch.tensor(context), head_dim**-0.5)


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(1, 1, 5), (4, 2, 16), (3, 3, 24), (7, 1, 33), (8, 2, 64), (4, 1, 128), (6, 2, 256)]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_float64(heads, kv_heads, head_dim, dtype, isa):
    """A wrong page, head or mask; what lies in pages past a sequence's end (NaN here) reaching a result."""
    case = make_case([1, 64, 5, 1, 130], [0, 0, 63, 200, 70], heads, kv_heads, head_dim, dtype)
    y = case.attend()
    expected = case.expected()
    assert y.dtype == dtype and y.is_contiguous()
    tolerance = 3e-5 if dtype == torch.float32 else 1e-2  # of a value of 1, and in proportion above
    assert float(((y.double() - expected).abs() / expected.abs().clamp(min=1)).max()) < tolerance


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(6, 2, 16), (4, 4, 64), (10, 1, 20), (4, 2, 256)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cuts_change_nothing(heads, kv_heads, head_dim, dtype, isa):
    """Cached == cold: a query's bits must not depend on where its prefill was cut, or on being decoded
    alone."""
    case = make_case([300, 77], [0, 61], heads, kv_heads, head_dim, dtype)
    whole = case.attend()
    for sequence, length in enumerate((300, 77)):
        first = int(case.cu_seqlens[sequence])
        for _ in range(tries(20)):
            cuts = [0, *sorted(random.sample(range(1, length), random.randint(1, 9))), length]
            for begin, end in zip(cuts, cuts[1:], strict=False):
                assert torch.equal(case.piece(sequence, begin, end), whole[first + begin : first + end])
        for position in range(0, length, 23):
            alone = case.piece(sequence, position, position + 1)
            assert torch.equal(alone[0], whole[first + position])


@table("dtype", FLOATS)
def test_later_tokens_cannot_be_seen(dtype, isa):
    """A mask that multiplies by zero lets an infinity of a later token through."""
    case = make_case([100], [30], 4, 2, 16, dtype)
    before = case.attend()
    slots = case.page_table[0, torch.arange(90, 130) // PAGE] * PAGE + torch.arange(90, 130) % PAGE
    case.k_cache.flatten(0, 1)[slots] = torch.inf
    case.v_cache.flatten(0, 1)[slots] = torch.nan
    after = case.attend()
    assert torch.equal(after[:60], before[:60])  # positions 30 to 89
    assert after[60:].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_threads_and_instruction_sets_give_the_same_bits(dtype, every_isa, threads):
    """A split of the work, or a vector width, that changes a sum."""
    case = make_case([1, 150, 40], [129, 3, 64], 6, 2, 20, dtype)
    for isa in every_isa:
        set_isa(isa)
        torch.set_num_threads(threads)
        y = case.attend()
        set_isa("amx" if isa == "amx" and dtype == torch.bfloat16 else "plain")
        torch.set_num_threads(1)
        assert torch.equal(case.attend(), y), isa


def test_large_scores_neither_overflow_nor_vanish(isa):
    """A softmax without the running maximum: scores of +-1e4 and a maximum that grows from page to page."""
    case = make_case([130], [0], 1, 1, 8, torch.float32)
    case.k_cache *= torch.where(case.k_cache.isnan(), 1.0, 3e3)
    expected = case.expected()
    y = case.attend()
    assert bool(y.isfinite().all())
    assert float((y.double() - expected).abs().max()) < 0.05


@table("dtype", FLOATS)
@table("cache_dtype", FLOATS)
def test_write_kv_touches_its_rows_only(dtype, cache_dtype, isa):
    """A key written into a neighbour's page, or truncated instead of rounded."""
    cache = torch.full((5, PAGE, 2, 7), 9.0, dtype=cache_dtype)
    expected_k, expected_v = cache.clone(), cache.clone()
    k_cache, v_cache = cache.clone(), cache.clone()
    kv = torch.randn(70, 4, 7).to(dtype)
    slots = torch.randperm(5 * PAGE)[:70]
    ops.write_kv(kv[:, :2], kv[:, 2:], k_cache, v_cache, slots)
    reference.write_kv(kv[:, :2], kv[:, 2:], expected_k, expected_v, slots)
    assert torch.equal(k_cache, expected_k) and torch.equal(v_cache, expected_v)
    ops.write_kv(kv[:1, :2], kv[:1, 2:], k_cache, v_cache, torch.tensor([5 * PAGE - 1]))
    assert torch.equal(k_cache[-1, -1], kv[0, :2].to(cache_dtype))
    for slot in (-1, 5 * PAGE):
        with pytest.raises(ValueError, match=f"token_slots must .*{5 * PAGE}"):
            ops.write_kv(kv[:1, :2], kv[:1, 2:], k_cache, v_cache, torch.tensor([slot]))


def test_no_tokens_are_no_work():
    """An empty batch, or an empty piece among others."""
    case = make_case([3, 2], [0, 64], 2, 1, 8, torch.float32)
    whole = case.attend()
    case.cu_seqlens = torch.tensor([0, 3, 3, 5])
    case.page_table = case.page_table[[0, 0, 1]]
    case.context = torch.tensor([0, 3, 64])
    assert torch.equal(case.attend(), whole)


@table("change, sentence", [
    ({"page_table": torch.tensor([[0, 5, -1]])}, r"page_table must name pages in \[0, "),
    ({"page_table": torch.tensor([[0]])}, "a column for each page of the longest sequence; it has 1"),
    ({"page_table": torch.tensor([0, 1])}, r"page_table must be int64 of shape \(1, 2\) on the CPU; it is"),
    ({"page_table": torch.tensor(0)}, r"page_table must be int64 of shape \(1, 0\)"),
    ({"page_table": torch.zeros(1, 2, dtype=torch.int64, device="meta")}, "on the CPU; .* on meta"),
    ({"cu_seqlens": torch.tensor([0, 70, 70])}, r"cu_seqlens must be int64 of shape \(2,\)"),
    ({"cu_seqlens": torch.tensor([0, 69])}, "cu_seqlens must ascend from 0 to the 70 tokens of q"),
    ({"context": torch.tensor([-1])}, "context must not be negative"),
    ({"context": torch.tensor([0], dtype=torch.int32)}, "context must be int64"),
    ({"q": torch.randn(70, 3, 8)}, "a multiple of 2 heads, 8"),
    ({"k_cache": torch.randn(4, 32, 2, 8)}, r"the cache must be \(pages, 64, |must have the shape of"),
])  # fmt: skip
def test_unusable_arguments_are_sentences(change, sentence):
    """Page numbers and offsets that the kernel would follow out of the cache."""
    case = make_case([70], [0], 4, 2, 8, torch.float32)
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(ValueError, match=sentence):
        case.attend()


@table(
    "qkv, o, heads",
    [((63, 32), (32, 32), 4), ((65, 32), (32, 32), 4), ((64, 31), (32, 32), 4), ((64, 32), (33, 32), 4),
     ((64, 32), (32, 31), 4), ((56, 24), (24, 24), 3)],
)  # fmt: skip
def test_a_mixer_that_does_not_fit_its_cache_is_refused(qkv, o, heads):
    """Fault: addresses of projections of another shape or dtype, or heads that share no kv head evenly."""
    cache, norm, wide = torch.zeros(2, PAGE, 2, 8), PreNorm(torch.ones(32), 1e-5), torch.zeros(32, 32)
    good = AttentionWeights(ops.pack_linear(torch.zeros(64, 32)), ops.pack_linear(wide), 4, 1.0, None, False)
    ops.sub_block("attention", norm, good, cache, cache)
    qkv_proj, o_proj = (ops.pack_linear(torch.zeros(shape)) for shape in (qkv, o))
    wrong = replace(good, qkv_proj=qkv_proj, o_proj=o_proj, heads=heads)
    for weights in (wrong, replace(good, o_proj=ops.pack_linear(wide.bfloat16()))):
        with pytest.raises(ValueError, match="qkv_proj, o_proj and their dtype must be"):
            ops.sub_block("attention", norm, weights, cache, cache)
