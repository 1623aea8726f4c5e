"""Open everything that a run needs before its first request: paths, input, tokenizer, run file, weights, OUT.

Invariant: OUT and its run file are changed last, after everything else is open.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from apcbatch.address import is_stream, shown_address
from apcbatch.config import Config
from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.render_ahead import render_ahead
from apcbatch.data.checks import shown
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.generation_config import notice, with_model_defaults
from apcbatch.data.input.files import STDIN
from apcbatch.data.input.inputs import RUN_FILE_SUFFIX, Inputs
from apcbatch.data.input.layouts import LineOptions
from apcbatch.data.input.source import open_source
from apcbatch.data.model_files import model_files_digest
from apcbatch.data.template_options import ChatOptions
from apcbatch.data.tokenization.no_tokenizer import check_first
from apcbatch.draft_sources import draft_sources
from apcbatch.errors import UsageError
from apcbatch.job.feed import Feeder
from apcbatch.job.input_changes import InputChanges, MovedLines
from apcbatch.job.live import stale_records
from apcbatch.job.output import Output, check_out, check_run_file
from apcbatch.job.output_paths import STDOUT, check_outputs, check_summary
from apcbatch.job.planning import with_measured_gain
from apcbatch.job.previous_answers import PreviousAnswers, drop_unusable, last_answers, read_answers
from apcbatch.job.printer import Printer
from apcbatch.job.references import EarlierAnswers, References, open_earlier
from apcbatch.job.request import read_salt
from apcbatch.job.runfile import RunFile, input_identity, read_run_file, run_file_path, with_clock_of
from apcbatch.job.shards import ShardLines
from apcbatch.job.sink import FileSink, Sink
from apcbatch.job.tool_workers import TOOLS_LOG_SUFFIX, check_live_options
from apcbatch.job.work import JobEngine
from apcbatch.model.adapter import about_weights, adapter_digest
from apcbatch.model.families import family_of, load_model_config
from apcbatch.model.locate import locate_model
from apcbatch.model.own_dtype import with_own_dtype
from apcbatch.model.weight_files import WeightFiles, ignored_tensors, weights_if_there
from apcbatch.regular_files import digest_of
from apcbatch.resolution import config_path
from apcbatch.types import Request

MANY_FILES = 10_000  # opening them takes seconds
MOST_COUNTED = 256  # lines read ahead to bound the number of workers
Records = Iterator[Conversation | BadLine]
CLUSTER_OPTIONS = ("workers", "worker_cpus", "worker_gpus", "worker_memory", "worker_timeout")


@dataclass
class OpenRun:
    """Open parts of a run. config: with --generation-config auto, it includes the model's defaults. engine: None if OUT
    answers every request of INPUT: no weights are loaded. references: None if no drafts come from known answers.
    run_file: None if OUT is a stream, and without an engine. shard: None without --shard."""

    config: Config
    records: Records
    renderer: Renderer
    engine: JobEngine | None
    answers: PreviousAnswers
    references: References | None = None
    run_file: RunFile | None = None
    shard: ShardLines | None = None


def check_paths(config: Config, inputs: Inputs, output: Output, config_file: str | None, is_named: bool) -> None:
    """Refuse options that exclude each other, and outputs that would destroy another file; UsageError says what to give
    instead. Changes nothing but left temporary files (check_outputs). is_named: -o gives OUT's name."""
    check_cluster(config)
    _check_live(config, output)
    is_file = output.target != STDOUT and (os.path.isfile(output.target) or not os.path.exists(output.target))
    if config.shard is not None:
        _check_shard(config, inputs, output, is_named and is_file)
    if config.score and config.turns in ("rollout", "live"):
        raise UsageError(
            f"{config.origins['score']} scores recorded answers, and {config.origins['turns']} {config.turns} puts "
            "generated ones in their place; give --turns each or last"
        )
    if config.report is not None and not is_file:
        raise UsageError(f"{config.origins['report']} reads OUT when the run ends; give -o a file")
    if config.summary == STDOUT:
        raise UsageError("--summary needs a file; the summary is the last line on standard output already")
    earlier, flag = config.draft_from, config.origins.get("draft_from", "")
    read = {"--config": config_path(config_file), flag: earlier}
    if earlier is not None:
        read[f"the run file of {flag}"] = run_file_path(earlier)
    check_outputs(config, inputs.files, read, _written(config, output, is_file))
    if earlier is not None:
        open_earlier(earlier, flag).close()
    _check_existing(config, output, is_file)


