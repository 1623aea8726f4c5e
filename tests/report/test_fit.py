"""The page of many requests stays small, and says what it left out."""

from __future__ import annotations

import copy
import random
import uuid

import pytest

from apcbatch.report.fit import (
    FRAME_BYTES,
    ID_LENGTHS,
    LENGTHS,
    PAGE_BYTES,
    REQUESTS_OF_A_PAGE,
    _packed_bytes,
    _shorten_all,
    _two_digits,
    fit,
)
from apcbatch.report.page import page
from apcbatch.report.texts import (
    MOST_CHARACTERS,
    Texts,
    _length,
    cut_columns,
    shortened,
    shortened_calls,
    shortened_middle,
)
from tests.effort import tries
from tests.report.documents import document
from tests.report.runs import HOSTILE, text

COUNTS = ("line", "turn", "prompt", "cached", "ideal", "computed", "out", "from", "reason", "finish", "error")


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("ids", ["short", "uuid"])
def test_fifty_thousand_requests_fit_two_megabytes(ids: str) -> None:
    """Fault: a page too large to be opened or sent. Random ids weigh more than all other columns."""
    requests = min(REQUESTS_OF_A_PAGE, tries(REQUESTS_OF_A_PAGE))
    page_bytes = FRAME_BYTES + (PAGE_BYTES - FRAME_BYTES) * requests // REQUESTS_OF_A_PAGE  # as many for each request
    draw, is_full = random.Random(seed := random.randrange(1 << 30)), requests == REQUESTS_OF_A_PAGE
    made = document(requests, seed, runs=1, prompts=False, hostile=False, entries=is_full, tree=is_full)
    table = made["runs"][0]["requests"]
    table["answer"] = [text(draw, 60, False) + f" {draw.random()}" for _ in table["id"]]  # some hundred random words
    table["answer_characters"] = None
    if ids == "uuid":
        table["id"] = [str(uuid.UUID(int=draw.getrandbits(128))) for _ in table["id"]]
    before = copy.deepcopy({name: table[name] for name in COUNTS})
    fitted = fit(made, page_bytes)
    assert len(page(fitted, "large")) < page_bytes
    new, notes = fitted["runs"][0]["requests"], fitted["runs"][0]["notes"][len(made["runs"][0]["notes"]) :]
    assert {name: new[name] for name in COUNTS} == before
    limit = new["answer_characters"]
    assert limit is not None and new["answer"] == [shortened(answer, limit) for answer in table["answer"]]
    if ids == "short":
        assert limit > 0 and new["id"] == table["id"] and not notes
        longer = LENGTHS[LENGTHS.index(limit) + 1]
        grown = new | {"answer": [shortened(answer, longer) for answer in table["answer"]]}
        larger = made | {"runs": [made["runs"][0] | {"requests": grown}]}
        assert len(page(larger, "larger")) > 0.9 * page_bytes, "there was room for more"
    else:
        assert len(set(new["id"])) == requests and len(notes) >= 1
        assert all(old.startswith(short.rstrip("\u2026")) for old, short in zip(table["id"], new["id"], strict=True))


def test_what_fits_is_not_touched() -> None:
    """Fault: answers are cut though there is room for them."""
    made = document(60, random.randrange(1 << 30))
    before = copy.deepcopy(made)
    assert fit(made) == before


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("page_bytes", [190_000, 260_000])
def test_any_bound_holds(page_bytes: int) -> None:
    """Fault: prompts, calls or errors are not cut where answers are, so that the page is still too large."""
    made = document(max(100, tries(300)), random.randrange(1 << 30), runs=3, entries=False, tree=False)
    draw = random.Random(random.randrange(1 << 30))
    for run in made["runs"]:
        table = run["requests"]
        table["answer"] = ["".join(map(chr, draw.choices(range(33, 0x3000), k=400))) for _ in table["id"]]
        table["calls"] = [[{"name": "tool", "arguments": f"{draw.getrandbits(4000):x}"}] for _ in table["id"]]
        table["errors"] = ["", *(f"internal: {draw.getrandbits(4000):x}" for _ in range(30))]
    fitted = fit(made, page_bytes)
    assert len(page(fitted, "")) < page_bytes
    lengths = {run["requests"]["answer_characters"] for run in fitted["runs"]}
    assert len(lengths) == 1 and lengths < {*LENGTHS}


def test_texts_are_held_within_a_bound() -> None:
    """Fault: a run of long answers fills the memory before anything is cut."""
    draw, texts, whole = random.Random(random.randrange(1 << 30)), Texts(most_held=10_000), []
    for _ in range(2_000):
        answer = draw.choice(HOSTILE) + "x" * draw.randrange(400)
        calls = [{"name": "f", "arguments": "y" * draw.randrange(200)}] if draw.random() < 0.3 else None
        whole.append((answer, calls))
        texts.add(answer, calls)
        if draw.random() < 0.1:
            number = texts.error(f"internal: {answer}")
            assert texts.errors[number][:3] in ("", "int"[: len(texts.errors[number])], "i\u2026", "in\u2026", "\u2026")
    limit = texts.characters
    assert limit is not None and 1 <= limit < 400
    held = sum(map(len, texts.answers)) + sum(map(_length, texts.calls)) + sum(map(len, texts.errors))
    assert held <= 10_000 or limit == 1
    for (answer, calls), kept, kept_calls in zip(whole, texts.answers, texts.calls, strict=True):
        assert len(kept) <= limit and (kept == answer or answer.startswith(kept[:-1]))
        assert (kept_calls is None) == (calls is None)


