"""A benchmark document that is written to disk after every figure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Keep = Callable[[dict[str, Any], list[dict[str, Any]]], None]


def write(document: dict[str, Any], out: Path | None) -> None:
    """Write it to `out`, where there is one."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")


def growing(document: dict[str, Any], out: Path | None, begin: float) -> Keep:
    """What takes a figure and the list of the document that it belongs to: it prints the figure and writes the document
    with the `seconds` since begin (time.perf_counter())."""

    def keep(found: dict[str, Any], where: list[dict[str, Any]]) -> None:
        print(json.dumps(found), flush=True)
        where.append(found)
        document["seconds"] = time.perf_counter() - begin
        write(document, out)

    return keep
