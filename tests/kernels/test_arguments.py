"""The checks that the kernels of every device share: on the CPU's tensors, and on those of another device."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from apcbatch.kernels import arguments, recurrent_arguments, row_arguments
from apcbatch.kernels.arguments import CPU, view
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.layer import Residual
from apcbatch.kernels.row_arguments import PAGE_TOKENS
from apcbatch.kernels.threads import set_threads, threads

OTHER = torch.device("meta")  # stands for a CUDA device: nothing is computed here
F32 = torch.float32

# name -> the check of a tensor that lies on `device`, beside others that lie on `beside`
CHECKS: dict[str, Callable[[torch.device, torch.device], object]] = {
    "parameter": lambda device, beside: arguments.require_parameter(
        torch.empty(3, device=device), "A", (3,), F32, beside
    ),
    "alike": lambda device, beside: arguments.require_alike(
        torch.empty(2, 3, device=device), "up", torch.empty(2, 3, device=beside), "gate"
    ),
    "vector": lambda device, beside: arguments.float_vector(
        torch.empty(3, device=device), "weight", 3, torch.empty(2, 3, device=beside), "x"
    ),
    "tokens": lambda device, beside: recurrent_arguments.token_stride(
        torch.empty(2, 3, device=device), "dt", 2, 3, torch.empty(2, 3, device=beside)
    ),
    "slots": lambda device, beside: recurrent_arguments.slot_stride(
        torch.empty(4, 2, 3, device=device), (2, 3), F32, beside
    ),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("device", [CPU, OTHER], ids=str)
def test_a_tensor_must_lie_where_the_kernel_runs(name: str, device: torch.device) -> None:
    """Fault: the address of another memory is handed to a kernel, or a tensor of its own device is refused."""
    CHECKS[name](device, device)
    beside = OTHER if device == CPU else CPU
    place = "on the CPU" if beside == CPU else "torch.float32 on meta"
    with pytest.raises(ValueError, match=f"must be {place}, where this kernel runs; it is on {device}"):
        CHECKS[name](device, beside)


def test_a_refusal_names_the_device_where_that_is_not_the_cpu() -> None:
    """Fault: a sentence that sends the reader to another device than the kernel's."""
    wrong = torch.empty(4, 3, device=OTHER)
    x = torch.empty(2, 3, device=OTHER)
    with pytest.raises(ValueError, match=r"A must be contiguous of shape \(3,\) and torch.float32 on meta; it is"):
        arguments.require_parameter(wrong, "A", (3,), F32, OTHER)
    with pytest.raises(ValueError, match=r"dt must be torch.float32 on meta \(like x\) of shape \(2, 3\)"):
        recurrent_arguments.token_stride(wrong, "dt", 2, 3, x)
    with pytest.raises(ValueError, match=r"state must be torch.float32 on meta of shape \(num_slots, 2, 3\)"):
        recurrent_arguments.slot_stride(wrong, (2, 3), F32, OTHER)
    with pytest.raises(ValueError, match=r"A must be contiguous of shape \(3,\) and torch.float32; it is"):
        arguments.require_parameter(torch.empty(4, 3), "A", (3,), F32)


@pytest.mark.parametrize(
    ("codes", "named"),
    [
        ({torch.float32: 0, torch.bfloat16: 1}, "float32 or bfloat16"),
        ({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}, "float32, bfloat16 or float16"),
    ],
)
def test_a_dtype_is_one_that_the_device_has(codes: dict[torch.dtype, int], named: str) -> None:
    """Fault: a dtype is read as another, or the sentence names one that is refused too."""
    for dtype, code in codes.items():
        assert arguments.dtype_code(torch.empty(0, dtype=dtype), "x", codes) == code
    with pytest.raises(ValueError, match=f"x must be {named}; it is torch.float64"):
        arguments.dtype_code(torch.empty(0, dtype=torch.float64), "x", codes)


def test_all_rows_of_a_pass_on_the_cpu_are_there() -> None:
    """Fault: a batch that is filled up, as CUDA graphs have it, is computed with the rows that are not there."""
    with pytest.raises(ValueError, match="present must be None"):
        CpuBackend().residual(torch.zeros(2, 3), torch.tensor([1]))


def test_a_dimension_of_one_has_any_stride() -> None:
    """Catches a view that is refused for a step that is never taken, and one whose rows are not contiguous."""
    assert view(torch.empty_strided((3, 1, 4), (40, 7, 1)), "x")[1] == 40
    assert view(torch.empty_strided((3, 2, 4), (40, 4, 1)), "x")[1] == 40
    with pytest.raises(ValueError, match=r"x must be contiguous within a row .* strides are \(40, 7, 1\)"):
        view(torch.empty_strided((3, 2, 4), (40, 7, 1)), "x")


def test_what_a_part_left_is_added_once() -> None:
    """Catches a residual to which a part's result is added again, or not at all."""
    stream = Residual(torch.ones(2, 3), torch.zeros(2, 3))
    stream.leave(torch.ones(2, 3))
    for _ in range(2):
        assert torch.equal(stream.settled(), torch.full((2, 3), 2.0)) and not stream.has_delta


