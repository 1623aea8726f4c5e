"""Ragged: every list that a kernel would trust and should not is refused with a sentence."""

from __future__ import annotations

import pytest
import torch

from apcbatch.kernels.ragged import Ragged
from tests.effort import table
from tests.kernels.recurrent import ragged


def test_counts():
    """A batch whose totals do not follow from its lists; left-out lists that mean something else than zeros, no final
    states and no snapshots; several sequences that begin with one snapshot being refused, or one that overwrites its
    own."""
    batch = ragged([3, 1, 5], [-1, 4, 2], [0, 4, -1], [[(3, 1)], [], [(1, 7), (5, 9)]])
    assert (batch.num_sequences, batch.num_tokens, batch.max_slot) == (3, 9, 9)
    assert (ragged([]).num_sequences, ragged([]).num_tokens, ragged([]).max_slot) == (0, 0, -1)
    batch = Ragged.create(torch.tensor([0, 2, 5]))
    assert batch.initial_slots.tolist() == batch.final_slots.tolist() == [-1, -1]
    assert batch.snapshot_cu.tolist() == [0, 0, 0]
    ragged([1, 1], [3, 3], [0, 1])
    ragged([1, 1], [0, 1], [0, 1])
    ragged([2], [0], [1], [[(1, 0)]])


def test_a_decode_pass_has_a_token_of_each_sequence():
    """A pass whose highest slot is another one than the kernels write, or that has more tokens than sequences."""
    batch = Ragged.of_decode([2, -1, 0], [2, 5, 0])
    assert (batch.num_sequences, batch.num_tokens, batch.max_slot) == (3, 3, 5)
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 3] and Ragged.rows(3).tolist() == [0, 1, 2]
    assert batch.initial_slots.tolist() == [2, -1, 0] and batch.snapshot_cu.tolist() == [0, 0, 0, 0]
    assert ragged([1], [1], [0]).max_slot == 1, "a fork's initial slot counts"


GOOD = {
    "cu_seqlens": [0, 3, 4], "initial_slots": [0, -1], "final_slots": [0, 1], "snapshot_cu": [0, 2, 2],
    "snapshot_positions": [1, 3], "snapshot_slots": [2, 3],
}  # fmt: skip
REFUSED = [
    ("cu_seqlens must go from 0 to 4; it goes from 1 to 4", {"cu_seqlens": [1, 3, 4]}),
    ("cu_seqlens must go from 0 to 4; it goes from -1 to 4", {"cu_seqlens": [-1, 3, 4]}),
    ("cu_seqlens must grow by at least 1 a sequence; at sequence 1 it goes from 3 to 3", {"cu_seqlens": [0, 3, 3]}),
    ("cu_seqlens must grow by at least 1 a sequence; at sequence 0 it goes from 0 to -1", {"cu_seqlens": [0, -1, 4]}),
    ("cu_seqlens must have one entry more", {"cu_seqlens": []}),
    ("initial_slots must be int64 of shape (2,)", {"initial_slots": [0]}),
    ("final_slots must be int64 of shape (2,)", {"final_slots": [0, 1, 2]}),
    ("snapshot_cu must be int64 of shape (3,)", {"snapshot_cu": [0, 2]}),
    ("snapshot_slots must be int64 of shape (2,)", {"snapshot_slots": [2]}),
    ("snapshot_cu must go from 0 to 2", {"snapshot_cu": [0, 2, 1]}),
    ("snapshot_cu must grow by at least 0", {"snapshot_cu": [0, 3, 2]}),
    ("within 1 to 3, the tokens of sequence 0; there is 4 after 1", {"snapshot_positions": [1, 4]}),
    ("there is 0 after 0", {"snapshot_positions": [0, 3]}),
    ("there is 1 after 1", {"snapshot_positions": [1, 1]}),
    ("slots must be 0 or more", {"initial_slots": [-2, 0]}),
    ("slots must be 0 or more", {"snapshot_slots": [-1, 2]}),
    ("a slot must be written once; 3 is written by sequence 0", {"snapshot_slots": [3, 3]}),
    ("a slot must be written once; 0 is written by sequence 0 and then by sequence 0", {"snapshot_slots": [0, 3]}),
    ("a slot must be written once; 1 is written by sequence 0 and then by sequence 1", {"final_slots": [1, 1]}),
    ("a slot must be written once; 2 is written by sequence 0", {"final_slots": [2, 1]}),
    ("begins with must not be written by another; 1 is written by sequence 1", {"initial_slots": [1, -1]}),
    ("begins with must not be written by another; 3 is written by sequence 0", {"initial_slots": [0, 3]}),
]


@table("message, change", REFUSED)
def test_refuses_what_a_kernel_would_trust(message, change):
    """Offsets that leave the arrays, or two sequences that meet in one slot: memory errors or races in a kernel."""
    lists = {**GOOD, **change}
    with pytest.raises(ValueError) as error:
        Ragged(**{name: torch.tensor(values, dtype=torch.int64) for name, values in lists.items()})
    assert message in str(error.value)


@table("message, change", [
    ("cu_seqlens must go from 0", {"cu_seqlens": [1, 2, 3]}),
    ("cu_seqlens must grow by at least 1", {"cu_seqlens": [0, 0, 1]}),
    ("snapshot_cu must grow by at least 0", {"snapshot_cu": [0, 1, 0]}),
    ("a slot must be written once; 1 is written by sequence 0", {"initial_slots": [-1, -1], "final_slots": [1, 1]}),
    ("slots must be 0 or more", {"initial_slots": [-2, -1], "final_slots": [-2, 1]}),
    ("must not be written by another; 1 is written by sequence 1", {"initial_slots": [1, -1]}),
    (3, {"cu_seqlens": [0, 2, 3]}), (2, {"final_slots": [0, -1]}), (2, {"final_slots": [-1, -1]}),
])  # fmt: skip
def test_a_pass_that_is_nearly_a_decode_is_looked_at_whole(message, change):
    """Fault: the quick check of decode passes takes a batch that the whole one refuses, or counts its tokens so."""
    none = {"snapshot_cu": [0, 0, 0], "snapshot_positions": [], "snapshot_slots": []}
    lists = {**GOOD, **none, "cu_seqlens": [0, 1, 2], **change}
    tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in lists.items()}
    if isinstance(message, int):
        batch = Ragged(**tensors)
        assert (batch.num_tokens, batch.max_slot) == (message, max(lists["initial_slots"] + lists["final_slots"]))
    else:
        with pytest.raises(ValueError, match=message):
            Ragged(**tensors)


def test_refuses_other_tensors():
    """int32 or strided lists read as contiguous int64, or those of another device as the host's."""
    with pytest.raises(ValueError, match="cu_seqlens must have one entry more"):
        Ragged.create(torch.tensor([], dtype=torch.int64))
    with pytest.raises(ValueError, match=r"initial_slots must be int64 of shape \(1,\) on the CPU, .* on meta"):
        Ragged.create(torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="cu_seqlens must be int64 of shape"):
        Ragged.create(torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="cu_seqlens must be contiguous"):
        Ragged.create(torch.tensor([0, 9, 1, 9])[::2])