def _check_live(config: Config, output: Output) -> None:
    """Refuse --turns live without --tools, --tools or another option of episodes without --turns live, and options that
    live episodes do not support."""
    if (config.tools is None) == (config.turns == "live"):
        path = run_file_path(output.target)
        earlier = ((read_run_file(path)[0] or {}) if config.resume else {}).get("config", {}).get("tools")
        if earlier is not None and config.tools is None:
            raise UsageError(f"{path} is of a run with --tools {shown(earlier)}; give that again: no file names code")
        raise UsageError(
            "--turns live needs --tools PACKAGE.MODULE:FACTORY, and --tools needs --turns live; give both, or neither"
        )
    check_live_options(config)
    for name, reason in (
        ("ray", "tools run on the machine of the engine"),
        ("shard", "shards of episodes are not known"),
        ("draft_from", "its answers are not known by turns of episodes"),
    ):
        if config.turns == "live" and getattr(config, name) is not None:
            given = f"{config.origins[name]} cannot be used with {config.origins['turns']} live"
            raise UsageError(f"{given}: {reason}; leave one of them out")


def _check_shard(config: Config, inputs: Inputs, output: Output, has_own_file: bool) -> None:
    """Refuse what --shard cannot be used with. has_own_file: -o names a file."""
    flag = f"{config.origins['shard']} {config.shard}"
    if config.ray is not None:
        raise UsageError(f"{flag} runs without a cluster, and {config.origins['ray']} runs on one; give one of them")
    if any(name == STDIN or is_stream(name) for name in inputs.files):
        raise UsageError(f"{flag} reads INPUT twice, which a stream cannot be; give a file that all shards can read")
    if not has_own_file:
        raise UsageError(f"{flag} needs an OUT of its own, which `apcbatch merge` can read; give -o a file")
    found = {os.path.realpath(os.path.dirname(name)) for name in inputs.files if name not in inputs.given}
    if not found.isdisjoint(os.path.realpath(os.path.dirname(name)) for name in (output.name, output.target)):
        raise UsageError(
            f"{flag}: {output.shown} lies where INPUT's files are found, so that shards would read each other's OUT; "
            "put OUT into another folder"
        )


def _written(config: Config, output: Output, is_file: bool) -> dict[str, str | None]:
    """Return every place that the run writes to, by its name in error sentences. is_file: OUT is no stream."""
    outputs = {"OUT": output.target, "--summary": config.summary, "--report": config.report}
    if is_file:
        outputs["OUT.run.json"] = run_file_path(output.target)
    if is_file and config.tools is not None:
        outputs["OUT.tools.log"] = output.target + TOOLS_LOG_SUFFIX
    if output.packing:
        outputs["OUT.part"] = output.lines
    if output.is_remote:
        outputs["the address of OUT"] = output.name
        outputs["the address of OUT.run.json"] = output.name + RUN_FILE_SUFFIX
    return outputs


def _check_existing(config: Config, output: Output, is_file: bool) -> None:
    """Refuse to replace an OUT, or a summary, that is there, unless the options say that it may be replaced."""
    if not is_file and config.resume:
        raise UsageError("--resume needs an OUT that can be read back; give -o a file")
    if is_file and not (config.resume or config.overwrite) and output.exists():
        raise UsageError(f"output {output.shown} exists; give --resume to continue it or --overwrite to replace it")
    if config.overwrite and output.packing:
        check_out(output.lines)
    if output.is_remote:
        output.check_address(config)
    if config.summary is not None:
        try:
            check_summary(config.summary, config)
        except OSError as error:
            shown = shown_address(config.summary)
            raise UsageError(f"--summary {shown}: {error.strerror}; give another file, or --overwrite") from None


