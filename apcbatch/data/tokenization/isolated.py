"""Run a tokenizer, or `transformers` over a model folder, in a helper process (data/tokenization/tokenizer_child.py).

IsolatedTokenizer has the members of `tokenizers.Tokenizer` that data/ uses. It raises RequestErrors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from apcbatch.data.checks import first_line
from apcbatch.data.helper import Helper, LimitExceeded
from apcbatch.data.helper_child import DONE
from apcbatch.data.model_files import only_model_files
from apcbatch.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import AddedToken

_MODULE, _NAME = "apcbatch.data.tokenization.tokenizer_child", "the process for the tokenizer"
_A_TEXT, _TOKENS = "the tokenizer cannot take a text: ", "the tokenizer cannot make a text of tokens: "
_LOAD_SECONDS = 30
_SECONDS_PER_CHARACTER = 1e-5  # limit of processor time: five times the usual time on a slow machine


def read_by_transformers(folder: Path) -> dict[str, Any]:
    """Read a folder's tokenizer with `transformers`, without remote code and downloads.

    Return {tokenizer: text of a tokenizer.json, growth, special_tokens_map, chat_template, split_special}. RequestError
    says why it cannot be read."""
    with only_model_files(folder) as links:
        facts: dict[str, Any] = orjson.loads(_ask(Helper(_MODULE, _NAME), str(links), seconds=_LOAD_SECONDS))
    return facts


class IsolatedTokenizer:
    """A tokenizer in a helper process.

    data: bytes of its tokenizer.json. split_special: tokenise special tokens in a text like any other text. names:
    tokens that `token_to_id` must know besides the added ones. RequestError if it cannot be loaded.
    """

    def __init__(self, data: bytes, split_special: bool = False, names: Sequence[str] = ()) -> None:
        from tokenizers import AddedToken

        self._data = data
        self._helper = Helper(_MODULE, _NAME, data, split_special, start_seconds=_LOAD_SECONDS)
        answer = _ask(self._helper, "facts", list(names))
        self._size, self._ids, added = orjson.loads(answer)
        self._added = {number: AddedToken(content, **flags) for number, content, flags in added}
        self._ids |= {content: number for number, content, _ in added}

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Return the added tokens by id."""
        return self._added

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """Return the number of tokens, added ones included. with_added_tokens: ignored."""
        return int(self._size)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of an added token, or of one of `names`; None for any other token."""
        number: int | None = self._ids.get(token)
        return number

    def to_str(self) -> str:
        """Return the tokenizer.json without the parts that process a text, for a library that needs only the
        vocabulary."""
        whole = orjson.loads(self._data)
        whole |= dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"))
        whole["added_tokens"] = [{**token, "normalized": False} for token in whole.get("added_tokens") or []]
        return orjson.dumps(whole).decode()

    def encode(self, text: str, add_special_tokens: bool = True) -> IsolatedEncoding:
        """Tokenise a text."""
        seconds = len(text) * _SECONDS_PER_CHARACTER
        data = _ask(self._helper, "encode", text, add_special_tokens, seconds=seconds, what=_A_TEXT)
        return IsolatedEncoding(np.frombuffer(data, dtype=np.int32).reshape(3, -1))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode tokens to text. Bytes that are not UTF-8 become U+FFFD."""
        ids = list(map(int, token_ids))
        seconds = len(ids) * _SECONDS_PER_CHARACTER
        data = _ask(self._helper, "decode", ids, skip_special_tokens, seconds=seconds, what=_TOKENS)
        return data.decode("utf-8", "replace")


class IsolatedEncoding:
    """The tokens of a text and their places in it. numbers: (3, tokens) int32, with rows of ids, begins and
    ends. Begin and end are indices of characters; the end is exclusive."""

    def __init__(self, numbers: npt.NDArray[np.int32]) -> None:
        self._numbers = numbers

    @property
    def ids(self) -> list[int]:
        """Return the token ids."""
        ids: list[int] = self._numbers[0].tolist()
        return ids

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Return (begin, end) of each token, in characters of the text."""
        return list(zip(*self._numbers[1:].tolist(), strict=True))

    def char_to_token(self, position: int) -> int | None:
        """Return the index of the first token that covers the character at `position`; None if no token does."""
        found = np.flatnonzero((self._numbers[1] <= position) & (position < self._numbers[2]))
        return int(found[0]) if len(found) else None

    def token_to_chars(self, index: int) -> tuple[int, int] | None:
        """Return (begin, end) of the token at `index`, in characters of the text."""
        begin, end = self._numbers[1:, index].tolist()
        return begin, end


def _ask(helper: Helper, *values: Any, seconds: float = 0, what: str = "") -> bytes:
    """Ask the helper process; return the bytes of its answer.

    seconds: processor time in addition to the usual limit. RequestError, its message beginning with `what`, if the
    library refuses or a limit is exceeded."""
    try:
        kind, data = helper.ask(*values, more_seconds=seconds)
    except LimitExceeded as error:
        raise RequestError(error.code, what + error.message) from None
    if kind != DONE:
        raise RequestError("invalid_request", what + first_line(data.decode("utf-8", "replace")))
    return data
