"""Everything that can fail before the first request: paths, input, tokenizer, run file, weights, OUT.

Must not know: the loop. Invariant: OUT and its run file change last, when all the rest is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from apcbatch.config import Config, config_path
from apcbatch.data.lines import STDIN
from apcbatch.data.records import BadLine, Conversation
from apcbatch.data.render import Renderer
from apcbatch.data.source import open_source
from apcbatch.errors import UsageError
from apcbatch.job.answered import Answered, drop_unusable, read_answered
from apcbatch.job.feed import Feeder
from apcbatch.job.paths import STDOUT, check_outputs
from apcbatch.job.runfile import RunFile, input_identity, model_files_digest, run_file_path
from apcbatch.job.salt import read_salt
from apcbatch.job.sink import FileSink, Sink
from apcbatch.model.locate import locate_model
from apcbatch.types import Request


@dataclass
class Parts:
    """What the loop works with."""

    records: Iterator[Conversation | BadLine]
    renderer: Renderer
    engine: Any
    answered: Answered


def check_paths(config: Config, input: str, output: str, config_file: str | None) -> None:
    """Refuse an OUT that would be mixed up with something else; UsageError says what to give instead."""
    if config.summary == STDOUT:
        raise UsageError("--summary needs a file; the summary is the last line on standard output already")
    is_file = output != STDOUT and (os.path.isfile(output) or not os.path.exists(output))
    run_file = run_file_path(output) if is_file else None
    outputs = {"OUT": output, "OUT.run.json": run_file, "--summary": config.summary}
    check_outputs(config, {"INPUT": input, "--config": config_path(config_file)}, outputs)
    if not is_file and config.resume:
        raise UsageError("--resume needs an OUT that can be read back; give -o a file")
    if is_file and os.path.exists(output) and not (config.resume or config.overwrite):
        raise UsageError(
            f"output {output} exists; give --resume to go on with it or --overwrite to replace it"
        )


def open_parts(config: Config, input: str, sink: Sink, warn: Callable[[str], None]) -> Parts:
    """Open what a run needs, cheap things first; raises UsageError (ModelError) for what cannot be used."""
    records = open_source(input, config.format, warn=warn)
    folder = locate_model(config.model)
    renderer = Renderer.load(folder, warn=warn)
    if not isinstance(sink, FileSink):
        return Parts(records, renderer, make_engine(config, warn), Answered())
    run_file = RunFile(sink.path, config, input_identity(input), model_files_digest(folder), sink.disk)
    answered = None
    if config.resume and sink.has_lines():
        same_version = run_file.check()
        answered = read_answered(sink)
        answered.trusts_lines = same_version
        _warn_of(answered, sink, warn)
        confirm_input(config, input, renderer, answered)
    else:
        run_file.check_replaceable()
    engine = make_engine(config, warn)
    with ExitStack() as stack:
        stack.callback(engine.close)
        run_file.set_fingerprint(engine.fingerprint)
        if answered is not None:
            run_file.check()
            answered = drop_unusable(sink, answered, config.retry_errors)
        else:
            sink.truncate()
        run_file.write()
        sink.remove_if_empty = False
        stack.pop_all()
    return Parts(records, renderer, engine, answered or Answered())


def confirm_input(config: Config, input: str, renderer: Renderer, answered: Answered) -> None:
    """Compare what OUT answers with a file INPUT, before anything is changed; a stream is compared as it is read."""
    if input == STDIN or not os.path.isfile(input):
        return
    feeder = Feeder(config, open_source(input, config.format), renderer, answered)
    while not feeder.exhausted and answered.num_shown < len(answered):
        work = feeder.next()
        if isinstance(work, Request) and work.tag.chain is not None:
            for ticket in work.tag.chain.remaining:
                answered.leave(ticket)
    if feeder.exhausted:
        answered.check_all_shown(feeder.last_line, whole=config.limit is None)
    answered.confirmed = True


def _warn_of(answered: Answered, sink: FileSink, warn: Callable[[str], None]) -> None:
    if answered.num_unsigned:
        warn(
            f"{answered.num_unsigned} lines of {sink.path} are of a version that did not note what they were "
            "made of; they are taken for answers to this input"
        )
    if answered.num_torn:
        warn(
            f"torn lines in {sink.path}, as a kill or a power cut leaves them: {answered.num_torn}; "
            "they are run again"
        )


def make_engine(config: Config, warn: Callable[[str], None]) -> Any:
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
    """Run the CPU kernels on the instruction set that the configuration asks for, if it does."""
    if config.isa is None:
        return
    from apcbatch.kernels.isa import set_isa

    try:
        set_isa(config.isa)
    except ValueError as error:
        raise UsageError(f"{config.origins['isa']}: {error}") from None
