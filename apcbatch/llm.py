"""LLM: `apcbatch run` for programs. Messages go in; text and tool calls come out, with token ids and cache counts.

Invariant: each conversation is converted to the JSON line that it would be in INPUT, and each answer is parsed from the
line that OUT would have. So the checks, the prompts and the tokens are those of `apcbatch run`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

import orjson
import xxhash
from tqdm import tqdm

from apcbatch.address import as_path
from apcbatch.answer import Answer, answer_of
from apcbatch.config import OPTIONS
from apcbatch.data.chat.render import Renderer
from apcbatch.data.checks import one_of, shown
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.generation_config import with_model_defaults
from apcbatch.data.input.inputs import find_inputs
from apcbatch.data.input.layouts import LineOptions
from apcbatch.data.input.records import parse_line
from apcbatch.data.input.source import UnusedColumns, open_source
from apcbatch.data.template_options import ChatOptions
from apcbatch.engine.serving import serve
from apcbatch.errors import RequestError, UsageError
from apcbatch.formats import CHAT_URL, COMPLETIONS_URL, TURNS, Turns
from apcbatch.job.feed import Feeder
from apcbatch.job.live import LiveFeeder
from apcbatch.job.opening import check_stop_tokens, make_engine
from apcbatch.job.planning import with_measured_gain, work_source
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.record import error_record, line_of, result_record
from apcbatch.job.references import EarlierAnswers, References
from apcbatch.job.tool_workers import factory_name, opened_workers
from apcbatch.job.work import Failure, JobEngine, Work, WorkSource
from apcbatch.model.families import load_model_config
from apcbatch.model.locate import locate_model
from apcbatch.model.own_dtype import with_own_dtype
from apcbatch.resolution import resolve
from apcbatch.types import Request, Result

Messages = Sequence[Mapping[str, Any]]

# Option, or group of options, that an LLM refuses -> what to do instead.
_ELSEWHERE = {
    "turns": "give it to `run`",
    "tools": "give it to `run`",
    "format": "each conversation says by its keys what it is; leave it out",
    "limit": "end the conversations where you like; leave it out",
    "shard": "it divides the INPUT of `apcbatch run`; give each process its own conversations",
}
_ELSEWHERE_BY_GROUP = {
    "Output": "it is of the command line alone; leave it out",
    "Cluster": "an LLM computes in this process; leave it out, or write the conversations as JSON lines and give "
    "`apcbatch run` --ray",
}

_EXAMPLES = {
    "messages": '[{"role": "user", "content": "Hi"}]',
    "tools": '[{"type": "function", "function": {"name": ..., "parameters": ...}}]',
}
_MOST_FAILURES = 64  # maximum failures collected before they are yielded


def _warn(sentence: str) -> None:
    """Emit a Python warning; the default of `warn`."""
    warnings.warn(sentence, stacklevel=3)


class LLM:
    """A model that answers conversations. Use it in a `with` block, or call `close` at the end.

    model: a bundled model (`demo`, `demo-jamba`), a folder, or a hub id in the local cache. options: options of
    `apcbatch run`, by their names in its configuration file and with the same checks: `block_size=64`,
    `store="states"`, `dtype="bfloat16"`, `pool_size="2GiB"`. Options such as `max_tokens` and `temperature` are
    defaults for requests that do not set them. Only `policy` has another default than in `apcbatch run`: `all`, because
    the LLM cannot know the next conversation; `planned` is better for one long call of `run`. Neither the environment
    nor a configuration file is read. warn: receives each warning as a sentence; the default is `warnings.warn`.

    Raises UsageError (ModelError) for an option or a model that cannot be used. One thread at a time may use an LLM.
    """

    def __init__(
        self, model: str | os.PathLike[str] = "demo", *, warn: Callable[[str], None] = _warn, **options: Any
    ) -> None:
        for name in options.keys() & OPTIONS.keys():
            instead = _ELSEWHERE.get(name) or _ELSEWHERE_BY_GROUP.get(OPTIONS[name].group)
            if instead is not None:
                raise UsageError(f"LLM: {name} is no option of an LLM: {instead}")
        given = {"policy": "all", **options, "model": model}
        plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given.items()}
        self._is_running = False
        self._warn = warn
        config = resolve({}, {}, plain, "LLM")
        self._lines = LineOptions.of(config)
        folder = locate_model(config.model)
        self._config = with_own_dtype(with_model_defaults(config, folder), warn)
        check_stop_tokens(self._config, folder)
        chats = ChatOptions.of(self._config, load_model_config(folder).context_length)
        self._renderer = Renderer.load(folder, warn=warn, options=chats)
        if not (self._renderer.tokenizer.eos_token_ids or self._config.ignore_eos):
            warn(self._renderer.tokenizer.ends())
        self._earlier = EarlierAnswers.of(self._config, folder, warn)
        self._engine: JobEngine | None = make_engine(self._config, warn)
        self._config = with_measured_gain(self._config, self._engine.reading_tokens)

    def __repr__(self) -> str:
        config, engine = self._config, self._engine
        rest = (
            "closed" if engine is None else f"dtype={engine.dtype!r}, device={engine.device!r}, store={config.store!r}"
        )
        return f"LLM({config.model!r}, {rest})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def chat(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **settings: Any) -> Answer:
        """Answer one conversation: generate the turn after its last message.

        settings: fields of a chat body, such as max_tokens, temperature, seed, logprobs, tool_choice
        (docs/reference/formats.md). Equal calls give equal answers; another `seed` gives another sample. To continue
        the conversation, append `answer.message` and the next message, and call again: the state of the prompts' common
        prefix is reused. Raises RequestError for a conversation that cannot be answered, TypeError for messages or
        tools that are a text or a mapping.
        """
        for name, value in (("messages", messages), ("tools", tools)):
            if isinstance(value, (str, bytes, Mapping)):
                raise TypeError(f"{name} is a {type(value).__name__}; expected a list, as {_EXAMPLES[name]}")
        body = {**settings, "messages": messages, "tools": tools}
        return self._one(CHAT_URL, body)

    def complete(self, prompt: str | Sequence[int], **settings: Any) -> Answer:
        """Continue a text or token ids, without a chat template. settings and errors: see `chat`."""
        return self._one(COMPLETIONS_URL, {**settings, "prompt": prompt})

    def run(
        self,
        conversations: str | os.PathLike[str] | Iterable[Messages | Mapping[str, Any]],
        *,
        turns: Turns = "last",
        tools: str | Callable[..., Any] | None = None,
    ) -> Iterator[Answer]:
        """Answer many conversations, and yield each answer as it finishes. The answer's `line` and `custom_id` identify
        its conversation. A notebook shows a progress bar.

        A conversation is a list of messages, a mapping like a line of INPUT (messages with optional tools, settings and
        id), or a request of the OpenAI Batch API. The iterable is read lazily, as the engine needs more requests. A
        text or a path is the name of an INPUT, as `apcbatch run` reads it; a mapping is a TypeError.
        turns: which turns are requests, as in `apcbatch run`. tools: factory of live episodes (docs/rollouts.md), or
        its name `PACKAGE.MODULE:FACTORY`; each turn is yielded when its tools have answered. A conversation that cannot
        be answered yields an Answer with `error`, and the others continue. Leaving the loop early drops the requests in
        progress. Raises UsageError if another run of this LLM is not finished.
        """
        if turns not in TURNS:
            raise UsageError(f"turns is {shown(turns)}; expected {one_of(TURNS)}")
        if turns == "live" and tools is None:
            raise UsageError("turns is live, and no tools are given; give tools=FACTORY")
        factory = None if tools is None else factory_name(tools)
        turns, lines = ("live" if factory else turns), replace(self._lines, keeps_rows=factory is not None)
        if isinstance(conversations, (bytes, Mapping)):
            kind = type(conversations).__name__
            raise TypeError(f"conversations is a {kind}; expected a list of conversations, or the name of a file")
        records: Iterator[Conversation | BadLine]
        if isinstance(conversations, (str, os.PathLike)):
            inputs = find_inputs([as_path(os.fspath(conversations))], self._warn)
            records = open_source(inputs, lines, warn=self._warn)
        else:
            records = _records(conversations, lines, self._warn)
        return self._answers(records, turns, factory, shows_bar="ipykernel" in sys.modules)

    def close(self) -> None:
        """Finish pending writes to the store, and release the model. Further calls do nothing."""
        if self._engine is not None:
            self._engine.abort()
            self._engine.close()
            self._engine = None
            if self._earlier is not None:
                self._earlier.warn_if_unused(self._warn)

    def _one(self, url: str, body: Mapping[str, Any]) -> Answer:
        """Return the answer to one request in OpenAI's form. Raises RequestError if the request fails."""
        line = {"custom_id": "request-1", "method": "POST", "url": url, "body": body}
        [answer] = self._answers(_records([line], self._lines, self._warn), "last")
        if answer.error is not None:
            raise RequestError(answer.error.code, answer.error.message)
        return answer

    def _answers(
        self,
        records: Iterator[Conversation | BadLine],
        turns: Turns,
        tools: str | None = None,
        shows_bar: bool = False,
    ) -> Iterator[Answer]:
        """Yield each answer as it finishes, with a progress bar on standard error if shows_bar. tools: as --tools."""
        if self._engine is None:
            raise UsageError("this LLM is closed; make another one")
        if self._is_running:
            raise UsageError("another run of this LLM is not finished; take all of its answers, or close it, first")
        engine, config = self._engine, replace(self._config, turns=turns, tools=tools)
        given = config, records, self._renderer, PreviousAnswers()
        self._is_running = True
        try:
            with (
                opened_workers(config, None, self._warn) as workers,
                tqdm(unit=" answers", disable=not shows_bar) as bar,
            ):
                live = None if workers is None else LiveFeeder(*given, engine, workers)
                references = References.of(config, self._renderer, self._earlier)
                source = work_source(config, live or Feeder(*given, True, references), engine)
                for answer in self._served(source, engine, live):
                    bar.total = source.total
                    bar.update()
                    yield answer
        finally:
            self._is_running = False
            engine.abort()

    def _served(self, source: WorkSource, engine: JobEngine, live: LiveFeeder | None) -> Iterator[Answer]:
        """Yield the answers to the requests of a source. live: the source, if it plays live episodes."""
        ended: list[Failure | Result] = []  # what is yielded next
        while not source.exhausted:
            for results in serve(engine, lambda: self._take(source, ended, live)):
                for result in results:
                    for work in source.follow_up(result):
                        self._submit(work, engine, ended)
                    if live is None:
                        ended.append(result)
                yield from self._yielded(ended)
            yield from self._yielded(ended)

    def _take(self, source: WorkSource, ended: list[Failure | Result], live: LiveFeeder | None) -> Request | None:
        """Return the next request; None if none is ready, or if `ended` has answers to yield first.

        Appends conversations that cannot be answered, and turns of live episodes, to `ended`.
        """
        may_begin = source.num_open_rollouts < self._config.max_running
        while may_begin and not source.exhausted and len(ended) < _MOST_FAILURES:
            is_paused = source.pause()
            work = None if is_paused else source.next()
            ended += live.take_ended() if live is not None else ()
            if isinstance(work, Failure):
                ended.append(work)
            elif work is not None or is_paused or (live is not None and ended):
                return work
        return None

    def _submit(self, work: Work, engine: JobEngine, ended: list[Failure | Result]) -> None:
        """Submit a request to the engine, or collect a failure."""
        if isinstance(work, Failure):
            ended.append(work)
        else:
            engine.submit(work)

    def _yielded(self, ended: list[Failure | Result]) -> Iterator[Answer]:
        """Yield an Answer for each item of `ended`, and remove it."""
        while ended:
            one = ended.pop(0)
            yield self._answer(one) if isinstance(one, Result) else answer_of(error_record(one.ticket, one.error))

    def _answer(self, result: Result) -> Answer:
        """Convert a result to an Answer by its record, with the values that the output line would have."""
        ticket = result.tag.ticket
        if result.error is not None:
            record = error_record(ticket, RequestError(result.error.code, result.error.message, ticket.line))
        else:
            output_parser, now = result.tag.output_parser, int(time.time())
            record = result_record(ticket, result, self._renderer, self._config.model, now, output_parser)
        return answer_of(orjson.loads(line_of(record)))


