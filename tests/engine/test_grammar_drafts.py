"""Tokens that a grammar leaves no choice of are verified several a pass, and the answer is the one without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apcbatch
from apcbatch import Engine, Request
from apcbatch.data.grammar.constraint import ConstraintFactory, GrammarCompiler
from apcbatch.data.grammar.structured_output import check_structured_output
from apcbatch.data.tokenization.tokenizer import Tokenizer, load_tokenizer
from tests.engine.runs import by_id, serve, told
from tests.engine.scripted_drafts import drafting
from tests.tiny import VOCAB

DEMO = Path(apcbatch.__file__).parent / "demo"
SCHEMA = {
    "type": "object",
    "properties": {
        "order_number": {"type": "string", "pattern": "^[A-Z]{1,3}$"},
        "delivered_by": {"enum": ["the postal service", "a courier"]},
        "is_late_or_lost": {"type": "boolean"},
    },
    "required": ["order_number", "delivered_by", "is_late_or_lost"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def compiler(demo: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(demo)


def nothing(prompt: list[int], done: list[int]) -> Sequence[int]:
    return ()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("without_blanks", "least"), [(False, 1.2), (True, 2)], ids=["blanks", "no blanks"])
def test_forced_tokens_take_fewer_passes(
    without_blanks: bool, least: float, demo: Tokenizer, compiler: GrammarCompiler, way: str
) -> None:
    """Fault: a pass for each token that the schema forces; or an answer that is another one than without drafts."""
    form = {"json": SCHEMA, "disable_any_whitespace": without_blanks}
    structure = check_structured_output({"structured_outputs": form}, None)
    prompt = demo.source.backend_tokenizer.encode("Where is the order?").ids
    requests = [
        Request(
            str(number), prompt, max_tokens=200, temperature=number % 3, seed=number, logprobs=True, top_logprobs=2,
            constraint=ConstraintFactory(compiler, structure),
        )
        for number in range(6)
    ]  # fmt: skip
    plain = Engine("demo", draft=())
    expected = by_id(plain.run(requests))
    engine = drafting("demo", nothing)
    found = by_id(engine.run(requests))
    assert all(told(found[one.id]) == told(expected[one.id]) for one in requests)
    assert plain.counters.decode_chunks > least * engine.counters.decode_chunks
    assert list(engine.counters.drafts) == ["grammar"]
    engine.close()
    plain.close()


class Allows:
    """A user's constraint: even tokens, without `forced`."""

    def fill(self, mask: np.ndarray) -> bool:
        mask[:] = 0x55555555
        return True

    def accept(self, token: int) -> bool:
        return False


class Forces(Allows):
    """One that says that some tokens must follow, or raises."""

    def __init__(self, forced: Any) -> None:
        self._forced = forced

    def forced(self) -> Any:
        if isinstance(self._forced, Exception):
            raise self._forced
        return self._forced


FORCED: dict[str, Callable[[], Any]] = {
    "not asked": Allows,
    "none": lambda: Forces(()),
    "wrong": lambda: Forces([1, 3, 5]),  # it does not allow them itself
    "right for once": lambda: Forces(np.array([2, 4, 6, 8], np.int32)),
    "outside the vocabulary": lambda: Forces([4, VOCAB, 4]),
    "negative": lambda: Forces([-1]),
    "huge": lambda: Forces([2**70]),
    "no numbers": lambda: Forces(["a"]),
    "no list": lambda: Forces(None),
    "raises": lambda: Forces(RuntimeError("broken")),
}


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", FORCED)
def test_what_a_constraint_of_the_user_forces(name: str, folder: Path, way: str) -> None:
    """Fault: a constraint without `forced` that is refused; one that forces wrong tokens, no ids or an exception, and
    which changes its answer, ends the pass of other requests, or reads memory outside the embedding."""
    requests = [
        Request("a", list(range(1, 20)), max_tokens=20, temperature=1.0, logprobs=True, constraint=FORCED[name]),
        Request("b", list(range(1, 30)), max_tokens=20, logprobs=True),
    ]
    expected = serve(Engine(folder, draft=(), pool_size_bytes=16 << 20), requests)
    assert expected["a"].error is None and all(token % 2 == 0 for token in expected["a"].token_ids)
    engine = drafting(folder, nothing, pool_size_bytes=16 << 20)
    found = by_id(engine.run(requests))
    assert all(told(found[one.id]) == told(expected[one.id]) for one in requests)
    drafted = name in ("wrong", "right for once", "outside the vocabulary")
    assert ("grammar" in engine.counters.drafts) == drafted
    engine.close()
