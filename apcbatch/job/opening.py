"""Everything that can fail before the first request: paths, input, tokenizer, run file, weights, OUT.

Must not know: the loop. Invariant: OUT and its run file change last, after everything else is open.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from apcbatch.config import Config
from apcbatch.data.chat_options import ChatOptions
from apcbatch.data.generation_config import notice, with_model_defaults
from apcbatch.data.lines import STDIN
from apcbatch.data.records import BadLine, Conversation
from apcbatch.data.render import Renderer
from apcbatch.data.source import open_source
from apcbatch.errors import UsageError
from apcbatch.job.answers import Answers, drop_unusable, read_answers
from apcbatch.job.engine import JobEngine
from apcbatch.job.feed import Feeder
from apcbatch.job.paths import STDOUT, check_outputs
from apcbatch.job.runfile import RunFile, input_identity, model_files_digest, run_file_path
from apcbatch.job.salt import read_salt
from apcbatch.job.sink import FileSink, Sink
from apcbatch.model.locate import locate_model
from apcbatch.resolution import config_path
from apcbatch.types import Request


@dataclass
class OpenRun:
    """What a run works with, all of it open. config: with the model's defaults, if they are wanted."""

    config: Config
    records: Iterator[Conversation | BadLine]
    renderer: Renderer
    engine: JobEngine
    answers: Answers


def check_paths(config: Config, input: str, output: str, config_file: str | None) -> None:
    """Refuse an OUT that is, or would destroy, something else; UsageError says what to give instead."""
    if config.score and config.turns == "rollout":
        raise UsageError(
            f"{config.origins['score']} scores recorded answers, and {config.origins['turns']} rollout puts generated "
            "ones in their place; give --turns each or last"
        )
    if config.summary == STDOUT:
        raise UsageError("--summary needs a file; the summary is the last line on standard output already")
    is_file = output != STDOUT and (os.path.isfile(output) or not os.path.exists(output))
    run_file = run_file_path(output) if is_file else None
    outputs = {"OUT": output, "OUT.run.json": run_file, "--summary": config.summary}
    check_outputs(config, {"INPUT": input, "--config": config_path(config_file)}, outputs)
    if not is_file and config.resume:
        raise UsageError("--resume needs an OUT that can be read back; give -o a file")
    if is_file and os.path.exists(output) and not (config.resume or config.overwrite):
        raise UsageError(f"output {output} exists; give --resume to go on with it or --overwrite to replace it")


def open_run(
    config: Config,
    input: str,
    sink: Sink,
    warn: Callable[[str], None],
    note: Callable[[str], None],
    stage: Callable[[str], None],
) -> OpenRun:
    """Open what a run needs, cheap things first; UsageError (ModelError) for what cannot be used. note: gets what the
    user may want to know. stage: is told what is being done."""
    stage("reading the tokenizer")
    records = open_source(input, config.format, warn=warn)
    folder = locate_model(config.model)
    config = with_model_defaults(config, folder)
    sentence = notice(config, folder)
    if sentence is not None:
        note(sentence)
    renderer = Renderer.load(folder, warn=warn, options=ChatOptions.of(config))
    if input != STDIN:  # which may keep a reader waiting
        records = _announced(records, renderer)
    if not isinstance(sink, FileSink):
        stage(f"loading {config.model}")
        return OpenRun(config, records, renderer, make_engine(config, warn), Answers())
    run_file = RunFile(sink.path, config, input_identity(input), model_files_digest(folder), sink.disk)
    answers = None
    if config.resume and sink.has_lines():
        stage("comparing the answers that are there with the input")
        same_version = run_file.check()
        answers = read_answers(sink)
        answers.trusts_lines = same_version
        _warn_of(answers, sink, warn)
        confirm_input(config, input, renderer, answers)
    else:
        run_file.check_replaceable()
    stage(f"loading {config.model}")
    engine = make_engine(config, warn)
    with ExitStack() as stack:
        stack.callback(engine.close)
        run_file.set_fingerprint(engine.fingerprint)
        if answers is not None:
            run_file.check()
            answers = drop_unusable(sink, answers, config.retry_errors)
        else:
            sink.truncate()
        run_file.write()
        sink.remove_if_empty = False
        stack.pop_all()
    return OpenRun(config, records, renderer, engine, answers or Answers())


def confirm_input(config: Config, input: str, renderer: Renderer, answers: Answers) -> None:
    """Compare the answers in OUT with INPUT before anything is changed. A stream cannot be read twice: it is compared
    while the run reads it."""
    if input == STDIN or not os.path.isfile(input):
        return
    feeder = Feeder(config, open_source(input, config.format), renderer, answers)
    while not feeder.exhausted and answers.num_shown < len(answers):
        work = feeder.next()
        if isinstance(work, Request) and work.tag.rollout is not None:
            for ticket in work.tag.rollout.remaining:
                answers.leave(ticket)
    if feeder.exhausted:
        answers.check_all_shown(feeder.last_line, whole=config.limit is None)
    answers.confirmed = True


def _announced(records: Iterator[Conversation | BadLine], renderer: Renderer) -> Iterator[Conversation | BadLine]:
    """The same records. If the first is a conversation and the model has no chat template, that is said now, before the
    weights are read; later ones say it themselves."""
    first = next(records, None)
    if isinstance(first, Conversation) and first.prompt is None:
        renderer.template.announce()
    return records if first is None else chain([first], records)


def _warn_of(answers: Answers, sink: FileSink, warn: Callable[[str], None]) -> None:
    if answers.num_unsigned:
        warn(
            f"{answers.num_unsigned} lines of {sink.path} are of a version that did not note what they were "
            "made of; they are taken for answers to this input"
        )
    if answers.num_torn:
        warn(f"torn lines in {sink.path}, as a kill or a power cut leaves them: {answers.num_torn}; they are run again")


def make_engine(config: Config, warn: Callable[[str], None]) -> JobEngine:
    """The engine with the model's weights; torch is imported here."""
    from apcbatch.engine.engine import Engine

    use_isa(config)
    return Engine(
        config.model,
        dtype=config.dtype,
        device=config.device,
        exact=config.exact,
        block_size=config.block_size,
        policy=config.policy,
        store=config.store,
        store_size_bytes=config.store_size,
        cache_salt=read_salt(config),
        pool_size_bytes=config.pool_size,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_request_tokens=config.max_request_tokens,
        warn=warn,
    )


def use_isa(config: Config) -> None:
    """Choose the instruction set of the CPU kernels, if the configuration names one."""
    if config.isa is None:
        return
    from apcbatch.kernels.isa import set_isa

    try:
        set_isa(config.isa)
    except ValueError as error:
        raise UsageError(f"{config.origins['isa']}: {error}") from None
