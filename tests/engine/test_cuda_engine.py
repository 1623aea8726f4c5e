"""The whole engine on a CUDA device: the CPU's answers, and cached answers that equal cold ones."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apcbatch import Engine
from apcbatch.kernels.cuda.batch import DeviceBatch
from apcbatch.kernels.cuda.few_rows import ConvolvedProjection
from apcbatch.kernels.cuda.program import DeviceStack
from apcbatch.kernels.ragged import Ragged
from apcbatch.model import graphs
from apcbatch.model.arena import StateArena
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.devices import backend_for
from apcbatch.model.families import family_of, load_model_config, state_layout
from tests.engine.test_sameness import Answers, agent_prompts, answers
from tests.engine.test_scoring import scored
from tests.tiny import FAMILIES

pytestmark = pytest.mark.cuda
# Shapes whose decode passes are graphs in bfloat16, with products of few rows together with the ops after them.
AT_ONCE = {"hidden_size": 64, "time_step_rank": 16, "state_size": 16}
WHOLE = {"hidden_size": 64, "intermediate_size": 96, "mamba_dt_rank": 16, "mamba_d_state": 16}
# Shapes whose experts run grouped in bfloat16.
GROUPED = {"hidden_size": 48, "moe_intermediate_size": 32}
MODELS = {
    **{family: (family, {}) for family in FAMILIES},
    "mamba at once": ("mamba", AT_ONCE),
    "falcon_mamba at once": ("falcon_mamba", AT_ONCE),
    "jamba whole": ("jamba", WHOLE),
    "granitemoehybrid dense": ("granitemoehybrid", {"num_local_experts": 0}),
    "granitemoehybrid grouped": ("granitemoehybrid", {"hidden_size": 48, "intermediate_size": 32}),
    "falcon_h1 with a norm": ("falcon_h1", {"mamba_rms_norm": True}),
    "qwen3_5_moe grouped": ("qwen3_5_moe", GROUPED),
    "qwen3_next grouped": ("qwen3_next", {**GROUPED, "norm_topk_prob": False}),
    "lfm2_moe grouped": ("lfm2_moe", GROUPED),
    "nemotron_h grouped": ("nemotron_h", {**GROUPED, "moe_latent_size": 16}),
}
COLD = {"policy": "none", "max_running": 1}


@pytest.fixture
def checkpoint(tiny_checkpoint) -> Callable[[str], Path]:
    """The folder of one of MODELS."""
    return lambda model: tiny_checkpoint(MODELS[model][0], **MODELS[model][1])


def serve(folder: Path, seed: int, **options: object) -> Answers:
    options = {"device": "cuda", "pool_size_bytes": 256 << 20, "draft": (), **options}
    return answers(Engine(folder, **options), agent_prompts(seed))


def tokens(of: Answers) -> dict[str, list[int]]:
    return {key: answer[0] for key, answer in of.items()}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_the_device_answers_like_the_cpu(model: str, exact: bool, checkpoint) -> None:
    """Catches any layer that computes something else than the CPU's, which equals transformers'."""
    folder = checkpoint(model)
    on_device, on_cpu = serve(folder, 3, exact=exact, **COLD), serve(folder, 3, device="cpu", **COLD)
    assert tokens(on_device) == tokens(on_cpu)
    for key, (_, logprobs) in on_device.items():
        assert logprobs == pytest.approx(on_cpu[key][1], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_scores_of_bfloat16_are_near_the_cpus(model: str, checkpoint) -> None:
    """Catches a factor, a bias or an expert that is left out by the kernels of bfloat16 alone."""
    folder, scores = checkpoint(model), []
    for device in ("cpu", "cuda"):
        engine = Engine(folder, device=device, dtype="bfloat16", pool_size_bytes=64 << 20)
        scores.append({result.id: result.scores for result in engine.run(scored(11))})
        engine.close()
    pairs = [
        (one.logprobs, other.logprobs)
        for one, other in ((scores[0][key], scores[1][key]) for key in scores[0])
        if one is not None
    ]
    assert len(pairs) > 3
    errors = torch.cat([torch.tensor(a) - torch.tensor(b) for a, b in pairs]).abs()
    # The median, as rounding may decide between two experts of a token: one of 400 log-probabilities was 3.4 apart.
    assert float(errors.median()) < 0.1, errors


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_fast_tokens_of_float32_are_the_same_cached_and_cold(model: str, block_size: int, checkpoint) -> None:
    """Catches a state that is restored from another position or slot."""
    folder, seed = checkpoint(model), random.randrange(1 << 30)
    options = {"exact": False, "block_size": block_size}
    cold = serve(folder, seed, **options, **COLD)
    cached = serve(folder, seed, **options, policy="all", max_running=8, max_batch_tokens=100)
    assert tokens(cached) == tokens(cold), f"seed {seed}"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_answers_are_the_same_bit_for_bit(model: str, dtype: str, checkpoint, tmp_path: Path) -> None:
    """Catches bits that depend on cuts, batch mates, graphs, memory or disk."""
    folder, seed = checkpoint(model), random.randrange(1 << 30)
    options = {"dtype": dtype, "block_size": 16}
    cold = serve(folder, seed, **options, **COLD)
    for further in (
        {"policy": "all", "max_running": 8, "max_batch_tokens": 64},
        {"policy": "all", "max_running": 3, "store": tmp_path / "store"},
        {"policy": "all", "max_running": 32, "store": tmp_path / "store"},
    ):
        assert serve(folder, seed, **options, **further) == cold, f"seed {seed}, {further}"


@pytest.mark.parametrize("model", MODELS)
def test_replayed_passes_equal_launched_ones(model: str, checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a graph that continues with the slots, pages or tokens of the batch it was captured with."""
    folder, seed = checkpoint(model), random.randrange(1 << 30)
    options = {"policy": "none", "max_running": 5, "dtype": "bfloat16"}
    replayed = serve(folder, seed, **options)
    monkeypatch.setattr(graphs, "MOST_CAPTURED", 0)
    assert serve(folder, seed, **options) == replayed, f"seed {seed}"


