"""Tokenizer files as a checkpoint may hold them: each is read, or named in a sentence, in bounded time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from apcbatch.data.chat.render import Renderer
from apcbatch.data.tokenization.tokenizer import load_tokenizer
from apcbatch.errors import ModelError
from tests.data.conftest import STABLE_TEMPLATE
from tests.effort import table


def own_folder(model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A model folder of one's own."""
    return Path(shutil.copytree(model_dir("chatml", STABLE_TEMPLATE), tmp_path / "model"))


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
DAMAGE = [b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe{\0}\0", DEEP, b"{}", b'{"model": {"type": "BPE"}}',
          b'{"version": "1.0", "added_tokens": 5}', b"\0" * 1000]  # fmt: skip


@pytest.mark.slow
@table("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
@table("number", range(len(DAMAGE)))
def test_damage_is_a_sentence_or_harmless(
    model_dir: Callable[..., Path], tmp_path: Path, name: str, number: int
) -> None:
    """Catches deep JSON, other encodings and values of another kind: tracebacks before."""
    folder = own_folder(model_dir, tmp_path)
    (folder / name).write_bytes(DAMAGE[number])
    try:
        tokenizer = load_tokenizer(folder)
    except ModelError as error:
        assert str(folder) in str(error) and len(str(error)) < 1_000
    else:
        assert name != "tokenizer.json" and tokenizer.vocab_size > 0


@pytest.mark.slow
@table(
    "change",
    [
        {"chat_template": 5}, {"chat_template": [1]}, {"chat_template": {"default": 5}}, {"chat_template": [{}]},
        {"eos_token": 5}, {"eos_token": {"content": 5}}, {"bos_token": ["a"]}, {"model_max_length": "x"},
        {"added_tokens_decoder": {"x": 1}}, {"added_tokens_decoder": {"99999999999999999999": {"content": "a"}}},
        {"tokenizer_class": "Nothing"}, {"tokenizer_class": 5}, {"auto_map": {"AutoTokenizer": ["a.B", "a.B"]}},
        {"extra_special_tokens": 5}, {"padding_side": 3}, {"additional_special_tokens": {"a": 1}},
    ],
)  # fmt: skip
def test_values_of_another_kind_are_a_sentence_or_harmless(
    model_dir: Callable[..., Path], tmp_path: Path, change: dict
) -> None:
    """Catches a tokenizer_config.json whose values have other types than the library expects."""
    folder = own_folder(model_dir, tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    try:
        Renderer.load(folder)
    except ModelError as error:
        assert str(folder) in str(error)
