"""The store: snapshots on disk, shared by runs and processes. Deals in keys and NumPy arrays, never in
torch."""

from apcbatch.store.counters import StoreCounters
from apcbatch.store.files import Buffer
from apcbatch.store.header import BadSnapshot
from apcbatch.store.index import ModelStats
from apcbatch.store.maintenance import CheckReport, PruneReport
from apcbatch.store.snapshot_file import StoredSnapshot
from apcbatch.store.snapshot_reader import Chain
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
]
