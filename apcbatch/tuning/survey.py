"""Read the input as a run would, and forecast the run.

Needs no weights. Invariant: `run` with the same options serves the same requests in the same order. Requests that it
would answer with an error are counted and left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from apcbatch.config import Config
from apcbatch.data.chat.known_answers import KnownAnswers
from apcbatch.data.chat.render import NotePrompt, Rendered, Renderer
from apcbatch.data.conversation import Conversation
from apcbatch.data.generation_config import with_model_defaults
from apcbatch.data.input.inputs import Inputs
from apcbatch.data.input.layouts import LineOptions
from apcbatch.data.input.source import open_source
from apcbatch.data.template_options import ChatOptions
from apcbatch.data.tokenization.no_tokenizer import check_first, load_any_tokenizer
from apcbatch.engine.memory import MemoryPlan
from apcbatch.engine.validation import check_request
from apcbatch.errors import RequestError, UsageError
from apcbatch.formats import Turns
from apcbatch.job.feed import Feeder
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.references import References
from apcbatch.job.tool_workers import with_tools
from apcbatch.job.work import Failure
from apcbatch.model.encoded import device_of_codes
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.model.locate import locate_model
from apcbatch.model.own_dtype import with_own_dtype
from apcbatch.plan.footprint import Footprint
from apcbatch.prefix import as_token_array
from apcbatch.tuning.forecast import Forecast, MakeForecaster
from apcbatch.types import Request

MOST_REQUESTS = 200
MOST_ANSWER_TOKENS = 1 << 15
MOST_PROMPT_TOKENS = 1 << 21


@dataclass
class Survey:
    """Requests of an input.

    forecast: what a run of them reuses. footprint: bytes of the model's snapshots. memory: plan of a run's memory.
    num_lines: input lines that have a request. num_unstable: lines whose template changes the rendering of earlier
    turns. without_thoughts: number of those in which it takes earlier reasoning out; keeps_thoughts_with: see Renderer.
    errors: number of refused requests by code.
    """

    forecast: Forecast
    footprint: Footprint
    memory: MemoryPlan
    num_lines: int
    num_unstable: int
    without_thoughts: int
    keeps_thoughts_with: dict[str, bool]
    errors: Counter[str]


@dataclass
class RecordedAnswers:
    """Sums over the first requests that have a recorded answer, up to the MOST_* bounds."""

    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def is_full(self) -> bool:
        return (
            self.requests >= MOST_REQUESTS
            or self.prompt_tokens >= MOST_PROMPT_TOKENS
            or self.tokens >= MOST_ANSWER_TOKENS
        )

    def add(self, request: Request) -> None:
        """Add a request if it has a recorded answer, cut to the request's max_tokens."""
        recorded = request.references.get("recorded")
        if recorded and not self.is_full:
            self.requests += 1
            self.prompt_tokens += len(request.token_ids)
            self.tokens += len(recorded[-1][: request.max_tokens])

    def mean_tokens(self, config: Config) -> int:
        """Return the mean tokens of an answer; --max-tokens if none was added."""
        return -(-self.tokens // self.requests) if self.requests and not config.ignore_eos else config.max_tokens


class _FirstAnswers(References):
    """Recorded answers of conversations, until enough are counted."""

    def __init__(self, renderer: Renderer, counted: RecordedAnswers) -> None:
        super().__init__(renderer, True, None)
        self._counted = counted

    def begin(self, conversation: Conversation) -> KnownAnswers | None:
        return None if self._counted.is_full else super().begin(conversation)


class _WatchedRenderer(Renderer):
    """Renderer that counts the conversations that are not prefix-stable, and those in which the template takes earlier
    reasoning out. drops_thoughts: whether it does so in the latest one."""

    num_unstable = without_thoughts = 0
    drops_thoughts = False

    def render(self, conversation: Conversation, turns: Turns = "each", note: NotePrompt | None = None) -> Rendered:
        self.drops_thoughts = False
        rendered = super().render(conversation, turns, note)
        self.num_unstable += not rendered.prefix_stable
        self.drops_thoughts = rendered.drops_thoughts
        self.without_thoughts += rendered.drops_thoughts
        return rendered


def survey(
    config: Config,
    inputs: Inputs,
    make_forecaster: MakeForecaster,
    warn: Callable[[str], None],
    advance: Callable[[], None] = lambda: None,
    answers: RecordedAnswers | None = None,
) -> Survey:
    """Read the whole input, and forecast a run. make_forecaster: given the bytes of the model's snapshots. advance:
    called once for each line with a request. answers: where the recorded ones are counted; None tokenises none.
    UsageError (ModelError) if input or model cannot be used, or if no line can be planned because all fail."""
    if config.turns == "rollout":
        raise UsageError(
            f"{config.origins['turns']} rollout: its prompts are built on answers that are not known yet; plan with "
            "--turns each, where the recorded answers stand in for them"
        )
    records = with_tools(config, open_source(inputs, LineOptions.of(config), warn=warn), warn)
    folder = locate_model(config.model)
    config = with_own_dtype(with_model_defaults(config, folder))
    model = load_model_config(folder)
    options = ChatOptions.of(config, model.context_length)
    renderer = _WatchedRenderer(load_any_tokenizer(folder, warn), warn=warn, options=options)
    if not renderer.tokenizer.reads_text:
        records = check_first(records, folder)
    layout = state_layout(model, config.dtype)
    footprint = Footprint.of(layout)
    forecaster, errors = make_forecaster(footprint), Counter[str]()
    references = None if answers is None else _FirstAnswers(renderer, answers)
    feeder = Feeder(config, records, renderer, PreviousAnswers(), references=references)
    line = num_lines = 0
    first: Failure | None = None
    while not feeder.exhausted:
        work = feeder.next()
        if work is not None and not isinstance(work, Failure):
            try:
                check_request(work, model.vocab_size, model.context_length, config.max_request_tokens)
            except RequestError as error:
                work = Failure(work.tag.ticket, error)
        if isinstance(work, Failure):
            errors[work.error.code] += 1
            first = first or work
        elif work is not None:
            ticket = work.tag.ticket
            tokens = as_token_array(work.token_ids)
            forecaster.add(tokens, ticket.line, work.resumable, renderer.drops_thoughts)
            if answers is not None:
                answers.add(work)
            if ticket.line != line:
                line = ticket.line
                num_lines += 1
                advance()
    if first is not None and not num_lines:
        reason = f"line {first.ticket.line}: {first.error.message}"
        raise UsageError(f"{inputs.shown}: no request can be planned, since all fail ({reason}); correct the lines")
    return Survey(
        forecaster.finish(),
        footprint,
        MemoryPlan.of(config, layout, model, folder, device_of_codes(config.device, config.gpus)),
        num_lines,
        renderer.num_unstable,
        renderer.without_thoughts,
        renderer.keeps_thoughts_with,
        errors,
    )
