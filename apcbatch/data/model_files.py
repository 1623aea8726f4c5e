"""List the files of a model folder, besides its weights, that a run reads; check their sizes; make their digest; read
those that are JSON.

Invariants: only regular files of limited size are read. Other files of the folder are never opened. Besides the
weights, every file that affects a prompt or an answer is in the digest.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from apcbatch.errors import ModelError
from apcbatch.regular_files import open_regular_file, read_regular_file

# The first is read directly. Without it, `transformers` converts the others.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
MAX_TEMPLATE_BYTES = 4 << 20
MAX_FILE_BYTES = 64 << 20
MAX_JSON_BYTES = 16 << 20  # limit of a JSON file other than tokenizer.json
_MOST_LEVELS = 128
_NOT_FINITE = ("Infinity", "-Infinity", "NaN")
_NAMES = ("added_tokens.json", "chat_template.jinja", "config.json", "generation_config.json", "hf_quant_config.json",
          "quantize_config.json", "special_tokens_map.json", "tokenizer_config.json")  # fmt: skip
_CONVERTED = (*TOKENIZER_FILES[1:], "merges.txt")
_TEMPLATES = "additional_chat_templates"


def model_files(folder: Path) -> dict[str, Path]:
    """List the files that a run reads, as name in the folder -> path, sorted by name.

    ModelError for one that is too large or not a regular file: a named pipe, a device, a folder, a dangling link."""
    tokenizer = TOKENIZER_FILES[:1] if os.path.lexists(folder / TOKENIZER_FILES[0]) else _CONVERTED
    names = [name for name in (*_NAMES, *tokenizer) if os.path.lexists(folder / name)]
    if (folder / _TEMPLATES).is_dir():
        names += [f"{_TEMPLATES}/{path.name}" for path in (folder / _TEMPLATES).glob("*.jinja")]
    found = {name: folder / name for name in sorted(names)}
    for path in found.values():
        try:
            with open_regular_file(path) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        most = MAX_TEMPLATE_BYTES if path.suffix == ".jinja" else MAX_FILE_BYTES
        if size > most:
            raise ModelError(f"{path} holds {size:,} bytes; at most {most:,} are read")
    return found


def model_files_digest(folder: Path) -> str:
    """Return the xxh3-128, in hex, of the names and contents of model_files(folder)."""
    digest = xxhash.xxh3_128()
    for name, path in model_files(folder).items():
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0" + read_regular_file(path, MAX_FILE_BYTES))
    return digest.hexdigest()


@contextmanager
def only_model_files(folder: Path) -> Iterator[Path]:
    """Make a temporary folder with links to model_files(folder), for a library that would also read other files."""
    with tempfile.TemporaryDirectory(prefix="apcbatch-") as made:
        for name, path in model_files(folder).items():
            link = Path(made) / name
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.resolve())
        yield Path(made)


def read_model_json(path: Path, is_optional: bool = False) -> dict[str, Any]:
    """Read the JSON object in a file of a model folder: config.json, generation_config.json, the index of the shards.

    NaN, Infinity and -Infinity become floats in both forms in which transformers writes them: bare, as its version 4
    does, and as {"__float__": "Infinity"}, as its version 5 does. is_optional: an absent file gives an empty object.
    ModelError for a file that cannot be read, or that holds anything but an object of at most 128 levels.
    """
    try:
        values: Any = json.loads(read_regular_file(path, MAX_JSON_BYTES), object_hook=_untagged)
    except FileNotFoundError:
        if is_optional:
            return {}
        raise ModelError(f"{path} is missing; expected a Hugging Face model folder") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        values = None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); copy the checkpoint again") from None
    else:
        if not isinstance(values, dict):
            raise ModelError(f"{path} holds a {type(values).__name__}; expected a JSON object")
    if not isinstance(values, dict) or _is_deep(values):
        raise ModelError(f"{path} is nested too deeply; expected at most {_MOST_LEVELS} levels of JSON")
    return values


def _untagged(value: dict[str, Any]) -> Any:
    """Return the float that {"__float__": "Infinity"} stands for; any other object unchanged."""
    if value.keys() == {"__float__"} and value["__float__"] in _NOT_FINITE:
        return float(value["__float__"])
    return value


def _is_deep(value: Any) -> bool:
    """Return whether a JSON value has more than _MOST_LEVELS levels of objects and lists."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        holders = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [inner for holder in holders for inner in holder]
    return any(isinstance(one, (dict, list)) for one in level)
