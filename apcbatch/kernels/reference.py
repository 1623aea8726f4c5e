"""The ops in plain PyTorch, one token at a time: the specification that the kernels are tested against.

Must not know: csrc. Same arguments and results as in apcbatch.kernels.ops. It computes in float32, and in
float64 where the activations are float64, which serves as the measure for tolerances.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from apcbatch.kernels.ragged import Ragged


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """out_t = silu(bias + sum_k weight_k x_(t - w + 1 + k)); see apcbatch.kernels.cpu.scan."""
    compute = torch.promote_types(x.dtype, torch.float32)
    past = weight.shape[1] - 1
    taps = weight.to(compute).t()  # (d, w) -> (w, d)
    out = torch.empty_like(x)

    def step(token: int, window: torch.Tensor) -> torch.Tensor:
        window = torch.cat([window, x[token : token + 1]])  # (w, d): the last w raw inputs
        total = (taps * window.to(compute)).sum(0)
        out[token] = F.silu(total if bias is None else total + bias.to(compute)).to(x.dtype)
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
    """h = exp(dt A) h + dt x B; y = (D x + sum_n C h) silu(z), dt after bias and softplus.

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


def _run(ragged: Ragged, state: torch.Tensor, step: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Take every sequence through its tokens: carry = step(token, carry), between the slots of the batch."""
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
    """The weights as they are; see apcbatch.kernels.cpu.linear."""
    return weight.clone()


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T (+ bias); with bfloat16 weights, x rounded to bfloat16 first."""
    compute = torch.promote_types(x.dtype, torch.float32)
    rounded = x.to(torch.bfloat16) if packed.dtype == torch.bfloat16 else x
    y = rounded.to(compute) @ packed.to(compute).t()  # (t, in), (out, in) -> (t, out)
    return (y if bias is None else y + bias.to(compute)).to(out_dtype or x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight; see apcbatch.kernels.cpu.norm."""
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
    """residual += delta, then rms_norm of it."""
    residual += delta
    return rms_norm(residual, weight, eps, out_dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    compute = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(compute)) * up.to(compute)).to(gate.dtype)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    token_slots: torch.Tensor,
) -> None:
    """Rows of the cache at token_slots become k and v; see apcbatch.kernels.cpu.attention."""
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
    """softmax(scale q k^T) v, causal, sequence by sequence; see apcbatch.kernels.cpu.attention."""
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


def softmax_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row, the lower index first on ties, and their softmax over the row."""
    indices = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return logits.softmax(-1).gather(1, indices), indices


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of each row's largest logit, the lowest on ties, and its log-probability; -1 and NaN where a logit is
    not finite."""
    tokens, finite = softmax_topk(logits, 1)[1].squeeze(1), logits.isfinite().all(1)
    logprobs = logits.double().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.where(finite, -1), logprobs.to(logits.dtype).where(finite, torch.nan)


def token_logprob(logits: torch.Tensor, token: int) -> float:
    """The log-probability of one token of a row of logits."""
    return float(logits.double().log_softmax(-1)[token].to(logits.dtype))


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probability of one token of each row of logits."""
    return logits.double().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1).to(logits.dtype)
