"""What the kernels of every device ask of their tensors, and how a tensor becomes an address, a stride and a code.

Must not know: models, how a kernel computes. Every check is a ValueError with a sentence. `device` is where the kernel
runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from apcbatch import _C

FLOAT32 = 0  # csrc/params.h, DType
DTYPE_CODES = {torch.float32: FLOAT32, torch.bfloat16: 1}
CPU = torch.device("cpu")


def dtype_code(tensor: torch.Tensor, name: str, codes: Mapping[torch.dtype, int] = DTYPE_CODES) -> int:
    """The kernels' number for a tensor's dtype; ValueError unless it is one of `codes`, which are those of the CPU."""
    code = codes.get(tensor.dtype)
    if code is None:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in codes)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}; it is {tensor.dtype}")
    return code


def require_cpu(tensor: torch.Tensor, name: str) -> None:
    """ValueError unless the tensor lies on the CPU."""
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU, where this kernel runs; it is on {tensor.device}")


def require_matrix(tensor: torch.Tensor, name: str) -> None:
    """ValueError unless the tensor has two dimensions."""
    if tensor.dim() != 2:
        raise ValueError(f"{name} must have two dimensions; its shape is {tuple(tensor.shape)}")


def require_alike(tensor: torch.Tensor, name: str, other: torch.Tensor, other_name: str) -> None:
    """ValueError unless the tensor has the other one's shape and lies where that does."""
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} must have the shape of {other_name}, {tuple(other.shape)}; its shape is {tuple(tensor.shape)}"
        )
    _require_beside(tensor, name, other)


def require_one_dtype(tensor: torch.Tensor, name: str, other: torch.Tensor, other_name: str) -> None:
    """ValueError unless both have the same dtype."""
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name} and {other_name} must have one dtype; they are {tensor.dtype} and {other.dtype}")


def require_indices(tensor: torch.Tensor, name: str, shape: tuple[int, ...], end: int) -> torch.Tensor:
    """The tensor, contiguous; ValueError unless it is int64 on the CPU, of this shape, with values in [0,
    end)."""
    require_cpu(tensor, name)
    if tensor.dtype != torch.int64 or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be int64 of shape {shape}; it is {tensor.dtype} of shape {tuple(tensor.shape)}")
    tensor = tensor.contiguous()
    if tensor.numel():
        lowest, highest = _C.span(tensor.data_ptr(), tensor.numel())
        if lowest < 0 or highest >= end:
            raise ValueError(f"{name} must lie in [0, {end}); its values span {lowest} to {highest}")
    return tensor


