"""The ops that treat each token on its own, on a CUDA device: products, norms, what is chosen from logits. The same
arguments and results as on the CPU (apcbatch.kernels.linear, norm and choose), and float16 too.

Must not know: models. Invariants: a row of a norm or of a choice depends on that row alone. A row of a product does so
only where `exact` asks for it, as the library picks its kernel by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from apcbatch.kernels.cuda import DTYPE_CODES, extension

EXACT_ROWS = 128  # of every product, where products must not depend on how many rows come together

# Counts up with every change of any CUDA kernel that changes a bit of any result.
CUDA_NUMERICS_VERSION = 4

_exact = False


def set_exact(wanted: bool) -> None:
    """Whether weights that are packed from now on are multiplied EXACT_ROWS rows at a time."""
    global _exact
    _exact = wanted


def numerics(dtype: torch.dtype, device: torch.device) -> str:
    """The arithmetic of a device: products are the library's, so its version and the chip belong to it."""
    major, minor = torch.cuda.get_device_capability(device)
    products = "exact" if _exact else "free"
    name = str(dtype).removeprefix("torch.")
    return f"cuda-sm{major}{minor}-{name}-{products}-torch{torch.__version__}-{CUDA_NUMERICS_VERSION}"


def device_linear(weight: torch.Tensor) -> DeviceLinear:
    """Weights as `linear` takes them."""
    return DeviceLinear(weight.contiguous(), _exact)


@dataclass(frozen=True, eq=False)
class DeviceLinear:
    """Weights (out_features, in_features) on a CUDA device, as they are. exact: always multiply EXACT_ROWS rows, so
    that a row's bits do not depend on its company."""

    weight: torch.Tensor
    exact: bool = False

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weights, for an embedding that is tied to this projection."""
        return self.weight[indices]


def linear(
    x: torch.Tensor,
    packed: DeviceLinear,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T (+ bias), accumulated in float32: see apcbatch.kernels.linear. x is of the weights' dtype."""
    if x.dtype != packed.dtype or x.dim() != 2 or x.shape[1] != packed.in_features:
        raise ValueError(
            f"x must be {packed.dtype} with {packed.in_features} columns, the weight's inputs; it is {x.dtype} of "
            f"shape {tuple(x.shape)}"
        )
    multiply = _exact_product if packed.exact else _product
    y = multiply(x, packed.weight, out_dtype or x.dtype)
    return y if bias is None else y.add_(bias.to(y.dtype))