def open_run(
    config: Config, inputs: Inputs, output: Output, sink: Sink, printer: Printer, tools: str | None = None
) -> OpenRun:
    """Open what a run needs, cheap parts first. tools: digest of the module of --tools. Raises UsageError for a part
    that cannot be used; for a bad model, its subclass ModelError.

    The steps check the model's files, the first lines of INPUT, OUT, and the weights. Until then nothing is changed,
    except that _make_run_file may have unpacked OUT. Then _begin_out changes OUT, and after it its run file. If OUT
    is complete, no weights are loaded and _keep_out runs instead of _begin_out."""
    warn, note, stage = printer.warn, printer.note, printer.stage
    stage("reading the tokenizer")
    lines = LineOptions.of(config)
    records = open_source(inputs, lines, warn=warn)
    folder = locate_model(config.model)
    with weights_if_there(folder) as files:
        config = _read_model(config, folder, files, note)
        if config.resume and isinstance(sink, FileSink):
            config = with_clock_of(config, run_file_path(output.target))
        chats = ChatOptions.of(config, load_model_config(folder).context_length)
        renderer = Renderer.load(folder, warn=warn, options=chats)
        if not (config.score or config.ignore_eos):
            (note if renderer.tokenizer.eos_token_ids else warn)(renderer.tokenizer.ends())
        records, most_workers = _check_first_lines(records, config, inputs, renderer, folder)
        shard = None if config.shard is None else _find_shard(config.shard, config, inputs, lines, renderer)
        if config.draft_from is not None:
            stage("reading the earlier answers")
        references = References.of(config, renderer, EarlierAnswers.of(config, folder, warn))
        run_file = answers = None
        if isinstance(sink, FileSink):
            if len(inputs.files) >= MANY_FILES:
                note(f"{len(inputs.files):,} files: both ends of each are read first, for --resume to compare")
            if shard is not None:
                stage("reading INPUT, for --resume and merge to compare")
            run_file = _make_run_file(config, inputs, output, sink, folder, lines, chats, tools)
            answers, is_complete = _compare_out(config, inputs, sink, renderer, run_file, printer)
            if answers is not None and is_complete:
                return OpenRun(config, records, renderer, None, _keep_out(config, sink, answers, run_file))
        stage(f"loading {config.model}")
        engine = _open_engine(config, warn, note, most_workers, files)
    if run_file is not None and isinstance(sink, FileSink):
        with ExitStack() as undo:
            undo.callback(engine.close)
            answers = _begin_out(config, output, sink, engine, answers, run_file)
            undo.pop_all()
    config = with_measured_gain(config, engine.reading_tokens)
    if not answers and shard is None:  # a conversation that is answered, here or elsewhere, is not rendered
        records = _with_texts_ahead(records, config, inputs, renderer)
    return OpenRun(config, records, renderer, engine, answers or PreviousAnswers(), references, run_file, shard)


def _find_shard(shard: str, config: Config, inputs: Inputs, lines: LineOptions, renderer: Renderer) -> ShardLines:
    """Return the lines of a shard, which reads INPUT itself. UsageError if the template would give each shard other
    prompts."""
    if renderer.template.reads("strftime_now") and config.template_date is None:
        raise UsageError(
            "the chat template puts the date into prompts (strftime_now), which may differ between shards; give all of "
            "them the same --template-date YYYY-MM-DD"
        )
    records = islice(open_source(inputs, lines), config.limit)
    return ShardLines(shard, config, _with_texts_ahead(records, config, inputs, renderer), renderer)


def _read_model(config: Config, folder: Path, files: WeightFiles | None, note: Callable[[str], None]) -> Config:
    """Return the options with the model's own defaults and dtype. files: see _open_engine. Checks its architecture,
    before its tokenizer is read, and --stop-token-id; changes nothing."""
    config = with_own_dtype(with_model_defaults(config, folder), note, files)
    load_model_config(folder)
    if (sentence := notice(config, folder)) is not None:
        note(sentence)
    check_stop_tokens(config, folder)
    return config


def _check_first_lines(
    records: Records, config: Config, inputs: Inputs, renderer: Renderer, folder: Path
) -> tuple[Records, int | None]:
    """Read lines ahead; return the same records, and the largest number of workers that can have work, None without a
    bound. Checks that the model has the template and the tokenizer that the first line needs; changes nothing."""
    first = next(records, None)
    if isinstance(first, Conversation) and first.prompt is None and first.text is None:
        renderer.template.warn_if_fallback()  # before the weights are loaded; for later records the renderer warns
    if first is not None:
        records = chain([first], records)
    most_workers = None
    if config.ray is not None and STDIN not in inputs.files:  # reading ahead on stdin may block
        ahead = list(islice(islice(records, config.limit), MOST_COUNTED))
        records = chain(ahead, records)
        if len(ahead) < MOST_COUNTED:  # a line has at most one request per message
            requests = (max(1, len(one.messages)) if isinstance(one, Conversation) else 1 for one in ahead)
            most_workers = max(1, sum(requests))
    if not renderer.tokenizer.reads_text:
        records = check_first(records, folder)
        if config.stop:
            raise UsageError(f"{config.origins['stop']} needs a tokenizer, and {folder} has none; leave it out")
    return records, most_workers


