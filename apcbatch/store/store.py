"""Store: the snapshots of many models on disk, for every run and for several processes at once.

Must not know: tokens, tensors of torch, what a model is beyond a fingerprint and a layout. Keys are those of
prefix.py.
Invariants: nothing is visible before it is whole; what is handed out was verified byte by byte; a bad file, a
full disk, a read-only folder or a damaged index costs speed and never an answer: after `open` nothing is
raised for any.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Collection, Container, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType

from apcbatch.errors import UsageError
from apcbatch.layout import Layout
from apcbatch.store.counters import StoreCounters, Tally
from apcbatch.store.database import IndexDamaged, IndexFault
from apcbatch.store.files import Files
from apcbatch.store.format import FORMAT_VERSION
from apcbatch.store.header import Array, BadSnapshot, make_header, tensors_of
from apcbatch.store.index import Index, ModelStats
from apcbatch.store.maintenance import Checker, CheckReport, PruneReport, prune
from apcbatch.store.notices import Notices
from apcbatch.store.objects import Objects
from apcbatch.store.opening import Opened, open_folder, sweep_now
from apcbatch.store.publisher import Fetch, Offer, OnDone, Publisher
from apcbatch.store.session import Session
from apcbatch.store.snapshot_file import StoredSnapshot, check_layout
from apcbatch.store.snapshot_reader import Chain, SnapshotReader
from apcbatch.store.writer import Writer

DEFAULT_SIZE_LIMIT_BYTES = 20 << 30
DEFAULT_QUEUE_BYTES = 256 << 20
DEFAULT_QUEUE_SNAPSHOTS = 4096


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds now; num_bytes are those of its snapshot files."""

    path: str
    format_version: int
    entries: int
    num_bytes: int
    size_limit_bytes: int
    is_read_only: bool
    num_stranded: int
    models: list[ModelStats]


