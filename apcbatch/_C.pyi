"""Types of the private extension (csrc/bindings*.cpp). Addresses and dtype codes are integers; 0 is no address."""

from collections.abc import Callable

# A number of sequences, the address of their page table and its columns, the addresses of cu_seqlens and context.
Sequences = tuple[int, int, int, int, int]
View = tuple[int, int, int]  # a tensor: where it begins, elements from one row to the next, its dtype's code

PAGE_TOKENS: int

def refuse_scratch(count: int, /) -> None: ...  # for tests: the next `count` requests for scratch find no memory
def isa() -> str: ...
def isa_product() -> str: ...
def set_isa(name: str) -> bool: ...
def available_isas() -> list[str]: ...
def packed_bytes(out: int, in_: int, dtype: int, /) -> int: ...
def pack_linear(weight: View, out: int, in_: int, packed: int, num_threads: int, /) -> None: ...
def unpack_rows(weights: Projection, indices: int, count: int, rows: int, num_threads: int, /) -> None: ...
def linear(t: int, x: View, weights: Projection, y: View, num_threads: int, /) -> None: ...
def rms_norm(
    t: int, h: int, x: View, delta: View | None, weight: int, eps: float, y: View, num_threads: int, /
) -> None: ...
def silu_mul(t: int, f: int, gate: View, up: View, y: View, num_threads: int, /) -> None: ...
def softmax_topk(t: int, n: int, k: int, logits: View, weights: int, indices: int, num_threads: int, /) -> None: ...
def logprob(t: int, n: int, logits: View, choose: bool, tokens: int, logprobs: int, num_threads: int, /) -> None: ...
def span(values: int, count: int, /) -> tuple[int, int]: ...
def check_sequences(sequences: Sequences, t: int, pages: int, /) -> int: ...
def write_kv(
    t: int, row: int, k: View, v: View, k_cache: View, v_cache: View, token_slots: int, num_threads: int, /
) -> None: ...
def paged_attention(
    q: View,
    k_cache: View,
    v_cache: View,
    out: View,
    sequences: Sequences,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    num_threads: int,
    /,
) -> None: ...

class RaggedParams:
    def __init__(
        self,
        num_sequences: int,
        cu_seqlens: int,
        initial_slots: int,
        final_slots: int,
        snapshot_cu: int,
        snapshot_positions: int,
        snapshot_slots: int,
        /,
    ) -> None: ...

def causal_conv(
    *,
    ragged: RaggedParams,
    x: View,
    weight: View,
    bias: int,
    state: View,
    out: View,
    d_inner: int,
    width: int,
    num_threads: int,
) -> None: ...
def selective_scan(
    *,
    ragged: RaggedParams,
    x: View,
    dt: View,
    A: int,
    B: View,
    C: View,
    D: int,
    z: View | None,
    dt_bias: int,
    state: View,
    out: View,
    d_inner: int,
    d_state: int,
    num_threads: int,
) -> None: ...

class Projection:
    def __init__(self, *, out_features: int, in_features: int, weights: int, dtype: int, bias: int) -> None: ...

class PreNorm:
    def __init__(self, weight: int, eps: float, /) -> None: ...

class SubBlock:  # AttentionMixer has no `run`: it is run in a stack
    def run(
        self, t: int, ragged: RaggedParams | None, residual: int, delta: int, has_delta: bool, num_threads: int, /
    ) -> None: ...

class MambaMixer(SubBlock):
    def __init__(
        self,
        *,
        norm: PreNorm,
        in_proj: Projection,
        x_proj: Projection,
        dt_proj: Projection,
        out_proj: Projection,
        d_state: int,
        width: int,
        conv_weight: int,
        conv_bias: int,
        A: int,
        D: int,
        dt_bias: int,
        has_norms: bool,
        dt_norm: int,
        B_norm: int,
        C_norm: int,
        norm_eps: float,
        ssm: View,
        conv: View,
    ) -> None: ...

class Expert:
    def __init__(self, gate_up: Projection, down: Projection, /) -> None: ...

class Mlp(SubBlock):
    def __init__(self, norm: PreNorm, expert: Expert, /) -> None: ...

class Mixture(SubBlock):
    def __init__(self, norm: PreNorm, router: Projection, experts_per_token: int, experts: list[Expert], /) -> None: ...

class AttentionMixer(SubBlock):
    def __init__(
        self,
        *,
        norm: PreNorm,
        qkv_proj: Projection,
        o_proj: Projection,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        k_cache: View,
        v_cache: View,
    ) -> None: ...

# A page table's address and its columns, the addresses of context and of the tokens' places in the cache, the pages.
Pages = tuple[int, int, int, int, int]
# How many rows of the residual, the address of their numbers, and where what is wanted of them goes.
Wanted = tuple[int, int, int]

class Pass:
    def __init__(
        self, tokens: int, ragged: RaggedParams, pages: Pages, logits: Wanted, hidden: Wanted, with_logprobs: bool, /
    ) -> None: ...

class Stack:
    def __init__(
        self,
        layers: list[list[tuple[SubBlock, bool]]],  # whether it is beside the one before it
        norm: PreNorm,
        head: Projection,
        embedding: int,
        /,
    ) -> None: ...
    def run(
        self, pass_: Pass, on_layer: Callable[[], None] | None, num_threads: int, /
    ) -> tuple[list[int], list[float]] | None: ...

def record_parts(on: bool, /) -> None: ...
def part_seconds() -> list[float]: ...
def elementwise(function: int, from_: int, to: int, count: int, /) -> None: ...
