"""Read the tokenizer of a model folder: tokenizer.json with the `tokenizers` library; without one, the vocabulary in
another format with `transformers`.

`transformers` takes a second to import. Of a folder with a tokenizer.json it uses only the tokens and templates that
other files declare, which are read here. Invariant: a tokenizer read here behaves like `TokenizersBackend` of
`transformers` 5 in all that data/ uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apcbatch.data.model_files import MAX_FILE_BYTES, MAX_TEMPLATE_BYTES, only_model_files, read_model_json
from apcbatch.option_values import brief
from apcbatch.regular_files import read_regular_file

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MOST_WORD_CHARACTERS = 100  # the time of WordPiece for a word grows with the square of its length


@dataclass(frozen=True)
class TokenizerSource:
    """A loaded tokenizer, with the attributes of a `transformers` tokenizer that apcbatch uses."""

    backend_tokenizer: Tokenizer
    special_tokens_map: dict[str, str]
    chat_template: str | dict[str, str] | None
    name_or_path: str

    @property
    def bos_token_id(self) -> int | None:
        """Return the id of the bos token, or None."""
        return self._id_of("bos_token")

    def get_chat_template(self, has_tools: bool) -> str | None:
        """Return the template for conversations with or without tools; None without a template.

        ValueError if there are several templates and no default."""
        chosen = self.chat_template
        if not isinstance(chosen, dict):
            return chosen
        name = "tool_use" if has_tools and "tool_use" in chosen else "default"
        if name not in chosen:
            names = ", ".join(sorted(chosen))
            raise ValueError(f"there are several templates with no default specified; their names are {names}")
        return chosen[name]

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def read_tokenizer(folder: Path, warn: Callable[[str], None]) -> TokenizerSource:
    """Read the tokenizer of a folder, without truncation, padding and dropout; warn if it had dropout.

    Raises what the libraries raise for damaged files, and ValueError for a tokenizer that is not supported."""
    has_json = (folder / "tokenizer.json").exists()
    source = _read_tokenizer_json(folder) if has_json else _read_by_transformers(folder)
    backend = source.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    model: Any = backend.model
    if getattr(model, "dropout", None):
        warn(f"the tokenizer in {folder} has a dropout of {model.dropout:g}; it is set to 0: a text keeps its tokens")
        model.dropout = None
    characters = getattr(model, "max_input_chars_per_word", 0)
    if characters > _MOST_WORD_CHARACTERS:
        raise ValueError(f"its max_input_chars_per_word is {characters}; at most {_MOST_WORD_CHARACTERS} is supported")
    return source


def _read_tokenizer_json(folder: Path) -> TokenizerSource:
    """Read tokenizer.json, then add the tokens that tokenizer_config.json and older files declare."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_buffer(read_regular_file(folder / "tokenizer.json", MAX_FILE_BYTES))
    config = read_model_json(folder / "tokenizer_config.json", is_optional=True)
    backend.encode_special_tokens = config.get("split_special_tokens", False)
    has_decoder = config.get("added_tokens_decoder") is not None
    older = {} if has_decoder else read_model_json(folder / "special_tokens_map.json", is_optional=True)
    padded = {} if backend.padding is None else {"pad_token": backend.padding["pad_token"]}
    named, extra = _special_tokens(padded | config | older)
    special = {token.content for token in (*named.values(), *extra)}
    declared: dict[int, AddedToken]
    if has_decoder:
        declared = {int(key): _added_token(key, token) for key, token in config["added_tokens_decoder"].items()}
    else:
        ids = read_model_json(folder / "added_tokens.json", is_optional=True)
        flags = {content: {"normalized": content not in special, "special": content in special} for content in ids}
        declared = {ids[content]: _added_token(content, {"content": content, **flags[content]}) for content in ids}
    added = declared | backend.get_added_tokens_decoder()
    tokens = [added[number] for number in sorted(added)]
    known = {token.content for token in tokens}
    tokens += [token for token in (*named.values(), *extra) if token.content not in known]
    names = {name: token.content for name, token in named.items()}
    contents = set(names.values())
    for token in tokens:
        token.special = token.special or token.content in contents
    backend.add_tokens(tokens)
    return TokenizerSource(backend, names, _chat_template(folder, config), str(folder))


def _special_tokens(values: Mapping[str, Any]) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Return the special tokens by name, such as eos_token or image_token, and those without a name."""
    given = {name: values[name] for name in NAMED if values.get(name) is not None}
    given |= {name: one for name, one in values.items() if name.endswith("_token") and isinstance(one, (str, dict))}
    extra: Any = next((values[name] for name in _EXTRA if values.get(name)), [])
    if isinstance(extra, dict):
        given, extra = given | extra, []
    named = {name: _special_token(name, value) for name, value in given.items()}
    return named, [_special_token(_EXTRA[0], value) for value in extra]


def _special_token(name: str, value: object) -> AddedToken:
    return _added_token(name, {"special": True, **value} if isinstance(value, dict) else value)


def _added_token(name: object, value: object) -> AddedToken:
    """Return the token given as a text or as an object with its flags; ValueError, which says `name`, for another
    value."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ValueError(f"{name} is {brief(value)}; expected the text of a token")
    return AddedToken(value["content"], **{flag: value[flag] for flag in _FLAGS if flag in value})


def _chat_template(folder: Path, config: Mapping[str, Any]) -> Any:
    """Return the template, or templates by name: those of files of their own if there are any, else those of
    tokenizer_config.json. A value of another type is returned as it is."""
    files = {path.name.removesuffix(".jinja"): path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    if files.keys() - {"default"}:
        return {name: _text(path) for name, path in files.items()}
    if files:
        return _text(files["default"])
    given = config.get("chat_template")
    if not isinstance(given, list):
        return given
    if not all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in given):
        raise ValueError(f"chat_template is {brief(given)}; expected a text, or a list of names with their templates")
    return {one["name"]: one["template"] for one in given}


def _text(path: Path) -> str:
    """Read a template, with \\n for each line end, \\r\\n and \\r included."""
    return read_regular_file(path, MAX_TEMPLATE_BYTES).decode().replace("\r\n", "\n").replace("\r", "\n")


def _read_by_transformers(folder: Path) -> TokenizerSource:
    """Read a vocabulary in another format with `transformers`, without code of the folder, downloads and messages."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(50)  # critical errors only
    try:
        with only_model_files(folder) as links:
            found = AutoTokenizer.from_pretrained(str(links), local_files_only=True, trust_remote_code=False)
    finally:
        logging.set_verbosity(verbosity)
    if not hasattr(found, "backend_tokenizer"):
        raise ValueError("it is not converted to a tokenizer.json; convert it, and put that into the folder")
    return TokenizerSource(found.backend_tokenizer, found.special_tokens_map, found.chat_template, str(folder))
