"""Tokenizers read without `transformers`: the same as with it in every respect that is used."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, processors

from apcbatch.data.tokenization.tokenizer import load_tokenizer
from apcbatch.errors import ModelError
from apcbatch.model.locate import locate_model
from tests.conftest import ROOT
from tests.data.conftest import CORPUS, KINDS, build_tokenizer, by_transformers, save_model
from tests.data.family_tokenizers import FAMILY_TOKENIZERS, save_family_tokenizer
from tests.effort import table, tries

BUILT = {kind: build_tokenizer(kind).to_str() for kind in KINDS}
TEXTS = [
    *CORPUS,
    "",
    " ",
    "a",
    "<|im_start|>user\n<|im_end|> <extra>x <|endoftext|>",
    "\r\n\0\u200b🦔",
    "don't  stop .",
]


def assert_the_same(folder: Path) -> None:
    """Compare everything that data/ uses, on texts and on random ids."""
    ours, theirs = load_tokenizer(folder).source, by_transformers(folder)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.chat_template == theirs.chat_template and ours.name_or_path == theirs.name_or_path
    mine, other = ours.backend_tokenizer, theirs.backend_tokenizer
    other.no_padding()
    for text in TEXTS:
        for special in (False, True):
            one, two = (one.encode(text, add_special_tokens=special) for one in (mine, other))
            assert (one.ids, one.offsets) == (two.ids, two.offsets)
    assert mine.get_added_tokens_decoder() == other.get_added_tokens_decoder()
    size = mine.get_vocab_size(with_added_tokens=True)
    assert size == other.get_vocab_size(with_added_tokens=True)
    for _ in range(20):
        ids = [random.randrange(size) for _ in range(random.randrange(12))]
        assert mine.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def added(token: AddedToken) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


@st.composite
def folders(draw: st.DrawFn) -> tuple[str, dict[str, Any], dict[str, object]]:
    """(tokenizer.json, tokenizer_config.json, further files by name), of all the kinds that checkpoints have."""
    kind = draw(st.sampled_from(KINDS))
    tokenizer = Tokenizer.from_str(BUILT[kind])
    for content in draw(st.lists(st.sampled_from(["<extra>", "<tool_call>", "user"]), unique=True)):
        flags = {name: draw(st.booleans()) for name in ("lstrip", "rstrip", "normalized", "single_word", "special")}
        tokenizer.add_tokens([AddedToken(content, **flags)])
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if draw(st.booleans()):
        first = special[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
    if draw(st.integers(0, 9)) == 0:
        tokenizer.enable_padding(length=8)
    texts = st.sampled_from([*special, "a", "<new>"])
    objects = texts.map(lambda text: {"__type": "AddedToken", **added(AddedToken(text, special=True))})
    config: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                **{f"{name}_token": st.one_of(texts, st.none(), objects) for name in ("bos", "eos", "unk", "pad")},
                "image_token": texts,
                "extra_special_tokens": st.one_of(st.lists(st.one_of(texts, objects), max_size=2), st.just({})),
                "additional_special_tokens": st.lists(texts, max_size=2),
                "add_bos_token": st.booleans(),
                "add_prefix_space": st.booleans(),
                "clean_up_tokenization_spaces": st.booleans(),
                "split_special_tokens": st.booleans(),
                "padding_side": st.sampled_from(["left", "right"]),
                "model_max_length": st.sampled_from([512, 10**30]),
                "tokenizer_class": st.sampled_from(["PreTrainedTokenizerFast", "LlamaTokenizer", "TokenizersBackend"]),
                "legacy": st.booleans(),
                "errors": st.just("replace"),
                "response_template": st.just({"defaults": {}}),
                "response_schema": st.just({"type": "object"}),
                "chat_template": st.sampled_from(["", "{{ messages }}"]),
            },
        )
    )
    if draw(st.booleans()):
        declared = {str(number): added(token) for number, token in tokenizer.get_added_tokens_decoder().items()}
        if draw(st.integers(0, 3)) == 0:
            declared[str(tokenizer.get_vocab_size())] = added(AddedToken("<more>", special=True))
        config["added_tokens_decoder"] = declared
    files = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "chat_template.jinja": st.sampled_from(["", "x\r\ny"]),
                "special_tokens_map.json": st.just('{"bos_token": "a"}'),
                "added_tokens.json": st.just("{}"),
            },
        )
    )
    return tokenizer.to_str(), config, files


@pytest.mark.slow
@settings(max_examples=tries(300), suppress_health_check=list(HealthCheck))
@given(folders())
def test_what_is_read_is_what_transformers_reads(made: tuple[str, dict[str, Any], dict[str, str]]) -> None:
    """Fault: a named token, a template, an added token or a flag means another thing than with `transformers`."""
    tokenizer, config, files = made
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.json").write_text(tokenizer)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        for file, content in files.items():
            (folder / file).write_bytes(content.encode())
        assert_the_same(folder)


@table("family", FAMILY_TOKENIZERS)
def test_the_tokenizers_of_families_are_read_as_by_transformers(family: str, tmp_path: Path) -> None:
    """Fault: a family whose pattern, normalizer, decoder or tokens are read otherwise than by `transformers`."""
    assert_the_same(save_family_tokenizer(tmp_path, family))


@table(
    "config, files",
    [
        ({"clean_up_tokenization_spaces": True, "something_new": 1}, {}),
        ({"split_special_tokens": True}, {}),
        ({"image_token": "a"}, {}),
        ({"eos_token": "<new>", "pad_token": "user"}, {}),
        ({"extra_special_tokens": {"image": "a"}}, {}),
        ({"extra_special_tokens": ["<x>", "user"]}, {}),
        ({"chat_template": [{"name": "default", "template": "x"}, {"name": "rag", "template": "y"}]}, {}),
        ({"added_tokens_decoder": {"9999": {"content": "<new>"}, "7": {"content": "user", "special": True}}}, {}),
        ({}, {"special_tokens_map.json": '{"eos_token": {"content": "<e>", "normalized": false}, "x_token": "b"}'}),
        ({"eos_token": "<e>"}, {"added_tokens.json": '{"<e>": 600, "<f>": 500}'}),
        ({}, {"additional_chat_templates/x.jinja": "x\r\ny"}),
        ({}, {"additional_chat_templates/x.jinja": "x", "chat_template.jinja": "z\r"}),
        (None, {}),
    ],
)
def test_what_other_files_declare_is_read_as_by_transformers(
    config: Any, files: dict[str, str], tmp_path: Path
) -> None:
    """Fault: a key or a file that adds a token, or changes one, is passed over or read otherwise."""
    folder = save_model(tmp_path, build_tokenizer("gpt2"), **(config or {}))
    if config is None:
        (folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode())
    assert_the_same(folder)


@table(
    "config, files, sentence",
    [
        ({"eos_token": 5}, {}, "eos_token is 5; expected the text of a token"),
        ({"added_tokens_decoder": {"7": "a", "8": 5}}, {}, "8 is 5; expected the text of a token"),
        ({"chat_template": [1]}, {}, "chat_template is a list; expected a text, or a list of names"),
        ({}, {"tokenizer_config.json": "{"}, "tokenizer_config.json is not valid JSON"),
        ({}, {"tokenizer_config.json": "[]"}, "tokenizer_config.json holds a list; expected a JSON object"),
        ({}, {"tokenizer.json": "{}"}, "the tokenizer in .* cannot be loaded: "),
        ({}, {"chat_template.jinja": "\udcff"}, "the tokenizer in .* cannot be loaded: 'utf-8' codec can't decode"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(
    config: dict[str, Any], files: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    """Fault: a traceback for a damaged file, or a sentence that does not name it."""
    folder = save_model(tmp_path, build_tokenizer("gpt2"), **config)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=sentence):
        load_tokenizer(folder)


@pytest.mark.slow
def test_the_demo_needs_no_transformers() -> None:
    """Fault: a second of imports before the first answer; and the demo is read as `transformers` reads it."""
    folder = locate_model("demo")
    assert_the_same(folder)
    assert load_tokenizer(folder).begins_with_bos == (by_transformers(folder)("a")["input_ids"][0] == 1)
    code = (
        "import sys; from apcbatch.data.chat.render import Renderer; Renderer.load(sys.argv[1]); "
        "sys.exit(bool({'transformers', 'torch'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, cwd=ROOT)