ops, zeros, strided = CpuBackend(), torch.zeros, torch.empty_strided
CACHE, META = zeros(2, PAGE_TOKENS, 2, 8), zeros(2, 3, device="meta")
OTHER_ORDER = CACHE.transpose(0, 1).contiguous().transpose(0, 1)  # the same values, not contiguous


def of_shapes(call: Callable[[torch.Tensor], object], *shapes: tuple[int, ...]) -> list[Callable[[], object]]:
    """The call with zeros of each of these shapes."""
    return [lambda shape=shape: call(zeros(shape)) for shape in shapes]


WORDS = {  # words of the sentence -> calls that it refuses, one fault each
    "x must be (4, d_inner)": of_shapes(
        lambda x: recurrent_arguments.token_rows(x, 4), (4,), (3, 2), (5, 2), (4, 0), (4, 2, 3)
    ),
    "two dimensions": [
        *of_shapes(lambda x: arguments.require_matrix(x, "x"), (3,), (1, 2, 3)),
        *of_shapes(lambda x: ops.rms_norm(x, None, 1e-5, F32), (3,)),
        *of_shapes(lambda x: ops.add_rms_norm_(x, x, None, 1e-5, F32), (3,)),
        *of_shapes(lambda x: ops.silu_mul(x, x), (3,)),
        *of_shapes(lambda x: ops.softmax_topk(x, 1), (3,)),
        *of_shapes(ops.pack_linear, (3,)),
        *of_shapes(ops.residual, (3,)),
    ],
    "up must have the shape of x": of_shapes(
        lambda up: arguments.require_alike(up, "up", zeros(2, 4), "x"), (2, 3), (2, 5), (2, 4, 1)
    ),
    "w must be (3,), one value a column": of_shapes(
        lambda w: arguments.float_vector(w, "w", 3, zeros(2, 3), "x"), (2,), (4,), (1, 3)
    ),
    "must be contiguous of shape (2, 3) and torch.float32; it is": [
        lambda: arguments.require_parameter(zeros(3, 2).t(), "A", (2, 3), F32),
        lambda: arguments.require_parameter(zeros(2, 3).double(), "A", (2, 3), F32),
        lambda: arguments.require_parameter(zeros(2, 2), "A", (2, 3), F32),
    ],
    "must be contiguous of shape (2, 3); it is": [
        lambda: arguments.require_parameter(zeros(3, 2).t(), "A", (2, 3), None)
    ],
    "must lie in [0, 2); its values span": [
        lambda: arguments.require_indices(torch.tensor([0, -1]), "rows", (2,), 2),
        lambda: arguments.require_indices(torch.tensor([2, 0]), "rows", (2,), 2),
    ],
    "must be int64 of shape (2,); it is": [
        lambda: arguments.require_indices(torch.tensor([0, 1], dtype=torch.int32), "rows", (2,), 2),
        lambda: arguments.require_indices(torch.tensor([0]), "rows", (2,), 2),
    ],
    "slots must not overlap": [lambda: recurrent_arguments.slot_stride(strided((2, 3, 4), (11, 4, 1)), (3, 4), F32)],
    "state must be torch.float32 of shape (num_slots, 3, 4)": [
        lambda: recurrent_arguments.slot_stride(zeros(3, 4), (3, 4), F32),
        lambda: recurrent_arguments.slot_stride(zeros(2, 3, 4).double(), (3, 4), F32),
        lambda: recurrent_arguments.slot_stride(strided((2, 3, 4), (40, 5, 1)), (3, 4), F32),
    ],
    "must have slot": [lambda slot=slot: recurrent_arguments.require_slots(slot, 7) for slot in (7, 9)],
    "rows must not overlap": [
        lambda: ops.add_rms_norm_(strided((2, 4), (3, 1)), zeros(2, 4), None, 1e-5, F32),
    ],
    "at most 4 columns": [lambda: row_arguments.topk_arguments(zeros(1, 5), 1, most_columns=4)],
    "k must lie in 1 to 4": [lambda: ops.softmax_topk(zeros(1, 4), 0)],
    "token must lie in [0, 4)": [lambda: ops.token_logprob(zeros(4), -1)],
    "logits must be float32": [
        lambda: ops.softmax_topk(zeros(1, 4).double(), 1),
        lambda: ops.argmax(zeros(1, 4).double()),
        lambda: ops.token_logprob(zeros(4).double(), 1),
        lambda: ops.token_logprobs(zeros(1, 4).double(), torch.tensor([1])),
    ],
    "at least one row and one column": of_shapes(ops.pack_linear, (3, 0), (0, 3)),
    "k and v must be (tokens, 2, 8)": of_shapes(
        lambda k: row_arguments.kv_arguments(k, k, CACHE, CACHE), (5, 16), (5, 3, 8), (5, 2, 9), (5, 2, 8, 1)
    ),
    "v must have the shape of k": of_shapes(
        lambda v: row_arguments.kv_arguments(zeros(5, 2, 8), v, CACHE, CACHE), (4, 2, 8)
    ),
    "k and v must have one dtype": [
        lambda: row_arguments.kv_arguments(zeros(5, 2, 8), zeros(5, 2, 8).bfloat16(), CACHE, CACHE)
    ],
    "a multiple of 2 heads, 8)": of_shapes(
        lambda q: row_arguments.attention_arguments(q, CACHE, CACHE),
        *((5, 2), (5, 4, 7), (5, 4, 9), (5, 3, 8), (5, 0, 8), (5, 4, 8, 1)),
    ),
    "the cache must be (pages, ": of_shapes(
        lambda k: row_arguments.cache_views(k, k),
        *((2, PAGE_TOKENS, 2), (2, PAGE_TOKENS - 1, 2, 8), (2, PAGE_TOKENS + 1, 2, 8)),
    ),
    "at least one kv head": of_shapes(
        lambda k: row_arguments.cache_views(k, k), (2, PAGE_TOKENS, 0, 8), (2, PAGE_TOKENS, 2, 0)
    ),
    "k_cache and v_cache must have one dtype": [lambda: row_arguments.cache_views(CACHE, CACHE.bfloat16())],
    "must be contiguous; allocate": [
        lambda: row_arguments.cache_views(CACHE, OTHER_ORDER),
        lambda: row_arguments.cache_views(OTHER_ORDER, CACHE),
    ],
    "must be on the CPU, where this kernel runs; it is on meta": [
        lambda: ops.rms_norm(META, None, 1e-5, F32),
        lambda: ops.add_rms_norm_(META, META, None, 1e-5, F32),
        lambda: ops.silu_mul(META, META),
        lambda: ops.softmax_topk(META, 1),
        lambda: ops.argmax(META),
        lambda: ops.greedy(META),
        lambda: ops.token_logprob(META[0], 1),
        lambda: ops.token_logprobs(META, torch.tensor([0, 1])),
        lambda: ops.pack_linear(META),
        lambda: ops.linear(META, ops.pack_linear(torch.ones(2, 3))),
        lambda: ops.write_kv(CACHE[0].to("meta"), CACHE[0].to("meta"), CACHE, CACHE, torch.arange(PAGE_TOKENS)),
        lambda: ops.write_kv(CACHE[0], CACHE[0], CACHE.to("meta"), CACHE.to("meta"), torch.arange(PAGE_TOKENS)),
        lambda: arguments.require_indices(zeros(2, dtype=torch.int64, device="meta"), "rows", (2,), 2),
    ],
    "at least one thread": [lambda: set_threads(0)],
}


