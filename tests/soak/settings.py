"""Random settings of a request: each one of apcbatch/sampling.py is drawn at some time, and those that make tiny models
repeat themselves, so that drafts are accepted."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Shape = Literal["chat", "completions"]

FIRST_ID, LAST_ID = 3, 4000
MOST_NEW = 60  # tokens of an answer
SCHEMA = {
    "type": "object",
    "properties": {"order": {"type": "string", "pattern": "^[A-Z]-[0-9]{1,3}$"}, "days": {"enum": [1, 2, 7]}},
    "required": ["order", "days"],
    "additionalProperties": False,
}
CALLED = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
_VALUES: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 2, 5, 12, 40, MOST_NEW),
    "temperature": (0, 0.5, 1, 2),
    "top_p": (0.3, 0.9, 1),
    "seed": (0, 7, -3, 2**40),
    "ignore_eos": (True, False),
    "top_k": (-1, 0, 1, 5, 40),
    "min_p": (0, 0.05, 0.5),
    "presence_penalty": (-2, 0.5, 2),
    "frequency_penalty": (-2, -0.5, 0.3),
    "repetition_penalty": (0.7, 1.3),
    "min_tokens": (0, 3, 9),
    "stop": ("e", ["a", "th", " t"], "\n", ["or", "qu", "ing", "on"]),
    "include_stop_str_in_output": (True, False),
    "n": (1, 2, 3),
    "prompt_logprobs": (0, 2),
    "draft": (False, True),
    "return_token_ids": (True, False),
}
_OF_CHATS: dict[str, tuple[Any, ...]] = {"logprobs": (True, False), "top_logprobs": (0, 1, 5)}
_OF_COMPLETIONS: dict[str, tuple[Any, ...]] = {"logprobs": (0, 3), "echo": (True,)}
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"guided_json": SCHEMA},
    {"guided_json": SCHEMA, "guided_whitespace_pattern": ""},
    {"guided_regex": "(yes|no, not at all){2,9}"},
    {"guided_choice": ["it is on its way", "it is lost", "it"]},
    {"response_format": {"type": "json_object"}},
)
# of these, a run may have each as an option
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "top_k": (1, 5, 40),
    "min_p": (0.05, 0.5),
    "presence_penalty": (-2, 0.5),
    "frequency_penalty": (-2, -0.5, 0.3),
    "repetition_penalty": (0.7, 1.3),
    "min_tokens": (3, 9),
    "stop": ("e", "th", "\n"),
    "stop_token_id": (17, 300),
    "top_logprobs": (2,),
    "ignore_eos": ("",),
    "token_ids": ("",),
    "logprobs_mode": ("processed",),
}


def line_settings(draw: np.random.Generator, shape: Shape) -> dict[str, Any]:
    """Up to five settings of one request, and in one of ten a form of its answer. A wrong combination is answered with
    an error, in every run alike."""
    values = _VALUES | (_OF_CHATS if shape == "chat" else _OF_COMPLETIONS)
    names = [*values, "logit_bias", "allowed_token_ids", "stop_token_ids"]
    found: dict[str, Any] = {}
    for place in draw.permutation(len(names))[: int(draw.integers(6))]:
        name = names[int(place)]
        found[name] = _ids(draw, name) if name not in values else values[name][int(draw.integers(len(values[name])))]
    if "top_logprobs" in found:
        found["logprobs"] = True
    if draw.random() < 0.1:
        found |= STRUCTURES[int(draw.integers(len(STRUCTURES)))] | {"max_tokens": MOST_NEW}
    elif shape == "chat" and draw.random() < 0.03:
        found |= {"tools": [CALLED], "tool_choice": "required", "max_tokens": MOST_NEW}
    return found


def run_settings(draw: np.random.Generator) -> dict[str, str]:
    """Up to three settings of a run, as options."""
    names = list(_OPTIONS)
    return {
        names[int(place)]: str(_OPTIONS[names[int(place)]][int(draw.integers(len(_OPTIONS[names[int(place)]])))])
        for place in draw.permutation(len(names))[: int(draw.integers(4))]
    }


def _ids(draw: np.random.Generator, name: str) -> Any:
    count = {"logit_bias": (1, 4), "allowed_token_ids": (1, 6), "stop_token_ids": (1, 40)}[name]
    ids = [int(one) for one in draw.integers(FIRST_ID, LAST_ID, int(draw.integers(*count)))]
    if name == "logit_bias":
        return {str(one): float(draw.choice([-100, -1, 4, 30])) for one in ids}
    return ids
