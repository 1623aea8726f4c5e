"""Specification of the ops in plain PyTorch. The kernels are tested against it.

Shapes and dtypes of arguments and results are those of apcbatch.kernels.ops. Here activations may also be float64. The
ops compute in float32, or in float64 for float64 activations; tests derive their tolerances from the float64 results.
Recurrent ops compute one token at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from apcbatch.kernels.layer import TURN_BITS, SigmoidRouting
from apcbatch.kernels.ragged import Ragged


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    ragged: Ragged,
    has_silu: bool = True,
) -> torch.Tensor:
    """Compute s_t = bias + sum_k weight_k x_(t - w + 1 + k). Returns silu(s), or s without has_silu; see
    apcbatch.kernels.ops."""
    compute = torch.promote_types(x.dtype, torch.float32)
    past = weight.shape[1] - 1
    taps = weight.to(compute).t()  # (d, w) -> (w, d)
    out = torch.empty_like(x)

    def step(token: int, window: torch.Tensor) -> torch.Tensor:
        window = torch.cat([window, x[token : token + 1]])  # (w, d): the last w raw inputs
        total = (taps * window.to(compute)).sum(0)
        total = total if bias is None else total + bias.to(compute)
        out[token] = (F.silu(total) if has_silu else total).to(x.dtype)
        return window[window.shape[0] - past :]

    _run(ragged, state, step)
    return out


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    ragged: Ragged,
) -> torch.Tensor:
    """Compute dt = softplus(dt + dt_bias), h = exp(dt A) h + dt x B, y = (D x + sum_n C h) silu(z).

    Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752,
    section 3.2.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    x_, step_, A_, B_, C_ = (value.to(compute) for value in (x, dt, A, B, C))
    step_ = F.softplus(step_ if dt_bias is None else step_ + dt_bias.to(compute))  # (t, d)
    input_ = step_ * x_
    y = torch.empty_like(x_)

    def step(token: int, h: torch.Tensor) -> torch.Tensor:
        decay = torch.exp(step_[token] * A_)  # (d), (n, d) -> (n, d)
        h = decay * h.to(compute) + input_[token] * B_[token, :, None]
        y[token] = (C_[token, :, None] * h).sum(0)  # (n, d) -> (d)
        return h

    _run(ragged, state, step)
    if D is not None:
        y += D.to(compute) * x_
    if z is not None:
        y *= F.silu(z.to(compute))
    return y.to(x.dtype)


def head_scan(
    x: torch.Tensor,
    gates: torch.Tensor,
    key_heads: int,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    ragged: Ragged,
    D: torch.Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:
    """Compute `delta_rule`, or with D `ssd`, over columns of x and gates; see apcbatch.kernels.ops."""
    heads, keys = A.numel(), key_heads * state.shape[3]
    parts = x.tensor_split((keys, 2 * keys), 1)
    q, k, v = (part.reshape(len(x), n, -1) for part, n in zip(parts, (key_heads, key_heads, heads), strict=True))
    if D is None:
        return delta_rule(q, k, v, gates[:, :heads], gates[:, heads:], A, dt_bias, state, ragged).flatten(1)
    return ssd(v, gates, A, k, q, D, dt_bias, dt_limits, state, ragged).flatten(1)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    ragged: Ragged,
) -> torch.Tensor:
    """Compute the gated delta rule. For each token and value head, with q and k
    normed to length 1, q also divided by sqrt(K), beta = sigmoid(b) and d = exp(A softplus(a + dt_bias)):

    S_t = d S_(t-1) + k (beta (v - S_(t-1)^T (d k)))^T, o = S_t^T q.

    Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, equation 10.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    group, blocks = v.shape[1] // q.shape[1], state.shape[2]
    q_, k_ = (_unit_rows(x.to(compute)).repeat_interleave(group, 1) for x in (q, k))  # (t, Hv, K)
    q_ = q_ / q.shape[2] ** 0.5
    v_ = v.to(compute).view(*v.shape[:2], blocks, -1)  # (t, Hv, V) -> (t, Hv, blocks, lanes)
    beta = torch.sigmoid(b.to(compute))[:, :, None, None]
    decay = torch.exp(A.to(compute) * F.softplus(a.to(compute) + dt_bias.to(compute)))[:, :, None]  # (t, Hv, 1)
    out = torch.empty_like(v_)

    def step(token: int, S: torch.Tensor) -> torch.Tensor:  # (Hv, blocks, K, lanes)
        read = torch.einsum("hi,hcil->hcl", decay[token] * k_[token], S)
        u = beta[token] * (v_[token] - read)
        S = decay[token, :, :, None, None] * S + torch.einsum("hi,hcl->hcil", k_[token], u)
        out[token] = torch.einsum("hi,hcil->hcl", q_[token], S)
        return S

    _run(ragged, state, step)
    return out.flatten(2)


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limits: tuple[float, float],
    state: torch.Tensor,
    ragged: Ragged,
) -> torch.Tensor:
    """Compute the recurrence of Mamba-2. For each token and head, with s = softplus(dt + dt_bias)
    limited to dt_limits:

    S_t = exp(A s) S_(t-1) + B (s x)^T, y = S_t^T C + D x.

    Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, equation 1 with a scalar A for each head.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    group, blocks = x.shape[1] // B.shape[1], state.shape[2]
    B_, C_ = (value.to(compute).repeat_interleave(group, 1) for value in (B, C))  # (t, H, N)
    x_ = x.to(compute).view(*x.shape[:2], blocks, -1)  # (t, H, P) -> (t, H, blocks, lanes)
    steps = F.softplus(dt.to(compute) + dt_bias.to(compute)).clamp(*dt_limits)
    decay = torch.exp(A.to(compute) * steps)[:, :, None, None, None]
    out = torch.empty_like(x_)

    def step(token: int, S: torch.Tensor) -> torch.Tensor:  # (H, blocks, N, lanes)
        u = steps[token, :, None, None] * x_[token]
        S = decay[token] * S + torch.einsum("hi,hcl->hcil", B_[token], u)
        out[token] = torch.einsum("hi,hcil->hcl", C_[token], S) + D.to(compute)[:, None, None] * x_[token]
        return S

    _run(ragged, state, step)
    return out.flatten(2)


