"""The making of the bundled model: networks as transformers has them, gradients, what is learnt from."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from conversations import conversation  # noqa: E402
from demo_model import optimizers, shapes, training  # noqa: E402
from demo_model.batches import Encoder, is_answer  # noqa: E402
from demo_model.network import Network  # noqa: E402
from demo_model.recipe import Recipe, digest  # noqa: E402
from demo_model.renamed import names_of, renamed  # noqa: E402
from demo_model.selective_scan import selective_scan_reference  # noqa: E402
from demo_model.tokenizer import VOCAB_SIZE  # noqa: E402
from evaluate_demo_model import compare  # noqa: E402
from jsonschema import Draft202012Validator  # noqa: E402

DEMO = ROOT / "apcbatch" / "demo"
SMALL = {
    "mamba": replace(shapes.MAMBA, hidden_size=32, layers=2, dt_rank=3),
    "jamba": replace(shapes.JAMBA, hidden_size=32, layers=5, dt_rank=3, intermediate_size=24),
}


@pytest.fixture
def seed() -> int:
    """A fresh seed, printed so that a failure can be repeated."""
    drawn = secrets.randbits(32)
    print(f"seed {drawn}")
    torch.manual_seed(drawn)
    return drawn


@pytest.mark.parametrize("family", sorted(SMALL))
def test_a_network_is_what_transformers_makes_of_its_checkpoint(family, seed, tmp_path):
    """A name, a norm, a gate or an expert that means something else in training than where the model is used."""
    network = Network(SMALL[family])
    with torch.no_grad():
        for param in network.parameters():
            param += 0.1 * torch.randn_like(param)  # norms, D and biases too
    save_file(network.checkpoint(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(shapes.config(SMALL[family])))
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.randint(VOCAB_SIZE, (2, 23))
    with torch.no_grad():
        torch.testing.assert_close(network.logits(network(ids)[0]), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_reference_scan_has_the_gradients_of_differences(seed):
    """A recurrence whose gradients do not belong to it; ragged sizes, float64."""
    r, t, d, n = 2, 5, 3, 2
    x, dt = torch.randn(r, t, d).double(), torch.rand(r, t, d).double()
    a, b, c = -torch.rand(n, d).double(), torch.randn(r, t, n).double(), torch.randn(r, t, n).double()
    torch.autograd.gradcheck(selective_scan_reference, [v.requires_grad_() for v in (x, dt, a, b, c)])


KERNEL_CHECK = """
import sys; sys.path.insert(0, "tools")
import torch
from demo_model import scan_kernels
from demo_model.selective_scan import selective_scan_reference
torch.manual_seed(int(sys.argv[1])); device = sys.argv[2]
for r, t, d, n in ((2, 7, 32, 16), (1, 2, 64, 4), (3, 19, 96, 16)):
    x, dt = torch.randn(r, t, d, device=device), torch.rand(r, t, d, device=device)
    a, b = -torch.rand(n, d, device=device), torch.randn(r, t, n, device=device)
    c, grad = torch.randn(r, t, n, device=device), torch.randn(r, t, d, device=device)
    y, states = scan_kernels.forward(x, dt, a, b, c)
    got = scan_kernels.backward(grad, x, dt, a, b, c, states)
    inputs = [v.double().requires_grad_() for v in (x, dt, a, b, c)]
    want = selective_scan_reference(*inputs)
    want.backward(grad.double())
    for here, there in zip((y, *got), (want, *(v.grad for v in inputs))):
        assert (here - there).norm() <= 1e-5 * there.norm(), (r, t, d, n)
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_kernels_agree_with_float64(device, seed):
    """Values or gradients that the kernels get wrong; on a CPU by Triton's interpreter, where Triton is installed."""
    pytest.importorskip("triton")
    environment = dict(os.environ, TRITON_INTERPRET="1") if device == "cpu" else dict(os.environ)
    command = [sys.executable, "-c", KERNEL_CHECK, str(seed), device]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if "0-dimensional arrays" in done.stderr:
        pytest.skip("Triton's interpreter does not work with this version of numpy")
    assert done.returncode == 0, done.stderr


def test_a_network_learns(seed):
    """Steps that go the wrong way, or parameters that no optimiser has: a row that is said twice is learnt."""
    ids = np.tile(np.arange(20, 32, dtype=np.uint16), (2, 2))
    batch = training.Batch(ids, np.ones(ids.shape, np.float32))
    losses = []
    recipe = replace(Recipe(), steps=80, warm_up_steps=2)
    shape = replace(SMALL["jamba"], layers=3)
    training.train(shape, recipe, iter([batch] * 160), torch.device("cpu"), lambda _, made: losses.append(made.losses))
    network = Network(shape)
    untrained = training.weighted_loss(
        network(torch.from_numpy(ids.astype("int64")))[0],
        network.embedding,
        torch.from_numpy(ids.astype("int64")),
        torch.ones(ids.shape),
    )[1]
    assert losses[-1][-1][2] < 0.7 * untrained.item()


