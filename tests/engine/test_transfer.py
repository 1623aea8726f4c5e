"""Snapshots that travel: what arrives in another engine continues bit for bit, and nothing else is ever taken in."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from apcbatch import Engine, Request, Result
from apcbatch.prefix import prefix_key
from apcbatch.store import BadSnapshot
from apcbatch.types import RequestPlan
from tests.engine.runs import tokens

POSITION = 150  # no multiple of a page


PROMPT = tokens(190, 1)


@pytest.fixture
def open_engine(open_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    return partial(open_engine, block_size=50, policy="planned")


def serve(engine: Engine, prompt: list[int], plan: RequestPlan) -> Result:
    request = Request("r", prompt, max_tokens=12, ignore_eos=True, logprobs=True, keep_answer=False, plan=plan)
    (result,) = engine.run([request])
    assert result.error is None
    return result


def key_of(engine: Engine, prompt: list[int] = PROMPT) -> bytes:
    return prefix_key(engine.key_fingerprint, prompt, POSITION)


def sent(engine: Engine, prompt: list[int] = PROMPT) -> bytes:
    """The bytes of the snapshot at POSITION, which the engine computes for that."""
    serve(engine, prompt, RequestPlan(keep=(POSITION,), reads=(1,)))
    buffers = engine.export_snapshot(key_of(engine, prompt))
    assert buffers is not None
    return b"".join(buffers)


RESUME = RequestPlan(resume_at=POSITION, ideal=POSITION)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mamba", "float32"), ("jamba", "float32"), ("jamba", "bfloat16"), ("qwen3_5", "bfloat16"), ("demo", "bfloat16")],
)
def test_another_engine_continues_bit_for_bit(
    name: str, dtype: str, tiny_checkpoint: Callable[..., Path], open_engine: Callable[..., Engine]
) -> None:
    """Catches a part of the state that does not travel, is rounded, or lands in the wrong place; and bytes that differ
    from one maker to the next."""
    model = name if name == "demo" else tiny_checkpoint(name)
    one, other, third = (open_engine(model, dtype=dtype) for _ in range(3))
    data = sent(one)
    serve(other, tokens(70, 9), RequestPlan(keep=(50,), reads=(1,)))  # so that slots and pages are other ones
    assert other.adopt_snapshot(key_of(other), POSITION, data, 2)
    cold = serve(third, PROMPT, RequestPlan())
    for _ in range(2):
        warm = serve(other, PROMPT, RESUME)
        assert (warm.cached_tokens, warm.cached_from, warm.miss_reason) == (POSITION, "memory", None)
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    assert other.export_snapshot(key_of(other)) is None, "its last reader has come"
    assert sent(third) == data


def test_a_state_that_arrived_can_be_sent_on(folder: Path, open_engine: Callable[..., Engine]) -> None:
    """Catches a copy that is not the same bytes, and one that is adopted twice and released after one reader."""
    one, other = open_engine(folder), open_engine(folder)
    data = sent(one)
    for _ in range(2):
        assert other.adopt_snapshot(key_of(other), POSITION, data, 1)
    buffers = other.export_snapshot(key_of(other))
    assert buffers is not None and b"".join(buffers) == data
    serve(other, PROMPT, RESUME)
    assert other.export_snapshot(key_of(other)) is not None
    other.add_readers(key_of(other), -1)
    assert other.export_snapshot(key_of(other)) is None


def test_damaged_bytes_are_refused(folder: Path, open_engine: Callable[..., Engine]) -> None:
    """Catches a torn or flipped state that is taken in, whichever byte it is, and room that a refusal costs."""
    one, other = open_engine(folder), open_engine(folder)
    data, key = sent(one), key_of(one)
    source = random.Random(2)
    damaged = [b"", data[:100], data[:-1], data + b"\0"]
    for place in [0, 9, 60, len(data) - 1, *(source.randrange(len(data)) for _ in range(40))]:
        damaged.append(data[:place] + bytes([data[place] ^ 1 << source.randrange(8)]) + data[place + 1 :])
    for bad in damaged:
        with pytest.raises(BadSnapshot):
            other.adopt_snapshot(key, POSITION, bad, 1)
    assert other.export_snapshot(key) is None and other.counters.peak_live_snapshots == 0
    assert other.adopt_snapshot(key, POSITION, data, 1)


def test_what_is_not_asked_for_is_refused(
    folder: Path, tiny_checkpoint: Callable[..., Path], open_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """Catches the state of another model, dtype, prefix or position, and one that lacks what its parent has."""
    one, other = open_engine(folder, store=tmp_path), open_engine(folder)
    data = sent(one)
    strange = open_engine(tiny_checkpoint(folder.name.rpartition("-")[0], seed=5))
    rounded = open_engine(folder, dtype="bfloat16")
    wanted = prefix_key(other.key_fingerprint, tokens(POSITION, 3), POSITION)
    for engine, key, position in [
        (strange, key_of(one), POSITION), (rounded, key_of(one), POSITION), (other, wanted, POSITION),
        (other, key_of(one), POSITION - 50),
    ]:  # fmt: skip
        with pytest.raises(BadSnapshot):
            engine.adopt_snapshot(key, position, data, 1)
    serve(one, tokens(190, 8), RequestPlan(keep_for_later=(100, POSITION)))
    one.flush()
    for path in tmp_path.glob("objects/**/*.safetensors"):
        stored = path.read_bytes()
        if b'"parent":""' not in stored[:2048]:
            with pytest.raises(BadSnapshot):
                other.adopt_snapshot(bytes.fromhex(path.stem), POSITION, stored, 1)
            break
    else:
        pytest.fail("the store has no snapshot with a parent")


def test_what_arrives_pushes_nothing_out_that_is_waited_for(folder: Path, open_engine: Callable[..., Engine]) -> None:
    """Catches a state that takes the place of one that a plan counts on; idle ones give way."""
    one = open_engine(folder)
    data = sent(one)
    pages = -(-POSITION // 64) * one.footprint.page_bytes
    small = open_engine(folder, pool_size_bytes=int(1.5 * (one.footprint.state_bytes + pages)))
    waited_for = tokens(190, 4)
    serve(small, waited_for, RequestPlan(keep=(POSITION,), reads=(1,)))
    assert not small.adopt_snapshot(key_of(small), POSITION, data, 1)
    assert small.export_snapshot(key_of(small, waited_for)) is not None
    assert serve(small, waited_for, RESUME).cached_tokens == POSITION
    serve(small, waited_for, RequestPlan(keep_for_later=(POSITION,)))
    assert small.adopt_snapshot(key_of(small), POSITION, data, 1)
    assert serve(small, PROMPT, RESUME).cached_tokens == POSITION


def test_running_requests_get_their_pages_beside_what_arrives(
    tiny_checkpoint: Callable[..., Path], open_engine: Callable[..., Engine]
) -> None:
    """Catches a state whose KV takes the reserved pages of a running answer, or that an answer cannot evict: it would
    fail in the middle."""
    folder = tiny_checkpoint("jamba")
    one = open_engine(folder)
    data, key = sent(one), key_of(one)
    small = open_engine(folder, pool_size_bytes=one.footprint.state_bytes + 3 * one.footprint.page_bytes)
    most = 64 * (small.parts.pages.num_pages - 2)
    running = Request("long", tokens(100, 6), max_tokens=most - 100, ignore_eos=True, keep_answer=False)
    small.submit(running)
    assert not small.step()
    assert small.adopt_snapshot(key, POSITION, data, 1)
    results = [result for result in small.run([])]
    assert [result.error for result in results] == [None] and small.export_snapshot(key) is None
    assert small.adopt_snapshot(key, POSITION, data, 1)