def _unit_rows(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    heads: int,
    weight: torch.Tensor | None,
    eps: float,
    gate_first: bool = False,
) -> torch.Tensor:
    """Compute norm(x) * weight * silu(gate), or with gate_first norm(x * silu(gate)) * weight, for each head, where
    norm(x) = x / sqrt(mean(x^2) + eps); without a weight x * silu(gate)."""
    compute, (t, d) = torch.promote_types(gate.dtype, torch.float32), x.shape
    factor = F.silu(gate.to(compute))
    if weight is None:
        return (x.to(compute) * factor).to(gate.dtype)
    rows, weight = (x.to(compute) * factor if gate_first else x.to(compute)), weight.to(compute)
    y = rms_norm(rows.view(t, heads, -1), None, eps, compute) * weight.view(-1, d // heads)  # of one head or of each
    return (y.view(t, d) if gate_first else y.view(t, d) * factor).to(gate.dtype)


def _run(ragged: Ragged, state: torch.Tensor, step: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Run carry = step(token, carry) over the tokens of each sequence. Reads the initial slots, and writes the snapshot
    and final slots."""
    offsets, cuts = ragged.cu_seqlens.tolist(), ragged.snapshot_cu.tolist()
    for sequence in range(ragged.num_sequences):
        initial, final = int(ragged.initial_slots[sequence]), int(ragged.final_slots[sequence])
        carry = torch.zeros_like(state[0]) if initial < 0 else state[initial].clone()
        kept = slice(cuts[sequence], cuts[sequence + 1])
        slot_after = dict(
            zip(ragged.snapshot_positions[kept].tolist(), ragged.snapshot_slots[kept].tolist(), strict=True)
        )
        for token in range(offsets[sequence], offsets[sequence + 1]):
            carry = step(token, carry)
            consumed = token + 1 - offsets[sequence]
            if consumed in slot_after:
                state[slot_after[consumed]] = carry
        if final >= 0:
            state[final] = carry


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of the weights, not reordered; see apcbatch.kernels.ops."""
    return weight.clone()


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute y = x W^T (+ bias). With bfloat16 weights, x is first rounded to bfloat16."""
    compute = torch.promote_types(x.dtype, torch.float32)
    rounded = x.to(torch.bfloat16) if packed.dtype == torch.bfloat16 else x
    y = rounded.to(compute) @ packed.to(compute).t()  # (t, in), (out, in) -> (t, out)
    return (y if bias is None else y + bias.to(compute)).to(out_dtype or x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight; see apcbatch.kernels.ops."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return (y if weight is None else y * weight).to(out_dtype)


def add_rms_norm_(
    residual: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Add delta to the residual in place, then compute its rms_norm."""
    residual += delta
    return rms_norm(residual, weight, eps, out_dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up."""
    compute = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(compute)) * up.to(compute)).to(gate.dtype)


def relu_square(x: torch.Tensor) -> torch.Tensor:
    """Compute max(x, 0)^2."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).relu().square().to(x.dtype)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Compute x * sigmoid(gate)."""
    compute = torch.promote_types(x.dtype, torch.float32)
    return (x.to(compute) * gate.to(compute).sigmoid()).to(x.dtype)


def norm_rope(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, steps: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Compute the rms_norm of each head, unless weight is None, then rotate its first 2p columns; see
    apcbatch.kernels.ops. Angles, cosines and sines are computed in float64."""
    compute = torch.promote_types(x.dtype, torch.float32)
    y, pairs = x.to(compute) if weight is None else rms_norm(x, weight, eps, compute), steps.numel()
    radians = steps.double() * (2 * math.pi / 2**TURN_BITS)
    angles = (positions.double().unsqueeze(1) * radians).unsqueeze(1)  # (t, 1, pairs): the same for all heads
    cos, sin = angles.cos().to(compute), angles.sin().to(compute)
    first, second, rest = y[..., :pairs], y[..., pairs : 2 * pairs], y[..., 2 * pairs :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    token_slots: torch.Tensor,
) -> None:
    """Write k and v to the cache rows token_slots; see apcbatch.kernels.ops."""
    k_cache.flatten(0, 1)[token_slots] = k.to(k_cache.dtype)
    v_cache.flatten(0, 1)[token_slots] = v.to(v_cache.dtype)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute softmax(scale q k^T) v, causal, sequence by sequence; see apcbatch.kernels.ops."""
    compute = torch.promote_types(q.dtype, torch.float32)
    group, page_tokens = q.shape[1] // k_cache.shape[2], k_cache.shape[1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    offsets = cu_seqlens.tolist()
    for i, begin in enumerate(offsets[:-1]):
        queries = q[begin : offsets[i + 1]].to(compute)  # (t, heads, head_dim)
        first = int(context[i])
        keys = torch.arange(first + queries.shape[0])
        slots = page_table[i, keys // page_tokens] * page_tokens + keys % page_tokens
        k, v = (
            cache.flatten(0, 1)[slots].to(compute).repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )  # (keys, heads, head_dim)
        scores = torch.einsum("qhd,khd->hqk", queries, k) * scale
        seen = keys <= torch.arange(first, first + queries.shape[0]).unsqueeze(1)  # (t, keys)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[begin : offsets[i + 1]] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def route(
    logits: torch.Tensor, k: int, is_normalised: bool = False, sigmoid: SigmoidRouting | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and indices of each row's k columns by `softmax_topk` or `sigmoid_topk`, the weights divided
    by their sum if is_normalised, and multiplied by the scale of sigmoid."""
    if sigmoid is None:
        weights, indices = softmax_topk(logits, k)
    else:
        weights, indices = sigmoid_topk(logits, k, sigmoid.bias, sigmoid.groups, sigmoid.top_groups)
    if is_normalised:
        weights = weights / (weights.sum(1, keepdim=True) + (0.0 if sigmoid is None else sigmoid.eps))
    return weights * (1.0 if sigmoid is None else sigmoid.scale), indices


def softmax_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors for the k largest logits of each row: their weights in the softmax over the whole row, and
    their indices. On ties the lower index comes first."""
    indices = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return logits.softmax(-1).gather(1, indices), indices


def sigmoid_topk(
    logits: torch.Tensor, k: int, bias: torch.Tensor, groups: int, top_groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors for the k columns of each row with the largest sigmoid(logit) + bias, among the top_groups
    groups with the largest sums of their two largest: their sigmoids, and their indices. On ties the lower group and
    the lower index come first."""
    sigmoids = logits.sigmoid()
    scores = (sigmoids + bias).view(len(logits), groups, -1)  # (t, groups, columns of a group)
    if top_groups < groups:
        order = scores.topk(2).values.sum(-1).sort(descending=True, stable=True).indices
        scores = scores.scatter(1, order[:, top_groups:, None].expand(-1, -1, scores.shape[2]), -torch.inf)
    indices = scores.flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    finite = (logits.isfinite() & (sigmoids + bias).isfinite()).all(1, keepdim=True)
    return sigmoids.gather(1, indices).where(finite, torch.nan), indices


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's likeliest token, the lowest index on ties, and its log-probability. Returns -1 and NaN for a
    row with a logit that is not finite."""
    tokens, finite = softmax_topk(logits, 1)[1].squeeze(1), logits.isfinite().all(1)
    logprobs = logits.double().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.where(finite, -1), logprobs.to(logits.dtype).where(finite, torch.nan)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of one token of each row of logits."""
    return logits.double().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1).to(logits.dtype)
