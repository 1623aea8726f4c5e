"""AMX's products of bfloat16: the arithmetic that csrc/gemm_amx.h states, and a system that refuses its registers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.processor import available_isas, isa, set_isa

ops = CpuBackend()

STEP = 32  # inputs of one instruction

# A filter of system calls that answers arch_prctl(ARCH_REQ_XCOMP_PERM, ..) with EPERM, then one question.
REFUSED = """
import ctypes, struct
def code(*of):
    return b"".join(struct.pack("HBBI", *one) for one in of)
program = code(
    (0x20, 0, 0, 0), (0x15, 0, 3, 158),
    (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023),
    (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000),
)
memory = ctypes.create_string_buffer(program)
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(memory)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
assert prctl(38, 1, None, 0, 0) == 0
if prctl(22, 2, ctypes.addressof(filter), 0, 0) != 0:
    print("no filters here")
else:
    from apcbatch.kernels.processor import available_isas, isa
    print(*available_isas(), isa())
"""


@pytest.fixture(autouse=True)
def amx() -> Iterator[None]:
    """The instruction set in use during the test."""
    if "amx" not in available_isas():
        pytest.skip("this processor or system has no AMX")
    before = isa()
    set_isa("amx")
    yield
    set_isa(before)


def bfloat16(*shape: int) -> torch.Tensor:
    """Random numbers of one dtype, whose products are exact in float32."""
    return torch.randn(*shape).to(torch.bfloat16)


def in_steps(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (t, in), weight (out, in) -> (t, out) float32: steps of 32 inputs, the even and the odd ones a chain each."""
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for begin in range(0, x.shape[1], STEP):
        chains = [torch.zeros_like(sums), torch.zeros_like(sums)]
        for k in range(begin, min(begin + STEP, x.shape[1])):
            chains[k % 2] += x[:, k].float()[:, None] * weight[:, k].float()[None, :]
        sums += chains[0] + chains[1]
    return sums


def test_the_arithmetic_is_the_one_stated():
    """A processor, or an order of the steps, that adds in another way: one name of numerics for two arithmetics."""
    sizes = [[int(torch.randint(1, most, ())) for most in (70, 600, 90)] for _ in range(12)]
    for t, inputs, outputs in [*sizes, [37, 2100, 41]]:
        x, weight = bfloat16(t, inputs), bfloat16(outputs, inputs)
        y = ops.linear(x, ops.pack_linear(weight), out_dtype=torch.float32)
        assert torch.equal(y, in_steps(x, weight)), (t, inputs, outputs)


def test_any_cut_of_the_rows_gives_the_same_bits():
    """A row alone, in company, at the end of a register or of a block: all are one arithmetic."""
    sizes = [[int(torch.randint(1, most, ())) for most in (400, 900, 300)] for _ in range(12)]
    for t, inputs, outputs in [*sizes, [150, 4200, 70]]:
        packed, x = ops.pack_linear(bfloat16(outputs, inputs)), bfloat16(t, inputs)
        whole = ops.linear(x, packed)
        begin = 0
        while begin < t:
            rows = int(torch.randint(1, 40, ()))
            assert torch.equal(ops.linear(x[begin : begin + rows], packed), whole[begin : begin + rows])
            begin += rows


def test_vectors_and_registers_agree_on_any_numbers():
    """One or two rows are multiplied by vectors: another rounding of the smallest numbers, or of a zero."""

    def any_numbers(*shape: int) -> torch.Tensor:
        exponents = torch.randint(-75, 10, (shape[0], 1)) + torch.randint(-8, 8, shape)
        return (torch.randn(shape) * torch.exp2(exponents)).to(torch.bfloat16)

    packed, x = ops.pack_linear(any_numbers(150, 290)), any_numbers(40, 290)
    whole = ops.linear(x, packed, out_dtype=torch.float32)
    assert bool((whole == 0).any()) and bool((whole != 0).any()) and bool(whole.isfinite().all())
    for rows in (1, 2):
        for begin in range(0, 40, rows):
            part = ops.linear(x[begin : begin + rows], packed, out_dtype=torch.float32)
            assert torch.equal(part, whole[begin : begin + rows])


def test_denormal_numbers_count_as_zero():
    """Where it is not so, a snapshot of another processor is continued by other arithmetic."""
    x = torch.full((3, 40), 1e-39, dtype=torch.bfloat16)
    assert float(x.float().max()) > 0
    y = ops.linear(x, ops.pack_linear(torch.ones(20, 40, dtype=torch.bfloat16)), out_dtype=torch.float32)
    assert torch.equal(y, torch.zeros(3, 20))


def test_nothing_is_left_of_the_products_before():
    """Rows that fill a register up, with NaN of an earlier product in them, and reach a row that is asked for."""
    packed, x = ops.pack_linear(bfloat16(50, 70)), bfloat16(3, 70)
    clean = ops.linear(x, packed)
    ops.linear(torch.full((64, 70), torch.nan, dtype=torch.bfloat16), packed)
    assert torch.equal(ops.linear(x, packed), clean)


def test_another_library_may_use_the_registers():
    """torch shapes the same registers in the same threads for itself."""
    packed, x = ops.pack_linear(bfloat16(200, 300)), bfloat16(100, 300)
    side = bfloat16(300, 300)
    clean = ops.linear(x, packed)
    theirs = side @ side
    for _ in range(5):
        assert torch.equal(ops.linear(x, packed), clean)
        assert torch.equal(side @ side, theirs)


def test_a_system_that_refuses_the_registers():
    """The first product ends in an illegal instruction, where the system does not grant what the processor has."""
    ended = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    if "no filters" in ended.stdout:
        pytest.skip("this system takes no filters of system calls")
    *available, in_use = ended.stdout.split()
    assert "avx512" in available and "amx" not in available
    assert in_use in available
