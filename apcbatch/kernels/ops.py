"""The ops that a pass is composed of: the signature, the checks and the results of each, the same on every device.

`Ops` checks the arguments of an op and allocates its result. A device implements the methods at the end of `Ops`
(apcbatch.kernels.cpu.ops, apcbatch.kernels.cuda.ops): they launch an op by its name, with sizes, addresses, and tensors
as views. apcbatch.kernels.reference computes each op in plain PyTorch. Invariant: the bits of a row of a result depend
only on the parameters and that row of the inputs; in an op over sequences, only on the parameters, the sequence's
initial state and its tokens up to that row. The one exception is `linear` on a CUDA device without exact weights.

Dimension letters: b sequences, t tokens or rows, h hidden columns, d d_inner, n d_state, w convolution taps, f inner
columns of an expert, v vocabulary. Every op raises ValueError for arguments that do not fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol

import torch

from apcbatch.kernels.arguments import (
    FLOAT32,
    address,
    cache_views,
    dtype_code,
    float_vector,
    head_scan_params,
    require_alike,
    require_beside,
    require_logits,
    require_matrix,
    require_one_dtype,
    require_parameter,
    require_slots,
    require_sums,
    slot_stride,
    token_rows,
    token_stride,
    view,
    where,
)
from apcbatch.kernels.layer import LinearT, PreNorm, Residual, SigmoidRouting, routing_rule


class AnyBatch(Protocol):
    """Batch of sequences: a Ragged, or its copy on a device. max_slot: highest state slot read or written; -1: none.
    params: the compiled module's handle of the batch."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def max_slot(self) -> int: ...

    @property
    def params(self) -> Any: ...


