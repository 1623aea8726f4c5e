"""Join the OUTs of all shards of a run to one OUT, ALL, as one process would have written it.

Invariants: ALL has every request of INPUT once, and appears whole or not at all; all parts are of the same input,
options, model and arithmetic. Lines stay as they are, but for their times, which count from the begin of the first
shard. Memory: two bytes for each request, and one line.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from apcbatch.address import is_stream
from apcbatch.config import OPTIONS
from apcbatch.errors import UsageError
from apcbatch.job.disk import Disk, replacing
from apcbatch.job.out_file import OutFile
from apcbatch.job.output import Output, check_out, check_run_file, packed
from apcbatch.job.output_paths import STDOUT
from apcbatch.job.processes import bounded, is_seconds
from apcbatch.job.record import line_of, read_record, record_number, request_id
from apcbatch.job.runfile import as_json, cut, differences, read_run_file, run_file_path, shard_requests
from apcbatch.job.sink import FileSink
from apcbatch.option_values import parse_value
from apcbatch.resolution import DEFAULT

MOST_NAMED = 5
MAY_DIFFER = ("shard", "template_clock")  # the clock may differ, as no prompt contains it


@dataclass(frozen=True)
class Part:
    """The OUT of one shard. facts: of its run file. shard: its number, from 1, of num_shards. requests: numbers of
    requests of INPUT and of the shard; None while it is not finished."""

    out: OutFile
    facts: Mapping[str, Any]
    shard: int
    num_shards: int
    requests: tuple[int, int] | None

    @property
    def shown(self) -> str:
        """Its name and its shard."""
        return f"{self.out.name} (shard {self.shard}/{self.num_shards})"


def check_all(output: Output, overwrite: bool) -> None:
    """Raise UsageError if ALL is no file, or would replace a file that is not an OUT with its run file."""
    if output.target == STDOUT or is_stream(output.target):
        raise UsageError(f"{output.name} is no file; give -o a file, beside which its run file can lie")
    if output.exists() and not overwrite:
        raise UsageError(f"{output.name} exists; give --overwrite to replace it, or another -o")
    for path in {output.target, output.lines}:
        check_out(path)
    check_run_file(run_file_path(output.target))


def read_parts(outs: Sequence[OutFile]) -> list[Part]:
    """Return the parts in the order of their shards. UsageError if one is no shard's, if two are the same shard's, if
    they are of different runs, or if shards are missing."""
    parts = sorted(map(_read_part, outs), key=lambda part: part.shard)
    first, *others = parts
    for part, other in zip(parts, others, strict=False):
        if (part.shard, part.num_shards) == (other.shard, other.num_shards):
            raise UsageError(f"{part.shown} and {other.shown} are of the same shard; give one")
    for part in others:
        numbers = first.num_shards, part.num_shards
        rows = [("number of shards", *numbers)] if numbers[0] != numbers[1] else []
        rows += [row for row in differences(first.facts, part.facts) if row[0] not in MAY_DIFFER]
        if rows:
            listed = "".join(f"\n  {field}  {cut(one)} and {cut(other)}" for field, one, other in rows)
            ways = "give the OUTs of one run, or run the shards again that differ"
            raise UsageError(f"{first.out.name} and {part.out.name} are of different runs:{listed}\n{ways}")
    missing = sorted(set(range(1, first.num_shards + 1)) - {part.shard for part in parts})
    if missing:
        named = _some([f"{shard}/{first.num_shards}" for shard in missing])
        raise UsageError(f"no OUT is of shard {named}; give the OUTs of all {first.num_shards} shards")
    return parts


def _read_part(out: OutFile) -> Part:
    path = run_file_path(out.target)
    facts, fault = read_run_file(path)
    if facts is None:
        ways = "give an OUT of `apcbatch run --shard`, with its run file beside it"
        raise UsageError(f"{path} {fault}, so that nothing says which shard {out.name} is of; {ways}")
    try:
        shard = parse_value(OPTIONS["shard"], facts["config"].get("shard"), "shard")
    except ValueError:
        shard = None
    if shard is None:
        raise UsageError(f"{out.name} is not the OUT of a shard, by {path}; give the OUTs of `apcbatch run --shard`")
    number, num_shards = map(int, shard.split("/"))
    return Part(out, facts, number, num_shards, None if out.is_partial else shard_requests(facts))


def merge(parts: Sequence[Part], output: Output) -> tuple[int, Counter[tuple[str, bool]]]:
    """Write ALL's run file, then ALL. Return the number of requests, and of error records by code and whether they may
    succeed when run again. UsageError, and no ALL, if requests are missing or there twice, or a line is no record. If
    it ends between the two, there is no ALL, and the same merge again finishes."""
    disk, errors = Disk(), Counter[tuple[str, bool]]()
    begin = min(filter(None, (_begin_of(part.facts) for part in parts)), default=0.0)
    total = max((part.requests[0] for part in parts if part.requests is not None), default=None)
    if total is None:
        raise UsageError(_not_finished(parts))
    shard_of = np.zeros(total, np.uint16)  # by the number of a request; 0: not seen

    def lines() -> Iterator[bytes]:
        unfinished, num_missing = list[Part](), total
        for part in parts:
            num_before = num_missing
            for record in _records(part, shard_of):
                num_missing -= 1
                if record["error"] is not None:
                    errors[record["error"]["code"], record["error"]["retryable"]] += 1
                _shift_times(record["apcbatch"], (_begin_of(part.facts) or begin) - begin)
                yield line_of(record)
            if part.requests is None or part.requests[1] > num_before - num_missing:
                unfinished.append(part)
        if num_missing:
            missing = islice((number for number in range(total) if not shard_of[number]), MOST_NAMED)
            few = _some([request_id(number) for number in missing], num_missing)
            ways = _not_finished(unfinished) if unfinished else "INPUT was not the same for all shards; run them anew"
            raise UsageError(f"{num_missing:,} of {total:,} requests are missing: {few}. {ways}")

    run_file, before = run_file_path(output.target), set(filter(os.path.exists, (output.target, output.lines)))
    try:
        with ExitStack() as stack:
            for path in before:
                stack.enter_context(closing(FileSink(Path(path), disk)))  # with its lock
            fd = stack.enter_context(replacing(output.target, disk))  # renamed after its run file
            with replacing(run_file, disk) as run_fd:
                for piece in packed(lines(), output.packing):
                    disk.write(fd, piece)
                disk.write(run_fd, as_json(_facts_of_all(parts, begin)))
                disk.sync(fd)
                if output.has_other_target:
                    raise UsageError(f"{output.name} appeared or was changed meanwhile, and is not replaced; run again")
                for path in before:  # to which the new run file does not belong
                    with suppress(FileNotFoundError):
                        disk.unlink(path)
                disk.sync_folder(os.path.dirname(output.target) or ".")
    except OSError as error:
        where = f"{output.name} with its run file, {run_file},"
        raise UsageError(f"{where} cannot be written: {error.strerror}; choose another -o") from None
    return total, errors


def _records(part: Part, shard_of: npt.NDArray[np.uint16]) -> Iterator[dict[str, Any]]:
    """Yield the records of a part. shard_of: (requests of INPUT,), gets the part's shard at the number of each."""
    for line_number, line in part.out.read():
        record = None if line is None else read_record(line)
        number = -1 if record is None else record_number(record)
        where = f"{part.shown}, line {line_number},"
        if record is None and part.requests is None:
            continue  # a line that a kill has torn: its request is missing, or has another line
        if record is None or number < 0:
            raise UsageError(f"{where} is not a line that this program wrote; take it out, and continue with --resume")
        if number >= len(shard_of):
            raise UsageError(
                f"{where} has {record['id']}, and INPUT has {len(shard_of):,} requests; run all shards anew"
            )
        if shard_of[number]:
            other = f"shard {shard_of[number]}/{part.num_shards}"
            raise UsageError(f"{where} has {record['id']}, which an earlier line of {other} has; take one out")
        shard_of[number] = part.shard
        yield record


