"""Render the conversations that come next in threads, each with helper processes of its own.

Without them a run's own thread spends 45 % of its time on waiting for the chat template, where prompts are short and a
GPU or a cluster computes. Invariants: texts and their order are those without threads; a thread goes on while less than
MOST_HELD characters of its conversation have not been taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

from apcbatch.data.chat.render import Renderer, Texts
from apcbatch.data.input.records import BadLine, Conversation
from apcbatch.errors import RequestError
from apcbatch.formats import Turns

AFTER = 256  # records that are read before threads begin: two processes start in the time of as many short prompts
NUM_THREADS = 2
MOST_AHEAD = 16  # records
MOST_HELD = 1 << 22  # characters of one conversation


class TextsAhead:
    """Queue of the texts of one conversation, which one thread renders (`fill`) and another takes. make: renders
    them."""

    def __init__(self, make: Callable[[], Texts]) -> None:
        self._make = make
        self._changed = threading.Condition()
        self._ready: deque[str | RequestError] = deque()
        self._num_held = 0  # characters
        self._is_done = self._is_closed = False
        self._failure: BaseException | None = None

    def fill(self) -> None:
        """Render the texts until the last one or `close`; wait for room."""
        try:
            for text in self._make():
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or self._num_held < MOST_HELD)
                    if self._is_closed:
                        return
                    self._ready.append(text)
                    self._num_held += len(text) if isinstance(text, str) else 0
                    self._changed.notify_all()
        except BaseException as failure:
            self._failure = failure
        finally:
            with self._changed:
                self._is_done = True
                self._changed.notify_all()

    def take(self) -> Texts:
        """Yield the texts in order; wait for each. Raises what `make` raised."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._is_done)
                if not self._ready:
                    break
                text = self._ready.popleft()
                self._num_held -= len(text) if isinstance(text, str) else 0
                self._changed.notify_all()
            yield text
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Drop the texts that are left, and end `fill`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def render_ahead(
    records: Iterable[Conversation | BadLine], renderer: Renderer, turns: Turns
) -> Iterator[Conversation | BadLine]:
    """Yield the records in order, and render up to MOST_AHEAD later ones meanwhile, after the first AFTER of them.
    `renderer.render` takes the texts."""
    source = iter(records)
    for _, record in zip(range(AFTER), source, strict=False):
        yield record
    work: SimpleQueue[TextsAhead | None] = SimpleQueue()
    ahead: deque[tuple[Conversation | BadLine, TextsAhead | None]] = deque()
    threads: list[threading.Thread] = []
    try:
        for record in source:
            texts = None
            if isinstance(record, Conversation) and (make := renderer.texts_of(record, turns)) is not None:
                texts = TextsAhead(make)
                work.put(texts)
                while len(threads) < NUM_THREADS:
                    threads.append(threading.Thread(target=_fill_all, args=(work,), daemon=True))
                    threads[-1].start()
            ahead.append((record, texts))
            if len(ahead) > MOST_AHEAD:
                yield from _hand_out(*ahead.popleft(), renderer)
        while ahead:
            yield from _hand_out(*ahead.popleft(), renderer)
    finally:
        for _, texts in ahead:
            if texts is not None:
                texts.close()
        for _ in threads:
            work.put(None)


def _hand_out(
    record: Conversation | BadLine, texts: TextsAhead | None, renderer: Renderer
) -> Iterator[Conversation | BadLine]:
    """Yield the record, and give its texts to `renderer.render` until the next record is asked for."""
    renderer.texts_ahead = None if texts is None else (record, texts.take())
    try:
        yield record
    finally:
        renderer.texts_ahead = None
        if texts is not None:
            texts.close()


def _fill_all(work: SimpleQueue[TextsAhead | None]) -> None:
    while (texts := work.get()) is not None:
        texts.fill()
