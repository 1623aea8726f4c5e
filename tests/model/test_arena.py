"""The arena of states: memory, views and copies, for the layouts of the families and of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apcbatch.kernels.arguments import PAGE_TOKENS as KERNEL_PAGE_TOKENS
from apcbatch.layout import PAGE_TOKENS, Extent, Role, StateLayout
from apcbatch.model.arena import StateArena
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.model.locate import locate_model
from tests.effort import table
from tests.tiny import FAMILIES

STATE = Role("state", Extent.AT, ("head", "k", "v"), ("head", "v", "k"), "float32")
TAIL = Role("conv", Extent.TAIL, ("last", "channel"), ("channel", "last"))
IDS = Role("ids", Extent.TAIL, ("last",), dtype="uint32")
LATENT = Role("kv_latent", Extent.TOKENS, ("token", "latent"))
KEYS = Role("kv_keys", Extent.TOKENS, ("head", "token", "dim"))

CPU = torch.device("cpu")


def make_arena(num_slots: int = 3, num_pages: int = 4) -> StateArena:
    """Layer 0 has a state and a tail, 1 what is kept for tokens, 2 all; every number is another one."""
    parts = [part for i in (0, 2) for part in (STATE.part(i, (2, 3, 4), "bfloat16"), TAIL.part(i, (2, 5), "bfloat16"))]
    parts += [
        part for i in (1, 2) for part in (LATENT.part(i, (None, 6), "bfloat16"), KEYS.part(i, (2, None, 3), "bfloat16"))
    ]
    arena = StateArena(StateLayout.of([*parts, IDS.part(2, (3,), "bfloat16")]), num_slots, num_pages, CPU)
    for tensor in (*arena.slots.values(), *arena.pages.values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 251)
    return arena


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_slot_and_a_page_weigh_what_the_layout_says(dtype: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: the bytes in the plan are computed by another formula than those of the memory that is allocated, or a
    page of the layout is not one of the compiled attention."""
    assert PAGE_TOKENS == KERNEL_PAGE_TOKENS
    folders = [locate_model("demo"), *map(tiny_checkpoint, FAMILIES)]
    for config in map(load_model_config, folders):
        layout = state_layout(config, dtype)
        arena = StateArena(layout, 3, 5, CPU)
        assert sum(part.nbytes for part in arena.slots.values()) == 3 * layout.slot_bytes > 0
        assert sum(part.nbytes for part in arena.pages.values()) == 5 * layout.page_bytes
        assert bool(arena.pages) == layout.has_tokens == any(name in config.mixers for name in ("attention", "hybrid"))


def test_a_layer_sees_its_own_parts() -> None:
    """Catches a mixer that reads or writes the state of another layer, or a role that it does not have."""
    arena = make_arena()
    assert [sorted(arena.layer(i)) for i in range(4)] == [
        ["conv", "state"], ["kv_keys", "kv_latent"], ["conv", "ids", "kv_keys", "kv_latent", "state"], [],
    ]  # fmt: skip
    arena.layer(2)["state"].fill_(7)
    assert (arena.slots["state"][:, 1] == 7).all() and (arena.slots["state"][:, 0] != 7).any()
    arena.layer(1)["kv_latent"].fill_(9)
    assert (arena.pages["kv_latent"][0] == 9).all() and (arena.pages["kv_latent"][1] != 9).any()