def _product(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    if out_dtype == x.dtype:
        return torch.mm(x, weight.t())
    return torch.mm(x, weight.t(), out_dtype=out_dtype)


def _exact_product(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The product EXACT_ROWS rows at a time, the last of them filled up."""
    rows = x.shape[0]
    padded = x.new_zeros((rows + EXACT_ROWS - 1) // EXACT_ROWS * EXACT_ROWS, x.shape[1])
    padded[:rows] = x
    parts = [_product(part, weight, out_dtype) for part in torch.split(padded, EXACT_ROWS)]
    return torch.cat(parts)[:rows] if parts else x.new_empty((0, weight.shape[0]), dtype=out_dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype
) -> torch.Tensor:
    """See apcbatch.kernels.norm."""
    return _rms_norm(x, None, weight, eps, out_dtype)


def add_rms_norm_(
    residual: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See apcbatch.kernels.norm."""
    if residual.dtype != torch.float32 or delta.shape != residual.shape:
        raise ValueError(
            f"residual must be float32 of delta's shape {tuple(delta.shape)}; it is {residual.dtype} of shape "
            f"{tuple(residual.shape)}"
        )
    return _rms_norm(residual, delta, weight, eps, out_dtype)


def _rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    t, h = x.shape
    if weight is not None and (weight.shape != (h,) or weight.dtype != torch.float32):
        raise ValueError(
            f"weight must be float32 of shape ({h},); it is {weight.dtype} of {tuple(weight.shape)}"
        )
    y = torch.empty((t, h), dtype=out_dtype, device=x.device)
    addend = (0, 0, 0) if delta is None else (delta.data_ptr(), _row_stride(delta, "delta"), _code(delta))
    extension().rms_norm(
        t,
        h,
        x.data_ptr(),
        _row_stride(x, "x"),
        _code(x),
        *addend,
        0 if weight is None else weight.data_ptr(),
        eps,
        y.data_ptr(),
        _code(y),
        _stream(),
    )
    return y


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See apcbatch.kernels.norm."""
    if gate.dtype != up.dtype or gate.shape != up.shape:
        raise ValueError(
            f"gate and up must be alike; they are {gate.dtype} {tuple(gate.shape)} and {up.dtype} "
            f"{tuple(up.shape)}"
        )
    t, f = gate.shape
    y = torch.empty((t, f), dtype=gate.dtype, device=gate.device)
    extension().silu_mul(
        t,
        f,
        gate.data_ptr(),
        _row_stride(gate, "gate"),
        up.data_ptr(),
        _row_stride(up, "up"),
        y.data_ptr(),
        _code(gate),
        _stream(),
    )
    return y


def softmax_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See apcbatch.kernels.choose; at most 1,024 columns."""
    _require_logits(logits)
    t, n = logits.shape
    if not 1 <= k <= n <= extension().MOST_CHOICES:
        raise ValueError(
            f"k must lie in 1 to n, and n be {extension().MOST_CHOICES} at most; they are {k} and {n}"
        )
    weights = torch.empty((t, k), dtype=torch.float32, device=logits.device)
    indices = torch.empty((t, k), dtype=torch.int64, device=logits.device)
    extension().softmax_topk(
        t,
        n,
        k,
        logits.data_ptr(),
        _row_stride(logits, "logits"),
        weights.data_ptr(),
        indices.data_ptr(),
        _stream(),
    )
    return weights, indices


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See apcbatch.kernels.choose; the sum is float32. The token is -1 where a logit is NaN or infinite."""
    _require_logits(logits)
    t, v = logits.shape
    tokens = torch.empty(t, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(t, dtype=torch.float32, device=logits.device)
    extension().logprob(
        t,
        v,
        logits.data_ptr(),
        _row_stride(logits, "logits"),
        True,
        tokens.data_ptr(),
        logprobs.data_ptr(),
        _stream(),
    )
    return tokens, logprobs


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See apcbatch.kernels.choose. -1 where a logit is NaN or infinite."""
    _require_logits(logits)
    t, v = logits.shape
    tokens = torch.empty(t, dtype=torch.int64, device=logits.device)
    extension().logprob(
        t, v, logits.data_ptr(), _row_stride(logits, "logits"), True, tokens.data_ptr(), 0, _stream()
    )
    return tokens


def token_logprob(logits: torch.Tensor, token: int) -> float:
    """See apcbatch.kernels.choose."""
    row = logits.unsqueeze(0)
    _require_logits(row)
    if not 0 <= token < logits.numel():
        raise ValueError(f"token must lie in [0, {logits.numel()}); it is {token}")
    tokens = torch.tensor([token], device=logits.device)
    logprobs = torch.empty(1, dtype=torch.float32, device=logits.device)
    extension().logprob(
        1,
        logits.numel(),
        row.data_ptr(),
        logits.numel(),
        False,
        tokens.data_ptr(),
        logprobs.data_ptr(),
        _stream(),
    )
    return float(logprobs)


def _require_logits(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.shape[1] == 0:
        raise ValueError(
            f"logits must be float32 (rows, columns); they are {logits.dtype} {tuple(logits.shape)}"
        )


def _row_stride(tensor: torch.Tensor, name: str) -> int:
    stride = tensor.stride()
    if tensor.dim() != 2 or (stride[1] != 1 and tensor.shape[1] > 1):
        raise ValueError(
            f"{name} must be a matrix, contiguous within a row; it is {tuple(tensor.shape)} with strides {stride}"
        )
    return stride[0]


def _code(tensor: torch.Tensor) -> int:
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"tensors must be float32, bfloat16 or float16; one is {tensor.dtype}")
    return code


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