def _records(
    conversations: Iterable[Messages | Mapping[str, Any]], options: LineOptions, warn: Callable[[str], None]
) -> Iterator[Conversation | BadLine]:
    """Convert each conversation to a JSON line of INPUT, and parse it as one."""
    unused = UnusedColumns(options, warn)
    for number, conversation in enumerate(conversations, start=1):
        is_line = isinstance(conversation, Mapping)
        try:
            line = conversation if is_line else {"messages": conversation}
            data = json.dumps(line, default=_plain).encode()
            record = parse_line(data, number, options)
        except (TypeError, ValueError, RecursionError) as error:
            data = b""
            message = f"the conversation cannot be written as JSON: {str(error)[:200]}"
            record = BadLine(number, RequestError("invalid_request", message, number))
        record.digest = xxhash.xxh3_128_hexdigest(data)
        if isinstance(record, Conversation):
            unused.note(record.columns, number)
        yield record


def _plain(value: object) -> object:
    """Convert a mapping, an array or a model such as the `openai` package's to a JSON-compatible value."""
    if isinstance(value, Mapping):
        return dict(value)
    for name in ("model_dump", "tolist"):
        convert = getattr(value, name, None)
        if callable(convert):
            return cast(object, convert())
    raise TypeError(f"it holds a {type(value).__name__}")
