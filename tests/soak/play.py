"""Plays one draw through the command line: the cold run, then every way, each compared with it bit for bit."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import apcbatch
from apcbatch.cli.program import main
from apcbatch.data.tokenization.tokenizer import load_tokenizer
from apcbatch.kernels.processor import available_isas, numerics, set_isa
from apcbatch.kernels.processor import isa as isa_in_use
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.store.writer import Batch, Writer
from tests.model.quantized import quantised
from tests.soak.compare import Difference, compare, compare_reuse, num_prompt, read_records
from tests.soak.settings import FIRST_ID, LAST_ID, MOST_NEW, STRUCTURES
from tests.soak.ways import COLD, WRONG_ANSWERS, Draw, Kill, Part, Way, out_of
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
DEMO = Path(apcbatch.__file__).parent / "demo"
BEST_ISA_SHARE = 0.8
AMPLE_BYTES, SMALL_BYTES = 64 << 20, 60_000
UNSEEN_TOKENS = 500  # of a template and generated turns, which are not in a line


@dataclass
class Tally:
    """How much was compared, how much of the prompts was restored meanwhile, and how many of the answers' tokens were
    drafted, and accepted."""

    draws: int = 0
    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, other: Tally) -> None:
        for one in fields(Tally):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def add_records(self, records: list[dict[str, Any]]) -> None:
        """Add the answers of a way."""
        self.answers += len(records)
        for record in records:
            told = record["apcbatch"] or {}
            self.prompt_tokens += num_prompt(record)
            self.cached_tokens += told.get("cached_tokens", 0)
            self.new_tokens += record["response"]["body"]["usage"]["completion_tokens"] if record["response"] else 0
            self.drafted_tokens += told.get("drafted_tokens", 0)
            self.accepted_tokens += told.get("accepted_tokens", 0)


class Player:
    """Plays draws in a folder, which keeps the checkpoints and the files of the latest draw."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self._folder, self.device = folder, device
        self._threads, self._isa = torch.get_num_threads(), isa_in_use()

    def play(self, draw: Draw) -> Tally:
        """Compare every way with the cold run; Difference says which commands were run and what differs first."""
        try:
            return self._play(draw)
        finally:
            torch.set_num_threads(self._threads)
            set_isa(self._isa)

    def _play(self, draw: Draw) -> Tally:
        table, tally = _Table(self._folder, draw, self.device), Tally(draws=1)
        try:
            cold = table.cold()
            for number, way in enumerate(draw.ways):
                records = table.run(way, out_of(number))
                compare(cold, records)
                table.check_exit_code()
                tally.add_records(records)
                if way.holds_plan:
                    compare_reuse(table.without_drafts(way, f"plain-{number}.jsonl"), records)
        except Difference as difference:
            raise Difference(f"{difference}\nin {table.folder}:\n" + "\n".join(table.commands)) from None
        return tally


