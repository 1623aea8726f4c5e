"""Several processes on one store."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from apcbatch.store import Store
from tests.store.conftest import FINGERPRINT, arrays_of, assert_is, object_files, put, put_chain


def work(folder: str, number: int, limit: int, failures: multiprocessing.Queue[str]) -> None:
    """Write chains that others write too, and read what is there; report what is not as it should be."""
    lines: list[str] = []
    wrong: list[str] = []
    with Store.open(folder, limit, warn=lines.append) as store:
        for round_number in range(6):
            shared = put_chain(store, f"shared {round_number}", 12)
            own = put_chain(store, f"own {number} {round_number}", 6)
            store.flush()
            for key in [*shared, *own]:
                snapshot = store.get(key, FINGERPRINT)
                if snapshot is None:
                    continue  # evicted by another process, which is allowed
                try:
                    assert_is(snapshot, key)
                except AssertionError as error:
                    wrong.append(str(error))
            chain = store.get_chain(shared[-1], FINGERPRINT)
            if chain.miss is None and [link.key for link in chain.links] != shared:
                wrong.append("a chain is not the one asked for")
            if limit > 1 << 20 and chain.miss is not None:
                wrong.append(f"a chain is {chain.miss}")
        if limit > 1 << 20 and store.counters.failed:
            wrong.append(f"failed: {store.counters}")
    failures.put("; ".join(wrong + [line for line in lines if "no room" not in line]))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1 << 30, 25_000], ids=["roomy", "tight"])
def test_two_processes_write_and_read_one_store(folder: Path, warnings: list[str], limit: int) -> None:
    """Both write the same keys at the same time, both evict in the tight case; no reader gets a wrong
    byte, loses a snapshot without need, or is warned of anything."""
    context = multiprocessing.get_context("spawn")
    failures = context.Queue()
    processes = [context.Process(target=work, args=(str(folder), i, limit, failures)) for i in range(2)]
    for process in processes:
        process.start()
    reports = [failures.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert reports == ["", ""]
    with Store.open(folder, limit, warn=warnings.append) as store:
        report = store.check()
        assert report.faults == [] and report.num_stranded == 0
        assert store.stats().entries == len(object_files(folder)) == report.num_verified
        assert store.stats().num_bytes <= limit
        if limit > 1 << 20:
            assert store.stats().entries == 6 * 12 + 2 * 6 * 6


def test_one_handle_sees_what_another_has_stored(folder: Path, warnings: list[str]) -> None:
    """Workers of one job share the prefixes of their prompts through the store."""
    with Store.open(folder, warn=warnings.append) as one, Store.open(folder, warn=warnings.append) as two:
        key = put(one, "a")
        assert two.present([key]) in (set(), {key})
        one.flush()
        assert two.present([key]) == {key}
        assert_is(two.get(key, FINGERPRINT), key)
        done: list[bool] = []
        two.put(key, 16, None, FINGERPRINT, arrays_of(key), lambda _, ok: done.append(ok))
        two.flush()
        assert done == [True] and two.counters.duplicates == 1


def test_the_leftovers_of_a_living_process_are_left_alone(folder: Path, warnings: list[str]) -> None:
    """Opening cleans up after the dead; it must not take the file that another process is about to rename."""
    with Store.open(folder, warn=warnings.append):
        [lock] = (folder / "tmp").glob("*.lock")
        mine = lock.with_name(f"{lock.stem}-5.tmp")
        mine.write_bytes(b"half")
        dead = folder / "tmp" / f"{'0' * 32}-5.tmp"
        dead.write_bytes(b"half")
        Store.open(folder, warn=warnings.append).close()
        assert mine.exists() and not dead.exists()
        mine.unlink()
