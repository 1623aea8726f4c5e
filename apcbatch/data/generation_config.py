"""Use the defaults in a model folder's generation_config.json as options of a run.

As in vLLM, temperature, top_k, top_p and min_p are used only if do_sample is true, repetition_penalty and
max_new_tokens always. The file's stop tokens do not depend on the option: data/end_tokens.py reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apcbatch.config import Config
from apcbatch.data.model_files import read_model_json
from apcbatch.errors import ModelError
from apcbatch.option_values import brief
from apcbatch.resolution import DEFAULT, with_defaults
from apcbatch.sampling import SETTINGS

FILE = "generation_config.json"


def _suggested(config: Config, folder: Path) -> dict[str, Any]:
    """Read the file's values of the options that are at their defaults, unchecked; empty without a file.

    ModelError for a file that cannot be read."""
    values = read_model_json(folder / FILE, is_optional=True)
    draws = values.get("do_sample") is True
    found = {
        setting.option_name: values[setting.suggested_as]
        for setting in SETTINGS.values()
        if values.get(setting.suggested_as) is not None and (draws or not setting.only_drawn)
    }
    found = {"temperature": 1.0, **found} if draws else found
    return {name: value for name, value in found.items() if config.origins.get(name) == DEFAULT}


def with_model_defaults(config: Config, folder: Path) -> Config:
    """If --generation-config is auto, replace the options that are at their defaults by the file's values.

    Return the new configuration. ModelError for an invalid value."""
    if config.generation_config != "auto":
        return config
    try:
        return with_defaults(config, _suggested(config, folder), str(folder / FILE), lambda name: FILE)
    except ValueError as error:
        raise ModelError(f"{error}; mend the file, or give --generation-config none") from None


def notice(config: Config, folder: Path) -> str | None:
    """Return a sentence about the file's values: those that this run uses or, without --generation-config auto, those
    that auto would change. None if there are none.

    config: the result of with_model_defaults."""
    if config.generation_config == "auto":
        used = {name: getattr(config, name) for name, origin in config.origins.items() if origin == FILE}
        return f"{FILE} of the model gives {_list(used)}" if used else None
    changed = {name: value for name, value in _suggested(config, folder).items() if value != getattr(config, name)}
    if not changed:
        return None
    return f"{FILE} of the model suggests {_list(changed)}, which is not used; --generation-config auto uses it"


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {brief(value)}" for name, value in values.items())
