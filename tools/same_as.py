"""Prove that a change moves no bit: `python -m tools.same_as REV [--only TEXT] [--device cuda]`.

Builds REV into build/same_as, plays STEPS with it and with the working tree, each in a folder of its own, and compares
exit codes, records (as a set), the JSON of summaries and plans, and the bytes of snapshots. TIMES lists the keys that
are times or follow from them. Exit status 1 if anything differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import click

from tests.soak.settings import FIRST_ID, LAST_ID
from tests.tiny import FAMILIES, save_tiny

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
WORK = ROOT / "build" / "same_as"
SECONDS_A_STEP = 600
# Keys whose values are times, sizes of a process or counts that follow from times, wherever they stand.
TIMES = {
    "created", "prefill_ms", "decode_ms", "begin_s", "end_s", "seconds", "prefill_tokens_per_s", "decode_tokens_per_s",
    "peak_rss_bytes", "peak_device_bytes", "peak_draft_bytes", "drafts", "drafts_saved_s", "tokens_per_pass",
    "drafted_tokens", "accepted_tokens", "peak_live_snapshots", "predicted_prefill_s", "version",
}  # fmt: skip
# What the second process of a killed run restores depends on the moment of the kill.
REUSE = {"cached_tokens", "cached_from", "computed_tokens", "boundary", "miss_reason", "prompt_tokens_details"}
MESSAGES = [{"role": "user", "content": "Name three colours and a number."}]
SCHEMA = {"properties": {"colour": {"enum": ["red", "dark green"]}, "count": {"type": "integer"}}, "type": "object",
          "required": ["colour", "count"], "additionalProperties": False}  # fmt: skip
LINES: dict[str, list[dict[str, Any]]] = {
    "asked": [
        {"id": "n", "messages": MESSAGES, "n": 3, "temperature": 0.8, "seed": 7},
        {"id": "top", "messages": MESSAGES, "temperature": 1, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
        {"id": "stop", "messages": MESSAGES, "stop": ["the", "\n\n"], "frequency_penalty": 0.5},
        {"id": "json", "messages": MESSAGES, "response_format": {"type": "json_object"}},
        {"id": "wrong", "messages": [{"role": "asistant", "content": "Hello."}]},
        {"id": "schema", "messages": MESSAGES,
         "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
    ],
    "ids": [
        {"custom_id": f"i-{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, "logprobs": 2}}
        for n, prompt in enumerate(
            [FIRST_ID + i * i % (LAST_ID - FIRST_ID) for i in range(length)] + [FIRST_ID + length] * (length % 3)
            for length in (1, 15, 64, 65, 130, 257, 300, 300)
        )
    ],
}  # fmt: skip


class Step(NamedTuple):
    """A command. {data}, {examples}, {lines} and {models} are folders, {out} has the step's name. kill_at: lines of OUT
    at which the process is killed; the same command then runs with --resume."""

    name: str
    command: str
    kill_at: int = 0


def _run(source: str, max_tokens: int, dtype: str, options: str) -> str:
    """Return a command of `run` that gives each option whose default may change."""
    given = f"--device {{device}} --dtype {dtype} --max-tokens {max_tokens} --overwrite -q"
    return f"run {source} -o {{out}} --summary {{out}}.summary {given} {options}"


def _chats(options: str) -> str:
    return _run("{examples}/agents.jsonl", 12, "float32", f"--limit 12 {options}")


STEPS = [
    *(Step(f"{name}-{turns}", _run(f"{{data}}/{name}.jsonl", 4, "float32", f"--limit 6 --turns {turns}"))
      for name in ("tau_bench", "toolbench_dfs", "taskmaster4") for turns in ("each", "last", "rollout")),
    *(Step(f"policy-{policy}", _chats(f"--policy {policy} --block-size 48 --draft none --store policy-{policy}"))
      for policy in ("all", "last", "planned", "none")),
    Step("warm-store", _chats("--policy all --block-size 48 --draft none --store policy-all")),
    Step("another-block-size", _chats("--policy all --block-size 100 --draft none --store policy-all")),
    Step("drafts", _chats("--draft auto --logprobs")),
    Step("no-drafts", _chats("--draft none --logprobs")),
    Step("draws-in-chunks", _chats("--temperature 0.9 --seed 3 --max-batch-tokens 100 --max-running 3 --threads 1")),
    Step("a-small-pool", _chats("--policy all --block-size 16 --pool-size 2MiB --draft none --max-running 2")),
    Step("scores", _chats("--score --top-logprobs 3")),
    Step("jamba", _chats("--model demo-jamba --store jamba --draft none --logprobs")),
    Step("settings", _run("{lines}/asked.jsonl", 40, "float32", "--logprobs")),
    Step("strict", _run("{lines}/asked.jsonl", 8, "float32", "--strict")),
    Step("killed", _chats("--store killed --draft none --max-running 2"), kill_at=9),
    Step("plan", "plan {examples}/agents.jsonl --json {out} --dtype float32"),
    Step("show", "show {examples}/agents.jsonl --line 2 --turn 1"),
    *(Step(f"{family}-{dtype}-{draft}",
           _run("{lines}/ids.jsonl", 9, dtype, f"--model {{models}}/{family} --store {family}-{dtype} "
                f"--draft {draft} --block-size 16 --policy all --logprobs"))
      for family in FAMILIES for dtype in ("float32", "bfloat16") for draft in ("none", "lookup")),
]  # fmt: skip


@click.command()
@click.argument("revision")
@click.option("--only", default="", help="Play the steps alone whose names have this text.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
def same_as(revision: str, only: str, device: str) -> None:
    """Compare what REVISION and the working tree compute; exit status 1 if a bit, a count or an exit code differs."""
    folders = {"data": DATA, "examples": ROOT / "examples", "lines": WORK / "lines", "models": WORK / "models"}
    (WORK / "lines").mkdir(parents=True, exist_ok=True)
    for name, lines in LINES.items():
        (WORK / "lines" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for family in FAMILIES:  # without a tokenizer
        if not (WORK / "models" / family).is_dir():
            save_tiny(WORK / "models" / family, family, 1, {"vocab_size": LAST_ID + 400})
    trees, different, played = {"then": _built(revision, device), "now": ROOT}, 0, 0
    for name in trees:
        shutil.rmtree(WORK / name, ignore_errors=True)
        (WORK / name).mkdir()
    for step in STEPS:
        if only not in step.name or ("{data}" in step.command and not DATA.is_dir()):
            continue
        for name, tree in trees.items():
            _play(step, tree, WORK / name, device=device, **folders)
        differences = _differences(step)
        played, different = played + 1, different + bool(differences)
        click.echo(f"{'DIFFERS' if differences else 'same':<8}{step.name}")
        for line in differences:
            click.echo(f"        {line:.300}")
    stores = {path for path, _ in _snapshots(WORK / "then").items() ^ _snapshots(WORK / "now").items()}
    for path in sorted(stores):
        click.echo(f"DIFFERS snapshot {path}")
    click.echo(f"{played} steps, {different} differ; {len(stores)} snapshots differ")
    sys.exit(bool(different or stores or not played))


def _built(revision: str, device: str) -> Path:
    """Build a commit's package into a folder named by commit and device, unless it is there; return the folder."""
    commit = subprocess.check_output(["git", "-C", ROOT, "rev-parse", f"{revision}^{{commit}}"], text=True).strip()
    built, source = WORK / f"{commit[:12]}-{device}", WORK / "source"
    if not built.is_dir():
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        archive = subprocess.check_output(["git", "-C", ROOT, "archive", commit])
        subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", WORK / "half-built", source]
        subprocess.run(pip, check=True, env=os.environ | {"APCBATCH_CUDA": str(int(device == "cuda"))})
        (WORK / "half-built").rename(built)
    return built


