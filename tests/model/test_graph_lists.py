"""What a captured decode pass reads: the lists of one batch after those of another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from apcbatch.kernels.ragged import Ragged
from apcbatch.model import batch as batch_module
from apcbatch.model.batch import Batch
from apcbatch.model.graphs import _draft_shape, _DraftLists, _Lists
from tests.effort import is_full, table


def batch(b: int, pages: int) -> Batch:
    slots = torch.arange(b) + 5
    return Batch(
        token_ids=torch.arange(b) + 1,
        ragged=Ragged.create(torch.arange(b + 1), initial_slots=slots, final_slots=slots),
        logits_rows=torch.arange(b),
        page_table=torch.arange(b * pages).view(b, pages),
        context=torch.full((b,), 64 * pages - 1),
        token_slots=torch.arange(b) * 64,
    )


def test_a_smaller_batch_leaves_nothing_of_the_larger_one() -> None:
    """Catches sequences of an earlier pass that continue in the rows that fill a batch up, and write their states."""
    lists = _Lists(8, 16)
    lists.fill(batch(7, 9))
    lists.fill(batch(3, 2))
    assert lists.present.tolist() == [3]
    assert lists.token_ids[:3].tolist() == [1, 2, 3]
    assert lists.slots.tolist() == [[5, 6, 7, -1, -1, -1, -1, -1]] * 2
    assert lists.context.tolist() == [127] * 3 + [-1] * 5
    assert lists.token_slots.tolist() == [0, 64, 128] + [-1] * 5
    assert lists.page_table[:3, :2].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_model_without_attention_has_no_pages() -> None:
    """Catches a table of pages that is copied to the device for nothing."""
    lists = _Lists(4, 0)
    lists.fill(batch(4, 3))
    assert lists.memory.numel() == 1 + 5 * 4
    assert lists.slots.tolist() == [[5, 6, 7, 8]] * 2


def draft_batch(lengths: list[int], pages: int) -> Batch:
    """Sequences of a due token and drafted ones, with a snapshot before each of these."""
    b, t = len(lengths), sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    ragged = Ragged.create(
        cu,
        initial_slots=torch.arange(b) + 5,
        final_slots=torch.arange(b) + 5,
        snapshot_cu=cu - torch.arange(b + 1),
        snapshot_positions=torch.tensor([place for length in lengths for place in range(1, length)]),
        snapshot_slots=torch.arange(t - b) + 200,
    )
    tables = torch.arange(b * pages).view(b, pages)
    return Batch(torch.arange(t) + 1, ragged, torch.arange(t), tables, torch.arange(b) + 9, torch.arange(t) + 50)


def test_a_smaller_draft_leaves_nothing_of_the_larger_one() -> None:
    """Catches a captured pass with drafts whose padding reads or writes a state, a page or a snapshot of others."""
    lists = _DraftLists(16, 4, 16)
    empty = [part.tolist() for part in lists._parts]
    assert empty[:4] == [[0, 1, 2, 3, 16], [-1] * 4, [-1] * 4, [0] * 5], "a pass before the first batch is padding"
    assert set(lists.token_slots.tolist()) == {-1}
    lists.fill(draft_batch([5, 6, 1], 9))
    lists.fill(draft_batch([3, 1], 2))
    cu_seqlens, initial, final, snapshot_cu, positions, slots, order = (part.tolist() for part in lists._parts)
    assert lists.present.tolist() == [4]
    assert cu_seqlens == [0, 3, 4, 10, 16]
    assert initial == final == [5, 6, -1, -1]
    assert snapshot_cu == [0, 2, 2, 2, 2]
    assert positions[:2] == [1, 2] and slots[:2] == [200, 201]
    assert order == [2, 3, 0, 1], "the longest first"
    assert lists.token_ids.tolist() == [1, 2, 3, 4] + [0] * 12
    assert lists.token_slots.tolist() == [50, 51, 52, 53] + [-1] * 12
    assert lists.context.tolist() == [9, 10, -1, -1]
    assert lists.page_table[:2, :2].tolist() == [[0, 1], [2, 3]]


def test_drafts_fit_into_few_shapes() -> None:
    """Fault: a pass that its graph has no room for, padding that no sequence has, or a graph for every batch."""
    shapes, step = set(), 7 if is_full() else 29
    for b in range(1, 140):
        for t in range(b + 1, 280):
            ragged = draft_batch([t - b + 1] + [1] * (b - 1), 1).ragged if (b + t) % step == 0 else None
            if ragged is None:
                continue
            shape = _draft_shape(ragged)
            if shape is None:
                assert t > 190, f"{b} sequences, {t} tokens"
                continue
            shapes.add(shape)
            lists = _DraftLists(*shape, 1)
            lists.fill(draft_batch([t - b + 1] + [1] * (b - 1), 1))
            lengths = lists._parts[0].diff()
            assert lengths.min() >= 1 and lengths.sum() == shape[0] and lengths[b - 1] == (1 if b > 1 else t)
            assert lengths.max() <= shape[0] - shape[1] + 1
    assert len(shapes) <= 40


@table("scored", [None, [0, 2]])
def test_a_batch_goes_to_its_device_in_one_transfer(scored: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a list of a pass lands in the place of another one, is left on the host, or is sent by itself."""
    sent: list[int] = []
    kept: list[object] = []

    def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        sent.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(batch_module, "uploaded", uploaded)
    monkeypatch.setattr(batch_module, "batch_on", lambda device, ragged: kept.append(ragged))
    rows = None if scored is None else torch.tensor(scored)
    made = replace(batch(3, 2), scored_rows=rows, chosen=torch.tensor([4]), with_logprobs=True)
    there = made.on(torch.device("cpu"))
    assert sent == [3 + 3 + 6 + 3 + 3 + len(scored or [])] and kept == [made.ragged]
    for name in ("token_ids", "logits_rows", "page_table", "context", "token_slots", "scored_rows"):
        found, expected = getattr(there, name), getattr(made, name)
        assert (found is expected is None) or (torch.equal(found, expected) and found is not expected), name
    assert there.chosen is made.chosen and there.with_logprobs and there.ragged is made.ragged


def test_tokens_that_were_not_read_are_looked_up() -> None:
    """Fault: a pass begun ahead computes another row's token, or fails on one that is not finite."""
    made = replace(batch(4, 2), token_ids=torch.tensor([0, -1, -3, -2]))
    assert replace(made, chosen=torch.tensor([5, -1, 7])).tokens.tolist() == [0, 5, 7, 0]
    assert made.tokens is made.token_ids
    ragged = Ragged.create(torch.tensor([0, 2, 4]), torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert replace(made, ragged=ragged, context=torch.tensor([7, 0])).positions.tolist() == [7, 8, 0, 1]
