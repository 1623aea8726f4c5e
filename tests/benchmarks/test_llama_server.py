"""What is sent to llama.cpp's server, against one that only counts: every prompt once, in order, with its cache on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.peer_engines.llama_server import LlamaServer


@pytest.fixture
def counting() -> Iterator[tuple[int, list[dict]]]:
    """(port, the bodies of the requests that came)."""
    bodies: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            timings = {"prompt_n": len(body["prompt"]) - 1, "predicted_n": body["n_predict"]}
            reply = json.dumps({"timings": timings}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *arguments: object) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_one_slot_keeps_the_order(counting: tuple[int, list[dict]]) -> None:
    """Faults: a peer that is asked without its cache, in another order, or to stop where it likes."""
    port, bodies = counting
    prompts = [[1] * count for count in (5, 3, 9)]
    found = LlamaServer(port, slots=1).answer(prompts, 16)
    assert [body["prompt"] for body in bodies] == prompts
    assert all(body["cache_prompt"] and body["ignore_eos"] and body["temperature"] == 0 for body in bodies)
    assert found["computed_tokens"] == 14 and found["completion_tokens"] == 48
    assert found["seconds"] > 0


def test_many_slots_answer_all(counting: tuple[int, list[dict]]) -> None:
    """Fault: a prompt that is lost or sent twice where several are under way."""
    port, bodies = counting
    LlamaServer(port, slots=8).answer([[number] for number in range(30)], 1)
    assert sorted(body["prompt"][0] for body in bodies) == list(range(30))
