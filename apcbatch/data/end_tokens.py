"""Read which tokens end an answer: those of generation_config.json, of config.json and of the tokenizer together.

Needs no tokenizer library. Invariant: a token of another vocabulary ends no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import orjson

from apcbatch.data.model_files import MAX_FILE_BYTES, read_model_json
from apcbatch.display import visible
from apcbatch.errors import ModelError
from apcbatch.option_values import brief
from apcbatch.regular_files import read_regular_file

_MOST_IDS = 1 << 31
_MOST_ENDS = 1 << 10  # ids that a file names
_SHOWN = 8  # most tokens in a sentence


@dataclass(frozen=True)
class EndTokens:
    """Tokens that end an answer. files: token id -> names of the files that name it. outside: the same for ids outside
    the vocabulary, which end nothing. Both are in the order in which the files are read."""

    files: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    outside: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def sentence(self, texts: Mapping[int, str]) -> str:
        """Say which tokens end an answer, and which files name each. texts: id -> text of the special tokens."""
        if not self.files:
            said = (
                "no file of the model names a token that ends an answer (eos_token_id, eos_token): answers have "
                "--max-tokens tokens, unless --stop-token-id or --stop ends them"
            )
        else:
            ids = list(self.files)
            named = {one: f"{one} {visible(texts[one])}" if one in texts else f"{one}" for one in ids[:_SHOWN]}
            shown = [f"{name} ({', '.join(self.files[one])})" for one, name in named.items()]
            more = f" or {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
            said = f"an answer ends at token {' or '.join(shown)}{more}"
        beyond = [f"{one} ({', '.join(files)})" for one, files in list(self.outside.items())[:_SHOWN]]
        return said + (f"; not in the vocabulary, so without effect: {', '.join(beyond)}" if beyond else "")


NO_END_TOKENS = EndTokens()


def read_end_tokens(folder: Path, vocab_size: int) -> EndTokens:
    """Read the end tokens of a model folder. vocab_size: number of token ids of the model. ModelError for a value that
    is not an id or a list of ids, and for a file that cannot be read."""
    found: dict[int, tuple[str, ...]] = {}
    for name, ids in _named(folder):
        for number in ids:
            files = found.get(number, ())
            found[number] = files if name in files else (*files, name)
    inside = {number: files for number, files in found.items() if number < vocab_size}
    return EndTokens(inside, {number: files for number, files in found.items() if number not in inside})


def _named(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield the name of each file that names end tokens, with their ids."""
    for name in ("generation_config.json", "config.json"):
        values = read_model_json(folder / name, is_optional=True)
        for part in (values, values.get("text_config")):  # the text model of a multimodal checkpoint
            yield name, _ids(part, folder / name) if isinstance(part, dict) else []
    name, own = _tokenizer_end(folder)
    yield name, [] if own is None else [own]


def _ids(values: Mapping[str, Any], path: Path) -> list[int]:
    value = values.get("eos_token_id")
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MOST_ENDS or not all(_is_id(one) for one in ids):
        expected = f"a token id or a list of them, {_MOST_ENDS:,} at most"
        raise ModelError(f"eos_token_id in {path} is {brief(value)}; expected {expected}")
    return ids


def _tokenizer_end(folder: Path) -> tuple[str, int | None]:
    """Return the file that names the tokenizer's eos token, and the token's id; None without one."""
    name, config = "tokenizer_config.json", read_model_json(folder / "tokenizer_config.json", is_optional=True)
    token, declared = config.get("eos_token"), config.get("added_tokens_decoder")
    if not isinstance(declared, dict):  # then special_tokens_map.json goes before tokenizer_config.json
        special = read_model_json(folder / "special_tokens_map.json", is_optional=True).get("eos_token")
        name, token, declared = ("special_tokens_map.json", special, {}) if special else (name, token, {})
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        return name, None
    for number, added in declared.items():
        if isinstance(added, dict) and added.get("content") == token and number.isdecimal() and len(number) < 11:
            return name, int(number)
    return name, _id_in_tokenizer(folder, token)


def _id_in_tokenizer(folder: Path, token: str) -> int | None:
    """Look up the id of a token in tokenizer.json, or in the lists of tokens that older tokenizers have in its
    place. A tokenizer.json that cannot be read has none; loading the tokenizer says what is wrong with it."""
    try:
        content = orjson.loads(read_regular_file(folder / "tokenizer.json", MAX_FILE_BYTES))
    except (OSError, ValueError):
        content = None
    content = content if isinstance(content, dict) else {}
    added = content.get("added_tokens")
    for one in added if isinstance(added, list) else []:
        if isinstance(one, dict) and one.get("content") == token and _is_id(one.get("id")):
            return int(one["id"])
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of a Unigram model: [text, score], in the order of the ids
        return next((i for i, one in enumerate(vocabulary) if isinstance(one, list) and one[:1] == [token]), None)
    older = (read_model_json(folder / name, is_optional=True) for name in ("added_tokens.json", "vocab.json"))
    for tokens in (vocabulary, *older):
        number = tokens.get(token) if isinstance(tokens, dict) else None
        if _is_id(number):
            return number
    return None


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_IDS
