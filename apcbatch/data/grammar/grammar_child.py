"""Child process that tries to compile a grammar before the run itself compiles it: an untrusted schema or pattern can
take any time and memory.

Its tokenizer has the vocabulary's size, the special tokens at their ids, and single bytes as the other tokens: the time
that a grammar takes does not depend on the vocabulary. Limits: data/helper_child.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from apcbatch.data.helper_child import DONE, REFUSED, Reply, serve

# Limits of the library's counts. They bound the work per token and the memory per answer. Unlike limits of time, they
# are reached at the same token in every run. A lexer state takes 1 to 2 KB.
LIMITS: dict[str, Any] = {
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}


def main() -> None:
    """Answer requests from standard input until it ends."""
    serve(lambda num_tokens, special: Checker(num_tokens, special).answer)


class Checker:
    """Compiler of grammars for a vocabulary of `num_tokens` tokens. special: id -> text of its special tokens."""

    def __init__(self, num_tokens: int, special: Mapping[int, str]) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        self._limits = LLParserLimits(**LIMITS)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(num_tokens, special)))

    def answer(self, form: str, text: str) -> Reply:
        """Compile a grammar; reply with its text in the format `llguidance`, or with the reason why it cannot be used.

        form, text: format and text of the grammar, as grammar_source of data/grammar/llguidance.py returns them."""
        from llguidance import LLMatcher, grammar_from

        grammar = grammar_from(form, text)  # type: ignore[arg-type]
        if form == "grammar":  # grammar_from returns Lark text, not JSON
            grammar = json.dumps({"grammars": [{"lark_grammar": grammar}]})
        reason = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits).get_error()
        return (REFUSED, reason) if reason else (DONE, grammar)


class _Bytes:
    """A tokenizer of single bytes and special tokens, with the attributes that llguidance reads."""

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
