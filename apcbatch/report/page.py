"""One HTML file out of a document: the template, the style, the scripts and the data, and a policy that lets nothing
else in.

Must not know: what the document says (apcbatch/report/document.py makes it, the scripts read it), and where the file
goes. The user's texts are in the data alone, compressed and in base64, so that no text can be taken for markup; the
title is the exception, and it is escaped.

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

SCRIPTS = (
    "elements.js",
    "numbers.js",
    "place.js",
    "document.js",
    "cursor.js",
    "verdict.js",
    "tokens.js",
    "tree.js",
    "icicle.js",
    "stem.js",
    "timeline.js",
    "turns.js",
    "curve.js",
    "filter.js",
    "columns.js",
    "table.js",
    "request.js",
    "comparison.js",
    "ran.js",
    "report.js",
)
"""In the order of the page: a file uses those before it when it is read, and all the others when it is called."""


def page(document: dict[str, Any], title: str) -> bytes:
    """The page that shows `document`, UTF-8. `title` is any text. ValueError if a number is not finite."""
    template, style, script = _assets()
    parts = {
        "title": html.escape(title),
        "policy": _policy(style, script),
        "style": style,
        "script": script,
        "data": _packed(document),
    }
    # One pass: what a part says is not searched for names of parts.
    whole = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
    return whole.encode(errors="replace")


def _policy(style: str, script: str) -> str:
    """The Content-Security-Policy, in which the script and the style are named by what they are."""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _packed(document: dict[str, Any]) -> str:
    """The document as JSON, gzip and base64. The same document gives the same text: the gzip header has no time."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


@cache
def _assets() -> tuple[str, str, str]:
    """(template, style, script), as they are in the package."""
    folder = files(__package__) / "assets"
    # A scope of their own, so that no name of theirs is the window's.
    template, style, *scripts = ((folder / name).read_text("utf-8") for name in ("page.html", "style.css", *SCRIPTS))
    script = "\n".join(['"use strict";', "{", *map(_code, scripts), "}", ""])
    return template, style, script


def _code(script: str) -> str:
    """The script without comments that stand alone and without indentation, which every report would carry."""
    return re.sub(r"^(?:/\*\*.*?\*/\n|\s*//[^\n]*\n|\s+)", "", script, flags=re.MULTILINE | re.DOTALL)
