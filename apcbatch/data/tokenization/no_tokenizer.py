"""Stand in for the tokenizer of a model folder without one, so that prompts of token ids can be answered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.end_tokens import EndTokens, read_end_tokens
from apcbatch.data.model_files import TOKENIZER_FILES
from apcbatch.data.tokenization.tokenizer import Tokenizer, load_tokenizer, read_vocab_size
from apcbatch.data.tokenization.tokenizer_json import TokenizerSource
from apcbatch.errors import ModelError, RequestError

if TYPE_CHECKING:
    from tokenizers import Encoding


class NoTokenizer(Tokenizer):
    """Placeholder of an absent tokenizer.

    The `encode` methods raise RequestError. `decode` returns an empty text; `decode_all` returns `token_id:17` for the
    token 17.
    """

    reads_text = False
    markers = None

    def __init__(self, folder: Path, vocab_size: int, end_tokens: EndTokens) -> None:
        self.vocab_size, self.end_tokens, self.eos_token_ids = vocab_size, end_tokens, tuple(end_tokens.files)
        self.answer_schema, self.added_texts = "", ()
        self._folder, self.special, self._dropped_ids = folder, {}, set()
        self.source = TokenizerSource(None, {}, None, str(folder))  # type: ignore[arg-type]

    def require_for(self, what: str) -> NoReturn:
        """Raise RequestError: `what` needs a tokenizer."""
        message = f"{what} needs a tokenizer, and {self._folder} has none; give a prompt of token ids, without it"
        raise RequestError("invalid_request", message)

    def encode(self, text: str, adds_special: bool = False) -> Encoding:
        self.require_for("a text")

    def encode_prompt(self, text: str) -> list[int]:
        self.require_for("a text")

    def encode_continuation(self, text: str) -> list[int]:
        self.require_for("a text")

    @property
    def begins_with_bos(self) -> bool:
        return False

    def decode_all(self, token_ids: Sequence[int]) -> str:
        return "".join(f"token_id:{number}" for number in token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


def load_any_tokenizer(folder: Path, warn: Callable[[str], None]) -> Tokenizer:
    """Load the tokenizer of a model folder.

    Without tokenizer files, take the vocab_size of config.json, warn, and return a NoTokenizer. ModelError for a
    damaged tokenizer, and for a folder that has neither a tokenizer nor vocab_size."""
    if not folder.is_dir() or any(os.path.lexists(folder / name) for name in TOKENIZER_FILES):
        return load_tokenizer(folder, warn)
    vocab_size = read_vocab_size(folder)
    if vocab_size is None:
        return load_tokenizer(folder)  # raises the ModelError that says what is missing
    warn(
        f"{folder} has no tokenizer: prompts of token ids are answered with an empty text, their tokens are in "
        "apcbatch.completion_token_ids; every other line is an error record"
    )
    return NoTokenizer(folder, vocab_size, read_end_tokens(folder, vocab_size))


def check_first(records: Iterator[Conversation | BadLine], folder: Path) -> Iterator[Conversation | BadLine]:
    """Return the records unchanged; ModelError if the first one is a conversation or a prompt of text.

    Call it for a model without a tokenizer, so that such an input fails before the run."""
    first = next(records, None)
    if isinstance(first, Conversation) and not isinstance(first.prompt, list):
        files = ", ".join(TOKENIZER_FILES)
        raise ModelError(f"{folder} has no tokenizer; expected one of {files} in it, or prompts of token ids")
    return records if first is None else chain([first], records)