class _Table:
    """One draw's files, and the commands that were run on them."""

    def __init__(self, folder: Path, draw: Draw, device: str) -> None:
        self.commands: list[str] = []
        self.folder = folder / "draw"
        self._draw, self._device = draw, device
        self._model = _checkpoint(folder, draw.family, draw.weights_seed)
        if draw.form:
            self._model = _quantised(self._model, draw.form)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        (self.folder / "in.jsonl").write_text("\n".join(draw.lines) + "\n")
        dtype = getattr(torch, draw.dtype)
        self._page_bytes = state_layout(load_model_config(self._model), draw.dtype).page_bytes
        isas = available_isas()
        self._cold_isa = _pick(isas, draw.isa_rank)
        arithmetic = _arithmetic(self._cold_isa, dtype)
        self._isas = [isa for isa in isas if _arithmetic(isa, dtype) == arithmetic]
        self._least_pool = 0
        self._num_records = 0
        self._cold_code = self._latest_code = 0

    def cold(self) -> list[dict[str, Any]]:
        """The records of the run without any cache, one request after the other."""
        options = {"policy": "none", "max_running": "1", "max_batch_tokens": "8192", "order": "file", "draft": "none"}
        options["weights"] = "decoded"
        options["pool_size"] = str(AMPLE_BYTES)
        self._cold_code = self._call(options, 1, self._cold_isa, COLD)
        records = read_records(self.folder / COLD)
        failed = [record["error"] for record in records if record["error"] and record["error"]["retryable"]]
        if failed:
            raise Difference(f"the cold run could not answer: {failed[0]}")
        longest = max((self._most_prompt(record) for record in records), default=0)
        # A sequence that runs alone may fill twice the pool's size with KV; a request may need copies of the last page
        # of a snapshot and, for several answers, of its prompt.
        pages = 2 - -(longest + MOST_NEW) // PAGE_TOKENS
        self._least_pool = -(-pages * self._page_bytes // 2)
        self._num_records = len(records)
        self._write_wrong_answers(records)
        return records

    def _most_prompt(self, record: dict[str, Any]) -> int:
        """Prompt tokens of a request; for one that failed, perhaps after its prompt, more than it can have."""
        if record["error"] and record["custom_id"] is not None:
            return len(self._draw.lines[record["line"] - 1]) + UNSEEN_TOKENS
        return num_prompt(record)

    def _write_wrong_answers(self, records: list[dict[str, Any]]) -> None:
        """Write the OUT of a run whose answers leave the cold run's at one token in eight."""
        draw = Random(self._draw.seed)
        changed = copy.deepcopy([record for record in records if record["error"] is None])
        for record in changed:
            ids = record["apcbatch"]["completion_token_ids"]
            for answer in ids if ids and isinstance(ids[0], list) else [ids]:
                answer[:] = [draw.randrange(FIRST_ID, LAST_ID) if draw.random() < 1 / 8 else one for one in answer]
        (self.folder / WRONG_ANSWERS).write_text("".join(json.dumps(record) + "\n" for record in changed))
        shutil.copy(self.folder / f"{COLD}.run.json", self.folder / f"{WRONG_ANSWERS}.run.json")

    def run(self, way: Way, out: str) -> list[dict[str, Any]]:
        """The records of a way."""
        if way.damage:
            self._spoil_stores()
        if way.ending == "killed":
            for part, kill in zip(way.parts, way.kills, strict=False):
                self._kill(part, out, kill)
        elif way.ending == "torn":
            self._part(way.parts[0], out)
            whole = (self.folder / out).read_bytes()
            (self.folder / out).write_bytes(whole[: int(way.cut * len(whole))])
            self.commands.append(f"truncate -s {int(way.cut * len(whole))} {out}")
        last = way.parts[-1]
        self._part(last, out, "--resume")
        records = read_records(self.folder / out)
        if "ordered" in last.options and [r["id"] for r in records] != sorted(r["id"] for r in records):
            raise Difference("--ordered: the lines are not in the order of the input")
        return records

    def without_drafts(self, way: Way, out: str) -> list[dict[str, Any]]:
        """The records of a way's last part, run again from the beginning without drafts."""
        part = way.parts[-1]
        kept = {name: value for name, value in part.options.items() if not name.startswith("draft")}
        self._part(replace(part, options={**kept, "draft": "none"}), out)
        return read_records(self.folder / out)

    def check_exit_code(self) -> None:
        """The latest way must have ended as the cold run did."""
        if self._latest_code != self._cold_code:
            raise Difference(f"exit code {self._latest_code}; the cold run's was {self._cold_code}")

    def _part(self, part: Part, out: str, *flags: str) -> None:
        with _slow_writes(part.write_delay):
            self._latest_code = self._call(self._options(part), part.threads, self._isa(part), out, *flags)
        if part.write_delay:
            self.commands[-1] += f"  # {part.write_delay} s before each write of the store"

    def _call(self, options: dict[str, str], threads: int, isa: str, out: str, *flags: str) -> int:
        """Run a command line in this process; its exit code."""
        arguments = self._arguments(options, out, *flags)
        self.commands.append(_as_command(arguments, threads, isa))
        torch.set_num_threads(threads)
        with _environment(isa), _inside(self.folder), _captured() as (_, said):
            code = main(arguments)
        if code not in (0, 3):
            raise Difference(f"exit code {code}: {said.getvalue()[-2000:]}")
        return code

    def _kill(self, part: Part, out: str, kill: Kill) -> None:
        """Start a process and kill it when OUT has this share of the lines that are left, unless it ends first."""
        path = self.folder / out
        there = _num_lines(path)
        lines = there + max(1, round(kill.share * (self._num_records - there)))
        arguments = self._arguments(self._options(part), out, "--resume")
        self.commands.append(f"{_as_command(arguments, part.threads, self._isa(part))}  # killed at {lines}")
        with _environment(self._isa(part), OMP_NUM_THREADS=str(part.threads), PYTHONPATH=str(ROOT)):
            process = subprocess.Popen(
                [sys.executable, "-m", "apcbatch", *arguments], cwd=self.folder,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
        while process.poll() is None and _num_lines(path) < lines:
            time.sleep(0.001)
        time.sleep(kill.seconds)
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[1].decode(errors="replace")
        if process.returncode not in (self._cold_code, -signal.SIGKILL):
            raise Difference(f"exit code {process.returncode}: {said[-2000:]}")

    def _options(self, part: Part) -> dict[str, str]:
        pools = {"least": self._least_pool, "small": self._least_pool + SMALL_BYTES, "ample": AMPLE_BYTES}
        return {**part.options, "pool_size": str(pools[part.pool])}

    def _arguments(self, options: dict[str, str], out: str, *flags: str) -> list[str]:
        given = {"model": str(self._model), "dtype": self._draw.dtype, "device": self._device}
        given |= {**self._draw.generation, **options}
        words = ["run", "in.jsonl", "-o", out, "-q", "--progress", "none", "--logprobs", *flags]
        for name, value in given.items():
            words += ["--" + name.replace("_", "-")] + [value] * (value != "")
        return words

    def _isa(self, part: Part) -> str:
        return _pick(self._isas, part.isa_rank)

    def _spoil_stores(self) -> None:
        """Change a byte in the middle of one file of each store, or cut the file there."""
        for store in sorted(self.folder.glob("states-*")):
            files = sorted(store.rglob("*.safetensors"))
            if files:
                path = files[self._draw.seed % len(files)]
                middle = path.stat().st_size // 2
                content = path.read_bytes()
                tail = bytes([content[middle] ^ 1]) + content[middle + 1 :] if self._draw.seed % 2 else b""
                path.write_bytes(content[:middle] + tail)
                self.commands.append(f"# spoilt: {path.relative_to(self.folder)}, byte {middle}")


def _pick(isas: list[str], rank: float) -> str:
    """Mostly the last, which is the fastest: plain code takes ten times as long."""
    return isas[int((rank - BEST_ISA_SHARE) / (1 - BEST_ISA_SHARE) * len(isas))] if rank >= BEST_ISA_SHARE else isas[-1]


def _arithmetic(isa: str, dtype: torch.dtype) -> str:
    """What an instruction set computes: answers are the same bits where this is the same. It stays set."""
    set_isa(isa)
    return numerics(dtype)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _checkpoint(folder: Path, family: str, seed: int) -> Path:
    """A tiny checkpoint with the bundled model's tokenizer and template; its answers end with some words, of those that
    no form of an answer needs."""
    made = folder / f"{family}-{seed}"
    if not made.is_dir():
        vocab_size = json.loads((DEMO / "config.json").read_text())["vocab_size"]
        decode, forms = load_tokenizer(DEMO).decode, json.dumps(STRUCTURES)
        words = {number: decode([number]).strip() for number in range(10, LAST_ID, 31)}
        ending = [number for number, word in words.items() if len(word) > 1 and word.islower() and word not in forms]
        save_tiny(made, family, seed, {"vocab_size": vocab_size, "eos_token_id": [2, *ending]})
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(DEMO / name, made / name)
    return made


def _quantised(folder: Path, form: str) -> Path:
    """A copy of a checkpoint with random quantised weights."""
    made = folder.with_name(f"{folder.name}-{form.replace(' ', '-').replace(',', '')}")
    if not made.is_dir():
        quantised(folder, made, form)
    return made / "encoded"


@contextlib.contextmanager
def _environment(isa: str, **variables: str) -> Iterator[None]:
    """The process's environment with this instruction set, and no other option of apcbatch from outside."""
    before: Mapping[str, str] = dict(os.environ)
    for name in [name for name in before if name.startswith("APCBATCH_")]:
        del os.environ[name]
    os.environ.update(variables, APCBATCH_ISA=isa)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _slow_writes(seconds: float) -> Iterator[None]:
    """Stores in this process wait so long before each write: what waits for it may be dropped or used meanwhile."""
    store = Writer._store

    def wait_and_store(self: Writer, batch: Batch) -> None:
        time.sleep(seconds)
        store(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "_store", wait_and_store)
        yield


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        yield out, err


def _as_command(arguments: list[str], threads: int, isa: str) -> str:
    return f"APCBATCH_ISA={isa} OMP_NUM_THREADS={threads} apcbatch {shlex.join(arguments)}"
