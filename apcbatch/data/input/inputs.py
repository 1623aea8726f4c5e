"""Expand the names given as INPUT (files, folders of shards, patterns, addresses, datasets) to a list of files.

Invariants: the list has no file twice. It is made once per command, so every read of the input sees the same files. No
file name comes from data, except the plain names in the `state.json` of `save_to_disk`.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import orjson

from apcbatch.address import (
    HUB_PREFIX,
    archive_of,
    hub_page,
    is_address,
    last_part,
    open_filesystem,
    places,
    refuse,
    shown_address,
)
from apcbatch.data.input.files import STDIN, check_readable, reason, shown_input
from apcbatch.display import counted
from apcbatch.errors import UsageError
from apcbatch.regular_files import read_regular_file

KINDS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
PACKINGS = (".gz", ".zst", ".bz2", ".xz")
RUN_FILE_SUFFIX = ".run.json"
TRACE_SUFFIX = ".trace.jsonl"
_SHARD = re.compile(rf"[^.].*({'|'.join(map(re.escape, KINDS))})({'|'.join(map(re.escape, PACKINGS))})?", re.I | re.S)
_PATTERN = re.compile(r"[*?\[]")
_REMOTE_PATTERN = re.compile(r"[*\[]")  # without `?`, which begins a query
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
_MAX_STATE_BYTES = 16 << 20
_MOST_NAMED = 3


@dataclass(frozen=True)
class Inputs:
    """Input files of a command, in order.

    given: names on the command line. files: paths, `-`, addresses, and datasets as `hf:org/name`.
    """

    given: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def are_files(self) -> bool:
        """Return whether all are regular local files, so that they can be read twice."""
        return all(not is_address(name) and os.path.isfile(name) for name in self.files)

    @property
    def shown(self) -> str:
        """Return the given names for a sentence: all of them, or the first and the number of the others."""
        names = [shown_input(name) for name in self.given]
        return ", ".join(names) if len(names) <= _MOST_NAMED else f"{names[0]} and {len(names) - 1} more"


def find_inputs(given: Sequence[str], warn: Callable[[str], None] = lambda sentence: None) -> Inputs:
    """Expand the given names to files. warn: called with a sentence about the files of a folder that are not read.

    A folder is expanded to its shards, sorted by name; a folder written by `save_to_disk` to its tables. A name with
    `*`, `?` or `[` is a pattern if no file has this name; its matches are sorted. Raises UsageError for a name that
    matches nothing, and for a file that is given twice.
    """
    files: list[str] = []
    for name in given:
        files += _expand(name, warn)
    seen: set[tuple[object, ...]] = set()
    for name in files if len(files) > 1 else ():
        found = {(name,)} if name == STDIN or is_hub(name) else places(name, with_archive=False)
        if found & seen:
            raise UsageError(f"{shown_address(name)} is given twice; name each input once")
        seen |= found
    return Inputs(tuple(given), tuple(files))


def is_hub(name: str) -> bool:
    """Return whether a name is a Hugging Face dataset (`hf:org/name`). `hf://...` is an address instead."""
    return name.startswith(HUB_PREFIX) and not name.startswith(f"{HUB_PREFIX}//")


def _expand(name: str, warn: Callable[[str], None]) -> Iterable[str]:
    if name == STDIN or is_hub(name):
        return [name]
    if (page := hub_page(name)) and not os.path.lexists(name):
        raise UsageError(f"{shown_address(name)}{page}")
    if is_address(name):
        return _expand_address(name, warn)
    if os.path.isdir(name):
        return _in_folder(name, warn)
    if _PATTERN.search(name) and not os.path.lexists(name):
        found = sorted(glob.glob(name, recursive=True))
        if not found:
            raise UsageError(f"cannot read {name}: no file matches this pattern")
        return [file for one in found for file in (_in_folder(one, warn) if os.path.isdir(one) else [one])]
    check_readable(name)
    return [name]


def _in_folder(folder: str, warn: Callable[[str], None]) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise UsageError(f"cannot read the folder {folder}: {reason(error)}") from None
    if _SAVED_SPLITS in names:
        return _in_folder(_split_folder(folder, names), warn)
    if _SAVED in names:
        return list(_saved_tables(folder))
    shards = _shards(names, folder, warn)
    return [os.path.join(folder, name) for name in shards]


def _shards(names: Iterable[str], folder: str, warn: Callable[[str], None]) -> list[str]:
    """Choose the input files among the names in a folder, sorted by name.

    Hidden files are left out, and so is an OUT with its run file and trace."""
    visible = sorted(name for name in names if not name.startswith("."))
    run_files = {name for name in visible if name.endswith(RUN_FILE_SUFFIX)}
    outputs = {run_file.removesuffix(RUN_FILE_SUFFIX) for run_file in run_files}
    own = {output + suffix for output in outputs for suffix in ("", RUN_FILE_SUFFIX, TRACE_SUFFIX)}
    shards = [name for name in visible if _SHARD.fullmatch(name) and name not in own]
    taken = set(shards)
    others = [name for name in visible if name not in taken]
    if not shards:
        raise UsageError(
            f"the folder {folder} holds no input; expected files that end in {', '.join(KINDS)}, "
            f"or in one of these and {', '.join(PACKINGS)}; folders in it are not searched"
        )
    if others:
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        named = ", ".join(others[:_MOST_NAMED])
        warn(f"INPUT has {counted(len(shards), 'file')} of the folder {folder}; not {named}{more}")
    return shards


def _split_folder(folder: str, names: Sequence[str]) -> str:
    """Return the folder of a saved DatasetDict's only split, or of `train`. UsageError if neither is there."""
    splits = sorted(name for name in names if os.path.isfile(os.path.join(folder, name, _SAVED)))
    if len(splits) != 1 and "train" not in splits:
        choice = f"; choose one: {os.path.join(folder, splits[0])}" if splits else ""
        raise UsageError(f"the dataset in {folder} has the splits {', '.join(splits) or 'none'}{choice}")
    return os.path.join(folder, splits[0] if len(splits) == 1 else "train")


