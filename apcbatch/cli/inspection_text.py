"""Format an inspection as lines of text: wrapped for a terminal, whole lines for a pipe."""

from __future__ import annotations

import json
from collections.abc import Iterator

from apcbatch.display import Paint, cells, counted, fold, quoted, visible, wrap
from apcbatch.job.inspection import Inspection

_POSITION_CELLS = 9  # width of the position before a row of tokens, with the space after it
_SHORT_RULE = 20


def inspection_lines(found: Inspection, width: int | None, paint: Paint) -> Iterator[str]:
    """Yield the lines of a whole inspection. width: the terminal's columns, None for a pipe."""
    yield from _wrapped(_title(found), width, "bold", paint=paint)
    if found.reading is not None:
        yield from _wrapped(f"line {found.line:,} read as a conversation: {visible(found.reading)}", width, paint=paint)
    if found.text is not None:
        yield ""
        yield paint(f"Prompt: {counted(len(found.tokens), 'token')}, {counted(len(found.text), 'character')}", "bold")
        for line in visible(found.text, keep="\n").split("\n"):
            yield from [line] if width is None else fold(line, max(2, width))
    if found.tokens:
        yield ""
        what = "Tokens: position, id, text; * marks a special token, ── a boundary or a kept snapshot"
        yield from _wrapped(what, width, "bold", paint=paint)
        yield from _token_lines(found, width, paint)
        yield ""
        yield from _wrapped(_grid(found), width, paint=paint)
        yield from _shared_lines(found, width, paint)
        yield from _setting_lines(found, width, paint)
        if found.ends:
            yield ""
            yield from _wrapped(f"End: {found.ends}", width, paint=paint)
    yield ""
    if not found.refused:
        yield paint("Refused: nothing", "green")
        return
    yield paint(f"Refused: {found.error_code}", "bold", "red")
    for sentence in found.refused:
        yield from _wrapped(f"  {visible(sentence)}", width, paint=paint)


def _title(found: Inspection) -> str:
    place = f"line {found.line:,}"
    if found.turn is not None:
        place += f", turn {found.turn} of {found.turns[-1]}"
    name = f": {visible(found.custom_id)}" if found.custom_id else ""
    return f"{place}{name} ({found.format or 'of no known format'}, model {visible(found.model)})"


def _token_lines(found: Inspection, width: int | None, paint: Paint) -> Iterator[str]:
    """Yield the tokens, packed into rows of the terminal's width; in a pipe each has a line of its own."""
    room = 0 if width is None else max(2, width - _POSITION_CELLS)
    places = {*found.boundaries, *found.kept, found.resume_at or 0} - {0}
    marks = {position: _rule(found, position, width) for position in places}
    row: list[str] = []
    begin = taken = 0
    for position, token in enumerate(found.tokens):
        cell = f"{token.id}{'*' * token.special} {quoted(token.text)}"
        if row and (width is None or position in marks or taken + 2 + cells(cell) > room):
            yield from _row(begin, row, room, paint)
            row = []
        if position in marks:
            yield paint(marks[position], "cyan")
        if not row:
            begin, taken = position, -2
        row.append(paint(cell, "yellow") if token.special and cells(cell) <= room else cell)
        taken += 2 + cells(cell)
    yield from _row(begin, row, room, paint)
    if len(found.tokens) in marks:
        yield paint(marks[len(found.tokens)], "cyan")


def _row(begin: int, row: list[str], room: int, paint: Paint) -> Iterator[str]:
    """Yield one row of tokens after the position of its first token. A single token wider than the row is folded."""
    head = f"{begin:>{_POSITION_CELLS - 2}}  "
    pieces = fold(row[0], room) if room and len(row) == 1 and "\x1b" not in row[0] else ["  ".join(row)]
    for number, piece in enumerate(pieces):
        yield (paint(head, "dim") if number == 0 else " " * _POSITION_CELLS) + piece


def _rule(found: Inspection, position: int, width: int | None) -> str:
    """Return the rule at a boundary or a kept snapshot: `── 250, kept: read by 2 ──`."""
    label = f"── {position}"
    if position in found.kept:
        label += f", kept: {found.kept[position]}"
    if position == found.resume_at:
        label += ", the request begins here"
    label += " "
    return label + "─" * max(2, (_SHORT_RULE if width is None else width) - cells(label))


def _grid(found: Inspection) -> str:
    if not found.boundaries and not found.kept:
        return f"Boundaries: none, as the prompt is shorter than block size {found.block_size:,}"
    where = f", from {found.boundaries[0]:,} to {found.boundaries[-1]:,}" if found.boundaries else ""
    kept = ", ".join(f"{position:,} ({reason})" for position, reason in list(found.kept.items())[:8])
    more = f" and {len(found.kept) - 8:,} more" if len(found.kept) > 8 else ""
    return (
        f"Boundaries: {len(found.boundaries):,} of block size {found.block_size:,}{where}; with the input up to this "
        f"line, policy {found.policy} keeps {kept or 'none'}{more}"
    )


def _shared_lines(found: Inspection, width: int | None, paint: Paint) -> Iterator[str]:
    yield ""
    if not found.shared:
        yield paint("Shared: nothing, as no earlier request begins alike", "bold")
        return
    what = "Shared: the first earlier request that begins with the same tokens"
    yield from _wrapped(what, width, "bold", paint=paint)
    for shared in found.shared:
        name = f" ({visible(shared.custom_id)})" if shared.custom_id else ""
        turn = f" turn {shared.turn}" if shared.turn is not None else ""
        yield from _wrapped(
            f"  {counted(shared.tokens, 'token')}: line {shared.line:,}{turn}{name}", width, paint=paint
        )


def _setting_lines(found: Inspection, width: int | None, paint: Paint) -> Iterator[str]:
    yield ""
    yield paint("Settings, with their origins", "bold")
    wide = max((len(setting.name) for setting in found.settings), default=0)
    for setting in found.settings:
        value = visible(json.dumps(setting.value, ensure_ascii=False, default=str))
        yield from _wrapped(f"  {setting.name:<{wide}}  {value}  ({visible(setting.origin)})", width, paint=paint)


def _wrapped(sentence: str, width: int | None, *styles: str, paint: Paint) -> list[str]:
    lines = wrap(sentence, None if width is None else max(8, width), indent="    ")
    return [paint(line, *styles) for line in lines]
