"""The tokenizer of a model folder: text to token ids and back, the ids that end an answer, the vocabulary.

Must not know: conversations, templates, requests. A tokenizer.json is read as it is where nothing beside it changes it
(data/plain_tokenizer.py); other folders are read by `transformers` (no remote code, nothing fetched), which is imported
only then. That does not import torch if the folder has a tokenizer.json.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from apcbatch.data.plain_tokenizer import read_plain
from apcbatch.errors import ModelError
from apcbatch.regular_files import open_regular_file, read_regular_file
from apcbatch.values import brief

if TYPE_CHECKING:
    import tokenizers

# The first is read as it is; the others are converted by `transformers`, which takes longer to import then.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

MAX_TEMPLATE_BYTES = 4 << 20
_MAX_FILE_BYTES = 256 << 20
_MOST_IDS = 1 << 31
# Where transformers 5 keeps the form of a model's answers; the first is the older name.
_ANSWER_SCHEMAS = ("response_schema", "response_template")
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"

T = TypeVar("T")


class Tokenizer:
    """Encodes and decodes text for one model.

    source: a PlainTokenizer, or a tokenizer of `transformers`; it has the named tokens and the chat template.
    eos_token_ids: the ids that end an answer. vocab_size: ids below it exist in the model. markers: a pattern of the
    added tokens that split a text before anything else looks at it, or None; see data/sharing.py. answer_schema: the
    text of what the checkpoint says of the form of its answers, or nothing.
    """

    reads_text = True

    def __init__(
        self,
        source: Any,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        answer_schema: str = "",
    ) -> None:
        self.source = source
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.answer_schema = answer_schema
        self._backend: tokenizers.Tokenizer = source.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.added_texts = tuple(token.content for token in added.values())
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._dropped_ids = set(self._special)
        splitting = [
            re.escape(token.content)
            for token in sorted(added.values(), key=lambda token: -len(token.content))
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        ]
        self.markers = re.compile("|".join(splitting)) if splitting else None

    def check_text(self, what: str) -> None:
        """Raise RequestError if there is no tokenizer for what is named: see data/no_tokenizer.py."""

    def keep(self, markers: Iterable[str]) -> None:
        """Keep these texts when an answer is decoded, even if they are special tokens."""
        kept = set(markers)
        self._dropped_ids = {number for number, text in self._special.items() if text not in kept}

    def encode(self, text: str) -> tokenizers.Encoding:
        """The tokens of a rendered text with their places in it, without special tokens around them."""
        return self._backend.encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a completion's prompt, with the special tokens that the model adds to plain text."""
        return self._backend.encode(text, add_special_tokens=True).ids

    def encode_behind(self, text: str) -> list[int]:
        """Token ids of a text that follows another one, without what is put before a first word."""
        anchored = self.encode("a" + text)
        index = anchored.char_to_token(0)
        if index is None or anchored.token_to_chars(index) != (0, 1):
            return self.encode(text).ids
        return anchored.ids[index + 1 :]

    def marker_id(self, marker: str) -> int | None:
        """The id of one of the texts that `markers` finds."""
        return self._backend.token_to_id(marker)

    @property
    def begins_with_bos(self) -> bool:
        """Whether the model puts its first token (bos) before plain text."""
        ids = self.encode_prompt("a")
        return bool(ids) and ids[0] == self.source.bos_token_id

    def drops(self, token_id: int) -> bool:
        """Whether a token is special, so that it has no part in an answer's text."""
        return token_id in self._dropped_ids

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones as they are written."""
        return str(self.source.decode(token_ids, skip_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens that nobody keeps. Bytes that are not UTF-8 become U+FFFD."""
        kept = [int(number) for number in token_ids if int(number) not in self._dropped_ids]
        return self._backend.decode(kept, skip_special_tokens=False)


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """The tokenizer of a model folder; raises ModelError with the file that is missing or damaged."""
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; expected a model folder with config.json and tokenizer.json")
    _check_files(folder)
    vocab_size = read_vocab_size(folder)
    source = _guarded(folder, lambda: _load_source(folder))
    eos_token_ids = read_eos_token_ids(folder, source.eos_token_id)
    return _guarded(
        folder,
        lambda: Tokenizer(
            source,
            vocab_size or source.backend_tokenizer.get_vocab_size(with_added_tokens=True),
            eos_token_ids,
            _answer_schema(folder),
        ),
    )


def read_vocab_size(folder: Path) -> int | None:
    """The number of token ids that config.json gives, or None."""
    size = read_json(folder / "config.json").get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= _MOST_IDS:
        return None
    return size


def _check_files(folder: Path) -> None:
    """Refuse, before `transformers` looks, files that it would wait for or read without end."""
    for path in sorted([*folder.iterdir(), *folder.glob(_MORE_TEMPLATES)]):
        if path.suffix not in (".json", ".jinja", ".model", ".txt") or path.is_dir():
            continue
        try:
            with open_regular_file(path) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        most = MAX_TEMPLATE_BYTES if path.suffix == ".jinja" else _MAX_FILE_BYTES
        if size > most:
            raise ModelError(f"{path} holds {size:,} bytes; at most {most:,} are read")


def _guarded(folder: Path, load: Callable[[], T]) -> T:
    """What is loaded; ModelError for whatever the library and its parser raise for a damaged file."""
    try:
        return load()
    except ModelError:
        raise
    except BaseException as error:  # the parser's panics are no Exceptions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: {_first_line(error)}; "
            "expected tokenizer.json and tokenizer_config.json as the model was published"
        ) from None


def _load_source(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)} in the model folder")
    plain = read_plain(folder)
    if plain is not None:
        return plain
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    source = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not hasattr(source, "backend_tokenizer"):
        raise ModelError(f"{folder} has no tokenizer.json; convert the tokenizer to one and put it there")
    return source


def read_eos_token_ids(folder: Path, tokenizer_eos: int | None = None) -> list[int]:
    """The ids from generation_config.json, config.json or the tokenizer: the first that has one id or a list."""
    for name, holder in (
        ("generation_config.json", read_json(folder / "generation_config.json")),
        ("config.json", read_json(folder / "config.json")),
        ("tokenizer_config.json", {"eos_token_id": tokenizer_eos}),
    ):
        value = holder.get("eos_token_id")
        ids: list[Any] = value if isinstance(value, list) else [value]
        if value is None or not ids:
            continue
        if not all(_is_id(number) for number in ids):
            raise ModelError(
                f"eos_token_id in {folder / name} is {brief(value)}; expected a token id or a list of them"
            )
        return ids
    return []


def _answer_schema(folder: Path) -> str:
    """What tokenizer_config.json says of the form of answers, as JSON text without the backslashes of its patterns.

    It is only looked through for markers: its patterns are the checkpoint's own and could run without end.
    """
    config = read_json(folder / "tokenizer_config.json")
    found = [config[name] for name in _ANSWER_SCHEMAS if config.get(name) is not None]
    return json.dumps(found, ensure_ascii=False).replace("\\", "") if found else ""


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_IDS


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    try:
        value = orjson.loads(read_regular_file(path, _MAX_FILE_BYTES))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as JSON: {_first_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; expected the file as the model was published")
    return value


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:300] if lines else type(error).__name__