@pytest.mark.parametrize("words", WORDS)
def test_each_fault_is_refused_alone(words: str) -> None:
    """Fault: a check that looks at one side of a bound, at one of two conditions, or that another one hides."""
    for number, call in enumerate(WORDS[words]):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
            pytest.fail(f"call {number} is not refused")


def test_what_lies_at_a_bound_is_taken() -> None:
    """Fault: a bound that is one too narrow, and a stride that is refused though no step takes it."""
    assert recurrent_arguments.slot_stride(torch.empty_strided((2, 3, 4), (12, 4, 1)), (3, 4), F32) == 12
    assert recurrent_arguments.slot_stride(torch.empty_strided((1, 3, 4), (0, 4, 1)), (3, 4), F32) == 0
    assert recurrent_arguments.token_stride(torch.empty_strided((4, 1), (5, 3)), "B", 4, 1, torch.zeros(4, 2)) == 5
    recurrent_arguments.require_slots(6, 7)
    ops.add_rms_norm_(torch.empty_strided((1, 4), (0, 1)).zero_(), torch.zeros(1, 4), None, 1e-5, torch.float32)
    row_arguments.topk_arguments(torch.zeros(1, 4), 1, most_columns=4)
    assert arguments.require_indices(torch.tensor([1, 9, 0])[::2], "rows", (2,), 2).tolist() == [1, 0]
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    ends = torch.tensor([logits[0], logits[3]]) - logits.logsumexp(0)
    found = ops.token_logprobs(logits.expand(2, 4), torch.tensor([0, 3]))
    torch.testing.assert_close(found, ends)
    assert [ops.token_logprob(logits, token) for token in (0, 3)] == found.tolist()
    assert ops.token_logprobs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    before = threads()
    set_threads(1)
    assert threads() == 1
    set_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_of_another_stride_or_dtype_is_read_as_its_values(dtype: torch.dtype) -> None:
    """Fault: the address of a strided vector, or of one of 16 bits, is handed on as contiguous float32."""
    weight = torch.arange(8.0).to(dtype)[::2]
    for one in (weight, weight.contiguous()):
        found = arguments.float_vector(one, "weight", 4, torch.zeros(2, 4), "x")
        assert found.is_contiguous() and found.dtype == F32 and found.tolist() == [0, 2, 4, 6]