class Ops(ABC, Generic[LinearT]):
    """The ops of one device. Activations are float32 or bfloat16."""

    def linear(
        self,
        x: torch.Tensor,
        packed: LinearT,
        out_dtype: torch.dtype | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute y = x W^T (* scale) (+ bias), accumulated in float32. scale: that of the packed weights.

        x: (t, in), any row stride. packed: weights (out, in) of the backend's `pack_linear`. out_dtype: None for x's;
        on a CUDA device x's or float32. bias: (out,). Returns (t, out) in out_dtype. On the CPU, a float32 x is first
        rounded to bfloat16 if the weights are bfloat16, and the bias is added before the result is rounded. On a CUDA
        device x must have the weights' dtype, and the bias is added after the rounding, in out_dtype.
        """
        self._require_here(x, "x")
        require_matrix(x, "x")
        if x.shape[1] != packed.in_features:
            raise ValueError(f"x must have {packed.in_features} columns, the weight's inputs; it is {tuple(x.shape)}")
        return self._product(x, packed, out_dtype or x.dtype, bias)

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        ragged: AnyBatch,
        has_silu: bool = True,
    ) -> torch.Tensor:
        """Compute the depthwise causal convolution in float32 and, if has_silu, its SiLU; round once.

        x: (t, d), any token stride. weight: (d, w) float32 contiguous, w 1 to 8. bias: (d,) float32 or None.
        state: (num_slots, w - 1, d) in x's dtype, any slot stride: the last w - 1 raw inputs, oldest first, zeros for
        those before the first token. The slots that the batch names are read and written in place. Returns (t, d) in
        x's dtype.
        """
        batch, t, d, code = self._tokens(x, ragged)
        device, width, most_taps = x.device, weight.shape[-1], self._most("taps")
        x_stride = token_stride(x, "x", t, d, x)
        require_parameter(weight, "weight", (d, width), torch.float32, device)
        if not 1 <= width <= most_taps:
            raise ValueError(f"weight must have 1 to {most_taps} columns, the taps; it has {width}")
        if bias is not None:
            require_parameter(bias, "bias", (d,), torch.float32, device)
        state_stride = slot_stride(state, (width - 1, d), x.dtype, device)
        require_slots(batch.max_slot, state.shape[0])
        out = torch.empty((t, d), dtype=x.dtype, device=device)
        self._launch_over(
            "causal_conv",
            batch,
            x=(x.data_ptr(), x_stride, code),
            weight=weight.data_ptr(),
            bias=address(bias),
            state=(state.data_ptr(), state_stride, code),
            out=(out.data_ptr(), d, code),
            d_inner=d,
            width=width,
            has_silu=has_silu,
        )
        return out

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        state: torch.Tensor,
        ragged: AnyBatch,
    ) -> torch.Tensor:
        """Compute the selective state-space recurrence in float32: y_t = (D x_t + sum_n C_tn h_tn) silu(z_t), where
        h_tn = exp(dt A_n) h_(t-1)n + dt x_t B_tn and dt = softplus(dt_t + dt_bias). Gu and Dao, arXiv 2312.00752,
        section 3.2.

        x, dt, z: (t, d), B, C: (t, n), all of one dtype, any token stride. A: (n, d) float32 contiguous, -exp(A_log)
        transposed; n 1 to 256, on a CUDA device 1 to 128. D, dt_bias: (d,) float32 contiguous. D, z, dt_bias: None
        omits the term or factor. state: (num_slots, n, d) float32, any slot stride; the slots that the batch names are
        read and written in place. Returns (t, d) in x's dtype. A sequence's tokens are processed strictly in order, so
        cutting it anywhere gives the same bits; a decode step is this op on sequences of one token. A snapshot is a
        copy of the carry, not rounded.
        """
        batch, t, d, code = self._tokens(x, ragged)
        device, n, most_states = x.device, A.shape[0], self._most("states")
        if not 1 <= n <= most_states:
            raise ValueError(f"A must have 1 to {most_states} rows{where(device)}, the states of a channel; it has {n}")
        require_parameter(A, "A", (n, d), torch.float32, device)
        for vector, name in ((D, "D"), (dt_bias, "dt_bias")):
            if vector is not None:
                require_parameter(vector, name, (d,), torch.float32, device)
        state_stride = slot_stride(state, (n, d), torch.float32, device)
        require_slots(batch.max_slot, state.shape[0])
        out = torch.empty((t, d), dtype=x.dtype, device=device)
        self._launch_over(
            "selective_scan",
            batch,
            x=(x.data_ptr(), token_stride(x, "x", t, d, x), code),
            dt=(dt.data_ptr(), token_stride(dt, "dt", t, d, x), code),
            A=A.data_ptr(),
            B=(B.data_ptr(), token_stride(B, "B", t, n, x), code),
            C=(C.data_ptr(), token_stride(C, "C", t, n, x), code),
            D=address(D),
            z=None if z is None else (z.data_ptr(), token_stride(z, "z", t, d, x), code),
            dt_bias=address(dt_bias),
            state=(state.data_ptr(), state_stride, FLOAT32),
            out=(out.data_ptr(), d, code),
            d_inner=d,
            d_state=n,
        )
        return out

    def head_scan(
        self,
        x: torch.Tensor,
        gates: torch.Tensor,
        key_heads: int,
        A: torch.Tensor,
        dt_bias: torch.Tensor,
        state: torch.Tensor,
        ragged: AnyBatch,
        D: torch.Tensor | None = None,
        dt_limits: tuple[float, float] = (0.0, 0.0),
    ) -> torch.Tensor:
        """Compute a recurrence over heads with matrix states in float32: the gated delta rule, or with D the one of
        Mamba-2.

        Delta rule, for each token and value head: S_t = d S_(t-1) + k (beta (v - S_(t-1)^T (d k)))^T and o = S_t^T q,
        where q and k are normed to length 1 (1e-6 added to the sum of squares), q is then divided by sqrt(K), beta =
        sigmoid(b) and d = exp(A softplus(a + dt_bias)). Yang, Kautz and Hatamizadeh, arXiv 2412.06464, equation 10.
        Mamba-2, where q is C, k is B and v is x: S_t = exp(A s) S_(t-1) + B (s x)^T and o = S_t^T C + D x, where s =
        softplus(a + dt_bias), limited to dt_limits. Dao and Gu, arXiv 2405.21060, equation 1 with a scalar A for each
        head.

        Letters: Hk key_heads of K columns, Hv value heads of V columns; value head h uses key head h // (Hv / Hk); in
        Mamba-2 they are groups, d_state, heads and head_dim. x: (t, 2 Hk K + Hv V), columns of q, k and v. gates: (t,
        2 Hv), columns of b and a; in Mamba-2 (t, Hv), of a. Both of one dtype, any row stride. A: (Hv,) float32,
        -exp(A_log). dt_bias, D: (Hv,) float32. state: (num_slots, Hv, V / lanes, K, lanes) float32, any slot stride: S
        (K, V) of each value head, its columns in blocks of `lanes`. The slots that the batch names are read and written
        in place. Returns o, (t, Hv V) float32. As in selective_scan, cutting a sequence anywhere gives the same bits,
        and a snapshot is a copy of the carry.
        """
        batch, t, c, code = self._tokens(x, ragged)
        require_beside(state, "state", x)
        if state.dim() != 5:
            raise ValueError(f"state must be (slots, heads, blocks, columns of k, lanes); it is {tuple(state.shape)}")
        heads, key_dim, value_dim = A.numel(), state.shape[3], state.shape[2] * state.shape[4]
        if key_heads < 1 or heads % key_heads or c != 2 * key_heads * key_dim + heads * value_dim:
            raise ValueError(
                f"x must have the columns of q, k and v, 2 x {key_heads} x {key_dim} + {heads} x {value_dim} by "
                f"key_heads and the state, and {heads} heads must be a multiple of key_heads; it has {c}"
            )
        sizes = (key_heads, key_dim), (heads, value_dim)
        params = head_scan_params(self._compiled, x.dtype, *sizes, A, dt_bias, state, D, dt_limits)
        require_slots(batch.max_slot, state.shape[0])
        out = torch.empty((t, heads * value_dim), dtype=torch.float32, device=x.device)
        gate_columns = 2 * heads if D is None else heads
        self._launch_over(
            "head_scan",
            batch,
            params=params,
            x=(x.data_ptr(), token_stride(x, "x", t, c, x), code),
            gates=(gates.data_ptr(), token_stride(gates, "gates", t, gate_columns, x), code),
            out=out.data_ptr(),
        )
        return out

    def gated_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        heads: int,
        weight: torch.Tensor | None,
        eps: float,
        gate_first: bool = False,
    ) -> torch.Tensor:
        """Compute norm(x) * weight * silu(gate) for each head in float32, rounded once, where norm(x) = x /
        sqrt(mean(x^2) + eps): Yang, Kautz and Hatamizadeh, arXiv 2412.06464, section 3.4. gate_first: compute norm(x *
        silu(gate)) * weight instead, as Mamba-2 does over the columns of a group: Dao and Gu, arXiv 2405.21060, section
        7. weight None: compute x * silu(gate).

        x: (t, d) float32, gate: (t, d), any row stride. heads: a divisor of d. weight: float32, (d / heads,) for all
        heads or (d,). Returns (t, d) in gate's dtype.
        """
        self._require_here(x, "x")
        require_matrix(x, "x")
        require_alike(gate, "gate", x, "x")
        (t, d), columns = x.shape, x.shape[1] // max(1, heads)
        if x.dtype != torch.float32 or heads < 1 or d % heads:
            raise ValueError(f"x must be float32 with the columns of {heads} heads; it is {x.dtype} {tuple(x.shape)}")
        stride = 0
        if weight is not None:
            stride = 0 if weight.shape == (columns,) else columns
            require_parameter(weight, "weight", (d if stride else columns,), torch.float32, x.device)
        y = torch.empty((t, d), dtype=gate.dtype, device=x.device)
        norm = address(weight), stride, eps, gate_first
        self._launch("gated_norm", x, t, heads, columns, view(x, "x"), view(gate, "gate"), *norm, view(y, "y"))
        return y

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Compute x / sqrt(mean(x^2) + eps) * weight in float32, rounded once. Zhang and Sennrich, arXiv 1910.07467,
        equation 4.

        x: (t, h), any row stride. weight: (h,); None: ones. Returns (t, h) in out_dtype.
        """
        return self._norm(x, None, weight, eps, out_dtype)

    def add_rms_norm_(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Add delta to the residual in place, then compute the residual's rms_norm.

        residual: (t, h) float32, any row stride. delta: (t, h), any row stride. weight, eps, out_dtype and the result:
        as in rms_norm.
        """
        return self._norm(residual, delta, weight, eps, out_dtype)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Compute silu(gate) * up in float32, rounded once. Shazeer, "GLU variants", arXiv 2002.05202.

        gate, up: (t, f), of one dtype, any row stride. Returns (t, f) in that dtype.
        """
        return self._of_two("silu_mul", gate, "gate", up, "up")

    def relu_square(self, x: torch.Tensor) -> torch.Tensor:
        """Compute max(x, 0)^2 in float32, rounded once. So et al., "Primer", arXiv 2109.08668.

        x: (t, f), any row stride. Returns (t, f) in x's dtype.
        """
        self._require_here(x, "x")
        require_matrix(x, "x")
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch("relu_square", x, *x.shape, view(x, "x"), view(y, "y"))
        return y

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Compute x * sigmoid(gate) in float32, rounded once.

        x, gate: (t, h), of one dtype, any row stride. Returns (t, h) in that dtype.
        """
        return self._of_two("sigmoid_mul", x, "x", gate, "gate")

    def _of_two(
        self, op: str, first: torch.Tensor, first_name: str, second: torch.Tensor, second_name: str
    ) -> torch.Tensor:
        """Check two matrices of one shape and dtype, and launch an elementwise op on them. Return its result."""
        self._require_here(first, first_name)
        require_matrix(first, first_name)
        require_alike(second, second_name, first, first_name)
        require_one_dtype(first, first_name, second, second_name)
        y = torch.empty(first.shape, dtype=first.dtype, device=first.device)
        views = (view(x, name) for x, name in ((first, first_name), (second, second_name), (y, "y")))
        self._launch(op, first, *first.shape, *views)
        return y

    def norm_rope(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, steps: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Compute the rms_norm of each head, then its rotary position embedding, in float32, rounded once. Su et al.,
        arXiv 2104.09864, section 3.2, in the form that rotates column i with column p + i: for i < p and the
        normed x, y_i = x_i cos - x_(p + i) sin and y_(p + i) = x_(p + i) cos + x_i sin, of the angle
        position * steps_i. The columns from 2p on are only normed.

        x: (t, heads, head_dim), any token stride. weight: (head_dim,); None: no norm. steps: (p,) int64 contiguous, in
        2^-64 turns (`rotary_steps`), 2p at most head_dim. positions: (t,) int64 contiguous, absolute. Returns
        (t, heads, head_dim) in x's dtype. For given steps, cos and sin have an error below 1e-15 before they are
        rounded to float32.
        """
        self._require_here(x, "x")
        if x.dim() != 3:
            raise ValueError(f"x must be (tokens, heads, head_dim); its shape is {tuple(x.shape)}")
        t, heads, head_dim = x.shape
        pairs = steps.numel()
        if 2 * pairs > head_dim:
            raise ValueError(f"steps must be at most half of the {head_dim} columns of a head; they are {pairs}")
        require_parameter(steps, "steps", (pairs,), torch.int64, x.device)
        require_parameter(positions, "positions", (t,), torch.int64, x.device)
        if weight is not None:
            weight = float_vector(weight, "weight", head_dim, x, "x")
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, result = view(x, "x"), view(y, "y")
        angles = steps.data_ptr(), pairs, positions.data_ptr()
        self._launch("norm_rope", x, t, heads, head_dim, rows, address(weight), eps, *angles, result)
        return y

    def route(
        self, logits: torch.Tensor, k: int, is_normalised: bool = False, sigmoid: SigmoidRouting | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose k columns of each row, a token's experts, and weight them: the k largest logits by the softmax over
        the whole row, or with `sigmoid` as SigmoidRouting says. is_normalised: divide the weights by their sum.

        logits: (t, columns) float32, any row stride; on a CUDA device at most 1,024 columns. Returns weights (t, k)
        float32 and indices (t, k) int64, in descending order of logit or score, the lower index first on ties; on a
        CUDA device in ascending order of index.
        """
        return self._route(logits, k, is_normalised, sigmoid)

    def _route(
        self, logits: torch.Tensor, k: int, is_normalised: bool, sigmoid: SigmoidRouting | None, *grouping: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `route`. grouping: arguments that only this device's kernel has."""
        t, n = self._logits_shape(logits)
        if n > (most_columns := self._most("choices")):
            raise ValueError(f"logits must have at most {most_columns} columns{where(logits.device)}; they have {n}")
        if sigmoid is not None:
            sigmoid.require(n, k)
            require_beside(sigmoid.bias, "bias", logits)
        elif not 1 <= k <= n:
            raise ValueError(f"k must lie in 1 to {n}, the columns of logits; it is {k}")
        weights = torch.empty((t, k), dtype=torch.float32, device=logits.device)
        indices = torch.empty((t, k), dtype=torch.int64, device=logits.device)
        rule, results = routing_rule(is_normalised, sigmoid), (weights.data_ptr(), indices.data_ptr())
        self._launch("route", logits, t, n, k, view(logits, "logits"), rule, *results, *grouping)
        return weights, indices

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the index of each row's largest logit: the lowest on ties, -1 for a row with NaN or infinity.

        logits: (t, v) float32, any row stride. Returns (t,) int64.
        """
        t, _ = self._logits_shape(logits)
        tokens = torch.empty(t, dtype=torch.int64, device=logits.device)
        self._logprob(logits, True, tokens, None)
        return tokens

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's likeliest token, the lowest index on ties, and its log-probability. A row with NaN or
        infinity gives -1 and NaN.

        logits: (t, v) float32, any row stride. Returns tokens (t,) int64 and logprobs (t,) float32: logit - max -
        log(sum of exp(logit - max)), with the sum in float64; on a CUDA device in float32.
        """
        t, _ = self._logits_shape(logits)
        tokens = torch.empty(t, dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(t, dtype=torch.float32, device=logits.device)
        self._logprob(logits, True, tokens, logprobs)
        return tokens, logprobs

    def token_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of one token of each row. For the likeliest token it has the bits of `greedy`.

        logits: (t, v) float32, any row stride. tokens: (t,) int64 on the logits' device, each in [0, v). Returns (t,)
        float32.
        """
        t, v = self._logits_shape(logits)
        require_parameter(tokens, "tokens", (t,), torch.int64, logits.device)
        if t and not 0 <= int(tokens.min()) <= int(tokens.max()) < v:
            raise ValueError(f"tokens must lie in [0, {v}); they are {int(tokens.min())} to {int(tokens.max())}")
        logprobs = torch.empty(t, dtype=torch.float32, device=logits.device)
        self._logprob(logits, False, tokens, logprobs)
        return logprobs

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        token_slots: torch.Tensor,
    ) -> None:
        """Write keys and values to the cache, rounded if the cache's dtype is narrower.

        k, v: (t, kv_heads, head_dim), any token stride; on a CUDA device in the cache's dtype. k_cache, v_cache:
        (pages, PAGE_TOKENS, kv_heads, head_dim) contiguous, of one dtype. token_slots: (t,) int64, page x PAGE_TOKENS +
        offset of each token, all different; on a CUDA device their values are not checked.
        """
        self._require_here(k_cache, "k_cache")
        self._require_here(k, "k")
        caches = cache_views(k_cache, v_cache)
        require_alike(v, "v", k, "k")
        if k.shape[1:] != k_cache.shape[2:]:
            raise ValueError(
                f"k and v must be (tokens, {k_cache.shape[2]}, {k_cache.shape[3]}) like a page's rows; "
                f"they are {tuple(k.shape)}"
            )
        require_one_dtype(k, "k", v, "v")
        token_slots = self._token_slots(token_slots, k, k_cache)
        t, kv_heads, head_dim = k.shape
        rows = view(k, "k"), view(v, "v")
        self._launch("write_kv", k, t, kv_heads * head_dim, *rows, *caches, token_slots.data_ptr())

    def paged_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        context: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Compute causal attention of the new tokens of b sequences over all tokens of these sequences so far: Vaswani
        et al., arXiv 1706.03762, equation 1, with the grouped heads of Ainslie et al., arXiv 2305.13245.

        q: (t, heads, head_dim), any token stride; heads is a multiple of the cache's kv_heads; on a CUDA device in the
        cache's dtype, with head_dim at most 256. k_cache, v_cache: (pages, PAGE_TOKENS, kv_heads, head_dim) contiguous,
        of one dtype, with the new tokens' rows already written. page_table: (b, max_pages) int64; row i lists the pages
        of sequence i in order; entries past its last page are not read. cu_seqlens: (b + 1,) int64, offsets of the
        sequences in t. context: (b,) int64, tokens cached before the new ones. scale: factor of the scores q k^T.
        Returns (t, heads, head_dim) in q's dtype. The bits of a query's output depend on the query, its absolute
        position, and the keys and values up to it, never on its chunk or batch. On a CUDA device the values of
        page_table, cu_seqlens and context are not checked.
        """
        self._require_here(k_cache, "k_cache")
        self._require_here(q, "q")
        caches = cache_views(k_cache, v_cache)
        kv_heads, head_dim = k_cache.shape[2:]
        if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % kv_heads != 0 or q.shape[1] == 0:
            raise ValueError(
                f"q must be (tokens, a multiple of {kv_heads} heads, {head_dim}), as the cache has {kv_heads} "
                f"kv heads of {head_dim}; it is {tuple(q.shape)}"
            )
        queries = view(q, "q")
        (sequences, *own), _alive = self._sequences(q, k_cache, page_table, cu_seqlens, context)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        result = out.data_ptr(), q.shape[1] * head_dim, queries[2]
        sizes = q.shape[1], kv_heads, head_dim, scale
        self._launch("paged_attention", q, queries, *caches, result, sequences, *sizes, *own)
        return out

    def normed(self, residual: Residual, norm: PreNorm, dtype: torch.dtype) -> torch.Tensor:
        """Add the pending delta to the sum in place, and return the sum's norm, (t, h) in `dtype`. has_delta stays
        set, so the residual must then get a new delta (Residual.leave) or be dropped."""
        delta = residual.delta if residual.has_delta else None
        return self._norm(residual.sum, delta, norm.weight, norm.eps, dtype)

    @abstractmethod
    def residual(self, begin: torch.Tensor, present: torch.Tensor | None = None) -> Residual:
        """Make the residual stream of a pass. begin: (t, h) float32 contiguous, the embeddings, overwritten by the
        pass. present: see Residual; None on the CPU."""

    def run_sub_block(self, part: Any, residual: Residual, ragged: AnyBatch) -> None:
        """Run a sub-block's fused form (BackendOf.sub_block) on the state slots that the batch names."""
        part(residual, ragged)

    def _tokens(self, x: torch.Tensor, ragged: AnyBatch) -> tuple[AnyBatch, int, int, int]:
        """Check x of a recurrent op. Return the batch on x's device, the shape (t, d) of x and its dtype code."""
        self._require_here(x, "x")
        batch = self._batch(x, ragged)
        t, d = token_rows(x, batch.num_tokens)
        return batch, t, d, dtype_code(x, "x")

    def _logits_shape(self, logits: torch.Tensor) -> tuple[int, int]:
        self._require_here(logits, "logits")
        return require_logits(logits)

    def _logprob(self, logits: torch.Tensor, choose: bool, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        """Compute the log-probability of one token per row. choose: first write each row's likeliest token to `tokens`;
        if false, read the tokens from there. tokens: (t,) int64. logprobs: (t,) float32, the result; None to choose
        only."""
        rows = view(logits, "logits")
        self._launch("logprob", logits, *logits.shape, rows, choose, tokens.data_ptr(), address(logprobs))

    def _norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        arguments, y, _alive = self._norm_arguments(x, delta, weight, eps, out_dtype)
        self._launch("rms_norm", x, *arguments)
        return y

    def _norm_arguments(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        out_dtype: torch.dtype,
    ) -> tuple[tuple[Any, ...], torch.Tensor, torch.Tensor | None]:
        """Check the arguments of a norm. Return the kernel's arguments, the result tensor y, and the float32 weight,
        which must live until the launch."""
        self._require_here(x, "x" if delta is None else "residual")
        if delta is None:
            require_matrix(x, "x")
        else:
            require_sums(x, delta)
        t, h = x.shape
        if weight is not None:
            weight = float_vector(weight, "weight", h, x, "x")
        y = torch.empty((t, h), dtype=out_dtype, device=x.device)
        addend = None if delta is None else view(delta, "delta")
        result = view(y, "out_dtype")
        return (t, h, view(x, "x"), addend, address(weight), eps, result), y, weight

    # What a device implements

    @property
    @abstractmethod
    def _compiled(self) -> Any:
        """The compiled module."""

    @abstractmethod
    def _launch(self, name: str, beside: torch.Tensor, *arguments: Any) -> None:
        """Call the compiled module's function `name` on the device of the tensor `beside`."""

    @abstractmethod
    def _launch_over(self, name: str, batch: Any, **arguments: Any) -> None:
        """Call the compiled module's function `name`, of a recurrent op, over a batch returned by `_batch`."""

    @abstractmethod
    def _most(self, what: str) -> int:
        """Return a limit of the device. what: `taps` of causal_conv, `states` per channel of selective_scan, or
        `choices` (columns) of route."""

    @abstractmethod
    def _require_here(self, tensor: torch.Tensor, name: str) -> None:
        """Raise ValueError unless the tensor is on a device of this kind."""

    @abstractmethod
    def _batch(self, x: torch.Tensor, ragged: Any) -> AnyBatch:
        """Return the batch on the device of x."""

    @abstractmethod
    def _token_slots(self, token_slots: torch.Tensor, k: torch.Tensor, k_cache: torch.Tensor) -> torch.Tensor:
        """Check the slots of write_kv, one per row of k, and whether this device's kernel takes the two dtypes. Return
        the slots, contiguous."""

    @abstractmethod
    def _sequences(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        context: torch.Tensor,
    ) -> tuple[tuple[Any, ...], tuple[torch.Tensor | None, ...]]:
        """Check the sequences of paged_attention, and whether this device's kernel takes the dtypes of q and k_cache.
        Return the kernel's arguments (the sequences, then those that only this device's kernel has), and the tensors
        that must live until the launch."""

    @abstractmethod
    def _product(
        self, x: torch.Tensor, packed: LinearT, out_dtype: torch.dtype, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the product of `linear`, whose x has the weights' number of columns."""


OPS = tuple(name for name in vars(Ops) if not name.startswith("_"))
