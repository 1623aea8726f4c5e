"""RunTrace: gathers what one run does, as the engine tells it, and keeps the trace beside OUT up to date.

Must not know: how the file is kept whole (see trace_file.py), what is drawn from it. Invariants: it changes no answer
and ends no run, for a trace that cannot be written is a warning; its memory is bounded; writing takes at most a small
share of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from apcbatch.config import Config
from apcbatch.engine.observer import KeptSnapshot, StepFacts
from apcbatch.job.beside import Beside
from apcbatch.job.engine import JobEngine
from apcbatch.job.machine import describe_machine
from apcbatch.job.segment import End, Segment
from apcbatch.job.stem_rows import Decode, stem_rows
from apcbatch.job.stems import StemTree
from apcbatch.job.timeline import Timeline
from apcbatch.job.trace_file import TraceFile
from apcbatch.prefix import TokenArray
from apcbatch.types import CachedFrom
from apcbatch.version import VERSION

WORKER = "main"
FIRST_WRITE_S = 2.0
WRITE_EVERY_S = 30.0
TIMES_ITS_COST = 400  # the least processor time between two writes, in times of what the last one took
MOST_WORDS = 256
MOST_CHARACTERS = 4_096


@dataclass(frozen=True)
class Setting:
    """What is known of a run when it begins. program: the words that started it. input: as it is shown.
    continue_command: what goes on if the process is killed."""

    program: Sequence[str]
    input: str
    config: Config
    continue_command: str


class RunTrace:
    """An Observer of one run's engine. decode: the text of token ids, special tokens as text. elapsed_s: seconds since
    the run began. warn: is told, once, that the trace cannot be written."""

    def __init__(
        self,
        file: TraceFile,
        setting: Setting,
        engine: JobEngine,
        decode: Decode,
        elapsed_s: Callable[[], float],
        warn: Callable[[str], None],
    ) -> None:
        self._file, self._decode, self._elapsed_s, self._warn = file, decode, elapsed_s, warn
        self._timeline, self._tree = Timeline(), StemTree()
        self._next_write_s, self._write_every_s = elapsed_s() + FIRST_WRITE_S, FIRST_WRITE_S
        self._written_at_s = self._cost_s = 0.0  # of processor time
        self._has_warned = False
        self._beside = Beside()
        config = setting.config
        self._facts: dict[str, Any] = {
            "version": VERSION,
            "begin": time.time() - elapsed_s(),
            "worker": WORKER,
            "program": _shortened(setting.program),
            "input": _plain(setting.input),
            "options": [(name, _plain(value), config.origins[name]) for name, value in config.values().items()],
            "model": _plain(config.model),
            "fingerprint": engine.fingerprint,
            "dtype": engine.dtype,
            "device": engine.device,
            "machine": describe_machine(engine.device),
            "continue_command": _plain(setting.continue_command, None),
        }

    # As an Observer

    def stepped(self, facts: StepFacts) -> None:
        self._timeline.add(facts, self._elapsed_s())

    def answered(self, tokens: TokenArray, cached_tokens: int, source: CachedFrom) -> None:
        self._tree.answered(tokens, cached_tokens, source)

    def kept(self, tokens: TokenArray, snapshots: Sequence[KeptSnapshot]) -> None:
        self._tree.kept(tokens, snapshots, self._elapsed_s())

    def let_go(self, key: bytes, evicted: bool) -> None:
        self._tree.let_go(key, evicted, self._elapsed_s() if evicted else 0.0)

    # As the job tells it

    def failed(self) -> None:
        """An error record was written."""
        self._timeline.add_failure()

    def keep_safe(self) -> None:
        """Write what there is if that was last done a while ago."""
        begin = time.thread_time()
        if self._elapsed_s() < self._next_write_s or begin - self._written_at_s < TIMES_ITS_COST * self._cost_s:
            return
        if self._beside.is_busy:
            return
        segment = self._segment(None)
        self._written_at_s = time.thread_time()
        self._cost_s = self._written_at_s - begin
        self._beside.begin(lambda: self._write_counted(segment))
        self._write_every_s = min(2 * self._write_every_s, WRITE_EVERY_S)
        self._next_write_s = self._elapsed_s() + self._write_every_s

    def end(self, exit_code: int, continue_command: str | None, summary: dict[str, Any]) -> None:
        """The run is over. continue_command: None if nothing is left to do."""
        self._beside.finish()
        self._facts["continue_command"] = _plain(continue_command, None)
        self._write(self._segment(End(self._elapsed_s(), exit_code, _plain(summary, None))))

    def close(self) -> None:
        """Nothing more is written, however the run has ended."""
        self._beside.finish()

    def _segment(self, end: End | None) -> Segment:
        stems = stem_rows(self._tree.root, self._decode)
        return Segment(**self._facts, passes=self._timeline.passes(), stems=stems, end=end)

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
    """The words of a command, not more of them nor longer ones than a reader wants."""
    more = [f"... {len(words) - MOST_WORDS} more"] * (len(words) > MOST_WORDS)
    return [*(_plain(word) for word in words[:MOST_WORDS]), *more]


def _plain(value: Any, most: int | None = MOST_CHARACTERS) -> Any:
    """A value as JSON can hold it: bytes of a name that are not UTF-8 are replaced. A text of more than `most`
    characters is cut, none if that is None."""
    if isinstance(value, dict):
        return {key: _plain(one, most) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, most) for one in value]
    if not isinstance(value, str):
        return value
    text = value if most is None or len(value) <= most else value[:most] + "..."
    return text.encode("utf-8", "replace").decode()
