"""What bounds a tokenizer: which files are read, which tokenizers are refused, and a text that fails fails alone."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Encoding, models, normalizers
from tokenizers import Tokenizer as Backend

from apcbatch.data.chat.render import Renderer
from apcbatch.data.model_files import MAX_FILE_BYTES, model_files_digest
from apcbatch.data.template_options import ChatOptions
from apcbatch.data.tokenization.tokenizer import TOKEN_CHARACTERS, Tokenizer, load_tokenizer
from apcbatch.errors import ModelError, RequestError
from tests.conftest import ROOT
from tests.data.conftest import CORPUS, STABLE_TEMPLATE, build_tokenizer, completion, conversation, save_model
from tests.data.family_tokenizers import FAMILY_TOKENIZERS, save_family_tokenizer
from tests.effort import table

BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def refused(tokenizer: Tokenizer, text: str, reason: str) -> None:
    """The text is an error record of its request, and no other try would give another result."""
    with pytest.raises(RequestError, match=f"the tokenizer cannot take a text: {reason}") as caught:
        tokenizer.encode(text)
    assert caught.value.code == "invalid_request" and not caught.value.retryable


def test_a_text_that_the_library_panics_at_fails_alone(tmp_path: Path) -> None:
    """Fault: a pattern that ends the run, since the library's panic is no Exception."""
    path = save_model(tmp_path, build_tokenizer("chatml")) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": BACKTRACKS}))
    tokenizer = load_tokenizer(tmp_path)
    for length in (1, 100_000):  # the second text is tokenised in a thread
        refused(tokenizer, "a" * 40 + "!" * length, ".*retry-limit-in-match")
    assert tokenizer.decode(tokenizer.encode("hi").ids) == "hi"


@table("name, fails", [("PanicException", True), ("Exception", True), ("KeyError", False)])
def test_which_faults_are_the_requests(name: str, fails: bool) -> None:
    """Fault: a panic while tokens are decoded ends the run, or an error of ours is taken for the request's."""
    kinds = {
        "PanicException": type("PanicException", (BaseException,), {}),
        "Exception": Exception,
        "KeyError": KeyError,
    }

    def fault(*args: object, **kwargs: object) -> None:
        raise kinds[name]("no entry found\nat line 5")

    backend = SimpleNamespace(get_added_tokens_decoder=dict, encode=fault, decode=fault)
    source: Any = SimpleNamespace(backend_tokenizer=backend)
    tokenizer = Tokenizer(source, 5)
    for call in (lambda: tokenizer.encode("x"), lambda: tokenizer.decode([4])):
        with pytest.raises(RequestError if fails else KeyError, match="no entry found"):
            call()


@table("model", [models.Unigram([("a", -1.0)], unk_id=None), models.WordLevel({"a": 0}, "<unk>")])
def test_a_text_beyond_the_vocabulary_fails_alone(model: Any, tmp_path: Path) -> None:
    """Fault: for a model without an unknown token, an unknown character is an internal error of the run."""
    tokenizer = load_tokenizer(save_model(tmp_path, Backend(model)))
    refused(tokenizer, "b", ".*(unk_id|UNK)")
    assert tokenizer.encode("a").ids == [0]


@table("characters, is_read", [(100, True), (101, False)])
def test_long_words_of_wordpiece_are_refused(characters: int, is_read: bool, tmp_path: Path) -> None:
    """Fault: a word of a million characters takes hours, as WordPiece's time grows with the square of its length."""
    model = models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]", max_input_chars_per_word=characters)
    folder = save_model(tmp_path, Backend(model))
    if is_read:
        assert load_tokenizer(folder).vocab_size == 2
    else:
        with pytest.raises(ModelError, match="its max_input_chars_per_word is 101; at most 100 is supported"):
            load_tokenizer(folder)


def test_dropout_is_set_to_0(tmp_path: Path) -> None:
    """Fault: a text has other tokens each time, so that prefixes are not found again and answers differ."""
    made = build_tokenizer("chatml")
    made.model.dropout = 0.5  # type: ignore[attr-defined]
    warnings: list[str] = []
    renderer = Renderer.load(save_model(tmp_path, made, STABLE_TEMPLATE), warn=warnings.append)
    assert sum("has a dropout of 0.5; it is set to 0" in one for one in warnings) == 1
    assert len({tuple(renderer.tokenizer.encode(CORPUS[1]).ids) for _ in range(20)}) == 1


