"""Batches of tokens: conversations rendered by the model's own template, weighted, and put beside those of like length.

Workers make the text while the network learns. The order of the batches depends on the seed alone, whatever the number
of workers. Must not know: the network.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from conversations import conversation
from transformers import AutoTokenizer

from demo_model.recipe import Recipe
from demo_model.renamed import renamed
from demo_model.tokenizer import CONTROL, END, ROLES

ROLE_IDS = np.array([CONTROL.index(role) for role in ROLES])
ASSISTANT_ID = CONTROL.index("<|assistant|>")
PIECE = 64  # conversations that a worker makes at a time
POOL = 2048  # conversations that are sorted by length together
ROUND = 64  # rows are padded to a multiple of it
SYSTEMS = 256  # beginnings whose ids a worker remembers
AHEAD = 4  # pieces that wait for each worker

Ids = npt.NDArray[np.uint16]
Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """ids (rows, tokens) uint16, padded with 0; weights (rows, tokens): that of predicting the token, 0 for padding."""

    ids: Ids
    weights: Weights


class Encoder:
    """Token ids of conversations, by the tokenizer and the template of a model folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._system = lru_cache(SYSTEMS)(self._encode)  # many conversations share theirs

    def ids(self, record: dict[str, Any]) -> Ids:
        """The ids of a whole conversation (a line of JSONL)."""
        text = self._tokenizer.apply_chat_template(record["messages"], tools=record["tools"] or None, tokenize=False)
        system, end, rest = text.partition(END)  # control tokens part what is encoded
        return np.concatenate((self._system(system + end), self._encode(rest)))

    def _encode(self, text: str) -> Ids:
        return np.array(self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)


def is_answer(ids: Ids) -> npt.NDArray[np.bool_]:
    """Which tokens the assistant writes: what follows <|assistant|>, with the <|end|> after it."""
    at = np.arange(len(ids))
    is_role = np.isin(ids, ROLE_IDS)
    last_role = np.maximum.accumulate(np.where(is_role, at, -1))  # position of the role that a token is under
    found: npt.NDArray[np.bool_] = (ids[np.maximum(last_role, 0)] == ASSISTANT_ID) & (last_role >= 0) & ~is_role
    return found


_encoder: Encoder | None = None  # of a worker's process


def _start(folder: Path) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = Encoder(folder)


def _piece(seed: str, index: int) -> list[Ids]:
    assert _encoder is not None
    return [_encoder.ids(renamed(conversation(seed, i).record())) for i in range(index * PIECE, (index + 1) * PIECE)]


def encoded(folder: Path, seed: str, workers: int) -> Iterator[list[Ids]]:
    """Pieces of PIECE conversations of the seed, in their order, without end."""
    with multiprocessing.get_context("spawn").Pool(workers, _start, (folder,)) as pool:
        waiting = deque(pool.apply_async(_piece, (seed, index)) for index in range(workers * AHEAD))
        index = len(waiting)
        while True:
            yield waiting.popleft().get()
            waiting.append(pool.apply_async(_piece, (seed, index)))
            index += 1


def batches(folder: Path, recipe: Recipe, workers: int) -> Iterator[Batch]:
    """The batches of a recipe, without end: at first of short conversations only, as copying is learnt faster there."""
    rng = Random(recipe.conversations)
    pool: list[Ids] = []
    count = 0
    for piece in encoded(folder, recipe.conversations, workers):
        longest = recipe.short if count < recipe.short_steps else recipe.longest
        pool += (ids for ids in piece if len(ids) <= longest)
        if len(pool) >= POOL:
            made = [_batch(rows, recipe.context_weight) for rows in _of_like_length(pool, recipe.batch_tokens)]
            rng.shuffle(made)
            yield from made
            count += len(made)
            pool = []


def _of_like_length(pool: list[Ids], batch_tokens: int) -> Iterator[list[Ids]]:
    rows: list[Ids] = []
    for ids in sorted(pool, key=len):
        if rows and (len(rows) + 1) * _padded(len(ids)) > batch_tokens:
            yield rows
            rows = []
        rows.append(ids)
    if len(rows) > 1:  # a batch of one row would be compiled for itself
        yield rows


def _padded(tokens: int) -> int:
    return -(-tokens // ROUND) * ROUND


def _batch(rows: list[Ids], context_weight: float) -> Batch:
    shape = (len(rows), _padded(max(map(len, rows))))
    ids, weights = np.zeros(shape, np.uint16), np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        weights[i, : len(row)] = np.where(is_answer(row), 1.0, context_weight)
    return Batch(ids, weights)
