"""Structures compiled against a model's tokenizer, and what says for one answer which tokens may come next.

Must not know: engines, requests, files. The library is llguidance (docs/structured-output.md says why); it is imported
at the first structure. Invariants: each answer has a matcher of its own, so what may come depends on the structure and
the answer's tokens alone; a structure that the library cannot do, or that takes more than its bounds, is a
RequestError.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from apcbatch.data.grammar_child import LIMITS
from apcbatch.data.grammar_source import Thinking, behind_thinking, grammar_source
from apcbatch.data.helper import BeyondBounds, Helper
from apcbatch.data.helper_child import DONE
from apcbatch.data.structure import Structure
from apcbatch.data.tokenizer import Tokenizer
from apcbatch.data.tool_parser import CallSyntax
from apcbatch.errors import ErrorCode, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_COMPILED = 256
_SHOWN_REASON = 300
_NAMES = {
    "json": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
    "calls": "the parameters of the tools",
}


class Constraints:
    """Makes constraints for one model. syntax: how it writes tool calls, or None."""

    def __init__(self, tokenizer: Tokenizer, syntax: CallSyntax | None = None) -> None:
        self._tokenizer, self._syntax = tokenizer, syntax
        added = tokenizer.source.backend_tokenizer.get_added_tokens_decoder()
        special = {number: token.content for number, token in added.items()}
        module, name = "apcbatch.data.grammar_child", "the process that tries grammars"
        self._helper = Helper(module, name, tokenizer.vocab_size, special)
        self._library: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[Structure, Thinking | None], LLMatcher | RequestError] = OrderedDict()

    def constraint(self, structure: Structure, thinking: Thinking | None = None) -> GrammarConstraint:
        """A constraint for one answer (see types.py). thinking: the reasoning that may come before.

        RequestError says why the structure cannot be used.
        """
        return GrammarConstraint(self._matcher(structure, thinking).deep_copy(), structure)

    def _matcher(self, structure: Structure, thinking: Thinking | None) -> LLMatcher:
        """The matcher of a structure before any token; it is only copied."""
        key = (structure, thinking)
        found = self._compiled.pop(key, None)
        if found is None:
            try:
                found = self._compile(structure, thinking)
            except RequestError as error:
                if error.retryable:  # its cause is not in the structure
                    raise
                found = error
            while len(self._compiled) >= MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled[key] = found
        if isinstance(found, RequestError):
            raise RequestError(found.code, found.message)
        return found

    def _compile(self, structure: Structure, thinking: Thinking | None) -> LLMatcher:
        markers = (self._tokenizer.markers, self._tokenizer.marker_id)
        try:
            letter, data = self._helper.ask(*grammar_source(structure, self._syntax, markers))
        except BeyondBounds as error:
            raise unusable(structure, error.message, error.code) from None
        except ValueError as error:
            raise unusable(structure, str(error)) from None
        grammar = data.decode("utf-8", "replace")
        if letter != DONE:
            raise unusable(structure, grammar)
        if thinking is not None:
            grammar = behind_thinking(grammar, thinking, markers)
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise unusable(structure, matcher.get_error())
        return matcher

    def _tokens(self) -> LLTokenizer:
        """The library's view of the tokenizer; made once."""
        if self._library is None:
            from llguidance import LLTokenizer

            tokenizer = self._tokenizer
            try:
                self._library = LLTokenizer(
                    tokenizer.source.backend_tokenizer.to_str(),
                    n_vocab=tokenizer.vocab_size,
                    eos_token=list(tokenizer.eos_token_ids) or None,
                )
            except ValueError as error:
                message = f"answers of a given form cannot be made with this model's tokenizer: {_line(str(error))}"
                raise RequestError("invalid_request", message) from None
        return self._library


@dataclass(frozen=True, slots=True)
class Form:
    """Makes what constrains each answer of a request that has a form: what Request.constraint is. thinking: the
    reasoning that may come before it."""

    constraints: Constraints
    structure: Structure
    thinking: Thinking | None = None

    def __call__(self) -> GrammarConstraint:
        """For the next answer. RequestError says why the structure cannot be used."""
        return self.constraints.constraint(self.structure, self.thinking)


class GrammarConstraint:
    """Which tokens may come next in one answer: a Constraint (see types.py). matcher: of its own."""

    def __init__(self, matcher: LLMatcher, structure: Structure) -> None:
        self._matcher, self._structure = matcher, structure

    def fill(self, mask: npt.NDArray[np.int32]) -> bool:
        """Write which tokens may come; see Constraint. The model's stop tokens may where the form is complete."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise unusable(self._structure, self._matcher.get_error())
        return True

    def accept(self, token: int) -> bool:
        """Take the next token; true if nothing can follow it."""
        if not self._matcher.consume_token(token):
            raise unusable(self._structure, self._matcher.get_error())
        return self._matcher.is_stopped()


def unusable(structure: Structure, reason: str, code: ErrorCode = "invalid_request") -> RequestError:
    """The error of a structure, with the library's reason."""
    return RequestError(code, f"{_NAMES[structure.kind]} cannot be used: {_line(reason)}")


def _line(reason: str) -> str:
    """The library's words as the end of one sentence."""
    text = " ".join(reason.replace("<non-verbose/>", "").split()).rstrip(" .")
    return text if len(text) <= _SHOWN_REASON else f"{text[:_SHOWN_REASON]}..."
