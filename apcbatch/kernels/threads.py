"""The number of threads of the CPU kernels and of torch's own ops. No bit of any result depends on it."""

from __future__ import annotations

import torch


def threads() -> int:
    """The number in use."""
    return torch.get_num_threads()


def set_threads(count: int) -> None:
    """Set the number of threads of the whole process. ValueError unless there is at least one."""
    if count < 1:
        raise ValueError(f"the kernels need at least one thread; asked for are {count}")
    torch.set_num_threads(count)
