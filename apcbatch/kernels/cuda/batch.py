"""DeviceBatch: a Ragged's index tensors on a CUDA device, uploaded once for all layers of a pass.

Its addresses never change. So a captured CUDA graph uses new slots once they are written to `slots`.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import address
from apcbatch.kernels.cuda.extension import extension
from apcbatch.kernels.ragged import Ragged

MOST_CAPTURED = 256  # rows of a pass that a CUDA graph captures
SHORT = 64  # maximum tokens of a sequence that a thread walks through; longer ones are scanned in tiles


class DeviceBatch:
    """Copy of one Ragged on the device. params: the batch as the compiled module takes it. lists: all index tensors of
    `_lists`, concatenated, int64 on the device.

    most_snapshots: if given, `lists` has room for this number of snapshots, and the kernels treat every sequence as a
    short one. Then `lists` may be overwritten by those of another batch with the same numbers of sequences and tokens,
    and at most most_snapshots snapshots. present: number of real tokens, as in Batch; the caller keeps it alive.
    """

    def __init__(
        self,
        ragged: Ragged,
        device: torch.device,
        most_snapshots: int | None = None,
        present: torch.Tensor | None = None,
    ) -> None:
        lists, longest, num_longer = _lists(ragged)
        if most_snapshots is not None:
            longest, num_longer = ragged.num_tokens - ragged.num_sequences + 1, 0
            lists[4] = lists[5] = torch.zeros(most_snapshots, dtype=torch.int64, device="cpu")
        self.num_sequences = ragged.num_sequences
        self.num_tokens = ragged.num_tokens
        self.max_slot = ragged.max_slot
        self.device = device
        self.lists = uploaded(torch.cat(lists), device)
        starts = [self.lists.data_ptr()]
        for part in lists:
            starts.append(starts[-1] + part.numel() * part.element_size())
        sizes = ragged.num_sequences, ragged.num_tokens, longest, num_longer
        self.params = extension().Batch(*sizes, *starts[:-1], address(present))

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Token offsets, (sequences + 1,) int64 on the device."""
        return self.lists[: self.num_sequences + 1]

    @property
    def slots(self) -> torch.Tensor:
        """Initial and final slots, (2, sequences) int64 on the device. New slots may be written here, but are not
        checked: they must satisfy a Ragged's invariants and exist in the states."""
        b = self.num_sequences
        return self.lists[b + 1 : 3 * b + 1].view(2, b)


def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device on the device's current stream, without waiting. The source is a pinned copy of
    the tensor, which torch keeps until the transfer has ended."""
    return (tensor.pin_memory() if tensor.numel() else tensor).to(device, non_blocking=True)


def _lists(ragged: Ragged) -> tuple[list[torch.Tensor], int, int]:
    """Return the index tensors in the order that _CUDA.Batch takes, the maximum tokens of a sequence, and the number of
    sequences with more than SHORT tokens. The last tensor orders the sequences, the longest first."""
    lengths = ragged.cu_seqlens.diff().tolist()
    order = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
    lists = [
        ragged.cu_seqlens,
        ragged.initial_slots,
        ragged.final_slots,
        ragged.snapshot_cu,
        ragged.snapshot_positions,
        ragged.snapshot_slots,
        torch.tensor(order, dtype=torch.int64, device="cpu"),
    ]
    return lists, max(lengths, default=0), sum(length > SHORT for length in lengths)


def batch_on(device: torch.device, ragged: Ragged | DeviceBatch) -> DeviceBatch:
    """Return the batch on this device. A Ragged is uploaded by the first op that uses it. Raises ValueError for a
    DeviceBatch on another device."""
    if isinstance(ragged, Ragged):
        return ragged.on(device, DeviceBatch)
    if ragged.device != device:
        raise ValueError(f"the batch must be on {device}, like x; it is on {ragged.device}")
    return ragged
