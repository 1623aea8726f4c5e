"""What the store's tests share: a folder, a list of warnings, and snapshots whose contents follow from their
keys."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apcbatch.layout import TensorLayout
from apcbatch.store import Store, StoredSnapshot
from apcbatch.store.format import INDEX_NAME, OBJECT_SUFFIX

FINGERPRINT = hashlib.sha256(b"a model").digest()
LAYOUT = {
    "ssm": TensorLayout("F32", (2, 4, 3)),
    "conv": TensorLayout("BF16", (2, 3, 3)),
    "kv": TensorLayout("BF16", (1, 2, None, 1, 2)),
}
BLOCK = 16


def key_of(conversation: object, position: int) -> bytes:
    return hashlib.sha256(f"{conversation} {position}".encode()).digest()


def arrays_of(key: bytes, tokens: int = BLOCK, chained: bool = True, scale: int = 1) -> dict[str, np.ndarray]:
    """The contents that belong to a key, so that a reader needs no oracle."""
    rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
    arrays: dict[str, np.ndarray] = {
        "ssm": rng.standard_normal((2, 4, 3 * scale)).astype(np.float32),
        "conv": rng.integers(0, 1 << 16, (2, 3, 3), dtype=np.uint16),
    }
    if chained:
        arrays["kv"] = rng.integers(0, 1 << 16, (1, 2, tokens, 1, 2), dtype=np.uint16)
    return arrays


def assert_is(snapshot: StoredSnapshot | None, key: bytes, **options: Any) -> None:
    """The snapshot is the one that belongs to the key, bit for bit."""
    assert snapshot is not None
    expected = arrays_of(key, **options)
    assert snapshot.key == key
    assert set(snapshot.arrays) <= set(expected)
    for name, array in snapshot.arrays.items():
        assert array.dtype == expected[name].dtype
        assert array.tobytes() == expected[name].tobytes()
        assert array.shape == expected[name].shape


def put(
    store: Store,
    conversation: object,
    number: int = 16,
    done: list[bool] | None = None,
    position: int = 16,
    **options: Any,
) -> bytes:
    """Put one snapshot that has no parent; returns its key. done: gets whether it was stored."""
    key = key_of(conversation, number)
    on_done = None if done is None else lambda _, ok: done.append(ok)
    store.put(key, position, None, FINGERPRINT, arrays_of(key, **options), on_done)
    return key


def put_chain(store: Store, conversation: object, length: int, **options: Any) -> list[bytes]:
    """Put a conversation's snapshots at every block, each the child of the one before; returns the keys."""
    keys = [key_of(conversation, BLOCK * (i + 1)) for i in range(length)]
    for i, key in enumerate(keys):
        parent = (keys[i - 1], BLOCK * i) if i else None
        assert store.put(key, BLOCK * (i + 1), parent, FINGERPRINT, arrays_of(key, **options))
    return keys


def object_files(folder: str | os.PathLike[str]) -> list[Path]:
    return sorted(Path(folder).rglob(f"*{OBJECT_SUFFIX}"))


def num_bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in object_files(folder))


def execute(folder: Path, statement: str, *values: object) -> list[Any]:
    """Change the index behind the store's back, or read rows of it."""
    with closing(sqlite3.connect(folder / INDEX_NAME)) as db, db:
        return db.execute(statement, values).fetchall()


def path_of(folder: str | os.PathLike[str], key: bytes) -> Path:
    name = key.hex()
    return Path(folder) / "objects" / name[0] / name[1] / f"{name}{OBJECT_SUFFIX}"


@pytest.fixture
def warnings() -> list[str]:
    """Lines that the store warned with."""
    return []


@pytest.fixture
def soon() -> Iterator[None]:
    """Ends a test that hangs, after 90 s."""

    def end(*_: object) -> None:
        raise AssertionError("the test hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(90)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path, warnings: list[str]) -> Iterator[Store]:
    with Store.open(folder, warn=warnings.append) as opened:
        opened.register(FINGERPRINT, "test model", LAYOUT)
        yield opened