def _play(step: Step, tree: Path, folder: Path, **names: Any) -> None:
    """Run a step's command with a tree; write its exit code and, of `show`, what it prints."""
    out = f"{step.name}.jsonl"
    command = [sys.executable, "-m", "apcbatch", *step.command.format(**names, out=out).split()]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("APCBATCH_")}
    where: dict[str, Any] = {"cwd": folder, "env": {**kept, "PYTHONPATH": str(tree)}}
    if step.kill_at:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **where)
        while process.poll() is None and len(_lines(folder / out)) < step.kill_at:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        command = ["--resume" if word == "--overwrite" else word for word in command]
    ended = subprocess.run(command, capture_output=True, timeout=SECONDS_A_STEP, **where)
    (folder / f"{out}.exit").write_text(str(ended.returncode))
    if ended.returncode not in (0, 1, 3):
        click.echo(f"        exit status {ended.returncode}: {ended.stderr.decode()[-1000:]}")
    if step.command.startswith("show"):
        (folder / f"{out}.printed").write_bytes(ended.stdout)


def _differences(step: Step) -> list[str]:
    """Return what differs between the files that a step left, a line each; of a killed step the records alone."""
    found, keys = [], TIMES | (REUSE if step.kill_at else set())
    for suffix in ("", ".exit") if step.kill_at else ("", ".exit", ".summary", ".printed"):
        name = f"{step.name}.jsonl{suffix}"
        before, after = (_content(WORK / tree / name, keys) for tree in ("then", "now"))
        for which, lines in (("then", before - after), ("now", after - before)):
            found += [f"{which}: {name}: {line}" for line in sorted(lines.elements())[:2]]
    return found


def _content(path: Path, keys: set[str]) -> Counter[str]:
    """Return the lines of a file without some keys of its JSON; empty if there is no file."""
    lines = _lines(path)
    documents = ["\n".join(lines)] if lines[:1] == ["{"] else lines
    try:
        return Counter(json.dumps(_without(json.loads(one), keys), sort_keys=True) for one in documents)
    except ValueError:
        return Counter(lines)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, keys) for key, one in value.items() if key not in keys}
    return [_without(one, keys) for one in value] if isinstance(value, list) else value


def _snapshots(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each snapshot file below a folder by its path, but for those of a killed run."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*.safetensors")}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if name[:6] != "killed"}


if __name__ == "__main__":
    same_as()
