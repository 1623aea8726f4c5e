"""Measure each kernel at a model's own shapes and compare it with its roofline limit.

`of_limit` is the time at the limit over the measured time; 1 is the limit. The time at the limit is the larger of two:
operations over the machine's rate, and bytes over its memory bandwidth. A kernel whose data stays in a cache may exceed
1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from apcbatch.kernels.arguments import PAGE_TOKENS
from apcbatch.kernels.cpu.linear import PackedLinear, pack_linear
from apcbatch.kernels.cpu.ops import ops
from apcbatch.kernels.layer import SigmoidRouting
from apcbatch.kernels.ragged import Ragged
from apcbatch.layout import DELTA, SSD
from apcbatch.model.attention import Attention
from apcbatch.model.delta_net import DeltaNet
from apcbatch.model.families import state_layout
from apcbatch.model.feed_forward import Mixture
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.mamba import Mamba
from apcbatch.model.mamba2 import Mamba2

from .figures import Figure, Sizes, median_ratio, median_s, timed

GROUP = "kernels"
# Vector operations per element (csrc/vmath.h, csrc/scan_states.h). Each counts as one fma: 2 flops at peak.
SCAN_STATE_OPS = 13  # dt A split 3, a polynomial 5, its power of two 2, dt x B, h, y
SCAN_CHANNEL_OPS = 53  # softplus 29, SiLU of z 20, dt x, D x, the gate
SILU_OPS = 20
DELTA_OPS = 4  # per element of a delta state: decay S, k u, q S, and decay k S for the next token
SSD_OPS = 3  # per element of a Mamba-2 state: decay S, B x, C S
COLD_BYTES = 64 << 20  # a small product cycles through this much weight memory, so that no cache holds it
MOST_COPIES = 24


class Kernels:
    """Measurements of the kernels of one architecture in one dtype. products: (in_features, out_features) of its
    matrix products. limits: see machine.limits."""

    def __init__(
        self,
        config: ModelConfig,
        products: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        limits: dict[str, float],
        sizes: Sizes,
    ) -> None:
        self._config, self._products, self._dtype, self._limits, self._sizes = config, products, dtype, limits, sizes
        kinds = [block.kind for layer in range(config.num_layers) for block in config.layer(layer)]
        self._kinds: dict[type, Any] = {type(kind): kind for kind in kinds}
        self._num_mamba = sum(isinstance(kind, Mamba) for kind in kinds)

    def figures(self) -> Iterator[Figure]:
        """Measure all kernels, one after the other, and yield their figures."""
        if Mamba in self._kinds:
            yield from self._scans()
            yield self._convolution()
            yield from self._decode_steps()
        if DeltaNet in self._kinds:
            yield from self._delta_rules()
        if Mamba2 in self._kinds:
            yield from self._ssd()
        yield self._norm()
        if Mixture in self._kinds:
            yield self._routing()
        if Attention in self._kinds:
            yield self._attention()
        yield from self._each_product()

    def _scans(self) -> Iterator[Figure]:
        mamba, tokens = self._kinds[Mamba], self._sizes.kernel_tokens
        d, n = mamba.d_inner, mamba.d_state
        for threads in sorted({1, torch.get_num_threads()}):
            for dtype in dict.fromkeys((torch.float32, self._dtype)):
                seconds = _with_threads(threads, partial(median_s, self._scan(tokens, dtype), self._sizes))
                operations = tokens * d * (n * SCAN_STATE_OPS + SCAN_CHANNEL_OPS)
                size = dtype.itemsize * tokens * (4 * d + 2 * n)
                share = threads / torch.get_num_threads()
                yield self._figure(
                    f"scan, {threads} thread(s), {_name(dtype)}",
                    1e9 * seconds / (tokens * d),
                    "ns a token and channel",
                    self._limit_s(2 * operations / share, size) / seconds,
                )
        every = self._sizes.snapshot_every
        keeping, plain = self._scan(tokens, self._dtype, every), self._scan(tokens, self._dtype)
        keeping(), plain()
        ratio = median_ratio(lambda: timed(keeping), lambda: timed(plain), self._sizes.repeats)
        yield Figure(GROUP, f"scan with a snapshot every {every} over none", ratio, "x", {})

    def _scan(self, tokens: int, dtype: torch.dtype, every: int = 0) -> Callable[[], object]:
        """Return a call that scans one sequence from a zero state. It keeps the final state and, if `every` > 0, a
        snapshot every `every` tokens."""
        d, n = self._kinds[Mamba].d_inner, self._kinds[Mamba].d_state
        x, dt, z = (torch.randn(tokens, d).to(dtype) for _ in range(3))
        b, c = torch.randn(tokens, n).to(dtype), torch.randn(tokens, n).to(dtype)
        a, skip = -torch.rand(n, d) - 0.1, torch.randn(d)
        ragged = _one_sequence(tokens, every)
        state = torch.zeros(ragged.max_slot + 1, n, d)
        return lambda: ops.selective_scan(x, dt, a, b, c, skip, z, skip, state, ragged)

    def _convolution(self) -> Figure:
        mamba, tokens = self._kinds[Mamba], self._sizes.kernel_tokens
        d, width = mamba.d_inner, mamba.d_conv
        xz = torch.randn(tokens, 2 * d).to(self._dtype)
        weight, bias = torch.randn(d, width), torch.randn(d)
        state = torch.zeros(1, width - 1, d, dtype=self._dtype)
        ragged = _one_sequence(tokens)
        seconds = median_s(lambda: ops.causal_conv(xz[:, :d], weight, bias, state, ragged), self._sizes)
        operations, size = tokens * d * (width + SILU_OPS), 2 * self._dtype.itemsize * tokens * d
        share = self._limit_s(2 * operations, size) / seconds
        value = 1e9 * seconds / (tokens * d)
        return self._figure("convolution and SiLU", value, "ns a token and channel", share)

    def _decode_steps(self) -> Iterator[Figure]:
        """Measure convolution and scan of one new token per sequence, over the layers' separate states."""
        for running in self._sizes.decode_running:
            layers, seconds, mamba = self._num_mamba, median_s(self._decode(running), self._sizes), self._kinds[Mamba]
            size = layers * running * mamba.d_inner * (8 * mamba.d_state + 2 * self._dtype.itemsize * mamba.d_conv)
            yield self._figure(
                f"decode step without its products, {running} running",
                1e6 * seconds / layers,
                "us a layer",
                self._limit_s(0, size) / seconds,
            )

    def _decode(self, running: int) -> Callable[[], None]:
        mamba, layers, dtype = self._kinds[Mamba], self._num_mamba, self._dtype
        d, n, width = mamba.d_inner, mamba.d_state, mamba.d_conv
        x, dt, z = (torch.randn(running, d).to(dtype) for _ in range(3))
        b, c = torch.randn(running, n).to(dtype), torch.randn(running, n).to(dtype)
        a, skip = -torch.rand(n, d) - 0.1, torch.randn(d)
        weight = torch.randn(d, width)
        ssm = torch.zeros(running, layers, n, d)
        conv = torch.zeros(running, layers, width - 1, d, dtype=dtype)
        slots = torch.arange(running)
        ragged = Ragged.create(torch.arange(running + 1), slots, slots)

        def step() -> None:
            for layer in range(layers):
                y = ops.causal_conv(x, weight, skip, conv[:, layer], ragged)
                ops.selective_scan(y, dt, a, b, c, skip, z, skip, ssm[:, layer], ragged)

        return step

    def _delta_rules(self) -> Iterator[Figure]:
        sizes = self._kinds[DeltaNet]
        heads = sizes.key_heads, sizes.value_heads
        yield from self._head_scans("delta rule", DELTA.name, DELTA_OPS, heads, (sizes.keys, sizes.values))

    def _ssd(self) -> Iterator[Figure]:
        sizes = self._kinds[Mamba2]
        heads, rule = (sizes.groups, sizes.heads), (torch.rand(sizes.heads), (0.0, math.inf))
        yield from self._head_scans("Mamba-2 scan", SSD.name, SSD_OPS, heads, (sizes.states, sizes.inner), *rule)

    def _head_scans(
        self,
        name: str,
        role: str,
        ops_each: int,
        heads: tuple[int, int],
        columns: tuple[int, int],
        *rule: Any,
    ) -> Iterator[Figure]:
        """Measure a recurrence over heads of one long sequence, and of one new token per sequence.

        role: name of its state's role. ops_each: vector operations per element of the state, for each token. heads:
        numbers of heads of k and v. columns: columns of k, and of v, over all their heads. rule: D and dt_limits of
        Mamba-2.
        """
        stack = next(one for one in state_layout(self._config, "float32").stacks if one.role.name == role)
        shape = [int(size or 0) for size in stack.shape]
        (keys, values), (key_heads, value_heads) = columns, heads
        vector = -torch.rand(value_heads)
        for tokens, running in ((self._sizes.kernel_tokens, 1), *((1, b) for b in self._sizes.decode_running)):
            count = tokens * running
            qkv = torch.randn(count, 2 * keys + values).to(self._dtype)
            gates = torch.randn(count, (1 if rule else 2) * value_heads).to(self._dtype)
            state = torch.zeros(running, *shape)
            slots = torch.arange(running)
            batch = Ragged.create(torch.arange(running + 1) * tokens, slots, slots)
            scan = partial(ops.head_scan, qkv, gates, key_heads, vector, vector, state, batch, *rule)
            seconds = median_s(scan, self._sizes)
            moved = 2 * 4 * state.numel() + count * (self._dtype.itemsize * qkv.shape[1] + 4 * values)
            flops = 2 * ops_each * count * math.prod(shape)
            value, share = 1e9 * seconds / (count * value_heads), self._limit_s(flops, moved) / seconds
            which = f"{name} of {tokens} tokens" if tokens > 1 else f"{name} of one token, {running} running"
            yield self._figure(which, value, "ns a token and head", share)

    def _norm(self) -> Figure:
        tokens, h = self._sizes.kernel_tokens, self._config.hidden_size
        residual, delta, weight = torch.randn(tokens, h), torch.zeros(tokens, h), torch.ones(h)
        norm = partial(ops.add_rms_norm_, residual, delta, weight, 1e-5, self._dtype)
        seconds, size = median_s(norm, self._sizes), tokens * h * (12 + self._dtype.itemsize)
        value = 1e9 * seconds / (tokens * h)
        share = self._limit_s(4 * tokens * h, size) / seconds
        return self._figure("residual and RMS norm", value, "ns a token and channel", share)

    def _routing(self) -> Figure:
        mixture, tokens = self._kinds[Mixture], self._sizes.kernel_tokens
        logits, sigmoid = torch.randn(tokens, mixture.experts), None
        if (choice := mixture.sigmoid) is not None:
            sigmoid = SigmoidRouting(torch.randn(mixture.experts), choice.groups, choice.top_groups)
        route = partial(ops.route, logits, mixture.per_token, False, sigmoid)
        seconds = median_s(route, self._sizes)
        return Figure(GROUP, "routing to experts", 1e9 * seconds / tokens, "ns a token", {})

    def _attention(self) -> Figure:
        mixer, pages = self._kinds[Attention], -(-self._sizes.kernel_tokens // PAGE_TOKENS)
        tokens, heads, size = pages * PAGE_TOKENS, mixer.heads, mixer.head_dim
        q = torch.randn(tokens, heads, size).to(self._dtype)
        cache = torch.randn(2, pages, PAGE_TOKENS, mixer.kv_heads, size).to(self._dtype)
        table, ends = torch.arange(pages).unsqueeze(0), torch.tensor([0, tokens])
        context = torch.zeros(1, dtype=torch.int64)
        attend = partial(ops.paged_attention, q, cache[0], cache[1], table, ends, context, size**-0.5)
        seconds, flops = median_s(attend, self._sizes), 2 * heads * size * tokens**2
        share = self._limit_s(flops, 2 * q.nbytes + cache.nbytes) / seconds
        return self._figure(f"attention over {tokens} tokens", 1e-9 * flops / seconds, "GFLOP/s", share)

    def _each_product(self) -> Iterator[Figure]:
        for inputs, outputs in self._products:
            rows = [r for r in self._sizes.product_rows if outputs != self._config.vocab_size or r <= 32]
            weight = torch.randn(outputs, inputs).to(self._dtype)
            copies = min(MOST_COPIES, -(-COLD_BYTES // weight.nbytes))
            packed = [pack_linear(weight) for _ in range(copies)]
            for count in rows:
                x = torch.randn(count, inputs).to(self._dtype)
                seconds = median_s(partial(_all_products, x, packed), self._sizes)
                seconds, flops = seconds / copies, 2 * count * inputs * outputs
                size = weight.nbytes + self._dtype.itemsize * count * (inputs + outputs)
                limit = max(flops / self._limits["product_flops_per_s"], size / self._limits["read_bytes_per_s"])
                label = f"product {count} x {inputs} x {outputs}"
                yield self._figure(label, 1e-9 * flops / seconds, "GFLOP/s", limit / seconds)

    def _limit_s(self, flops: float, size: float) -> float:
        """Return the roofline limit in seconds for this many operations (an fma is two) and bytes."""
        return max(flops / self._limits["float32_flops_per_s"], size / self._limits["read_bytes_per_s"])

    def _figure(self, name: str, value: float, unit: str, of_limit: float) -> Figure:
        return Figure(GROUP, name, value, unit, {"of_limit": of_limit})


def _one_sequence(tokens: int, every: int = 0) -> Ragged:
    """Return a batch of one sequence from a zero state. Its final state goes to slot 0; a snapshot every `every` tokens
    (0: none) goes to the slots from 1 on."""
    positions = torch.arange(every, tokens + 1, every) if every else torch.empty(0, dtype=torch.int64)
    cuts = torch.tensor([0, len(positions)])
    ends, begin, final = torch.tensor([0, tokens]), torch.tensor([-1]), torch.tensor([0])
    return Ragged.create(ends, begin, final, cuts, positions, 1 + torch.arange(len(positions)))


def _all_products(x: torch.Tensor, packed: list[PackedLinear]) -> None:
    for weights in packed:
        ops.linear(x, weights)


def _with_threads(threads: int, run: Callable[[], float]) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
