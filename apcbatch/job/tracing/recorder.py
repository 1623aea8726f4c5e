"""Record a run from the events of its engine, and keep the trace beside OUT up to date.

Invariants: the trace changes no answer; a trace that cannot be written causes a warning and never ends the run; its
memory is bounded; writing it takes a bounded share of the processor time (TIMES_ITS_COST).
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from apcbatch.config import Config
from apcbatch.engine.observer import KeptSnapshot, StepFacts
from apcbatch.job.disk import BackgroundCall
from apcbatch.job.tracing.edge_rows import Decode, edge_columns
from apcbatch.job.tracing.edges import TraceTree
from apcbatch.job.tracing.segment import End, Segment
from apcbatch.job.tracing.timeline import Timeline
from apcbatch.job.tracing.trace_file import TraceFile
from apcbatch.job.work import JobEngine
from apcbatch.prefix import TokenArray
from apcbatch.types import CachedFrom
from apcbatch.version import VERSION

WORKER = "main"
FIRST_WRITE_S = 2.0
WRITE_EVERY_S = 30.0
TIMES_ITS_COST = 400  # minimum processor time between two writes, in multiples of what the last write took
MAX_WORDS = 256
MAX_CHARACTERS = 4_096


class RunTrace:
    """Observer that records the engine of one run and writes the trace to `file`.

    program: words of the command that started the run. input: INPUT as it is shown. continue_command: command that
    continues the run if the process is killed. decode: returns the text of token ids, special tokens as text.
    elapsed_s: returns the seconds since the run began. warn: called once if the trace cannot be written.
    """

    def __init__(
        self,
        file: TraceFile,
        engine: JobEngine,
        config: Config,
        program: Sequence[str],
        input: str,
        continue_command: str,
        *,
        decode: Decode,
        elapsed_s: Callable[[], float],
        warn: Callable[[str], None],
    ) -> None:
        self._file, self._decode, self._elapsed_s, self._warn = file, decode, elapsed_s, warn
        self._timeline, self._tree = Timeline(), TraceTree()
        self._next_write_s, self._write_every_s = elapsed_s() + FIRST_WRITE_S, FIRST_WRITE_S
        self._written_at_s = self._cost_s = 0.0  # processor seconds
        self._has_warned = False
        self._background = BackgroundCall()
        self._first_segment = Segment(
            version=VERSION,
            begin=time.time() - elapsed_s(),
            worker=WORKER,
            program=_shortened(program),
            input=_plain(input),
            options=[(name, _plain(value), config.origins[name]) for name, value in config.values().items()],
            model=_plain(config.model),
            fingerprint=engine.fingerprint,
            dtype=engine.dtype,
            device=engine.device,
            machine=describe_machine(engine.device),
            passes=self._timeline.columns(),
            edges=edge_columns(self._tree.root, decode),
            continue_command=_plain(continue_command, None),
            end=None,
        )

    # Methods of Observer

    def stepped(self, facts: StepFacts) -> None:
        self._timeline.add(facts, self._elapsed_s())

    def answered(self, tokens: TokenArray, cached_tokens: int, source: CachedFrom) -> None:
        self._tree.answered(tokens, cached_tokens, source)

    def kept(self, tokens: TokenArray, snapshots: Sequence[KeptSnapshot]) -> None:
        self._tree.kept(tokens, snapshots, self._elapsed_s())

    def dropped(self, key: bytes, evicted: bool) -> None:
        self._tree.removed(key, evicted, self._elapsed_s() if evicted else 0.0)

    # Called by the job

    def add_failure(self) -> None:
        """Count an error record."""
        self._timeline.add_failure()

    def write_if_due(self) -> None:
        """Write the trace in the background, unless a write is in progress or the last one is too recent: the next
        write waits for a number of seconds, and until this thread has used TIMES_ITS_COST times the processor time of
        the last write."""
        begin = time.thread_time()
        if self._elapsed_s() < self._next_write_s or begin - self._written_at_s < TIMES_ITS_COST * self._cost_s:
            return
        if self._background.is_busy:
            return
        segment = self._segment()
        self._written_at_s = time.thread_time()
        self._cost_s = self._written_at_s - begin
        self._background.begin(lambda: self._write_counted(segment))
        self._write_every_s = min(2 * self._write_every_s, WRITE_EVERY_S)
        self._next_write_s = self._elapsed_s() + self._write_every_s

    def end(self, exit_code: int, continue_command: str | None, summary: dict[str, Any]) -> None:
        """Write the final trace of a run that has ended. continue_command: None if nothing is left to do."""
        self._background.finish()
        end = End(self._elapsed_s(), exit_code, _plain(summary, None))
        self._write(replace(self._segment(), continue_command=_plain(continue_command, None), end=end))

    def close(self) -> None:
        """Wait for a running write."""
        self._background.finish()

    def _segment(self) -> Segment:
        edges = edge_columns(self._tree.root, self._decode)
        return replace(self._first_segment, passes=self._timeline.columns(), edges=edges)

    def _write_counted(self, segment: Segment) -> None:
        begin = time.thread_time()
        self._write(segment)
        self._cost_s += time.thread_time() - begin

    def _write(self, segment: Segment) -> None:
        try:
            self._file.write(segment)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"{self._file.path} cannot be written: {error.strerror}; a report of this run shows less")


def _shortened(words: Sequence[str]) -> list[str]:
    """Return the words of a command, at most MAX_WORDS of them, each of at most MAX_CHARACTERS."""
    more = [f"... {len(words) - MAX_WORDS} more"] * (len(words) > MAX_WORDS)
    return [*(_plain(word) for word in words[:MAX_WORDS]), *more]


def _plain(value: Any, most: int | None = MAX_CHARACTERS) -> Any:
    """Return a value that JSON can hold: bytes of a name that are not UTF-8 are replaced, and texts are cut after
    `most` characters."""
    if isinstance(value, dict):
        return {key: _plain(one, most) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, most) for one in value]
    if not isinstance(value, str):
        return value
    text = value if most is None or len(value) <= most else value[:most] + "..."
    return text.encode("utf-8", "replace").decode()


def describe_machine(device: str) -> dict[str, Any]:
    """Describe the machine for a segment, None for unknown values; torch is asked only if it is already imported."""
    torch, isa = sys.modules.get("torch"), sys.modules.get("apcbatch.kernels.processor")
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": None if torch is None else torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": torch.cuda.get_device_name() if torch is not None and device == "cuda" else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": None if torch is None else str(torch.__version__),
        "instructions": None if isa is None else isa.isa(),
    }


def processor() -> str:
    """Return the processor's name, as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