class Store:
    """An open store folder, made by `Store.open`. Any thread may call its methods; `put` never waits."""

    def __init__(self, path: str, size_limit_bytes: int, files: Files, notices: Notices, opened: Opened) -> None:
        self._path = path
        self._size_limit_bytes = size_limit_bytes
        self._files = files
        self._notices = notices
        self._index = opened.index
        self._session = opened.session
        self._writer: Writer | None = None
        self._objects = Objects(files, path)
        self._tally = Tally()
        self._layouts: dict[bytes, Layout] = {}
        self._names: dict[bytes, str] = {}
        self._reading = SnapshotReader(opened.reader, self._objects, self._layouts, self._tally, notices)

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
        """Open the store at a folder, made where missing. Opening evicts nothing; storing and `shrink` do.

        size_limit_bytes: the snapshot files together, those being written included, never have more. warn:
        takes one line; called from the caller's thread and from the store's. read_only: change nothing; a
        folder that cannot be written is opened so by itself. maintenance: for check and prune; there must be
        a store already, and every value of its index is looked at. queue_bytes, queue_snapshots: what may
        wait to be written. write_threads: how many files are written at a time.
        Raises UsageError for a path that cannot be a store, for a folder with something else in it, of which
        nothing is touched, and for a store of a newer version.
        """
        folder = os.fspath(path)
        files = files or Files()
        notices = Notices(warn, folder, None if read_only else files)
        opened = open_folder(files, folder, read_only, maintenance, notices)
        store = cls(folder, size_limit_bytes, files, notices, opened)
        if opened.index is not None and opened.session is not None:
            store._start_writer(opened.index, opened.session, queue_bytes, queue_snapshots, write_threads)
        return store

    def _start_writer(
        self, index: Index, session: Session, queue_bytes: int, queue_snapshots: int, write_threads: int
    ) -> None:
        publisher = Publisher(
            index,
            self._objects,
            session,
            self._size_limit_bytes,
            self._names,
            self._layouts,
            self._tally,
            self._notices,
            self._reading.reveal,
            write_threads,
        )
        self._writer = Writer(publisher, queue_bytes, queue_snapshots, self._size_limit_bytes, write_threads)
        self._reading.on_doubt = self._writer.suspect

    @property
    def is_read_only(self) -> bool:
        return self._writer is None

    def register(self, fingerprint: bytes, name: str, layout: Layout | None = None) -> None:
        """Name a model in the index; with a layout, snapshots of it that hold anything else are bad."""
        self._names[fingerprint] = name
        if layout is not None:
            self._layouts[fingerprint] = dict(layout)

    def present(self, keys: Collection[bytes]) -> set[bytes]:
        """Those of the keys whose snapshot is there: a look into the index, no file is touched.

        One may be gone, or prove bad, when it is read. What was put is there after its on_done at the latest.
        """
        return self._reading.present(keys)

    def get(self, key: bytes, fingerprint: bytes, into: Mapping[str, Array] | None = None) -> StoredSnapshot | None:
        """The verified snapshot with this key and fingerprint; None where it is missing or bad (with a
        warning).

        into: contiguous arrays by name, of the shapes and dtypes that the model's snapshots have, which the
        tensors are read into in place of new memory; where there is no snapshot their content is lost.
        """
        return self._reading.get(key, fingerprint, into)

    def get_chain(self, key: bytes, fingerprint: bytes, held: Container[bytes] = ()) -> Chain:
        """The snapshot with the KV of its ancestors, of which nothing but the KV is read.

        held: keys that the caller has; the chain begins after the nearest ancestor among them
        (`links[0].parent`).
        """
        return self._reading.get_chain(key, fingerprint, held)

    def put(
        self,
        key: bytes,
        position: int,
        parent: tuple[bytes, int] | None,
        fingerprint: bytes,
        arrays: Mapping[str, Array] | Fetch,
        on_done: OnDone | None = None,
    ) -> bool:
        """Have a snapshot stored by and by; returns at once whether it was taken.

        position: tokens consumed. parent: (key, position) of the nearest ancestor that was put before, so
        that it is evicted after this one; a snapshot with `kv` and a parent is stored only if its parent is
        there. arrays: name -> float32, float16 or uint16 (the bits of bfloat16) of any shape; `kv` holds the
        tokens since the parent. The store's threads read them: keep them alive and unchanged until
        on_done(key, is stored) is called, once. Or a function that gives them when they are written, of a
        model whose layout is registered: a thread of the store's calls it and is done with them at the end
        of the context; OSError says that they cannot be had. Where False is returned they are not read and
        on_done is not called: the queue is full, the snapshot is on its way already, or the store is
        read-only or closed.
        Raises ValueError for what the format or the registered layout cannot hold: a fault of the caller.
        """
        layout = self._layouts.get(fingerprint)
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
        if self._writer is None:
            return False
        answer = self._writer.offer(Offer(header, fetch, header.num_data_bytes, on_done))
        if answer == "full":
            self._tally.add(skipped_full_queue=1)
        elif answer == "duplicate":
            self._tally.add(duplicates=1)
        return answer == "queued"

    def touch(self, key: bytes) -> None:
        """Note that this snapshot was consumed, which makes it worth keeping; written by and by."""
        if self._writer is not None:
            self._writer.touch(key)

    def flush(self) -> None:
        """Return when everything put before is visible to every process, or has failed. Not from within
        on_done."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, drain: bool = True) -> None:
        """Close the store; first store what is queued (drain), or give it up (on_done is called with
        False)."""
        if self._writer is not None:
            self._writer.close(drain)
            self._writer = None
        self._reading.close()
        try:
            if self._index is not None:
                self._index.close()
            if self._session is not None:
                self._session.end()
        except (OSError, IndexFault) as error:
            self._notices.failure(error, "closing the store")
        self._index = self._session = None

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    @property
    def counters(self) -> StoreCounters:
        """What this process has done with the store so far."""
        return self._tally.copy()

    def stats(self) -> StoreStats:
        """What the store holds, by model; raises UsageError where its index cannot be read."""
        reader = self._required_reader()
        try:
            entries, num_bytes = reader.totals()
            return StoreStats(
                self._path,
                FORMAT_VERSION,
                entries,
                num_bytes,
                self._size_limit_bytes,
                self.is_read_only,
                reader.num_stranded(),
                reader.models(time.time()),
            )
        except IndexFault as error:
            raise self._refusal(error, "read") from error

    @property
    def held(self) -> tuple[int, int]:
        """(snapshots, bytes of their files); none where the index cannot be read."""
        try:
            return self._reading.index.totals() if self._reading.index is not None else (0, 0)
        except IndexFault:
            return 0, 0

    def shrink(self) -> None:
        """Evict what is beyond the size limit, which storing alone does not where nothing is stored."""
        self.flush()
        try:
            if self._index is not None:
                prune(self._index, self._objects, self._size_limit_bytes)
        except (OSError, IndexFault) as error:
            self._notices.failure(error, "keeping to the size limit")

    def check(self) -> CheckReport:
        """Verify every snapshot, and bring the index and the files together again unless the store is
        read-only: bad files go, whole ones without a row get one, rows without a file go, and so do the
        temporary files of processes that have ended. Other processes may use the store meanwhile."""
        reader = self._required_reader()
        self.flush()
        try:
            report = Checker(reader, self._index, self._objects).run()
            if self._index is not None:
                removed = sweep_now(self._files, self._path)
                report.faults += [f"{path}: left by a process that has ended" for path in removed]
                report.num_files_removed += len(removed)
            return report
        except (OSError, IndexFault) as error:
            raise self._refusal(error, "checked") from error

    def prune(
        self, size_bytes: int | None = None, older_than_s: float | None = None, model: str | None = None
    ) -> PruneReport:
        """Drop the least valuable snapshots until size_bytes are left, and those unused for older_than_s
        seconds, of one model (its name, or the start of its fingerprint) or of all; an ancestor stays while a
        descendant does."""
        self.flush()
        if self._index is None:
            raise UsageError(f"the store {self._path} is read-only; nothing can be dropped from it")
        try:
            return prune(self._index, self._objects, size_bytes, older_than_s, model)
        except (OSError, IndexFault) as error:
            raise self._refusal(error, "pruned") from error

    def _refusal(self, error: OSError | IndexFault, done: str) -> UsageError:
        """Why something cannot be done with the store; a damaged index is made anew at the next opening."""
        sentence = f"the store {self._path} cannot be {done}: {error}"
        if isinstance(error, IndexDamaged):
            self._notices.suspect_index()
            sentence += f"; its index is damaged, to mend it run: apcbatch store check {shlex.quote(str(self._path))}"
        return UsageError(sentence)

    def _required_reader(self) -> Index:
        if self._reading.index is None:
            raise UsageError(
                f"the store {self._path} has no index that can be read; "
                f"run: apcbatch store check {shlex.quote(str(self._path))}"
            )
        return self._reading.index
