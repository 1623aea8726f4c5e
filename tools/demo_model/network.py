"""The networks in plain PyTorch, for training: parameters have their names on the hub, so a state_dict is a checkpoint.

Every weight is rounded to bfloat16 where it is used, and its gradient goes to the float32 master: what is trained is
what is written. Products are in bfloat16 on a GPU and in float32 on a CPU; the residual stream is float32.
Shapes: r rows, t tokens of a row, h hidden, d d_inner, n d_state. Must not know: text, the optimiser.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model.selective_scan import selective_scan
from demo_model.shapes import D_CONV, RMS_EPS, Shape
from demo_model.tokenizer import VOCAB_SIZE

DT_MIN, DT_MAX = 0.001, 0.1
EMBEDDING_STD = 0.02


def rounded(weight: Tensor) -> Tensor:
    """The weight as the checkpoint has it, in float32; gradients pass."""
    return weight.to(torch.bfloat16).to(weight.dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., in) times weight (out, in), in the dtype of products of x's device."""
    if x.is_cuda:
        return F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16))
    return F.linear(x, rounded(weight))


class Norm(nn.Module):
    """RMS norm with a weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + RMS_EPS) * rounded(self.weight)


class Linear(nn.Module):
    """A product without a bias; scale: how large the outputs are beside the inputs at the start."""

    def __init__(self, inputs: int, outputs: int, scale: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * (scale / math.sqrt(inputs)))

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


class StepProjection(nn.Module):
    """dt_proj: its bias makes steps log-uniform from DT_MIN to DT_MAX at the start (arXiv 2312.00752, section 3.6)."""

    def __init__(self, rank: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.rand(channels, rank) * 2 - 1) * rank**-0.5)
        step = torch.exp(torch.rand(channels) * math.log(DT_MAX / DT_MIN) + math.log(DT_MIN))
        self.bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(product(x, self.weight).float() + rounded(self.bias))


class Convolution(nn.Module):
    """The causal convolution of each channel over time (r, t, d), before the state."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        bound = D_CONV**-0.5
        self.weight = nn.Parameter((torch.rand(channels, 1, D_CONV) * 2 - 1) * bound)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        weight, t = rounded(self.weight), x.shape[1]
        padded = F.pad(x.float(), (0, 0, D_CONV - 1, 0))
        taps = (padded[:, i : i + t] * weight[:, 0, i] for i in range(D_CONV))
        return sum(taps, rounded(self.bias))


class MambaMixer(nn.Module):
    """Mamba-1 (arXiv 2312.00752, algorithm 2); with norms on dt, B and C as Jamba has them."""

    def __init__(self, shape: Shape, out_scale: float) -> None:
        super().__init__()
        d, n = shape.d_inner, shape.d_state
        self.sizes = [shape.dt_rank, n, n]
        self.in_proj = Linear(shape.hidden_size, 2 * d)
        self.conv1d = Convolution(d)
        self.x_proj = Linear(d, sum(self.sizes))
        self.dt_proj = StepProjection(shape.dt_rank, d)
        self.A_log = nn.Parameter(torch.arange(1.0, n + 1.0).log().repeat(d, 1))
        self.D = nn.Parameter(torch.ones(d))
        self.out_proj = Linear(d, shape.hidden_size, out_scale)
        self.has_norms = bool(shape.heads)
        if self.has_norms:
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = (Norm(size) for size in self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x))
        dt, b, c = self.x_proj(x).float().split(self.sizes, dim=-1)
        if self.has_norms:
            dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        decay = -torch.exp(rounded(self.A_log)).t().contiguous()  # (d, n) -> (n, d)
        y = selective_scan(x, self.dt_proj(dt), decay, b.contiguous(), c.contiguous()) + x * rounded(self.D)
        return self.out_proj(y * F.silu(gate.float()))