def _saved_tables(folder: str) -> Iterator[str]:
    """Yield the tables of a dataset written by `save_to_disk`, in the order of its state.json. Raises UsageError."""
    path = os.path.join(folder, _SAVED)
    try:
        names = [entry["filename"] for entry in orjson.loads(read_regular_file(path, _MAX_STATE_BYTES))["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{path} cannot be read as save_to_disk writes it: {reason(error)}") from None
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".arrow"):
            raise UsageError(f"{path} names the table {name!r}; expected the name of an .arrow file beside it")
        table = os.path.join(folder, name)
        check_readable(table)
        yield table


def _expand_address(name: str, warn: Callable[[str], None]) -> list[str]:
    """Expand an address to the addresses of its files: the shards of a folder, or the matches of a pattern."""
    system, path = open_filesystem(name)
    is_web = name.lower().startswith(("http://", "https://"))  # a web server lists no folders
    try:
        if is_web:
            return [name]
        if _REMOTE_PATTERN.search(path):
            found = sorted(str(one) for one in system.glob(path) if not system.isdir(one))
            if not found:
                raise UsageError(f"cannot read {shown_address(name)}: no file matches this pattern")
        elif system.isdir(path):
            names = [last_part(str(one)) for one in system.ls(path, detail=False)]
            found = [f"{path.rstrip('/')}/{one}" for one in _shards(names, shown_address(name), warn)]
        elif system.exists(path):
            return [name]
        else:
            raise UsageError(f"cannot read {shown_address(name)}: there is no such file")
    except UsageError:
        raise
    except Exception as error:  # the package of the file system may raise any exception
        refuse(name, "read", error)
    return [_as_address(name, path, one) or str(system.unstrip_protocol(one)) for one in found]


def _as_address(name: str, path: str, found: str) -> str | None:
    """Return the address of `found`, a path that the file system found for the pattern or folder `path` of the address
    `name`. It begins and ends like `name`, so it keeps the protocol, the host and the archive.

    Return None if `name` does not contain the folder of `path`."""
    before, *pattern = _REMOTE_PATTERN.split(path, maxsplit=1)
    prefix = before.rpartition("/")[0] if pattern else path.rstrip("/")
    archive = archive_of(name)
    begin = name.removesuffix(archive)
    place = begin.find(prefix, begin.index("://") + 2) if prefix else begin.rindex("://") + 3
    return begin[:place] + found + archive if place >= 0 and found.startswith(prefix) else None
