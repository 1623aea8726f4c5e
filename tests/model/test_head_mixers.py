"""The gated delta net and Mamba-2 mixers against transformers."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from apcbatch.kernels.layer import PreNorm
from apcbatch.kernels.ragged import Ragged
from apcbatch.layout import StateLayout
from apcbatch.model.arena import StateArena
from apcbatch.model.delta_net import DeltaNet
from apcbatch.model.devices import backend_for
from apcbatch.model.mamba2 import Mamba2
from apcbatch.model.sub_blocks import SubBlockKind
from apcbatch.model.tensor_source import TensorSource
from tests.effort import table, tries
from tests.kernels.recurrent import ragged, same_bits
from tests.model.parity import in_float64

CPU = torch.device("cpu")
HIDDEN = 8
# A norm enlarges the rounding errors of a head that is near zero, up to eps^-0.5 times: wider than real models'.
DELTA_EPS, MAMBA2_EPS = 1e-5, 1e-2
SIZES = [(2, 4, 8, 12), (1, 1, 16, 24), (2, 6, 12, 96), (1, 2, 128, 128)]  # Hk, Hv, K, V; G, H, N, P


class StateDict:
    """A checkpoint of a module's tensors, which names all that it was asked for."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._tensors = {f"mixer.{name}": value for name, value in module.state_dict().items()}
        self.taken: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert self._tensors[name].shape == shape
        self.taken.add(name)
        return self._tensors[name]

    def finish(self) -> None:
        assert self.taken == set(self._tensors), "a tensor of the checkpoint that the mixer does not use"


Made = tuple[torch.nn.Module, SubBlockKind]


def delta_net(sizes: tuple[int, int, int, int], is_grouped: bool = False) -> Made:
    """The mixer of transformers, and ours."""
    from transformers import Qwen3_5TextConfig, Qwen3NextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = (Qwen3NextConfig if is_grouped else Qwen3_5TextConfig)(
        hidden_size=HIDDEN, linear_num_key_heads=sizes[0], linear_num_value_heads=sizes[1],
        linear_key_head_dim=sizes[2], linear_value_head_dim=sizes[3], num_hidden_layers=1,
        layer_types=["linear_attention"], num_attention_heads=4, rms_norm_eps=DELTA_EPS,
    )  # fmt: skip
    key_heads, value_heads, key_dim, value_dim = sizes
    ours = DeltaNet(
        key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim,
        d_conv=config.linear_conv_kernel_dim, is_grouped=is_grouped,
    )  # fmt: skip
    return (Qwen3NextGatedDeltaNet if is_grouped else Qwen3_5GatedDeltaNet)(config, 0), ours


def mamba2(sizes: tuple[int, int, int, int]) -> Made:
    """With limits that bind for some tokens, and a bias of the convolution for two of the sizes."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    groups, heads, d_state, head_dim = sizes
    limits, has_bias = (0.05, 1.5), sizes[0] == 2
    config = Mamba2Config(
        hidden_size=HIDDEN, num_heads=heads, head_dim=head_dim, n_groups=groups, state_size=d_state,
        expand=heads * head_dim // HIDDEN, time_step_limit=limits, use_conv_bias=has_bias, num_hidden_layers=1,
        layer_norm_epsilon=MAMBA2_EPS,
    )  # fmt: skip
    ours = Mamba2(
        heads=heads, head_dim=head_dim, groups=groups, d_state=d_state, d_conv=4, conv_bias=has_bias,
        time_step_limit=limits,
    )  # fmt: skip
    return Mamba2Mixer(config, 0), ours


MAKERS = {"delta": delta_net, "grouped delta": partial(delta_net, is_grouped=True), "mamba2": mamba2}


class Mixers:
    """A mixer of random weights in transformers and here, and its states."""

    def __init__(self, kind: str, sizes: tuple[int, int, int, int], slots: int) -> None:
        theirs, ours = MAKERS[kind](sizes)
        self.theirs = theirs.float().eval()
        with torch.no_grad():
            for name, parameter in self.theirs.named_parameters():
                scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.5
                parameter.copy_(torch.randn_like(parameter) * scale + (1 if name == "norm.weight" else 0))
        layout = StateLayout.of(ours.state(0, "float32"))
        self.arena, tensors = StateArena(layout, slots, 0, CPU), StateDict(self.theirs)
        for part in self.arena.slots.values():
            part.fill_(float("nan"))
        self.backend = backend_for(CPU)
        self.norm = PreNorm(1 + 0.2 * torch.randn(HIDDEN), MAMBA2_EPS if kind == "mamba2" else DELTA_EPS)
        source = TensorSource(tensors, "mixer", torch.float32, self.backend, 1.0, {})
        self.block = ours.load(source, self.norm, self.arena.layer(0))
        tensors.finish()
        self.theirs.double()

    def ours(self, x: torch.Tensor, batch: Ragged) -> torch.Tensor:
        residual = self.backend.residual(x.clone())
        self.block(residual, SimpleNamespace(ragged=batch))
        return residual.delta

    def expected(self, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        """What transformers' mixer gives for one sequence, normed by torch, in float64."""
        normed = torch.nn.functional.rms_norm(x.double(), (HIDDEN,), self.norm.weight.double(), self.norm.eps)
        with in_float64(monkeypatch):
            return self.theirs(normed.unsqueeze(0))[0]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error over the largest value, or over 1, about what a mixer gives, where q and k of a short sequence
    nearly cancel and leave no more than rounding errors."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))


@pytest.mark.slow
@table("sizes", SIZES)
@table("kind", MAKERS)
def test_equals_transformers(kind, sizes, threads, monkeypatch) -> None:
    """Catches tensors packed in another order, a head that uses another's key, gate or decay, a norm of other columns,
    and a cut of the prompt that changes a bit."""
    for _ in range(tries(20)):
        mixers, length = Mixers(kind, sizes, 2), random.choice([1, 2, 3, 4, 63, 64, 65, random.randint(1, 300)])
        x = torch.randn(length, HIDDEN)
        whole = mixers.ours(x, ragged([length], [-1], [0]))
        assert relative(whole, mixers.expected(x, monkeypatch)) < 1e-5
        ends = sorted({*(random.randint(1, length) for _ in range(random.choice([0, 1, 5, 300]))), length})
        pieces = [
            mixers.ours(x[begin:end], ragged([end - begin], [1 if begin else -1], [1]))
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        assert same_bits(torch.cat(pieces), whole), ends
        assert all(same_bits(part[0], part[1]) for part in mixers.arena.slots.values())
