"""Store: snapshots of any number of models on disk, shared by runs and by concurrent processes.

Three layers write a snapshot: Store checks and queues it, Writer stores batches, SnapshotFolder writes one file. Keys
are those of prefix.py. A model is identified by its fingerprint, and has a layout.

Invariants:
- A snapshot is visible only when it is complete.
- Every byte that is returned was verified.
- A bad file, a full disk, a read-only folder or a damaged index costs speed, but never an answer: none of them raises
  an error when a run reads or writes snapshots.
"""

from __future__ import annotations

import os
import shlex
import statistics
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from apcbatch.errors import UsageError
from apcbatch.layout import Layout
from apcbatch.store.check import Checker, CheckReport
from apcbatch.store.database import IndexDamaged, IndexFault
from apcbatch.store.environment import Files
from apcbatch.store.eviction import PruneReport, prune
from apcbatch.store.folder import Opened, open_folder, sweep_now
from apcbatch.store.format import FORMAT_VERSION, KEY_BYTES, Array, BadSnapshot, make_header, read_header, tensors_of
from apcbatch.store.index import Index, ModelStats
from apcbatch.store.reader import Chain, SnapshotReader
from apcbatch.store.reading_costs import COSTS_NAME, ReadingCost, find_cost, with_cost
from apcbatch.store.snapshot_file import SnapshotFolder, StoredSnapshot, check_layout, read_tensors
from apcbatch.store.status import Status, StoreCounters
from apcbatch.store.writer import Fetch, Offer, OnDone, Suspect, Touch, Writer

