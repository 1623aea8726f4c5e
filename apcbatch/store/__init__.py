"""The store: snapshots on disk, shared by runs and processes. It works on keys and NumPy arrays, without torch."""

from apcbatch.store.check import CheckReport
from apcbatch.store.environment import Buffer
from apcbatch.store.eviction import PruneReport
from apcbatch.store.format import BadSnapshot
from apcbatch.store.index import ModelStats
from apcbatch.store.reader import Chain
from apcbatch.store.reading_costs import find_cost
from apcbatch.store.snapshot_file import StoredSnapshot
from apcbatch.store.status import StoreCounters
from apcbatch.store.store import Store, StoreStats

__all__ = [
    "BadSnapshot",
    "Buffer",
    "Chain",
    "CheckReport",
    "ModelStats",
    "PruneReport",
    "Store",
    "StoreCounters",
    "StoreStats",
    "StoredSnapshot",
    "find_cost",
]
