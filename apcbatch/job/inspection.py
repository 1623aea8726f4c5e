"""Inspect one request of an input without computing it: prompt, tokens, reuse, settings.

Needs no weights. Invariants: `run` with the same options makes the same prompt and settings; the input is read up to
the end of the requested line and no further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from apcbatch.config import Config
from apcbatch.data.chat.prompt_tokens import PromptToken, prompt_tokens
from apcbatch.data.chat.render import Renderer
from apcbatch.data.conversation import BadLine, Conversation, choose_turns
from apcbatch.data.generation_config import with_model_defaults
from apcbatch.data.grammar.structured_output import StructuredOutput
from apcbatch.data.input.inputs import Inputs
from apcbatch.data.input.layouts import LineOptions
from apcbatch.data.input.line_errors import find_errors
from apcbatch.data.input.source import open_source
from apcbatch.data.template_options import ChatOptions
from apcbatch.engine.validation import room_for_answer
from apcbatch.errors import RequestError, UsageError
from apcbatch.formats import Format
from apcbatch.job.feed import Feeder
from apcbatch.job.planning import planner_for, with_recorded_gain
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.record import Ticket
from apcbatch.job.request import settings_of
from apcbatch.job.tool_workers import with_tools
from apcbatch.job.work import Failure, Work
from apcbatch.model.encoded import device_of_codes
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.model.locate import locate_model
from apcbatch.model.own_dtype import with_own_dtype
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.prefix_tree import PrefixTree, common_prefixes
from apcbatch.prefix import as_token_array, boundaries_in, last_boundary
from apcbatch.sampling import SETTINGS
from apcbatch.types import Request


@dataclass(frozen=True, slots=True)
class Shared:
    """First request of the input whose prompt begins with the same `tokens` tokens as the inspected one."""

    tokens: int
    line: int
    turn: int | None
    custom_id: str | None


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of the request with its origin: `line`, the flag, variable or file that gave it, or `default`."""

    name: str
    value: Any
    origin: str


