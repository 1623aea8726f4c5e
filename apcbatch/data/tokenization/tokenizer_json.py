"""Read tokenizer.json without `transformers`, if no other file of the folder changes the tokenizer.

`transformers` takes a second to import, and for most folders it only parses tokenizer.json and looks up a few names.
Other folders are read by `transformers` in a helper process (data/tokenization/isolated.py). Invariant: a tokenizer
read here behaves like `TokenizersBackend` of `transformers` 5 in all that data/ uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from apcbatch.data.model_files import MAX_TEMPLATE_BYTES
from apcbatch.data.tokenization.bounds import growth
from apcbatch.errors import RequestError
from apcbatch.regular_files import read_regular_file

if TYPE_CHECKING:
    import tokenizers

    from apcbatch.data.tokenization.isolated import IsolatedTokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Keys of tokenizer_config.json without effect beside a tokenizer.json: `transformers` ignores them, or uses them for
# padding, truncation and tensors, which are not used here.
_INERT = {
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "backend",
    "errors",
    "is_local",
    "legacy",
    "local_files_only",
    "model_max_length",
    "name_or_path",
    "response_schema",
    "response_template",
    "sp_model_kwargs",
    "tokenizer_class",
    "use_default_system_prompt",
}
# Keys -> the only values with which a folder is read here.
_USUAL = {
    "clean_up_tokenization_spaces": (False,),
    "padding_side": ("left", "right"),
    "split_special_tokens": (False,),
    "truncation_side": ("left", "right"),
}
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_READ = {*NAMED, *_EXTRA, "added_tokens_decoder", "chat_template"}
# Limit of the vocabulary: `transformers` corrects how the tokenizers of some models with larger ones split a text.
_MOST_TOKENS = 100_000
_MOST_BYTES = 16 << 20  # limit of a tokenizer.json; parsing takes up to 25 times as much memory


@dataclass(frozen=True)
class TokenizerSource:
    """A loaded tokenizer, with the attributes of a `transformers` tokenizer that apcbatch uses.

    growth: as data/tokenization/bounds.py returns it; None if the backend runs in a helper process.
    """

    backend_tokenizer: tokenizers.Tokenizer | IsolatedTokenizer
    special_tokens_map: dict[str, str]
    chat_template: str | dict[str, str] | None
    name_or_path: str
    growth: int | None

    @property
    def bos_token_id(self) -> int | None:
        """Return the id of the bos token, or None."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Return the id of the eos token, or None."""
        return self._id_of("eos_token")

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


def read_tokenizer_json(folder: Path) -> TokenizerSource | None:
    """Read the tokenizer of a folder; return None if `transformers` must read it, as for a damaged one.

    RequestError if the tokenizer's helper process was lost, or ran out of memory."""
    try:
        config = orjson.loads(read_regular_file(folder / "tokenizer_config.json", _MOST_BYTES))
        data = read_regular_file(folder / "tokenizer.json", _MOST_BYTES)
        parsed = orjson.loads(data)
        template = folder / "chat_template.jinja"
        own_template = None
        if template.exists():  # with the line ends that reading as text gives: \n for \r\n and \r
            own_template = "\n".join(read_regular_file(template, MAX_TEMPLATE_BYTES).decode().split("\r\n"))
            own_template = own_template.replace("\r", "\n")
    except (OSError, ValueError):
        return None
    if not _is_plain(config, parsed) or _has_other_files(folder, config):
        return None
    named = {name: _content(config[name]) for name in NAMED if config.get(name) is not None}
    known = [name for name in named.values() if name is not None]
    grows = growth(parsed)
    try:
        backend = load_backend(data, grows, known)
    except Exception as error:  # `transformers` then reports the fault
        if isinstance(error, RequestError) and error.retryable:
            raise
        return None
    extra: list[object] = next((config[name] for name in _EXTRA if config.get(name)), [])
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    if not special >= {*named.values(), *map(_content, extra)}:
        return None  # `transformers` would add the tokens that are missing
    if not _repeats(config.get("added_tokens_decoder", {}), backend) or backend.get_vocab_size() > _MOST_TOKENS:
        return None
    names = {name: content for name, content in named.items() if content is not None}
    chosen = config.get("chat_template") if own_template is None else own_template
    return TokenizerSource(backend, names, chosen, str(folder), grows)


def load_backend(
    data: bytes, grows: int | None, names: Sequence[str], split_special: bool = False
) -> tokenizers.Tokenizer | IsolatedTokenizer:
    """Load a tokenizer.json without truncation and padding: in this process if its growth is known, otherwise in a
    helper process.

    grows: its growth (data/tokenization/bounds.py); None if unknown. names: tokens whose ids an IsolatedTokenizer must
    know. split_special: tokenise special tokens in a text like any other text.
    """
    if grows is None:
        from apcbatch.data.tokenization.isolated import IsolatedTokenizer

        return IsolatedTokenizer(data, split_special, names)
    import tokenizers

    backend = tokenizers.Tokenizer.from_buffer(data)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = split_special
    return backend


def _is_plain(config: object, parsed: object) -> bool:
    """Return whether this module reads all that the two files set.

    config: the object in tokenizer_config.json, whose keys must be read here, have no effect, or have a usual value.
    parsed: the object in tokenizer.json, with a list of added tokens, and without truncation or padding.
    """
    if not isinstance(config, dict) or not isinstance(parsed, dict):
        return False
    return (
        config.keys() <= _INERT | _READ | _USUAL.keys()
        and all(config[name] in usual for name, usual in _USUAL.items() if name in config)
        and isinstance(config.get("chat_template", ""), str)
        and isinstance(config.get("added_tokens_decoder", {}), dict)
        and all(isinstance(config.get(name, []), list) for name in _EXTRA)
        and isinstance(parsed.get("added_tokens"), list)
        and not (parsed.get("truncation") or parsed.get("padding"))
    )


def _has_other_files(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the folder has other files with an effect: named templates, or older lists of tokens that
    `added_tokens_decoder` does not replace."""
    names = ["additional_chat_templates"]
    if "added_tokens_decoder" not in config:
        names += ["special_tokens_map.json", "added_tokens.json"]
    return any((folder / name).exists() for name in names)


def _content(token: object) -> str | None:
    """Return the text of a special token given as a text or an AddedToken object; None for any other value."""
    if isinstance(token, dict) and token.get("__type") == "AddedToken":
        token = token.get("content")
    return token if isinstance(token, str) else None


def _repeats(declared: Mapping[str, Any], backend: tokenizers.Tokenizer | IsolatedTokenizer) -> bool:
    """Return whether tokenizer_config.json declares only tokens that tokenizer.json has, with the same flags."""
    own = {
        str(number): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for number, token in backend.get_added_tokens_decoder().items()
    }
    return all(own.get(number) == token for number, token in declared.items())
