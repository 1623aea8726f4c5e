"""Tokenizers: loading, the ids that end an answer, decoding."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

from apcbatch.data.chat.prompt_tokens import _parts, prompt_tokens
from apcbatch.data.end_tokens import EndTokens
from apcbatch.data.model_files import model_files
from apcbatch.data.tokenization import tokenizer as tokenizer_module
from apcbatch.data.tokenization.no_tokenizer import NoTokenizer
from apcbatch.data.tokenization.tokenizer import Tokenizer, load_tokenizer, read_vocab_size
from apcbatch.errors import ModelError, RequestError
from tests.data.conftest import KINDS, build_tokenizer, save_model
from tests.effort import table

ROOT = Path(__file__).parents[2]


def test_truncation_and_padding_of_a_file_are_off(tmp_path: Path) -> None:
    """tokenizer.json files are published with the truncation of somebody's training run in them."""
    tokenizer = build_tokenizer("gpt2")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    loaded = load_tokenizer(save_model(tmp_path, tokenizer))
    assert len(loaded.encode("user " * 50).ids) > 50
    assert len(loaded.encode("a").ids) == 1


def test_without_a_size_in_the_config_the_vocabulary_has_the_added_tokens(tmp_path: Path) -> None:
    """Catches ids of added tokens that are beyond the vocabulary."""
    made = build_tokenizer("chatml")
    made.add_tokens(["<new>"])
    folder = save_model(tmp_path, made)
    (folder / "config.json").write_text("{}")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 1 + max(tokenizer.encode("<new>").ids)


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    """Each with the file at fault."""
    with pytest.raises(ModelError, match="is not a folder; expected a model folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ModelError, match="has no tokenizer; expected one of tokenizer.json, "):
        load_tokenizer(tmp_path)
    folder = save_model(tmp_path, build_tokenizer("chatml"))
    (folder / "generation_config.json").write_text('{"eos_token_id": "stop"}')
    with pytest.raises(ModelError, match=r"eos_token_id in .*generation_config.json is 'stop'; expected a token id"):
        load_tokenizer(folder)
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config.json holds a list; expected a JSON object"):
        load_tokenizer(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json is not valid JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "added_tokens": []}')
    with pytest.raises(ModelError, match="the tokenizer in .* cannot be loaded: .*; expected tokenizer.json"):
        load_tokenizer(folder)


def test_only_what_splits_a_text_everywhere_is_a_marker(tmp_path: Path) -> None:
    """Catches an added token that depends on its surroundings, or comes after the normaliser, as a place to cut at."""
    tokenizer = build_tokenizer("chatml")
    kinds = {"normalized": "<n>", "lstrip": "<l>", "rstrip": "<r>", "single_word": "<w>"}
    tokenizer.add_tokens([AddedToken(text, **{"normalized": False, kind: True}) for kind, text in kinds.items()])
    tokenizer.add_tokens([AddedToken("<p>", normalized=False), AddedToken("<p>more", normalized=False)])
    loaded = load_tokenizer(save_model(tmp_path, tokenizer))
    text = "a <n> <l> <r> <w> <p><p>more<|im_start|>b"
    assert loaded.markers is not None and loaded.markers.findall(text) == ["<p>", "<p>more", "<|im_start|>"]
    for place in loaded.markers.finditer(text):  # each part alone has the tokens that it has in the whole
        parts = [loaded.encode(part).ids for part in (text[: place.start()], text[place.start() :])]
        assert parts[0] + parts[1] == loaded.encode(text).ids


@pytest.mark.slow
def test_other_vocabulary_files_give_the_ids_of_transformers(tmp_path: Path) -> None:
    """Catches a folder without tokenizer.json that is refused, or read in another way than `transformers` does."""
    from transformers import AutoTokenizer

    build_tokenizer("gpt2").model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 600}))
    loaded = load_tokenizer(tmp_path)
    text = "The policy: an agent books\n\n3 flights. é"
    assert loaded.encode(text).ids == AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert loaded.decode(loaded.encode(text).ids) == text


def test_a_tokenizer_that_cannot_be_converted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an AttributeError where `transformers` has no fast form of a tokenizer, code of the folder that is run, a
    download, or another file of the folder that is read."""
    import transformers

    (tmp_path / "vocab.txt").write_text("a\n")
    (tmp_path / "notes.txt").touch()
    given: dict[str, object] = {}

    def read(folder: str, **options: object) -> object:
        given.update(options, files=os.listdir(folder))
        return object()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", read)
    with pytest.raises(ModelError, match="it is not converted to a tokenizer.json; convert it, and put that into the"):
        load_tokenizer(tmp_path)
    assert given == {"local_files_only": True, "trust_remote_code": False, "files": ["vocab.txt"]}


@pytest.mark.slow
def test_code_in_a_model_folder_is_never_run(tmp_path: Path) -> None:
    """Catches `trust_remote_code` turned on: the Python files of a checkpoint would run with the user's rights."""
    ran = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(
        "import pathlib\n"
        f"pathlib.Path({str(ran)!r}).touch()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast): pass\n"
    )
    own = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "vocab_size": 600}))
    build_tokenizer("gpt2").model.save(str(folder))
    with pytest.raises(ModelError, match="the tokenizer in .* cannot be loaded"):
        load_tokenizer(folder)
    assert not ran.exists()
    build_tokenizer("gpt2").save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).vocab_size == 600 and not ran.exists()


