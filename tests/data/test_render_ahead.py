"""Texts that threads make ahead: the prompts, failures and order of rendering one conversation after the other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from apcbatch.data.chat import render_ahead as module
from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.render_ahead import MOST_AHEAD, NUM_THREADS, TextsAhead, render_ahead
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.errors import RequestError
from tests.effort import tries

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('not that') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def rendered(records: Iterator[Conversation | BadLine], renderer: Renderer, skipped: set[int]) -> list[Any]:
    """What each record becomes; those of some lines are not rendered."""
    found: list[Any] = []
    for record in records:
        if isinstance(record, BadLine) or record.line in skipped:
            found.append(record.line)
            continue
        try:
            made = renderer.render(record, "each")
        except RequestError as error:
            found.append((record.line, str(error)))
            continue
        prompts = [(prompt.turn, prompt.token_ids.tolist(), prompt.num_messages) for prompt in made.prompts]
        found.append((record.line, prompts, [(one.turn, str(one.error)) for one in made.failures]))
    return found


def test_texts_made_ahead_are_those_made_in_turn(
    make_renderer: Callable[..., Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a conversation gets the texts of another one or in another order, one is lost where records are skipped,
    or a thread waits for ever for room."""
    renderer = make_renderer("chatml", TEMPLATE)
    before = threading.active_count()
    for _ in range(tries(12)):
        draw = random.Random(random.randrange(10**9))
        monkeypatch.setattr(module, "AFTER", draw.choice([0, 1, 7, 50]))
        monkeypatch.setattr(module, "MOST_HELD", draw.choice([1, 100, 1 << 22]))
        records: list[Conversation | BadLine] = []
        for line in range(1, draw.randint(1, 60)):
            kind = draw.randrange(8)
            if kind == 0:
                records.append(BadLine(line, RequestError("invalid_json", "no", line)))
                continue
            messages: list[Any] = []
            for turn in range(draw.randint(1, 4)):
                content = draw.choice(["Hello", "bad", "long " * draw.randint(1, 200), f"turn {turn}"])
                messages += [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]
            found = Conversation(f"c-{line}", line, messages, None, "messages")
            if kind == 1:
                found.prompt = "a completion"
            records.append(found)
        skipped = {record.line for record in records if draw.random() < 0.2}
        expected = rendered(iter(records), renderer, skipped)
        ahead = render_ahead(records, renderer, "each")
        if draw.random() < 0.3:  # the run is stopped
            few = draw.randrange(len(records) + 1)
            parts = [record for _, record in zip(range(few), ahead, strict=False)]
            assert parts == records[:few]
            del ahead
        else:
            assert rendered(ahead, renderer, skipped) == expected
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before, "no thread is left behind"


def test_no_more_is_read_than_is_said(make_renderer: Callable[..., Renderer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a whole input is read before its first answer."""
    monkeypatch.setattr(module, "AFTER", 3)
    read: list[int] = []

    def records() -> Iterator[Conversation]:
        for line in range(1, 100):
            read.append(line)
            yield Conversation(f"c-{line}", line, [{"role": "user", "content": "Hello"}], None, "messages")

    ahead = render_ahead(records(), make_renderer(), "each")
    for number in range(1, 40):
        next(ahead)
        assert len(read) <= number + (MOST_AHEAD if number > 3 else 0)


def test_a_fault_of_a_thread_is_raised_where_its_texts_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an exception in a thread makes a conversation of fewer turns, or one that is waited for for ever; a turn
    that has no text takes room that is never given back."""
    monkeypatch.setattr(module, "MOST_HELD", 1)
    failure = RequestError("invalid_request", "no")

    def make() -> Iterator[str | RequestError]:
        yield failure
        yield "one"
        raise ZeroDivisionError

    texts = TextsAhead(make)
    thread = threading.Thread(target=texts.fill, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "there is room for a text"
    taken = texts.take()
    assert next(taken) is failure and next(taken) == "one" and NUM_THREADS == 2
    with pytest.raises(ZeroDivisionError):
        next(taken)
