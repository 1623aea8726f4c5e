"""The checks that the kernels of every device share: on the CPU's tensors, and on those of another device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from apcbatch.kernels import arguments, recurrent_arguments
from apcbatch.kernels.arguments import CPU, view
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.layer import Residual

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
