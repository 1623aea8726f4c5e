"""A tokenizer comes with a checkpoint: whatever is in it, a text takes bounded time and memory, and fails alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from apcbatch.data.helper_child import DONE, REFUSED
from apcbatch.data.model_files import MAX_FILE_BYTES, model_files_digest
from apcbatch.data.tokenization import tokenizer as tokenizer_module
from apcbatch.data.tokenization.bounds import growth
from apcbatch.data.tokenization.isolated import IsolatedTokenizer
from apcbatch.data.tokenization.tokenizer import Tokenizer, load_tokenizer
from apcbatch.data.tokenization.tokenizer_child import _decode
from apcbatch.errors import ModelError, RequestError
from tests.data.conftest import CORPUS, KINDS, build_tokenizer, save_model

DEMO = Path(__file__).resolve().parents[2] / "apcbatch" / "demo"


def with_parts(folder: Path, kind: str = "chatml", **parts: object) -> Path:
    """A model folder whose tokenizer.json has these parts in the place of its own."""
    save_model(folder, build_tokenizer(kind))
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


def replaces(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


GROWS = {"type": "Sequence", "normalizers": [replaces({"String": "a"}, "a" * 40)] * 8}
BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
SHRINKS = {"type": "Sequence", "decoders": [replaces({"String": "a"}, "a" * 40)] * 8}
POST = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000, "pair": [],
        "special_tokens": {}}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_tokenizers_work_in_this_process(model_dir: Callable[..., Path], kind: str) -> None:
    """Catches a tokenizer as they are published that is taken for a hostile one, and costs a process."""
    assert isinstance(load_tokenizer(model_dir(kind)).source.backend_tokenizer, tokenizers.Tokenizer)
    assert load_tokenizer(DEMO).source.growth == 1


HOSTILE: dict[str, dict[str, Any]] = {
    "a normalizer that grows": {"normalizer": GROWS},
    "a long replacement": {"normalizer": replaces({"String": "a"}, "x" * (1 << 20))},
    "a replacement by a pattern": {"normalizer": replaces({"Regex": "(a*)*b"}, "x")},
    "a table of characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a pattern of its own": {"pre_tokenizer": BACKTRACKS},
    "an unknown part": {"pre_tokenizer": {"type": "FromTheFuture"}},
    "a decoder that grows": {"decoder": SHRINKS},
    "a text repeated behind itself": {"post_processor": POST},
    "too many parts": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}] * 40}},
}


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE)
def test_what_can_take_any_time_does_not_work_in_this_process(parts: dict[str, Any]) -> None:
    """Catches a hostile part that is taken for a known one."""
    document = json.loads(build_tokenizer("chatml").to_str())
    assert growth(document) is not None and growth(document | parts) is None
    long = {"model": document["model"] | {"unk_token": "x" * 100}}
    token = {"model": document["model"] | {"vocab": document["model"]["vocab"] | {"y" * 1000: 7}}}
    assert growth(document | long) is None and growth(document | token) is None


LOWER, STRIP = {"type": "Lowercase"}, {"type": "Strip"}


def sequence(*parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts)}


@pytest.mark.parametrize(
    ("normalizer", "factor"),
    [
        (None, 1),
        ({"type": "NFKC"}, 12),
        ({"type": "Prepend", "prepend": "a"}, 1),
        ({"type": "BertNormalizer"}, 4),
        (sequence(*[LOWER] * 5), 32),
        (sequence(*[LOWER] * 6), None),
        (sequence(*[STRIP] * 16), 1),
        (sequence(*[STRIP] * 17), None),
        (sequence(sequence(STRIP)), 1),
        (sequence(sequence(sequence(STRIP))), None),
        (replaces({"String": "ab"}, "abcde"), 3),
        (replaces({"String": "ab"}, ""), 1),
        (replaces({"String": "a"}, "b"), 1),
        (replaces({"String": "a"}, "b" * 32), 32),
        (replaces({"String": "a"}, "b" * 33), None),
        (replaces({"String": "a" * 64}, "b"), 1),
        (replaces({"String": "a" * 65}, "b"), None),
        (replaces({"String": ""}, "b"), None),
        (replaces({"Regex": r"\d"}, "b"), None),
        ({**STRIP, "x": -(1 << 31)}, 1),
        ({**STRIP, "x": -(1 << 31) - 1}, None),
        ({**STRIP, "x": [0] * 32}, 1),
        ({**STRIP, "x": [0] * 33}, None),
        ({**STRIP, "x": [[[[[0]]]]]}, 1),
        ({**STRIP, "x": [[[[[[0]]]]]]}, None),
        ({"type": ["Strip"]}, None),
        ("Strip", None),
    ],
)
def test_how_far_a_normalizer_is_known(normalizer: Any, factor: int | None) -> None:
    """Catches a part that makes more of a text than it is said to, and one that is known and costs a process."""
    assert growth({"model": {"vocab": {"a": 0}}, "normalizer": normalizer}) == factor


@pytest.mark.parametrize(
    ("document", "is_known"),
    [
        ({"model": {"vocab": {"y" * 512: 0}}}, True),
        ({"model": {"vocab": {"y" * 513: 0}}}, False),
        ({"model": {"vocab": [["y" * 64, 0.0]]}}, True),
        ({"model": {"vocab": [["y" * 65, 0.0]]}}, False),
        ({"model": {"vocab": {}, "max_input_chars_per_word": 1000}}, True),
        ({"model": {"vocab": {}, "max_input_chars_per_word": 1001}}, False),
        ({"model": {"vocab": {}}, "added_tokens": [{"content": "y" * 512}]}, True),
        ({"model": {"vocab": {}}, "added_tokens": [{"content": "y" * 513}]}, False),
        ({"model": {"vocab": {}}, "added_tokens": [5]}, False),
        ({"model": {"vocab": {}}, "added_tokens": {"a": 1}}, False),
        ({"model": {}}, False),
        ({"model": 5}, False),
    ],
)
def test_how_far_a_vocabulary_is_known(document: dict[str, Any], is_known: bool) -> None:
    """Catches a vocabulary whose longest token makes each character of a text expensive."""
    assert growth(document) == (1 if is_known else None)


def test_a_text_that_the_library_panics_at_fails_alone(tmp_path: Path) -> None:
    """Catches 41 characters that ended a run: the library's panic is no Exception."""
    tokenizer = load_tokenizer(with_parts(tmp_path, pre_tokenizer=BACKTRACKS))
    with pytest.raises(RequestError, match="the tokenizer cannot take a text: .*retry-limit-in-match") as caught:
        tokenizer.encode("a" * 40 + "!")
    assert caught.value.code == "invalid_request"
    assert tokenizer.decode(tokenizer.encode("hi").ids) == "hi"


