"""The short way to the batch of a decode pass: what the long way says, for every kind of sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apcbatch import Engine, Request
from apcbatch.engine import step
from apcbatch.model.batch import Batch

LISTS = ("token_ids", "logits_rows", "context")
OF_RAGGED = ("cu_seqlens", "initial_slots", "final_slots", "snapshot_cu", "snapshot_positions", "snapshot_slots")


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_it_says_what_the_long_way_says(
    family: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a token, a slot, a page or a place of keys and values that is another one than `make_batch` names for the
    same chunks: in long answers, in several answers to one prompt, beside prompts that begin later."""
    compared, short, made = [], step.DecodeBatches.batch, []

    def both(decodes: step.DecodeBatches, chunks: list[step.Chunk]) -> Batch:
        long, one = step.make_batch(chunks), short(decodes, chunks)
        made.append(one)
        assert all(torch.equal(getattr(one, name), getattr(long, name)) for name in LISTS)
        assert all(torch.equal(getattr(one.ragged, name), getattr(long.ragged, name)) for name in OF_RAGGED)
        assert (one.ragged.max_slot, one.ragged.num_tokens) == (long.ragged.max_slot, long.ragged.num_tokens)
        if family == "jamba":
            assert torch.equal(one.page_table, long.page_table) and torch.equal(one.token_slots, long.token_slots)
        assert one.with_logprobs == long.with_logprobs
        compared.append(len(chunks))
        return one

    monkeypatch.setattr(step.DecodeBatches, "batch", both)
    engine = Engine(tiny_checkpoint(family), block_size=16, max_running=4, max_batch_tokens=64, draft=())
    requests = [Request(f"{n}", [1 + n] * (3 + 29 * n), max_tokens=200 - 40 * n, ignore_eos=True) for n in range(5)]
    requests.append(Request("several", [7, 8, 9], n=3, temperature=0.7, max_tokens=20, ignore_eos=True))
    requests.append(Request("logprobs", [7, 8], max_tokens=30, logprobs=True, ignore_eos=True))
    assert all(result.error is None for result in engine.run(requests))
    engine.close()
    assert {1, 4} <= set(compared) and len(compared) > 50
    assert len(set(map(id, made))) < len(made) / 2, "most passes are of the sequences that the last one was of"
