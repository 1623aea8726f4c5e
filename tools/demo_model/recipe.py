"""The recipe of the bundled models: every number that decides what training makes, and its digest.

Must not know: torch.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass

from conversations import conversation
from examples_text.script import to_json

from demo_model.renamed import renamed
from demo_model.shapes import Shape

SAMPLE = 200  # conversations that the digest covers


@dataclass(frozen=True)
class Recipe:
    """batch_tokens: a step's, padding included. muon_rate, adam_rate: the highest learning rates. minutes: when
    training ends, if it has not made its steps by then. longest, short: tokens of a conversation at most, in all steps
    and in the first short_steps. context_weight: of tokens that the assistant does not write, beside 1 for its own."""

    seed: int = 20261122
    conversations: str = "train"
    steps: int = 20_000
    minutes: float = 8.3
    batch_tokens: int = 1 << 16
    longest: int = 6144
    short: int = 1536
    short_steps: int = 600
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    last_rate: float = 0.02  # as a share of the highest
    warm_up_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    largest_gradient: float = 1.0
    context_weight: float = 0.1
    router_balance: float = 0.01

    def rate_share(self, step: int, progress: float) -> float:
        """The learning rates of a step as a share of the highest: a linear warm-up, then a cosine. progress: how much
        of the training is done, 0 to 1."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))
        return min(1.0, (step + 1) / self.warm_up_steps) * (self.last_rate + (1 - self.last_rate) * cosine)


def digest(recipe: Recipe, shape: Shape) -> str:
    """Hexadecimal digest of the numbers, the shape and a sample of the conversations: another one is another model."""
    hasher = hashlib.sha256(to_json([asdict(recipe), asdict(shape)]).encode())
    for index in range(SAMPLE):
        hasher.update(to_json(renamed(conversation(recipe.conversations, index).record())).encode())
    return hasher.hexdigest()
