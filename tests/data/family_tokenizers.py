"""Tiny tokenizers with the parts of those that the families of models are published with: normalizer, patterns,
post-processor and decoder as in their tokenizer.json, and the keys of their tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.data.conftest import LLAMA3_SPLIT, build_tokenizer

_SHORT = r"'s|'t|'re|'ve|'m|'ll|'d"
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")
QWEN3_5_SPLIT = (
    rf"(?i:{_SHORT})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _of(kind: str, **keys: Any) -> dict[str, Any]:
    return {"type": kind, **keys}


def _split(pattern: str) -> dict[str, Any]:
    return _of("Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)


def _byte_level(use_regex: bool = False, **keys: Any) -> dict[str, Any]:
    return _of("ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=use_regex, **keys)


def _sequence(name: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return _of("Sequence", **{name: list(parts)})


def _begins_with(token: str) -> dict[str, Any]:
    begin, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    special = {token: {"id": token, "ids": [0], "tokens": [token]}}
    return _of("TemplateProcessing", single=[begin, text], pair=[begin, text], special_tokens=special)


def _split_first(pattern: str) -> dict[str, Any]:
    return _sequence("pretokenizers", _split(pattern), _byte_level())


_BLANK = {"String": "\u2581"}
_PIECES = _sequence(
    "decoders", _of("Replace", pattern=_BLANK, content=" "), _of("ByteFallback"), _of("Fuse"),
    _of("Strip", content=" ", start=1, stop=0),
)  # fmt: skip
_PREFIXED = _sequence(
    "normalizers", _of("Prepend", prepend="\u2581"), _of("Replace", pattern={"String": " "}, content="\u2581")
)
_NFC, _FIRST = _of("NFC"), "<|endoftext|>"
_IMAGES = {"image_token": "<|im_start|>", "vision_bos_token": "<|vision_start|>", "split_special_tokens": False}
_QWEN = {"eos_token": "<|im_end|>", "pad_token": _FIRST, "add_prefix_space": False, "errors": "replace"}

# family -> (kind of build_tokenizer, parts of tokenizer.json, keys of tokenizer_config.json)
FAMILY_TOKENIZERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mamba": ("chatml", {"normalizer": _NFC, "pre_tokenizer": _byte_level(True), "post_processor": _byte_level(True)},
              {"bos_token": _FIRST, "eos_token": _FIRST, "unk_token": _FIRST, "add_prefix_space": False}),
    "mamba2": ("legacy", {"normalizer": None, "post_processor": _begins_with("<unk>"), "decoder": _PIECES,
                          "pre_tokenizer": _of("Metaspace", replacement="\u2581", prepend_scheme="first", split=False)},
               {"bos_token": "<unk>", "eos_token": "</s>", "legacy": False, "add_bos_token": True}),
    "falcon_mamba": ("chatml", {"pre_tokenizer": _sequence(
                         "pretokenizers", _of("Punctuation", behavior="Contiguous"), _byte_level(True),
                         _of("Digits", individual_digits=False), _split("[0-9][0-9][0-9]"))},
                     {"eos_token": _FIRST, "model_input_names": [], "additional_special_tokens": [">>QQ<<"]}),
    "jamba": ("legacy", {"normalizer": _PREFIXED, "post_processor": _begins_with("<unk>"), "decoder": _PIECES},
              {"bos_token": "<unk>", "eos_token": "</s>", "spaces_between_special_tokens": False}),
    "nemotron_h": ("chatml", {"pre_tokenizer": _split_first(TEKKEN_SPLIT), "post_processor": _begins_with(_FIRST)},
                   {"bos_token": _FIRST, "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}),
    "granitemoehybrid": ("chatml", {"pre_tokenizer": _split_first(LLAMA3_SPLIT)}, {"eos_token": _FIRST, **_QWEN}),
    "bamba": ("chatml", {"pre_tokenizer": _split_first(LLAMA3_SPLIT), "post_processor": _sequence(
                  "processors", _byte_level(True), _begins_with(_FIRST))},
              {"bos_token": _FIRST, "eos_token": _FIRST, "clean_up_tokenization_spaces": True}),
    "falcon_h1": ("chatml", {"pre_tokenizer": _sequence(
                      "pretokenizers", _split(r"\d"), _of("Punctuation", behavior="Isolated"), _byte_level(True))},
                  {"bos_token": _FIRST, "eos_token": "<|im_end|>", "unk_token": None}),
    "lfm2": ("chatml", {"pre_tokenizer": _split_first(LLAMA3_SPLIT), "post_processor": _begins_with(_FIRST)},
             {"bos_token": _FIRST, "eos_token": "<|im_end|>", "legacy": False, "use_default_system_prompt": False}),
    "lfm2_moe": ("chatml", {"pre_tokenizer": _split_first(TEKKEN_SPLIT), "post_processor": _begins_with(_FIRST)},
                 {"bos_token": _FIRST, "eos_token": "<|im_end|>", "extra_special_tokens": ["<|tool_call_start|>"]}),
    "qwen3_next": ("chatml", {"normalizer": _NFC, "pre_tokenizer": _split_first(QWEN2_SPLIT)},
                   {**_QWEN, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}),
    "qwen3_5": ("chatml", {"normalizer": _NFC, "pre_tokenizer": _split_first(QWEN3_5_SPLIT)}, {**_QWEN, **_IMAGES}),
    "qwen3_5_moe": ("chatml", {"normalizer": _NFC, "pre_tokenizer": _split_first(QWEN3_5_SPLIT)},
                    {**_QWEN, "extra_special_tokens": {"audio_token": "<|audio|>"}}),
}  # fmt: skip


def save_family_tokenizer(folder: Path, family: str) -> Path:
    """A model folder with the tokenizer of a family."""
    kind, parts, config = FAMILY_TOKENIZERS[family]
    document = json.loads(build_tokenizer(kind).to_str()) | parts
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    return folder
