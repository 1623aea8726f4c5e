"""Make one HTML file of a document: template, style, scripts, data, and a Content-Security-Policy.

User texts are only in the data, compressed and in base64, and in the title, escaped. So no text can be parsed as
markup.

The policy (https://www.w3.org/TR/CSP3/) allows the one script and the one style by their SHA-256, and no address at
all: the page can neither load nor send anything.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from apcbatch.report.panels import PANELS, Panel

HELPERS = (
    "elements.js",
    "numbers.js",
    "place.js",
    "document.js",
    "cursor.js",
    "tree_numbers.js",
    "edge.js",
    "filter.js",
    "columns.js",
    "request.js",
)
SCRIPTS = (*HELPERS, *(f"{panel.name}.js" for panel in PANELS), "report.js")
"""In the order of the page: while it loads, a script uses only earlier ones; its functions may use all."""


def page(document: dict[str, Any], title: str) -> bytes:
    """Make the page that shows `document`, in UTF-8. title: any text. ValueError if a number is not finite."""
    template, style, script = _assets()
    parts = {
        "title": html.escape(title),
        "policy": f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'",
        "panels": "\n".join(map(_section, PANELS)),
        "style": style,
        "script": script,
        "data": _packed(document),
    }
    # One pass: placeholders inside inserted parts are not replaced.
    whole = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
    return whole.encode(errors="replace")


def _section(panel: Panel) -> str:
    """Make the element of a panel. All panels but the first are hidden until they are drawn; the first is the target of
    a link on the page."""
    short = f' data-short="{panel.short}"' if panel.short else ""
    hidden = "" if panel is PANELS[0] else " hidden"
    title = f"{panel.name}-title"
    return (
        f'  <section id="{panel.name}"{short} aria-labelledby="{title}"{hidden}>'
        f'<h2 id="{title}">{panel.heading}</h2></section>'
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _packed(document: dict[str, Any]) -> str:
    """Pack the document as JSON, gzip and base64. Equal documents give equal text: the gzip header has no time."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


@cache
def _assets() -> tuple[str, str, str]:
    """Read (template, style, script) from the package."""
    folder = files(__package__) / "assets"
    # The braces are a scope of the scripts' own, so that they define no globals.
    template, style, *scripts = ((folder / name).read_text("utf-8") for name in ("page.html", "style.css", *SCRIPTS))
    script = "\n".join(['"use strict";', "{", *map(_code, scripts), "}", ""])
    return template, style, script


def _code(script: str) -> str:
    """Return the script without whole-line comments and indentation, to save space in every report."""
    return re.sub(r"^(?:/\*\*.*?\*/\n|\s*//[^\n]*\n|\s+)", "", script, flags=re.MULTILINE | re.DOTALL)
