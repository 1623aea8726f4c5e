"""OUT.run.json: what made the lines of OUT, so that no other run ever adds to them.

Must not know: how requests run. Invariant: everything that can change an answer is compared; what cannot
(order, batch sizes, block size, policy, store: answers are the same bit for bit) may change between the
parts of one run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import xxhash

from apcbatch.config import Config
from apcbatch.errors import UsageError
from apcbatch.version import VERSION

CHANGES_ANSWERS = (
    "dtype",
    "format",
    "turns",
    "max_tokens",
    "max_request_tokens",
    "temperature",
    "top_p",
    "seed",
    "ignore_eos",
    "logprobs",
)
END_BYTES = 1 << 20


def input_identity(name: str) -> dict[str, Any]:
    """What INPUT is: for a file its size and the xxh3-128 of its first and last MiB, else its name alone."""
    path = Path(name)
    if name == "-" or not path.is_file():
        return {"name": name, "size_bytes": None, "xxh3_of_ends": None}
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = xxhash.xxh3_128(file.read(END_BYTES))
        file.seek(max(0, size - END_BYTES))
        digest.update(file.read(END_BYTES))
    return {"name": str(path.resolve()), "size_bytes": size, "xxh3_of_ends": digest.hexdigest()}


def model_files_digest(model_dir: Path) -> str:
    """xxh3-128 over the small files of a model folder: tokenizer, chat template, generation config."""
    digest = xxhash.xxh3_128()
    for path in sorted(model_dir.iterdir()):
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith(".index.json"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class RunFile:
    """The run file beside one OUT."""

    def __init__(self, output: Path, config: Config, input: dict[str, Any], model_files: str) -> None:
        self.output = output
        self.path = output.with_name(output.name + ".run.json")
        self._facts: dict[str, Any] = {
            "version": VERSION,
            "input": input,
            "model_fingerprint": None,
            "model_files": model_files,
            "config": config.values(),
            "origins": dict(config.origins),
        }

    def set_fingerprint(self, fingerprint: str) -> None:
        """Add what is known only once the weights are read."""
        self._facts["model_fingerprint"] = fingerprint

    def check(self) -> None:
        """Refuse to go on from what another run wrote; UsageError with a line for each field that differs."""
        earlier = self._read()
        differences = list(_differences(earlier, self._facts))
        if differences:
            width = max(len(field) for field, _, _ in differences)
            rows = [f"  {field:<{width}}  then {then!r}, now {now!r}" for field, then, now in differences]
            raise UsageError(
                f"output {self.output} is of a different run; --resume would mix two kinds of answers:\n"
                + "\n".join(rows)
                + "\ngive the earlier values again, or another -o, or --overwrite"
            )

    def write(self) -> None:
        """Put the file in place, whole or not at all."""
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.write(orjson.dumps(self._facts, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def _read(self) -> Mapping[str, Any]:
        try:
            facts = orjson.loads(self.path.read_bytes())
        except FileNotFoundError:
            reason = "is missing"
        except (OSError, orjson.JSONDecodeError) as error:
            reason = f"cannot be read ({error})"
        else:
            if (
                isinstance(facts, dict)
                and isinstance(facts.get("config"), dict)
                and isinstance(facts.get("input"), dict)
            ):
                return facts
            reason = "is not a run file"
        raise UsageError(
            f"{self.path} {reason}, so nothing says which run wrote {self.output}; "
            "put it back, or choose another -o, or --overwrite"
        )


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(field, then, now) of each field that changes answers and is not the same; unknown fields are equal."""
    pairs = [
        (f"input.{key}", then["input"].get(key), now["input"][key]) for key in ("size_bytes", "xxh3_of_ends")
    ]
    if now["input"]["size_bytes"] is None:
        pairs.append(("input.name", then["input"].get("name"), now["input"]["name"]))
    pairs += [(name, then["config"].get(name), now["config"][name]) for name in CHANGES_ANSWERS]
    pairs.append(("model_files", then.get("model_files"), now["model_files"]))
    if now["model_fingerprint"] is not None:
        pairs.append(("model_fingerprint", then.get("model_fingerprint"), now["model_fingerprint"]))
    yield from (pair for pair in pairs if pair[1] != pair[2])
