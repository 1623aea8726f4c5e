"""Every key of a line of OUT.trace.jsonl, with its type and its meaning: a table of docs/reference/formats.md.

The keys of a segment are the fields of apcbatch/job/tracing/segment.py. tests/job/test_output_keys.py compares the
table with the traces of real runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from apcbatch.job.tracing.segment import EdgeColumns, End, PassColumns, Segment, key_of
from tools.output_keys import Key

_INSIDE = {"PassColumns": PassColumns, "EdgeColumns": EdgeColumns, "End | None": End}
_TYPES = {
    "str": "string",
    "str | None": "string or null",
    "int": "integer",
    "float": "number",
    "list[int]": "list of integers",
    "list[float]": "list of numbers",
    "list[float | None]": "list of times",
    "list[str]": "list of strings",
    "list[tuple[str, Any, str]]": "list",
    "dict[str, Any]": "object",
    "PassColumns": "object",
    "EdgeColumns": "object",
    "End | None": "object or null",
}
_MACHINE = (
    Key("segment.machine.cpu", "string", "the processor"),
    Key("segment.machine.cores", "integer", "that the process might use"),
    Key("segment.machine.threads", "integer or null", "of torch"),
    Key("segment.machine.memory_bytes", "integer", "of the machine"),
    Key("segment.machine.gpu", "string or null", "the CUDA device, if one was used"),
    Key("segment.machine.system", "string", "system, release and architecture"),
    Key("segment.machine.python", "string", "its version"),
    Key("segment.machine.torch", "string or null", "its version"),
    Key("segment.machine.instructions", "string or null", "the instruction set of the CPU kernels"),
)


def _keys(kind: type[Any], path: str) -> Iterator[Key]:
    """The fields of a dataclass, and of those inside it."""
    for one in dataclasses.fields(kind):
        below, type_ = f"{path}.{key_of(one)}", str(one.type)
        yield Key(below, _TYPES[type_], one.metadata["meaning"])
        if one.name == "machine":
            yield from _MACHINE
        elif type_ in _INSIDE:
            yield from _keys(_INSIDE[type_], below)


TRACE: tuple[Key, ...] = (
    Key("format", "integer", "1"),
    Key("missing", "integer", "older segments that were dropped to keep the file below 8 MiB, if any were"),
    Key("segment", "object", "what one process did"),
    *_keys(Segment, "segment"),
)
