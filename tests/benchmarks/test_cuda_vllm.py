"""How vLLM is asked, against one that only counts: what reaches it, and what of its replies becomes the document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TORCH = """
__version__ = "0"
class cuda:
    get_device_name = staticmethod(lambda: "A card")
"""

VLLM = """
import json, os, time
__version__ = "9.9"

def note(**what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(what) + "\\n")

class SamplingParams:
    def __init__(self, **how):
        self.how = how

class Output:
    def __init__(self, prompt):
        self.num_cached_tokens = len(prompt["prompt_token_ids"]) // 2

class LLM:
    def __init__(self, model, **settings):
        self.settings = settings
        note(model=model, settings=settings)

    def generate(self, prompts, how, use_tqdm):
        note(lengths=[len(prompt["prompt_token_ids"]) for prompt in prompts], how=how.how)
        print("what an engine prints")
        time.sleep(1e-4 * how.how["max_tokens"])
        return [Output(prompt) for prompt in prompts]
"""


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of what reaches vLLM, a line for each."""
    peers = tmp_path / "peers"
    peers.mkdir()
    (peers / "vllm.py").write_text(VLLM)
    notes = tmp_path / "notes.jsonl"
    monkeypatch.setenv("NOTES", str(notes))
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH="{peers}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    (peers / "torch.py").write_text(TORCH)
    return notes


def test_what_is_asked_and_kept(counting: Path, tmp_path: Path) -> None:
    """Faults: a peer that may stop early or is asked with its cache on for the passes and off for the run; a figure
    that is not kept; a setting that is left out; the slowest run counted."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": [{"role": "user", "content": t}]}) + "\n" for t in ("one", "two")))
    out = tmp_path / "vllm.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "cuda_vllm.py"), str(ROOT / "apcbatch" / "demo")]
    command += ["--vllm-python", str(tmp_path / "python"), "--input", str(chats), "--out", str(out)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    document = json.loads(out.read_text())
    assert document["engine"] == "vLLM 9.9" and "A card" in document["how"]
    [figures] = document["models"].values()
    prefills = {f"prefill {shape}" for shape in ("1 x 2048", "1 x 8192", "1 x 32768", "16 x 512", "64 x 128")}
    assert set(figures) == {"loading", *prefills, *(f"decode {running}" for running in (1, 8, 32, 128))}
    assert all(value > 0 for value in figures.values())
    assert len(document["runs"]) == 6
    assert document["run"] == min(run["seconds"] for run in document["runs"])

    notes = [json.loads(line) for line in counting.read_text().splitlines()]
    opened = [note["settings"] for note in notes if "settings" in note]
    assert [settings["enable_prefix_caching"] for settings in opened] == [False] + 6 * [True]
    assert len({json.dumps(settings) for settings in opened[1:]}) == 6
    asked = [note for note in notes if "how" in note]
    assert all(note["how"]["ignore_eos"] and note["how"]["temperature"] == 0.0 for note in asked)
    assert [32768] in [note["lengths"] for note in asked] and 64 * [128] in [note["lengths"] for note in asked]
    for run in document["runs"]:
        assert run["requests"] == 2
        lengths = asked[-1]["lengths"]
        assert run["computed_tokens"] == sum(length - length // 2 for length in lengths)
