"""A model's layers parted over stages: where the cuts are, the arena that stages share, and what cannot be parted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from apcbatch import Engine
from apcbatch.engine.snapshot_arrays import slot_in_memory
from apcbatch.errors import ModelError, UsageError
from apcbatch.model import peer_transfer
from apcbatch.model.arena import StateArena, Tensors
from apcbatch.model.devices import choose_devices
from apcbatch.model.families import family_of, load_model_config, state_layout
from apcbatch.model.peer_transfer import Hop
from apcbatch.model.pipeline import SpreadLM, balanced, load_stages, stage_layers
from apcbatch.model.pipeline_arena import Marks, SpreadArena
from tests.effort import table
from tests.model.folders import REMOVED, weights_of, with_weights

CPU = torch.device("cpu")


def test_the_largest_stage_is_as_small_as_can_be() -> None:
    """Catches a cut in another place, an empty stage, layers that are in two stages or in none, and ties that two
    processes of one run cut at different layers."""
    source = random.Random(5)
    for _ in range(200):
        weights = [source.randrange(9) for _ in range(source.randrange(1, 9))]
        count = source.randint(1, len(weights))
        parts = balanced(weights, count)
        assert [index for part in parts for index in part] == list(range(len(weights)))
        assert len(parts) == count and all(parts)
        cuts = itertools.combinations(range(1, len(weights)), count - 1)
        sums = [max(sum(weights[a:b]) for a, b in itertools.pairwise([0, *chosen, len(weights)])) for chosen in cuts]
        assert max(sum(weights[i] for i in part) for part in parts) == min(sums)
    ties = [([1, 1, 1], 2), ([1, 1, 1, 1, 1], 3), ([4, 1, 1, 1], 3), ([0, 0, 0], 2)]
    begins = [[part.start for part in balanced(weights, count)] for weights, count in ties]
    assert begins == [[0, 1], [0, 1, 3], [0, 1, 2], [0, 1]], "the last stage has more"


@table("family", ["mamba", "falcon_mamba", "jamba"])
def test_stages_weigh_about_the_same(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches an embedding or a head that is not weighed, or weighed with the wrong stage: with a vocabulary like
    eleven layers, the layers are parted in the middle only if each end has one."""
    folder = tiny_checkpoint(family, num_hidden_layers=8, vocab_size=600)
    config = load_model_config(folder)
    with family_of(config).checkpoint(folder, CPU) as checkpoint:
        assert stage_layers(checkpoint, config, 1) == [range(8)]
        first, second = stage_layers(checkpoint, config, 2)
        assert (first.start, first.stop, second.stop) == (0, second.start, 8) and abs(len(first) - 4) <= 1
        assert [list(part) for part in stage_layers(checkpoint, config, 8)] == [[layer] for layer in range(8)]
        with pytest.raises(UsageError, match="--gpus 9: the model has 8 layers"):
            stage_layers(checkpoint, config, 9)


