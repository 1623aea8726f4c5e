"""The checks that the kernels of every device share: on the CPU's tensors, and on those of another device."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from apcbatch.kernels import arguments
from apcbatch.kernels.arguments import CPU, PAGE_TOKENS, view
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.kernels.cuda.residual import DeviceResidual
from apcbatch.kernels.layer import Residual
from apcbatch.kernels.processor import num_threads, set_threads
from tests.effort import table

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
    "tokens": lambda device, beside: arguments.token_stride(
        torch.empty(2, 3, device=device), "dt", 2, 3, torch.empty(2, 3, device=beside)
    ),
    "slots": lambda device, beside: arguments.slot_stride(torch.empty(4, 2, 3, device=device), (2, 3), F32, beside),
}


@table("name", CHECKS)
@table("device", [CPU, OTHER])
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
        arguments.token_stride(wrong, "dt", 2, 3, x)
    with pytest.raises(ValueError, match=r"state must be torch.float32 on meta of shape \(num_slots, 2, 3\)"):
        arguments.slot_stride(wrong, (2, 3), F32, OTHER)
    with pytest.raises(ValueError, match=r"A must be contiguous of shape \(3,\) and torch.float32; it is"):
        arguments.require_parameter(torch.empty(4, 3), "A", (3,), F32)


def test_a_dtype_is_one_that_the_kernels_have() -> None:
    """Fault: a dtype is read as another, by the CPU's kernels or those of a CUDA device."""
    for dtype, code in ((torch.float32, 0), (torch.bfloat16, 1)):
        assert arguments.dtype_code(torch.empty(0, dtype=dtype), "x") == code
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(ValueError, match=f"x must be float32 or bfloat16; it is {dtype}"):
            arguments.dtype_code(torch.empty(0, dtype=dtype), "x")
        with pytest.raises(ValueError, match=f"weight must be float32 or bfloat16; it is {dtype}"):
            CudaBackend(torch.device("cuda", 0), exact=True).pack_linear(torch.empty(2, 3), dtype=dtype)


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


@pytest.mark.parametrize("kind", [Residual, DeviceResidual])
def test_what_a_part_left_is_added_once(kind: type[Residual]) -> None:
    """Catches a residual to which a part's result is added again, or not at all."""
    stream = kind(torch.ones(2, 3), torch.full((2, 3), 7.0))
    assert torch.equal(stream.settled(), torch.ones(2, 3))
    stream.leave(torch.ones(2, 3))
    for _ in range(2):
        assert torch.equal(stream.settled(), torch.full((2, 3), 2.0)) and not stream.has_delta