@table("begin, end", [(0, 1), (0, 64), (0, 100), (63, 65), (64, 192), (70, 71), (5, 190)])
def test_tokens_come_back_as_they_were_written(begin: int, end: int) -> None:
    """Catches tokens from a wrong page or offset, and others that are overwritten, with the axis in any place."""
    arena, pages = make_arena(), torch.tensor([3, 0, 2])
    before = {name: part.clone() for name, part in arena.pages.items()}
    gathered = arena.gather(pages, begin, end)
    assert gathered["kv_latent"].shape == (2, end - begin, 6)
    assert gathered["kv_keys"].shape == (2, 2, end - begin, 3)
    for i, position in enumerate(range(begin, end)):
        page, offset = int(pages[position // 64]), position % 64
        assert torch.equal(gathered["kv_latent"][:, i], before["kv_latent"][:, page, offset])
        assert torch.equal(gathered["kv_keys"][:, :, i], before["kv_keys"][:, :, page, offset])
    for part in arena.pages.values():
        part.zero_()
    arena.scatter(pages, begin, gathered)
    whole = arena.gather(pages, 0, 192)
    for name, dim in (("kv_latent", 1), ("kv_keys", 2)):
        assert torch.equal(whole[name].narrow(dim, begin, end - begin), gathered[name])
        assert not whole[name].narrow(dim, 0, begin).any() and not whole[name].narrow(dim, end, 192 - end).any()


def test_slots_and_pages_are_copied_whole_and_alone() -> None:
    """Catches a part that a snapshot from the store loses, writes to another slot, and a shared page that is written to
    by the sequence that was to get a copy."""
    arena = make_arena()
    before = {name: part.clone() for name, part in arena.slots.items()}
    assert {name: part.data_ptr() for name, part in arena.host_slot(1).items()} == {
        name: part[1].data_ptr() for name, part in arena.slots.items()
    }, "on the CPU it is the slot itself"
    host = {name: torch.empty_like(part[1]) for name, part in arena.slots.items()}
    arena.copy_out(1, host, arena.mark())
    assert all(torch.equal(part, before[name][1]) for name, part in host.items())
    arena.copy_in(1, arena.host_slot(1)).wait()
    assert all(torch.equal(part, before[name]) for name, part in arena.slots.items())
    arena.copy_in(2, {"of another kind": torch.zeros(1), **host}).wait()
    for name, part in arena.slots.items():
        assert torch.equal(part[2], before[name][1]) and torch.equal(part[:2], before[name][:2])
    of = lambda page: arena.gather(torch.tensor([page]), 0, 64)  # noqa: E731
    pages = [of(page) for page in range(4)]
    arena.copy_page(1, 3)
    for page, source in enumerate([0, 1, 2, 1]):
        assert all(torch.equal(tokens, pages[source][name]) for name, tokens in of(page).items())


def test_what_is_shown_is_a_copy_in_the_order_of_the_surface() -> None:
    """Catches axes in the order of memory, and a tensor in the caller's hands that the next pass writes into."""
    arena = make_arena()
    shown = arena.shown(1, torch.tensor([2, 0]), 70)
    assert torch.equal(shown["state"], arena.slots["state"][1].transpose(2, 3))
    assert torch.equal(shown["conv"], arena.slots["conv"][1].transpose(1, 2))
    assert torch.equal(shown["ids"], arena.slots["ids"][1])
    assert torch.equal(shown["kv_keys"], arena.gather(torch.tensor([2, 0]), 0, 70)["kv_keys"])
    assert list(shown) == ["state", "conv", "ids", "kv_latent", "kv_keys"]
    assert all(part.is_contiguous() for part in shown.values())
    assert list(arena.shown(1, torch.zeros(0, dtype=torch.int64), 70)) == ["state", "conv", "ids"]
    kept = {name: part.clone() for name, part in shown.items()}
    for part in (*arena.slots.values(), *arena.pages.values()):
        part.zero_()
    assert all(torch.equal(part, kept[name]) for name, part in shown.items())


@table("role", ["state", "conv"])
@table("value", [torch.nan, torch.inf, -torch.inf])
@table("on_host", [True, False])
def test_every_floating_part_tells_whether_a_state_is_finite(
    role: str, value: float, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a broken state that is published because one part alone was looked at, on the CPU and as a device does
    it."""
    monkeypatch.setattr(StateArena, "on_host", on_host)
    arena = make_arena()
    arena.slots[role][1].view(-1)[-1] = value
    assert [part.tolist() for part in arena.finite(range(3))] == [[True, False, True]]
