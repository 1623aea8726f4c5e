"""What the kernels ask of their tensors, and how a tensor becomes an address, a stride and a code.

Must not know: any one kernel. Every check is a ValueError with a sentence.
"""

from __future__ import annotations

import torch

from apcbatch import _C

FLOAT32 = 0  # csrc/params.h, DType
DTYPE_CODES = {torch.float32: FLOAT32, torch.bfloat16: 1}


def dtype_code(tensor: torch.Tensor, name: str) -> int:
    """The kernels' number for a tensor's dtype; ValueError unless float32 or bfloat16."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"{name} must be float32 or bfloat16; it is {tensor.dtype}")
    return code


def require_cpu(tensor: torch.Tensor, name: str) -> None:
    """ValueError unless the tensor lies on the CPU."""
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU, where this kernel runs; it is on {tensor.device}")


def require_matrix(tensor: torch.Tensor, name: str) -> None:
    """ValueError unless the tensor lies on the CPU and has two dimensions."""
    require_cpu(tensor, name)
    if tensor.dim() != 2:
        raise ValueError(f"{name} must have two dimensions; its shape is {tuple(tensor.shape)}")


def require_same_shape(tensor: torch.Tensor, name: str, other: torch.Tensor, other_name: str) -> None:
    """ValueError unless the tensor lies on the CPU and has the other one's shape."""
    require_cpu(tensor, name)
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} must have the shape of {other_name}, {tuple(other.shape)}; "
            f"its shape is {tuple(tensor.shape)}"
        )


def require_indices(tensor: torch.Tensor, name: str, shape: tuple[int, ...], end: int) -> torch.Tensor:
    """The tensor, contiguous; ValueError unless it is int64 on the CPU, of this shape, with values in [0,
    end)."""
    require_cpu(tensor, name)
    if tensor.dtype != torch.int64 or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must be int64 of shape {shape}; it is {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    tensor = tensor.contiguous()
    if tensor.numel():
        lowest, highest = _C.span(tensor.data_ptr(), tensor.numel())
        if lowest < 0 or highest >= end:
            raise ValueError(f"{name} must lie in [0, {end}); its values span {lowest} to {highest}")
    return tensor


def float_vector(tensor: torch.Tensor, name: str, size: int, of: str) -> torch.Tensor:
    """The tensor as contiguous float32; ValueError unless it is (size,), one value a column of `of`."""
    require_cpu(tensor, name)
    if tensor.shape != (size,):
        raise ValueError(f"{name} must be ({size},), one value a column of {of}; it is {tuple(tensor.shape)}")
    if tensor.dtype == torch.float32 and tensor.is_contiguous():
        return tensor
    return tensor.to(torch.float32).contiguous()


def row_stride(tensor: torch.Tensor, name: str) -> int:
    """Elements from one row (first dimension) to the next; ValueError unless each row is contiguous."""
    return _row_stride(tensor, tensor.stride(), name)


def _row_stride(tensor: torch.Tensor, stride: tuple[int, ...], name: str) -> int:
    if len(stride) == 2 and stride[1] == 1:
        return stride[0]
    expected = 1
    for size, step in zip(reversed(tensor.shape[1:]), reversed(stride[1:]), strict=True):
        if size != 1 and step != expected:
            raise ValueError(
                f"{name} must be contiguous within a row (any stride between rows); its strides are {stride} "
                f"for the shape {tuple(tensor.shape)}: call .contiguous() on it"
            )
        expected *= size
    return stride[0]


def require_parameter(
    tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    """ValueError unless the tensor is contiguous on the CPU, of this shape and (None: any) dtype."""
    if tensor.shape == shape and tensor.is_contiguous() and (dtype is None or tensor.dtype == dtype):
        require_cpu(tensor, name)
        return
    raise ValueError(
        f"{name} must be contiguous of shape {shape}{'' if dtype is None else f' and {dtype}'}; "
        f"it is {tensor.dtype} of shape {tuple(tensor.shape)} with strides {tensor.stride()}"
    )


def view(tensor: torch.Tensor, name: str) -> _C.View:
    """The tensor as the compiled module takes it: where it begins, elements from one row to the next, its dtype's
    number. ValueError unless each row is contiguous, of float32 or bfloat16."""
    return tensor.data_ptr(), _row_stride(tensor, tensor.stride(), name), dtype_code(tensor, name)


def contiguous_view(tensor: torch.Tensor, name: str) -> _C.View:
    """The same of a tensor that is contiguous, as is known. ValueError for another dtype."""
    return tensor.data_ptr(), tensor.stride(0), dtype_code(tensor, name)


def address(tensor: torch.Tensor | None) -> int:
    """Where the tensor begins; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def num_threads() -> int:
    """Threads a kernel may use: torch's setting."""
    return torch.get_num_threads()
