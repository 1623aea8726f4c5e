"""The text of an answer as its tokens come, and the texts that end it, with tokenizers of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.data.output.stop_texts import NOT_A_CHARACTER, StopTexts, TextStream, cut_answer
from apcbatch.data.tokenization.tokenizer import Tokenizer, load_tokenizer
from tests.data.conftest import CORPUS, KINDS, kept_by_transformers
from tests.effort import tries

TEXT = "It's 東京: naïve café, 🙂🙃! Привет,\n\n  def add(a, b)\n\treturn 1250 <b>x</b>\n\n"


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, model_dir: Callable[..., Path]) -> Tokenizer:
    """A tokenizer of each kind."""
    return load_tokenizer(model_dir(request.param))


def ending(tokenizer: Tokenizer, ids: list[int], stops: list[str], min_tokens: int = 0) -> tuple[int, str] | None:
    """(tokens until the end, the stop text), or None if no stop text comes."""
    watch = StopTexts(tokenizer, stops)
    for count, token in enumerate(ids, start=1):
        found = watch.accept(token, count > min_tokens)
        if found is not None:
            return count, found
    return None


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of the tokens without a character that is not whole yet."""
    return tokenizer.decode(ids).rstrip(NOT_A_CHARACTER)


def tokens_of(tokenizer: Tokenizer, source: random.Random, count: int) -> list[int]:
    """Random tokens. Those of single bytes in a tokenizer that falls back to them are left out: there a byte that is no
    text makes all bytes beside it U+FFFD, those before it too."""
    names = kept_by_transformers(tokenizer.source.name_or_path).convert_ids_to_tokens(range(tokenizer.vocab_size))
    known = [number for number, name in enumerate(names) if name is not None and not name.startswith("<0x")]
    return source.choices(known, k=count)


def test_pieces_are_the_text(tokenizer: Tokenizer) -> None:
    """Fault: a space that is lost or doubled between pieces, a character whose parts come one by one shown as U+FFFD, a
    special token in the text. Random tokens are not UTF-8 for the most part."""
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
    ids = [tokenizer.encode(text).ids for text in (TEXT, *CORPUS)]
    ids += [tokens_of(tokenizer, source, source.randrange(1, 120)) for _ in range(tries(200))]
    for tokens in ids:
        stream = TextStream(tokenizer)
        text = "".join(map(stream.add, tokens))
        whole = tokenizer.decode(tokens)
        assert whole.startswith(text) and not whole[len(text) :].strip(NOT_A_CHARACTER), f"seed {seed}"


def test_a_stop_text_that_came_too_early_does_not_end_the_answer_later(tokenizer: Tokenizer) -> None:
    """Fault: an answer with min_tokens ends one token after them, by a stop text that did not count."""
    ids = tokenizer.encode("one two three four").ids
    count, _ = ending(tokenizer, ids, ["one"]) or (0, "")
    assert count and ending(tokenizer, ids, ["one", "x" * 40], min_tokens=count) is None


def test_a_text_is_found_at_every_split(tokenizer: Tokenizer) -> None:
    """Fault: a stop text that begins in one token and ends in another goes by, or is found a token late; the cut is at
    another place than its beginning (its end, if it is kept)."""
    ids = tokenizer.encode(TEXT).ids
    whole = tokenizer.decode(ids)
    source = random
    spans = [(begin, begin + length) for length in (1, 2, 3, 7, 20) for begin in range(len(whole) - length + 1)]
    for begin, end in source.sample(spans, min(tries(400), len(spans))):
        stop = whole[begin:end]
        count, found = ending(tokenizer, ids, [stop]) or (0, "")
        assert found == stop
        assert stop in shown(tokenizer, ids[:count]) and stop not in shown(tokenizer, ids[: count - 1])
        at = whole.index(stop)
        for keeps_stop, text in ((False, whole[:at]), (True, whole[: at + len(stop)])):
            cut = cut_answer(tokenizer.decode, ids[:count], stop, keeps_stop)
            assert cut.text == text
            decoded = [tokenizer.decode(ids[:n]) for n in range(count + 1)]
            assert cut.num_tokens == next(n for n in range(count + 1) if len(decoded[n]) >= len(text))
            assert cut.is_exact == (decoded[cut.num_tokens] == text)


