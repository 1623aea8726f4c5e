"""The layout of states: bytes, stored tensors and descriptions, against numbers counted by hand."""

from __future__ import annotations

import pytest

from apcbatch.layout import CONV, DELTA, KV, PAGE_TOKENS, SSM, Extent, Role, StateLayout, StatePart, TensorLayout
from apcbatch.plan.footprint import Footprint
from tests.effort import table

# Roles of families that are not here yet, each with the sizes of a tiny model.
MAMBA2 = Role("ssm", Extent.AT, ("head", "d_state", "head_dim"), ("head", "head_dim", "d_state"), "float32")
MIXED_CONV = Role("conv", Extent.TAIL, ("d_conv-1", "channel"), ("channel", "d_conv-1"))
DILATED = Role("conv_dilated", Extent.TAIL, ("reach", "channel"))
SHORT_CONV = Role("conv_short", Extent.TAIL, ("d_conv-1", "hidden"))
IDS = Role("ids", Extent.TAIL, ("last",), dtype="uint32")
LATENT = Role("kv_latent", Extent.TOKENS, ("token", "latent"))
ROPE_KEY = Role("kv_rope_key", Extent.TOKENS, ("token", "rope_dim"))

LAYOUTS = {
    # 2 layers of ssm 2 x 4 float32 = 32 bytes and conv 3 x 4 bfloat16 = 24.
    "mamba": ([SSM.part(i, (2, 4), "bfloat16") for i in (0, 1)] + [CONV.part(i, (3, 4), "bfloat16") for i in (0, 1)],
              2 * (32 + 24), 0),
    # Mamba, attention, Mamba: keys and values of 2 heads of 5 bfloat16 = 2 x 2 x 5 x 2 = 40 bytes for each token.
    "jamba": ([SSM.part(0, (2, 4), "bfloat16"), CONV.part(0, (3, 4), "bfloat16"),
               KV.part(1, (2, None, 2, 5), "bfloat16"),
               SSM.part(2, (2, 4), "bfloat16"), CONV.part(2, (3, 4), "bfloat16")], 2 * (32 + 24), 40),
    # 2 heads of 3 x 4 float32 = 96 bytes; inputs of x, B and C: 2 x 3 + 2 x 1 x 4 = 14 channels x 3 bfloat16 = 84.
    "mamba-2": ([MAMBA2.part(0, (2, 4, 3), "bfloat16"), MIXED_CONV.part(0, (3, 14), "bfloat16")], 96 + 84, 0),
    # 2 value heads of one block of 4 x 5 float32 = 160; inputs 2 x 4 + 2 x 5 = 18 channels x 3 float32 = 216; attention
    # beside it: keys and values of 1 head of 8 float32 = 64 for each token.
    "gated delta net": ([DELTA.part(0, (2, 1, 4, 5), "float32"), MIXED_CONV.part(0, (3, 18), "float32"),
                         KV.part(3, (2, None, 1, 8), "float32")], 160 + 216, 64),
    # Two convolutions of one layer: 3 x 6 and 9 x 6 bfloat16 = 36 + 108; the last 3 token ids = 12 bytes; a latent of 8
    # and a key of 2 bfloat16 for each token = 20.
    "several states a layer": ([MIXED_CONV.part(0, (3, 6), "bfloat16"), DILATED.part(0, (9, 6), "bfloat16"),
                                IDS.part(0, (3,), "bfloat16"), LATENT.part(0, (None, 8), "bfloat16"),
                                ROPE_KEY.part(0, (None, 2), "bfloat16")], 36 + 108 + 12, 20),
    # 2 inputs of 6 bfloat16 = 24 bytes.
    "short convolution": ([SHORT_CONV.part(5, (2, 6), "bfloat16")], 24, 0),
    # Both in every layer: as in mamba and jamba.
    "parallel": ([SSM.part(0, (2, 4), "float32"), KV.part(0, (2, None, 2, 5), "float32")], 32, 80),
}  # fmt: skip


@table("name", LAYOUTS)
def test_bytes_are_those_counted_by_hand(name: str) -> None:
    """Catches a part, a layer or an item's size that is counted twice or left out: the pool would hold more than its
    size, or the plan would keep fewer than fit."""
    parts, slot_bytes, token_bytes = LAYOUTS[name]
    layout = StateLayout.of(parts)
    assert (layout.slot_bytes, layout.token_bytes) == (slot_bytes, token_bytes)
    assert layout.page_bytes == 64 * token_bytes and layout.has_tokens == (token_bytes > 0)
    assert Footprint.of(layout) == Footprint(slot_bytes, token_bytes, PAGE_TOKENS)


def test_falcon_mamba_7b_weighs_35_mib() -> None:
    """Catches a formula that is right for tiny sizes alone: 64 layers x 8192 channels x (16 x 4 + 3 x 2 bytes)."""
    states = [SSM.part(i, (16, 8192), "bfloat16") for i in range(64)]
    tails = [CONV.part(i, (3, 8192), "bfloat16") for i in range(64)]
    assert StateLayout.of(states + tails).slot_bytes == 36_700_160 == 35 << 20


