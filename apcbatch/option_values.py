"""The specification of one option's value, and its parsing from text or YAML.

An invalid value raises ValueError with a sentence.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from fractions import Fraction
from typing import Any, Literal

from apcbatch.address import as_path, hub_page, is_address, output_place, shown_address
from apcbatch.errors import UsageError

AUTO = "auto"
FILE_MARK = "@"  # prefix of a file name given instead of a text
SIZE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE_UNITS |= {f"{unit}IB": size for unit, size in SIZE_UNITS.items()}
SIZE_UNITS |= {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

Kind = Literal["text", "integer", "number", "size", "switch", "date", "shard"]

SHOWN_CHARACTERS = 60
SHOWN_BITS = 128


@dataclass(frozen=True)
class Spec:
    """The accepted values of one option.

    minimum, maximum: inclusive bounds; the maximum of a text is its length in characters. above: exclusive lower bound.
    optional: null is accepted; if the metavar ends in `|auto`, so is the word `auto`. most: if given, the value is a
    tuple of at most `most` values, each of which meets the rest of the Spec.

    flag: short form of the flag; '' for none, None if the option has no flag at all. secret: the value is never
    printed, except in the form `@FILE`, which names a file with the secret. opposite: flag that turns off a switch
    whose default is on; --no-NAME unless given. path: the text names a file or a folder, `local` or at `any` address;
    the address of a local one is replaced by its path. is_output: the file is written, so its name is replaced by the
    place that it leads to. meant: wrong choice -> choice to suggest. from_file: configuration files and the
    environment may give it; not an option that names code to run.
    """

    kind: Kind
    group: str
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    optional: bool = False
    flag: str | None = ""
    secret: bool = False
    path: Literal["", "local", "any"] = ""
    is_output: bool = False
    most: int | None = None
    opposite: str | None = None
    from_file: bool = True
    meant: Mapping[str, str] = field(default_factory=dict)

    @property
    def may_name_file(self) -> bool:
        """Whether `@FILE` stands for the text in a file."""
        return (self.metavar or "").endswith("@FILE")

    @property
    def has_auto(self) -> bool:
        """Whether the word `auto` is accepted for null."""
        return self.optional and (self.metavar or "").endswith(f"|{AUTO}")


def shown(spec: Spec, value: Any) -> Any:
    """Return a parsed value in a form that shows no secret and can be written as JSON or YAML.

    A tuple is returned as a list, an address without the secrets in it. A secret given as `@FILE` is returned so; a
    secret given as text is replaced by None.
    """
    if spec.most is not None:
        return list(value)
    if value is None and spec.has_auto:
        return AUTO
    if spec.path and value is not None:
        return shown_address(value)
    return None if spec.secret and value is not None and not value.startswith(FILE_MARK) else value


def nearest(word: str, words: Iterable[str]) -> str:
    """Return a clause that suggests the known word closest to `word`; empty if none is close."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def parse_value(spec: Spec, raw: Any, where: str) -> Any:
    """Parse one option's value from text or YAML. An option with several values accepts a single one too.

    where: name of the option in error messages. Raises ValueError that says what was expected.
    """
    if spec.most is not None:
        several = raw if isinstance(raw, (list, tuple)) else [raw]
        if len(several) > spec.most:
            raise ValueError(f"{where} has {len(several)} values; expected at most {spec.most}")
        one = dataclasses.replace(spec, most=None)
        return tuple(dict.fromkeys(parse_value(one, value, where) for value in several))
    if raw is None or (raw == AUTO and spec.has_auto):
        if spec.optional:
            return None
        raise ValueError(f"{where} is null; expected {_expected(spec)}")
    if spec.kind == "switch":
        return parse_switch(raw, where)
    if spec.kind == "text":
        return _parse_text(spec, raw, where)
    if spec.kind == "date":
        return _parse_date(raw, where)
    if spec.kind == "shard":
        return _parse_shard(spec, raw, where)
    return _parse_in_bounds(spec, raw, where)


def _parse_in_bounds(spec: Spec, raw: Any, where: str) -> float | int:
    """Parse a size or a number within the bounds of its option."""
    value = parse_size(raw) if spec.kind == "size" else _parse_number(spec.kind, raw)
    low = spec.minimum is not None and value is not None and value < spec.minimum
    high = spec.maximum is not None and value is not None and value > spec.maximum
    if value is None or low or high or (spec.above is not None and value <= spec.above):
        raise ValueError(f"{where} is {brief(raw)}; expected {_expected(spec)}")
    return value


