"""The settings that a body or a line gives beside its messages; each wins over the option of the run.

Must not know: lines, files, templates, tokens. Which fields are settings is in data/fields.py; here is what the
honoured ones may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from apcbatch.data.checks import is_integer, optional_flag, optional_integer, optional_number, optional_string, wrong
from apcbatch.data.messages import Tool
from apcbatch.data.sampling import read_sampling, read_top_logprobs
from apcbatch.data.switches import Switches, check_switches
from apcbatch.formats import MOST_TEMPERATURE
from apcbatch.types import MOST_ANSWERS

_UINT64_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Settings:
    """model: the name that was given, or None. params: those of max_tokens, temperature, top_p, seed, logprobs,
    top_logprobs, ignore_eos, n, echo, prompt_logprobs and what read_sampling reads that were given. switches: what the
    template is told. one_call: parallel_tool_calls is false."""

    model: str | None
    params: dict[str, Any]
    switches: Switches = field(default_factory=Switches)
    one_call: bool = False


def check_settings(record: Mapping[str, Any], where: str = "", *, counts_logprobs: bool = False) -> Settings:
    """The settings in a body (where: `body.`) or a line; null sets nothing. RequestError for a value that is none.

    counts_logprobs: logprobs is the number of likeliest tokens, as for completions, and asks for log-probabilities; and
    echo may be given.
    """
    echo = optional_flag(record, "echo", f"{where}echo") if counts_logprobs else None
    prompt_logprobs = read_top_logprobs(record, "prompt_logprobs", where)
    least = 0 if echo or prompt_logprobs is not None else 1  # nothing but the prompt may be asked for
    max_tokens = optional_integer(record, "max_tokens", f"{where}max_tokens", least=least)
    newer = optional_integer(record, "max_completion_tokens", f"{where}max_completion_tokens", least=least)
    top_p = optional_number(record, "top_p", f"{where}top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise wrong(f"{where}top_p", record["top_p"], "a number above 0 and up to 1")
    seed = optional_integer(record, "seed", f"{where}seed")
    top_logprobs = read_top_logprobs(record, "logprobs" if counts_logprobs else "top_logprobs", where)
    if counts_logprobs:
        logprobs = None if top_logprobs is None else True
    else:
        logprobs = optional_flag(record, "logprobs", f"{where}logprobs")
    params = {
        "max_tokens": max_tokens if newer is None else newer,
        "temperature": optional_number(record, "temperature", f"{where}temperature", 0.0, MOST_TEMPERATURE),
        "top_p": top_p,
        "seed": None if seed is None else seed & _UINT64_MAX,
        "logprobs": logprobs,
        "top_logprobs": top_logprobs,
        "ignore_eos": optional_flag(record, "ignore_eos", f"{where}ignore_eos"),
        "n": _num_answers(record, where),
        "echo": echo,
        "prompt_logprobs": prompt_logprobs,
        **read_sampling(record, where),
    }
    given = {key: value for key, value in params.items() if value is not None}
    parallel = optional_flag(record, "parallel_tool_calls", f"{where}parallel_tool_calls")
    model = optional_string(record, "model", f"{where}model")
    return Settings(model, given, check_switches(record, where), parallel is False)


def shown_tools(record: Mapping[str, Any], tools: list[Tool] | None) -> list[Tool] | None:
    """The tools that the model is shown: none if the record's tool_choice forbids calls."""
    return None if record.get("tool_choice") == "none" else tools


def _num_answers(record: Mapping[str, Any], where: str) -> int | None:
    """n, which best_of may repeat: answers are given as they come, and none is the best."""
    n, best_of = record.get("n"), record.get("best_of")
    if n is not None and (not is_integer(n) or not 1 <= n <= MOST_ANSWERS):
        raise wrong(f"{where}n", n, f"an integer from 1 to {MOST_ANSWERS}")
    if best_of is not None and (not is_integer(best_of) or best_of != (1 if n is None else n)):
        raise wrong(f"{where}best_of", best_of, "the number of answers, n: all of them are given, and none is chosen")
    return None if n is None else int(n)
