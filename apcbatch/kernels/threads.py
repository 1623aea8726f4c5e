"""Get and set the number of threads of the CPU kernels and of torch's own ops. It changes no bit of any result."""

from __future__ import annotations

import torch


def threads() -> int:
    """Return the number of threads in use."""
    return torch.get_num_threads()


def set_threads(count: int) -> None:
    """Set the number of threads of the whole process. Raises ValueError if it is less than 1."""
    if count < 1:
        raise ValueError(f"the kernels need at least one thread; asked for are {count}")
    torch.set_num_threads(count)
