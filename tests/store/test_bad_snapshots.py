"""Snapshots that are not what they should be: each is a miss with one line, and never an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from apcbatch.store import Store
from apcbatch.store.status import MAX_BAD_SNAPSHOT_LINES
from tests.effort import table
from tests.store.conftest import FINGERPRINT, arrays_of, assert_is, key_of, object_files, path_of, put_chain
from tests.store.faults import PowerCutFiles

# What is made of a file's bytes and of another snapshot's.
DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "cut short": lambda data, other: data[:-1],
    "cut in the header": lambda data, other: data[:100],
    "zero length": lambda data, other: b"",
    "bit flipped in a tensor": lambda data, other: data[:-5] + bytes([data[-5] ^ 4]) + data[-4:],
    "bit flipped in the header": lambda data, other: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "all zeros": lambda data, other: bytes(len(data)),
    "longer": lambda data, other: data + b"\0",
    "huge header length": lambda data, other: (1 << 62).to_bytes(8, "little") + data[8:],
    # A valid snapshot of other tokens is the worst wrong answer: nothing about its bytes is wrong.
    "another one's": lambda data, other: other,
}


@table("name", DAMAGES)
def test_a_damaged_file_is_a_miss_with_one_line_and_then_computed_again(tmp_path: Path, name: str) -> None:
    """The file goes, so that the recomputed snapshot can take its place; what continues it is stranded until then."""
    warnings: list[str] = []
    with Store.open(tmp_path, warn=warnings.append) as store:
        keys = put_chain(store, "a", 3)
        store.flush()
        path = path_of(tmp_path, keys[1])
        path.write_bytes(DAMAGES[name](path.read_bytes(), path_of(tmp_path, keys[0]).read_bytes()))
        chain = store.get_chain(keys[2], FINGERPRINT)
        assert (chain.miss, chain.stranded_at) == ("stranded", 32)
        assert store.get(keys[1], FINGERPRINT) is None
        assert store.present(keys) == {keys[0], keys[2]}
        assert len(warnings) == 1 and keys[1].hex() in warnings[0] and "computed again" in warnings[0]
        assert keys[0].hex() in warnings[0] or name != "another one's"
        assert store.put(keys[1], 32, (keys[0], 16), FINGERPRINT, arrays_of(keys[1]))
        store.flush()
        assert store.present(keys) == set(keys)
        assert_is(store.get(keys[1], FINGERPRINT), keys[1])
        assert store.counters.bad == 1 and len(warnings) == 1


def test_a_link_that_does_not_join_is_stranded_and_goes(store: Store, folder: Path, warnings: list[str]) -> None:
    """Two chains of one prefix on different grids: KV from 16 on must not be put after KV that ends at 32."""
    keys = put_chain(store, "a", 2)
    child = key_of("child", 48)
    store.flush()
    store.put(child, 48, (keys[1], 31), FINGERPRINT, arrays_of(child, tokens=17))
    store.flush()
    chain = store.get_chain(child, FINGERPRINT)
    assert (chain.miss, chain.stranded_at) == ("stranded", 48)
    store.flush()
    assert store.present([*keys, child]) == set(keys) and not path_of(folder, child).exists()
    assert len(warnings) == 1


def test_thousands_of_bad_files_do_not_flood_the_terminal(store: Store, folder: Path, warnings: list[str]) -> None:
    keys = put_chain(store, "a", MAX_BAD_SNAPSHOT_LINES + 15)
    store.flush()
    for path in object_files(folder):
        path.write_bytes(b"")
    assert all(store.get(key, FINGERPRINT) is None for key in keys)
    assert len(warnings) == MAX_BAD_SNAPSHOT_LINES + 1 and "apcbatch store check" in warnings[-1]


@table("kept", [0, 1, 500, 900])
def test_a_power_cut_that_keeps_names_and_loses_bytes(tmp_path: Path, kept: int) -> None:
    """Nothing is synced file by file, so this happens: the checksum has to catch it."""
    warnings: list[str] = []
    with Store.open(tmp_path, warn=warnings.append, files=PowerCutFiles(kept)) as store:
        keys = put_chain(store, "a", 3)
    with Store.open(tmp_path, warn=warnings.append) as store:
        assert all(store.get(key, FINGERPRINT) is None for key in keys)
        store.flush()
        assert store.stats().entries == 0
    assert len(warnings) == 3
