"""Render the texts of the conversations that come next in threads, each with helper processes of its own.

A run's own thread otherwise waits for the chat template of one conversation after the other, 45 % of its time where
prompts are short and a GPU or a cluster computes. Invariant: texts and their order are those without threads; a thread
holds at most MOST_HELD characters that nobody has taken.
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
    """The texts of one conversation, made by one thread (`fill`) and taken by another, in order. make: makes them."""

    def __init__(self, make: Callable[[], Texts]) -> None:
        self._make = make
        self._changed = threading.Condition()
        self._ready: deque[str | RequestError] = deque()
        self._num_held = 0  # characters
        self._is_done = self._is_closed = False
        self._failure: BaseException | None = None

    def fill(self) -> None:
        """Make the texts, as far as there is room, until the last one or `close`."""
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
        """Yield the texts; wait for each. What ended the making is raised in its place."""
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
        """Let the thread go on without the texts that are left."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def render_ahead(
    records: Iterable[Conversation | BadLine], renderer: Renderer, turns: Turns
) -> Iterator[Conversation | BadLine]:
    """Yield the records. After the first AFTER of them, up to MOST_AHEAD later ones are read and their texts begun;
    `renderer.render` takes them."""
    source = iter(records)
    for _, record in zip(range(AFTER), source, strict=False):
        yield record
    work: SimpleQueue[TextsAhead | None] = SimpleQueue()
    ahead: deque[tuple[Conversation | BadLine, TextsAhead | None]] = deque()
    threads = [threading.Thread(target=_fill_all, args=(work,), daemon=True) for _ in range(NUM_THREADS)]
    is_begun = False
    try:
        for record in source:
            texts = None
            if isinstance(record, Conversation) and (make := renderer.texts_of(record, turns)) is not None:
                texts = TextsAhead(make)
                work.put(texts)
                if not is_begun:
                    is_begun = True
                    for thread in threads:
                        thread.start()
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
    """Yield the record, with its texts at hand for `render` until the next one is asked for."""
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
