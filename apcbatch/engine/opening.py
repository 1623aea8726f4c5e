"""The engine of a configuration: its weights are loaded here.

Must not know: jobs, files other than the model's and the store's, where the cache salt comes from.
"""

from __future__ import annotations

from collections.abc import Callable

from apcbatch.config import Config
from apcbatch.cores import find_cores
from apcbatch.engine.engine import Engine
from apcbatch.errors import UsageError
from apcbatch.kernels.isa import set_isa
from apcbatch.kernels.threads import set_threads, threads


def open_engine(config: Config, cache_salt: str | None, warn: Callable[[str], None]) -> Engine:
    """An engine with the options of a run. cache_salt: the secret itself."""
    use_processor(config)
    return Engine(
        config.model,
        dtype=config.dtype,
        device=config.device,
        gpus=config.gpus,
        exact=config.exact,
        block_size=config.block_size,
        policy=config.policy,
        store=config.store,
        store_size_bytes=config.store_size,
        cache_salt=cache_salt,
        pool_size_bytes=config.pool_size,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_request_tokens=config.max_request_tokens,
        warn=warn,
    )


def use_processor(config: Config) -> None:
    """Choose the instruction set and the threads of the CPU kernels, as the configuration says; by default a thread for
    each core that this process may use, and no more than torch was told to use. UsageError."""
    set_threads(config.threads or min(threads(), find_cores().threads))
    if config.isa is None:
        return
    try:
        set_isa(config.isa)
    except ValueError as error:
        raise UsageError(f"{config.origins.get('isa', 'isa')}: {error}") from None
