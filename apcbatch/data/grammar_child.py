"""The process in which a grammar is compiled for the first time, before the run's own process does: an untrusted schema
or pattern can take any time and memory there.

Must not know: models, files, what a grammar is for. Its tokenizer has the vocabulary's size, the special tokens in
their places, and else single bytes: how long a grammar takes does not depend on the vocabulary. Its bounds are those of
data/helper_child.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from apcbatch.data.helper_child import DONE, NO_MEMORY, REFUSED, Answer, serve

# What the library counts, so that one token of one answer, and what an answer has kept, are bounded: the same work for
# the same grammar and tokens, whatever else runs. The lexer's states take 1 to 2 KB each.
LIMITS: dict[str, Any] = {
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}


def main() -> None:
    """Answer requests from standard input until it ends."""
    serve(lambda num_tokens, special: Checker(num_tokens, special).answers)


class Checker:
    """Compiles grammars for a vocabulary of so many tokens. special: the names of its special tokens."""

    def __init__(self, num_tokens: int, special: Mapping[int, str]) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        self._limits = LLParserLimits(**LIMITS)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(num_tokens, special)))

    def answers(self, form: str, text: str) -> Iterator[Answer]:
        """The one answer to a request."""
        yield self._answer(form, text)

    def _answer(self, form: str, text: str) -> Answer:
        """A letter, and the grammar as the library reads it, or the reason why it cannot be used."""
        from llguidance import LLMatcher, grammar_from

        try:
            grammar = grammar_from(form, text)  # type: ignore[arg-type]
            if form == "grammar":  # which comes back as text
                grammar = json.dumps({"grammars": [{"lark_grammar": grammar}]})
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        except RecursionError:
            return REFUSED, "it is nested too deeply"
        except MemoryError:
            return NO_MEMORY, ""
        except Exception as error:  # the library's words about what it cannot convert
            return REFUSED, str(error) or type(error).__name__
        reason = matcher.get_error()
        return (REFUSED, reason) if reason else (DONE, grammar)


class _Bytes:
    """A vocabulary of single bytes and special tokens, as the library wants to be shown one."""

    eos_token_id = 0
    bos_token_id = None

    def __init__(self, num_tokens: int, special: Mapping[int, str]) -> None:
        special = {number: name for number, name in special.items() if number < num_tokens} or {0: "<eos>"}
        self.eos_token_id = min(special)
        self.special_token_ids = sorted(special)
        plain = [number for number in range(min(num_tokens, 256 + len(special))) if number not in special]
        self.tokens = [b""] * num_tokens
        for number, name in special.items():
            self.tokens[number] = name.encode(errors="replace")
        for byte, number in enumerate(plain[:256]):
            self.tokens[number] = bytes([byte])

    def __call__(self, text: str) -> list[int]:
        return []