ops, zeros, strided = CpuBackend(), torch.zeros, torch.empty_strided
indices, parameter, slots = arguments.require_indices, arguments.require_parameter, arguments.slot_stride
cached = arguments.cache_views
kv = lambda k, v: ops.write_kv(k, v, CACHE, CACHE, ALL[:5])  # noqa: E731
attend = lambda q: ops.paged_attention(q, CACHE, CACHE, ALL.view(1, -1), ALL[:2], ALL[:1], 1.0)  # noqa: E731
CACHE, META = zeros(2, PAGE_TOKENS, 2, 8), zeros(2, 3, device="meta")
META_CACHE, ALL, PACKED = CACHE.to("meta"), torch.arange(PAGE_TOKENS), ops.pack_linear(zeros(3, 5))
OTHER_ORDER = CACHE.transpose(0, 1).contiguous().transpose(0, 1)  # the same values, not contiguous
WORDS = {  # words of the sentence -> (a call, what it refuses, each for one fault)
    "x must be (4, d_inner)": (
        lambda shape: arguments.token_rows(zeros(shape), 4), [(4,), (3, 2), (5, 2), (4, 0), (4, 2, 3)]
    ),
    "x must have two dimensions": (lambda x: arguments.require_matrix(x, "x"), [zeros(3), zeros(1, 2, 3)]),
    "have two dimensions": (
        lambda op: op(zeros(3)),
        [ops.pack_linear, ops.residual, ops.relu_square, lambda x: ops.rms_norm(x, None, 1e-5, F32),
         lambda x: ops.silu_mul(x, x), lambda x: ops.route(x, 1), lambda x: ops.add_rms_norm_(x, x, None, 1e-5, F32),
         lambda x: ops.linear(x, PACKED)],
    ),
    "up must have the shape of x": (
        lambda up: arguments.require_alike(up, "up", zeros(2, 4), "x"), [zeros(2, 3), zeros(2, 5), zeros(2, 4, 1)]
    ),
    "w must be (3,), one value a column": (
        lambda w: arguments.float_vector(w, "w", 3, zeros(2, 3), "x"), [zeros(2), zeros(4), zeros(1, 3)]
    ),
    "must be contiguous of shape (2, 3) and torch.float32; it is": (
        lambda A: parameter(A, "A", (2, 3), F32), [zeros(3, 2).t(), zeros(2, 3).double(), zeros(2, 2)]
    ),
    "must lie in [0, 2); its values span": (
        lambda rows: indices(torch.tensor(rows), "rows", (2,), 2), [[0, -1], [2, 0]]
    ),
    "must be int64 of shape (2,); it is": (lambda rows: indices(rows, "rows", (2,), 2), [ALL[:2].int(), ALL[:1]]),
    "slots must not overlap": (lambda state: slots(state, (3, 4), F32), [strided((2, 3, 4), (11, 4, 1))]),
    "state must be torch.float32 of shape (num_slots, 3, 4)": (
        lambda state: slots(state, (3, 4), F32),
        [zeros(3, 4), zeros(2, 3, 4).double(), strided((2, 3, 4), (40, 5, 1))],
    ),
    "must have slot": (lambda slot: arguments.require_slots(slot, 7), [7, 9]),
    "k must lie in 1 to 4": (lambda k: ops.route(zeros(1, 4), k), [0, 5]),
    "logits must be float32": (
        lambda op: op(zeros(1, 4).double()),
        [ops.argmax, ops.greedy, lambda x: ops.greedy(x.bfloat16()), lambda x: ops.route(x, 1),
         lambda x: ops.token_logprobs(x, ALL[:1])],
    ),
    "at least one column": (ops.greedy, [zeros(2, 0)]),
    "tokens must lie in [0, 4)": (
        lambda tokens: ops.token_logprobs(zeros(2, 4), torch.tensor(tokens)), [[0, 4], [-1, 0]]
    ),
    "tokens must be": (lambda tokens: ops.token_logprobs(zeros(2, 4), torch.tensor(tokens)), [[0]]),
    "x must have 5 columns": (lambda x: ops.linear(x, PACKED), [zeros(2, 6), zeros(2, 4)]),
    "it is (2, 6)": (lambda x: ops.linear(x, PACKED), [zeros(2, 6)]),
    "x must be float32 or": (
        lambda op: op(), [lambda: ops.linear(zeros(2, 5).double(), PACKED),
                          lambda: ops.rms_norm(zeros(2, 6).half(), None, 1e-5, F32)]
    ),
    "x must be contiguous within a row": (lambda x: ops.linear(x, PACKED), [zeros(5, 2).t()]),
    "out_dtype must be float32 or bfloat16": (lambda to: ops.linear(zeros(2, 5), PACKED, to), [torch.float16]),
    "bias must be (3,)": (lambda bias: ops.linear(zeros(2, 5), PACKED, bias=bias), [zeros(4)]),
    "scale must be": (lambda scale: ops.pack_linear(zeros(3, 5), scale), [zeros(4), zeros(3).double()]),
    "weight must be (6,)": (lambda weight: ops.rms_norm(zeros(2, 6), weight, 1e-5, F32), [zeros(5)]),
    "delta must have the shape of residual, (2, 6)": (
        lambda delta: ops.add_rms_norm_(zeros(2, 6), delta, None, 1e-5, F32), [zeros(3, 6)]
    ),
    "residual must be float32": (
        lambda residual: ops.add_rms_norm_(residual, zeros(2, 6), None, 1e-5, F32), [zeros(2, 6).bfloat16()]
    ),
    "must have one dtype": (lambda up: ops.silu_mul(zeros(2, 6), up), [zeros(2, 6).bfloat16()]),
    "up must have the shape of gate": (lambda up: ops.silu_mul(zeros(2, 6), up), [zeros(2, 5)]),
    "at least one row and one column": (ops.pack_linear, [zeros(3, 0), zeros(0, 3)]),
    "k and v must be (tokens, 2, 8)": (
        lambda shape: kv(zeros(shape), zeros(shape)), [(5, 16), (5, 3, 8), (5, 2, 9), (5, 2, 8, 1)]
    ),
    "v must have the shape of k": (lambda v: kv(zeros(5, 2, 8), v), [zeros(4, 2, 8)]),
    "k and v must have one dtype": (lambda v: kv(zeros(5, 2, 8), v), [zeros(5, 2, 8).bfloat16()]),
    "a multiple of 2 heads, 8)": (
        lambda shape: attend(zeros(shape)),
        [(5, 2), (5, 4, 7), (5, 4, 9), (5, 3, 8), (5, 0, 8), (5, 4, 8, 1)]
    ),
    "the cache must be (pages, ": (
        lambda shape: cached(zeros(shape), zeros(shape)),
        [(2, PAGE_TOKENS, 2), (2, PAGE_TOKENS - 1, 2, 8), (2, PAGE_TOKENS + 1, 2, 8)],
    ),
    "at least one kv head": (lambda k: cached(k, k), [zeros(2, PAGE_TOKENS, 0, 8), zeros(2, PAGE_TOKENS, 2, 0)]),
    "k_cache and v_cache must have one dtype": (lambda v: cached(CACHE, v), [CACHE.bfloat16()]),
    "must be contiguous; allocate": (lambda pair: cached(*pair), [(CACHE, OTHER_ORDER), (OTHER_ORDER, CACHE)]),
    "must be on the CPU, where this kernel runs; it is on meta": (
        lambda op: op(META),
        [ops.argmax, ops.greedy, ops.pack_linear, lambda x: ops.rms_norm(x, None, 1e-5, F32),
         lambda x: ops.add_rms_norm_(x, x, None, 1e-5, F32), lambda x: ops.silu_mul(x, x),
         lambda x: ops.route(x, 1), ops.relu_square,
         lambda x: ops.token_logprobs(x, ALL[:2]), lambda x: ops.linear(x, ops.pack_linear(torch.ones(2, 3))),
         lambda x: ops.write_kv(META_CACHE[0], META_CACHE[0], CACHE, CACHE, ALL),
         lambda x: ops.write_kv(CACHE[0], CACHE[0], META_CACHE, META_CACHE, ALL),
         lambda x: indices(x[0].long(), "rows", (3,), 2)],
    ),
    "at least one thread": (set_threads, [0]),
}  # fmt: skip


