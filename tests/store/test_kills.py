"""The store after SIGKILL: what the next process sees is whole."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from apcbatch.store import Store
from tests.store.conftest import FINGERPRINT, assert_is, key_of, num_bytes_in, object_files, put_chain

KILLED = """
import os, signal, sys
from apcbatch.store import Store
from tests.store.conftest import put_chain
from tests.store.faults import FaultyFiles

folder, call, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
calls = 0

def kill(name, path):
    global calls
    if name == call and (path.endswith(".tmp") or path.endswith(".safetensors")):
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

store = Store.open(folder, 20_000, warn=print, files=FaultyFiles(kill), write_threads=int(sys.argv[4]))
for round_number in range(4):
    put_chain(store, f"round {round_number}", 10)
    store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "number", "write_threads"),
    [("write", 17, 1), ("rename", 1, 4), ("rename", 25, 1), ("unlink", 1, 4), ("unlink", 9, 1), ("none", 0, 4)],
)
def test_a_kill_leaves_nothing_half_true(
    folder: Path, warnings: list[str], call: str, number: int, write_threads: int
) -> None:
    """Killed while writing, between writing and naming, between naming and the index, while
    evicting, and at the end. What the next one sees is whole, what cannot be found takes no room, and the
    limit still holds."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), call, str(number), str(write_threads)], timeout=60
    )
    assert ended.returncode == -signal.SIGKILL
    with Store.open(folder, 20_000, warn=warnings.append) as store:
        keys = [key_of(f"round {i}", 16 * (j + 1)) for i in range(4) for j in range(10)]
        present = store.present(keys)
        files = {path.stem for path in object_files(folder)}
        assert {key.hex() for key in present} >= files, "a file without a row would never be counted"
        assert num_bytes_in(folder) <= 20_000
        assert list((folder / "tmp").glob("*.tmp")) == []
        for key in present:
            snapshot = store.get(key, FINGERPRINT)
            assert snapshot is None if key.hex() not in files else assert_is(snapshot, key) is None
        put_chain(store, "after", 10)
        store.flush()
        assert store.check().faults == []
        assert store.stats().num_bytes <= 20_000
    if call in ("write", "rename", "none"):
        assert warnings == []
