"""Shared tokens are those of tokenising the text alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apcbatch.data.chat.common_prefix import BaseText, BaseTexts, common_length
from apcbatch.data.tokenization.tokenizer import Tokenizer, load_tokenizer
from apcbatch.errors import RequestError
from tests.data.conftest import CORPUS, KINDS
from tests.effort import table, tries

# Pieces that meet at joints: words, blanks, line ends, contractions, digits, wide characters, markers.
PIECES = [
    *(word for line in CORPUS for word in line.split(" ")),
    *(" ", "  ", "\n", "\n\n", " \n", "\t", "'", "'l", "l", "'ll", "12", "345", "6"),
    *("é", "e", "\u0301", "東", "🙂", "▁"),
    *("<|im_start|>", "<|im_end|>", "<|im_end", "|>", "<|endoftext|>", "</s>", "<unk>", "<0x0A>"),
]
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=60).map("".join)
LONG = st.tuples(TEXT, st.sampled_from([*CORPUS, ""]), st.sampled_from([*CORPUS, ""]), TEXT).map(" ".join)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, model_dir: Callable[..., Path]) -> Tokenizer:
    """A tokenizer of each kind."""
    return load_tokenizer(model_dir(request.param))


@pytest.mark.slow
@settings(max_examples=tries(250), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(beginning=LONG, ending=TEXT, other=TEXT)
def test_a_beginning_has_the_tokens_it_has_alone(tokenizer: Tokenizer, beginning: str, ending: str, other: str) -> None:
    """A cut at a token boundary is not enough: `a  ` before `b` ends in one token alone, in two here."""
    base = BaseText(tokenizer, beginning + ending)
    for text in (beginning, beginning + other, beginning + ending):
        shared = base.tokenise(text, common_length(text, base.text))
        assert shared.dtype == np.int32
        assert shared.tolist() == tokenizer.encode(text).ids
    bases = BaseTexts(tokenizer)
    for text in (beginning + ending, beginning + other, beginning + ending + other):
        assert bases.make(text).token_ids.tolist() == tokenizer.encode(text).ids


def encoded_characters(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are encoded from now on."""
    lengths: list[int] = []
    encode = tokenizer.encode

    def count(text: str) -> object:
        lengths.append(len(text))
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", count)
    return lengths


@table("kind", KINDS)
def test_a_long_text_is_tokenised_once(
    kind: str, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joints that are never found are right too, and cost the square of the conversation."""
    tokenizer = load_tokenizer(model_dir(kind))
    turns = [f"<|im_start|>user\n{line * 4}<|im_end|>\n<|im_start|>assistant\n" for line in CORPUS[:5] * 4]
    text = "".join(turns)
    base = BaseText(tokenizer, text)
    lengths = encoded_characters(tokenizer, monkeypatch)
    for count in range(1, len(turns)):
        prompt = "".join(turns[:count])
        shared = base.tokenise(prompt, len(prompt))
        assert np.shares_memory(shared, base.token_ids)
    assert max(lengths) < 700 and sum(lengths) < len(text)


@table("kind", KINDS)
def test_conversations_that_begin_alike_share_their_tokens(
    kind: str, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a system prompt that is tokenised for each conversation, tokens taken over beyond where two conversations
    part, and turns that are cut at places of the other conversation's text."""
    tokenizer = load_tokenizer(model_dir(kind))
    system = f"<|im_start|>system\n{''.join(CORPUS[1:5])}<|im_end|>\n<|im_start|>user\n"
    bases = BaseTexts(tokenizer)
    assert bases.make(system + CORPUS[1] * 9).is_whole
    for number, line in enumerate(CORPUS * 2):
        text = f"{system}{line[: 10 * number]}{number} {line}<|im_end|>\n<|im_start|>assistant\n"
        lengths = encoded_characters(tokenizer, monkeypatch)
        base = bases.make(text)
        assert not base.is_whole and sum(lengths) < len(text)
        assert base.token_ids.tolist() == tokenizer.encode(text).ids
        for cut in range(len(system) - 40, len(text), 7):
            lengths.clear()
            beginning = base.tokenise(text[:cut], cut).tolist()
            encoded = sum(lengths)
            assert beginning == tokenizer.encode(text[:cut]).ids
        assert encoded < (30 if kind == "chatml" else cut / 2), "it is joined behind the first joint"


def test_a_known_beginning_does_not_lift_the_limit(model_dir: Callable[..., Path]) -> None:
    """Catches a text that is longer than a request may be, and is tokenised since its last part is short."""
    tokenizer = load_tokenizer(model_dir("chatml"))
    tokenizer.max_tokens = 2
    bases, text = BaseTexts(tokenizer), "<|im_start|>" + "flight " * 140
    bases.make(text)
    with pytest.raises(RequestError, match="characters") as refused:
        bases.make(text + "reservations " * 10)
    assert refused.value.code == "context_length_exceeded"


@given(TEXT, TEXT, TEXT)
def test_common_length_of_any_texts(beginning: str, one: str, other: str) -> None:
    """Against the plain loop."""
    one, other = beginning + one, beginning + other
    plain = next(
        (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    assert common_length(one, other) == plain


def test_only_what_follows_the_last_marker_is_tokenised_again(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches markers that are never cut at: the tokens are the same, but some hundred characters more are encoded."""
    tokenizer = load_tokenizer(model_dir("chatml"))
    text = "<|im_start|>" + "flight reservations " * 100 + "<|im_end|><|im_start|>user"
    base = BaseText(tokenizer, text)
    lengths = encoded_characters(tokenizer, monkeypatch)
    for other, ending in ((text[:-2], "<|im_start|>us"), (text + " 1", "<|im_start|>user 1")):
        assert base.tokenise(other, common_length(other, text)).tolist() == tokenizer.encode(other).ids
        assert lengths == [len(ending), len(other)]
        lengths.clear()


@table("size", [2, 3, 5, 7])
def test_a_tokenizer_that_counts_from_the_beginning_is_followed(size: int) -> None:
    """Catches tokens that are taken over although the text is cut elsewhere where it is tokenised from its middle."""

    def encode(text: str) -> Any:
        spans = [(begin, min(begin + size, len(text))) for begin in range(0, len(text), size)]
        return SimpleNamespace(
            ids=[hash(text[begin:end]) % 10**9 for begin, end in spans],
            char_to_token=lambda place: place // size if 0 <= place < len(text) else None,
            token_to_chars=spans.__getitem__,
        )

    tokenizer: Any = SimpleNamespace(encode=encode, markers=None)
    words = "".join("abcdefg"[: 1 + number * number % 6] + " " for number in range(60))
    for length in range(100, len(words)):
        base = BaseText(tokenizer, words[:length] + "x" * 40)
        for text in (words[:length] + "y" * 40, words[:length]):
            assert base.tokenise(text, length).tolist() == encode(text).ids