def float_vector(tensor: torch.Tensor, name: str, size: int, of: torch.Tensor, of_name: str) -> torch.Tensor:
    """The tensor as contiguous float32; ValueError unless it is (size,), one value a column of `of`, and lies there."""
    _require_beside(tensor, name, of)
    if tensor.shape != (size,):
        raise ValueError(f"{name} must be ({size},), one value a column of {of_name}; it is {tuple(tensor.shape)}")
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
    tensor: torch.Tensor,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device = CPU,
) -> None:
    """ValueError unless the tensor is contiguous on the device, of this shape and (None: any) dtype."""
    if tensor.shape == shape and tensor.is_contiguous() and (dtype is None or tensor.dtype == dtype):
        _require_on(tensor, name, device)
        return
    raise ValueError(
        f"{name} must be contiguous of shape {shape}{'' if dtype is None else f' and {dtype}'}{_where(device)}; "
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


# The recurrent ops: rows of tokens, slots of states.


def token_rows(x: torch.Tensor, num_tokens: int) -> tuple[int, int]:
    """(t, d) of x; ValueError unless it has a row for each of the batch's tokens."""
    shape = tuple(x.shape)
    if len(shape) != 2 or shape[0] != num_tokens or shape[1] == 0:
        raise ValueError(f"x must be ({num_tokens}, d_inner), a row for each token of cu_seqlens; it is {shape}")
    return shape[0], shape[1]


def token_stride(tensor: torch.Tensor, name: str, rows: int, columns: int, x: torch.Tensor) -> int:
    """Elements from one token to the next; ValueError unless (rows, columns), rows contiguous, of x's dtype where x
    lies."""
    strides = tensor.stride()
    if tensor.dtype == x.dtype and tensor.shape == (rows, columns) and (strides[1] == 1 or columns == 1):
        _require_beside(tensor, name, x)
        return strides[0]
    raise ValueError(
        f"{name} must be {x.dtype}{_where(x.device)} (like x) of shape ({rows}, {columns}) with a stride of 1 within "
        f"a row; it is {tensor.dtype} of shape {tuple(tensor.shape)} with strides {strides}"
    )


def slot_stride(
    state: torch.Tensor, slot_shape: tuple[int, int], dtype: torch.dtype, device: torch.device = CPU
) -> int:
    """Elements from one slot to the next; ValueError unless the slots have this shape, are contiguous and lie
    apart, on the device."""
    strides = state.stride()
    shape = tuple(state.shape)
    _require_on(state, "state", device)
    if (
        state.dtype != dtype
        or shape[1:] != slot_shape
        or len(shape) != 3
        or (state.numel() and strides[1:] != (slot_shape[1], 1))
    ):
        raise ValueError(
            f"state must be {dtype}{_where(device)} of shape (num_slots, {slot_shape[0]}, {slot_shape[1]}), each slot "
            f"contiguous; it is {state.dtype} of shape {shape} with strides {strides}"
        )
    if shape[0] > 1 and strides[0] < slot_shape[0] * slot_shape[1]:
        raise ValueError(
            f"the state's slots must not overlap, as they are written; its strides are {strides} for the shape {shape}"
        )
    return strides[0]


def require_slots(max_slot: int, num_slots: int) -> None:
    """ValueError unless the state has every slot that the batch names."""
    if max_slot >= num_slots:
        raise ValueError(f"state must have slot {max_slot}, which the batch names; it has {num_slots} slots")


# Norms, products of gates, logits, caches.


def require_sums(residual: torch.Tensor, delta: torch.Tensor) -> None:
    """ValueError unless delta can be added to the residual in place: one shape, float32 sums, rows that lie apart."""
    require_matrix(residual, "residual")
    require_alike(delta, "delta", residual, "residual")
    if residual.dtype != torch.float32:
        raise ValueError(f"residual must be float32, in which it is summed; it is {residual.dtype}")
    if residual.shape[0] > 1 and residual.stride(0) < residual.shape[1]:
        raise ValueError(
            f"the residual's rows must not overlap, as they are written; its strides are {residual.stride()} for "
            f"the shape {tuple(residual.shape)}"
        )


def require_logits(logits: torch.Tensor) -> None:
    """ValueError unless they are a float32 matrix with at least one column."""
    require_matrix(logits, "logits")
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32; they are {logits.dtype}")
    if logits.shape[1] == 0:
        raise ValueError("logits must have at least one column; they have none")


def require_token(token: int, logits: torch.Tensor) -> None:
    """ValueError unless logits are one row and the token is one of its columns."""
    if logits.dim() != 1:
        raise ValueError(f"logits must be one row; its shape is {tuple(logits.shape)}")
    if not 0 <= token < logits.numel():
        raise ValueError(f"token must lie in [0, {logits.numel()}); it is {token}")


def require_tokens(tokens: torch.Tensor, logits: torch.Tensor) -> None:
    """ValueError unless tokens are (t,) int64 contiguous beside logits (t, v), and each is one of its columns."""
    t, v = logits.shape
    require_parameter(tokens, "tokens", (t,), torch.int64, logits.device)
    if t and not 0 <= int(tokens.min()) <= int(tokens.max()) < v:
        raise ValueError(f"tokens must lie in [0, {v}); they are {int(tokens.min())} to {int(tokens.max())}")


def require_cache(k_cache: torch.Tensor, v_cache: torch.Tensor, page_tokens: int) -> None:
    """ValueError unless they are one contiguous (pages, page_tokens, kv_heads, head_dim) each, of one dtype."""
    require_alike(v_cache, "v_cache", k_cache, "k_cache")
    if k_cache.dim() != 4 or k_cache.shape[1] != page_tokens:
        raise ValueError(f"the cache must be (pages, {page_tokens}, kv_heads, head_dim); it is {tuple(k_cache.shape)}")
    if k_cache.shape[2] == 0 or k_cache.shape[3] == 0:
        raise ValueError(
            f"the cache must have at least one kv head of at least one column; it is {tuple(k_cache.shape)}"
        )
    require_one_dtype(k_cache, "k_cache", v_cache, "v_cache")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous; allocate one pair a layer")


def require_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor) -> None:
    """ValueError unless keys and values are alike, and (tokens, kv_heads, head_dim) like the cache's rows."""
    require_alike(v, "v", k, "k")
    if k.dim() != 3 or k.shape[1:] != k_cache.shape[2:]:
        raise ValueError(
            f"k and v must be (tokens, {k_cache.shape[2]}, {k_cache.shape[3]}) like a page's rows; "
            f"they are {tuple(k.shape)}"
        )
    require_one_dtype(k, "k", v, "v")


def require_queries(q: torch.Tensor, k_cache: torch.Tensor) -> None:
    """ValueError unless queries are (tokens, heads, head_dim), heads a multiple of the cache's kv_heads."""
    kv_heads, head_dim = k_cache.shape[2:]
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % kv_heads != 0 or q.shape[1] == 0:
        raise ValueError(
            f"q must be (tokens, a multiple of {kv_heads} heads, {head_dim}), as the cache has {kv_heads} "
            f"kv heads of {head_dim}; it is {tuple(q.shape)}"
        )


def _require_beside(tensor: torch.Tensor, name: str, other: torch.Tensor) -> None:
    if other.is_cpu:
        require_cpu(tensor, name)
    else:
        _require_on(tensor, name, other.device)


def _require_on(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    if device.type == "cpu":
        require_cpu(tensor, name)
    elif tensor.device != device:
        raise ValueError(f"{name} must be {tensor.dtype} on {device}, where this kernel runs; it is on {tensor.device}")


def _where(device: torch.device) -> str:
    """What a sentence says of the device, where it is not the CPU."""
    return "" if device.type == "cpu" else f" on {device}"