def test_a_panic_in_this_process_is_the_requests_error() -> None:
    """Catches `PanicException`, a BaseException, from a tokenizer whose parts are known."""
    panic = type("PanicException", (BaseException,), {})

    class Panics:
        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def encode(self, *args: Any, **kwargs: Any) -> None:
            raise panic("no entry found\nat line 5")

        decode = encode

    tokenizer = load_tokenizer(DEMO)
    backend, tokenizer._backend = tokenizer._backend, Panics()  # type: ignore[assignment]
    for call in (lambda: tokenizer.encode("x"), lambda: tokenizer.decode([5])):
        with pytest.raises(RequestError, match="the tokenizer cannot take a text: no entry found$"):
            call()
    for panic in (KeyError, ValueError):  # no panics: faults that must not be taken for the request's
        with pytest.raises(panic):
            tokenizer.encode("x")


@pytest.mark.slow
def test_a_normalizer_gets_bounded_memory(tmp_path: Path) -> None:
    """Catches a normalizer that makes terabytes of eight letters."""
    tokenizer = load_tokenizer(with_parts(tmp_path, normalizer=GROWS))
    with pytest.raises(RequestError, match="the tokenizer cannot take a text: it (needs|takes) more than"):
        tokenizer.encode("aaaaaaaa")
    assert tokenizer.encode("hi").ids