def test_stored_tensors_stack_the_layers_of_a_role() -> None:
    """Catches another name, order of axes or dtype on disk: no store that exists could be read any more."""
    assert StateLayout.of(LAYOUTS["jamba"][0]).stored() == {
        "ssm": TensorLayout("F32", (2, 2, 4)),
        "conv": TensorLayout("BF16", (2, 3, 4)),
        "kv": TensorLayout("BF16", (1, 2, None, 2, 5)),
    }
    assert StateLayout.of(LAYOUTS["several states a layer"][0]).stored() == {
        "conv": TensorLayout("BF16", (1, 3, 6)),
        "conv_dilated": TensorLayout("BF16", (1, 9, 6)),
        "ids": TensorLayout("U32", (1, 3)),
        "kv_latent": TensorLayout("BF16", (1, None, 8)),
        "kv_rope_key": TensorLayout("BF16", (1, None, 2)),
    }


def test_what_is_kept_for_tokens_comes_last() -> None:
    """Catches stacks in the order of a model's layers: one that begins with attention would be another snapshot."""
    parts = [KV.part(0, (2, None, 1, 2), "float32"), SSM.part(1, (2, 4), "float32"), CONV.part(1, (3, 4), "float32")]
    assert [stack.role.name for stack in StateLayout.of(parts).stacks] == ["ssm", "conv", "kv"]
    assert [stack.layers for stack in StateLayout.of(parts).stacks] == [(1,), (1,), (0,)]


def test_the_first_families_keep_their_description() -> None:
    """Catches a description that changes: every fingerprint would, and every store would miss."""
    first = "ssm(layer,d_state,d_inner)f32 conv(layer,d_conv-1,d_inner) kv(layer,2,token,kv_head,head_dim)"
    for name in ("mamba", "jamba", "parallel"):
        assert StateLayout.of(LAYOUTS[name][0]).description == first
    assert StateLayout.of(LAYOUTS["short convolution"][0]).description == f"{first} conv_short(layer,d_conv-1,hidden)"
    assert StateLayout.of(LAYOUTS["mamba-2"][0]).description == (
        "ssm(layer,head,d_state,head_dim)f32 conv(layer,d_conv-1,channel) kv(layer,2,token,kv_head,head_dim)"
    )
    described = {StateLayout.of(parts).description for parts, *_ in LAYOUTS.values()}
    assert len(described) == len(LAYOUTS) - 2


WRONG_LAYOUTS = {
    "another shape": ([SSM.part(0, (2, 4), "float32"), SSM.part(1, (2, 8), "float32")], "in layer 1; expected another"),
    "another dtype": ([CONV.part(0, (3, 4), "float32"), CONV.part(1, (3, 4), "bfloat16")], "float32 in layer 0"),
    "another role": ([SSM.part(0, (2, 4), "float32"), MAMBA2.part(1, (2, 4, 3), "float32")], "expected another role"),
    "other axes": ([CONV.part(0, (3, 4), "float32"), MIXED_CONV.part(1, (3, 4), "float32")], "in layer 1"),
    "the same twice": ([SSM.part(0, (2, 4), "float32")] * 2, "two parts of one role"),
}


@table("name", WRONG_LAYOUTS)
def test_parts_of_one_role_are_alike(name: str) -> None:
    """Catches layers that would be stacked into one tensor although they do not fit."""
    parts, sentence = WRONG_LAYOUTS[name]
    with pytest.raises(ValueError, match=sentence):
        StateLayout.of(parts)


@table("shape", [(2,), (2, 4, 1), (None, 4)])
def test_a_part_has_the_axes_of_its_role(shape: tuple[int | None, ...]) -> None:
    """Catches a shape of too few or too many axes, and tokens where there are none."""
    with pytest.raises(ValueError, match="layer 3 has ssm"):
        SSM.part(3, shape, "float32")
    with pytest.raises(ValueError, match="kv_latent"):
        LATENT.part(3, (8, None), "float32")
    with pytest.raises(ValueError, match="float16"):
        StatePart(0, CONV, (3, 4), "float16")


def test_a_role_that_contradicts_itself_is_refused() -> None:
    """Catches tokens under a name that the store does not know as such, a recurrent value that is rounded, axes that
    are shown and do not exist."""
    for name, extent, axes in (("keys", Extent.TOKENS, ("token", "d")), ("kv", Extent.TAIL, ("k", "d"))):
        with pytest.raises(ValueError, match="for what is kept for each token"):
            Role(name, extent, axes)
    for extent, name, axes in ((Extent.TOKENS, "kv", ("d",)), (Extent.TAIL, "conv", ("token", "d"))):
        with pytest.raises(ValueError, match="expected one token"):
            Role(name, extent, axes)
    with pytest.raises(ValueError, match="a recurrent value is float32"):
        Role("ssm", Extent.AT, ("n", "d"))
    with pytest.raises(ValueError, match="expected an order of"):
        Role("conv", Extent.TAIL, ("k", "d"), shown=("k", "n"))
