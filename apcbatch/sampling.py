"""The settings of a request in one table: type, default, bounds, texts, and which inputs may set each.

A row defines:
- the option (config.py) and the field of Request (types.py)
- the fields of a line (data/fields.py, data/request_settings.py)
- the engine's checks (engine/validation.py)
- the values that a model suggests (data/generation_config.py)
- the digest and the run file (job/request.py, job/runfile.py)
- the pages of fields and options

engine/sampler.py implements the settings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

MOST_TOKENS = 2**31 - 1
MOST_ANSWERS = 128  # per request
MOST_TOP_LOGPROBS = 20  # as OpenAI's API has it
MOST_STOP_TEXTS = 64
LONGEST_STOP_TEXT = 1024  # characters
LARGEST_PENALTY = 1e6  # a float32 logit stays finite when multiplied by it or added to it
LARGEST_COUNT = 2**63 - 1  # tokens; the engine's sums of it stay in range


@dataclass(frozen=True, slots=True)
class Bounds:
    """Accepted numbers of one type.

    least, most: inclusive bounds; None for no bound, though a float must be finite. above: least is exclusive.
    expected: description of the bounds, if the generated one does not fit.
    """

    type: type[int] | type[float]
    least: float | None = None
    most: float | None = None
    above: bool = False
    expected: str = ""

    def __contains__(self, value: object) -> bool:
        """Return whether a value is a number within the bounds. NumPy numbers are accepted, booleans are not."""
        if not isinstance(value, Integral if self.type is int else Real) or isinstance(value, bool):
            return False
        if self.least is not None and (value < self.least or (self.above and value == self.least)):
            return False
        most = sys.float_info.max if self.most is None and self.type is float else self.most
        return most is None or value <= most

    def __str__(self) -> str:
        """Describe the bounds: `an integer from 1 to 128`, `a number above 0 and up to 1`, `an integer of at least
        0`."""
        noun = "an integer" if self.type is int else "a number"
        if self.expected or self.least is None:
            return self.expected or noun
        if self.above:
            return f"{noun} above {_digits(self.least)}" + (
                "" if self.most is None else f" and up to {_digits(self.most)}"
            )
        if self.most is None:
            return f"{noun} of at least {_digits(self.least)}"
        return f"{noun} from {_digits(self.least)} to {_digits(self.most)}"


def _digits(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a request.

    name: name in Request, in the parameters of a conversation and in the digest. default: used if neither option nor
    line sets it. in_request: Request has the field. in_every_digest: the digest includes it even at its default. Later
    settings are included only when set, so that digests of earlier versions stay valid.

    note: accepted values in a line, for docs/reference/formats.md; empty if a line cannot set it. line: name of the
    field in a line, if different. shapes: kinds of lines and bodies that may set it.

    help: help text of the option; empty if there is no option. option: name of the option, if different.
    option_default: default of the option, if different.

    bounds: bounds of a number; None for another type. option_bounds: bounds of the option, if different. engine_bounds:
    bounds in the engine, if different.

    suggested_as: name in generation_config.json; empty if a model suggests no value. only_drawn: the suggestion counts
    only together with do_sample.
    """

    name: str
    default: Any
    note: str = ""
    help: str = ""
    bounds: Bounds | None = None
    option_bounds: Bounds | None = None
    engine_bounds: Bounds | None = None
    line: str = ""
    option: str = ""
    option_default: Any = None
    shapes: Literal["all", "chats", "completions"] = "all"
    in_request: bool = True
    in_every_digest: bool = False
    suggested_as: str = ""
    only_drawn: bool = False

    @property
    def option_name(self) -> str:
        """Name of the option; empty if there is none."""
        return (self.option or self.name) if self.help else ""


