"""Weights that stay encoded on a CUDA device.

Products of up to MOST_CODED_ROWS rows, and experts, read the codes. For more rows, the matrix is decoded into memory
that all matrices of the device share, and multiplied like one that was never encoded. The bits are those of the decoded
weights in every case. Needs compute capability 9.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apcbatch.kernels.cuda.extension import current_stream, extension
from apcbatch.kernels.encoded_rows import Codes, EncodedRows

MOST_PARTS = 4  # a matrix of more runs of rows is decoded
_RUN = 16  # rows: runs end at multiples of it
_ONE_GROUP = 31  # shift of an input to its group, if a row has one scale
_FP8_FACTOR = 2.0**120  # of scales: the kernels read an e4m3 code as bfloat16 bits, 2^-120 of its value
_LEAST_ZERO = -8  # of int4: the lowest 7 bits of a scale are the zero, less this
_SMALLEST, _LARGEST = 2.0**-100, 2.0**7  # scales whose products with any code are exact in float32


class SharedScratch:
    """Memory of a device for one decoded matrix. Its address changes only while weights are packed. given: the compiled
    module's Scratch."""

    def __init__(self, device: torch.device) -> None:
        self.given = extension().Scratch()
        self.memory = torch.empty(0, dtype=torch.bfloat16, device=device)

    def reserve(self, elements: int) -> None:
        """Make room for a matrix of bfloat16 elements."""
        if elements > self.memory.numel():
            self.memory = self.memory.new_empty(0)  # freed first
            self.memory = self.memory.new_empty(elements)
            self.given.set(self.memory.data_ptr())


class CodedWeight:
    """Weights (out, in) as runs of rows that are encoded alike, or bfloat16. It has the attributes of a tensor that a
    product needs. given: the compiled module's CodedWeights."""

    dtype = torch.bfloat16

    def __init__(self, runs: Sequence[Codes | torch.Tensor], scratch: SharedScratch) -> None:
        self.parts = [_part(run, scratch.memory.device) for run in runs]  # kept alive
        columns = runs[0].columns if isinstance(runs[0], Codes) else runs[0].shape[1]
        self.shape = torch.Size((sum(len(codes) for codes, *_ in self.parts), columns))
        self._scratch = scratch
        scratch.reserve(self.shape.numel())
        kinds, given = extension().CodeKind, []
        for codes, kind, shift, scales in self.parts:
            at = (0, 0) if scales is None else (scales.data_ptr(), scales.shape[1])
            given.append((len(codes), codes.data_ptr(), getattr(kinds, kind), shift, *at))
        self.given = extension().CodedWeights(self.shape[1], given, scratch.given)

    @property
    def device(self) -> torch.device:
        return self._scratch.memory.device

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and rows that are not encoded."""
        tensors = [tensor for codes, _, _, scales in self.parts for tensor in (codes, scales) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def takes(self, rows: int, pieces: int) -> bool:
        """Return True if a product of this number of rows reads the codes."""
        takes_pieces: bool = extension().takes_coded_product(self.given, pieces)
        return rows <= extension().MOST_CODED_ROWS and takes_pieces

    def decoded(self) -> torch.Tensor:
        """Decode the weights, (out, in) bfloat16, in the shared memory: valid until the next call for any matrix."""
        with torch.cuda.device(self.device):
            extension().decode(self.given, current_stream())
        return self._scratch.memory[: self.shape.numel()].view(self.shape)


def coded_weight(weight: EncodedRows, scratch: SharedScratch) -> CodedWeight | torch.Tensor:
    """Prepare encoded weights (out, in), of a format that apcbatch.model.encoded.Keeping keeps on this device. Returns
    them decoded, in bfloat16, if the kernels do not take their values."""
    runs = [run for _, _, run in weight.runs(_RUN)]
    codes = [run for run in runs if isinstance(run, Codes)]
    if len(runs) > MOST_PARTS or not codes or not all(map(_is_kept, codes)):
        return weight.decoded().to(scratch.memory.device)
    return CodedWeight(runs, scratch)


def _is_kept(run: Codes) -> bool:
    """Return True if the kernels take the values of these codes. They multiply code and scale in bfloat16. So that this
    is the float32 product rounded once, the scales must be exact in bfloat16; and no code may be NaN."""
    sizes, zeros = run.scales.abs(), run.zeros
    if zeros is not None and not bool(((zeros >= _LEAST_ZERO) & (zeros < 128 + _LEAST_ZERO)).all()):
        return False
    are_taken = (run.scales == run.scales.bfloat16()) & (sizes < _LARGEST) & ((sizes > _SMALLEST) | (sizes == 0))
    has_nan = run.kind == "fp8" and bool((run.codes & 0x7F == 0x7F).any())
    return bool(are_taken.all()) and not has_nan


def _part(run: Codes | torch.Tensor, device: torch.device) -> tuple[torch.Tensor, str, int, torch.Tensor | None]:
    """Return, on the device, the codes in the kernels' order (csrc/cuda/codes.h), the kind, the shift of an input to
    its group, and the scales (groups, rows), the rows padded to a multiple of 4. Of bfloat16 rows, the rows, "none" and
    no scales."""
    if isinstance(run, torch.Tensor):
        return run.to(device).contiguous(), "none", _ONE_GROUP, None
    codes = run.codes.to(device)
    if run.kind == "int4":
        nibbles = torch.stack([codes & 0xF, codes >> 4], -1).view(-1, 2, 2, 4, 2).permute(2, 0, 3, 4, 1)
        codes = (nibbles[0] | nibbles[1] << 4).reshape(codes.shape)
    else:
        codes = codes.view(-1, 2, 4, 2).flip(1).permute(0, 2, 3, 1).reshape(codes.shape)
    shift = _ONE_GROUP if run.group >= run.columns else run.group.bit_length() - 1
    rows, groups = run.scales.shape
    scales = torch.zeros((groups, (rows + 3) // 4 * 4), device=device)
    scales[:, :rows] = run.scales.t() * (_FP8_FACTOR if run.kind == "fp8" else 1.0)
    if run.kind == "int4":
        zeros = torch.full_like(scales, -_LEAST_ZERO, dtype=torch.int32)
        if run.zeros is not None:
            zeros[:, :rows] += run.zeros.t().to(device)
        scales = (scales.view(torch.int32) | zeros).view(torch.float32)
    return codes, run.kind, shift, scales
