"""transformers as an engine to be compared, on the path that it takes on a CPU: python hugging_face.py FOLDER DTYPE
THREADS. Logits are asked for at the last position only; decoding is `generate`, greedy, on one batch."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from protocol import answer, tokens_of
from transformers import AutoModelForCausalLM


class HuggingFace:
    """One model."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._vocabulary = self._model.config.vocab_size

    @torch.inference_mode()
    def prefill(self, tokens: list[int]) -> float:
        ids = torch.tensor([tokens])
        begin = time.perf_counter()
        self._model(ids, logits_to_keep=1, use_cache=True)
        return time.perf_counter() - begin

    def decode(self, running: int, prompt: int, new: int) -> float:
        ids = torch.tensor([tokens_of(i, prompt, self._vocabulary) for i in range(running)])
        return self._generate(ids, 1 + new)[0] - self._generate(ids, 1)[0]

    def greedy(self, tokens: list[int], new: int) -> list[int]:
        return self._generate(torch.tensor([tokens]), new)[1][0, len(tokens) :].tolist()

    @torch.inference_mode()
    def _generate(self, ids: torch.Tensor, new: int) -> tuple[float, torch.Tensor]:
        begin = time.perf_counter()
        made = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new, max_new_tokens=new
        )
        return time.perf_counter() - begin, made


def main() -> None:
    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    answer(HuggingFace(Path(folder), dtype))


if __name__ == "__main__":
    main()