@table("tied", [True, False])
def test_the_embedding_weighs_on_the_first_stage_and_the_head_on_the_last(
    tied: bool, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a head that weighs nothing where it is the embedding, which the last device then has besides."""
    folder, taken = tiny_checkpoint("mamba", tie_word_embeddings=tied), list[list[int]]()
    monkeypatch.setattr("apcbatch.model.pipeline.balanced", lambda weights, count: taken.append(list(weights)))
    config = load_model_config(folder)
    with family_of(config).checkpoint(folder, CPU) as checkpoint:
        stage_layers(checkpoint, config, 2)
    sizes = {name: tensor.nbytes for name, tensor in weights_of(folder).items()}
    expected = [
        sum(size for name, size in sizes.items() if f".layers.{layer}." in name) for layer in range(config.num_layers)
    ]
    embedding = sizes["backbone.embeddings.weight"]
    assert ("lm_head.weight" in sizes) is not tied
    expected[0] += embedding
    expected[-1] += sizes["backbone.norm_f.weight"] + sizes.get("lm_head.weight", embedding)
    assert taken == [expected]


@pytest.fixture
def arenas(tiny_checkpoint: Callable[..., Path]) -> tuple[StateArena, SpreadArena]:
    """An arena of a hybrid model, and one in three stages with the same numbers."""
    layout = state_layout(load_model_config(tiny_checkpoint("jamba", num_hidden_layers=5)), "bfloat16")
    whole = StateArena(layout, 4, 6, CPU)
    stages = [StateArena(layout.among(part), 4, 6, CPU) for part in (range(1), range(1, 3), range(3, 5))]
    for tensor in (*whole.slots.values(), *whole.pages.values()):
        tensor.copy_(torch.randn(tensor.shape))
    for stage in stages:
        for layer in range(5):
            for name, part in stage.layer(layer).items():
                part.copy_(whole.layer(layer)[name])
    return whole, SpreadArena(layout, stages)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def copied(arena: SpreadArena, slot: int) -> Tensors:
    """A slot, copied to memory with other numbers in it."""
    host = slot_in_memory(arena.layout)
    for part in host.values():
        part.view(torch.uint8).fill_(255)
    arena.copy_out(slot, host, arena.mark())
    return host


def test_a_spread_arena_gives_and_takes_what_a_whole_one_does(arenas: tuple[StateArena, SpreadArena]) -> None:
    """Catches layers in another order, rows of another stage's, a stage that is left out or read before it has written,
    and a slot that is written to the store without the layers of other devices."""
    whole, spread = arenas
    reached: list[int] = []
    marks: Any = [SimpleNamespace(wait=lambda number=number: reached.append(number)) for number in range(3)]
    Marks(marks).wait()
    assert reached == [0, 1, 2] and not spread.on_host
    with pytest.raises(ValueError, match="slot 2 lies in 3 stages, in no one place; copy it out"):
        spread.host_slot(2)
    pages = torch.tensor([4, 0, 2])
    assert same(copied(spread, 2), whole.host_slot(2))
    assert same(spread.gather(pages, 10, 150), whole.gather(pages, 10, 150))
    assert same(spread.gather(pages, 10, 150, spread.mark()), whole.gather(pages, 10, 150))
    assert same(spread.shown(1, pages, 140), whole.shown(1, pages, 140))
    assert same(spread.shown(1, pages[:0], 0), whole.shown(1, pages[:0], 0))
    host = {name: torch.randn(part.shape).to(part.dtype) for name, part in whole.host_slot(0).items()}
    tokens = {name: torch.randn(part.shape).to(part.dtype) for name, part in whole.gather(pages, 0, 70).items()}
    for arena in (whole, spread):
        arena.copy_in(3, host | tokens).wait()
        arena.scatter(pages, 64, host | tokens)
        arena.copy_page(4, 5)
    for slot in range(4):
        assert same(copied(spread, slot), whole.host_slot(slot))
    assert same(spread.gather(torch.arange(6), 0, 6 * 64), whole.gather(torch.arange(6), 0, 6 * 64))


def test_each_stage_tells_whether_its_part_is_finite(arenas: tuple[StateArena, SpreadArena]) -> None:
    """Catches a stage that is not asked."""
    _, spread = arenas
    assert spread.finite([]) == []
    for stage in (0, 2):
        spread.stages[stage].slots["ssm"][stage, -1].view(-1)[-1] = torch.inf
    flags = [part.tolist() for part in spread.finite(range(4))]
    assert [all(slot) for slot in zip(*flags, strict=True)] == [False, True, False, True]


@dataclass
class Entering:
    """As much of a batch as a model in stages looks at."""

    chosen: torch.Tensor | None


def test_stages_run_one_after_the_other() -> None:
    """Catches a stage that is left out or begins with another one's numbers, tokens that a later stage looks up again,
    and the head, or the name of the arithmetic, of the wrong stage."""
    ran: list[tuple[int, bool, float | None]] = []

    def stage(number: int) -> Any:
        def forward(batch: Entering, entering: torch.Tensor | None) -> torch.Tensor:
            assert torch.is_inference_mode_enabled()
            ran.append((number, batch.chosen is not None, None if entering is None else entering.item()))
            return torch.tensor(10.0 + number)

        named = {name: f"{name} {number}" for name in ("fingerprint", "backend", "numerics", "weights_digest")}
        scored = lambda *given: (forward(*given), number)  # noqa: E731
        return SimpleNamespace(forward=forward, forward_scored=scored, head=lambda normed: normed + number, **named)

    for count in (2, 3):
        model = SpreadLM([stage(number) for number in range(count)], [CPU] * count)
        last, batch = count - 1, Entering(torch.zeros(1))
        assert (model.fingerprint, model.numerics) == ("fingerprint 0", "numerics 0")
        assert (model.backend, model.weights_digest) == (f"backend {last}", "weights_digest 0")
        assert model.forward(batch).item() == 10 + last  # type: ignore[arg-type]
        assert model.forward_scored(batch)[1] == last  # type: ignore[arg-type]
        passes = [(number, not number, 9.0 + number if number else None) for number in range(count)]
        assert ran == 2 * passes
        assert model.head(torch.ones(1)).item() == 1 + last
        ran.clear()


def test_gpus_that_compute_differently_are_refused(tiny_checkpoint: Callable[..., Path], arenas: Any) -> None:
    """Catches stages whose snapshots another run's GPUs would compute with other bits."""
    folder = tiny_checkpoint("mamba")
    backends: Any = [SimpleNamespace(numerics=lambda *_, name=name: name) for name in ("sm90", "sm80")]
    with pytest.raises(UsageError, match=r"--gpus 2: the GPUs compute differently \(sm80, sm90\)"):
        load_stages(None, load_model_config(folder), torch.float32, arenas[1], [range(1), range(1, 2)], backends)  # type: ignore[arg-type]


def test_a_tensor_that_goes_to_another_device_waits_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: memory that is used again while it is copied, a tensor that is read before it is there, or a stage that
    waits for later passes of another one."""
    tensor = torch.ones(3)
    assert Hop(CPU, CPU).send(tensor).receive() is tensor
    lines: list[str] = []
    current: list[Any] = []

    def noted(line: str) -> str:
        lines.append(line)
        return f"the {line}"

    def stream(device: object, purpose: str = "") -> Any:
        name = {"send": "leaving", "receive": "arriving", "": f"passes of {device}"}[purpose]
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: lines.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: lines.append(f"{name} waits for {event}"),
            record_event=lambda: noted(f"event on {name}"),
        )

    monkeypatch.setattr(peer_transfer, "own_stream", stream)
    hop = Hop(torch.device("cuda", 0), torch.device("cuda", 1))
    current.append("passes")
    monkeypatch.setattr(torch.cuda, "current_stream", stream)

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        current.append(stream.name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)

    def tensor(name: str, device: str) -> Any:
        def to(target: object, non_blocking: bool) -> Any:
            lines.append(f"{name} to {target} on {current[1:]}" + " async" * non_blocking)
            return tensor("copy", str(target))

        return SimpleNamespace(
            to=to, device=device, record_stream=lambda stream: lines.append(f"{name} is used by {stream.name}")
        )

    sent = hop.send(tensor("tensor", "cuda:0"))
    assert lines == [
        "leaving waits for passes of cuda:0",
        "tensor to cuda:1 on ['leaving', 'arriving'] async",
        "event on arriving",
        "tensor is used by leaving",
    ]
    lines.clear()
    assert sent.receive() is sent.tensor
    assert lines == ["passes of cuda:1 waits for the event on arriving", "copy is used by passes of cuda:1"]


def test_what_cannot_be_parted_is_refused(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a number of GPUs that is taken for another one, and a sentence that does not say what to do."""
    folder = tiny_checkpoint("mamba")
    with pytest.raises(UsageError, match="--gpus 2 spreads a model over GPUs, and it is to run on the CPU; leave it"):
        Engine(folder, device="cpu", gpus=2)
    for wrong in (0, -1, True, 1.0, 65):
        with pytest.raises(UsageError, match="gpus is .*; expected an integer from 1 to 64"):
            Engine(folder, gpus=wrong)
    monkeypatch.setattr("apcbatch.model.devices.choose_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="--gpus 3: 2 GPUs are visible to this process; .*CUDA_VISIBLE_DEVICES"):
        choose_devices("cuda", 3)
    assert choose_devices("cuda", 2) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choose_devices("cuda", 1) == [torch.device("cuda", 0)]


@table("family, name, changed, said", [
    ("jamba", "model.layers.2.mamba.D", lambda _: REMOVED, r"model\.layers\.2\.mamba\.D"),
    ("jamba", "model.layers.7.mamba.D", lambda _: torch.ones(3), r"model\.layers\.7\.mamba\.D"),
    ("mamba", "lm_head.weight", lambda embedding: embedding, None),
    ("mamba", "lm_head.weight", lambda embedding: embedding + 1, "lm_head.weight differs from the embedding"),
])  # fmt: skip
def test_every_tensor_is_asked_for_once(
    family: str, name: str, changed: Callable[[torch.Tensor], Any], said: str | None,
    tiny_checkpoint: Callable[..., Path], stages: Callable[[int], None], tmp_path: Path,
) -> None:  # fmt: skip
    """Catches a tensor that no stage takes, or that one takes twice, and a last stage that takes a stored head which is
    tied, or compares it with nothing."""
    folder = tiny_checkpoint(family)
    folder = with_weights(folder, tmp_path / "m", {name: changed(weights_of(folder).get("backbone.embeddings.weight"))})
    stages(2)
    with nullcontext() if said is None else pytest.raises(ModelError, match=said):
        assert Engine(folder).fingerprint


def test_each_tensor_and_each_kernel_is_on_the_device_of_its_stage(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a layer's weights lie on another device than its state, or a kernel is launched on another one."""
    config, entered = load_model_config(tiny_checkpoint("mamba")), list[int]()
    gpus = [torch.device("cuda", number) for number in range(2)]

    checkpoint: Any = SimpleNamespace()
    monkeypatch.setattr("apcbatch.model.pipeline.CausalLM", Mock(side_effect=InterruptedError))
    backends: Any = [SimpleNamespace(numerics=lambda *_: "same")] * 2
    arena: Any = SimpleNamespace(stages=[SimpleNamespace(device=device) for device in gpus])
    with pytest.raises(InterruptedError):
        load_stages(checkpoint, config, torch.float32, arena, [range(1), range(1, 11)], backends)
    device_of = checkpoint.device_of
    names = ["embeddings.weight", "layers.0.mixer.D", "layers.1.mixer.D", "layers.10.norm.weight", "norm_f.weight"]
    assert [device_of(f"backbone.{name}").index for name in names] == [0, 0, 1, 1, 1]
    assert device_of("lm_head.weight") == gpus[1]

    def on(device: torch.device) -> Any:
        entered.append(device.index)
        return nullcontext()

    sent = SimpleNamespace(receive=lambda: torch.ones(1))
    monkeypatch.setattr("apcbatch.model.pipeline._on", on)
    monkeypatch.setattr("apcbatch.model.pipeline.Hop", lambda *devices: SimpleNamespace(send=lambda tensor: sent))
    run = lambda *given: torch.ones(1)  # noqa: E731
    stages: Any = [Mock(forward=run, forward_scored=run, head=run) for _ in range(3)]
    model, batch = SpreadLM(stages, [*gpus, torch.device("cuda", 2)]), Entering(None)
    model.forward(batch)  # type: ignore[arg-type]
    model.forward_scored(batch)  # type: ignore[arg-type]
    model.head(torch.ones(1))
    assert entered == [0, 1, 2, 0, 1, 2, 2]
