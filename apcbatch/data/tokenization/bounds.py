"""Decide from tokenizer.json whether a tokenizer takes bounded time and memory for any text.

It does if all its parts are known here. The time of a known part is linear in the text, and its output is at most a few
times as long. Other parts can take any time and memory: a regular expression of the checkpoint, replaced characters, a
table of characters. A tokenizer with such a part runs in a helper process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_TOKEN_CHARACTERS = 512
_MOST_CHARACTERS = 64  # limit of a text in a known part
_MOST_ITEMS = 16  # limit of a list in a known part
_MOST_GROWTH = 32
# Patterns whose time is linear: those of GPT-2, Falcon, Llama 3, Qwen 2 and related models.
_SHORT = r"'s|'t|'re|'ve|'m|'ll|'d"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    *(f"(?i:{_SHORT}){_WORDS}{number}{_REST}" for number in (r"\p{N}{1,3}", r"\p{N}")),
    *(r"[0-9][0-9][0-9]", r"\p{N}{1,3}", r"\d{1,3}", r"\d"),
}
# Type of each known part -> upper bound of (bytes of output) / (bytes of input).
_NORMALIZERS = {"NFC": 3, "NFD": 4, "NFKC": 12, "NFKD": 12, "Lowercase": 2, "StripAccents": 1, "Nmt": 1, "Strip": 1,
                "Prepend": 1, "BertNormalizer": 4, "ByteLevel": 2}  # fmt: skip
_PRE_TOKENIZERS = {"ByteLevel": 2, "Metaspace": 3, "Whitespace": 1, "WhitespaceSplit": 1, "BertPreTokenizer": 1,
                   "Punctuation": 1, "Digits": 1, "UnicodeScripts": 1, "CharDelimiterSplit": 1, "Split": 1}  # fmt: skip
_POST_PROCESSORS = {"ByteLevel": 1, "TemplateProcessing": 1, "RobertaProcessing": 1, "BertProcessing": 1}
_DECODERS = {"ByteLevel": 1, "ByteFallback": 1, "Fuse": 1, "Metaspace": 1, "WordPiece": 2, "BPEDecoder": 2, "CTC": 1,
             "Strip": 1}  # fmt: skip
_INNER = ("normalizers", "pretokenizers", "processors", "decoders")


def growth(tokenizer: Mapping[str, Any]) -> int | None:
    """Return an upper bound of (bytes of the normalised text) / (bytes of the text).

    Return None for a tokenizer with an unknown part. tokenizer: the object in tokenizer.json."""
    parts = {"normalizer": _NORMALIZERS, "pre_tokenizer": _PRE_TOKENIZERS, "post_processor": _POST_PROCESSORS,
             "decoder": _DECODERS}  # fmt: skip
    factors = {name: _growth(tokenizer.get(name), known) for name, known in parts.items()}
    if not all(0 < factor <= _MOST_GROWTH for factor in factors.values()) or not _is_known_model(tokenizer):
        return None
    return factors["normalizer"]


def _growth(part: Any, known: Mapping[str, int], depth: int = 0) -> int:
    """Return the growth of a part with its inner parts; 0 if one is unknown. known: type -> growth."""
    if part is None:
        return 1
    if not isinstance(part, dict) or depth > 2:
        return 0
    kind = part.get("type")
    if kind == "Sequence":
        inner = next((part[name] for name in _INNER if name in part), 0)
        if not isinstance(inner, list) or len(inner) > _MOST_ITEMS:
            return 0
        factor = 1
        for one in inner:
            factor *= _growth(one, known, depth + 1)
        return factor
    pattern = part.get("pattern")
    if pattern is not None:
        if not isinstance(pattern, dict) or len(pattern) != 1:
            return 0
        is_known = pattern.get("Regex") in _PATTERNS or (bool(pattern.get("String")) and _is_short(pattern))
        part = {**part, "pattern": None}
        if kind == "Replace" and is_known and "String" in pattern and _is_short(part):
            content = part.get("content")
            is_known = isinstance(content, str)
            return -(-max(1, len(str(content).encode())) // len(pattern["String"].encode())) if is_known else 0
        if not is_known:
            return 0
    return known.get(kind, 0) if isinstance(kind, str) and _is_short(part) else 0


def _is_short(value: Any, depth: int = 0) -> bool:
    """Return whether all texts, lists, objects and numbers in a part are small."""
    if isinstance(value, str):
        return len(value) <= _MOST_CHARACTERS
    if isinstance(value, (dict, list)):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return depth < 6 and len(inner) <= 2 * _MOST_ITEMS and all(_is_short(one, depth + 1) for one in inner)
    return value is None or abs(value) <= 1 << 31


def _is_known_model(tokenizer: Mapping[str, Any]) -> bool:
    """Return whether the vocabulary and the added tokens are short texts, and the model's time is linear in the
    text."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(added, list):
        return False
    vocabulary = model.get("vocab")
    most = MOST_TOKEN_CHARACTERS
    if isinstance(vocabulary, list):  # Unigram: its time per character grows with the longest token
        texts = [one[0] for one in vocabulary if isinstance(one, list) and one]
        most = _MOST_CHARACTERS
    else:
        texts = list(vocabulary) if isinstance(vocabulary, dict) else [None]
    texts += [one.get("content") if isinstance(one, dict) else None for one in added]
    rest = {name: value for name, value in model.items() if name not in ("vocab", "merges")}
    word = model.get("max_input_chars_per_word")
    return (
        all(isinstance(text, str) for text in texts)
        and max(map(len, texts), default=0) <= most
        and _is_short(rest)
        and (word is None or (isinstance(word, int) and word <= 1000))
    )
