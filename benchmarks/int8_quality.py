"""What products of 8-bit integers would cost in answers: the bundled models in transformers, with rounded products.

    python benchmarks/int8_quality.py examples/agents.jsonl --out benchmarks/results/int8_quality.json

Weights have a scale for each output, rows of activations one each, found as they come: the arithmetic of
int8_products.cpp. Every matrix of the layers and the head is rounded. Over the same tokens: the mean log-probability of
the next one, and how often the likeliest one is float32's. The last line is the document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from apcbatch.bench.datasets import requests_in
from apcbatch.config import Config
from apcbatch.model.locate import locate_model

MODELS = ("demo", "demo-jamba")
PROMPT = 3072  # the most tokens of a conversation, whose last request has its whole history


def as_int8(rows: torch.Tensor) -> torch.Tensor:
    """(..., in) rounded to 255 steps of its own a row."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return torch.round(rows / scale) * scale


@contextmanager
def rounded(model: torch.nn.Module, weights: Callable[[torch.Tensor], torch.Tensor], rows: bool) -> Iterator[None]:
    """The model with other weights in its matrices, and 8-bit rows before them, while it lasts."""
    matrices = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    before = [part.weight.data for part in matrices]
    hooks = []
    for part in matrices:
        part.weight.data = weights(part.weight.data)
        if rows:
            hooks.append(part.register_forward_pre_hook(lambda _, inputs: (as_int8(inputs[0]), *inputs[1:])))
    try:
        yield
    finally:
        for part, weight in zip(matrices, before, strict=True):
            part.weight.data = weight
        for hook in hooks:
            hook.remove()


VARIANTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "float32": (lambda weight: weight, False),
    "bfloat16 weights": (lambda weight: weight.bfloat16().float(), False),
    "int8 weights": (as_int8, False),
    "int8 weights and rows": (as_int8, True),
}


@torch.inference_mode()
def judged(model: torch.nn.Module, prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token after the first of a prompt: its log-probability, and the likeliest token in its place."""
    logprobs, likeliest = [], []
    for prompt in prompts:
        logits = model(prompt[None]).logits[0, :-1].float()
        logprobs.append(logits.log_softmax(-1).gather(1, prompt[1:, None])[:, 0])
        likeliest.append(logits.argmax(-1))
    return torch.cat(logprobs), torch.cat(likeliest)


def figures(name: str, input: str, limit: int) -> dict[str, Any]:
    """One model: every variant."""
    config = replace(Config(model=name), limit=limit)
    histories = [list(map(int, request.token_ids)) for request in requests_in(config, input)]
    following = [*histories[1:], []]
    last = [tokens for tokens, after in zip(histories, following, strict=True) if after[: len(tokens)] != tokens]
    prompts = [torch.tensor(tokens[:PROMPT]) for tokens in last]
    model = AutoModelForCausalLM.from_pretrained(locate_model(name), dtype=torch.float32).eval()
    found: dict[str, Any] = {}
    likeliest = None
    for variant, (weights, rows) in VARIANTS.items():
        with rounded(model, weights, rows):
            logprobs, chosen = judged(model, prompts)
        likeliest = chosen if likeliest is None else likeliest
        same = float((chosen == likeliest).double().mean())
        found[variant] = {"mean_logprob": float(logprobs.double().mean()), "same_likeliest": same}
        print(f"{name}, {variant}: {json.dumps(found[variant])}", flush=True)
    return {"model": name, "tokens": sum(len(prompt) - 1 for prompt in prompts), "variants": found}


def main() -> None:
    """Measure and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input")
    parser.add_argument("--limit", type=int, default=6, help="conversations; default: %(default)s")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    document = {"models": [figures(name, options.input, options.limit) for name in MODELS]}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