DEFAULT_SIZE_LIMIT_BYTES = 20 << 30
DEFAULT_QUEUE_BYTES = 256 << 20
DEFAULT_QUEUE_SNAPSHOTS = 4096
READS = 5  # of one file, to measure


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Contents of a store. num_bytes: size of its snapshot files. num_stranded: snapshots whose parent is missing."""

    path: str
    format_version: int
    entries: int
    num_bytes: int
    size_limit_bytes: int
    num_stranded: int
    models: list[ModelStats]


class Store:
    """An open store folder, made by `Store.open`. Any thread may call its methods. `put` waits only with `again`."""

    def __init__(self, path: str, size_limit_bytes: int, files: Files, status: Status, opened: Opened) -> None:
        self._path, self._size_limit_bytes, self._files, self._status = path, size_limit_bytes, files, status
        self._index, self._session = opened.index, opened.session
        self._folder = SnapshotFolder(files, path)
        self._reader = SnapshotReader(opened.reader, self._folder, status)
        self._writer: Writer | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        size_limit_bytes: int = DEFAULT_SIZE_LIMIT_BYTES,
        *,
        warn: Callable[[str], None],
        read_only: bool = False,
        maintenance: bool = False,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
        queue_snapshots: int = DEFAULT_QUEUE_SNAPSHOTS,
        write_threads: int = 1,
        files: Files | None = None,
    ) -> Store:
        """Open the store in a folder, which is created if missing. Opening evicts nothing; storing and `shrink` do.

        size_limit_bytes: limit of all snapshot files, including those being written. warn: receives one line per
        warning, from the caller's thread or the store's. read_only: change nothing; always so if the folder cannot be
        written. maintenance: for check and prune; the store must exist, and every value of its index is checked.
        queue_bytes, queue_snapshots: limits of the queue. write_threads: number of files written at a time.

        Raises UsageError for a path that cannot be a store, for a folder with other contents, which are not touched,
        and for a store of a newer version.
        """
        folder = os.fspath(path)
        files = files or Files()
        status = Status(warn, folder, None if read_only else files)
        opened = open_folder(files, folder, read_only, maintenance, status)
        store = cls(folder, size_limit_bytes, files, status, opened)
        if opened.index is not None and opened.session is not None:
            writer = Writer(
                opened.index,
                store._folder,
                opened.session,
                status,
                store._reader.reveal,
                limit_bytes=size_limit_bytes,
                queue_bytes=queue_bytes,
                queue_offers=queue_snapshots,
                threads=write_threads,
            )
            store._reader.on_suspect = lambda key, fingerprint: writer.append(Suspect(key, fingerprint))
            store._writer = writer
        return store

    @property
    def is_read_only(self) -> bool:
        return self._writer is None

    def register(self, fingerprint: bytes, name: str, layout: Layout | None = None) -> None:
        """Set a model's name in the index. layout: layout of the model's snapshots. If it is given, `get` treats a
        snapshot with another layout as bad, and `put` raises ValueError for one."""
        if self._writer is not None:
            self._writer.names[fingerprint] = name
        if layout is not None:
            self._folder.layouts[fingerprint] = dict(layout)

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        """Return the keys whose snapshots are in the index, without reading a file.

        Such a snapshot may still prove missing or bad when it is read. A snapshot that was put is present after its
        on_done at the latest.
        """
        return self._reader.present(keys)

    def get(self, key: bytes, fingerprint: bytes, into: Mapping[str, Array] | None = None) -> StoredSnapshot | None:
        """Read and verify the snapshot with this key and fingerprint. Return None if it is missing, and with a warning
        if it is bad.

        into: contiguous arrays by name, of the shapes and dtypes of the model's snapshots, to read the tensors into. If
        None is returned, their contents are undefined.
        """
        return self._reader.get(key, fingerprint, into)

    def get_chain(self, key: bytes, fingerprint: bytes, held: Container[bytes] = ()) -> Chain:
        """Read a snapshot and the KV of its ancestors.

        held: keys that the caller has. The chain begins after the nearest ancestor among them (`links[0].parent`).
        """
        return self._reader.get_chain(key, fingerprint, held)

    def put(
        self,
        key: bytes,
        position: int,
        parent: tuple[bytes, int] | None,
        fingerprint: bytes,
        arrays: Mapping[str, Array] | Fetch,
        on_done: OnDone | None = None,
        again: bool = False,
    ) -> bool:
        """Queue a snapshot to be stored in the background. Return whether it was queued, without `again` at once.

        position: number of tokens consumed. parent: (key, position) of the nearest ancestor that was put before; the
        parent is evicted after this snapshot. A snapshot with `kv` and a parent is stored only if its parent is stored.

        arrays: name -> float32, float16 or uint16 (the bits of bfloat16) of any shape; `kv` holds the tokens since the
        parent. The store's threads read them: keep them alive and unchanged until on_done(key, is_stored) is called,
        which happens once. For a registered layout, arrays may be a function that returns a context manager with the
        arrays as its value. A thread of the store calls it when the file is written; OSError from it means that the
        arrays are not available.

        again: wait until the queue has room. A snapshot that the full queue refused before is no longer counted as
        skipped.

        Returns False if the queue is full, the snapshot is queued already, or the store is read-only or closed. Then
        the arrays are not read, and on_done is not called. Raises ValueError for what the format or the registered
        layout cannot hold, which is a fault of the caller.
        """
        layout = self._folder.layouts.get(fingerprint)
        fetch: Fetch = (lambda: nullcontext(arrays)) if isinstance(arrays, Mapping) else arrays
        if isinstance(arrays, Mapping):
            header = make_header(key, fingerprint, position, parent, arrays)
        elif layout is not None:
            tensors = tensors_of(layout, position - (parent[1] if parent else 0))
            header = make_header(key, fingerprint, position, parent, tensors)
        else:
            raise ValueError("arrays that are fetched later need a registered layout")
        if layout is not None:
            try:
                check_layout(header, layout)
            except BadSnapshot as error:
                raise ValueError(str(error)) from error
        offer = Offer(header, fetch, header.num_data_bytes, on_done)
        return self._writer is not None and self._writer.offer(offer, again)

    def touch(self, key: bytes) -> None:
        """Count a use of a snapshot, which raises its value. The count is written in the background."""
        if self._writer is not None:
            self._writer.append(Touch(key))

    def flush(self) -> None:
        """Wait until everything put before is visible to every process, or has failed. Do not call it in on_done."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, drain: bool = True) -> None:
        """Close the store. drain: first store the queue; False drops it and calls each on_done with False."""
        if self._writer is not None:
            self._writer.close(drain)
            self._writer = None
        self._reader.close()
        try:
            if self._index is not None:
                self._index.close()
            if self._session is not None:
                self._session.end()
        except (OSError, IndexFault) as error:
            self._status.failure(error, "closing the store")
        self._index = self._session = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(drain=kind is None)

    def reading_tokens(self, model: str, dtype: str, device: str, measure: Callable[[], int | None]) -> int | None:
        """Return the stored cost of reading a snapshot, in tokens. If there is none, measure and store it. None if the
        store is read-only then, or `measure` returns None.

        model, dtype, device: see ReadingCost.
        """
        found = find_cost(self._path, model, dtype, device)
        if found is not None:
            return found.tokens
        if self._session is None or (tokens := measure()) is None:
            return None
        path = self._session.temporary_path()
        try:
            self._files.write(path, [with_cost(self._path, ReadingCost(model, dtype, device, tokens))])
            self._files.rename(path, os.path.join(self._path, COSTS_NAME))
        except OSError as error:
            self._status.failure(error, "keeping what reading a snapshot costs")
        return tokens

    def time_reading(self, fingerprint: bytes, position: int, arrays: Mapping[str, Array]) -> float | None:
        """Write a snapshot of these arrays to a temporary file, read and verify it READS times, into the arrays, and
        return the median seconds of a read. None if it cannot be written or read."""
        if self._session is None:
            return None
        path, seconds = self._session.temporary_path(), []
        try:
            self._folder.write(path, make_header(bytes(KEY_BYTES), fingerprint, position, None, arrays), arrays)
            for _ in range(READS):
                begin = time.perf_counter()
                with self._files.open(path) as reader:
                    read_tensors(reader, read_header(reader), into=arrays)
                seconds.append(time.perf_counter() - begin)
        except BadSnapshot:
            return None  # the run's own reads will warn
        except OSError as error:
            self._status.failure(error, "measuring what reading a snapshot costs")
            return None
        finally:
            self._folder.discard(path)
        return statistics.median(seconds)

    @property
    def counters(self) -> StoreCounters:
        """Copy of the counters of this open store."""
        return self._status.counters

    def stats(self) -> StoreStats:
        """Return the contents of the store, by model. Raises UsageError if its index cannot be read."""
        index = self._required_index()
        with self._raising("read"):
            entries, num_bytes = index.totals()
            return StoreStats(
                self._path,
                FORMAT_VERSION,
                entries,
                num_bytes,
                self._size_limit_bytes,
                index.num_stranded(),
                index.models(time.time()),
            )

    @property
    def held(self) -> tuple[int, int]:
        """Number of snapshots and bytes of their files; (0, 0) if the index cannot be read."""
        try:
            return self._reader.index.totals() if self._reader.index is not None else (0, 0)
        except IndexFault:
            return 0, 0

    def shrink(self) -> None:
        """Evict down to the size limit, without storing anything."""
        self.flush()
        try:
            if self._index is not None:
                prune(self._index, self._folder, self._size_limit_bytes)
        except (OSError, IndexFault) as error:
            self._status.failure(error, "keeping to the size limit")

    def check(self) -> CheckReport:
        """Verify every snapshot and, unless the store is read-only, make the index and the files agree.

        Bad files, rows without a file and temporary files of ended processes are removed. Intact files without a row
        are entered. Other processes may use the store meanwhile.
        """
        index = self._required_index()
        self.flush()
        with self._raising("checked"):
            report = Checker(index, self._index, self._folder).run()
            if self._index is not None:
                removed = sweep_now(self._files, self._path)
                report.faults += [f"{path}: left by a process that has ended" for path in removed]
                report.num_files_removed += len(removed)
            return report

    def prune(
        self, size_bytes: int | None = None, older_than_s: float | None = None, model: str | None = None
    ) -> PruneReport:
        """Evict the least valuable snapshots until at most size_bytes are left, and drop those unused for older_than_s
        seconds. See eviction.prune."""
        self.flush()
        if self._index is None:
            raise UsageError(f"the store {self._path} is read-only; nothing can be dropped from it")
        with self._raising("pruned"):
            return prune(self._index, self._folder, size_bytes, older_than_s, model)

    @contextmanager
    def _raising(self, done: str) -> Iterator[None]:
        """Turn a fault of the disk or the index into UsageError. The next opening rebuilds a damaged index."""
        try:
            yield
        except (OSError, IndexFault) as error:
            sentence = f"the store {self._path} cannot be {done}: {error}"
            if isinstance(error, IndexDamaged):
                self._status.suspect_index()
                command = f"apcbatch store check {shlex.quote(str(self._path))}"
                sentence += f"; its index is damaged, to mend it run: {command}"
            raise UsageError(sentence) from error

    def _required_index(self) -> Index:
        """Return the index to read from. Raises UsageError if it cannot be read."""
        if self._reader.index is None:
            raise UsageError(
                f"the store {self._path} has no index that can be read; "
                f"run: apcbatch store check {shlex.quote(str(self._path))}"
            )
        return self._reader.index
