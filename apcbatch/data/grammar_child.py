"""The process in which a grammar is compiled for the first time, before the run's own process does: an untrusted schema
or pattern can take any time and memory there.

Must not know: models, files, what a grammar is for. Its tokenizer has the vocabulary's size, the special tokens in
their places, and else single bytes: how long a grammar takes does not depend on the vocabulary. Invariants: the system
ends this process if one grammar takes more than its processor time or stack; its memory is bounded. Its input comes
from the parent and is trusted to be whole; its output is a letter, a length and UTF-8.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping

from apcbatch.data.frames import DONE, REFUSED, begin_clock, bound_this_process, read_request, write_answer
from apcbatch.data.grammar_bounds import CPU_SECONDS, LIMITS, MEMORY_BYTES, STACK_BYTES


def main() -> None:
    """Answer requests from standard input until it ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    bound_this_process(MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    check = Checker(*read_request(requests))
    while request := read_request(requests):
        begin_clock(CPU_SECONDS)
        answer = check.answer(*request)
        begin_clock(0)
        write_answer(answers, *answer)


class Checker:
    """Compiles grammars for a vocabulary of so many tokens. special: the names of its special tokens."""

    def __init__(self, num_tokens: int, special: Mapping[int, str]) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        self._limits = LLParserLimits(**LIMITS)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(num_tokens, special)))

    def answer(self, form: str, text: str) -> tuple[bytes, str]:
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
            return REFUSED, "it takes too much memory"
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
