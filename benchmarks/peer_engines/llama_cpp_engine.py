"""llama.cpp as an engine to be compared, through llama-cpp-python's low-level functions: python llama_cpp_engine.py
FILE.gguf THREADS.

Many sequences decode in one llama_batch, as its server and llama-batched-bench do. Must not know: apcbatch; it runs
in an interpreter of its own.
"""

from __future__ import annotations

import ctypes
import sys
import time

import llama_cpp as api
import numpy as np
from protocol import answer, tokens_of

MOST_SEQUENCES = 32
CONTEXT = 8192 + 1024


class LlamaCpp:
    """One model and one context of many sequences."""

    def __init__(self, path: str, threads: int) -> None:
        api.llama_backend_init()
        self._log = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._log, ctypes.c_void_p(0))
        model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not model:
            raise SystemExit(f"{path} is not a model that llama.cpp can load; convert it with to_gguf.py")
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        parameters = api.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = CONTEXT, 2048, 512
        parameters.n_seq_max = MOST_SEQUENCES
        parameters.kv_unified = True
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = api.llama_init_from_model(model, parameters)
        self._batch = api.llama_batch_init(2048, 0, 1)

    def prefill(self, tokens: list[int]) -> float:
        self._clear()
        begin = time.perf_counter()
        self._prompt(0, tokens)
        self._likeliest(1)
        return time.perf_counter() - begin

    def decode(self, running: int, prompt: int, new: int) -> float:
        self._clear()
        tokens = []
        for sequence in range(running):
            self._prompt(sequence, tokens_of(sequence, prompt, self._vocabulary))
            tokens += self._likeliest(1)
        begin = time.perf_counter()
        for step in range(new):
            self._run([(token, prompt + step, i, True) for i, token in enumerate(tokens)])
            tokens = self._likeliest(running)
        return time.perf_counter() - begin

    def greedy(self, tokens: list[int], new: int) -> list[int]:
        self._clear()
        self._prompt(0, tokens)
        made = self._likeliest(1)
        while len(made) < new:
            self._run([(made[-1], len(tokens) + len(made) - 1, 0, True)])
            made += self._likeliest(1)
        return made

    def _clear(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self._context), True)

    def _prompt(self, sequence: int, tokens: list[int]) -> None:
        """Logits for the last token alone."""
        last = len(tokens) - 1
        for begin in range(0, len(tokens), 2048):
            part = tokens[begin : begin + 2048]
            self._run([(token, begin + i, sequence, begin + i == last) for i, token in enumerate(part)])

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """One llama_batch of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        code = api.llama_decode(self._context, batch)
        if code:
            raise SystemExit(f"llama_decode returned {code} for a batch of {len(entries)} tokens")

    def _likeliest(self, rows: int) -> list[int]:
        """Of the last batch's logits, which lie one row after the other."""
        logits = np.ctypeslib.as_array(api.llama_get_logits(self._context), (rows, self._vocabulary))
        return [int(token) for token in logits.argmax(axis=1)]


def main() -> None:
    path, threads = sys.argv[1:]
    answer(LlamaCpp(path, int(threads)))


if __name__ == "__main__":
    main()