def _shift_times(own: dict[str, Any], seconds: float) -> None:
    """Add to the times of a record, which then count from the begin of the first shard. seconds: between that and the
    begin of the record's own shard."""
    for name in ("begin_s", "end_s"):
        if seconds and is_seconds(own.get(name)):
            own[name] = round(own[name] + seconds, 6)


def _facts_of_all(parts: Sequence[Part], begin: float) -> dict[str, Any]:
    """Return the facts of ALL's run file: those of the first part without its shard, with the processes of all parts.
    Their commands are left out, as these continue the parts and not ALL."""
    facts = [part.facts for part in parts]
    lists = [one["processes"] for one in facts if isinstance(one.get("processes"), list)]
    entries = [one | {"continue_command": None} for entries in lists for one in entries if isinstance(one, dict)]
    entries.sort(key=_begin_of)
    kept, dropped = bounded(entries), [one.get("dropped_processes") for one in facts]
    origins = facts[0].get("origins")
    changed = {
        "config": {**facts[0]["config"], "shard": None},
        "origins": {**origins, "shard": DEFAULT} if isinstance(origins, dict) else {},
        "input_digest": None,
        "shard_requests": None,
        "begin": begin or None,
        "dropped_processes": sum(one for one in dropped if type(one) is int) + len(entries) - len(kept),
        "processes": kept,
    }
    return {**facts[0], **changed}


def _begin_of(facts: Mapping[str, Any]) -> float:
    """Return when OUT's first process, or a process, began, in seconds since 1970 (UTC); 0 where that is not known."""
    begin = facts.get("begin")
    return begin if is_seconds(begin) else 0.0


def _not_finished(parts: Sequence[Part]) -> str:
    return f"Not finished: {_some([part.shown for part in parts])}; continue each with --resume"


def _some(names: Sequence[str], count: int | None = None) -> str:
    """Name the first MOST_NAMED of `count`, and say how many more there are."""
    more = (len(names) if count is None else count) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + f" and {more:,} more" * (more > 0)
