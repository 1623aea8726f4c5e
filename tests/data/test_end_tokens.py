"""Which tokens end an answer: those of all files of a model together, each with the files that name it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apcbatch.data.chat.render import Renderer
from apcbatch.data.end_tokens import EndTokens, read_end_tokens
from apcbatch.data.tokenization.tokenizer import load_tokenizer
from apcbatch.errors import ModelError
from tests.data.conftest import build_tokenizer, save_model
from tests.effort import table

GENERATION, CONFIG, TOKENIZER = "generation_config.json", "config.json", "tokenizer_config.json"
END = {"eos_token": "<e>"}
UNIGRAM = {"model": {"type": "Unigram", "vocab": [["<unk>", 0], ["a", -1.5], ["<e>", -2]]}}


@table("files, expected, outside", [
    ({GENERATION: {"eos_token_id": [5, 6]}, CONFIG: {"eos_token_id": 7}},
     {5: [GENERATION], 6: [GENERATION], 7: [CONFIG]}, {}),
    ({GENERATION: {"eos_token_id": 5}, CONFIG: {"eos_token_id": 5}}, {5: [GENERATION, CONFIG]}, {}),
    ({GENERATION: {"eos_token_id": None}, CONFIG: {"eos_token_id": []}}, {}, {}),
    ({CONFIG: {"eos_token_id": 1, "text_config": {"eos_token_id": [1, 2]}}}, {1: [CONFIG], 2: [CONFIG]}, {}),
    ({CONFIG: {"text_config": 3}}, {}, {}),
    ({CONFIG: {"eos_token_id": [99, 100, 2**31 - 1]}}, {99: [CONFIG]}, {100: [CONFIG], 2**31 - 1: [CONFIG]}),
    ({CONFIG: {"eos_token_id": 0}, TOKENIZER: END | {"added_tokens_decoder": {"4": {"content": "<e>"}}}},
     {0: [CONFIG], 4: [TOKENIZER]}, {}),
    ({TOKENIZER: {"eos_token": {"content": "<e>"}}, "tokenizer.json": {"added_tokens": [{"id": 8, "content": "<e>"}]}},
     {8: [TOKENIZER]}, {}),
    ({TOKENIZER: END, "tokenizer.json": {"added_tokens": [3, {"id": True, "content": "<e>"}],
                                         "model": {"vocab": {"<e>": 9}}}}, {9: [TOKENIZER]}, {}),
    ({TOKENIZER: END, "tokenizer.json": UNIGRAM}, {2: [TOKENIZER]}, {}),
    ({TOKENIZER: END, "vocab.json": {"<e>": 3}}, {3: [TOKENIZER]}, {}),
    ({"special_tokens_map.json": END, "added_tokens.json": {"<e>": 6}}, {6: ["special_tokens_map.json"]}, {}),
    ({TOKENIZER: END, "tokenizer.json": {"model": {"vocab": {"a": 1}}}}, {}, {}),
    ({TOKENIZER: {"eos_token": 5, "added_tokens_decoder": {"9" * 5000: {"content": "<e>"}}}}, {}, {}),
    ({TOKENIZER: END | {"added_tokens_decoder": {"9" * 5000: {"content": "<e>"}, "x": {"content": "<e>"}}}}, {}, {}),
])  # fmt: skip
def test_all_files_together(files: dict, expected: dict, outside: dict, tmp_path: Path) -> None:
    """Fault: only the first file that names an end is read, so that `<|im_end|>` ends no answer of a merged fine-tune;
    or an id of another vocabulary is a stop token."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = read_end_tokens(tmp_path, 100)
    assert found == EndTokens(*({i: tuple(names) for i, names in ids.items()} for ids in (expected, outside)))


@table("number", [2**31, -1, True, "2", 1.5, [1], {}, "9" * 5000])
def test_what_is_no_id_is_refused(number: object, tmp_path: Path) -> None:
    """Fault: `true` is taken as token 1; an end that no model can have."""
    (tmp_path / CONFIG).write_text(json.dumps({"eos_token_id": [5, number]}))
    with pytest.raises(ModelError, match="config.json is a list; expected a token id or a list of them"):
        read_end_tokens(tmp_path, 100)


@table("kind", ["chatml", "gpt2", "unigram", "fallback"])
def test_the_tokenizers_end_is_the_librarys(kind: str, tmp_path: Path) -> None:
    """Fault: the files are read otherwise than by the tokenizer, so that the engine ends an answer at another id."""
    made = build_tokenizer(kind)
    end = {"chatml": "<|im_end|>", "gpt2": "<|endoftext|>"}.get(kind, "</s>")
    tokenizer = load_tokenizer(save_model(tmp_path, made, eos_token=end))
    assert tokenizer.eos_token_ids == (made.token_to_id(end),)


def test_a_sentence_names_tokens_and_files(model_dir, tmp_path: Path) -> None:
    """Fault: nothing says at which tokens answers end, that none does, or that an id is of another vocabulary."""
    tokenizer = Renderer.load(model_dir("chatml")).tokenizer
    [end] = tokenizer.eos_token_ids
    assert tokenizer.ends() == f"an answer ends at token {end} <|im_end|> (tokenizer_config.json)"
    many = EndTokens(dict.fromkeys(range(300, 310), (CONFIG, GENERATION)), {600: (CONFIG,)}).sentence({})
    assert many.startswith("an answer ends at token 300 (config.json, generation_config.json) or 301 (")
    assert many.endswith(" or 2 more; not in the vocabulary, so without effect: 600 (config.json)")
    assert "no file of the model names a token that ends an answer" in EndTokens().sentence({})