def _make_run_file(
    config: Config,
    inputs: Inputs,
    output: Output,
    sink: FileSink,
    folder: Path,
    lines: LineOptions,
    chats: ChatOptions,
    tools: str | None,
) -> RunFile:
    """Make this run's run file, which is not written yet. Checks, with --resume, that OUT at its address is this run's,
    after unpacking a compressed OUT beside it."""
    target, files = Path(os.path.abspath(output.target)), model_files_digest(folder)
    given = lines.system_prompt, chats.chat_template, config.adapter and adapter_digest(Path(config.adapter))
    digest = digest_of(inputs.files) if config.shard is not None and inputs.are_files else None
    run_file = RunFile(target, config, input_identity(inputs), files, sink.disk, *given, digest, tools)
    if config.resume:
        run_file.keep_processes()
        output.unpack(sink)
        run_file.check_uploaded(output.shown, output.uploaded_run_file, not output.is_uploaded)
    return run_file


def _compare_out(
    config: Config, inputs: Inputs, sink: FileSink, renderer: Renderer, run_file: RunFile, printer: Printer
) -> tuple[PreviousAnswers | None, bool]:
    """Return the answers in OUT, None if it has no lines to continue, and whether they answer every request. Checks
    that OUT is of the same run, or that its run file may be replaced; changes nothing."""
    if not (config.resume and sink.has_lines()):
        check_run_file(run_file.path)
        if config.resume and not sink.is_empty:
            run_file.earlier()  # without one it is another program's file, and no torn first line
        return None, False
    printer.stage("comparing the answers that are there with the input")
    same_version = run_file.check()
    if run_file.has_other_tools:
        printer.warn(f"the module of --tools {config.tools} has changed since {sink.path} was begun")
    answers = read_answers(sink, stale_records(sink.lines(), config.retry_errors) if config.turns == "live" else None)
    answers.trusts_lines, answers.same_draw_rule = same_version, run_file.same_draw_rule
    _warn_about(answers, sink, printer.warn)
    is_complete = compare_input(config, inputs, renderer, answers, run_file)
    changes = answers.changes
    if changes is not None:
        run_file.set(moved=changes.stretches)
        if run_file.has_other_input or changes.has_corrections:
            printer.note(changes.sentence())
    if not (is_complete or answers.same_draw_rule):
        run_file.keep_earlier("draws")
    return answers, is_complete


def _keep_out(config: Config, sink: FileSink, answers: PreviousAnswers, run_file: RunFile) -> PreviousAnswers:
    """Keep an OUT that answers every request; return its answers. Drops its unusable lines and writes its run file, if
    either differs."""
    sink.remove_if_unused = False
    if run_file.has_other_input or answers.has_dropped:
        answers = drop_unusable(sink, answers, config.retry_errors)
        run_file.keep_earlier("model_fingerprint")
        run_file.write()
    return answers


def _begin_out(
    config: Config,
    output: Output,
    sink: FileSink,
    engine: JobEngine,
    answers: PreviousAnswers | None,
    run_file: RunFile,
) -> PreviousAnswers | None:
    """Make OUT ready for new lines; return the answers that stay in it. Checks that OUT is of this model's weights, or
    still as empty as it was. Changes OUT, then writes its run file, then uploads that."""
    run_file.set(model_fingerprint=engine.fingerprint)
    if answers is not None:
        run_file.check()
        answers = drop_unusable(sink, answers, config.retry_errors)
        if draft_sources(config) and config.ray is None:  # a worker makes drafts only from its own answers
            for token_ids in last_answers(sink, config.draft_memory, engine.vocab_size):
                engine.learn_answer(token_ids)
    else:
        if not (config.resume or config.overwrite or sink.is_empty):
            raise UsageError(f"output {sink.path} was written to by another program while this run began")
        sink.truncate()
    run_file.write()
    sink.remove_if_unused = False
    if output.is_remote:
        output.upload(str(run_file.path), RUN_FILE_SUFFIX)  # fails now if the address cannot be written
    return answers


def _with_texts_ahead(records: Records, config: Config, inputs: Inputs, renderer: Renderer) -> Records:
    """Return the same records, with the texts of those that come next made ahead where no line may be waited for, and
    prompts do not depend on answers."""
    if config.score or config.turns in ("rollout", "live") or not inputs.are_files:
        return records
    return render_ahead(islice(records, config.limit), renderer, config.turns)


