"""Everything that can fail before the first request: paths, input, tokenizer, run file, weights, OUT.

Must not know: the loop. Invariant: OUT and its run file change last, when all the rest is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from apcbatch.config import Config
from apcbatch.data.records import BadLine, Conversation
from apcbatch.data.render import Renderer
from apcbatch.data.source import open_source
from apcbatch.errors import UsageError
from apcbatch.job.answered import Answered, read_answered
from apcbatch.job.runfile import RunFile, input_identity, model_files_digest
from apcbatch.job.sink import STDOUT, FileSink, Sink
from apcbatch.model.locate import locate_model


@dataclass
class Parts:
    """What the loop works with."""

    records: Iterator[Conversation | BadLine]
    renderer: Renderer
    engine: Any
    answered: Answered


def check_paths(config: Config, input: str, output: str) -> None:
    """Refuse an OUT that would be mixed up with something else; UsageError says what to give instead."""
    path = Path(output)
    files = {
        "INPUT": input,
        "OUT": output,
        "OUT.run.json": f"{output}.run.json",
        "--summary": config.summary or STDOUT,
    }
    for (name, one), (other_name, other) in combinations(files.items(), 2):
        if STDOUT not in (one, other) and _same_file(one, other):
            raise UsageError(
                f"{name} and {other_name} are the same file, {one}; give one of them another name"
            )
    if config.summary is not None and not Path(config.summary).absolute().parent.is_dir():
        raise UsageError(f"--summary {config.summary}: its folder does not exist; make it first")
    if output == STDOUT and config.resume:
        raise UsageError("--resume needs an OUT that can be read back; give -o a file")
    if path.is_file() and output != STDOUT and not (config.resume or config.overwrite):
        raise UsageError(
            f"output {output} exists; give --resume to go on with it or --overwrite to replace it"
        )


def open_parts(config: Config, input: str, sink: Sink, warn: Callable[[str], None]) -> Parts:
    """Open what a run needs, cheap things first; raises UsageError (ModelError) for what cannot be used."""
    records = open_source(input, config.format)
    folder = locate_model(config.model)
    renderer = Renderer.load(folder, warn=warn)
    if not isinstance(sink, FileSink):
        return Parts(records, renderer, make_engine(config, warn), Answered())
    run_file = RunFile(sink.path, config, input_identity(input), model_files_digest(folder))
    continues = config.resume and sink.has_lines()
    if continues:
        run_file.check()
    engine = make_engine(config, warn)
    run_file.set_fingerprint(engine.fingerprint)
    if continues:
        run_file.check()
        answered = read_answered(sink, config.retry_errors)
    else:
        sink.truncate()
        answered = Answered()
    run_file.write()
    sink.remove_if_empty = False
    return Parts(records, renderer, engine, answered)


def _same_file(one: str, other: str) -> bool:
    """Whether two names lead to one regular file, also where it is still to be made."""
    if os.path.exists(one) and os.path.exists(other):
        return os.path.isfile(one) and os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


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
    from apcbatch.kernels import ops

    try:
        ops.set_isa(config.isa)
    except ValueError as error:
        raise UsageError(f"{config.origins['isa']}: {error}") from None