@pytest.mark.slow
def test_a_decoder_gets_bounded_memory(tmp_path: Path) -> None:
    """Catches an answer of eight tokens that takes all memory as it is written."""
    parts = {"type": "Sequence", "decoders": [{"type": "Fuse"}, *SHRINKS["decoders"]]}
    tokenizer = load_tokenizer(with_parts(tmp_path, decoder=parts))
    ids = tokenizer.encode("aaaaaaaa").ids
    with pytest.raises(RequestError, match="the tokenizer cannot make a text of tokens: it (needs|takes) more than"):
        tokenizer.decode(ids)
    assert tokenizer.decode(tokenizer.encode("hi").ids)


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_loaded_in_its_bounds_is_told(tmp_path: Path) -> None:
    """Catches added tokens that a normalizer makes gigabytes of before any text comes."""
    added = [{"id": 0, "content": "a" * 4000, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": True, "special": False}]  # fmt: skip
    with pytest.raises(ModelError, match="cannot be loaded: it (needs|takes) more than"):
        load_tokenizer(with_parts(tmp_path, normalizer=GROWS, added_tokens=added))


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_of_its_own_gives_the_same(model_dir: Callable[..., Path], kind: str) -> None:
    """Catches tokens, places or texts that depend on where a tokenizer works."""
    here = load_tokenizer(model_dir(kind)).source.backend_tokenizer
    there = IsolatedTokenizer(here.to_str().encode())
    assert there.get_vocab_size() == here.get_vocab_size(with_added_tokens=True)
    for number, token in here.get_added_tokens_decoder().items():
        other = there.get_added_tokens_decoder()[number]
        assert repr(other) == repr(token) and there.token_to_id(token.content) == number
    for text in ("", *CORPUS, "".join(CORPUS), "a<|im_start|>user\n<|im_end|>é 🙂"):
        for special in (False, True):
            one, two = here.encode(text, add_special_tokens=special), there.encode(text, add_special_tokens=special)
            assert one.ids == two.ids and one.offsets == two.offsets
            for place in range(len(text) + 1):
                assert one.char_to_token(place) == two.char_to_token(place)
            assert all(one.token_to_chars(n) == two.token_to_chars(n) for n in range(len(one.ids)))
            assert there.decode(one.ids, skip_special_tokens=special) == here.decode(one.ids, special)


def test_a_long_text_is_tokenised_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a long text that takes gigabytes in the run's own process, where no bound holds."""
    tokenizer = load_tokenizer(DEMO)
    text = "one two, three é\n" * 50
    expected = tokenizer.encode(text)
    monkeypatch.setattr(tokenizer_module, "MAX_BYTES_HERE", 500)
    monkeypatch.setattr(tokenizer_module, "_MOST_TOKENS_HERE", 10)
    made = tokenizer.encode(text)
    assert tokenizer._helper is not None and made.ids == expected.ids and made.offsets == expected.offsets
    assert tokenizer.decode(made.ids) == text


@pytest.mark.parametrize("name", ["notes.json", "words.txt", "old.jinja", "other.model", "vocab.txt", "merges.txt"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling", "device", "large"])
def test_odd_neighbours_are_not_read(tmp_path: Path, kind: str, name: str) -> None:
    """Catches a file beside the checkpoint that nothing needs, and that hung the run or filled its memory."""
    folder = save_model(tmp_path, build_tokenizer("chatml"))
    before = model_files_digest(folder)
    odd_neighbour(folder / name, kind)
    assert load_tokenizer(folder).vocab_size and model_files_digest(folder) == before


def odd_neighbour(path: Path, kind: str) -> None:
    """Something under the name of a file that is not one, or is too large."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        with open(path, "wb") as file:
            file.truncate((64 << 20) + 1)
    else:
        path.symlink_to({"dangling": "nowhere", "device": "/dev/zero"}[kind])


@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling", "device", "large"])
def test_what_the_tokenizer_needs_must_be_a_file(tmp_path: Path, kind: str) -> None:
    """Catches a run that waits for the tokenizer's file without end, or reads it without end."""
    folder = save_model(tmp_path, build_tokenizer("chatml"))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        path = folder / name
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        odd_neighbour(path, kind)
        with pytest.raises(ModelError, match=f"{name} (cannot be read|holds 67,108,865 bytes)"):
            load_tokenizer(folder)
        path.rmdir() if kind == "folder" else path.unlink()
        if kept is not None:
            path.write_bytes(kept)


def test_the_bounds_are_those_that_the_pages_name() -> None:
    """Catches a bound that is not the one which users are told."""
    page = (DEMO.parents[1] / "docs" / "security.md").read_text()
    assert f"regular files of up to {MAX_FILE_BYTES >> 20} MiB" in page
    assert f"a text of more than {tokenizer_module.MAX_BYTES_HERE >> 20} MiB" in page


def test_a_text_of_tokens_is_bounded() -> None:
    """Catches a decoded text of just the most characters that is refused, or one more that is sent."""
    backend: Any = SimpleNamespace(decode=lambda token_ids, skip_special_tokens: "x" * token_ids[0])
    assert _decode(backend, [1 << 24], False) == (DONE, "x" * (1 << 24))
    told = "the text of 1 tokens has 16,777,217 characters; at most 16,777,216"
    assert _decode(backend, [(1 << 24) + 1], False) == (REFUSED, told)


def test_added_tokens_are_bounded() -> None:
    """Catches a pattern of megabytes that is compiled from what a checkpoint adds to its vocabulary."""
    token = tokenizers.AddedToken("x" * (1 << 19), normalized=True)
    added = {0: token, 1: token}
    source: Any = SimpleNamespace(backend_tokenizer=SimpleNamespace(get_added_tokens_decoder=lambda: added))
    assert Tokenizer(source, 2).markers is None
    added[2] = tokenizers.AddedToken("y")
    with pytest.raises(ModelError, match="its added tokens have more than 1,048,576 characters"):
        Tokenizer(source, 3)


STEADY = {
    "normalizer": ("normalizers", ["StripAccents", "Nmt", "Strip", "Prepend"]),
    "pre_tokenizer": ("pretokenizers", ["Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Punctuation", "Digits",
                                        "UnicodeScripts", "CharDelimiterSplit", "Split"]),
    "post_processor": ("processors", ["ByteLevel", "TemplateProcessing", "RobertaProcessing", "BertProcessing"]),
    "decoder": ("decoders", ["ByteLevel", "ByteFallback", "Fuse", "Metaspace", "CTC", "Strip"]),
}  # fmt: skip


@pytest.mark.parametrize(("part", "kind"), [(part, kind) for part, (_, kinds) in STEADY.items() for kind in kinds])
def test_a_part_that_does_not_grow_a_text_may_come_often(part: str, kind: str) -> None:
    """Catches a part that is taken for one that grows a text, or that is unknown, which costs a process."""
    document = {"model": {"vocab": {"a": 0}}}
    assert growth(document | {part: {"type": "Sequence", STEADY[part][0]: [{"type": kind}] * 16}}) == 1


@pytest.mark.parametrize(
    ("part", "kind", "most"),
    [("pre_tokenizer", "ByteLevel", 5), ("pre_tokenizer", "Metaspace", 3), ("decoder", "WordPiece", 5),
     ("decoder", "BPEDecoder", 5)],
)  # fmt: skip
def test_a_part_that_grows_a_text_may_come_a_few_times(part: str, kind: str, most: int) -> None:
    """Catches parts that make 32 times a text and more in this process, or fewer that cost a process."""
    document = {"model": {"vocab": {"a": 0}}}
    for count in (most, most + 1):
        parts = {"type": "Sequence", STEADY[part][0]: [{"type": kind}] * count}
        assert growth(document | {part: parts}) == (1 if count == most else None)


@pytest.mark.parametrize(("kind", "factor"), [("NFC", 3), ("NFD", 4), ("NFKC", 12), ("NFKD", 12), ("Lowercase", 2),
                                              ("BertNormalizer", 4), ("ByteLevel", 2)])  # fmt: skip
def test_a_normalizer_grows_a_text_by_its_factor_at_most(kind: str, factor: int) -> None:
    """Catches a bound below what the worst character does, of all of Unicode, or far above it."""
    document = {"model": {"vocab": {"a": 0}}, "normalizer": {"type": kind}}
    assert growth(document) == factor
    apply = getattr(tokenizers.normalizers, kind)().normalize_str
    texts = (chr(number) for number in range(1 << 16) if not 0xD800 <= number < 0xE000)
    worst = max(len(apply(text).encode()) / len(text.encode()) for text in texts)
    assert factor / 2 <= worst <= factor, worst


def test_a_vocabulary_for_grammars_has_added_tokens_as_they_are(model_dir: Callable[..., Path]) -> None:
    """Catches an added token that the grammar library looks for in a text which nothing normalises any more."""
    data = (model_dir("chatml") / "tokenizer.json").read_bytes()
    isolated: Any = IsolatedTokenizer.__new__(IsolatedTokenizer)
    isolated._data = data
    whole = json.loads(isolated.to_str())
    assert len(whole["added_tokens"]) > 1 and not any(token["normalized"] for token in whole["added_tokens"])
    assert whole["normalizer"] is whole["pre_tokenizer"] is None and whole["model"] == json.loads(data)["model"]
