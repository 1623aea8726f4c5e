"""The defaults that a model folder's generation_config.json suggests, as options of a run.

Must not know: requests, engines. As in vLLM: temperature, top_k, top_p and min_p count if the file says do_sample;
repetition_penalty and max_new_tokens count in any case. The tokens that end answers are read elsewhere (tokenizer.py,
model/hf_config.py), whatever the option says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apcbatch.config import OPTIONS, Config
from apcbatch.data.tokenizer import read_json
from apcbatch.errors import ModelError
from apcbatch.values import brief, parse_value

FILE = "generation_config.json"
_OPTION_OF = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_ONLY_DRAWN = ("temperature", "top_k", "top_p", "min_p")


def suggested(folder: Path) -> dict[str, Any]:
    """What the file sets of _OPTION_OF, by the names of options and as it is written; nothing if there is no file.
    Raises ModelError for a file that cannot be read."""
    values = read_json(folder / FILE)
    draws = values.get("do_sample") is True
    found = {
        option: values[name]
        for name, option in _OPTION_OF.items()
        if values.get(name) is not None and (draws or name not in _ONLY_DRAWN)
    }
    return {"temperature": 1.0, **found} if draws else found


def with_model_defaults(config: Config, folder: Path) -> Config:
    """The configuration with what the file suggests, if --generation-config is auto, for options that nothing else
    gives. Raises ModelError for a value that cannot be used."""
    if config.generation_config != "auto":
        return config
    given = {name: value for name, value in suggested(folder).items() if config.origins.get(name) == "default"}
    values = {}
    for name, value in given.items():
        try:
            values[name] = parse_value(OPTIONS[name], value, f"{name} in {folder / FILE}")
        except ValueError as error:
            raise ModelError(f"{error}; mend the file, or give --generation-config none") from None
    return dataclasses.replace(config, **values, origins={**config.origins, **dict.fromkeys(values, FILE)})


def notice(config: Config, folder: Path) -> str | None:
    """A sentence for the user about what the file suggests, and whether this run does it; None if it suggests
    nothing that would change this run. config: as with_model_defaults made it."""
    if config.generation_config == "auto":
        used = {name: getattr(config, name) for name, origin in config.origins.items() if origin == FILE}
        return f"{FILE} of the model gives {_list(used)}" if used else None
    left = {name: value for name, value in suggested(folder).items() if config.origins.get(name) == "default"}
    changed = {name: value for name, value in left.items() if value != getattr(config, name)}
    if not changed:
        return None
    return f"{FILE} of the model suggests {_list(changed)}, which is not used; --generation-config auto uses it"


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {brief(value)}" for name, value in values.items())
