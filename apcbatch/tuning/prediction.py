"""The seconds that each block size would take on this machine, from a forecast and a measurement.

Must not know: how anything was measured, printed or chosen.
"""

from __future__ import annotations

from apcbatch.config import Config
from apcbatch.job.planning import order_of
from apcbatch.plan.forecast import Forecast
from apcbatch.plan.tree_shape import TreeShape
from apcbatch.tuning.candidate import Candidate
from apcbatch.tuning.measurement import Measurement
from apcbatch.tuning.survey import Survey
from apcbatch.tuning.workload import walk


def predict(config: Config, surveyed: Survey, made: Forecast, measured: Measurement) -> list[Candidate]:
    """One candidate for each block size of a forecast, in its order."""
    shape = TreeShape(surveyed.tree)
    order = shape.order(order_of(config))
    candidates = []
    for block_size, grid in made.grids.items():
        table = grid[config.policy]
        work = walk(
            order,
            shape.length,
            table.resume_at,
            shape.conversation,
            config.max_batch_tokens,
            config.max_running,
        )
        kept = table.snapshots_written + table.snapshots_for_later
        restores = sum(position > 0 for position in table.resume_at)
        on_disk = config.store is not None and table.peak_live_bytes > config.pool_size
        restore_s = measured.restore_disk_s if on_disk else measured.restore_ram_s
        written = min(table.store_bytes, config.store_size) if config.store is not None else 0
        candidates.append(
            Candidate(
                block_size,
                table,
                measured.prefill_s(work, kept),
                restores * restore_s,
                written * measured.write_byte_s,
            )
        )
    return candidates
