"""Mutations: of bytes, of a JSON value, of a text. All draws come from the Random that is given."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

LARGE = 1 << 20

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**12, -(2**63), 10**30,
    0.5, -0.0, 1e-307, 1e-30, 1e300, 1.7e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "", " ", "\0", "a\0b", "null", "true", "-1", "1e999", "NaN", "a" * 3000, "é\u0301\U0001f600", "\ud800", "\ufeff",
    "<|im_start|>", "{{ 1 }}", "{% for x in y %}", "</script>", "../x", "x/y", "%s%n", "assistant", "system", "\r\n",
)  # fmt: skip


def interesting(draw: Random) -> Any:
    """A value that programs tend not to expect."""
    kind = draw.randrange(8)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 5:
        return draw.choice(TEXTS)
    if kind == 5:
        return draw.choice((None, True, False, [], {}, [[]], [None], {"": None}))
    if kind == 6:
        return nested(draw.choice((5, 200, 2000, 20000)), draw.choice((list, dict)))
    return draw.choice(([0] * draw.choice((1, 50, 5000)), {str(n): n for n in range(draw.choice((3, 500)))}))


def number_text(draw: Random) -> str:
    """A JSON number as somebody may write it: of any number of digits, around the limits of integers and floats."""
    digits = "".join(draw.choices("0123456789", k=draw.choice((1, 15, 16, 17, 18, 19, 20, 23, 40, 309)))).lstrip("0")
    kind = draw.randrange(6)
    if kind == 0:
        digits = str(draw.choice((2**53, 2**63, 2**64)) + draw.randint(-2, 2))
    elif kind == 1:
        digits = draw.choice(("1.0", "0.1000000000000000055511151231257827", "0", "0.0", "1e400", "1E5", "5e-324"))
    elif kind == 2:
        digits = f"{digits or 0}.{draw.randrange(10**20)}"
    elif kind == 3:
        digits = f"{digits or 0}e{draw.randint(-340, 290)}"
    return draw.choice(("", "-")) + (digits or "0")


def nested(depth: int, kind: type) -> Any:
    """A list of a list of a list, or the same of mappings."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def mutate_value(draw: Random, value: Any, times: int) -> Any:
    """A copy of a JSON value with some places replaced, dropped, doubled or moved."""
    value = _copy(value)
    for _ in range(times):
        places = list(_places(value))
        if not places:
            return interesting(draw)
        holder, key = draw.choice(places)
        action = draw.randrange(6)
        if action <= 2:
            holder[key] = interesting(draw)
        elif action == 3:
            del holder[key]
        elif action == 4:
            other, other_key = draw.choice(places)
            if not _reaches(other[other_key], holder):
                holder[key] = _copy(other[other_key])
        elif isinstance(holder, dict):
            holder[draw.choice(TEXTS)] = holder.pop(key)
        else:
            holder.insert(key, _copy(holder[key]))
    return value


def _copy(value: Any) -> Any:
    """A copy of a JSON value; None for one that is nested too deeply to be copied."""
    try:
        return copy.deepcopy(value)
    except RecursionError:
        return None


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of everything below a value; shallow values come first, so huge ones cost nothing."""
    stack = [value]
    found = 0
    while stack and found < 5000:
        holder = stack.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            found += 1
            yield holder, key
            stack.append(holder[key])


def _reaches(value: Any, holder: Any) -> bool:
    return value is holder or any(inner is holder for inner, _ in _places(value))


def dump_json(value: Any) -> bytes:
    """JSON of any depth, lone surrogates and NaN included."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return _dump_deep(value)


def _dump_deep(value: Any) -> bytes:
    """JSON without recursion: for values that are nested thousands deep."""
    out: list[str] = []
    stack: list[Any] = [("value", value)]
    while stack:
        kind, item = stack.pop()
        if kind == "text":
            out.append(item)
        elif isinstance(item, (dict, list)):
            is_dict = isinstance(item, dict)
            parts: list[Any] = []
            for number, key in enumerate(item if is_dict else range(len(item))):
                parts.append(("text", ("," if number else "") + (json.dumps(str(key)) + ":" if is_dict else "")))
                parts.append(("value", item[key]))
            stack += [("text", "}" if is_dict else "]"), *reversed(parts), ("text", "{" if is_dict else "[")]
        else:
            out.append(json.dumps(item))
    return "".join(out).encode()


def mutate_bytes(draw: Random, data: bytes, times: int) -> bytes:
    """The bytes with some of them flipped, replaced, dropped, doubled, or cut."""
    data = bytearray(data)
    for _ in range(times):
        if not data:
            return bytes(draw.randbytes(draw.randrange(1, 40)))
        draw.choice(BYTE_ACTIONS)(draw, data)
    return bytes(data[: 64 * LARGE])


def _flip(draw: Random, data: bytearray) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _replace(draw: Random, data: bytearray) -> None:
    data[draw.randrange(len(data))] = draw.choice((0, 1, 9, 10, 13, 34, 92, 123, 125, 127, 128, 255))


def _number(draw: Random, data: bytearray) -> None:
    """Put an integer of some width in place: lengths, counts and offsets are such."""
    width = draw.choice((1, 2, 4, 8))
    begin = draw.randrange(len(data))
    value = draw.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), 2 ** (8 * width - 1) - 1, 1 << 4 * width))
    data[begin : begin + width] = value.to_bytes(width, draw.choice(("little", "big")))[: len(data) - begin]


def _drop(draw: Random, data: bytearray) -> None:
    begin = draw.randrange(len(data))
    del data[begin : begin + draw.choice((1, 3, 64, 4096))]


def _double(draw: Random, data: bytearray) -> None:
    begin = draw.randrange(len(data))
    part = data[begin : begin + draw.choice((1, 7, 100, 5000))]
    data[begin:begin] = part * draw.choice((1, 2, 20))


def _cut(draw: Random, data: bytearray) -> None:
    del data[draw.randrange(len(data)) :]


def _noise(draw: Random, data: bytearray) -> None:
    begin = draw.randrange(len(data))
    data[begin:begin] = draw.randbytes(draw.choice((1, 4, 32)))


BYTE_ACTIONS: tuple[Callable[[Random, bytearray], None], ...] = (
    _flip, _flip, _flip, _replace, _number, _drop, _double, _cut, _noise,
)  # fmt: skip