def test_whole_texts_are_not_said_to_be_cut() -> None:
    """Fault: a page says that its texts were cut and they are whole, or the other way round."""
    for length, characters in ((MOST_CHARACTERS, None), (MOST_CHARACTERS + 1, MOST_CHARACTERS)):
        for answer, calls in (("x" * length, None), ("", [{"name": "f", "arguments": "x" * length}])):
            texts = Texts()
            texts.add(answer, calls)
            assert texts.characters == characters
    texts = Texts(most_held=MOST_CHARACTERS)
    assert [texts.error(sentence) for sentence in ("a", "b", "a", "")] == [1, 2, 1, 0] and texts.errors == [
        "",
        "a",
        "b",
    ]
    texts.add("x" * (MOST_CHARACTERS - 2), None)
    assert texts.characters is None
    texts.error("c")
    assert texts.characters == MOST_CHARACTERS // 2 == len(texts.answers[0])


def test_times_have_two_digits() -> None:
    """Fault: a rounded time is another one."""
    for value, rounded in (
        (0, 0), (7, 7), (99, 99), (100, 100), (104, 100), (105, 110), (12_499, 12_000), (12_500, 13_000),
    ):  # fmt: skip
        assert _two_digits(value) == rounded


def test_ids_are_cut_no_more_than_the_room_asks() -> None:
    """Fault: ids are cut though they fit, or to the shortest length where a longer one fits."""
    made, draw = document(60, random.randrange(1 << 30), runs=1, entries=False, tree=False), random.Random(3)
    made["runs"][0]["requests"]["id"] = [str(uuid.UUID(int=draw.getrandbits(128))) for _ in range(60)]
    whole = _shorten_all(made, PAGE_BYTES)
    assert not any(whole["runs"][0]["requests"]["answer"]), "no text is left"
    assert whole["runs"][0]["requests"]["id"] == made["runs"][0]["requests"]["id"]
    room = _packed_bytes([whole], PAGE_BYTES)
    assert room is not None and _shorten_all(made, room) == whole
    cut = _shorten_all(made, room - 1)["runs"][0]["requests"]["id"]
    assert {len(name) for name in cut} == {ID_LENGTHS[0]}
    cut = _shorten_all(made, 1)["runs"][0]["requests"]["id"]
    assert {len(name) for name in cut} == {ID_LENGTHS[-1]}, "to the shortest, even if that is too long"
    made["runs"][0]["requests"]["id"] = alike = ["x" * 15 + name for name in cut]
    assert _shorten_all(made, 1)["runs"][0]["requests"]["id"] == alike, "of 16 characters they would be equal"


def test_shortening_shows_itself() -> None:
    """Fault: a text that was cut looks whole, or a whole one looks cut."""
    assert shortened("abcdef", 6) == "abcdef" and shortened("abcdef", 4) == "abc\u2026" and shortened("abc", 0) == ""
    assert shortened_middle("0123456789" * 10, 20) == "01234" + "\u2026" + "67890123456789"[-14:]
    for limit in range(12):
        cut = shortened_middle("abcdefghijkl", limit)
        assert len(cut) == limit
    calls = [{"name": "find", "arguments": "x" * 30}, {"name": "more", "arguments": "{}"}]
    assert (
        shortened_calls(calls, 1000) == calls and shortened_calls(calls, 0) == [] and shortened_calls(None, 0) is None
    )
    assert shortened_calls(calls, 10) == [{"name": "find", "arguments": "x" * 9 + "\u2026"}]


def test_prompts_are_cut_as_answers_are() -> None:
    """Fault: a page that stays large because of its prompts, or a request without one that gets another's."""
    table = document(40, random.randrange(1 << 30), runs=1)["runs"][0]["requests"]
    table["prompt_text"] = [None, "x" * 50, [["user", "y" * 50], ["tool", "z" * 50]]] + [None] * (len(table["id"]) - 3)
    cut = cut_columns(table, 8)
    none, text, messages, *_ = cut["prompt_text"]
    assert none is None and len(text) == 8 and sum(len(said) for _, said in messages) <= 9
    assert all(len(answer) <= 8 for answer in cut["answer"]) and cut["answer_characters"] == 8
    assert cut_columns(table | {"prompt_text": None}, 8)["prompt_text"] is None
    assert cut_columns(cut, 100)["answer_characters"] == 8


def test_calls_are_cut_from_the_last_one_on() -> None:
    """Fault: a call is left out that has room, or one too many is kept."""
    calls = [{"name": "f", "arguments": "abc"}] * 3
    for limit, kept in ((41, 3), (40, 2), (21, 2), (20, 1), (1, 1), (0, 0)):
        assert len(shortened_calls(calls, limit) or ()) == kept, limit
    assert shortened_calls(calls, 22) == [calls[0], {"name": "f", "arguments": "a\u2026"}]
