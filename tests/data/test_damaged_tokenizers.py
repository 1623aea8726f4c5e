"""Tokenizer files as a checkpoint may hold them: each is read, or named in a sentence, in bounded time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from apcbatch.data.chat.render import Renderer
from apcbatch.data.model_files import model_files
from apcbatch.data.tokenization.tokenizer import load_tokenizer
from apcbatch.errors import ModelError
from tests.data.conftest import STABLE_TEMPLATE
from tests.effort import table

NAMES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json",
         "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/x.jinja")  # fmt: skip


def own_folder(model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A model folder of one's own."""
    return Path(shutil.copytree(model_dir("chatml", STABLE_TEMPLATE), tmp_path / "model"))


@table("name", NAMES)
def test_a_named_pipe_is_told_and_not_waited_for(model_dir: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """Catches a named pipe in the place of a file, which a run waited for without end."""
    folder = own_folder(model_dir, tmp_path)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ModelError, match=rf"{name} cannot be read: it is a named pipe; expected a regular file"):
        Renderer.load(folder)


def test_a_file_without_an_end_is_told(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Catches a sparse file, or a link to a device, that is read whole."""
    folder = own_folder(model_dir, tmp_path)
    with open(folder / "chat_template.jinja", "wb") as file:
        file.truncate(4 << 20)
    assert "chat_template.jinja" in model_files(folder)
    with open(folder / "chat_template.jinja", "ab") as file:
        file.truncate((4 << 20) + 1)
    with pytest.raises(ModelError, match=r"chat_template.jinja holds 4,194,305 bytes; at most 4,194,304 are read"):
        Renderer.load(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="it is a device; expected a regular file"):
        Renderer.load(folder)


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


@table("size", [True, -5, 0, 1 << 70, "x", None, 1.5])
def test_a_vocabulary_of_no_size_is_the_tokenizers(
    model_dir: Callable[..., Path], tmp_path: Path, size: object
) -> None:
    """Catches `true`, or a number beyond what an id can be, as the size of the vocabulary."""
    folder = own_folder(model_dir, tmp_path)
    tokenizer = load_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    assert load_tokenizer(folder).vocab_size == tokenizer.vocab_size


@table("ids", [True, [True], -1, [1 << 40], {}, "x", [[1]], "9" * 5_000])
def test_ids_that_end_an_answer_are_checked(model_dir: Callable[..., Path], tmp_path: Path, ids: object) -> None:
    """Catches `true` as token 1."""
    folder = own_folder(model_dir, tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ModelError, match="eos_token_id in .*generation_config.json is .*; expected a token id"):
        load_tokenizer(folder)
