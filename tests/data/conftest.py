"""What the tests of data share: records to make and to read, and tiny tokenizers of every kind that models use,
trained on a few lines, with model folders around them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from apcbatch.data.chat.render import Renderer
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.input.records import parse_record

CORPUS = [
    "system user assistant tool\n",
    "The policy: an agent books, modifies or cancels flight reservations. It's what we're here for.\n\n",
    "- Before any action, list the details and ask for a yes.\n\n1. one-way\n2. economy\n",
    '{"name": "get_user", "arguments": {"user_id": "mia_li_3668", "total": 1250}}\n',
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 22))\n",
    "Grüße aus Köln, naïve café; 東京へ行きます。 Привет, мир! 🙂🙃\n",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
KINDS = ("chatml", "gpt2", "llama3", "metaspace", "legacy", "unigram")

# ChatML, with the special tokens that the tokenizer of the kind `chatml` has.
STABLE_TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + call.function | tojson + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
# The head counts the messages: no prompt is how the next one begins.
UNSTABLE_TEMPLATE = "{{ messages | length }} messages\n" + STABLE_TEMPLATE
USER = {"role": "user", "content": "hi"}


def build_tokenizer(kind: str) -> Tokenizer:
    """A tokenizer of one of KINDS; only `chatml` knows the markers of ChatML."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind in ("chatml", "gpt2", "llama3"):
        tokenizer = Tokenizer(models.BPE())
        if kind == "llama3":
            split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = SPECIAL if kind == "chatml" else SPECIAL[:1]
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    if kind == "legacy":  # trained on words, then run over whole texts
        tokenizer.pre_tokenizer = None  # type: ignore[assignment]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    content = json.loads(tokenizer.to_str())  # `<0x0A>` and its kind are for bytes only, not looked for in texts
    content["added_tokens"] = [one for one in content["added_tokens"] if not one["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(content))


def by_transformers(folder: Path | str) -> Any:
    """The tokenizer of a folder as `transformers` reads it: what ours is compared with."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


@lru_cache(maxsize=32)
def kept_by_transformers(folder: Path | str) -> Any:
    """The same for a folder that does not change."""
    return by_transformers(folder)


def save_model(folder: Path, tokenizer: Tokenizer, template: str | None = None, **tokenizer_config: object) -> Path:
    """A model folder with all that data needs of one."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba", "vocab_size": tokenizer.get_vocab_size()}))
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make(kind, template=None, **tokenizer_config) -> a model folder, made once per set of arguments."""
    made: dict[tuple, Path] = {}

    def make(kind: str = "chatml", template: str | None = None, **tokenizer_config: object) -> Path:
        key = (kind, template, *sorted(tokenizer_config.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(kind)
            tokenizer = build_tokenizer(kind)
            if kind == "chatml":
                tokenizer_config.setdefault("eos_token", "<|im_end|>")
            made[key] = save_model(folder, tokenizer, template, **tokenizer_config)
        return made[key]

    return make


@pytest.fixture
def warnings() -> list[str]:
    """What a renderer made by `make_renderer` has warned of."""
    return []


@pytest.fixture
def make_renderer(model_dir: Callable[..., Path], warnings: list[str]) -> Callable[..., Renderer]:
    """make(kind, template) -> Renderer."""

    def make(kind: str = "chatml", template: str | None = STABLE_TEMPLATE) -> Renderer:
        return Renderer.load(model_dir(kind, template), warn=warnings.append)

    return make


def conversation(*turns: str, **keys: object) -> Conversation:
    """A conversation from `role: content` strings; further keys go into its line."""
    messages = [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]
    return good({"id": "c", "messages": messages, **keys}, line=7)


def completion(prompt: object) -> Conversation:
    """A completion."""
    line = {"custom_id": "p", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
    record = parse_record(line, 5)
    assert isinstance(record, Conversation)
    return record


def batch(body: object = None, **keys: object) -> dict[str, Any]:
    """A batch line for a chat; keys set to `...` are left out."""
    line = {
        "custom_id": "b-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [USER]} if body is None else body,
        **keys,
    }
    return {key: value for key, value in line.items() if value is not ...}


def good(record: object, line: int = 3) -> Conversation:
    """The conversation that a record becomes."""
    parsed = parse_record(record, line)
    assert isinstance(parsed, Conversation), parsed
    return parsed


def fault(record: object) -> str:
    """The sentence about a record that cannot be answered."""
    parsed = parse_record(record, 3)
    assert isinstance(parsed, BadLine), parsed
    assert (parsed.error.code, parsed.error.line, parsed.line) == ("invalid_request", 3, 3)
    return parsed.error.message
