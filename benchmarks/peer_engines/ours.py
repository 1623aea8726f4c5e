"""apcbatch as an engine to be compared: python ours.py FOLDER DTYPE THREADS."""

from __future__ import annotations

import sys

from bench.server import Server, serving
from protocol import answer, tokens_of

from apcbatch.config import Config
from apcbatch.types import Request


class Ours:
    """Requests to one engine without a cache."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def prefill(self, tokens: list[int]) -> float:
        return self._server.serve([tokens])["wall"]

    def decode(self, running: int, prompt: int, new: int) -> float:
        prompts = [tokens_of(i, prompt, self._server.engine.vocab_size) for i in range(running)]
        return self._server.serve(prompts, 1 + new)["decode"]

    def greedy(self, tokens: list[int], new: int) -> list[int]:
        [result] = self._server.engine.run([Request("greedy", tokens, max_tokens=new, ignore_eos=True)])
        return result.token_ids


def main() -> None:
    import torch

    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    with serving(Config(model=folder, dtype=dtype), "none", max_running=128) as server:
        answer(Ours(server))


if __name__ == "__main__":
    main()
