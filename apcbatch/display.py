"""Prepare text for a terminal: escape control characters, measure width in columns, fold lines, add colour.

Every function is pure. Colour never carries information that the text lacks.
"""

from __future__ import annotations

import json
import unicodedata
from typing import TextIO

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str, keep: str = "") -> str:
    """Escape each unprintable character, except those in `keep`, as `\\x1b` or `\\u200b`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else _escape(letter) for letter in text)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 request`, `2,000 requests`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def json_escaped(text: str) -> str:
    """Escape each unprintable character of a JSON text as `\\u009b`, which gives equivalent JSON. Newlines stay."""
    if text.isprintable():
        return text
    pieces = (letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in text)
    return "".join(pieces)


def quoted(text: str) -> str:
    """Return the text between double quotes, on one line."""
    return '"' + visible(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def cells(text: str) -> int:
    """Return the number of terminal columns of a printable text."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def fold(text: str, width: int) -> list[str]:
    """Cut a text into at least one piece of at most `width` columns (at least 2). The pieces concatenate to the
    text."""
    if cells(text) <= width:
        return [text]
    pieces, begin, taken = [], 0, 0
    for at, letter in enumerate(text):
        more = _cells_of(letter)
        if taken + more > width:
            pieces.append(text[begin:at])
            begin, taken = at, 0
        taken += more
    return [*pieces, text[begin:]]


def wrap(sentence: str, width: int | None, indent: str) -> list[str]:
    """Break a sentence at spaces into lines of at most `width` columns, and indent all lines but the first. A word that
    is too long is folded. width: None for one line of any length."""
    if width is None:
        return [sentence]
    rest = sentence.lstrip(" ")
    lines, line = [], sentence[: len(sentence) - len(rest)]
    for word in rest.split(" "):
        longer = f"{line} {word}" if line.strip() else line + word
        if cells(longer) <= width:
            line = longer
            continue
        if line.strip():
            lines.append(line)
            longer = indent + word
        *full, line = fold(longer, width)
        lines += full
    return [*lines, line]


def clip(text: str, width: int) -> str:
    """Cut a text to at most `width` columns. A text that was longer ends with `…`."""
    return text if cells(text) <= width else fold(text, max(2, width - 1))[0] + "…"


class Paint:
    """Colours text for one stream, if the stream is a terminal and colours are wanted."""

    def __init__(self, stream: TextIO | None, wanted: bool) -> None:
        self._on = wanted and stream is not None and stream.isatty()

    def __call__(self, text: str, *styles: str) -> str:
        """Return the text in these STYLES."""
        if not self._on or not styles:
            return text
        return f"\x1b[{';'.join(STYLES[style] for style in styles)}m{text}\x1b[0m"


def _cells_of(letter: str) -> int:
    if letter.isascii():
        return 1
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _escape(letter: str) -> str:
    number = ord(letter)
    if letter in _SHORT:
        return _SHORT[letter]
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