def test_no_garbage_is_collected_during_a_capture(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a graph of a dropped engine that is destroyed while another one is captured, which CUDA refuses."""
    folder, dropped = checkpoint("mamba at once"), []
    expected = serve(folder, 3, dtype="bfloat16")
    for _ in range(3):
        dropped.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(dropped[-1]):
            torch.zeros(8, device="cuda")
    forward = CausalLM.forward

    def with_garbage(self: CausalLM, *arguments: object) -> torch.Tensor:
        if dropped and torch.cuda.is_current_stream_capturing():
            cycle = [dropped.pop()]
            cycle.append(cycle)
            del cycle
            _ = [[] for _ in range(2 * gc.get_threshold()[0])]  # enough objects to start a collection
        return forward(self, *arguments)

    monkeypatch.setattr(CausalLM, "forward", with_garbage)
    assert serve(folder, 3, dtype="bfloat16") == expected
    assert len(dropped) < 3 and gc.isenabled()


@pytest.mark.parametrize("model", ["mamba at once", "qwen3_next grouped"])
def test_answers_on_another_stream_are_the_same(model: str, checkpoint, tmp_path: Path) -> None:
    """Catches a thread that works on the default stream for an engine whose caller has another one, and a copy on a
    stream that is also used for captures: torch's pool repeats after 32."""
    folder, seed = checkpoint(model), random.randrange(1 << 30)
    options = {"dtype": "bfloat16", "policy": "all", "max_running": 8}
    expected = serve(folder, seed, **options)
    for number in range(6):
        with torch.cuda.stream(torch.cuda.Stream()):
            assert serve(folder, seed, store=tmp_path / "store", **options) == expected, f"seed {seed}, run {number}"


@pytest.mark.parametrize("exact", [False, True])
def test_jamba_decodes_in_graphs(exact: bool, checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a decode pass of Jamba that goes op by op, and one whose answers are others in a graph: alone, where both
    ways have the same products, bit for bit."""
    options = {"dtype": "bfloat16", "exact": exact}
    replays, replay = [], graphs._Graph.replay

    def noted(graph: graphs._Graph, batch: Batch, entering: torch.Tensor | None = None) -> torch.Tensor:
        replays.append(batch.ragged.num_sequences)
        return replay(graph, batch, entering)

    folder, seed = checkpoint("jamba whole"), random.randrange(1 << 30)
    monkeypatch.setattr(graphs._Graph, "replay", noted)
    replayed = serve(folder, seed, **options, **COLD)
    assert len(replays) >= sum(len(answer[0]) - 1 for answer in replayed.values())
    monkeypatch.setattr(graphs, "MOST_CAPTURED", 0)
    assert serve(folder, seed, **options, **COLD) == replayed, f"seed {seed}"
    monkeypatch.setattr(graphs, "MOST_CAPTURED", 256)
    serve(folder, 5, **options, policy="none", max_running=7)
    assert max(replays) > 4


def test_a_filled_up_graph_equals_a_launched_pass(checkpoint) -> None:
    """Catches sequences that fill a batch up and write a state or a page, tables that are too narrow, lists that are
    left from the pass before, and fast products of few rows that depend on their number: sequences of uneven contexts
    in a larger graph, against the same op by op."""
    folder = checkpoint("jamba whole")
    config, device = load_model_config(folder), torch.device("cuda", 0)
    arena = StateArena(state_layout(config, "bfloat16"), 16, 64, device)
    parts = [*arena.slots.values(), *arena.pages.values()]
    with family_of(config).checkpoint(folder, device) as opened:
        model = CausalLM(opened, config, torch.bfloat16, arena, backend_for(device, exact=False))
    graphed = graphs.GraphedLM(model, device)
    for contexts in ([3, 700, 64, 63, 129, 5, 9], [1, 90, 64, 128, 65], [1300, 7, 2]):
        for part in parts:
            part.normal_()
        before = [part.clone() for part in parts]
        batch = _decode_batch(contexts, config.vocab_size)
        logits = graphed.forward(batch).clone()
        after = [part.clone() for part in parts]
        for part, kept in zip(parts, before, strict=True):
            part.copy_(kept)
        launched = model.forward(batch.on(device))
        assert torch.equal(logits, launched)
        for part, replayed, kept in zip(arena.slots.values(), after, before, strict=False):
            assert torch.equal(_changed(replayed, kept), _changed(part, kept))
        tokens = [part.flatten(2, 3).movedim(2, 0) for part in (after[2], arena.pages["kv"], before[2])]
        assert torch.equal(_changed(tokens[0], tokens[2]), _changed(tokens[1], tokens[2]))


def _changed(part: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Which rows are others than before."""
    return (part != before).flatten(1).any(dim=1)


def _decode_batch(contexts: list[int], vocab: int) -> Batch:
    """One token of each sequence: slots from 0 on, pages in a random order."""
    b, widths = len(contexts), [length // 64 + 1 for length in contexts]
    pages = torch.randperm(64)[: sum(widths)].split(widths)
    table = torch.zeros(b, max(widths), dtype=torch.int64)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    context, slots = torch.tensor(contexts), torch.arange(b)
    return Batch(
        token_ids=torch.randint(vocab, (b,)),
        ragged=Ragged.create(torch.arange(b + 1), initial_slots=slots, final_slots=slots),
        logits_rows=torch.arange(b),
        page_table=table,
        context=context,
        token_slots=table[slots, context // 64] * 64 + context % 64,
    )


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("model", ["mamba at once", "falcon_mamba at once", "jamba whole", "qwen3_next grouped"])
def test_a_few_sequences_multiply_with_the_ops_after(
    model: str, exact: bool, checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches models that are meant to test products of few rows together with the ops after them, and do not."""
    batches, takes = [], ConvolvedProjection.takes

    def noted(its: ConvolvedProjection, batch: DeviceBatch) -> bool:
        if takes(its, batch):
            batches.append(batch.num_sequences)
        return takes(its, batch)

    monkeypatch.setattr(ConvolvedProjection, "takes", noted)
    serve(checkpoint(model), 5, dtype="bfloat16", exact=exact, policy="none", max_running=8)
    assert 8 in batches and max(batches) == 8


@pytest.mark.parametrize("model", ["granitemoehybrid grouped", "qwen3_next grouped", "nemotron_h grouped"])
def test_a_shared_expert_is_a_branch_of_the_graph(model: str, checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches models that are meant to test graphs of two branches, and have one."""
    captured, capture = [], DeviceStack._capture_both
    monkeypatch.setattr(DeviceStack, "_capture_both", lambda *given: captured.append(capture(*given)))
    serve(checkpoint(model), 5, dtype="bfloat16", policy="none", max_running=4)
    assert captured


def test_snapshots_are_of_the_device_alone(tiny_checkpoint, tmp_path: Path) -> None:
    """Catches a state made by other arithmetic that is taken for one's own: the CPU's on the device, and the fast
    products' by exact ones."""
    folder = tiny_checkpoint("mamba")
    makers = ({"device": "cpu"}, {"device": "cuda"}, {"device": "cuda", "exact": False})
    prints = set()
    for options in makers:
        engine = Engine(folder, store=tmp_path / "store", **options)
        prints.add(engine.fingerprint)
        prompt = list(range(1, 90))
        (result,) = engine.run([agent_prompts(1)[0].__class__("r", prompt, max_tokens=1)])
        assert result.cached_tokens == 0
        engine.close()
    assert len(prints) == len(makers)


def test_what_the_python_surface_gives_lies_on_the_host(tiny_checkpoint) -> None:
    """Catches tensors of the device where callers expect plain ones."""
    engine = Engine(tiny_checkpoint("jamba"), device="cuda", block_size=16)
    request = agent_prompts(2)[0]
    list(engine.run([request]))
    position = engine.boundaries(request.token_ids)[-1]
    parts = engine.snapshot(request.token_ids[:position])
    assert parts is not None and all(not part.is_cuda for part in parts.values())
    assert torch.isfinite(parts["ssm"]).all()
    engine.close()
