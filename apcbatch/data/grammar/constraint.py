"""Compile structured output to grammars for a model's tokenizer, and constrain the tokens of each answer by them.

The grammar library is llguidance, imported at first use. Invariants: each answer has its own matcher, so the allowed
tokens depend only on the structured output and the answer's tokens. A grammar that the library does not support, or
that exceeds its limits, raises RequestError. So does every grammar for a tokenizer whose tokens have other texts in the
library than in an answer.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from apcbatch.data.grammar.grammar_child import LIMITS
from apcbatch.data.grammar.llguidance import Thinking, behind_thinking, grammar_source
from apcbatch.data.grammar.structured_output import StructuredOutput
from apcbatch.data.helper import Helper, LimitExceeded
from apcbatch.data.helper_child import DONE
from apcbatch.data.output.tool_parser import CallSyntax
from apcbatch.data.tokenization.tokenizer import Tokenizer
from apcbatch.errors import ErrorCode, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_COMPILED = 256
_SHOWN_REASON = 300
_COMPARED_TOKENS = 500
# Texts with blanks, line ends and letters beyond ASCII, whose tokens are compared.
_COMPARED_TEXTS = (
    "order number 12 in the city",
    '{"größe": [1, true],\n  "東京": "open  now"}',
    "\n\n- it's\tβ 🦔 x\n",
)
# What the library says where a forced text has the text of an added token.
_ADDED = re.compile(r'token "[^"]?\[([0-9]+)\]" doesn.t satisfy the grammar; forced bytes')
_NAMES = {
    "json": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
    "calls": "the parameters of the tools",
}


class _Library(NamedTuple):
    """The library's form of a tokenizer. first: mask of the tokens that may begin an answer, in the format of
    Constraint.fill; None for all of them."""

    tokenizer: LLTokenizer
    first: npt.NDArray[np.int32] | None


class GrammarCompiler:
    """Compiler of grammars for one model, with an LRU cache of MOST_COMPILED grammars.

    syntax: syntax of the model's tool calls, or None.
    """

    def __init__(self, tokenizer: Tokenizer, syntax: CallSyntax | None = None) -> None:
        self._tokenizer, self._syntax = tokenizer, syntax
        added = tokenizer.source.backend_tokenizer.get_added_tokens_decoder()
        special = {number: token.content for number, token in added.items()}
        module, name = "apcbatch.data.grammar.grammar_child", "the process that tries grammars"
        self._helper = Helper(module, name, tokenizer.vocab_size, special)
        self._library: _Library | RequestError | None = None
        self._compiled: OrderedDict[tuple[StructuredOutput, Thinking | None], LLMatcher | RequestError] = OrderedDict()

    def constraint(self, structure: StructuredOutput, thinking: Thinking | None = None) -> GrammarConstraint:
        """Make the constraint of one answer. thinking: markers of the reasoning before the structured output, if any.

        RequestError says why the structured output cannot be used."""
        return GrammarConstraint(self._matcher(structure, thinking).deep_copy(), structure, self._read().first)

    def _matcher(self, structure: StructuredOutput, thinking: Thinking | None) -> LLMatcher:
        """Return the cached matcher in its state before the first token; compile it if it is absent. Only copies of
        it may take tokens."""
        key = (structure, thinking)
        found = self._compiled.pop(key, None)
        if found is None:
            try:
                found = self._compile(structure, thinking)
            except RequestError as error:
                if error.retryable:  # not caused by the grammar, so not cached
                    raise
                found = error
            while len(self._compiled) >= MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled[key] = found
        if isinstance(found, RequestError):
            raise RequestError(found.code, found.message)
        return found

    def _compile(self, structure: StructuredOutput, thinking: Thinking | None) -> LLMatcher:
        markers = (self._tokenizer.markers, self._tokenizer.marker_id)
        try:
            kind, data = self._helper.ask(*grammar_source(structure, self._syntax, markers))
        except LimitExceeded as error:
            raise unusable(structure, error.message, error.code) from None
        except ValueError as error:
            raise unusable(structure, str(error)) from None
        grammar = data.decode("utf-8", "replace")
        if kind != DONE:
            raise unusable(structure, grammar)
        if thinking is not None:
            grammar = behind_thinking(grammar, thinking, markers)
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._read().tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise unusable(structure, matcher.get_error())
        return matcher

    def _read(self) -> _Library:
        """Return the library's form of the tokenizer, made and compared with the tokenizer at first use.

        RequestError if the library cannot read the tokenizer, or reads it otherwise."""
        found = self._library = self._library or _read_tokenizer(self._tokenizer)
        if isinstance(found, RequestError):
            raise RequestError(found.code, found.message)
        return found


def _read_tokenizer(tokenizer: Tokenizer) -> _Library | RequestError:
    """Return the library's form of a tokenizer, or why there is none.

    A normalizer to one of Unicode's forms is left out, as a text that is forced must keep its bytes."""
    from llguidance import LLTokenizer

    backend, eos = tokenizer.source.backend_tokenizer, list(tokenizer.eos_token_ids) or None
    text = backend.to_str()
    if type(backend.normalizer).__name__ in ("NFC", "NFD", "NFKC", "NFKD"):
        text = orjson.dumps(orjson.loads(text) | {"normalizer": None}).decode()
    try:
        library = LLTokenizer(text, n_vocab=tokenizer.vocab_size, eos_token=eos)
        reason = _difference(tokenizer, library)
    except (ValueError, RequestError) as error:
        reason = str(error)
    if reason is None:
        return _Library(library, _first_tokens(tokenizer, library))
    message = f"answers of a given form cannot be made with this model's tokenizer: {_line(reason)}"
    return RequestError("invalid_request", message)


