"""Check the output paths of a command: none is a file that it reads, and no two are the same file.

Everything is refused before any work, and the error says what to give instead.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import orjson

from apcbatch.address import (
    HUB_PREFIX,
    is_address,
    is_read_only,
    is_stream,
    last_part,
    places,
    read_head,
    shown_address,
)
from apcbatch.config import OPTIONS, Config
from apcbatch.data.input.files import STDIN
from apcbatch.data.input.inputs import KINDS, PACKINGS, is_hub
from apcbatch.errors import ModelError, UsageError
from apcbatch.job.disk import remove_left_files
from apcbatch.model.locate import locate_model
from apcbatch.option_values import FILE_MARK
from apcbatch.regular_files import open_regular_file

STDOUT = "-"
STDIN_PATH = "/dev/stdin"
MAX_SUMMARY_BYTES = 1 << 20
_PAGE = re.compile(r"\.x?html?$", re.IGNORECASE)
_NO_LINES = re.compile(  # names of files that are not JSON lines
    r"\.(csv|tsv|xlsx?|parquet|arrow|xml|ya?ml|sqlite|db|x?html?)(\.gz|\.zst)?$", re.IGNORECASE
)
Names = Mapping[str, str | None]


def default_output(given: Sequence[str]) -> str:
    """Return the default OUT, in the current folder: `chats.answers.jsonl` for `data/chats.jsonl.gz`,
    `shards.answers.jsonl` for the folder `shards/`, `name-test.answers.jsonl` for `hf:org/name:test`. UsageError for a
    stream, a pattern or several inputs, which do not give one name."""
    ways = "give -o FILE, or -o - for standard output"
    if len(given) > 1:
        raise UsageError(f"{len(given)} inputs have no one name to make OUT's name from; {ways}")
    [input] = given
    if input == STDIN or is_stream(input):
        stream = "stdin" if input == STDIN else input
        raise UsageError(f"{stream} has no name to make OUT's name from; {ways}")
    if is_hub(input):
        name = os.path.basename(input.removeprefix(HUB_PREFIX).replace(":", "-").rstrip("/"))
    else:
        name = last_part(input if is_address(input) else os.path.abspath(input))
    if not name or (set(name) & set("*?[") and not os.path.exists(input)):
        raise UsageError(f"{shown_address(input)} has no one name to make OUT's name from; {ways}")
    return f"{without_suffixes(name)}.answers.jsonl"


def without_suffixes(name: str) -> str:
    """Strip the suffixes of file format and compression from a name."""
    while os.path.splitext(name)[1].lower() in (*KINDS, *PACKINGS):
        name = os.path.splitext(name)[0]
    return name


def check_outputs(config: Config, inputs: Iterable[str], read: Names, outputs: Names) -> None:
    """Refuse an output that is another file of the command, lies in the store, beside the model's files or in a folder
    that cannot be written to, or is a folder, and standard streams that are redirected to a file of the command. Then
    remove the temporary files that killed commands have left of these outputs.

    inputs: files of INPUT. read, outputs: path or address by the name of its option, of an output the place
    (`address.output_place`); None and `-` are skipped.
    """
    written, others = (
        {name: path for name, path in names.items() if path is not None and path != STDOUT} for names in (outputs, read)
    )
    named = others | written | _files_in_options(config)
    streams = [status for stream in (sys.stdout, sys.stderr) if (status := _file_behind(stream)) is not None]
    owners: dict[tuple[object, ...], str] = {}
    for name, path in [*named.items(), *(("INPUT", STDIN_PATH if input == STDIN else input) for input in inputs)]:
        if is_address(path) and name in written and is_read_only(path):
            raise UsageError(
                f"{name} {shown_address(path)} cannot be written to; give a file, or an address such as s3://"
            )
        status = _status(path)
        is_at_stream = status is not None and any(os.path.samestat(status, one) for one in streams)
        if is_at_stream and not (name in written and is_stream(path)):
            raise UsageError(f"{name} {path} is where this command prints to; give another file, or print elsewhere")
        is_pipe = status is not None and stat.S_ISFIFO(status.st_mode)
        _check_distinct(name, path, is_pipe, owners, written)
    local = {name: path for name, path in written.items() if not is_address(path)}
    for name, path in local.items():
        _check_place(name, path, config)
        if os.path.isdir(path):
            raise UsageError(f"{name} {path} is a folder; move it away, or choose another name")
        folder = os.path.dirname(path) or "."
        if os.path.isdir(folder) and not (is_stream(path) or os.access(folder, os.W_OK | os.X_OK)):
            ways = "give a file in another folder"
            raise UsageError(f"{name} {path} cannot be written: its folder takes no new file; {ways}")
    remove_left_files(local.values())


def _files_in_options(config: Config) -> dict[str, str]:
    """Return the file of each option whose text is `@FILE`, by its name in error sentences."""
    texts = {name: getattr(config, name) for name, spec in OPTIONS.items() if spec.may_name_file}
    return {
        f"the file of {config.origins.get(name, name)}": text.removeprefix(FILE_MARK)
        for name, text in texts.items()
        if text is not None and text.startswith(FILE_MARK)
    }


def _check_distinct(name: str, path: str, is_pipe: bool, owners: dict[tuple[object, ...], str], written: Names) -> None:
    """Refuse a file that has another name of the command already, if one of the two is written. Two outputs may share a
    pipe; an input and an output may not. owners: identity of each file so far -> its name; gets this one."""
    for place in places(path) if is_pipe else _regular_places(path):
        owner = owners.setdefault(place, name)
        both = {owner, name}
        if owner != name and both & written.keys() and not (is_pipe and both <= written.keys()):
            pair = f"{name} and {owner}" if name == "INPUT" else f"{owner} and {name}"
            raise UsageError(f"{pair} are the same file, {shown_address(path)}; give one of them another name")


def odd_names(output: str, flag: str, report: str | None) -> Iterator[str]:
    """Yield a warning for each name that suggests another kind of file than is written. flag: option that names the
    report."""
    if _NO_LINES.search(output):
        yield f"OUT {shown_address(output)} gets JSON lines, whatever its name says; such files are named *.jsonl"
    if report is not None and not _PAGE.search(report):
        yield f"{flag} {report} gets an HTML page, which a browser shows as one if it is named *.html"


def same_file(one: str, other: str) -> bool:
    """Return whether two names lead to the same regular file, which need not exist yet, or to the same file at an
    address."""
    return bool(_regular_places(one) & _regular_places(other))


def _regular_places(name: str) -> set[tuple[object, ...]]:
    """Return the identities of the files that a path or an address denotes, as `address.places` does. Return an empty
    set for an existing path that is not a regular file: several outputs may go to one pipe or device."""
    is_other = not is_address(name) and os.path.exists(name) and not os.path.isfile(name)
    return set() if is_other else places(name)


def _check_place(name: str, path: str, config: Config) -> None:
    """Refuse a path in the store, and one beside the files of the model, since a resumed run compares the digest of
    those files. Also refuse hard links to files of either folder, and files that links in the model's folder lead
    to."""
    if config.store is not None:
        store = os.path.realpath(config.store)
        if os.path.commonpath([store, os.path.realpath(path)]) == store or _is_linked_below(store, path):
            raise UsageError(f"{name} {path} lies in the store, {store}; put it elsewhere")
    try:
        model = os.path.realpath(locate_model(config.model))
    except ModelError:
        return  # opening the model reports it
    folder = os.path.dirname(path)
    beside = model in (os.path.realpath(folder), os.path.dirname(os.path.realpath(path)))
    if beside or (os.path.isfile(path) and any(os.path.samefile(path, one) for one in _files_in(model))):
        raise UsageError(f"{name} {path} lies beside the files of the model, in {model}; put it elsewhere")


def check_summary(name: str, config: Config) -> None:
    """Raise FileExistsError if --summary would replace a file that is not an earlier summary, unless --overwrite is
    given. A local summary may be replaced; one at an address only with --resume. Nothing in a stream is replaced."""
    if config.overwrite or is_stream(name) or not (is_address(name) or os.path.isfile(name)):
        return
    if is_address(name):
        data = read_head(name, MAX_SUMMARY_BYTES)
        is_ours = data is None or (config.resume and _is_summary(data))
    else:
        with open_regular_file(name) as file:
            data = file.read(MAX_SUMMARY_BYTES)
        is_ours = not data or _is_summary(data)
    if not is_ours:
        raise FileExistsError(errno.EEXIST, "a file is there" + " that is no summary of a run" * (not is_address(name)))


def _is_summary(data: bytes) -> bool:
    try:
        content = orjson.loads(data)
    except ValueError:
        return False
    return isinstance(content, dict) and content.keys() >= {"requests", "hit_rate"}


def _files_in(folder: str) -> Iterator[str]:
    """Yield the regular files in a folder, links followed; none if the folder cannot be read."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    yield from (path for name in names if os.path.isfile(path := os.path.join(folder, name)))


def _is_linked_below(folder: str, path: str) -> bool:
    """Return whether a file is a hard link to a file anywhere below the folder."""
    status = _status(path)
    if status is None or status.st_nlink < 2 or not stat.S_ISREG(status.st_mode):
        return False
    return any(os.path.samefile(path, one) for below, _, _ in os.walk(folder) for one in _files_in(below))


def _status(name: str) -> os.stat_result | None:
    """Return the status of the file that a path leads to; None for an address, and if there is none."""
    try:
        return None if is_address(name) else os.stat(name)
    except (OSError, ValueError):
        return None


def _file_behind(stream: object) -> os.stat_result | None:
    """Return the status of the regular file that a standard stream is redirected to; None if there is none."""
    try:
        status = os.fstat(stream.fileno())  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None