class Attention(nn.Module):
    """Causal attention with grouped queries and no position embeddings."""

    def __init__(self, shape: Shape, out_scale: float) -> None:
        super().__init__()
        h, self.heads, self.kv_heads = shape.hidden_size, shape.heads, shape.kv_heads
        kv = h // shape.heads * shape.kv_heads
        self.q_proj, self.k_proj, self.v_proj = Linear(h, h, 1.0), Linear(h, kv, 1.0), Linear(h, kv)
        self.o_proj = Linear(h, h, out_scale)

    def forward(self, x: Tensor) -> Tensor:
        r, t, _ = x.shape
        q = self.q_proj(x).view(r, t, self.heads, -1).transpose(1, 2)  # (r, t, h) -> (r, heads, t, head_dim)
        k, v = (
            project(x).view(r, t, self.kv_heads, -1).transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, 1)
            for project in (self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(r, t, -1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape, out_scale: float) -> None:
        super().__init__()
        h, f = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = Linear(h, f), Linear(h, f), Linear(f, h, out_scale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y, torch.zeros((), device=x.device)


class Mixture(nn.Module):
    """Experts, of which each token takes the likeliest few; all are computed, as they are few and small. The second
    result is the loss that spreads tokens over them (Fedus et al., arXiv 2101.03961, equation 4)."""

    def __init__(self, shape: Shape, out_scale: float) -> None:
        super().__init__()
        self.per_token = shape.experts_per_token
        self.router = Linear(shape.hidden_size, shape.experts)
        self.experts = nn.ModuleList(Mlp(shape, out_scale) for _ in range(shape.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.router(x).float().softmax(-1)  # (r, t, experts)
        chosen = share >= share.topk(self.per_token, dim=-1).values[..., -1:]
        weight = share * chosen
        y = torch.stack([expert(x)[0] * weight[..., i : i + 1] for i, expert in enumerate(self.experts)]).sum(0)
        load = chosen.float().mean((0, 1)) * share.mean((0, 1))
        return y, load.sum() * (len(self.experts) / self.per_token)


class MambaLayer(nn.Module):
    """A norm and a mixer."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.norm = Norm(shape.hidden_size)
        self.mixer = MambaMixer(shape, 0.5 / math.sqrt(shape.layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.mixer(self.norm(x)), torch.zeros((), device=x.device)


class JambaLayer(nn.Module):
    """A norm and a mixer, then a norm and a feed-forward part."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        out_scale = 0.5 / math.sqrt(2 * shape.layers)
        self.input_layernorm = Norm(shape.hidden_size)
        self.pre_ff_layernorm = Norm(shape.hidden_size)
        self.mixer_name = "self_attn" if shape.is_attention(layer) else "mamba"
        mixer = Attention(shape, out_scale) if shape.is_attention(layer) else MambaMixer(shape, out_scale)
        self.add_module(self.mixer_name, mixer)
        self.feed_forward = Mixture(shape, out_scale) if shape.is_mixture(layer) else Mlp(shape, out_scale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + getattr(self, self.mixer_name)(self.input_layernorm(x))
        y, balance = self.feed_forward(self.pre_ff_layernorm(x))
        return x + y, balance


class Network(nn.Module):
    """Embedding, layers, final norm; the head is the embedding. Made from the seed of torch's generator."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        names = ("embed_tokens", "final_layernorm") if shape.heads else ("embeddings", "norm_f")
        self.stem, self.embedding_name, self.norm_name = "model" if shape.heads else "backbone", *names
        layer = JambaLayer if shape.heads else MambaLayer
        stack = nn.Module()
        stack.add_module("layers", nn.ModuleList(layer(shape, i) for i in range(shape.layers)))
        embedding = nn.Embedding(VOCAB_SIZE, shape.hidden_size)
        nn.init.normal_(embedding.weight, std=EMBEDDING_STD)
        stack.add_module(self.embedding_name, embedding)
        stack.add_module(self.norm_name, Norm(shape.hidden_size))
        self.add_module(self.stem, stack)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids (r, t) int64 -> final hidden states (r, t, h), and the loss of the routers' balance."""
        x = F.embedding(ids, rounded(self.embedding))
        balance = torch.zeros((), device=ids.device)
        for layer in self.layers:
            x, more = layer(x)
            balance = balance + more
        return getattr(getattr(self, self.stem), self.norm_name)(x), balance

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, first to last."""
        layers: nn.ModuleList = getattr(self, self.stem).layers
        return layers

    @property
    def embedding(self) -> Tensor:
        """(vocabulary, h), which is the head too."""
        weight: Tensor = getattr(getattr(self, self.stem), self.embedding_name).weight
        return weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., h) -> logits (..., vocabulary)."""
        return product(hidden, self.embedding)

    def checkpoint(self) -> dict[str, Tensor]:
        """Every tensor by its name on the hub, bfloat16 on the CPU."""
        return {
            name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in self.state_dict().items()
        }
