"""Restore sequences from kept snapshots, and publish new ones: the pool first, then the store.

The positions are decided in policy.py. Invariants: a position is used only if its whole state is there. At least one
prompt token is always computed. A snapshot that the store cannot give is a miss, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable

from apcbatch.engine.coverage import CoverageTree, Match, Reuse, explain_miss
from apcbatch.engine.page_tables import PageTables
from apcbatch.engine.persistence import Persistence
from apcbatch.engine.policy import keeps_snapshots, retention_of
from apcbatch.engine.pool import PagePool, Snapshot, SnapshotPool
from apcbatch.engine.sequence import Chunk, Sequence
from apcbatch.prefix import PrefixHasher, TokenArray, boundaries_in, last_boundary, prefix_key
from apcbatch.types import CachedFrom, Policy


class Snapshots:
    """Snapshots of one model, in memory and, with `persistence`, on disk."""

    def __init__(
        self,
        *,
        policy: Policy,
        block_size: int,
        fingerprint: bytes,
        pool: SnapshotPool,
        pages: PagePool,
        page_tables: PageTables,
        persistence: Persistence | None,
    ) -> None:
        self.coverage = CoverageTree()
        self.num_written = 0
        self.num_read = 0
        self.num_for_later = 0
        self._policy, self._block_size = policy, block_size
        self._fingerprint = fingerprint
        self._pool, self._pages, self._page_tables = pool, pages, page_tables
        self._persistence = persistence

    def prepare(self, sequence: Sequence) -> None:
        """Set a sequence's retention, and compute the prefix keys of the positions that it needs, once."""
        sequence.retention = retention_of(self._policy, sequence.request, sequence.num_prompt, self._block_size)
        hasher = PrefixHasher(self._fingerprint, sequence.tokens[: sequence.num_prompt])
        sequence.keys = dict(hasher.keys_at(sequence.retention.key_positions()))
        sequence.source = sequence.keys.get(sequence.retention.plan.resume_at, b"")

    def prefetch(self, waiting: Iterable[Sequence]) -> None:
        """Prefetch the stored snapshots that waiting sequences will resume from, in their order."""
        if self._persistence is None or not self._persistence.prefetches:
            return
        keys = []
        for sequence in waiting:
            if sequence.stored.prefetch_key is None:
                sequence.stored.prefetch_key = self._prefetch_key(sequence, self._persistence)
            if sequence.stored.prefetch_key and sequence.stored.prefetch_key not in self._pool:
                keys.append(sequence.stored.prefetch_key)
        self._persistence.prefetch(keys)

    def _prefetch_key(self, sequence: Sequence, persistence: Persistence) -> bytes:
        """Return the key of the longest stored snapshot that a sequence may resume from, or empty: none, or its plan
        waits for a longer one. A prediction: `attach` decides."""
        stored = persistence.positions({p: sequence.keys[p] for p in self._usable(sequence)})
        position = max(stored, default=0)
        return sequence.keys[position] if position and position >= sequence.retention.plan.resume_at else b""

    def available_position(self, sequence: Sequence) -> int:
        """Return the longest usable position in the pool or, as of the first lookup, in the store; 0 for none."""
        held = next((p for p in self._usable(sequence) if self._held(sequence, p) is not None), 0)
        return max(held, next(iter(self._stored_positions(sequence)), 0))

    def holds(self, key: bytes) -> bool:
        """Return whether a snapshot is in the pool."""
        return key in self._pool

    def attach(self, sequence: Sequence) -> None:
        """Attach the longest usable snapshot to a sequence, and record its ideal and miss reason. The ideal counts all
        prompts admitted before, computed or not."""
        prompt = sequence.tokens[: sequence.num_prompt]
        match = self.coverage.match(prompt)
        sequence.drafts.num_covered = match.length
        self.coverage.insert(prompt)
        sequence.reuse = self._reuse(sequence, match, *self.restore(sequence))

    def restore(self, sequence: Sequence) -> tuple[CachedFrom, bool]:
        """Start a sequence from its longest usable snapshot, without one from token 0. Return where that snapshot was,
        and whether a longer one was stranded."""
        snapshot, source, stranded = self._find(sequence)
        if snapshot is not None:
            self.num_read += not snapshot.was_read
            self._pool.consume(snapshot)
            if self._persistence:
                self._persistence.touch(snapshot)
            snapshot.pins += 1
            sequence.start = snapshot
            self._page_tables.adopt(sequence, snapshot)
            here = (snapshot.key, snapshot.position)
            sequence.stored.parent = here if snapshot.stored else snapshot.store_parent
            sequence.computed = snapshot.position
        return source, stranded

    def detach(self, sequence: Sequence) -> None:
        """Unpin the snapshot that a sequence resumed from. (The state that forks share is not in the pool.)"""
        snapshot, sequence.start = sequence.start, None
        if snapshot is not None:
            snapshot.pins -= 1
            source, sequence.source = sequence.source, b""  # the plan's snapshot, even if it resumed elsewhere
            self._pool.count_read(source)

    def add_reads(self, key: bytes, reads: int) -> None:
        """Add pending readers to a snapshot in the pool; -1: drop one."""
        if reads < 0:
            self._pool.count_read(key)
            return
        snapshot = self._pool.peek(key)
        assert snapshot is not None, "it is held"
        snapshot.reads_left += reads

    def reserve(self, sequence: Sequence, position: int) -> tuple[int, bytes] | None:
        """Reserve (slot, key) for the snapshot at `position`. Return None if it is held already or does not fit."""
        key = sequence.keys.get(position) or prefix_key(self._fingerprint, sequence.tokens[:position], position)
        held, reads = self._pool.peek(key), sequence.retention.reads(position)
        if held is not None:
            held.reads_left += reads
            return None
        slot = self._pool.reserve(key, awaited=reads > 0)
        return None if slot is None else (slot, key)

    def publish(self, chunk: Chunk) -> None:
        """Publish the snapshots that a pass has written: in memory at once, on disk in the background."""
        sequence, retention = chunk.sequence, chunk.sequence.retention
        for keep in chunk.keep:
            covering = self._page_tables.covering(sequence, keep.position)
            reads = retention.reads(keep.position)
            snapshot = self._pool.insert(keep.key, keep.position, keep.slot, covering, reads, reads > 0)
            if snapshot is None:
                continue
            is_new = snapshot.slot == keep.slot
            if retention.is_for_this_run(keep.position):
                self.num_written += is_new
            else:
                self.num_for_later += is_new
            snapshot.for_later |= retention.is_for_later(keep.position)
            if retention.supersedes(keep.position):
                self._roll(sequence, snapshot)
            elif retention.is_stored(keep.position):
                self._persist(sequence, snapshot)

    def count_unique(self, sequence: Sequence) -> None:
        """Add the tokens of an answered request to the unique tokens."""
        self.coverage.count(sequence.tokens[: sequence.computed if sequence.keeps_answer else sequence.num_prompt])

    def cancel(self, chunk: Chunk) -> None:
        """Free the slots reserved for a failed pass."""
        for keep in chunk.keep:
            self._pool.cancel(keep.key, keep.slot)

    def complete(self, sequence: Sequence) -> None:
        """Mark the tokens of an ended answer as covered, if it is kept, and store its latest boundary. (Those of the
        prompt are marked at admission.)"""
        if sequence.keeps_answer:
            self.coverage.insert(sequence.tokens[: sequence.computed])
        if sequence.stored.rolling is not None:
            self._persist(sequence, sequence.stored.rolling)

    def offer_again(self) -> None:
        """Offer the refused snapshots in memory to the store again, and wait for room in its queue."""
        if self._persistence is not None:
            for snapshot in self._pool.refused():
                self._persistence.save(snapshot, snapshot.store_parent, again=True)

    # The Python surface

    def positions(self, tokens: TokenArray) -> list[int]:
        """Return the positions up to len(tokens) whose snapshot is in memory or in the store, ascending."""
        hasher = PrefixHasher(self._fingerprint, tokens)
        found = {*boundaries_in(0, len(tokens), self._block_size), *(one.position for one in self._pool)}
        keys = dict(hasher.keys_at(sorted(position for position in found if position <= len(tokens))))
        stored = set(self._persistence.positions(keys)) if self._persistence else set()
        return [p for p, key in keys.items() if key in self._pool or p in stored]

    def fetch(self, tokens: TokenArray) -> Snapshot | None:
        """Return the snapshot of exactly these tokens, loaded from the store if necessary; None without one."""
        key = prefix_key(self._fingerprint, tokens, len(tokens))
        held = self._pool.peek(key)
        if held is not None or self._persistence is None:
            return held
        loaded = self._persistence.load(key, self._pool, self._pages, awaited=False)
        return loaded if isinstance(loaded, Snapshot) else None

    def _usable(self, sequence: Sequence) -> list[int]:
        """Return the boundaries before the last prompt token and the first scored one, longest first."""
        return [p for p in reversed(sequence.keys) if p <= sequence.request.resumable]

    def _held(self, sequence: Sequence, position: int) -> Snapshot | None:
        """Return the pool's snapshot at a position, unless it is held for other sequences."""
        snapshot = self._pool.peek(sequence.keys[position])
        if snapshot is None or snapshot.reads_left and not sequence.retention.counts_on(position):
            return None
        return snapshot

    def _stored_positions(self, sequence: Sequence) -> list[int]:
        """Usable positions that the store held when the sequence was first looked at, longest first."""
        if self._persistence is None:
            return []
        if sequence.stored.positions is None:
            found = self._persistence.positions({p: sequence.keys[p] for p in self._usable(sequence)})
            sequence.stored.positions = sorted(found, reverse=True)
        return sequence.stored.positions

    def _find(self, sequence: Sequence) -> tuple[Snapshot | None, CachedFrom, bool]:
        """Return the longest usable snapshot, its source, and whether a longer one was stranded."""
        usable = (self._held(sequence, p) for p in self._usable(sequence))
        held = next((snapshot for snapshot in usable if snapshot is not None), None)
        longer = [p for p in self._stored_positions(sequence) if held is None or p > held.position]
        if not longer:
            return held, "none" if held is None else "memory", False
        if held is not None:
            held.pins += 1
        loaded, stranded = self._load_first(sequence, longer)
        if held is not None:
            held.pins -= 1
        if loaded is not None:
            return loaded, "disk", stranded
        return held, "none" if held is None else "memory", stranded

    def _load_first(self, sequence: Sequence, positions: list[int]) -> tuple[Snapshot | None, bool]:
        """Load the first position that the store can give in full, and remove missing ones from `stored_positions`.
        Return also whether a longer one was stranded."""
        assert self._persistence is not None and sequence.stored.positions is not None
        stranded = None
        for position in positions:
            if stranded is not None and position >= stranded.position:
                continue
            counted_on = sequence.retention.counts_on(position)
            loaded = self._persistence.load(sequence.keys[position], self._pool, self._pages, counted_on)
            if isinstance(loaded, Snapshot):
                return loaded, stranded is not None
            if loaded is None:
                sequence.stored.positions.remove(position)
            else:
                stranded = loaded
        return None, stranded is not None

    def _reuse(self, sequence: Sequence, match: Match, cached_from: CachedFrom, stranded: bool) -> Reuse:
        """Return the reuse of a sequence that was just restored."""
        covered = sequence.retention.ideal(match)
        ideal = max(covered.length, next(iter(self._stored_positions(sequence)), 0), sequence.computed)
        block_size = sequence.retention.block_size
        target = last_boundary(ideal, block_size)
        if match.forked:
            sequence.retention.saw_fork(target)
        miss = explain_miss(
            sequence.computed,
            ideal,
            covered,
            block_size,
            resumable=sequence.request.resumable,
            disabled=not keeps_snapshots(self._policy),
            stranded=stranded,
            evicted=self._pool.was_dropped(sequence.keys.get(target, b"")),
        )
        return Reuse(sequence.computed, cached_from, ideal, not covered.exact, *miss)

    def _roll(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Keep the latest boundary of an answer in place of the previous one."""
        previous = sequence.stored.rolling
        if previous is not None and not previous.pins and self._pool.holds(previous):
            self._pool.drop(previous)
        sequence.stored.rolling = snapshot

    def _persist(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Queue a snapshot for the store, as a child of the sequence's last stored one, unless it was dropped."""
        if self._persistence is None or not self._pool.holds(snapshot):
            return
        if self._persistence.save(snapshot, sequence.stored.parent):
            sequence.stored.parent = (snapshot.key, snapshot.position)
        snapshot.store_parent = sequence.stored.parent
