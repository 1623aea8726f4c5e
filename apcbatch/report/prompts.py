"""Find the prompts of a run's requests, and make their prefix tree: read INPUT again as the run did, and render it
with the same tokenizer.

The prompt of a chat is shown as its messages, that of a completion as its text. Invariants: a file that is named only
in data (a record, the run file) is never opened; a prompt is shown only with the record that has its digest, or with
one of an older version that has no digest; of a long prompt only the beginning and the end are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from apcbatch.config import OPTIONS, Config
from apcbatch.data.chat.recorded_answers import answered_turns
from apcbatch.data.chat.render import Renderer
from apcbatch.data.conversation import BadLine, Conversation, Message
from apcbatch.data.generation_config import with_model_defaults
from apcbatch.data.input.inputs import Inputs
from apcbatch.data.input.layouts import LineOptions
from apcbatch.data.input.source import open_source
from apcbatch.data.model_files import model_files_digest
from apcbatch.data.template_options import ChatOptions
from apcbatch.errors import UsageError
from apcbatch.job.feed import Feeder
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.record import Ticket, request_digests
from apcbatch.job.runfile import input_identity, read_run_file, run_file_path, with_clock_of
from apcbatch.model.locate import locate_model
from apcbatch.prefix import as_token_array
from apcbatch.report.panels import Run
from apcbatch.report.requests import DIGEST_BYTES, SOURCES
from apcbatch.report.texts import MOST_HELD, Prompt, shortened_prompt
from apcbatch.report.tree import RunTree
from apcbatch.resolution import resolve
from apcbatch.types import Request

MOST_PROMPT_CHARACTERS = 8_000
GROUPS = ("Input", "Generation", "Chat")  # groups of the options that affect prompts and digests


class PromptReader:
    """Reader of the prompts of a run's requests. inputs: the run's INPUT. model: the run's model, of which only the
    tokenizer and the chat template are read. warn: called with each warning."""

    def __init__(self, inputs: Inputs, model: str, warn: Callable[[str], None]) -> None:
        self._inputs, self._model, self._warn = inputs, model, warn

    def __call__(self, run: Run) -> tuple[list[Prompt | None], dict[str, Any]]:
        """Return a prompt for each row, shortened in the middle, and the prefix tree of the answered ones. The prompt
        is None for a request that cannot be made, or whose record has another digest.

        UsageError if INPUT, tokenizer or template are not the run's, or if prompts contain the run's own answers.
        """
        config = self._config(run)
        renderer = Renderer.load(locate_model(self._model), warn=self._warn, options=ChatOptions.of(config))
        rows: dict[str, list[int]] = {}  # id -> rows; several if OUT was concatenated from others
        made: dict[bytes, list[int]] = {}  # digest -> rows; a resumed run's ids may be of other places in INPUT
        for row, name in enumerate(run.requests.record_ids):
            rows.setdefault(name, []).append(row)
            made.setdefault(run.requests.prompt_digest(row), []).append(row)
        limit = min(MOST_PROMPT_CHARACTERS, max(1, MOST_HELD // max(1, len(run.requests))))
        texts: list[Prompt | None] = [None] * len(run.requests)
        tree, numbers = RunTree(), run.requests.numbers
        named: set[int] = set()  # rows of the ids that INPUT's requests have
        source = _Source(open_source(self._inputs, LineOptions.of(config)))
        feeder = Feeder(config, source, renderer, PreviousAnswers())
        while not feeder.exhausted:
            work = feeder.next()
            if not isinstance(work, Request):
                continue
            ticket: Ticket = work.tag.ticket
            tokens = as_token_array(work.token_ids)
            digests = request_digests(ticket, tokens, ticket.request_id, ticket.custom_id)
            now, then = map(bytes.fromhex, digests)  # of this version, and of earlier ones
            same_id = rows.get(ticket.request_id, [])
            named.update(same_id)
            old = [row for row in same_id if run.requests.prompt_digest(row) in (then, bytes(DIGEST_BYTES))]
            for row in (*made.pop(now, ()), *old):
                messages = source.history(ticket.turn, config)
                texts[row] = shortened_prompt(messages or _text(work, renderer), limit)
                if not numbers["error"][row]:
                    tree.add(tokens, numbers["cached"][row], SOURCES[numbers["from"][row]])
        others = sum(texts[row] is None for row in named)
        if others:
            self._warn(
                f"prompts of {run.out.name} that were made from other lines than INPUT has now are not shown: {others}"
            )
        return texts, tree.columns(renderer.tokenizer.decode_all)

    def _config(self, run: Run) -> Config:
        """Check that INPUT and the model's files are the run's, and return the run's options."""
        facts, name = run.run_file, run.out.name
        origin = run_file_path(run.out.target)
        if facts is None:
            raise UsageError(
                f"--prompts cannot tell whether {self._inputs.shown} is the input of {name}: "
                f"{origin} {read_run_file(origin)[1]}; leave --prompts out"
            )
        then, now = facts["input"], input_identity(self._inputs)
        compared = ("size_bytes", "xxh3_of_ends") + ("name",) * (now["size_bytes"] is None)
        if any(then.get(key) != now[key] for key in compared):
            raise UsageError(
                f"--prompts {self._inputs.shown} is not the input of {name}, which had {_size(then)} (it has "
                f"{_size(now)}), or it was changed since; give the INPUT of that run, each file of it in the same order"
            )
        folder = locate_model(self._model)
        if facts.get("model_files") != model_files_digest(folder):
            raise UsageError(
                f"the tokenizer and the chat template of {self._model} are not those that made {name}, which ran with "
                f"{facts['config'].get('model')}; give that one as --model"
            )
        values = {
            option: value
            for option, value in facts["config"].items()
            if option in OPTIONS and OPTIONS[option].group in GROUPS and value is not None
        }
        config = resolve({}, {}, values | {"model": self._model}, origin)
        if config.turns == "rollout":
            raise UsageError(
                f"the prompts of {name} were built on the answers of the run itself (--turns rollout), and INPUT does "
                "not have those; leave --prompts out"
            )
        return with_model_defaults(with_clock_of(config, origin), folder)