@table("words", WORDS)
def test_each_fault_is_refused_alone(words: str) -> None:
    """Fault: a check that looks at one side of a bound, at one of two conditions, or that another one hides."""
    call, refused = WORDS[words]
    for number, one in enumerate(refused):
        with pytest.raises(ValueError, match=re.escape(words)):
            call(one)
            pytest.fail(f"number {number} is not refused")


def test_what_lies_at_a_bound_is_taken() -> None:
    """Fault: a bound that is one too narrow, and a stride that is refused though no step takes it."""
    assert arguments.slot_stride(torch.empty_strided((2, 3, 4), (12, 4, 1)), (3, 4), F32) == 12
    assert arguments.slot_stride(torch.empty_strided((1, 3, 4), (0, 4, 1)), (3, 4), F32) == 0
    assert arguments.token_stride(torch.empty_strided((4, 1), (5, 3)), "B", 4, 1, torch.zeros(4, 2)) == 5
    arguments.require_slots(6, 7)
    ops.add_rms_norm_(torch.empty_strided((1, 4), (0, 1)).zero_(), torch.zeros(1, 4), None, 1e-5, torch.float32)
    assert arguments.require_indices(torch.tensor([1, 9, 0])[::2], "rows", (2,), 2).tolist() == [1, 0]
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    ends = torch.tensor([logits[0], logits[3]]) - logits.logsumexp(0)
    found = ops.token_logprobs(logits.expand(2, 4), torch.tensor([0, 3]))
    torch.testing.assert_close(found, ends)
    assert ops.token_logprobs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    before = num_threads()
    set_threads(1)
    assert num_threads() == 1
    set_threads(before)


@table("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_of_another_stride_or_dtype_is_read_as_its_values(dtype: torch.dtype) -> None:
    """Fault: the address of a strided vector, or of one of 16 bits, is handed on as contiguous float32."""
    weight = torch.arange(8.0).to(dtype)[::2]
    for one in (weight, weight.contiguous()):
        found = arguments.float_vector(one, "weight", 4, torch.zeros(2, 4), "x")
        assert found.is_contiguous() and found.dtype == F32 and found.tolist() == [0, 2, 4, 6]
