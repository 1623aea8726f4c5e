"""Writes docs/reference/api.md from the docstrings of the Python surface; run it after every change of one. What
is above the first class is written by hand.

A test compares the file with what this script would write, so that no argument and no method stays undocumented.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, get_args, get_origin

import apcbatch
from apcbatch import errors, types
from apcbatch.engine.counters import Counters
from apcbatch.engine.parts import EngineOptions

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "api.md"
WIDTH = 100
EXCEPTIONS = (
    errors.ApcbatchError,
    errors.UsageError,
    errors.ModelError,
    errors.StoppedError,
    errors.RequestError,
)


def document() -> str:
    """The whole page."""
    page = TARGET.read_text(encoding="utf-8")
    parts = [page[: page.index("\n\n## LLM\n")]]
    for found in (
        apcbatch.LLM,
        apcbatch.Answer,
        apcbatch.Tools,
        apcbatch.Engine,
        EngineOptions,
        types.Request,
        types.Result,
        types.RequestPlan,
        Counters,
    ):
        parts += class_parts(found)
    parts += ["## Values", *value_lines(), "## Errors", *error_parts()]
    return "\n\n".join(parts) + "\n"


def class_parts(found: type) -> Iterator[str]:
    """The heading, signature and docstring of a class, then of each of its public methods and properties. A dataclass
    is what it holds: its fields are in the signature."""
    yield f"## {found.__name__}"
    yield code(found.__name__, parameters(found), "")
    yield text_of(found)
    for name, member in vars(found).items():
        if name.startswith("_") or dataclasses.is_dataclass(found):
            continue
        title = f"{found.__name__}.{name}"
        if isinstance(member, property):
            yield f"### {title}"
            yield code(title, None, inspect.signature(member.fget).return_annotation)  # type: ignore[arg-type]
            yield text_of(member)
        elif isinstance(member, FunctionType):
            yield f"### {title}"
            yield code(title, parameters(member), inspect.signature(member).return_annotation)
            yield text_of(member)


def parameters(called: Any) -> list[str]:
    """Each parameter as it would be written, without `self` and private ones. A default that has no short spelling is
    `...`."""
    factories = {
        field.name: field.default_factory
        for field in (dataclasses.fields(called) if dataclasses.is_dataclass(called) else ())
        if field.default_factory is not dataclasses.MISSING
    }
    written = []
    keyword_only = False
    for name, parameter in inspect.signature(called).parameters.items():
        if name == "self" or name.startswith("_"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            written.append("*")
        keyword_only |= parameter.kind is parameter.VAR_KEYWORD
        one = f"{'**' * (parameter.kind is parameter.VAR_KEYWORD)}{name}: {parameter.annotation}"
        if name in factories:
            one += f" = {factories[name]()!r}"
        elif parameter.default is not parameter.empty:
            one += f" = {spelled(parameter.default)}"
        written.append(one)
    return written


def spelled(default: Any) -> str:
    """A default as it is written in code; `...` for a function."""
    if callable(default):
        return "..."
    return f'"{default}"' if isinstance(default, str) else repr(default)


def code(name: str, arguments: list[str] | None, returned: str) -> str:
    """A signature as a block of code, on one line where it fits, else with a line for each argument."""
    result = f" -> {returned}" if returned and arguments is not None else f": {returned}" if returned else ""
    if arguments is None:
        line = f"{name}{result}"
    else:
        line = f"{name}({', '.join(arguments)}){result}"
        if len(line) > WIDTH:
            line = f"{name}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){result}"
    return f"```python\n{line}\n```"


def text_of(found: Any) -> str:
    """The docstring, which there must be."""
    text = inspect.getdoc(found)
    if not text:
        raise SystemExit(f"{found} has no docstring; write one")
    return text


def value_lines() -> Iterator[str]:
    """The closed sets of values that fields take, by the name of their type in apcbatch.types."""
    rows = [
        f"| `{name}` | {' · '.join(f'`{one}`' for one in get_args(value))} |"
        for name, value in sorted(vars(types).items())
        if get_origin(value) is Literal
    ]
    yield "\n".join(["| in `apcbatch.types` | one of |", "|---|---|", *rows])


def error_parts() -> Iterator[str]:
    """The exceptions with the exit status that each ends a command with, then the codes of a RequestError."""
    rows = [f"| `{one.__name__}` | {' '.join(text_of(one).split())} | {one.exit_code} |" for one in EXCEPTIONS]
    yield "\n".join(["| in `apcbatch.errors` | means | exit status |", "|---|---|---|", *rows])
    codes = [f"| `{one}` | {'yes' if one in errors.RETRYABLE else 'no'} |" for one in errors.ERROR_CODES]
    yield "\n".join(["| `RequestError.code` | a retry may help |", "|---|---|", *codes])


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
