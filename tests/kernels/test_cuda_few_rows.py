"""A mixer's products for a few rows together with the ops after them: the bits of the ops one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.kernels.cuda.batch import batch_on
from apcbatch.kernels.cuda.few_rows import ConvolvedProjection, FusedStep
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.mamba import DeviceMamba
from apcbatch.kernels.layer import MambaWeights, PreNorm
from apcbatch.kernels.ragged import Ragged
from tests.kernels.recurrent import poison, ragged, same_bits

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda", 0)
EPS = 1e-5
NORMS = ["none", "plain", "weighted"]
# h, d, n, r, w: a block of one row, every width of a stage, more rows in a block than it multiplies at once
SIZES = [
    (16, 32, 16, 16, 1),
    (64, 112, 16, 16, 4),
    (768, 1536, 16, 48, 4),
    (2560, 5120, 16, 160, 4),
    (4096, 8192, 16, 256, 3),
    (48, 9232, 16, 32, 2),
]


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    """Tensors are made on the CUDA device."""
    with torch.device(CUDA):
        yield


class RandomMixer:
    """A mixer of random weights over an arena of random states, the first of two layers in each slot. norms: of dt, B
    and C, "none", "plain" or "weighted"; biases: of the products around them."""

    def __init__(
        self,
        size: tuple[int, ...],
        norms: str = "none",
        dtype: torch.dtype = torch.bfloat16,
        exact: bool = True,
        biases: bool = False,
    ) -> None:
        h, d, n, r, w = size
        self.ops, self.size, self.dtype = CudaBackend(CUDA, exact), size, dtype
        inner = tuple(1 + 0.2 * torch.randn(size) if norms == "weighted" else None for size in (r, n, n))
        self.norm = PreNorm(1 + 0.2 * torch.randn(h), EPS)
        self.weights = MambaWeights(
            in_proj=self._linear(2 * d, h),
            x_proj=self._linear(r + 2 * n, d),
            dt_proj=self._linear(d, r),
            out_proj=self._linear(h, d),
            in_bias=torch.randn(2 * d) if biases else None,
            out_bias=torch.randn(h) if norms != "none" else None,
            conv_weight=torch.randn(d, w),
            conv_bias=torch.randn(d) if norms != "none" else None,
            A=-8 * torch.rand(n, d) - 0.1,
            D=torch.randn(d),
            dt_bias=torch.randn(d) - 3,
            norms=None if norms == "none" else inner,
            norm_eps=EPS,
        )
        self._start = torch.randn(24, 2, n, d), torch.randn(24, 2, w - 1, d).to(dtype)

    def _linear(self, outputs: int, inputs: int) -> DeviceLinear:
        return self.ops.pack_linear((torch.randn(outputs, inputs) * inputs**-0.5).to(self.dtype))

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._start[0].clone(), self._start[1].clone()

    def takes(self, batch: Ragged) -> tuple[bool, bool]:
        """Whether one launch runs in_proj and the convolution, and one dt_proj and the step."""
        w, (ssm, conv) = self.weights, self._start
        convolved = ConvolvedProjection(w.in_proj, w.in_bias, w.conv_weight, w.conv_bias, conv[:, 0])
        return tuple(part.takes(batch_on(CUDA, batch)) for part in (convolved, FusedStep(w, ssm[:, 0])))

    def passed(self, begin: torch.Tensor, batch: Ragged) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the mixer leaves, and the arena after it."""
        ssm, conv = self.arena()
        residual = self.ops.residual(begin.clone())
        for shape in ((2, len(begin), self.size[1]), (len(begin), self.size[1])):
            poison(shape, torch.bfloat16)
        DeviceMamba(self.norm, self.weights, ssm[:, 0], conv[:, 0])(residual, batch)
        assert residual.delta is not None
        return residual.delta, ssm, conv


def mixed(rows: int) -> Ragged:
    """Sequences from a slot or from nothing, into the same slot, another or none, with and without a snapshot."""
    return ragged(
        [1] * rows,
        [s if s % 3 != 1 else -1 for s in range(rows)],
        [(s, 8 + s, -1)[s % 3] if s else s for s in range(rows)],
        [[(1, 16 + s)] if s % 2 else [] for s in range(rows)],
    )


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_have_the_bits_of_the_ops_one_by_one(
    size: tuple[int, ...], norms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row or a column that is left out, another sequence's slot or state, a rounding that is left out, a wrong
    half of in_proj, states that are read before they are there."""
    mixer = RandomMixer(size, norms)
    for rows in range(1, 9):
        begin, batch = torch.randn(rows, size[0]), mixed(rows)
        assert mixer.takes(batch) == (True, True)
        found = mixer.passed(begin, batch)
        for fused in [[ConvolvedProjection, FusedStep], [ConvolvedProjection]]:
            with monkeypatch.context() as patch:
                for part in fused:
                    patch.setattr(part, "takes", lambda *_: False)
                expected = mixer.passed(begin, batch)
            assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True)), rows


# h, columns of in_proj and of the convolution, w: no column beside it, fewer, and more than a row of blocks has
@pytest.mark.parametrize(
    "size", [(16, 48, 48, 2), (48, 176, 100, 4), (2048, 12352, 8192, 4), (64, 9300, 20, 1)], ids=str
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_columns_beside_a_convolution_are_those_of_the_product(
    size: tuple[int, ...], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column that is convolved although it is not, or that is stored at another place or of another token."""
    h, out, d, w = size
    mixer = RandomMixer((16, 32, 16, 16, 1))
    conv = torch.randn(24, 2, w - 1, d).bfloat16()
    for rows in (1, 3, 8):
        begin, batch = torch.randn(rows, h).bfloat16(), batch_on(CUDA, mixed(rows))
        made = []
        projection, bias = mixer._linear(out, h), torch.randn(d) if has_bias else None
        weight = torch.randn(d, w)
        for is_fused in (True, False):
            its = conv.clone()
            fused = ConvolvedProjection(projection, None, weight, bias, its[:, 0])
            assert fused.takes(batch)
            for shape in ((rows, d), (rows, out - d)):
                poison(shape, torch.bfloat16)
            with monkeypatch.context() as patch:
                if not is_fused:
                    patch.setattr(ConvolvedProjection, "takes", lambda *_: False)
                made.append((*fused(begin, batch), its))
        assert all(same_bits(one.contiguous(), other.contiguous()) for one, other in zip(*made, strict=True)), rows


def test_take_only_what_they_can() -> None:
    """A batch of longer sequences or of more than a block multiplies, products of float32 or with a bias, and states
    that the kernel does not have."""
    one, size = ragged([1]), SIZES[1]
    for exact in (True, False):
        mixer = RandomMixer(size, "plain", exact=exact)
        assert mixer.takes(ragged([1] * 8)) == (True, True)
        assert mixer.takes(ragged([1] * 9)) == mixer.takes(ragged([2, 1])) == (False, False)
    assert RandomMixer(size, dtype=torch.float32).takes(one) == (False, False)
    assert RandomMixer(size, biases=True).takes(one) == (False, True)
    assert RandomMixer((64, 112, 15, 16, 4)).takes(one) == (True, False)
    assert RandomMixer((64, 112, 16, 16, 5)).takes(one) == (False, True)
