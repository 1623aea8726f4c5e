"""Training over batches of conversations, on one device, for a number of steps or of minutes.

Must not know: what conversations are about, files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Queue
from threading import Thread

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model.batches import Batch
from demo_model.network import MambaMixer, Mlp, Network
from demo_model.optimizers import optimizers
from demo_model.recipe import Recipe
from demo_model.shapes import Shape

REPORT_STEPS = 50
WAITING = 8  # batches that are on their way to the device


@dataclass
class Progress:
    """What training has done so far. losses: (step, seconds, mean loss of the assistant's tokens since the last)."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    done: bool = False
    losses: list[tuple[int, float, float]] = field(default_factory=list)


def weighted_loss(hidden: Tensor, embedding: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The loss to be learnt from, and that of the assistant's tokens alone, in nats a token."""
    dtype = torch.bfloat16 if hidden.is_cuda else torch.float32
    logits = F.linear(hidden[:, :-1].to(dtype), embedding.to(torch.bfloat16).to(dtype))
    losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    answers = (weights == 1).float()
    return (losses * weights).sum() / weights.sum(), (losses * answers).sum() / answers.sum().clamp(min=1)


def on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches as tensors of the device, taken ahead by a thread of its own."""
    queue: Queue[tuple[Tensor, Tensor] | Exception] = Queue(WAITING)

    def fill() -> None:
        try:
            for batch in batches:
                pair = torch.from_numpy(batch.ids.astype("int32")), torch.from_numpy(batch.weights)
                queue.put(pair if device.type == "cpu" else (pair[0].pin_memory(), pair[1].pin_memory()))
        except Exception as error:  # raised again by who waits for the batch
            queue.put(error)

    Thread(target=fill, daemon=True).start()
    while True:
        taken = queue.get()
        if isinstance(taken, Exception):
            raise taken
        ids, weights = taken
        yield ids.to(device, non_blocking=True).long(), weights.to(device, non_blocking=True)


def train(
    shape: Shape,
    recipe: Recipe,
    batches: Iterator[Batch],
    device: torch.device,
    report: Callable[[Network, Progress], None],
) -> tuple[Network, Progress]:
    """A network from nothing; report is called every REPORT_STEPS steps and after the last."""
    torch.manual_seed(recipe.seed)
    network = Network(shape).to(device)
    loss_of = weighted_loss
    if device.type == "cuda":
        for module in network.modules():
            if isinstance(module, (MambaMixer, Mlp)):  # each kind is compiled once for all layers
                module.compile(dynamic=True)
        loss_of = torch.compile(weighted_loss, dynamic=True)
    learners = optimizers(network, recipe.muon_rate, recipe.adam_rate, recipe.betas)
    progress, since = Progress(), torch.zeros(2, device=device)
    stream = on_device(batches, device)
    begin = time.perf_counter()
    done = 0.0
    while done < 1:
        ids, weights = next(stream)
        share = recipe.rate_share(progress.steps, done)
        for learner, rate in zip(learners, (recipe.muon_rate, recipe.adam_rate), strict=True):
            for group in learner.param_groups:
                group["lr"] = rate * share
        hidden, balance = network(ids)
        loss, answers = loss_of(hidden, network.embedding, ids, weights)
        (loss + recipe.router_balance * balance).backward()
        nn.utils.clip_grad_norm_(network.parameters(), recipe.largest_gradient)
        for learner in learners:
            learner.step()
            learner.zero_grad(set_to_none=True)
        since += torch.stack((answers.detach(), torch.ones((), device=device)))
        progress.steps += 1
        progress.tokens += ids.numel()
        progress.seconds = time.perf_counter() - begin
        done = max(progress.steps / recipe.steps, progress.seconds / (60 * recipe.minutes))
        if progress.steps % REPORT_STEPS == 0 or done >= 1:
            mean = (since[0] / since[1]).item()
            progress.seconds = time.perf_counter() - begin
            progress.losses.append((progress.steps, progress.seconds, mean))
            since.zero_()
            progress.done = done >= 1
            report(network, progress)
    return network, progress


def print_progress(progress: Progress) -> None:
    """One line on stderr."""
    step, seconds, loss = progress.losses[-1]
    rate = progress.tokens / seconds
    print(f"step {step}: loss {loss:.4f}, {rate / 1e3:.0f} k tokens/s, {seconds:.0f} s", file=sys.stderr, flush=True)
