"""Types of the private extension (csrc/bindings*.cpp). Addresses and dtype codes are integers; 0 is no address.

The ops that apcbatch.kernels.ops launches by name are not listed: it has their arguments.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

# (number of sequences, address of page_table, its columns, address of cu_seqlens, address of context)
Sequences = tuple[int, int, int, int, int]
View = tuple[int, int, int]  # tensor: (address, stride of the first dimension in elements, dtype code)

PAGE_TOKENS: int
BLOCK_INPUTS: int

def refuse_scratch(count: int, /) -> None: ...  # for tests: the next `count` allocations of scratch fail
def isa() -> str: ...
def isa_product() -> str: ...
def set_isa(name: str) -> bool: ...
def available_isas() -> list[str]: ...
def packed_bytes(out: int, in_: int, dtype: int, /) -> int: ...
def want_huge_pages(memory: int, num_bytes: int, /) -> None: ...
def pack_linear(weight: View, out: int, in_: int, packed: int, num_threads: int, /) -> None: ...
def code_bytes(in_: int, run: int, /) -> int: ...
def pack_codes(
    codes: int, stride: int, scales: int, zeros: int, out: int, in_: int, run: int, num_threads: int, /
) -> None: ...
def unpack_rows(weights: Projection, indices: int, count: int, rows: int, num_threads: int, /) -> None: ...
def linear(t: int, x: View, weights: Projection, y: View, num_threads: int, /) -> None: ...
def span(values: int, count: int, /) -> tuple[int, int]: ...
def check_sequences(sequences: Sequences, t: int, pages: int, /) -> int: ...

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

class Projection:
    def __init__(
        self, *, out_features: int, in_features: int, weights: int, dtype: int, scale: int, bias: int, runs: int
    ) -> None: ...

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

class HeadMixer(SubBlock):
    def __init__(
        self,
        *,
        norm: PreNorm,
        scan: HeadScanParams,
        in_proj: Projection,
        out_proj: Projection,
        width: int,
        conv_weight: int,
        conv_bias: int,
        head_norm: int,
        head_norm_eps: float,
        gate_first: bool,
        conv: View,
    ) -> None: ...

class HeadScanParams:
    def __init__(
        self,
        *,
        dtype: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        lanes: int,
        A: int,
        dt_bias: int,
        D: int,
        dt_min: float,
        dt_max: float,
        state: View,
    ) -> None: ...

class ShortConv(SubBlock):
    def __init__(
        self, *, norm: PreNorm, in_proj: Projection, out_proj: Projection, width: int, conv_weight: int, conv: View
    ) -> None: ...

class Expert:
    def __init__(self, gate_up: Projection, down: Projection, is_gated: bool, /) -> None: ...

class Mlp(SubBlock):
    def __init__(self, norm: PreNorm, expert: Expert, gate: Projection | None, /) -> None: ...

class Mixture(SubBlock):
    def __init__(
        self,
        *,
        norm: PreNorm,
        router: Projection,
        experts_per_token: int,
        rule: tuple[int, int, int, bool, float, float],  # see routing_rule
        latent: tuple[Projection, ...],
        experts: list[Expert],
    ) -> None: ...

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
        q_norm: int,
        k_norm: int,
        norm_eps: float,
        steps: int,
        pairs: int,
        is_gated: bool,
        k_cache: View,
        v_cache: View,
    ) -> None: ...

# (address of page_table, its columns, address of context, address of token_slots, number of pages in the cache)
Pages = tuple[int, int, int, int, int]
# Rows of the residual to compute outputs for: (their number, address of their indices, address of the outputs)
Wanted = tuple[int, int, int]

class Pass:
    def __init__(
        self,
        tokens: int,
        ragged: RaggedParams,
        pages: Pages,
        logits: Wanted,
        hidden: Wanted,
        with_logprobs: bool,
        kept: tuple[int, int],  # number of rows, address of their numbers
        /,
    ) -> None: ...

class Stack:
    def __init__(
        self,
        layers: list[list[tuple[SubBlock, bool]]],  # (sub-block, is_beside): see StackEntry
        norm: PreNorm,
        head: Projection,
        embedding: int,
        embedding_scale: float,
        /,
    ) -> None: ...
    def run(
        self, pass_: Pass, on_layer: Callable[[], None] | None, num_threads: int, /
    ) -> tuple[list[int], list[float]] | None: ...
    def replay(self, wanted: list[tuple[int, int, int]], num_threads: int, /) -> None: ...  # slot, first row, count

class DraftState:
    def __init__(self, history_bytes: int, /) -> None: ...
    def add(self, tokens: int, count: int, begin: int, /) -> None: ...
    def match(self, tokens: int, count: int, most: int, /) -> tuple[list[int], int, int, bool]: ...  # for tests
    def bytes(self) -> int: ...

class Drafter:
    def __init__(self, state: DraftState, use_history: bool, use_lookup: bool, /) -> None: ...
    def prompt(self, tokens: int, count: int, /) -> None: ...
    def reference(self, source: int, tokens: int, count: int, /) -> None: ...
    def append(self, tokens: Sequence[int] | npt.NDArray[np.integer], /) -> None: ...
    def propose(self, most: int, /) -> tuple[list[int], list[float], int] | None: ...
    def bytes(self) -> int: ...

def record_parts(on: bool, /) -> None: ...
def part_seconds() -> list[float]: ...
def elementwise(function: int, from_: int, to: int, count: int, /) -> None: ...