def _difference(tokenizer: Tokenizer, library: LLTokenizer) -> str | None:
    """Compare the library's bytes of some hundred tokens, and its tokens of some texts, with the decoder's texts.

    Return a clause that names the first difference, or None. Two equal tokens are compared, since decoders drop a blank
    before the first one. Added tokens, tokens that are no whole characters, and texts that the tokenizer itself cannot
    take or changes are not compared."""

    def decoded(token_ids: list[int]) -> str:
        return tokenizer.decode_all(token_ids).lstrip(" ")

    backend = tokenizer.source.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    size = min(backend.get_vocab_size(with_added_tokens=True), tokenizer.vocab_size)
    for number in range(0, size, 1 + size // _COMPARED_TOKENS):
        ours = decoded([number, number])
        theirs = library.decode_bytes([number, number]).decode("utf-8", "replace").lstrip(" ")
        if number not in added and backend.id_to_token(number) and "\ufffd" not in ours and ours != theirs:
            return f"token {number}, twice, is {theirs!r} to the grammar library and {ours!r} in an answer"
    for text in _COMPARED_TEXTS:
        with suppress(RequestError):
            if decoded(tokenizer.encode(text).ids) != text.lstrip(" "):
                continue
            ids = library.tokenize_str(text)
            theirs = library.decode_bytes(ids).decode("utf-8", "replace")
            if theirs != text or decoded(ids) != text.lstrip(" "):
                return f"the grammar library makes {theirs!r} of the text {text!r}, and an answer {decoded(ids)!r}"
    return None


def _first_tokens(tokenizer: Tokenizer, library: LLTokenizer) -> npt.NDArray[np.int32] | None:
    """Return the mask of the tokens that do not begin with a blank, if the decoder drops a blank at the beginning of a
    text, so that an answer would lack it; otherwise None."""
    size = tokenizer.vocab_size
    blank = (number for number in range(size) if library.decode_bytes([number]).startswith(b" "))
    example = next(blank, None)
    if example is None or tokenizer.decode_all([example]).startswith(" "):
        return None
    bits = np.ones(-(-size // 32) * 32, np.uint8)
    bits[[example, *blank]] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass(frozen=True, slots=True)
class ConstraintFactory:
    """Factory of the constraints of a request's answers: a Request.constraint. thinking: markers of the reasoning
    before the structured output, if any."""

    compiler: GrammarCompiler
    structure: StructuredOutput
    thinking: Thinking | None = None

    def __call__(self) -> GrammarConstraint:
        """Make the constraint of one answer. RequestError says why the structured output cannot be used."""
        return self.compiler.constraint(self.structure, self.thinking)


class GrammarConstraint:
    """The constraint of one answer: a Constraint (see types.py). matcher: the answer's own copy. first: mask of the
    tokens that may begin the answer, or None."""

    def __init__(
        self, matcher: LLMatcher, structure: StructuredOutput, first: npt.NDArray[np.int32] | None = None
    ) -> None:
        self._matcher, self._structure, self._first = matcher, structure, first

    def fill(self, mask: npt.NDArray[np.int32]) -> bool:
        """Set the bits of the allowed tokens in `mask`, as Constraint.fill says. Stop tokens are allowed if the answer
        is complete."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise unusable(self._structure, self._matcher.get_error())
        if self._first is not None:
            mask &= self._first
            if not mask.any():
                raise unusable(self._structure, "it begins with a blank, which this model's tokenizer drops there")
        return True

    def accept(self, token: int) -> bool:
        """Take the next token; return whether it completes the answer, so that no token can follow."""
        if not self._matcher.consume_token(token):
            raise unusable(self._structure, self._matcher.get_error())
        self._first = None
        return self._matcher.is_stopped()

    def forced(self) -> list[int]:
        """Return the tokens of the text that must follow, as Forcing.forced says."""
        found: list[int] = self._matcher.compute_ff_tokens()
        return found


def unusable(structure: StructuredOutput, reason: str, code: ErrorCode = "invalid_request") -> RequestError:
    """Make the error of structured output that cannot be used. reason: error text of the library."""
    return RequestError(code, f"{_NAMES[structure.kind]} cannot be used: {_line(reason)}")


def _line(reason: str) -> str:
    """Shorten an error text of the library to one line without a full stop, for the end of a sentence."""
    if "NoExtensionBias" in reason:
        return (
            "the grammar library finds no text for it: parts of it contradict each other, or cannot be combined there"
        )
    if (token := _ADDED.search(reason)) is not None:
        return f"it forces the text of the added token {token[1]}, which in an answer is that token and no text"
    text = " ".join(reason.replace("<non-verbose/>", "").split()).rstrip(" .")
    return text if len(text) <= _SHOWN_REASON else f"{text[:_SHOWN_REASON]}..."
