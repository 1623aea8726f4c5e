"""Read the settings that a body or a line gives beside its messages. Each one overrides the option of the run.

apcbatch/sampling.py lists the settings, with the bounds of numbers. Those that are neither numbers nor flags have a
reader here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from apcbatch.data.checks import (
    invalid,
    is_integer,
    optional_flag,
    optional_number,
    optional_string,
    shown,
    wrong,
)
from apcbatch.data.conversation import Tool
from apcbatch.data.template_options import TemplateOptions, check_template_options
from apcbatch.sampling import LONGEST_STOP_TEXT, MOST_STOP_TEXTS, SETTINGS, Bounds, Setting

_UINT64_MAX = 2**64 - 1
_MOST_BIAS = 100.0
_MOST_IDS = 1 << 31


def _rows(others: str) -> dict[str, Setting]:
    """Return name in the line -> setting, without max_tokens and those that only the `others` may set."""
    rows = (row for row in SETTINGS.values() if row.note and row.shapes != others and row.name != "max_tokens")
    return {row.line or row.name: row for row in rows}


_CHAT_ROWS, _COMPLETION_ROWS = _rows("completions"), _rows("chats")


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings of a body or a line.

    model: the model's name, or None. params: name -> value of the given settings of apcbatch/sampling.py. one_call:
    parallel_tool_calls is false. draft: False turns drafts off.
    """

    model: str | None
    params: dict[str, Any]
    template_options: TemplateOptions
    one_call: bool
    draft: bool


def check_settings(record: Mapping[str, Any], where: str, *, counts_logprobs: bool) -> Settings:
    """Check the settings in a body (where: `body.`) or a line. A null counts as absent. RequestError for an invalid
    value.

    counts_logprobs: whether the settings are those of a completion. In a completion, `logprobs` is the number of
    likeliest tokens to return for each token, and `echo` is allowed.
    """
    rows = _COMPLETION_ROWS if counts_logprobs else _CHAT_ROWS
    params = {row.name: _read(record, name, where, row.bounds) for name, row in rows.items() if name in record}
    if counts_logprobs:
        params["top_logprobs"] = _read(record, "logprobs", where, SETTINGS["top_logprobs"].bounds)
        params["logprobs"] = None if params["top_logprobs"] is None else True
    limit: Any = SETTINGS["max_tokens"].bounds
    if params.get("echo") or params.get("prompt_logprobs") is not None:  # a request may ask for the prompt alone
        limit = replace(limit, least=0)
    older, newer = (_read(record, name, where, limit) for name in ("max_tokens", "max_completion_tokens"))
    params["max_tokens"] = older if newer is None else newer
    _check_best_of(record, params.get("n"), where)
    given = {key: value for key, value in params.items() if value is not None}
    parallel = optional_flag(record, "parallel_tool_calls", f"{where}parallel_tool_calls")
    model = optional_string(record, "model", f"{where}model")
    draft = optional_flag(record, "draft", f"{where}draft")
    return Settings(model, given, check_template_options(record, where), parallel is False, draft is not False)


def shown_tools(record: Mapping[str, Any], tools: list[Tool] | None) -> list[Tool] | None:
    """Return the tools that go into the prompt: None if the record's tool_choice is `none`."""
    return None if record.get("tool_choice") == "none" else tools


def _check_best_of(record: Mapping[str, Any], n: int | None, where: str) -> None:
    """Raise RequestError for a best_of other than n: all answers are returned, and none is chosen as the best."""
    best_of = record.get("best_of")
    if best_of is not None and (not is_integer(best_of) or best_of != (1 if n is None else n)):
        raise wrong(f"{where}best_of", best_of, "the number of answers, n: all of them are given, and none is chosen")


def _read(record: Mapping[str, Any], name: str, where: str, bounds: Bounds | None) -> Any:
    """Read one setting; return None if it is absent or null. RequestError for an invalid value.

    bounds: allowed numbers; None for flags and the settings in _READERS."""
    value, at = record.get(name), where + name
    if value is None:
        return None
    if name in _READERS:
        return _READERS[name](value, at)
    if bounds is None:
        return optional_flag(record, name, at)
    if value not in bounds:
        raise wrong(at, value, str(bounds))
    if name == "seed":
        return value & _UINT64_MAX
    return 0 if name == "top_k" and value == -1 else bounds.type(value)


def _logit_bias(value: object, where: str) -> dict[int, float]:
    """Read OpenAI's logit_bias, an object from token id (as text) to number; return it sorted by id."""
    if not isinstance(value, dict):
        raise wrong(where, value, "an object of token ids and numbers")
    bias = {}
    for key, one in value.items():
        if not (key.isascii() and key.isdigit()) or not int(key[:11]) < _MOST_IDS:
            raise invalid(f"{where} has the key {shown(key)}; expected token ids")
        bias[int(key)] = optional_number(value, key, f"{where}[{shown(key)}]", -_MOST_BIAS, _MOST_BIAS)
        if one is None:
            raise wrong(f"{where}[{shown(key)}]", one, f"a number from {-_MOST_BIAS:g} to {_MOST_BIAS:g}")
    return dict(sorted(bias.items()))  # type: ignore[arg-type]


def _token_ids(value: object, where: str, least: int = 0) -> tuple[int, ...]:
    """Read a list of token ids without repeated ones, in the given order. least: 1 refuses an empty list."""
    expected = "a list of token ids" + (", one at least" if least else "")
    if not isinstance(value, list):
        raise wrong(where, value, expected)
    for index, one in enumerate(value):
        if not is_integer(one) or not 0 <= one < _MOST_IDS:
            raise wrong(f"{where}[{index}]", one, "a token id")
    if len(value) < least:
        raise invalid(f"{where} is empty; expected {expected}")
    return tuple(dict.fromkeys(value))


def _stop_texts(value: object, where: str) -> tuple[str, ...]:
    """Read one stop text or a list of them, without repeated ones. An empty text alone means no stop texts."""
    texts = [value] * bool(value) if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise wrong(where, value, "a text or a list of texts")
    if len(texts) > MOST_STOP_TEXTS:
        raise invalid(f"{where} has {len(texts):,} texts; at most {MOST_STOP_TEXTS} are looked for")
    for index, one in enumerate(texts):
        at = where if isinstance(value, str) else f"{where}[{index}]"
        if not isinstance(one, str) or not one:
            raise wrong(at, one, "a text that is not empty")
        if len(one) > LONGEST_STOP_TEXT:
            raise invalid(f"{at} has {len(one):,} characters; at most {LONGEST_STOP_TEXT:,} are looked for")
    return tuple(dict.fromkeys(texts))


# Readers of the settings that are neither numbers nor flags: (value, place in the line) -> checked value.
_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "logit_bias": _logit_bias,
    "allowed_token_ids": partial(_token_ids, least=1),
    "stop": _stop_texts,
    "stop_token_ids": _token_ids,
}
