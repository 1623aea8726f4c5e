"""What a command may write to: nothing that it reads, and no file twice.

Must not know: what is written. Everything is refused before any work, with what to give instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from apcbatch.config import Config
from apcbatch.data.address import is_address, last_part, open_filesystem, shown_address
from apcbatch.data.files import STDIN
from apcbatch.data.hub import HUB_PREFIX, is_hub
from apcbatch.data.inputs import KINDS, PACKINGS
from apcbatch.errors import ModelError, UsageError
from apcbatch.job.disk import STREAMS
from apcbatch.model.locate import locate_model

STDOUT = "-"
Names = Mapping[str, str | None]


def default_output(given: Sequence[str]) -> str:
    """OUT where `-o` is not given, in the current folder: `chats.answers.jsonl` for `data/chats.jsonl.gz`,
    `shards.answers.jsonl` for the folder `shards/`, and `name-test.answers.jsonl` for `hf:org/name:test`. UsageError
    for streams, which have no name, and for several inputs or a pattern, which have no one name."""
    ways = "give -o FILE, or -o - for standard output"
    if len(given) > 1:
        raise UsageError(f"{len(given)} inputs have no one name to make OUT's name from; {ways}")
    [input] = given
    if input == STDIN or input.startswith(STREAMS):
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
    """The name of an input or an output without the suffixes that say what is in it."""
    while os.path.splitext(name)[1].lower() in (*KINDS, *PACKINGS):
        name = os.path.splitext(name)[0]
    return name


def check_outputs(config: Config, inputs: Iterable[str], read: Names, outputs: Names) -> None:
    """Refuse an output that is another file of the command, lies in a folder that the command reads, or cannot be
    written.

    inputs: the files of INPUT. read, outputs: paths by the name of their option; None or `-` is no file.
    """
    written = {name: path for name, path in outputs.items() if path not in (None, STDOUT)}
    named = {name: path for name, path in {**read, **written}.items() if path not in (None, STDOUT)}
    pairs = [pair for pair in combinations(named.items(), 2) if {pair[0][0], pair[1][0]} & written.keys()]
    pairs += [(("INPUT", input), output) for input in inputs if input != STDIN for output in written.items()]
    for (name, one), (other_name, other) in pairs:
        if same_file(str(one), str(other)):
            shown = shown_address(str(one))
            raise UsageError(f"{name} and {other_name} are the same file, {shown}; give one of them another name")
    for name, path in written.items():
        if is_address(str(path)):
            open_filesystem(str(path))
            continue
        _check_place(name, str(path), config)
        _check_writable(name, str(path))
        for stream in (sys.stdout, sys.stderr):
            if _is_redirected_to(stream, str(path)):
                raise UsageError(f"{name} {path} is where this command prints to; give another file")


def same_file(one: str, other: str) -> bool:
    """Whether two names lead to the same regular file, which need not exist yet, or are the same address."""
    if is_address(one) or is_address(other):
        return one == other
    if os.path.exists(one) and os.path.exists(other):
        return os.path.isfile(one) and os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def _check_writable(name: str, path: str) -> None:
    if os.path.isdir(path):
        example = os.path.join(path, "out.jsonl")
        raise UsageError(f"{name} {path} is a folder; expected a file, such as {example}")
    folder = os.path.dirname(os.path.realpath(path))
    if not path.startswith(STREAMS) and not os.path.isdir(folder):
        raise UsageError(f"{name} {path} cannot be written: its folder does not exist; mkdir -p {folder}")


def _check_place(name: str, path: str, config: Config) -> None:
    """Refuse a path in the store, and one beside the files of the model: a resumed run compares their digest."""
    if config.store is not None:
        store = os.path.realpath(config.store)
        if os.path.commonpath([store, os.path.realpath(path)]) == store:
            raise UsageError(f"{name} {path} lies in the store, {store}; put it elsewhere")
    try:
        model = os.path.realpath(locate_model(config.model))
    except ModelError:
        return  # said where the model is opened
    folder = os.path.dirname(path)
    if model in (os.path.realpath(folder), os.path.dirname(os.path.realpath(path))):
        raise UsageError(f"{name} {path} lies beside the files of the model, in {model}; put it elsewhere")


def _is_redirected_to(stream: object, path: str) -> bool:
    """Whether a standard stream is redirected to this regular file."""
    if path.startswith(STREAMS):
        return False  # asked for by name
    try:
        return os.path.isfile(path) and os.path.samestat(os.fstat(stream.fileno()), os.stat(path))  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return False