def test_random_tokens_end_where_their_text_says(tokenizer: Tokenizer) -> None:
    """Fault: a text found that is not there, or later than it is there; of several not the first one to be complete."""
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
    for _ in range(tries(200)):
        ids = tokens_of(tokenizer, source, 40)
        whole = tokenizer.decode(ids).replace(NOT_A_CHARACTER, "") or "x"
        stops = []
        for _ in range(source.randrange(1, 4)):
            begin = source.randrange(len(whole))
            stops.append(whole[begin : begin + source.randrange(1, 5)])
        shown_texts = [shown(tokenizer, ids[:count]) for count in range(len(ids) + 1)]
        due = next((n for n, text in enumerate(shown_texts) if any(stop in text for stop in stops)), None)
        found = ending(tokenizer, ids, stops)
        assert (found and found[0]) == due, f"seed {seed}"
        if found:
            text = shown_texts[found[0]]
            end = text.index(found[1]) + len(found[1])
            assert end == min(text.index(stop) + len(stop) for stop in stops if stop in text), f"seed {seed}"
            assert cut_answer(tokenizer.decode, ids[: found[0]], found[1], True).text == text[:end], f"seed {seed}"


def test_what_comes_before_min_tokens_is_passed_over(tokenizer: Tokenizer) -> None:
    """Fault: an answer that ends too early, or one that is cut where it was passed over."""
    ids = tokenizer.encode("one, two, three, four").ids
    whole = tokenizer.decode(ids)
    first, _ = ending(tokenizer, ids, [","]) or (0, "")
    second, _ = ending(tokenizer, ids, [","], min_tokens=first) or (0, "")
    assert second > first and shown(tokenizer, ids[:second]).count(",") == 2
    text = cut_answer(tokenizer.decode, ids[:second], ",", False).text
    assert whole.startswith(text + ",") and text.count(",") == 1


def test_special_tokens_are_no_text(model_dir: Callable[..., Path]) -> None:
    """Fault: the name of a special token ends an answer that does not show it, or one in its middle hides a text."""
    tokenizer = load_tokenizer(model_dir("chatml"))
    marker = tokenizer.encode("<|im_start|>").ids
    assert len(marker) == 1
    ids = [*tokenizer.encode("ab").ids, *marker, *tokenizer.encode("cd").ids]
    assert ending(tokenizer, ids, ["im_start", "|>"]) is None
    assert ending(tokenizer, ids, ["bc"]) is not None


def test_a_character_is_waited_for_so_long() -> None:
    """Fault: bytes that never become a character are held for ever, or ones that do are given up."""
    source: Any = SimpleNamespace(is_dropped=lambda token: False, decode=lambda ids: NOT_A_CHARACTER * len(ids))
    stream = TextStream(source)
    assert [stream.add(1) for _ in range(33)] == [""] * 32 + [NOT_A_CHARACTER * 33]


def test_a_token_is_decoded_with_few_others(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the work of a token grows with the answer, for bytes that never become a character too."""
    lengths: list[int] = []
    decode = Tokenizer.decode

    def note(self: Tokenizer, token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return decode(self, token_ids)

    no_start = [n for n in range(tokenizer.vocab_size) if decode(tokenizer, [n]) == NOT_A_CHARACTER][:1]
    ids = tokenizer.encode(TEXT).ids * 20 + (no_start or tokenizer.encode(" ").ids) * 400
    monkeypatch.setattr(Tokenizer, "decode", note)
    watch = StopTexts(tokenizer, ["never there", "neither"])
    assert all(watch.accept(token, True) is None for token in ids)
    assert max(lengths) <= 128 and len(watch._kept) < len("never there")


def test_a_stop_token_has_no_text(model_dir: Callable[..., Path]) -> None:
    """Fault: the text of a token of stop_token_ids stays, or goes though it is to be kept; the last token of an answer
    that ended otherwise goes."""
    tokenizer = load_tokenizer(model_dir("gpt2"))
    ids = tokenizer.encode("one two").ids
    assert cut_answer(tokenizer.decode, ids, ids[-1], False).text == tokenizer.decode(ids[:-1])
    assert cut_answer(tokenizer.decode, ids, ids[-1], False).num_tokens == len(ids) - 1
    for reason, keeps_stop in ((ids[-1], True), (None, False), (None, True)):
        cut = cut_answer(tokenizer.decode, ids, reason, keeps_stop)
        assert (cut.text, cut.num_tokens, cut.is_exact) == (tokenizer.decode(ids), len(ids), True)