def brief(raw: object) -> str:
    """Shorten a value from text or YAML for an error message. A list or mapping becomes `a list` or `a mapping`."""
    if isinstance(raw, (dict, list, tuple, set)):
        return "a mapping" if isinstance(raw, dict) else "a list"
    if isinstance(raw, int) and raw.bit_length() > SHOWN_BITS:
        return f"a number of {raw.bit_length()} bits"
    text = repr(raw[: 2 * SHOWN_CHARACTERS] if isinstance(raw, (str, bytes)) else raw)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def _parse_text(spec: Spec, raw: Any, where: str) -> str:
    """Parse a non-empty text, which must be one of the choices if there are any."""
    if not isinstance(raw, str) or not raw or not _is_writable(raw):
        what = "not a text that can be used" if spec.secret else brief(raw)
        raise ValueError(f"{where} is {what}; expected {_expected(spec)}")
    if spec.maximum is not None and len(raw) > spec.maximum:
        raise ValueError(f"{where} has {len(raw):,} characters; expected at most {spec.maximum:,.0f}")
    if spec.choices and raw not in spec.choices:
        meant = spec.meant.get(raw.lower())
        did_you_mean = f"; did you mean {meant}?" if meant else nearest(raw, spec.choices)
        raise ValueError(f"{where} is {brief(raw)}; expected {_expected(spec)}{did_you_mean}")
    if spec.may_name_file and raw.startswith(FILE_MARK):
        return FILE_MARK + parse_path(raw.removeprefix(FILE_MARK), where)
    return parse_path(raw, where, spec.path == "any", spec.is_output) if spec.path else raw


def _parse_date(raw: Any, where: str) -> str:
    """Return a date, which YAML reads as one, in the form YYYY-MM-DD."""
    try:
        found = raw if type(raw) is date else datetime.strptime(raw, "%Y-%m-%d").date()
    except (TypeError, ValueError):
        raise ValueError(f"{where} is {brief(raw)}; expected a date, YYYY-MM-DD") from None
    return found.isoformat()


def _parse_shard(spec: Spec, raw: Any, where: str) -> str:
    """Return a shard and the number of shards, at most the maximum, in the form I/N."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", raw, re.ASCII) if isinstance(raw, str) else None
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count <= (spec.maximum or count):
        most = "" if spec.maximum is None else f", N up to {spec.maximum}"
        raise ValueError(f"{where} is {brief(raw)}; expected I/N, such as 2/8 for the second of eight shards{most}")
    return f"{index}/{count}"


def parse_path(raw: str, where: str, is_anywhere: bool = False, is_output: bool = False) -> str:
    """Return the path of a local file or folder, given as a path or an address.

    is_anywhere: return other addresses unchanged; otherwise they raise ValueError. is_output: return the place that the
    name of an output file leads to; ValueError if no file can be written there.
    """
    try:
        name = output_place(raw) if is_output else as_path(raw)
    except UsageError as error:
        raise ValueError(f"{where} {error}") from None
    if (page := hub_page(name)) and not is_anywhere and not os.path.lexists(name):
        raise ValueError(f"{where}: {shown_address(name)}{page}")
    if is_address(name) and not is_anywhere:
        raise ValueError(f"{where} is {shown_address(name)}; expected a file on this machine, or a folder")
    return name


def _is_writable(text: str) -> bool:
    """Return whether a text can be a file name and be written to a file: valid Unicode without NUL."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _parse_number(kind: Kind, raw: Any) -> float | int | None:
    """Return the number in a text or YAML value; None for anything else, NaN and infinity included."""
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
        return None
    try:
        value = float(raw) if kind == "number" else int(raw)
    except (ValueError, OverflowError):
        return None
    whole = kind == "number" or not isinstance(raw, float) or raw == value
    return value if whole and (kind == "integer" or math.isfinite(value)) else None


def parse_size(raw: Any) -> int | None:
    """Return the bytes of `20GiB`, `512M`, `1.5GB` or a plain number; None if the value is not a size."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    pattern = r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]{0,3})\s*"  # longer numbers exceed every option's range
    match = re.fullmatch(pattern, raw) if isinstance(raw, str) else None
    if match is None or match[2].upper() not in SIZE_UNITS:
        return None
    return int(Fraction(match[1]) * SIZE_UNITS[match[2].upper()])


def format_size(size_bytes: int) -> str:
    """Return the shortest exact spelling of a size that parse_size reads back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = SIZE_UNITS[unit.upper()]
        if size_bytes and size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return str(size_bytes)


def rounded_size(size_bytes: int) -> str:
    """Return a rounded size for display, such as `1.5 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, (size_bytes.bit_length() - 1) // 10))
    return f"{size_bytes / 1024**power:.1f} {units[power]}" if power else f"{size_bytes} B"


def parse_switch(raw: Any, where: str) -> bool:
    """Parse a switch: a boolean from YAML, or a text such as `1`, `yes`, `on`, `0`, `no`, `off`."""
    if isinstance(raw, bool):
        return raw
    word = raw.strip().lower() if isinstance(raw, str) else brief(raw)
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{where} is {brief(raw)}; expected true or false")


def _expected(spec: Spec) -> str:
    """Describe the accepted values, as the end of a sentence."""
    if spec.choices:
        return f"one of {', '.join(spec.choices)}"
    if spec.kind == "size":
        most = "" if spec.maximum is None else f", up to {format_size(int(spec.maximum))}"
        return f"a size such as 20GiB or 512MiB{most}"
    if spec.kind == "text":
        return "a text that is not empty, in Unicode and without NUL"
    words = [f"{AUTO} or " * spec.has_auto + ("an integer" if spec.kind == "integer" else "a number")]
    if spec.above is not None:
        words.append(f"above {spec.above}")
    if spec.minimum is not None:
        words.append(f"from {spec.minimum}")
    if spec.maximum is not None:
        words.append(f"up to {spec.maximum}")
    return " ".join(words)
