"""vLLM as an engine to be compared: python vllm_engine.py FOLDER DTYPE MOST_TOKENS SETTINGS.

Prompts are token ids; its compilation and graphs are its own defaults. MOST_TOKENS: of a prompt and its answer.
SETTINGS: further arguments of vllm.LLM as a JSON object. Must not know: apcbatch; it runs in an interpreter of its own.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import vllm
from protocol import answer

MOST_RUNNING = 128


class Vllm:
    """One model on the current CUDA device."""

    def __init__(self, folder: str, dtype: str, most_tokens: int, settings: dict[str, Any]) -> None:
        begin = time.perf_counter()
        self._model = vllm.LLM(
            folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=most_tokens,
            max_num_seqs=MOST_RUNNING,
            **{"enable_prefix_caching": False, **settings},
        )
        self._loading = time.perf_counter() - begin

    def facts(self) -> dict[str, Any]:
        """What runs, where, and the seconds until it could."""
        names = {"version": vllm.__version__, "torch": torch.__version__, "device": torch.cuda.get_device_name()}
        return {**names, "loading": self._loading}

    def serve(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Seconds until all prompts have `new` tokens, and the prompts' tokens that were computed."""
        how = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = self._model.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)
        seconds = time.perf_counter() - begin
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return {"seconds": seconds, "computed_tokens": sum(map(len, prompts)) - cached}


def main() -> None:
    folder, dtype, most_tokens, settings = sys.argv[1:]
    answer(Vllm(folder, dtype, int(most_tokens), json.loads(settings)))


if __name__ == "__main__":
    main()
