"""Resolve the configuration of one run from its flags, the environment, a file and the defaults.

This is the only module that reads options from the environment.

Invariants:
- Flags override APCBATCH_* variables, which override the --config file, which overrides the defaults; between the last
  two are the values that `with_defaults` is given, of the earlier run on --resume and of the model.
- Any given value overrides, even 0 or `false`.
- Unknown keys, values out of range and options that exclude each other are refused here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from apcbatch.config import ENV_CONFIG, ENV_DEBUG, ENV_PREFIX, OPTIONS, Config, env_name, flag_name
from apcbatch.config_file import read_config_file
from apcbatch.draft_sources import draft_sources
from apcbatch.errors import UsageError
from apcbatch.foreign_options import foreign_option
from apcbatch.option_values import SHOWN_CHARACTERS, nearest, parse_path, parse_switch, parse_value

DEFAULT = "default"  # origin of an option that nothing gives
# Read by setup.py and by tools/chromium.py; accepted here and ignored.
ENV_OF_CONTRIBUTORS = ("APCBATCH_CUDA", "APCBATCH_CUDA_ARCHS", "APCBATCH_BROWSER")
_NO_TRACE = "a run writes no trace, and the run file beside OUT has what a report needs: leave it out"
GONE = {
    "cpu_workers": "all workers of a run are of one kind: leave it out, and give workers and worker_gpus",
    "plot": "nothing is drawn: leave it out, and draw the numbers that --json FILE writes",
    "trace": _NO_TRACE,
    "no_trace": _NO_TRACE,
    "window": "what is read ahead is bounded by tokens and requests, not by conversations: leave it out, or give "
    "--window-tokens",
}
EXCLUSIVE = (("resume", "overwrite"), ("retry_errors", "overwrite"), ("quiet", "verbose"))


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any], file_name: str) -> Config:
    """Resolve the configuration of one run from the given flags, the environment and the content of a file.

    file_name: name of the file in error messages. Raises UsageError for an unknown key (suggesting the nearest), a bad
    value, or options that exclude each other.
    """
    given = {key: value for key, value in environ.items() if key.startswith(ENV_PREFIX)}
    for key in (ENV_CONFIG, ENV_DEBUG, *ENV_OF_CONTRIBUTORS):
        given.pop(key, None)
    env_names = {name: env_name(name) for name in (*OPTIONS, "no_store")}
    for key in given:
        if key not in env_names.values():
            hint = instead(key.removeprefix(ENV_PREFIX).lower()) or nearest(key, env_names.values())
            raise UsageError(f"environment variable {key} is not an option of apcbatch{hint}")
    layers = [
        _layer(file, lambda name: f"{file_name}: {name}"),
        _layer({name: given[key] for name, key in env_names.items() if key in given}, env_name),
        _layer(flags, flag_name),
    ]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(OPTIONS, DEFAULT)
    for layer in layers:
        for pair in EXCLUSIVE:
            _exclude(pair, layer, values, origins)
        values |= {name: value for name, (value, _) in layer.items()}
        origins |= {name: origin for name, (_, origin) in layer.items()}
    if values.get("retry_errors"):
        values["resume"], origins["resume"] = True, origins["retry_errors"]
    config = Config(**values, origins=origins)
    draft_sources(config)  # refuses sources that cannot be used
    return config


def with_defaults(config: Config, values: Mapping[str, Any], where: str, origin: Callable[[str], str]) -> Config:
    """Replace the options that are at their defaults by the values of another source, parsed.

    where: name of the source in error messages. origin: of an option by its name. Raises ValueError for a bad value.
    """
    left = {name: value for name, value in values.items() if config.origins.get(name) == DEFAULT}
    parsed = {name: parse_value(OPTIONS[name], value, f"{name} in {where}") for name, value in left.items()}
    return replace(config, **parsed, origins={**config.origins, **{name: origin(name) for name in parsed}})


def _layer(raw: Mapping[str, Any], where: Callable[[str], str]) -> dict[str, tuple[Any, str]]:
    """Return (value, origin) of each option that one source gives. where: name of an option in that source."""
    layer = {}
    for name, value in raw.items():
        if name not in OPTIONS and name != "no_store":
            hint = instead(name, where is flag_name) or nearest(name, [*OPTIONS, "no_store"])
            raise UsageError(f"{where(name[:SHOWN_CHARACTERS])} is not an option{hint}")
        if name in OPTIONS and not OPTIONS[name].from_file and where is not flag_name and value is not None:
            raise UsageError(f"{where(name)} names code to run; give {flag_name(name)} on the command line instead")
        try:
            if name != "no_store":
                layer[name] = (parse_value(OPTIONS[name], value, where(name)), where(name))
            elif parse_switch(value, where(name)):
                if raw.get("store") is not None:
                    raise UsageError(f"{where('store')} and {where(name)} exclude each other; give one of them")
                layer["store"] = (None, where(name))
        except ValueError as error:
            raise UsageError(str(error)) from None
    return layer


def instead(name: str, as_flags: bool = True) -> str:
    """Return a clause that says what to give in place of a removed option, or of an option of another tool; empty for
    any other name. as_flags: name options as flags."""
    if name in GONE:
        return f" any more; {GONE[name]}"
    foreign = foreign_option(name, as_flags)
    return f"; {foreign}" if foreign else ""


def _exclude(
    pair: tuple[str, str], layer: dict[str, tuple[Any, str]], values: dict[str, Any], origins: dict[str, str]
) -> None:
    """Unset an option that a stronger source excludes. Raises UsageError if one source gives both of a pair.

    pair: options that exclude each other. layer: options of the current source. values, origins: result of the weaker
    sources, changed in place.
    """
    on = [name for name in pair if name in layer and layer[name][0]]
    if len(on) == 2:
        raise UsageError(f"{layer[pair[0]][1]} and {layer[pair[1]][1]} exclude each other; give one of them")
    for name in on:
        other = pair[1 - pair.index(name)]
        if values.get(other) and other not in layer:
            del values[other]
            origins[other] = f"overruled by {layer[name][1]}"


def load(flags: Mapping[str, Any], config_file: str | None, environ: Mapping[str, str] | None = None) -> Config:
    """Resolve the configuration from the given flags, this process's environment, and the file that either of them
    names."""
    environ = os.environ if environ is None else environ
    path = config_path(config_file, environ)
    return resolve(flags, environ, read_config_file(path) if path else {}, path or "")


def config_path(config_file: str | None, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the configuration file that --config or APCBATCH_CONFIG names; None or empty if neither does."""
    name = config_file or (os.environ if environ is None else environ).get(ENV_CONFIG)
    try:
        return parse_path(name, "--config" if config_file else ENV_CONFIG) if name else name
    except ValueError as error:
        raise UsageError(str(error)) from None


def debug_wanted() -> bool:
    """Return whether APCBATCH_DEBUG asks for tracebacks."""
    return os.environ.get(ENV_DEBUG, "") not in ("", "0", "false")


def colour_wanted() -> bool:
    """Return whether colours are allowed on a terminal: not if NO_COLOR is set (no-color.org), or if TERM is `dumb`."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
