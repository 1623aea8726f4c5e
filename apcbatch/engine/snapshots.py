"""Everything a sequence gets from, and gives to, the kept snapshots: pool first, then store.

Must not know: the batch, the order of requests. Invariants: a position is used only if all of its state is there; at
least one prompt token is always computed; what the store cannot give is a miss, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from apcbatch.engine.coverage import CoverageTree
from apcbatch.engine.miss import explain_miss
from apcbatch.engine.pages import NO_PAGES, PageArray, PagePool
from apcbatch.engine.persistence import Persistence
from apcbatch.engine.pool import Snapshot, SnapshotPool
from apcbatch.engine.runner import Chunk
from apcbatch.engine.sequence import Sequence
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.arena import StateArena
from apcbatch.prefix import PrefixHasher, TokenArray, boundaries_in, last_boundary, prefix_key
from apcbatch.types import CachedFrom, Policy


class Snapshots:
    """The kept snapshots of one model, in RAM and, with `persistence`, on disk."""

    def __init__(
        self,
        *,
        policy: Policy,
        block_size: int,
        fingerprint: bytes,
        has_kv: bool,
        arena: StateArena,
        pool: SnapshotPool,
        pages: PagePool,
        persistence: Persistence | None,
    ) -> None:
        self.policy, self.block_size = policy, block_size
        self.coverage = CoverageTree()
        self.num_written = 0
        self.num_restored = 0
        self.num_for_later = 0
        self._fingerprint, self._has_kv = fingerprint, has_kv
        self._arena, self._pool, self._pages = arena, pool, pages
        self._persistence = persistence

    def prepare(self, sequence: Sequence) -> None:
        """Compute the prefix keys of the prompt's positions that matter, once."""
        if self.policy != "none":
            hasher = PrefixHasher(self._fingerprint, sequence.tokens[: sequence.num_prompt])
            sequence.keys = dict(hasher.keys_at(self._positions_of_interest(sequence)))

    def available_position(self, sequence: Sequence) -> int:
        """The longest position below the prompt's end that pool or store seem to hold; 0 for none."""
        held = next((p for p in self._usable(sequence) if self._held(sequence, p) is not None), 0)
        return max(held, next(iter(self._stored_positions(sequence)), 0))

    def attach(self, sequence: Sequence) -> None:
        """Start a sequence from the longest usable snapshot, and note what it missed and why: against all prompts that
        began before it, computed already or not."""
        prompt = sequence.tokens[: sequence.num_prompt]
        match = self.coverage.match(prompt)
        self.coverage.insert(prompt)
        snapshot, source, stranded = self._find(sequence)
        if snapshot is not None:
            self.num_restored += not snapshot.restored
            self._pool.consume(snapshot)
            if self._persistence:
                self._persistence.touch(snapshot)
            snapshot.pins += 1
            sequence.start = snapshot
            sequence.pages = self._adopt_pages(snapshot)
            here = (snapshot.key, snapshot.position)
            sequence.store_parent = here if snapshot.stored else snapshot.store_parent
            sequence.computed = sequence.cached_tokens = snapshot.position
            sequence.cached_from = source
        stored = next(iter(self._stored_positions(sequence)), 0)
        plan = sequence.request.plan
        covered = min(match.length, sequence.num_prompt - 1) if plan is None else plan.ideal
        ideal = max(covered, stored, sequence.computed)
        sequence.ideal = ideal if match.exact or plan is not None else None
        sequence.branch = last_boundary(ideal, self.block_size) if match.forked else 0
        target = sequence.keys.get(last_boundary(ideal, self.block_size), b"")
        sequence.miss_reason, sequence.miss_detail = explain_miss(
            sequence.computed,
            ideal,
            match,
            self.block_size,
            disabled=self.policy == "none",
            stranded=stranded,
            evicted=self._pool.was_dropped(target),
        )

    def detach(self, sequence: Sequence) -> None:
        """Let go of the snapshot that a sequence started from."""
        snapshot, sequence.start = sequence.start, None
        if snapshot is not None:
            snapshot.pins -= 1
            self.count_read(sequence)

    def count_read(self, sequence: Sequence) -> None:
        """A sequence does not need the plan's snapshot any more, wherever it started; the last one releases it."""
        plan = sequence.request.plan
        snapshot = self._pool.peek(sequence.keys.get(plan.resume_at, b"")) if plan else None
        if snapshot is not None and snapshot.reads_left:
            snapshot.reads_left -= 1
            if not snapshot.reads_left and not snapshot.for_later and not snapshot.pins:
                self._pool.drop(snapshot)

    def reserve(self, sequence: Sequence, position: int) -> tuple[int, bytes] | None:
        """(slot, key) for the snapshot at `position`; None where it is held already or there is no room."""
        key = sequence.keys.get(position) or prefix_key(
            self._fingerprint, sequence.tokens[:position], position
        )
        held, reads = self._pool.peek(key), sequence.planned.get(position, 0)
        if held is not None:
            held.reads_left += reads
            return None
        slot = self._pool.reserve(key, awaited=reads > 0)
        return None if slot is None else (slot, key)

    def publish(self, chunk: Chunk) -> None:
        """Make the snapshots that a pass has written visible, in RAM at once and on disk behind."""
        sequence = chunk.sequence
        for keep in chunk.keep:
            covering = sequence.pages[: -(-keep.position // PAGE_TOKENS)] if self._has_kv else NO_PAGES
            reads = sequence.planned.get(keep.position, 0)
            snapshot = self._pool.insert(keep.key, keep.position, keep.slot, covering, reads, reads > 0)
            if snapshot is None:
                continue
            is_new = snapshot.slot == keep.slot
            if sequence.request.plan is not None:
                self._publish_planned(sequence, snapshot, is_new)
                continue
            self.num_written += is_new
            if self.policy != "all" and keep.position > sequence.num_prompt:
                self._roll(sequence, snapshot)
            else:
                self._persist(sequence, snapshot)

    def cover(self, chunk: Chunk) -> None:
        """Note the tokens of a kept answer once it has ended; those of a prompt are noted when it begins."""
        sequence = chunk.sequence
        if sequence.finish_reason and sequence.request.keep_answer:
            self.coverage.insert(sequence.tokens[: sequence.computed])

    def cancel(self, chunk: Chunk) -> None:
        """Give back the slots of a pass that failed."""
        for keep in chunk.keep:
            self._pool.cancel(keep.slot)

    def complete(self, sequence: Sequence) -> None:
        """The sequence has ended: what was kept back until the end of its answer goes to the store."""
        if sequence.rolling is not None:
            self._persist(sequence, sequence.rolling)

    # Pages: the KV of live sequences. A snapshot's partly filled last page is copied, the full ones are shared.

    def pages_of_life(self, sequence: Sequence) -> int:
        """Pages that a sequence needs until its last token."""
        return -(-sequence.limit // PAGE_TOKENS) if self._has_kv else 0

    def pages_to_start(self, sequence: Sequence) -> int:
        """Pages that must be free to admit a sequence: those of its life, and a copy of a restored partial page."""
        return self.pages_of_life(sequence) + self._has_kv

    def free_pages(self, needed: int, awaited: bool) -> bool:
        """Drop snapshots, of awaited ones only if `awaited`, until `needed` pages are free; False for no way, and
        nothing is dropped where all pages together are not as many."""
        if needed > self._pages.num_pages:
            return False
        while self._pages.num_free < needed:
            if not self._pool.drop_one(awaited):
                return False
        return True

    def extend_pages(self, sequence: Sequence, end: int) -> int:
        """Give a sequence pages for its tokens up to `end`; returns how many were added."""
        missing = (-(-end // PAGE_TOKENS) if self._has_kv else 0) - len(sequence.pages)
        if missing > 0:
            added = [self._pages.allocate() for _ in range(missing)]
            sequence.pages = np.concatenate([sequence.pages, np.array(added, np.int64)])
        return max(missing, 0)

    def release_pages(self, sequence: Sequence) -> None:
        """Drop a finished sequence's references."""
        self._pages.release(sequence.pages)
        sequence.pages = NO_PAGES

    # The Python surface

    def positions(self, tokens: TokenArray) -> list[int]:
        """Positions up to len(tokens) whose snapshot is held, in RAM or by the store, ascending."""
        hasher = PrefixHasher(self._fingerprint, tokens)
        keys = dict(hasher.keys_at(boundaries_in(0, len(tokens), self.block_size)))
        stored = set(self._persistence.positions(keys)) if self._persistence else set()
        return [p for p, key in keys.items() if key in self._pool or p in stored]

    def fetch(self, tokens: TokenArray) -> Snapshot | None:
        """The snapshot of exactly these tokens, loaded from the store if need be; None where it is not held."""
        key = prefix_key(self._fingerprint, tokens, len(tokens))
        held = self._pool.peek(key)
        if held is not None or self._persistence is None:
            return held
        loaded = self._persistence.load(key, self._pool, self._pages, awaited=False)
        return loaded if isinstance(loaded, Snapshot) else None

    def _positions_of_interest(self, sequence: Sequence) -> Iterable[int]:
        """Every boundary of the prompt; with a plan, only where it resumes and what it keeps."""
        plan = sequence.request.plan
        if plan is None:
            return boundaries_in(0, sequence.num_prompt, self.block_size)
        return sorted({plan.resume_at, *sequence.planned} - {0})

    def _usable(self, sequence: Sequence) -> list[int]:
        """Boundaries that leave one prompt token to compute, longest first."""
        return [p for p in reversed(sequence.keys) if p < sequence.num_prompt]

    def _held(self, sequence: Sequence, position: int) -> Snapshot | None:
        """What the pool has for a sequence at a position; beyond the plan's, not what others of the plan wait for."""
        snapshot, plan = self._pool.peek(sequence.keys[position]), sequence.request.plan
        if snapshot is None or plan is not None and snapshot.reads_left and position > plan.resume_at:
            return None
        return snapshot

    def _stored_positions(self, sequence: Sequence) -> list[int]:
        """Usable positions that the store held when the sequence was first looked at, longest first."""
        if self._persistence is None or self.policy == "none":
            return []
        if sequence.stored_positions is None:
            found = self._persistence.positions({p: sequence.keys[p] for p in self._usable(sequence)})
            sequence.stored_positions = sorted(found, reverse=True)
        return sequence.stored_positions

    def _find(self, sequence: Sequence) -> tuple[Snapshot | None, CachedFrom, bool]:
        """(the longest usable snapshot, where it came from, whether a longer one was stranded)."""
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
        """Load the first position that the store can give in full; what it cannot give at all is forgotten."""
        assert self._persistence is not None and sequence.stored_positions is not None
        stranded, plan = None, sequence.request.plan
        for position in positions:
            if stranded is not None and position >= stranded.position:
                continue
            counted_on = plan is None or position <= plan.resume_at
            loaded = self._persistence.load(sequence.keys[position], self._pool, self._pages, counted_on)
            if isinstance(loaded, Snapshot):
                return loaded, stranded is not None
            if loaded is None:
                sequence.stored_positions.remove(position)
            else:
                stranded = loaded
        return None, stranded is not None

    def _adopt_pages(self, snapshot: Snapshot) -> PageArray:
        """References to a snapshot's full pages, and a copy of the last one where it is filled in part."""
        if not len(snapshot.pages):
            return NO_PAGES
        pages: PageArray = snapshot.pages.copy()
        full = snapshot.position // PAGE_TOKENS
        self._pages.share(pages[:full])
        if full < len(pages):
            pages[full] = self._pages.allocate()
            self._arena.copy_page(int(snapshot.pages[full]), int(pages[full]))
        return pages

    def _publish_planned(self, sequence: Sequence, snapshot: Snapshot, is_new: bool) -> None:
        """Count a snapshot that only future runs will read apart, and have it stored."""
        plan = sequence.request.plan
        if sequence.planned[snapshot.position]:
            self.num_written += is_new
        else:
            self.num_for_later += is_new
        if plan is not None and snapshot.position in plan.keep_for_later:
            snapshot.for_later = True
            self._persist(sequence, snapshot)

    def _roll(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Keep the latest boundary of an answer in place of the one before."""
        previous = sequence.rolling
        if previous is not None and not previous.pins and self._pool.holds(previous):
            self._pool.drop(previous)
        sequence.rolling = snapshot

    def _persist(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Hand a snapshot to the store, as a child of the sequence's last stored one, unless it was dropped since it
        was kept."""
        if self._persistence is None or not self._pool.holds(snapshot):
            return
        if self._persistence.save(snapshot, sequence.store_parent):
            sequence.store_parent = (snapshot.key, snapshot.position)
        snapshot.store_parent = sequence.store_parent