@table("text, offsets, parts", [
    ("a b", [(0, 1), (2, 3)], ["a", " b"]),
    ("é🙂a", [(0, 1), (0, 1), (1, 2), (1, 2), (1, 2), (2, 3)], ["", "é", "", "", "🙂", "a"]),
    ("ab", [(0, 1), (0, 2)], ["a", "b"]),
    ("ab ", [(0, 1), (1, 2)], ["a", "b "]),
])  # fmt: skip
def test_each_character_of_a_prompt_is_shown_once(text: str, offsets: list[tuple[int, int]], parts: list[str]) -> None:
    """Fault: a character of several tokens is shown twice or never, or text between tokens goes."""
    assert list(_parts(None, text, [*range(len(offsets))], offsets)) == parts and "".join(parts) == text


def test_a_prompt_is_shown_in_its_own_text(tmp_path: Path) -> None:
    """Fault: a character of several tokens is shown in pieces, or what follows an added token is left out."""
    tokenizer = load_tokenizer(save_model(tmp_path, build_tokenizer("gpt2")))
    text = "a \U0001f994 b"
    ids = tokenizer.encode(text).ids
    shown = prompt_tokens(tokenizer, ids, text, adds_special=False)
    assert "".join(token.text for token in shown) == text and [token.id for token in shown] == ids
    assert "\ufffd" in "".join(token.text for token in prompt_tokens(tokenizer, ids, None, adds_special=False))
    other = prompt_tokens(tokenizer, ids, "another", adds_special=False)
    assert other == prompt_tokens(tokenizer, ids, None, adds_special=False), "the ids are not those of the text"
    source: Any = SimpleNamespace(decode_all=lambda ids: f"<{ids[0]}>")
    assert list(_parts(source, "ab", [7, 8, 9], [(0, 0), (0, 1), (1, 2)])) == ["<7>", "a", "b"]


@table("kind", KINDS)
def test_a_continuation_is_the_whole_text(kind: str, model_dir: Callable[..., Path]) -> None:
    """Catches a first word that is lost where it makes one token with what stands before it."""
    tokenizer = load_tokenizer(model_dir(kind))
    for text in ("nd b", "gent", "dd(1", "ssistant", " b", "\nand", "def"):
        assert tokenizer.decode(tokenizer.encode_continuation(text)).lstrip(" ") == text.lstrip(" "), text


def test_the_schema_of_the_answers_is_searchable_text(tmp_path: Path) -> None:
    """Catches a marker that is not found in the schema since it is written in escapes, and a schema where none is."""
    folder = save_model(tmp_path, build_tokenizer("chatml"))
    assert load_tokenizer(folder).answer_schema == ""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"response_schema": {"x": "<\uff5ctool\u2581calls\uff5c>\\s*"}, "response_template": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).answer_schema == '[{"x": "<\uff5ctool\u2581calls\uff5c>s*"}]'


@table(
    "size, is_read",
    [(1, True), (2**31, True), *((no, False) for no in (0, -1, 2**31 + 1, True, 1 << 70, "x", None, 1.5))],
)
def test_how_many_ids_a_model_may_have(tmp_path: Path, size: object, is_read: bool) -> None:
    """Catches a vocabulary of no or of too many ids, for which memory is taken, and one that is refused at its end."""
    for config in ({"vocab_size": size}, {"vocab_size": 7, "text_config": {"vocab_size": size}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_vocab_size(tmp_path) == (size if is_read else None)


def test_added_tokens_have_at_most_a_million_characters() -> None:
    """Catches a model folder that makes each search for its tokens slow, and one that is refused at the bound."""

    def made(*texts: str) -> Tokenizer:
        added = {number: AddedToken(text) for number, text in enumerate(texts)}
        source: Any = SimpleNamespace(backend_tokenizer=SimpleNamespace(get_added_tokens_decoder=lambda: added))
        return Tokenizer(source, 10)

    assert made("x" * (1 << 20)).markers is None
    with pytest.raises(ModelError, match="more than 1,048,576 characters"):
        made("x" * (1 << 20), "y")


@table("name, most", [("chat_template.jinja", 4 << 20), ("tokenizer.json", 64 << 20)])
def test_a_file_of_a_model_has_so_many_bytes_and_no_more(tmp_path: Path, name: str, most: int) -> None:
    """Catches a file that fills memory, and one that is refused at its bound."""
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, most)
    assert model_files(tmp_path) == {name: tmp_path / name}
    os.truncate(tmp_path / name, most + 1)
    with pytest.raises(ModelError, match=f"holds {most + 1:,} bytes; at most {most:,} are read"):
        model_files(tmp_path)


def test_a_tokenizer_that_takes_no_text_at_all_is_told_at_once(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that begins although each of its prompts would fail."""
    tokenizer = load_tokenizer(model_dir("chatml"))

    def refuse(text: str) -> None:
        raise RequestError("invalid_request", "no text")

    monkeypatch.setattr(tokenizer, "encode_prompt", refuse)
    with pytest.raises(ModelError, match="the tokenizer in .* cannot be used: no text"):
        _ = tokenizer.begins_with_bos


def test_without_a_tokenizer_no_text_has_tokens(tmp_path: Path) -> None:
    """Catches a text that becomes None where tokens are expected, for a folder without a tokenizer."""
    absent = NoTokenizer(tmp_path, 9, EndTokens({1: ()}))
    for encode in (absent.encode, absent.encode_prompt, absent.encode_continuation):
        with pytest.raises(RequestError, match="a text needs a tokenizer, and .* has none"):
            encode("hi")
    assert not absent.begins_with_bos


@table("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_is_no_damage_of_a_tokenizer(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Catches Ctrl-C while a tokenizer is loaded that is reported as a fault of the model."""

    def interrupt(*given: object) -> None:
        raise error

    monkeypatch.setattr(tokenizer_module, "read_tokenizer", interrupt)
    with pytest.raises(error):
        load_tokenizer(model_dir("chatml"))
