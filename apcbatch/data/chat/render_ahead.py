"""Render and tokenise the conversations that come next in threads, each with helper processes of its own.

Without them a run's own thread spends 45 % of its time on waiting for the chat template, where prompts are short and a
GPU or a cluster computes. Only the longest text of a conversation, the base of the others, is tokenised ahead.
Invariants: texts and their order are those without threads; a thread continues while less than
MOST_HELD characters of its conversation have not been taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

from apcbatch.data.chat.common_prefix import BaseText
from apcbatch.data.chat.render import Renderer, Texts
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.errors import RequestError
from apcbatch.formats import Turns

AFTER = 256  # records that are read before threads begin: two processes start in the time of as many short prompts
NUM_THREADS = 2
MOST_AHEAD = 16  # records
MOST_HELD = 1 << 22  # characters of one conversation


class TextsAhead:
    """Queue of the texts of one conversation, which one thread makes (`fill`) and another takes. make: makes them."""

    def __init__(self, make: Callable[[], Texts]) -> None:
        self._make = make
        self._ready: SimpleQueue[BaseText | str | RequestError | None] = SimpleQueue()  # None: the last one is taken
        self._room = threading.Condition()
        self._is_full = self._is_closed = False  # is_full: `fill` waits for room
        self._num_made = self._num_taken = 0  # characters
        self._failure: BaseException | None = None

    def fill(self) -> None:
        """Make the texts until the last one or `close`; wait for room."""
        try:
            for text in self._make():
                if self._num_made - self._num_taken >= MOST_HELD:
                    with self._room:
                        self._is_full = True
                        self._room.wait_for(lambda: self._is_closed or self._num_made - self._num_taken < MOST_HELD)
                        self._is_full = False
                if self._is_closed:
                    return
                self._num_made += _size(text)
                self._ready.put(text)
        except BaseException as failure:
            self._failure = failure
        finally:
            self._ready.put(None)

    def take(self) -> Texts:
        """Yield the texts in order; wait for each. Raises what `make` raised."""
        while (text := self._ready.get()) is not None:
            self._num_taken += _size(text)
            self._tell()
            yield text
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Drop the texts that are left, and end `fill`."""
        self._is_closed = True
        self._tell()

    def _tell(self) -> None:
        """Wake `fill` if it waits for room."""
        if self._is_full:
            with self._room:
                self._room.notify_all()


def _size(text: BaseText | str | RequestError) -> int:
    """Return the number of characters."""
    if isinstance(text, RequestError):
        return 0
    return len(text.text if isinstance(text, BaseText) else text)


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
