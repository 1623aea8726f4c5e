"""What a command may write to: nothing that it reads, and no file twice.

Must not know: what is written. Everything is refused before any work, with what to give instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from apcbatch.config import Config
from apcbatch.data.lines import STDIN
from apcbatch.data.source import HUB_PREFIX
from apcbatch.errors import ModelError, UsageError
from apcbatch.job.disk import STREAMS
from apcbatch.model.locate import locate_model

STDOUT = "-"
INPUT_SUFFIXES = (".jsonl", ".json", ".ndjson", ".gz", ".zst", ".parquet", ".arrow")
Names = Mapping[str, str | None]


def default_output(input: str) -> str:
    """OUT where `-o` is not given, in the current folder: `chats.answers.jsonl` for `data/chats.jsonl.gz`, and
    `name-test.answers.jsonl` for `hf:org/name:test`. UsageError for stdin and other streams, which have no name."""
    if input == STDIN or input.startswith(STREAMS):
        stream = "stdin" if input == STDIN else input
        raise UsageError(f"{stream} has no name to make OUT's name from; give -o FILE, or -o - for standard output")
    if input.startswith(HUB_PREFIX):
        input = input.removeprefix(HUB_PREFIX).replace(":", "-")
    name = Path(input).name
    while os.path.splitext(name)[1].lower() in INPUT_SUFFIXES:
        name = os.path.splitext(name)[0]
    return f"{name}.answers.jsonl"


def check_outputs(config: Config, inputs: Names, outputs: Names) -> None:
    """Refuse an output that is another file of the command, lies in a folder that the command reads, or cannot be
    written.

    inputs, outputs: paths by the name of their option; None or `-` is no file.
    """
    written = {name: path for name, path in outputs.items() if path not in (None, STDOUT)}
    named = {name: path for name, path in {**inputs, **written}.items() if path not in (None, STDOUT)}
    for (name, one), (other_name, other) in combinations(named.items(), 2):
        if {name, other_name} & written.keys() and same_file(str(one), str(other)):
            raise UsageError(f"{name} and {other_name} are the same file, {one}; give one of them another name")
    for name, path in written.items():
        _check_place(name, str(path), config)
        _check_writable(name, str(path))
        for stream in (sys.stdout, sys.stderr):
            if _is_redirected_to(stream, str(path)):
                raise UsageError(f"{name} {path} is where this command prints to; give another file")


def same_file(one: str, other: str) -> bool:
    """Whether two names lead to the same regular file, which need not exist yet."""
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