@dataclass
class Inspection:
    """Description of one request before it is computed.

    reading: how the line's fields were read, if its layout is another tool's. turn: None if the line is refused as a
    whole. turns: turns of the line that are requests. text: the prompt; None if it came as token ids, or there is none.
    boundaries: multiples of block_size in the prompt. kept: position -> why the policy keeps its snapshot. resume_at:
    position where the plan resumes the request; None without a plan. shared: prefixes shared with earlier requests, the
    shortest first. ends: sentence that names the tokens that end an answer. error_code: code of the error record; None
    if the request would be answered. refused: one sentence for each reason to refuse it.
    """

    line: int
    model: str
    block_size: int
    policy: str
    turn: int | None = None
    turns: list[int] = field(default_factory=list)
    custom_id: str | None = None
    conversation: str | None = None
    format: Format | None = None
    reading: str | None = None
    text: str | None = None
    tokens: list[PromptToken] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    kept: dict[int, str] = field(default_factory=dict)
    resume_at: int | None = None
    shared: list[Shared] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    ends: str = ""
    error_code: str | None = None
    refused: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return the inspection as a JSON object."""
        kept = [{"position": position, "reason": reason} for position, reason in self.kept.items()]
        return {**asdict(self), "prompt_tokens": len(self.tokens), "kept": kept}


def inspect(
    config: Config,
    inputs: Inputs,
    line: int | None,
    turn: int | None,
    warn: Callable[[str], None],
    id: str | None = None,
) -> Inspection:
    """Inspect a request of the input. line: from 1; None for the first line that is not blank. turn: None for the last
    turn of the line. id: of the first conversation to take in place of a line, or a custom_id of OUT, `ID#TURN`.

    With --score, the recorded answer is left out of the prompt. Raises UsageError if the input cannot be used, or if
    the line or the turn does not exist; for a bad model, its subclass ModelError.
    """
    if config.turns == "rollout":
        raise UsageError(
            f"{config.origins['turns']} rollout: its prompts contain answers that are not generated yet; look at them "
            "with --turns each, where the recorded answers stand in for them"
        )
    records = _Records(with_tools(config, open_source(inputs, LineOptions.of(config), warn=warn), warn), line, id)
    folder = locate_model(config.model)
    config = replace(with_own_dtype(with_model_defaults(config, folder), warn), score=False)
    model = load_model_config(folder)
    renderer = Renderer.load(folder, warn=warn, options=ChatOptions.of(config, model.context_length))
    read = _RequestsRead(config, model.context_length)
    feeder = Feeder(config, records, renderer, PreviousAnswers())
    while not feeder.exhausted:
        work = feeder.next()
        if work is not None:
            read.take(work)
    record = records.last
    if id is not None and records.found is None:
        limited = f" before --limit {config.limit}" if config.limit is not None else ""
        raise UsageError(f"{inputs.shown} has no line with the id {id!r}{limited}")
    if id is not None and turn is None and records.found != id:
        turn = int(id.rpartition("#")[2])
    if record is None or line not in (None, record.line):
        raise UsageError(f"{inputs.shown} has no line {line or 1} to look at; {records.where_it_ends(config.limit)}")
    found = Inspection(record.line, config.model, config.block_size, config.policy, format=record.source_format)
    found.reading = record.reading if isinstance(record, Conversation) else None
    found.turn, found.turns = _choose_turn(read, turn)
    ticket, request, error = read.latest[found.turn]
    found.custom_id, found.conversation = ticket.custom_id, ticket.conversation
    if error is not None:
        found.error_code, found.refused = error.code, _refused(error, record)
    if request is not None and isinstance(record, Conversation):
        _add_settings(found, record, config)
        found.ends = renderer.tokenizer.ends()
        _add_prompt(found, request, record, config, renderer)
        if error is None:
            _add_reuse(found, read, config, Footprint.of(state_layout(model, config.dtype)))
    return found


class _Records:
    """Records of an input up to `line`, or up to the one with this id; only the first record if both are None. last:
    latest record yielded. found: id of the record that was looked for, without the turn."""

    def __init__(self, records: Iterable[Conversation | BadLine], line: int | None, id: str | None) -> None:
        self.last: Conversation | BadLine | None = None
        self.found: str | None = None
        self._records, self._line = records, line
        name, _, turn = (id or "").rpartition("#")
        self._ids = {id} | ({name} if turn.isascii() and turn.isdigit() else set()) if id is not None else set()

    def __iter__(self) -> Iterator[Conversation | BadLine]:
        for record in self._records:
            if self._line is not None and record.line > self._line:
                return
            self.last = record
            name = record.id if isinstance(record, Conversation) else record.conversation
            if name in self._ids:
                self.found = name
            yield record
            if self.found is not None or (not self._ids and self._line in (None, record.line)):
                return

    def where_it_ends(self, limit: int | None) -> str:
        """Return the reason why the line does not exist, for an error."""
        if self.last is None:
            return "no line before it holds anything"
        limited = f", or --limit {limit} ends before it" if limit is not None else ""
        return f"it is blank, or the input ends before it{limited}; the last one before it is line {self.last.line}"


class _RequestsRead:
    """Requests read so far. tree: prefix tree of those that would run. tickets: by request index in the tree. latest:
    turn -> (ticket, request, error), for the latest line. request: None if it could not be made. error:
    None if the request would run. index: turn -> request index in the tree, for the latest line."""

    def __init__(self, config: Config, context_length: int | None) -> None:
        self._config, self._context_length = config, context_length
        self.tree = PrefixTree()
        self.tickets: list[Ticket] = []
        self.latest: dict[int | None, tuple[Ticket, Request | None, RequestError | None]] = {}
        self.index: dict[int | None, int] = {}
        self._line = 0

    def take(self, work: Work) -> None:
        """Add a request or a failure."""
        request, error = (None, work.error) if isinstance(work, Failure) else (work, None)
        ticket: Ticket = work.ticket if isinstance(work, Failure) else work.tag.ticket
        if ticket.line != self._line:
            self._line, self.latest, self.index = ticket.line, {}, {}
        if request is not None:
            try:
                most = self._config.max_request_tokens
                room_for_answer(len(request.token_ids), request.max_tokens, self._context_length, most)
            except RequestError as refusal:
                error = refusal
        self.latest[ticket.turn] = (ticket, request, error)
        if request is not None and error is None:
            self.index[ticket.turn] = self.tree.add(as_token_array(request.token_ids), ticket.line, request.resumable)
            self.tickets.append(ticket)


def _choose_turn(read: _RequestsRead, wanted: int | None) -> tuple[int | None, list[int]]:
    """Return the turn to inspect, and all turns of the line; (None, []) if the line fails as a whole."""
    turns = sorted(turn for turn in read.latest if turn is not None)
    if not turns:
        return None, []
    if wanted is not None and wanted not in turns:
        numbers = ", ".join(map(str, turns))
        raise UsageError(f"the line has no request for turn {wanted}; expected one of {numbers}")
    return turns[-1] if wanted is None else wanted, turns


def _refused(error: RequestError, record: Conversation | BadLine) -> list[str]:
    """Return the message of the error record that a run would write, then a sentence for each further fault of the
    line."""
    sentences = [error.message]
    if isinstance(record, BadLine) and record.source_format is not None:
        sentences += find_errors(record.record, record.line, LineOptions(record.source_format))
    return list(dict.fromkeys(sentences))


def _add_settings(found: Inspection, conversation: Conversation, config: Config) -> None:
    given = conversation.params
    for name, value in settings_of(config, given).items():
        origin = "line" if name in given else config.origins[SETTINGS[name].option_name]
        shown = asdict(value) if isinstance(value, StructuredOutput) else value
        found.settings.append(Setting(name, shown, origin))


def _add_prompt(
    found: Inspection, request: Request, conversation: Conversation, config: Config, renderer: Renderer
) -> None:
    """Add the text of the prompt, its tokens and its boundaries."""
    is_completion = conversation.prompt is not None
    if not is_completion:
        messages = conversation.messages
        if conversation.source_format != "batch":
            ends = {turn.number: turn.num_messages for turn in choose_turns(messages, config.turns)}
            messages = messages[: ends[request.tag.ticket.turn]]
        found.text = renderer.render_text(conversation, messages)
    elif isinstance(conversation.prompt, str):
        found.text = conversation.prompt
    ids = [int(number) for number in request.token_ids]
    found.tokens = prompt_tokens(renderer.tokenizer, ids, found.text, adds_special=is_completion)
    found.boundaries = list(boundaries_in(0, len(ids), config.block_size))


def _add_reuse(found: Inspection, read: _RequestsRead, config: Config, footprint: Footprint) -> None:
    """Fill in what a request reuses: the prefixes that it shares with others, the positions that the policy keeps, and
    the position where the plan resumes it. Lines after the request's own do not count."""
    index, length = read.index[found.turn], len(found.tokens)
    for tokens, other in common_prefixes(read.tree, index):
        ticket = read.tickets[other]
        found.shared.append(Shared(tokens, ticket.line, ticket.turn, ticket.custom_id))
    if config.policy == "all":
        found.kept = dict.fromkeys(found.boundaries, "every boundary")
    elif config.policy == "last" and found.boundaries:
        found.kept = {last_boundary(length, config.block_size): "the last boundary"}
    elif config.policy == "planned":
        device = device_of_codes(config.device, config.gpus)
        plan = planner_for(with_recorded_gain(config), footprint, device).plan(read.tree).requests[index]
        later = dict.fromkeys(plan.keep_for_later, "for later runs")
        readers = {position: f"read by {count}" for position, count in zip(plan.keep, plan.reads, strict=True)}
        found.kept = dict(sorted((later | readers).items()))
        found.resume_at = plan.resume_at
