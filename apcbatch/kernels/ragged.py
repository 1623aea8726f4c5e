"""Ragged: the token range of each sequence in a packed batch, and the state slots that it reads and writes.

Invariants, checked at construction and relied upon by every kernel: each sequence has at least one token, no slot is
written twice, and no slot is written by one sequence and read by another. So sequences may run in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from apcbatch import _C

Copy = TypeVar("Copy")


@dataclass(frozen=True, eq=False)
class Ragged:
    """Metadata of b sequences with k snapshots. Every tensor is int64, contiguous, on the CPU. Raises ValueError.

    cu_seqlens: (b + 1,), token offsets. initial_slots: (b,), slot read before the first token; -1: begin with zeros.
    final_slots: (b,), slot written after the last token; -1: discard the state. snapshot_cu: (b + 1,), offsets into
    the next two. snapshot_positions: (k,), tokens of its sequence in this batch up to the snapshot, 1 to the sequence's
    length, ascending within a sequence. snapshot_slots: (k,), slots written. copies: see `on`.
    """

    cu_seqlens: torch.Tensor
    initial_slots: torch.Tensor
    final_slots: torch.Tensor
    snapshot_cu: torch.Tensor
    snapshot_positions: torch.Tensor
    snapshot_slots: torch.Tensor
    num_sequences: int = field(init=False)
    num_tokens: int = field(init=False)
    max_slot: int = field(init=False)  # highest slot read or written; -1: none
    params: _C.RaggedParams = field(init=False, repr=False)
    copies: dict[torch.device, Any] = field(init=False, repr=False, default_factory=dict)

    @classmethod
    def create(
        cls,
        cu_seqlens: torch.Tensor,
        initial_slots: torch.Tensor | None = None,
        final_slots: torch.Tensor | None = None,
        snapshot_cu: torch.Tensor | None = None,
        snapshot_positions: torch.Tensor | None = None,
        snapshot_slots: torch.Tensor | None = None,
    ) -> Ragged:
        """Make a Ragged. By default sequences begin with zeros, discard their final state, and take no snapshots.
        Raises ValueError."""
        b = max(cu_seqlens.numel() - 1, 0)
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return cls(
            cu_seqlens,
            torch.full((b,), -1, device="cpu") if initial_slots is None else initial_slots,
            torch.full((b,), -1, device="cpu") if final_slots is None else final_slots,
            torch.zeros(b + 1, dtype=torch.int64, device="cpu") if snapshot_cu is None else snapshot_cu,
            none if snapshot_positions is None else snapshot_positions,
            none if snapshot_slots is None else snapshot_slots,
        )

    @classmethod
    def of_decode(cls, initial_slots: list[int], final_slots: list[int]) -> Ragged:
        """Make the Ragged of a decode pass: one token per sequence, no snapshots. Raises ValueError."""
        offsets, zeros, none, _ = _constants(len(final_slots))
        initial, final = torch.from_numpy(np.array((initial_slots, final_slots), np.int64)).unbind()
        return cls(offsets, initial, final, zeros, none, none)

    @staticmethod
    def rows(count: int) -> torch.Tensor:
        """Return 0 to count - 1 as a tensor (count,) int64. It is shared: do not write to it."""
        return _constants(count)[3]

    def on(self, device: torch.device, make: Callable[[Ragged, torch.device], Copy]) -> Copy:
        """Return this batch's copy on another device. The first call for a device makes it by make(self, device)."""
        copy: Copy | None = self.copies.get(device)
        if copy is None:
            copy = self.copies[device] = make(self, device)
        return copy

    def __post_init__(self) -> None:
        _check_tensors(self)
        highest = _highest_decode_slot(self)
        if highest is not None:
            b = self.final_slots.numel()
            self._set_derived(b, b, highest)
            return
        lengths = _check_offsets(self.cu_seqlens.tolist(), "cu_seqlens", self.cu_seqlens[-1].item(), 1)
        cuts = self.snapshot_cu.tolist()
        _check_offsets(cuts, "snapshot_cu", self.snapshot_positions.numel(), 0)
        _check_positions(self.snapshot_positions.tolist(), cuts, lengths)
        slots = _check_slots(self)
        self._set_derived(len(lengths), sum(lengths), max(slots, default=-1))

    def _set_derived(self, num_sequences: int, num_tokens: int, max_slot: int) -> None:
        assign = object.__setattr__
        assign(self, "num_sequences", num_sequences)
        assign(self, "num_tokens", num_tokens)
        assign(self, "max_slot", max_slot)
        addresses = [getattr(self, name).data_ptr() for name in _ARRAYS]
        assign(self, "params", _C.RaggedParams(num_sequences, *addresses))