def compare_input(
    config: Config, inputs: Inputs, renderer: Renderer, answers: PreviousAnswers, run_file: RunFile
) -> bool:
    """Compare the answers in OUT with INPUT before anything is changed. Return whether every request is answered.

    Lines beyond --limit are compared too, since an answer may belong to one of them. Streams and addresses are compared
    while the run reads them: a stream cannot be read twice, and reading an address again costs time and money. A shard
    needs no comparison, as its INPUT may not change.
    """
    is_complete = not (answers.num_torn or (config.retry_errors and answers.num_retryable))
    if config.turns == "live":
        return False  # its turns are not known before they are played
    if config.shard is not None:
        return is_complete and run_file.is_shard_answered(len(answers))
    if not inputs.are_files:
        return False
    changes = answers.changes = InputChanges(MovedLines(run_file.moved))
    source = open_source(inputs, LineOptions.of(config))
    feeder = Feeder(replace(config, limit=None), source, renderer, answers)
    limit = math.inf if config.limit is None else config.limit
    while not feeder.exhausted and (
        run_file.has_other_input or answers.num_seen < len(answers) or (is_complete and feeder.num_lines <= limit)
    ):
        work = feeder.next()
        is_complete &= work is None or feeder.num_lines > limit
        if isinstance(work, Request) and work.tag.rollout is not None:
            answers.settle_unreached(work.tag.rollout.remaining, is_same=True)
    if feeder.exhausted:
        answers.settle_rest()
    changes.end()
    if changes.is_another_input:
        raise UsageError(
            f"no line of {inputs.shown} is as it was when {run_file.output} was begun ({changes.sentence()}): "
            "continuing would keep none of the answers. Give the input of that run, or another -o, or --overwrite to "
            "begin anew"
        )
    answers.same_draw_rule = True
    return is_complete


def _warn_about(answers: PreviousAnswers, sink: FileSink, warn: Callable[[str], None]) -> None:
    if answers.num_without_digests:
        warn(
            f"{answers.num_without_digests} lines of {sink.path} are of a version that did not note what they were "
            "made of; they are taken for answers to this input"
        )
    if answers.num_torn:
        warn(f"torn lines in {sink.path}, as a kill or a power cut leaves them: {answers.num_torn}; they are run again")


def check_stop_tokens(config: Config, folder: Path) -> None:
    """Refuse a --stop-token-id that the model does not have. An unknown id in a line fails that request alone."""
    if not config.stop_token_id:
        return
    highest, vocab_size = max(config.stop_token_id), load_model_config(folder).vocab_size
    if highest >= vocab_size:
        raise UsageError(
            f"{config.origins['stop_token_id']} is {highest}; the model {config.model} has the token ids 0 to "
            f"{vocab_size - 1}"
        )


def check_cluster(config: Config) -> None:
    """Refuse worker options without --ray, and values of --device, --gpus and --worker-gpus that contradict each
    other."""
    origins = config.origins
    given = [name for name in CLUSTER_OPTIONS if getattr(config, name) != getattr(Config, name)]
    if config.ray is None:
        if given:
            raise UsageError(f"{origins[given[0]]} is for a run on a cluster; give --ray local, auto or HOST:PORT too")
        return
    if config.device == "cuda" and config.worker_gpus == 0:
        raise UsageError(
            f"{origins['device']} cuda needs a GPU for each worker, and {origins['worker_gpus']} gives none"
        )
    if config.gpus > 1 and config.worker_gpus == 0:
        raise UsageError(
            f"{origins['gpus']} {config.gpus} asks for GPUs of each worker, and {origins['worker_gpus']} gives none"
        )
    if config.device == "cpu" and config.worker_gpus:
        raise UsageError(
            f"{origins['device']} cpu uses no GPU, and {origins['worker_gpus']} asks for one; leave one out"
        )


def _open_engine(
    config: Config,
    warn: Callable[[str], None],
    note: Callable[[str], None],
    most_workers: int | None,
    files: WeightFiles | None,
) -> JobEngine:
    """Open the engine of a run, in this process or on a cluster. note: called with sentences about quantised weights,
    an adapter and tensors that are ignored, and when a worker comes or goes. most_workers: largest number of workers
    that can have work; None for no bound. files: the model's, None if they are not there."""
    if config.ray is None:
        folder = locate_model(config.model)
        ignored = files and ignored_tensors(files, family_of(load_model_config(folder)).ignored)
        for sentence in (*about_weights(folder, config), *([ignored] if ignored else [])):
            note(sentence)
        return make_engine(config, warn, files)
    from apcbatch.cluster.sizing import open_cluster

    salt = read_salt(config)
    return open_cluster(config, config.ray, salt, warn, note, lambda request: request.tag.ticket.line, most_workers)


def make_engine(config: Config, warn: Callable[[str], None], files: WeightFiles | None = None) -> JobEngine:
    """Import torch, open the engine and load the model's weights. files: see open_parts."""
    from apcbatch.engine.engine import open_engine

    return open_engine(config, read_salt(config), warn, files)
