"""DeviceBatch: a Ragged's lists on a CUDA device, uploaded once for all layers of a pass.

Must not know: models, arenas. Its memory stays where it is when other slots are written into it, so a captured CUDA
graph of its kernels goes on with the new ones.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.cuda.extension import extension
from apcbatch.kernels.ragged import Ragged


class DeviceBatch:
    """The device's copy of one Ragged."""

    def __init__(self, ragged: Ragged, device: torch.device) -> None:
        lists, lengths, num_longer = _lists(ragged)
        self.num_sequences = ragged.num_sequences
        self.num_tokens = ragged.num_tokens
        self.max_slot = ragged.max_slot
        self.device = device
        self._lists = uploaded(torch.cat(lists), device)
        starts = [self._lists.data_ptr()]
        for part in lists:
            starts.append(starts[-1] + part.numel() * part.element_size())
        self.params = extension().Batch(
            ragged.num_sequences, ragged.num_tokens, max(lengths, default=0), num_longer, *starts[:-1]
        )

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """(sequences + 1,) int64 on the device."""
        return self._lists[: self.num_sequences + 1]

    @property
    def slots(self) -> torch.Tensor:
        """(2, sequences) int64 on the device: the initial and the final ones. Who writes others there sees to it that
        they are a Ragged's, and that the states have them."""
        b = self.num_sequences
        return self._lists[b + 1 : 3 * b + 1].view(2, b)


def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host's tensor for the device's current stream. The host does not wait: its own copy is pinned, and
    torch keeps it until the device has it."""
    return (tensor.pin_memory() if tensor.numel() else tensor).to(device, non_blocking=True)


def _lists(ragged: Ragged) -> tuple[list[torch.Tensor], list[int], int]:
    """The lists in the order that _CUDA.Batch takes, the lengths, and how many sequences have several tokens.

    The last list orders the sequences, the longest first, so that those of one token stand together at the end.
    """
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
    return lists, lengths, sum(length > 1 for length in lengths)