_ARRAYS = ("cu_seqlens", "initial_slots", "final_slots", "snapshot_cu", "snapshot_positions", "snapshot_slots")


@lru_cache(maxsize=256)
def _constants(b: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tensors shared by all decode passes of b sequences: offsets 0 to b, b + 1 zeros, an empty tensor, and
    rows 0 to b - 1."""
    offsets, zeros = torch.arange(b + 1, device="cpu"), torch.zeros(b + 1, dtype=torch.int64, device="cpu")
    return offsets, zeros, torch.empty(0, dtype=torch.int64, device="cpu"), offsets[:b]


def _highest_decode_slot(ragged: Ragged) -> int | None:
    """Return the highest slot of a valid decode pass. Returns None for any other batch, which needs the full checks.

    Valid: one token per sequence, no snapshots, distinct final slots, and each initial slot is the final slot or -1.
    Uses array operations, as it runs in every pass.
    """
    offsets, initial, final = ragged.cu_seqlens.numpy(), ragged.initial_slots.numpy(), ragged.final_slots.numpy()
    b = len(final)
    if ragged.snapshot_slots.numel() or not b or ragged.snapshot_cu.numpy().any():
        return None
    if offsets[0] or (np.diff(offsets) != 1).any() or ((initial != final) & (initial != -1)).any():
        return None
    ascending = np.sort(final)
    if ascending[0] < 0 or (ascending[1:] == ascending[:-1]).any():
        return None
    return int(ascending[-1])


def _check_tensors(ragged: Ragged) -> None:
    b = ragged.cu_seqlens.numel() - 1
    if b < 0:
        raise ValueError("cu_seqlens must have one entry more than there are sequences; it is empty")
    k = ragged.snapshot_positions.numel()
    expected = (
        ("cu_seqlens", b + 1),
        ("initial_slots", b),
        ("final_slots", b),
        ("snapshot_cu", b + 1),
        ("snapshot_positions", k),
        ("snapshot_slots", k),
    )
    for name, size in expected:
        tensor: torch.Tensor = getattr(ragged, name)
        if tensor.dtype != torch.int64 or tensor.shape != (size,) or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} must be int64 of shape ({size},) on the CPU, for {b} sequences and {k} snapshots; "
                f"it is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; its stride is {tensor.stride()}")


def _check_offsets(offsets: list[int], name: str, end: float, smallest: int) -> list[int]:
    """Return the differences of the offsets. Raises ValueError unless the offsets go from 0 to `end` and grow by at
    least `smallest` each."""
    if offsets[0] != 0 or offsets[-1] != end:
        raise ValueError(f"{name} must go from 0 to {end}; it goes from {offsets[0]} to {offsets[-1]}")
    steps = [after - before for before, after in zip(offsets, offsets[1:], strict=False)]
    for sequence, step in enumerate(steps):
        if step < smallest:
            raise ValueError(
                f"{name} must grow by at least {smallest} a sequence; at sequence {sequence} it goes from "
                f"{offsets[sequence]} to {offsets[sequence + 1]}"
            )
    return steps


def _check_positions(positions: list[int], cuts: list[int], lengths: list[int]) -> None:
    for sequence, length in enumerate(lengths):
        before = 0
        for position in positions[cuts[sequence] : cuts[sequence + 1]]:
            if not before < position <= length:
                raise ValueError(
                    f"snapshot_positions must ascend within 1 to {length}, the tokens of sequence "
                    f"{sequence}; there is {position} after {before}"
                )
            before = position


def _check_slots(ragged: Ragged) -> set[int]:
    """Return all slots read or written, and -1 if a sequence begins with zeros. Raises ValueError for an invalid slot
    number, for a slot that is written twice, or if one sequence writes the initial slot of another."""
    initial, final = ragged.initial_slots.tolist(), ragged.final_slots.tolist()
    snapshots, cuts = ragged.snapshot_slots.tolist(), ragged.snapshot_cu.tolist()
    if min([*initial, *final], default=-1) < -1 or min(snapshots, default=0) < 0:
        raise ValueError("slots must be 0 or more; only initial and final ones may be -1, for none")
    writer: dict[int, int] = {}
    for sequence in range(len(final)):
        written = snapshots[cuts[sequence] : cuts[sequence + 1]]
        for slot in written if final[sequence] < 0 else [*written, final[sequence]]:
            if slot in writer:
                raise ValueError(
                    f"a slot must be written once; {slot} is written by sequence {writer[slot]} and then by "
                    f"sequence {sequence}"
                )
            writer[slot] = sequence
    for sequence, slot in enumerate(initial):
        if writer.get(slot, sequence) != sequence:
            raise ValueError(
                f"a slot that sequence {sequence} begins with must not be written by another; "
                f"{slot} is written by sequence {writer[slot]}"
            )
    return {*initial, *writer}
