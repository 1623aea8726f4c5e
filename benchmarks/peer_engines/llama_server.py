"""llama.cpp's own server with its prompt cache on: started, asked, ended.

Must not know: where prompts come from. Prompts are token ids, answered greedily by a fixed number of tokens, one
request for each slot of the server at a time, begun in the order given.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 60.0


class LlamaServer:
    """A server that runs, on a port of this machine."""

    def __init__(self, port: int, slots: int) -> None:
        self._url, self._slots = f"http://127.0.0.1:{port}", slots

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Wall seconds of all prompts, and the tokens that the server computed and took from its cache."""
        begin = time.perf_counter()
        with ThreadPoolExecutor(self._slots) as clients:
            replies = list(clients.map(lambda prompt: self._complete(prompt, new_tokens), prompts))
        return {
            "seconds": time.perf_counter() - begin,
            "computed_tokens": sum(reply["timings"]["prompt_n"] for reply in replies),
            "completion_tokens": sum(reply["timings"]["predicted_n"] for reply in replies),
        }

    def _complete(self, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
        body = {
            "prompt": [int(token) for token in prompt],
            "n_predict": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
        }
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as reply:
            return json.load(reply)

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Until the model is loaded; SystemExit where that does not come."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise SystemExit(f"llama-server did not come up in {START_S:.0f} s (status {process.poll()})")


@contextmanager
def serving(binary: Path, model: Path, threads: int, slots: int, context_tokens: int) -> Iterator[LlamaServer]:
    """A server with a number of slots, each with room for context_tokens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(binary), "--model", str(model), "--port", str(port), "--host", "127.0.0.1"]
    command += [
        "--threads",
        str(threads),
        "--parallel",
        str(slots),
        "--ctx-size",
        str(slots * context_tokens),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = LlamaServer(port, slots)
        server.wait(process)
        yield server
    finally:
        process.terminate()
        process.wait()
