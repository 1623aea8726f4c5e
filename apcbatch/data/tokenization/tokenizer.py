"""Load the tokenizer of a model folder; encode and decode text, and find the stop tokens and the vocabulary's size.

data/tokenization/tokenizer_json.py reads the files. Invariants: a text is tokenised only if it may fit into a request,
which bounds the memory for it. Signals are handled while a long text is tokenised. What the library raises for a text,
a panic included, becomes a RequestError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING, TypeVar

from apcbatch.config import Config
from apcbatch.data.checks import first_line
from apcbatch.data.end_tokens import NO_END_TOKENS, EndTokens, read_end_tokens
from apcbatch.data.helper_child import MAX_CHARACTERS
from apcbatch.data.model_files import TOKENIZER_FILES, model_files, read_model_json
from apcbatch.data.tokenization.tokenizer_json import TokenizerSource, read_tokenizer
from apcbatch.errors import ModelError, RequestError

if TYPE_CHECKING:
    from tokenizers import Encoding

TOKEN_CHARACTERS = 512  # a text of more characters for each token of a request is refused before it is tokenised
_MOST_BYTES = 2 << 20  # the tokens of a longer text are counted first: one for each byte take 0.5 GiB
# By how much a normalizer, named by its type, multiplies the bytes of a text beyond ASCII at most; 12 for other types.
_GROWTH, _MOST_GROWTH = {"NoneType": 1, "NFC": 3}, 12
_SHORT_CHARACTERS = 1 << 16  # a longer text takes 0.1 s and more, and is tokenised in a thread of its own
_WAIT_S = 0.2  # between two calls of Tokenizer.check_stop
_MOST_ADDED_CHARACTERS = 1 << 20
_MOST_IDS = 1 << 31
# Keys of the answer schema in transformers 5; the first is the older name.
_ANSWER_SCHEMAS = ("response_schema", "response_template")

T = TypeVar("T")


class Tokenizer:
    """Tokenizer of one model.

    source: the loaded tokenizer with its named tokens and chat template. vocab_size: ids below it exist in the model.
    end_tokens: tokens that end an answer; eos_token_ids: their ids. answer_schema: JSON text of the schemas that the
    checkpoint gives for its answers, or ''. markers: pattern of the added tokens at which a text is split before all
    else, or None; see data/chat/common_prefix.py. special: id -> text of the special tokens. added_texts: texts of all
    added tokens. max_tokens: limit of a request's tokens. reads_text: False for a NoTokenizer. check_stop: called every
    0.2 s while a long text is tokenised; an error that it raises ends the waiting.
    """

    reads_text = True
    check_stop: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        source: TokenizerSource,
        vocab_size: int,
        end_tokens: EndTokens = NO_END_TOKENS,
        answer_schema: str = "",
    ) -> None:
        self.source = source
        self.vocab_size = vocab_size
        self.end_tokens, self.eos_token_ids = end_tokens, tuple(end_tokens.files)
        self.answer_schema = answer_schema
        self._backend = source.backend_tokenizer
        self.max_tokens = Config.max_request_tokens
        added = self._backend.get_added_tokens_decoder()
        self.added_texts = tuple(token.content for token in added.values())
        if sum(map(len, self.added_texts)) > _MOST_ADDED_CHARACTERS:
            raise ModelError(f"its added tokens have more than {_MOST_ADDED_CHARACTERS:,} characters")
        self.special = {number: token.content for number, token in added.items() if token.special}
        self._dropped_ids = set(self.special)
        splitting = [
            re.escape(token.content)
            for token in sorted(added.values(), key=lambda token: -len(token.content))
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        ]
        self.markers = re.compile("|".join(splitting)) if splitting else None

    def require_for(self, what: str) -> None:
        """Raise RequestError if the folder has no tokenizer (data/tokenization/no_tokenizer.py).

        what: subject of the error, such as `a conversation`."""

    def ends(self) -> str:
        """Say which tokens end an answer, and which file names each."""
        return self.end_tokens.sentence(self.special)

    def keep_markers(self, markers: Iterable[str]) -> None:
        """Make `decode` keep these texts even if they are special tokens."""
        kept = set(markers)
        self._dropped_ids = {number for number, text in self.special.items() if text not in kept}

    def encode(self, text: str, adds_special: bool = False) -> Encoding:
        """Tokenise a text; return the tokens and their places in it.

        adds_special: add the special tokens that the model puts around plain text. RequestError for a text that the
        library fails at, and, before it is tokenised, for one that a request cannot hold (see check_length)."""
        self.check_length(text)
        backend, is_short = self._backend, len(text) <= _SHORT_CHARACTERS
        try:
            if is_short and current_thread() is main_thread():
                return backend.encode(text, add_special_tokens=adds_special)
            # Unlike encode, encode_batch releases the interpreter's lock, so that other threads run, and this thread
            # handles signals. The whole text is one piece, as no cut is safe for every tokenizer.
            if is_short:
                return backend.encode_batch([text], add_special_tokens=adds_special)[0]
            self._check_count(text)
            return _in_thread(lambda: backend.encode_batch([text], add_special_tokens=adds_special)[0], self.check_stop)
        except BaseException as error:
            raise _refused(error) from None

    def check_length(self, text: str) -> None:
        """Raise RequestError (context_length_exceeded) for a text of more characters than are tokenised."""
        most = min(MAX_CHARACTERS, TOKEN_CHARACTERS * self.max_tokens)
        if len(text) > most:
            raise too_long(f"{len(text):,} characters; at most {most:,} are tokenised")

    def _check_count(self, text: str) -> None:
        """Raise RequestError for a text with more than twice the tokens of a request. A text that has at most
        _MOST_BYTES after normalization is not counted.

        The tokens of pieces are counted; they differ from those of the whole text only near the cuts."""
        grows = 1 if text.isascii() else _GROWTH.get(type(self._backend.normalizer).__name__, _MOST_GROWTH)
        if grows * len(text.encode("utf-8", "surrogatepass")) <= _MOST_BYTES:
            return
        count = 0
        for begin in range(0, len(text), _SHORT_CHARACTERS):
            count += len(self._backend.encode(text[begin : begin + _SHORT_CHARACTERS], add_special_tokens=False))
            if count > 2 * self.max_tokens:
                raise too_long(f"more than {self.max_tokens:,} tokens, which a request may have at most")

    def encode_prompt(self, text: str) -> list[int]:
        """Tokenise the prompt of a completion, with the special tokens that the model adds to plain text."""
        return self.encode(text, True).ids

    def encode_continuation(self, text: str) -> list[int]:
        """Tokenise a text that follows another one, without the prefix that the tokenizer adds to a first word."""
        anchored = self.encode("a" + text)
        own = sum(begin < 1 for begin, _ in anchored.offsets)  # tokens of the `a`, and of a prefix before it
        if any(end > 1 for _, end in anchored.offsets[:own]):
            return self.encode(text).ids
        return anchored.ids[own:]

    def marker_id(self, marker: str) -> int | None:
        """Return the id of a text that matches `markers`."""
        return self._backend.token_to_id(marker)

    @property
    def begins_with_bos(self) -> bool:
        """Return whether the tokenizer puts the bos token before plain text."""
        try:
            ids = self.encode_prompt("a")
        except RequestError as error:
            raise ModelError(f"the tokenizer in {self.source.name_or_path} cannot be used: {error}") from None
        return bool(ids) and ids[0] == self.source.bos_token_id

    def is_dropped(self, token_id: int) -> bool:
        """Return whether `decode` leaves this token out: it is special and not a kept marker."""
        return token_id in self._dropped_ids

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text, special tokens included."""
        return self._decode(list(map(int, token_ids)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode an answer without its dropped tokens. Bytes that are not UTF-8 become U+FFFD."""
        kept = [int(number) for number in token_ids if int(number) not in self._dropped_ids]
        return self._decode(kept)

    def _decode(self, token_ids: Sequence[int]) -> str:
        try:
            return self._backend.decode(token_ids, skip_special_tokens=False)
        except BaseException as error:
            raise _refused(error) from None


def load_tokenizer(model_dir: str | Path, warn: Callable[[str], None] = lambda sentence: None) -> Tokenizer:
    """Load the tokenizer of a model folder. warn: called with a sentence if its dropout is set to 0.

    ModelError if a file is missing or damaged."""
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; expected a model folder with config.json and tokenizer.json")
    names = model_files(folder).keys()
    if not names & set(TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)} in the model folder")
    source = _guarded(folder, lambda: read_tokenizer(folder, warn))
    backend = source.backend_tokenizer
    vocab_size = read_vocab_size(folder) or _guarded(folder, lambda: backend.get_vocab_size(with_added_tokens=True))
    end_tokens, schema = read_end_tokens(folder, vocab_size), _answer_schema(folder)
    return _guarded(folder, lambda: Tokenizer(source, vocab_size, end_tokens, schema))


def read_vocab_size(folder: Path) -> int | None:
    """Read the number of token ids from config.json, or from its text_config; None if it gives no valid one."""
    config = read_model_json(folder / "config.json", is_optional=True)
    text_model = config.get("text_config")
    size = (text_model if isinstance(text_model, dict) else config).get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= _MOST_IDS:
        return None
    return size


def _guarded(folder: Path, load: Callable[[], T]) -> T:
    """Call `load` and return its result. Any error of the library, a panic included, becomes a ModelError."""
    try:
        return load()
    except BaseException as error:  # a panic of the library, written in Rust, is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: {first_line(error)}; "
            "expected tokenizer.json and tokenizer_config.json as the model was published"
        ) from None


def _in_thread(work: Callable[[], T], check_stop: Callable[[], None]) -> T:
    """Return the result of `work` in another thread, or raise its error. check_stop: see Tokenizer."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    while not wait([done], _WAIT_S).done:
        check_stop()
    return done.result()


def _refused(error: BaseException) -> BaseException:
    """Convert a panic of the library, or its complaint, which is a plain Exception, to a RequestError; return any other
    error unchanged."""
    if type(error) is not Exception and type(error).__name__ != "PanicException":
        return error
    return RequestError("invalid_request", f"the tokenizer cannot take a text: {first_line(error)}")


def too_long(what: str) -> RequestError:
    """Return the error for a text that is refused before it is tokenised. what: its length and the limit."""
    return RequestError("context_length_exceeded", f"the prompt holds {what}")


def _answer_schema(folder: Path) -> str:
    """Return the answer schemas of tokenizer_config.json as JSON text without backslashes; empty if there are none.

    The text is only searched for markers, so the backslashes that escape them in patterns are removed. The patterns
    are never run, since they come with the checkpoint and could run for ever.
    """
    config = read_model_json(folder / "tokenizer_config.json", is_optional=True)
    found = [config[name] for name in _ANSWER_SCHEMAS if config.get(name) is not None]
    return json.dumps(found, ensure_ascii=False).replace("\\", "") if found else ""