def _size(identity: dict[str, Any]) -> str:
    size = identity.get("size_bytes")
    return f"{size:,} bytes" if isinstance(size, int) else "no size"


def _text(request: Request, renderer: Renderer) -> str:
    """Decode a prompt. Of a long one, decode only the first and the last MOST_PROMPT_CHARACTERS tokens: the page shows
    no more characters than that. Return the token ids as text if the model has no tokenizer."""
    ids = [int(number) for number in request.token_ids]
    if not renderer.tokenizer.reads_text:
        return " ".join(map(str, ids))
    if len(ids) > 2 * MOST_PROMPT_CHARACTERS:
        ids = ids[:MOST_PROMPT_CHARACTERS] + ids[-MOST_PROMPT_CHARACTERS:]
    return renderer.tokenizer.decode_all(ids)


class _Source:
    """Records of an input; remembers the current one."""

    def __init__(self, records: Iterator[Conversation | BadLine]) -> None:
        self._records = records
        self._latest: Conversation | BadLine | None = None

    def __iter__(self) -> Iterator[Conversation | BadLine]:
        for record in self._records:
            self._latest = record
            yield record

    def history(self, turn: int | None, config: Config) -> list[list[str]]:
        """Return the messages of the current record before a turn, each as [role, text]; first, if the line has tools,
        an entry with their names. Empty for a completion."""
        one = self._latest
        assert isinstance(one, Conversation), "a line that cannot be read makes no request"
        turns = answered_turns(one, config.turns) if config.score else one.requests(config.turns)
        ends = {each.number: each.num_messages for each in turns}
        end = turns[-1].num_messages if turn is None else ends.get(turn, 0)
        tools = ", ".join(str(tool.get("function", tool).get("name")) for tool in one.tools or ())
        return ([["tools", tools]] if tools else []) + [_said(message) for message in one.messages[:end]]


def _said(message: Message) -> list[str]:
    """Return a message as [role, text]; a tool call becomes a line with its arguments."""
    parts = [message.get("reasoning_content") or "", message["content"] or ""]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(f"{function['name']} {orjson.dumps(function['arguments'], default=str).decode()}")
    return [str(message["role"]), "\n".join(filter(None, parts))]
