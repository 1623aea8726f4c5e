"""Find the lines of INPUT that a process with --shard I/N answers, a window ahead of the run.

Invariant: which shard has a line depends on the records up to --limit, the tokens of their prompts, --turns, --score,
max_tokens, temperature, n and N alone, so that N processes find N disjoint parts, which together are INPUT. A rollout
counts as it was recorded. A line without a prompt, such as a bad one, belongs to a shard by its number.
"""

from __future__ import annotations

from collections.abc import Iterator

from apcbatch.config import Config
from apcbatch.data.chat.recorded_answers import render_answers
from apcbatch.data.chat.render import Prompt, Renderer
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.errors import StoppedError
from apcbatch.plan.shards import divide
from apcbatch.plan.windows import Windows

WINDOW_TOKENS = 1 << 24  # not --window-tokens, which may differ between shards
MOST_ANSWER_TOKENS = 256  # cap on the tokens counted for one answer


class ShardLines:
    """The lines of one shard. index: its number, from 0. records: of INPUT up to --limit, an iterator of its own."""

    def __init__(self, shard: str, config: Config, records: Iterator[Conversation | BadLine], renderer: Renderer):
        index, count = map(int, shard.split("/"))
        self.index, self._loads = index - 1, [0] * count
        self._config, self._records, self._renderer = config, records, renderer
        self._windows: Windows[int] = Windows(WINDOW_TOKENS, has_small_first=False)
        self._shards: dict[int, int] = {}  # by line, of lines that the run has not reached

    def wait_for(self, line: int) -> Iterator[None]:
        """Read INPUT until the window with a line is divided. Yields after each record, so that passes go on."""
        while line not in self._shards:
            self._read()
            yield

    def take(self, line: int) -> int:
        """Return the shard of a line that is known, from 0, and forget the line."""
        return self._shards.pop(line)

    def _read(self) -> None:
        """Read one more record; divide the window that it completes, or that is left at the end of INPUT. StoppedError
        if nothing is left. Raises what the tokenizer's check_stop raises."""
        self._renderer.tokenizer.check_stop()
        record = next(self._records, None)
        if record is None and not len(self._windows):
            raise StoppedError("INPUT has other lines than when this run began to read it; run all shards anew")
        prompts = [] if record is None else self._prompts(record)
        if record is not None and not prompts:
            self._shards[record.line] = record.line % len(self._loads)
        elif isinstance(record, Conversation):
            answer_tokens = self._answer_tokens(record)
            for prompt in prompts:
                self._windows.add(answer_tokens, record.line, prompt.token_ids, len(prompt.token_ids) - 1)
        if record is None or self._windows.is_complete:
            window = self._windows.take()
            self._shards |= divide(window.tree, window.items[: window.num_requests], self._loads)

    def _prompts(self, record: Conversation | BadLine) -> list[Prompt]:
        if isinstance(record, BadLine):
            return []
        turns = self._config.turns
        try:
            self._renderer.complete_without_template(record)
            if self._config.score:
                return render_answers(self._renderer, record, turns).prompts
            return self._renderer.render(record, turns).prompts
        except Exception:  # the run makes it an error record
            return []

    def _answer_tokens(self, record: Conversation) -> int:
        """Return the tokens that the answers to one prompt of a line are taken to have."""
        given = record.params
        if self._config.score:
            return 0
        most: int = given.get("max_tokens", self._config.max_tokens)
        num_answers: int = given.get("n", 1) if given.get("temperature", self._config.temperature) > 0 else 1
        return min(MOST_ANSWER_TOKENS, most) * num_answers
