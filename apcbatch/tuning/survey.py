"""Read the input into a prefix tree of all requests that a run would serve.

Needs no weights. Invariant: `run` with the same options serves the same requests in the same order. Requests that it
would answer with an error are counted and left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from apcbatch.config import Config
from apcbatch.data.chat.render import NotePrompt, Rendered, Renderer
from apcbatch.data.chat.template_options import ChatOptions
from apcbatch.data.generation_config import with_model_defaults
from apcbatch.data.input.inputs import Inputs
from apcbatch.data.input.layouts import LineOptions
from apcbatch.data.input.records import Conversation
from apcbatch.data.input.source import open_source
from apcbatch.data.tokenization.no_tokenizer import check_first, load_any_tokenizer
from apcbatch.engine.memory import MemoryPlan
from apcbatch.engine.validation import check_request
from apcbatch.errors import RequestError, UsageError
from apcbatch.formats import Turns
from apcbatch.job.feed import Feeder
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.work import Failure
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.model.locate import locate_model
from apcbatch.model.own_dtype import with_own_dtype
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.windows import Window, Windows
from apcbatch.prefix import as_token_array
from apcbatch.tuning.drafts import AnsweredSample, SampleReferences


@dataclass
class Survey:
    """Requests of an input.

    tree: prefix tree of their prompts; a conversation's number is its input line. footprint: bytes of the model's
    snapshots. memory: of a run on the host. windows: the same prompts in the windows that `run` plans. num_lines: input
    lines that have a request. num_unstable: lines whose template changes the rendering of earlier turns.
    without_thoughts: those of them in which it takes earlier reasoning out; keeps_thoughts_with: see Renderer. errors:
    number of refused requests by code.
    """

    tree: PrefixTree
    footprint: Footprint
    memory: MemoryPlan
    num_lines: int = 0
    windows: list[Window[None]] = field(default_factory=list)
    num_unstable: int = 0
    without_thoughts: set[int] = field(default_factory=set)
    keeps_thoughts_with: dict[str, bool] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)


class _WatchedRenderer(Renderer):
    """Renderer that notes in a survey which conversations are not prefix-stable."""

    survey: Survey

    def render(self, conversation: Conversation, turns: Turns = "each", note: NotePrompt | None = None) -> Rendered:
        rendered = super().render(conversation, turns, note)
        self.survey.num_unstable += not rendered.prefix_stable
        if rendered.drops_thoughts:
            self.survey.without_thoughts.add(conversation.line)
        return rendered


def survey(
    config: Config,
    inputs: Inputs,
    warn: Callable[[str], None],
    advance: Callable[[], None] = lambda: None,
    sample: AnsweredSample | None = None,
) -> Survey:
    """Read the whole input into a Survey. advance: called once for each line with a request. sample: filled with the
    first requests that have a recorded answer. UsageError (ModelError) if input or model cannot be used, or if no line
    can be planned because all fail."""
    if config.turns == "rollout":
        raise UsageError(
            f"{config.origins['turns']} rollout: its prompts are built on answers that are not known yet; plan with "
            "--turns each, where the recorded answers stand in for them"
        )
    records = open_source(inputs, LineOptions.of(config), warn=warn)
    folder = locate_model(config.model)
    config = with_own_dtype(with_model_defaults(config, folder))
    model = load_model_config(folder)
    options = ChatOptions.of(config, model.context_length)
    renderer = _WatchedRenderer(load_any_tokenizer(folder, warn), warn=warn, options=options)
    if not renderer.tokenizer.reads_text:
        records = check_first(records, folder)
    layout = state_layout(model, config.dtype)
    found = Survey(PrefixTree(), Footprint.of(layout), MemoryPlan.of(config, layout, model, folder, on_host=True))
    renderer.survey, found.keeps_thoughts_with = found, renderer.keeps_thoughts_with
    references = None if sample is None else SampleReferences(renderer, sample)
    feeder = Feeder(config, records, renderer, PreviousAnswers(), references=references)
    line, windows = 0, Windows[None](config.window_tokens)
    first: Failure | None = None
    while not feeder.exhausted:
        work = feeder.next()
        if work is not None and not isinstance(work, Failure):
            try:
                check_request(work, model.vocab_size, model.context_length, config.max_request_tokens)
            except RequestError as error:
                work = Failure(work.tag.ticket, error)
        if isinstance(work, Failure):
            found.errors[work.error.code] += 1
            first = first or work
        elif work is not None:
            ticket = work.tag.ticket
            tokens = as_token_array(work.token_ids)
            found.tree.add(tokens, ticket.line, work.resumable)
            windows.add(None, ticket.line, tokens, work.resumable)
            while windows.is_complete:
                found.windows.append(windows.take())
            if sample is not None:
                sample.add(work)
            if ticket.line != line:
                line = ticket.line
                found.num_lines += 1
                advance()
    while len(windows):
        found.windows.append(windows.take())
    if first is not None and not found.num_lines:
        reason = f"line {first.ticket.line}: {first.error.message}"
        raise UsageError(f"{inputs.shown}: no request can be planned, since all fail ({reason}); correct the lines")
    return found