_ROWS = (
    Setting(
        "max_tokens",
        16,
        "maximum new tokens, from 1; from 0 with `echo` or `prompt_logprobs`",
        "Maximum new tokens of a request; a line's own value wins. Unless given, at most what --max-request-tokens and "
        "the context leave.",
        Bounds(int, 1),
        option_default=1024,
        option_bounds=Bounds(int, 1, MOST_TOKENS),
        engine_bounds=Bounds(int, 1, LARGEST_COUNT),
        in_every_digest=True,
        suggested_as="max_new_tokens",
    ),
    Setting(
        "temperature",
        0.0,
        "from 0 (greedy) to 2",
        "0 is greedy; above 0, up to 2, samples, more randomly the higher.",
        Bounds(float, 0, 2),  # as OpenAI's API has it
        engine_bounds=Bounds(float, 0),
        in_every_digest=True,
        suggested_as="temperature",
        only_drawn=True,
    ),
    Setting(
        "top_p",
        1.0,
        "above 0, up to 1",
        "Sample from the fewest tokens whose probabilities sum to F.",
        Bounds(float, 0, 1, above=True),
        in_every_digest=True,
        suggested_as="top_p",
        only_drawn=True,
    ),
    Setting(
        "seed",
        0,
        "an integer; equal seeds sample alike under any id ([seeds](../sampling.md#seeds))",
        "Seed of lines without their own; each samples by it and the line's id.",
        Bounds(int),
        option_bounds=Bounds(int, 0, 2**63 - 1),
        engine_bounds=Bounds(int, -(2**63), 2**64 - 1),  # signed and unsigned 64-bit numbers
        in_every_digest=True,
    ),
    Setting(
        "ignore_eos",
        False,
        "true or false: generate `max_tokens` tokens, past any end of answer",
        "Generate --max-tokens tokens, past any end of answer.",
        in_every_digest=True,
    ),
    Setting(
        "logprobs",
        False,
        "true or false",
        "Write the log-probability of each new token.",
        shapes="chats",
        in_every_digest=True,
    ),
    Setting(
        "top_logprobs",
        0,
        f"0 to {MOST_TOP_LOGPROBS} likeliest tokens for each one, with `logprobs`",
        "Write the N likeliest tokens with their log-probabilities too; above 0 it implies --logprobs.",
        Bounds(int, 0, MOST_TOP_LOGPROBS),
        shapes="chats",
    ),
    Setting(
        "top_k",
        0,
        "sample from this number of likeliest tokens; 0 or -1 is all",
        "Sample from the N likeliest tokens; 0 is all.",
        Bounds(int, -1, expected="an integer of at least 1, or 0 or -1 for all tokens"),
        option_bounds=Bounds(int, 0, MOST_TOKENS),
        suggested_as="top_k",
        only_drawn=True,
    ),
    Setting(
        "min_p",
        0.0,
        "sample from tokens with at least this share of the largest probability, 0 to 1",
        "Sample from tokens with at least this share of the largest probability.",
        Bounds(float, 0, 1),
        suggested_as="min_p",
        only_drawn=True,
    ),
    Setting(
        "presence_penalty",
        0.0,
        "-2 to 2: subtracted from the logit of each token in the answer",
        "Subtract F from the logit of each token in the answer.",
        Bounds(float, -2, 2),
        engine_bounds=Bounds(float, -LARGEST_PENALTY, LARGEST_PENALTY),
    ),
    Setting(
        "frequency_penalty",
        0.0,
        "-2 to 2: subtracted once for each occurrence in the answer",
        "Subtract F from a token's logit for each occurrence in the answer.",
        Bounds(float, -2, 2),
        engine_bounds=Bounds(float, -LARGEST_PENALTY, LARGEST_PENALTY),
    ),
    Setting(
        "repetition_penalty",
        1.0,
        "0.01 to 100: divides the logits of tokens in prompt and answer; 1 is off",
        "Divide the logits of tokens in prompt and answer by F; above 1 makes them rarer.",
        Bounds(float, 0.01, 100),
        engine_bounds=Bounds(float, 1 / LARGEST_PENALTY, LARGEST_PENALTY),
        suggested_as="repetition_penalty",
    ),
    Setting("logit_bias", {}, "an object: token id -> number to add to its logit, -100 to 100"),
    Setting("allowed_token_ids", None, "a non-empty list of the only tokens that may be generated"),
    Setting(
        "min_tokens",
        0,
        "minimum new tokens, before anything but `max_tokens` ends the answer",
        "Minimum new tokens of a request.",
        Bounds(int, 0),
        option_bounds=Bounds(int, 0, MOST_TOKENS),
    ),
    Setting(
        "stop",
        (),
        f"a text, or up to {MOST_STOP_TEXTS}, that ends the answer and is removed from it",
        "Text that ends an answer and is removed from it; may be given several times.",
        in_request=False,
    ),
    Setting(
        "stop_token_ids",
        (),
        "tokens that end the answer, besides the model's own",
        "Token id that ends an answer, besides the model's own; may be given several times.",
        option="stop_token_id",
    ),
    Setting(
        "keeps_stop",
        False,
        "true keeps the `stop` text or token in the answer",
        line="include_stop_str_in_output",
        in_request=False,
    ),
    Setting("structure", None, in_request=False),  # see data/grammar/structured_output.py
    Setting(
        "n", 1, f"1 to {MOST_ANSWERS} answers, drawn from one prefill of the prompt", "", Bounds(int, 1, MOST_ANSWERS)
    ),
    Setting(
        "echo",
        False,
        "true puts the prompt before the answer, in `logprobs` too",
        shapes="completions",
        in_request=False,
    ),
    Setting(
        "prompt_logprobs",
        None,
        f"0 to {MOST_TOP_LOGPROBS} likeliest tokens beside each one of the prompt, in `apcbatch.prompt_logprobs`",
        bounds=Bounds(int, 0, MOST_TOP_LOGPROBS),
        in_request=False,
    ),
    Setting(
        "return_token_ids",
        False,
        "true adds `prompt_token_ids` to the body, and `token_ids` to each choice",
        "Add the token ids of prompt and answers to the body: prompt_token_ids, and token_ids of each choice.",
        option="token_ids",
        in_request=False,
    ),
)
SETTINGS: Mapping[str, Setting] = {row.name: row for row in _ROWS}


def default_of(name: str) -> Any:
    """Return a setting's default, for a field of Request."""
    return SETTINGS[name].default