def test_every_parameter_has_one_optimizer():
    """A parameter that is never moved, or twice."""
    network = Network(SMALL["jamba"])
    moved = [
        id(param)
        for learner in optimizers.optimizers(network, 0.02, 0.003, (0.9, 0.95))
        for group in learner.param_groups
        for param in group["params"]
    ]
    assert sorted(moved) == sorted(id(param) for param in network.parameters())


def test_steps_of_muon_are_nearly_orthogonal(seed):
    """Iterations that blow up or die away."""
    made = optimizers.orthogonal(torch.randn(3, 24, 40)).float()
    sizes = torch.linalg.svdvals(made)
    assert sizes.min() > 0.4 and sizes.max() < 1.5


def test_an_error_in_making_batches_is_raised():
    """A thread that dies in silence while the training waits for its batch."""

    def broken():
        yield from ()
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        next(training.on_device(broken(), torch.device("cpu")))


def test_the_answers_of_a_conversation_are_what_is_learnt():
    """A weight one token too early or too late, or on what somebody else says."""
    encoder = Encoder(DEMO)
    record = conversation("answers", 3).record()
    ids = encoder.ids(record)
    decode = encoder._tokenizer.decode
    text = decode(ids[is_answer(ids)].tolist())
    said = [message for message in record["messages"] if message["role"] == "assistant"]
    assert text.count("<|end|>") == len(said)
    assert all((message["content"] or "") in text for message in said)
    assert decode(ids.tolist()) == encoder._tokenizer.apply_chat_template(
        record["messages"], tools=record["tools"] or None, tokenize=False
    )


def test_other_names_are_other_everywhere(seed):
    """A name that is changed where it is asked for and not where it is answered, or calls that no longer fit."""
    changed = 0
    for index in range(60):
        record = conversation(str(seed), index).record()
        other = renamed(record)
        assert other == renamed(record) and other["tools"] == record["tools"]
        if other is record:
            continue
        changed += 1
        names = set(names_of(record))
        assert [message["role"] for message in other["messages"]] == [m["role"] for m in record["messages"]]
        assert not names & set(names_of(other))
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in other["tools"]}
        for message in other["messages"]:
            for call in message.get("tool_calls") or []:
                arguments = json.loads(call["function"]["arguments"])
                Draft202012Validator(schemas[call["function"]["name"]]).validate(arguments)
    assert changed > 5


def test_the_digest_follows_every_number():
    """A committed model that claims a recipe which is not its own."""
    recipe, shape = Recipe(), shapes.JAMBA
    made = digest(recipe, shape)
    assert made == digest(recipe, shape)
    assert made != digest(replace(recipe, seed=recipe.seed + 1), shape)
    assert made != digest(recipe, replace(shape, layers=shape.layers + 1))
    assert made != digest(replace(recipe, conversations="other"), shape)


TOOL = {
    "type": "function",
    "function": {
        "name": "board",
        "parameters": {"type": "object", "properties": {"station": {"type": "string"}}, "required": ["station"]},
    },
}


def message(name: str | None, arguments: str = "{}", content: str | None = None) -> dict:
    """An assistant's message, with a call or without."""
    calls = [{"function": {"name": name, "arguments": arguments}}] if name else []
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize(
    ("got", "finish", "valid", "exact", "ended"),
    [
        (message("board", '{"station": "Farrow"}'), "tool_calls", 1, 1, 1),
        (message("board", '{"station": "Hollin"}'), "tool_calls", 1, 0, 1),
        (message("board", '{"station": 3}'), "tool_calls", 0, 0, 1),
        (message("bored", '{"station": "Farrow"}'), "tool_calls", 0, 0, 1),
        (message("board", "{"), "length", 0, 0, 0),
        (message(None, content="No."), "stop", 0, 0, 1),
        (message(None, content='<tool_call>{"name'), "length", 0, 0, 0),
    ],
)
def test_calls_are_judged(got, finish, valid, exact, ended):
    """An evaluation that praises what does not fit."""
    wanted = message("board", '{"station":"Farrow"}')
    counts = compare(wanted, [TOOL], {"message": got, "finish_reason": finish})
    assert (counts.valid, counts.exact, counts.ended, counts.call_turns) == (valid, exact, ended, 1)


def test_needless_calls_are_counted():
    """A model that calls something at every turn, and looks good."""
    wanted = message(None, content="Done.")
    counts = compare(wanted, [TOOL], {"message": message("board"), "finish_reason": "tool_calls"})
    assert (counts.needless, counts.call_turns, counts.same_text) == (1, 0, 0)
