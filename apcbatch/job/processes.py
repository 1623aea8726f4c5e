"""Entries of the processes that worked on an OUT, in its run file: what each one ran, and how it ended.

The metadata of a field has its meaning; docs/reference/formats.md is made from them. Invariants: the entries of a run
file are bounded in number and in bytes; an entry that was read matches its types, with finite numbers from 0 on.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import orjson

from apcbatch.cores import processor_name

MOST_PROCESSES = 64
MOST_BYTES = 1 << 20  # of all entries, as JSON
MOST_FIELD_BYTES = 1 << 16  # of a field of the summary; a larger one is left out
MOST_CHARACTERS = 4_096  # of a text
MOST_COMMAND_CHARACTERS = 1 << 15
_LARGEST_MEASURE = 2.0**40  # in seconds; a page can show each value as a date


def _means(meaning: str) -> Mapping[str, str]:
    return {"meaning": meaning}


@dataclass(frozen=True, slots=True)
class End:
    """End of a process: its duration, exit status and summary."""

    seconds: float = field(metadata=_means("seconds from its begin to its end"))
    exit_code: int = field(metadata=_means("the exit status"))
    summary: dict[str, Any] = field(metadata=_means("the [summary](#the-summary), without what is longer than 64 KiB"))


@dataclass(frozen=True, slots=True)
class Process:
    """One process that worked on OUT."""

    version: str = field(metadata=_means("version of apcbatch"))
    begin: float = field(metadata=_means("when it began, in seconds since 1970 (UTC)"))
    command: str = field(metadata=_means("the command, without secrets"))
    input: str = field(metadata=_means("INPUT as given"))
    options: list[tuple[str, Any, str]] = field(
        metadata=_means("name, value and origin of each option that was not left at its default")
    )
    model: str = field(metadata=_means("`--model`"))
    dtype: str = field(metadata=_means("`--dtype`, `auto` resolved"))
    device: str = field(metadata=_means("`cpu` or `cuda`"))
    machine: dict[str, Any] = field(metadata=_means("null for what is not known"))
    continue_command: str | None = field(
        metadata=_means("the command that continues the run; null if nothing is left to do, or if it is very long")
    )
    end: End | None = field(
        metadata=_means("null while it works, if it was killed, and if the run file could not be written any more")
    )


def plain(value: Any, most: int = MOST_CHARACTERS) -> Any:
    """Return a value that JSON can hold: bytes of a name that are not UTF-8 are replaced, and texts are cut after
    `most` characters."""
    if isinstance(value, dict):
        return {plain(key, most): plain(one, most) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, most) for one in value]
    if not isinstance(value, str):
        return value
    return (value if len(value) <= most else value[:most] + "...").encode("utf-8", "replace").decode()


def describe_machine(device: str) -> dict[str, Any]:
    """Describe the machine of a process, None for unknown values; torch is asked only if it is already imported."""
    torch, isa = sys.modules.get("torch"), sys.modules.get("apcbatch.kernels.processor")
    return {
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": None if torch is None else torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": torch.cuda.get_device_name() if torch is not None and device == "cuda" else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": None if torch is None else str(torch.__version__),
        "instructions": None if isa is None else isa.isa(),
    }


def make_end(seconds: float, exit_code: int, summary: Mapping[str, Any]) -> End:
    """Make the end of a process from its summary; a field of more than MOST_FIELD_BYTES is left out."""
    short = {name: plain(value) for name, value in summary.items()}
    kept = {name: value for name, value in short.items() if len(orjson.dumps(value)) <= MOST_FIELD_BYTES}
    return End(seconds, exit_code, kept)


def continuing(command: str | None) -> str | None:
    """Return a command for an entry; None for one that is too long, since a part of it would do something else."""
    return command if command is not None and len(command) <= MOST_COMMAND_CHARACTERS else None


def bounded(entries: list[Any]) -> list[Any]:
    """Return the latest entries, as many as the bounds allow, and at least the last one."""
    kept, room = entries[-MOST_PROCESSES:], MOST_BYTES
    for at in reversed(range(len(kept))):
        room -= len(orjson.dumps(kept[at]))
        if room < 0:
            return kept[min(at + 1, len(kept) - 1) :]
    return kept


def process_of(found: Any) -> Process:
    """Return the process of an entry that was read; ValueError if the entry does not match its types."""
    if not isinstance(found, Mapping):
        raise ValueError("it is no object")
    values: dict[str, Any] = {}
    for one in dataclasses.fields(Process):
        value = found.get(one.name)
        if not _CHECKS[one.name](value):
            raise ValueError(f"its {one.name} is not what was expected")
        values[one.name] = value
    end = values["end"]
    return Process(**values | {"end": None if end is None else End(**{name: end[name] for name in _END})})


def is_seconds(value: object) -> TypeGuard[float]:
    """Return whether a value is a number of seconds that can be added up and shown."""
    return type(value) in (int, float) and 0 <= value <= _LARGEST_MEASURE  # type: ignore[operator]


def _are_options(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[2], str) for row in value
    )


def _is_end(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and is_seconds(value.get("seconds"))
        and type(value.get("exit_code")) is int
        and isinstance(value.get("summary"), dict)
    )


_END = tuple(one.name for one in dataclasses.fields(End))
_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("version", "command", "input", "model", "dtype", "device"), lambda value: isinstance(value, str)),
    "begin": is_seconds,
    "options": _are_options,
    "machine": lambda value: isinstance(value, dict),
    "continue_command": lambda value: value is None or isinstance(value, str),
    "end": _is_end,
}
