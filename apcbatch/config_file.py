"""The YAML file of `--config`: one mapping of option names to plain values.

Invariants:
- Reading takes bounded time and memory for any file.
- No entry is dropped silently: a duplicate key is refused.
- Every failure raises UsageError with the file's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apcbatch.errors import UsageError
from apcbatch.option_values import brief

MAX_FILE_BYTES = 1 << 20
MAX_NESTING = 16


def read_config_file(path: str) -> dict[str, Any]:
    """Read a configuration file. Return its values by option name, with `-` in a name replaced by `_`."""
    import yaml

    try:
        with open(path, "rb") as file:  # a pipe too: --config <(make-config)
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"configuration file {path} holds more than {MAX_FILE_BYTES:,} bytes")
        text = data.decode("utf-8-sig")
        _check(yaml.parse(text, Loader=yaml.SafeLoader), path)
        content = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"configuration file {path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"configuration file {path} is not YAML: {error}") from None
    except ValueError as error:  # no UTF-8, or a number or a date that Python cannot hold
        raise UsageError(f"configuration file {path} cannot be read: {error}") from None
    if content is not None and not isinstance(content, dict):
        raise UsageError(f"configuration file {path} holds a {type(content).__name__}; expected `option: value` lines")
    return _by_name(content or {}, path)


def _by_name(content: dict[Any, Any], path: str) -> dict[str, Any]:
    """Return the entries by option name. Raises UsageError for a duplicate key, in either spelling."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_") if isinstance(key, str) else brief(key)
        if name in values:
            raise _twice(name, path)
        values[name] = value
    return values


def _check(events: Iterator[Any], path: str) -> None:
    """Raise UsageError for aliases, deep nesting and duplicate keys.

    No option needs them, and they could exhaust the parser or be dropped by it.
    """
    import yaml

    depth = 0
    keys: set[str] | None = None  # of the top-level mapping; None if there is none
    is_key = True
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            line = f", line {event.start_mark.line + 1}" if event.start_mark else ""
            raise UsageError(f"configuration file {path}{line}: an alias is not read; write the value out")
        if depth == 0 and isinstance(event, yaml.MappingStartEvent):
            keys = set()
        elif depth == 1 and keys is not None:  # keys and values alternate
            if is_key and isinstance(event, yaml.ScalarEvent):
                if event.value in keys:
                    raise _twice(event.value, path)
                keys.add(event.value)
            is_key = not is_key
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise UsageError(
                f"configuration file {path} is nested deeper than {MAX_NESTING} levels; expected `option: value` lines"
            )


def _twice(name: str, path: str) -> UsageError:
    return UsageError(f"configuration file {path} has {brief(name)} twice; expected each option once")
