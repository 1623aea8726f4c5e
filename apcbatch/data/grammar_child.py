"""The process in which a grammar is compiled for the first time, before the run's own process does: an untrusted schema
or pattern can take any time and memory there.

Must not know: models, files, what a grammar is for. Its tokenizer has the vocabulary's size, the special tokens in
their places, and else single bytes: how long a grammar takes does not depend on the vocabulary. Invariants: the system
ends this process if one grammar takes more than its processor time or stack; its memory is bounded. Its input comes
from the parent and is trusted to be whole; its output is a letter, a length and UTF-8.
"""

from __future__ import annotations

import json
import marshal
import resource
import signal
import sys
from collections.abc import Mapping
from typing import BinaryIO

from apcbatch.data.grammar_frames import (
    ANSWER_HEAD,
    CPU_SECONDS,
    DONE,
    LIMITS,
    MEMORY_BYTES,
    REASON_CHARACTERS,
    REFUSED,
    REQUEST_HEAD,
    STACK_BYTES,
)


def main() -> None:
    """Answer requests from standard input until it ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    _bound_this_process()
    check = Checker(*marshal.loads(_read_request(requests)))
    while request := _read_request(requests):
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        letter, text = check.answer(*marshal.loads(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = (text if letter == DONE else text[:REASON_CHARACTERS]).encode(errors="replace")
        answers.write(ANSWER_HEAD.pack(letter, len(data)) + data)
        answers.flush()


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


def _bound_this_process() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _read_request(requests: BinaryIO) -> bytes:
    head = requests.read(REQUEST_HEAD.size)
    return requests.read(REQUEST_HEAD.unpack(head)[0]) if len(head) == REQUEST_HEAD.size else b""