def test_a_text_that_no_request_can_hold_is_not_tokenised() -> None:
    """Fault: a text of millions of characters is tokenised for a request of few tokens; one that fits is refused."""
    tokenised: list[str] = []
    backend = SimpleNamespace(get_added_tokens_decoder=dict, encode=lambda text, **_: tokenised.append(text))
    source: Any = SimpleNamespace(backend_tokenizer=backend)
    tokenizer = Tokenizer(source, 5)
    tokenizer.max_tokens = 3
    tokenizer.encode("x" * 1536)
    for encode in (tokenizer.encode, tokenizer.encode_prompt, tokenizer.encode_continuation):
        with pytest.raises(RequestError, match="holds 1,53[78] characters; at most 1,536 are tokenised") as caught:
            encode("x" * 1537)
        assert caught.value.code == "context_length_exceeded"
    assert tokenised == ["x" * 1536]
    page = (ROOT / "docs" / "security.md").read_text()
    assert f"{TOKEN_CHARACTERS} characters a token" in page and f"files of up to {MAX_FILE_BYTES >> 20} MiB" in page


def test_the_limit_of_a_text_is_that_of_its_request(model_dir: Callable[..., Path]) -> None:
    """Fault: the limit of a run's requests does not reach the texts of conversations and completions."""
    renderer = Renderer.load(model_dir("chatml", STABLE_TEMPLATE), options=ChatOptions(max_tokens=2))
    rendered = renderer.render(conversation("user: a", "assistant: b", f"user: {'x' * 1024}"))
    assert [failure.error.code for failure in rendered.failures] == ["context_length_exceeded"]
    assert len(rendered.prompts) == 1
    with pytest.raises(RequestError, match="holds 1,025 characters; at most 1,024 are tokenised"):
        renderer.render(completion("x" * 1025))


@pytest.mark.parametrize(("normalizer", "text"), [
    (None, "🦔" * 600_000),  # of four bytes, and as many tokens
    (normalizers.NFKC(), "ﷺ" * 70_000),  # of three bytes, which become 33
])  # fmt: skip
def test_a_text_of_many_tokens_is_not_tokenised_as_a_whole(normalizer: Any, text: str, tmp_path: Path) -> None:
    """Fault: gigabytes for the tokens of a line that no request can hold."""
    backend = build_tokenizer("gpt2")
    backend.normalizer = normalizer
    tokenizer = load_tokenizer(save_model(tmp_path, backend))
    tokenizer.max_tokens = 10_000
    with pytest.raises(RequestError, match="holds more than 10,000 tokens, which a request may have") as caught:
        tokenizer.encode(text)
    assert caught.value.code == "context_length_exceeded"


def places(encoding: Encoding) -> tuple[object, ...]:
    return encoding.ids, encoding.offsets, [encoding.char_to_token(place) for place in range(0, 70_000, 997)]


@pytest.mark.drawn(5)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_TOKENIZERS)
def test_a_long_text_has_the_tokens_of_the_library(family: str, tmp_path: Path) -> None:
    """Fault: a text that is tokenised beside the run has other tokens, or places in the text, than a short one."""
    tokenizer = load_tokenizer(save_family_tokenizer(tmp_path, family))
    text = "".join(CORPUS) * 150
    for adds_special in (False, True):
        expected = tokenizer.source.backend_tokenizer.encode(text, add_special_tokens=adds_special)
        assert places(tokenizer.encode(text, adds_special)) == places(expected)


def test_signals_are_handled_while_a_long_text_is_tokenised(model_dir: Callable[..., Path]) -> None:
    """Fault: Ctrl-C waits for seconds, and other threads stand, while the library holds the interpreter's lock."""
    tokenizer, before = load_tokenizer(model_dir("llama3")), threading.active_count()
    at_signal: list[int] = []
    earlier = signal.signal(signal.SIGALRM, lambda *_: at_signal.append(threading.active_count()))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        tokenizer.encode(CORPUS[1] * 3000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    assert sum(number > before for number in at_signal) > 8, "signals wait until the text is tokenised"

    def stop() -> None:
        raise KeyboardInterrupt

    tokenizer.check_stop = stop
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode(CORPUS[1] * 10_000)


@table("name", ["notes.json", "words.txt", "old.jinja", "other.model", "vocab.txt", "merges.txt"])
@table("kind", ["pipe", "folder", "dangling", "device", "large"])
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


NEEDED = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json",
          "chat_template.jinja", "additional_chat_templates/x.jinja")  # fmt: skip


@table("kind", ["pipe", "folder", "dangling", "device", "large"])
def test_what_the_tokenizer_needs_must_be_a_file(tmp_path: Path, kind: str) -> None:
    """Catches a run that waits for the tokenizer's file without end, or reads it without end."""
    folder = save_model(tmp_path, build_tokenizer("chatml"))
    for name in NEEDED:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        odd_neighbour(path, kind)
        with pytest.raises(ModelError, match=f"{name} (cannot be read|holds 67,108,865 bytes)"):
            load_tokenizer(folder)
        path.rmdir() if kind == "folder" else path.unlink()
        if kept is not None:
            path.write_bytes(kept)
