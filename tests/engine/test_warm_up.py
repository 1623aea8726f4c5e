"""The pass before the first request, which a run on a CPU does without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from apcbatch import Engine, Request
from apcbatch.engine.open import warm_up


@pytest.mark.parametrize(
    ("family", "max_batch_tokens"), [("mamba", 1), ("mamba", 4096), ("jamba", 40), ("jamba", 4096)]
)
def test_no_answer_changes(
    family: str, max_batch_tokens: int, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a pass that cannot be begun, one that needs more pages than there are, and states or keys that it leaves
    for those who come."""
    folder, requests = tiny_checkpoint(family), [Request("a", [5, 9, 2, 7] * 9, max_tokens=6, logprobs=True)]
    answers = []
    for warm in (False, True):
        engine = Engine(folder, policy="all", block_size=16, pool_size_bytes=1 << 20)
        if warm:
            begun = []
            monkeypatch.setattr(engine._model, "on_layer", lambda begun=begun: begun.append(None))
            pages = engine._arena.layout.has_tokens
            warm_up(engine._model, engine._arena, max_batch_tokens, 2 if pages else None, most_rows=200)
            assert begun
            monkeypatch.undo()
        answers += [(result.token_ids, result.logprobs) for result in engine.run(requests)]
        engine.close()
    assert answers[0] == answers[1] and answers[0][0]
