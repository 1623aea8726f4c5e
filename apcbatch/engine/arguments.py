"""What an engine's arguments may be.

Must not know: models, memory. The bounds are those of the command line's options, far above what any machine runs: a
number beyond them is a slip, and is refused before anything is allocated for it.
"""

from __future__ import annotations

import torch

from apcbatch.config import MOST_BYTES, MOST_GPUS, MOST_RUNNING, MOST_TOKENS
from apcbatch.errors import UsageError
from apcbatch.types import POLICIES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_arguments(
    *,
    dtype: str,
    policy: str,
    block_size: int,
    max_batch_tokens: int,
    max_running: int,
    max_request_tokens: int,
    pool_size_bytes: int,
    store_size_bytes: int,
    gpus: int,
) -> None:
    """Raises UsageError for the first one that cannot be used."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    if policy not in POLICIES:
        raise UsageError(f"policy is {policy!r}; expected one of {', '.join(POLICIES)}")
    for name, value, lowest, highest in (
        ("block_size", block_size, 1, MOST_TOKENS),
        ("max_batch_tokens", max_batch_tokens, 1, MOST_TOKENS),
        ("max_running", max_running, 1, MOST_RUNNING),
        ("max_request_tokens", max_request_tokens, 2, MOST_TOKENS),
        ("pool_size_bytes", pool_size_bytes, 0, MOST_BYTES),
        ("store_size_bytes", store_size_bytes, 0, MOST_BYTES),
        ("gpus", gpus, 1, MOST_GPUS),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise UsageError(f"{name} is {value!r}; expected an integer from {lowest} to {highest}")
