"""A decode pass of a stack of Mamba mixers, the final norm and the head, in one launch on a CUDA device.

Must not know: models, checkpoints. Invariant: a sequence's bits do not depend on how many sequences come together. Its
products are not the library's, so they are not the bits of the parts called one after the other; the arithmetic of
convolution and state is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apcbatch.kernels.arguments import address
from apcbatch.kernels.cuda.batch import DeviceBatch
from apcbatch.kernels.cuda.extension import ALIGNMENT, DTYPE_CODES, current_stream, extension
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.mixer import DeviceMixer
from apcbatch.kernels.cuda.scan import batch_on
from apcbatch.kernels.layer import PreNorm
from apcbatch.kernels.ragged import Ragged


class DecodeStack:
    """mixers: of one shape. norm: the one before the head (v, h).

    most_rows: the most sequences that a call takes; 0 where the kernel has not this shape, dtype or device, where the
    shapes differ from mixer to mixer, or where exact products are asked for.
    """

    def __init__(self, mixers: Sequence[DeviceMixer], norm: PreNorm, head: DeviceLinear) -> None:
        self._kept_alive = list(mixers), norm, head
        self.most_rows = 0
        if not _alike(mixers, norm, head):
            return
        first = mixers[0]
        w = first.weights
        (n, d), r, self._vocab = w.A.shape, w.dt_proj.in_features, head.out_features
        self._inner, self._low, self._dtype = d, r + 2 * n, head.dtype
        table = torch.tensor([_addresses(mixer) for mixer in mixers], dtype=torch.int64, device="cpu")
        self._table = table.to(head.weight.device)
        with torch.cuda.device(head.weight.device):
            self._stack = extension().DecodeStack(
                DTYPE_CODES[head.dtype],
                head.in_features,
                d,
                n,
                r,
                w.conv_weight.shape[1],
                self._vocab,
                len(mixers),
                self._table.data_ptr(),
                w.norms is not None,
                norm.eps,
                w.norm_eps,
                address(norm.weight),
                head.weight.data_ptr(),
                first.ssm.stride(0),
                first.conv.stride(0),
            )
            self.most_rows = self._stack.most_rows()

    def __call__(self, residual: torch.Tensor, ragged: Ragged | DeviceBatch) -> torch.Tensor:
        """Logits (b, v) float32. residual: (b, h) float32 contiguous, changed; b: a power of two, most_rows at most.
        ragged: b sequences of one token. Raises ValueError."""
        batch = batch_on(residual.device, ragged)
        b = batch.num_tokens
        if batch.num_sequences != b or b & (b - 1) or b > self.most_rows:
            raise ValueError(
                f"the batch must be a power of two of sequences, {self.most_rows} at most, of one token each; it has "
                f"{batch.num_sequences} sequences of {b} tokens"
            )
        hidden = self._kept_alive[2].in_features
        if residual.shape != (b, hidden) or residual.dtype != torch.float32 or not residual.is_contiguous():
            raise ValueError(
                f"residual must be contiguous of shape ({b}, {hidden}) and float32; it is {residual.dtype} of shape "
                f"{tuple(residual.shape)}"
            )
        x, z, y = residual.new_empty((3, b, self._inner), dtype=self._dtype)
        low = residual.new_empty((b, self._low), dtype=self._dtype)
        logits = residual.new_empty((b, self._vocab))
        arrivals = residual.new_zeros(1, dtype=torch.int32)
        with torch.cuda.device(residual.device):
            self._stack.run(
                batch.params,
                residual.data_ptr(),
                x.data_ptr(),
                z.data_ptr(),
                y.data_ptr(),
                low.data_ptr(),
                logits.data_ptr(),
                arrivals.data_ptr(),
                current_stream(),
            )
        return logits


def _alike(mixers: Sequence[DeviceMixer], norm: PreNorm, head: DeviceLinear) -> bool:
    """Whether all mixers have one shape, dtype and norm's epsilon, free products, and weights that lie as they must."""
    if not mixers or head.dtype not in (torch.float32, torch.bfloat16):
        return False
    kinds = {
        (
            *(part.weight.shape for part in _projections(mixer)),
            *mixer.weights.A.shape,
            mixer.weights.conv_weight.shape[1],
            mixer.weights.norms is None,
            mixer.weights.norm_eps,
            mixer.norm.eps,
            mixer.ssm.stride(0),
            mixer.conv.stride(0),
        )
        for mixer in mixers
    }
    linears = [head, *(part for mixer in mixers for part in _projections(mixer))]
    read = [part.weight for part in linears] + [norm.weight, *(mixer.norm.weight for mixer in mixers)]
    return (
        len(kinds) == 1
        and mixers[0].norm.eps == norm.eps
        and not any(part.exact or part.dtype != head.dtype for part in linears)
        and all(mixer.weights.conv_weight.dtype == torch.float32 for mixer in mixers)
        and not any(weight.data_ptr() % ALIGNMENT for weight in read)
    )


def _projections(mixer: DeviceMixer) -> tuple[DeviceLinear, DeviceLinear, DeviceLinear, DeviceLinear]:
    w = mixer.weights
    return w.in_proj, w.x_proj, w.dt_proj, w.out_proj


def _addresses(mixer: DeviceMixer) -> list[int]:
    """One row of the table that _CUDA.DecodeStack takes."""
    w = mixer.weights
    tensors = (
        *(part.weight for part in _projections(mixer)),
        mixer.norm.weight,
        w.in_bias,
        w.out_bias,
        w.conv_weight,
        w.conv_bias,
        w.A,
        w.D,
        w.dt_bias,
        *(w.norms or (None, None, None)),
        mixer.ssm,
        mixer.conv,
    )
    return [address(tensor) for tensor in tensors]
