"""Requests that travel: what arrives is the same request, and runs to the same answer."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest

from apcbatch import Request
from apcbatch.cluster.wire import RequestDecoder, encode_request
from apcbatch.data.chat.render import Renderer
from apcbatch.data.grammar.constraint import ConstraintFactory
from apcbatch.data.grammar.llguidance import Thinking
from apcbatch.data.grammar.structured_output import StructuredOutput
from apcbatch.data.output.stop_texts import StopTextsFactory
from apcbatch.data.template_options import ChatOptions
from apcbatch.errors import RequestError
from apcbatch.model.locate import DEMO_DIR
from apcbatch.types import RequestPlan

EVERYTHING: dict[str, Any] = {
    "max_tokens": 7, "temperature": 0.7, "top_p": 0.9, "seed": 2**63, "ignore_eos": True, "logprobs": True,
    "keep_answer": False, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    "repetition_penalty": 1.5, "logit_bias": {3: -float("inf"), 4: 2.0}, "allowed_token_ids": (3, 4, 5),
    "min_tokens": 2, "stop_token_ids": (9, 8), "top_logprobs": 3, "n": 2, "score_from": 1, "score_top": 4,
    "random_stream": "[1]", "draft": False, "processed_logprobs": True,
}  # fmt: skip


def test_every_setting_arrives() -> None:
    """Fault: a field of Request is forgotten on the way, a new one too; or a request of numbers alone needs a
    tokenizer."""
    known = {"recorded": [np.array([7, 8], np.int32)], "previous": [np.array([9], np.int32), np.array([], np.int32)]}
    plan = RequestPlan(resume_at=2, keep=(3,), reads=(1,))
    request = Request("id", np.array([5, 6, 7], np.int64), **EVERYTHING, references=known, plan=plan, tag=print)
    fields = set(Request.__dataclass_fields__)
    assert set(EVERYTHING) | {"id", "token_ids", "plan", "tag", "ending", "constraint", "references"} == fields
    wire = pickle.loads(pickle.dumps(encode_request(request)))
    arrived = RequestDecoder("none", ChatOptions()).decode(wire)
    assert np.array_equal(arrived.token_ids, request.token_ids) and isinstance(arrived.token_ids, np.ndarray)
    assert (arrived.id, arrived.plan, arrived.tag, request.plan, request.tag) == ("id", None, None, plan, print)
    assert {source: [one.tolist() for one in answers] for source, answers in arrived.references.items()} == {
        "recorded": [[7, 8]],
        "previous": [[9], []],
    }
    assert {name: getattr(arrived, name) for name in EVERYTHING} == EVERYTHING


def test_code_does_not_travel() -> None:
    """Catches a caller's own object that is sent as if another process knew it."""
    for name in ["ending", "constraint"]:
        with pytest.raises(RequestError, match="without --ray"):
            encode_request(Request("id", [1], **{name: partial(object)}))


def test_stop_texts_and_forms_are_made_anew() -> None:
    """Catches a worker that ends or constrains its answers otherwise than the one process does."""
    renderer = Renderer.load(DEMO_DIR)
    thinking = Thinking(("<think>",), ("</think>",), False)
    structure = StructuredOutput("regex", "[ab]{3}")
    request = Request(
        "id", [1, 2], ending=StopTextsFactory(renderer.tokenizer, ("stop", "END")),
        constraint=ConstraintFactory(renderer.grammar_compiler, structure, thinking),
    )  # fmt: skip
    assembler = RequestDecoder("demo", ChatOptions())
    arrived = assembler.decode(pickle.loads(pickle.dumps(encode_request(request))))
    assert isinstance(arrived.ending, StopTextsFactory) and arrived.ending.texts == ("stop", "END")
    assert isinstance(arrived.constraint, ConstraintFactory)
    assert (arrived.constraint.structure, arrived.constraint.thinking) == (structure, thinking)
    masks = []
    for one in (request, arrived):
        assert one.ending is not None and one.constraint is not None
        watch, limits = one.ending(), one.constraint()
        said = [watch.accept(token, True) for token in renderer.tokenizer.encode_prompt("so it ENDs")]
        assert said[-1] == "END" or "END" in said
        mask = np.zeros(-(-renderer.tokenizer.vocab_size // 32), np.int32)
        assert limits.fill(mask)
        masks.append(mask)
    assert np.array_equal(*masks)
    again = assembler.decode(encode_request(request))
    assert isinstance(again.constraint, ConstraintFactory) and again.constraint.compiler is arrived.constraint.compiler


def test_an_error_survives_a_copy() -> None:
    """Catches an error that arrives without its code, or does not arrive at all."""
    error = RequestError("out_of_memory", "no room", 7)
    for arrived in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (arrived.code, arrived.message, arrived.line, str(arrived)) == ("out_of_memory", "no room", 7, "no room")
