"""The settings of sampling that a body or a line may give: which tokens are likelier, which may come, what ends it.

Must not know: lines, files, templates, tokens. Whether a token id exists is the engine's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apcbatch.data.checks import invalid, is_integer, optional_flag, optional_integer, optional_number, shown, wrong
from apcbatch.formats import LONGEST_STOP_TEXT, MOST_STOP_TEXTS
from apcbatch.types import MOST_TOP_LOGPROBS

_MOST_PENALTY = 2.0
_REPETITION = (0.01, 100.0)
_MOST_BIAS = 100.0
_MOST_IDS = 1 << 31


def read_sampling(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings by the names of Request's fields, besides stop (texts) and keeps_stop; None for what is not given.
    RequestError for a value that is none."""

    def number(name: str, low: float, high: float) -> float | None:
        return optional_number(record, name, where + name, low, high)

    return {
        "top_k": _top_k(record, f"{where}top_k"),
        "min_p": number("min_p", 0.0, 1.0),
        "presence_penalty": number("presence_penalty", -_MOST_PENALTY, _MOST_PENALTY),
        "frequency_penalty": number("frequency_penalty", -_MOST_PENALTY, _MOST_PENALTY),
        "repetition_penalty": number("repetition_penalty", *_REPETITION),
        "logit_bias": _logit_bias(record.get("logit_bias"), f"{where}logit_bias"),
        "allowed_token_ids": _token_ids(record, "allowed_token_ids", where, least=1),
        "min_tokens": optional_integer(record, "min_tokens", f"{where}min_tokens", least=0),
        "stop": _stop_texts(record.get("stop"), f"{where}stop"),
        "stop_token_ids": _token_ids(record, "stop_token_ids", where),
        "keeps_stop": optional_flag(record, "include_stop_str_in_output", f"{where}include_stop_str_in_output"),
    }


def read_top_logprobs(record: Mapping[str, Any], key: str, where: str) -> int | None:
    """record[key] as a number of likeliest tokens; None if it is absent or null."""
    value = record.get(key)
    if value is not None and (not is_integer(value) or not 0 <= value <= MOST_TOP_LOGPROBS):
        raise wrong(where + key, value, f"an integer from 0 to {MOST_TOP_LOGPROBS}")
    return value


def _top_k(record: Mapping[str, Any], where: str) -> int | None:
    """-1 is another name for 0: all tokens."""
    value = record.get("top_k")
    if value is not None and (not is_integer(value) or value < -1):
        raise wrong(where, value, "an integer of at least 1, or 0 or -1 for all tokens")
    return 0 if value == -1 else value


def _logit_bias(value: object, where: str) -> dict[int, float] | None:
    """OpenAI's form: token ids as texts, each with a number; in the order of the ids."""
    if value is None:
        return None
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


def _token_ids(record: Mapping[str, Any], key: str, where: str, least: int = 0) -> tuple[int, ...] | None:
    """record[key] as distinct token ids in their order; None if it is absent or null."""
    value, expected = record.get(key), "a list of token ids" + (", one at least" if least else "")
    if value is None:
        return None
    if not isinstance(value, list):
        raise wrong(where + key, value, expected)
    for index, one in enumerate(value):
        if not is_integer(one) or not 0 <= one < _MOST_IDS:
            raise wrong(f"{where}{key}[{index}]", one, "a token id")
    if len(value) < least:
        raise invalid(f"{where}{key} is empty; expected {expected}")
    return tuple(dict.fromkeys(value))


def _stop_texts(value: object, where: str) -> tuple[str, ...] | None:
    """One text or a list of them; none for an empty text alone."""
    if value is None:
        return None
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
