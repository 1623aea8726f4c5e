"""Run the loop of a job: read conversations, write one line per request.

Invariants: a line is written when its request finishes; the input is read only as fast as the engine asks for requests,
so prompts and answers do not pile up in memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import orjson

from apcbatch.address import is_address, open_filesystem, output_place, reason_of, shown_address
from apcbatch.config import Config, flag_name
from apcbatch.data.input.inputs import Inputs, find_inputs
from apcbatch.display import counted
from apcbatch.engine.serving import serve
from apcbatch.errors import EXIT_OK, EXIT_REQUEST_ERRORS, EXIT_STOPPED, RequestError, StoppedError
from apcbatch.job.continuation import REPLACED, command_line, command_words, nothing_left
from apcbatch.job.disk import Disk, write_file
from apcbatch.job.feed import Feeder
from apcbatch.job.live import LiveFeeder, stale_records
from apcbatch.job.opening import OpenRun, check_paths, open_run
from apcbatch.job.output import output_for
from apcbatch.job.output_paths import STDOUT, check_summary, default_output, odd_names
from apcbatch.job.planning import work_source
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.printer import Printer
from apcbatch.job.processes import MOST_COMMAND_CHARACTERS, Process, continuing, describe_machine, make_end, plain
from apcbatch.job.record import Ticket, error_record, line_of, result_record
from apcbatch.job.runfile import RunFile, with_earlier_options
from apcbatch.job.signals import Interrupted, Signals
from apcbatch.job.sink import FileSink, Sink, open_sink
from apcbatch.job.tool_workers import TOOLS_LOG_SUFFIX, ToolWorkers, opened_workers
from apcbatch.job.totals import Totals
from apcbatch.job.work import Failure, JobEngine, Work, WorkSource
from apcbatch.model.locate import note_of
from apcbatch.process import LastWords
from apcbatch.resolution import DEFAULT
from apcbatch.types import Request, Result
from apcbatch.version import VERSION

STDOUT_PLACE = "/dev/fd/1"


class Job:
    """One `apcbatch run`. inputs: as the user named them. output: a place, or None for one made from INPUT's name.
    program: shell words that start this program again. config_file: the file of --config, or None. UsageError if OUT's
    name cannot be used, or if none can be made from INPUT's."""

    def __init__(
        self,
        config: Config,
        inputs: Sequence[str],
        output: str | None,
        program: Sequence[str],
        config_file: str | None = None,
    ) -> None:
        self._is_named = output is not None
        place = output_place(default_output(inputs)) if output is None else output
        name = STDOUT if place == STDOUT_PLACE else place
        self._inputs, self._output = tuple(inputs), output_for(name)
        if config.resume and self._output.exists():
            config = with_earlier_options(config, self._output.target)
        self._config = config
        self._program, self._config_file = program, config_file
        self._began = time.time()
        self._totals = Totals()
        self._run_file: RunFile | None = None  # with an entry of this process
        self._process: Process | None = None
        self._earlier_s = 0.0  # from the begin of OUT's first process to this one's
        self._printer = Printer(config, self._totals, name == STDOUT)
        self._signals = Signals(self._final_line)
        self._last_words: LastWords | None = None
        self._out_is_ours = False
        self._workers: ToolWorkers | None = None
        self._live: LiveFeeder | None = None
        self._retryable_errors = 0
        self._strict_stop = False
        self._places: Sequence[int] = ()  # as in PreviousAnswers

    def run(self) -> int:
        """Run the job and return its exit code. Raises ApcbatchError, or Interrupted if a signal comes while
        loading."""
        inputs, output = find_inputs(self._inputs, self._printer.warn), self._output
        config = self._config
        check_paths(config, inputs, output, self._config_file, self._is_named)
        for sentence in odd_names(output.name, config.origins["report"], config.report):
            self._printer.warn(sentence)
        with (
            self._signals,
            self._printer,
            self._with_last_words(),
            closing(open_sink(output.lines, self._config.ordered)) as sink,
            opened_workers(
                config, output.target + TOOLS_LOG_SUFFIX if isinstance(sink, FileSink) else None, self._printer.warn
            ) as self._workers,
        ):
            if output.is_built_at_the_end:
                self._printer.note(f"results go to {output.lines} here, and to {output.shown} when the run ends")
            elif not self._is_named:
                self._printer.note(f"results go to {output.shown}")
            if (note := note_of(self._config.model)) is not None:
                self._printer.hint(note)
            opened = open_run(
                self._config, inputs, output, sink, self._printer, self._workers.digest if self._workers else None
            )
            self._config = opened.config
            self._out_is_ours = isinstance(sink, FileSink)
            if self._last_words is not None:
                self._last_words.replace(self._words_if_ended())
            if opened.engine is None:
                self._begin(opened.answers)
                self._places = opened.answers.places
                return self._end(None, sink, self._exit_code(opened.answers.num_errors, is_complete=True))
            with ExitStack() as ending:
                ending.callback(opened.engine.close)
                ending.callback(opened.engine.abort)  # called before close
                self._begin_process(opened, opened.engine, inputs)
                try:
                    return self._answer(opened, opened.engine, sink)
                except StoppedError as error:
                    self._end_process(error.exit_code, self._totals.summary(self._config, opened.engine))
                    raise

    @property
    def config(self) -> Config:
        """The options of the run; with --resume, those that are not given are the earlier run's."""
        return self._config

    @property
    def output(self) -> str:
        """Path of OUT on this machine; an OUT with an address has one too."""
        return self._output.target

    def continue_command(self) -> str:
        """Return the shell command that continues this run. Before OUT is open, and if OUT is a stream, it starts the
        same run again."""
        config = self._config
        if self._out_is_ours:
            added = ["--resume"] + ["--retry-errors"] * (self._retryable_errors > 0)
        else:
            names = ("overwrite", "retry_errors" if config.retry_errors else "resume")
            added = [flag_name(name) for name in names if getattr(config, name)]
        return command_line(self._command_words(added))

    def _command_words(self, added: Sequence[str]) -> list[str]:
        output, config_file = self._output.name, self._config_file
        return command_words(self._program, self._inputs, output, config_file, self._config, added)

    def _final_line(self) -> str:
        """Return the command for the second signal, which ends this process."""
        if self._last_words is not None:
            self._last_words.replace("")
        return self.continue_command()

    @contextmanager
    def _with_last_words(self) -> Iterator[None]:
        """In a run on a cluster, have the command that continues it printed even if Ray's C++ code ends this
        process."""
        if self._config.ray is None:
            yield
            return
        self._last_words = LastWords(self._words_if_ended())
        try:
            yield
        finally:
            self._last_words.close()

    def _words_if_ended(self) -> str:
        return (
            "apcbatch: this process was ended from outside: by a kill, or by Ray, which ends it where it has lost the "
            "cluster; see that the cluster is up, and continue with --resume, with or without --ray\n"
            f"{self.continue_command()}\n"
        )

    def last_line(self, exit_code: int) -> str:
        """Return the last line for stderr: the command that continues the run, or a sentence that nothing is left to
        do, if every error would recur."""
        if exit_code == EXIT_REQUEST_ERRORS and not self._retryable_errors:
            return nothing_left(self._output.shown, self._totals.errors_by_code)
        return self.continue_command()

    def _begin_process(self, opened: OpenRun, engine: JobEngine, inputs: Inputs) -> None:
        """Write the entry of this process into the run file, if there is one."""
        if opened.run_file is None:
            return
        config = self._config
        added = [flag_name(name) for name in REPLACED if config.origins[name] == flag_name(name)]
        process = Process(
            version=VERSION,
            begin=self._began,
            command=plain(command_line(self._command_words(added)), MOST_COMMAND_CHARACTERS),
            input=plain(inputs.shown),
            options=[
                (name, plain(value), plain(config.origins[name]))
                for name, value in config.values().items()
                if config.origins[name] != DEFAULT
            ],
            model=plain(config.model),
            dtype=engine.dtype,
            device=engine.device,
            machine=describe_machine(engine.device),
            continue_command=continuing(self.continue_command()),
            end=None,
        )
        self._run_file = opened.run_file
        self._write_process(process)
        self._earlier_s = opened.run_file.seconds_before(process)

    def _end_process(self, exit_code: int, summary: dict[str, Any]) -> None:
        """Write the end of this process into its entry."""
        if self._process is not None:
            is_done = exit_code == EXIT_OK or (exit_code == EXIT_REQUEST_ERRORS and not self._retryable_errors)
            command = None if is_done else continuing(self.continue_command())
            end = make_end(self._totals.elapsed_s(), exit_code, summary)
            self._write_process(replace(self._process, continue_command=command, end=end))

    def _write_process(self, process: Process) -> None:
        """Write an entry of this process. A run file that cannot be written causes a warning, and is not tried
        again."""
        assert self._run_file is not None
        try:
            self._run_file.record(process)
            self._process = process
        except OSError as error:
            self._process = None
            self._printer.warn(
                f"{self._run_file.path} cannot be written: {error.strerror}; a report of this run shows less"
            )

    def _now_s(self) -> float:
        """Return the seconds since OUT's first process began."""
        return self._earlier_s + self._totals.elapsed_s()

    def _answer(self, opened: OpenRun, engine: JobEngine, sink: Sink) -> int:
        """Answer every request, then end the run; return the exit code."""
        answers, shard, references = opened.answers, opened.shard, opened.references
        given = self._config, opened.records, opened.renderer, answers
        self._live = None if self._workers is None else LiveFeeder(*given, engine, self._workers)
        feeder = self._live or Feeder(*given, False, references, shard)
        self._totals.ignored_columns = feeder.ignored_columns
        source = work_source(self._config, feeder, engine)
        self._begin(answers)
        self._describe(engine)
        self._signals.drain_on_first()
        if self._live is None:  # a live episode is not interrupted: its answers are still written
            opened.renderer.tokenizer.check_stop = self._signals.check
        self._printer.begin_progress()
        is_first = True
        for results in serve(
            engine, lambda: self._next_request(engine, source, opened, sink), lambda: self._strict_stop
        ):
            if is_first:
                self._printer.hint(source.opening())
                is_first = False
            for result in results:
                if self._live is None:
                    self._finish_request(result, opened, sink)
                if not self._should_stop(engine) or self._live is not None:
                    with suppress(Interrupted):  # while a long text is tokenised
                        for work in source.follow_up(result):
                            self._submit(work, engine, sink)
            self._should_stop(engine)  # at each step: with a full queue no request is asked for until one ends
            self._printer.tick(source.total)
            sink.sync_if_due()
        if self._live is not None:
            self._end_live(self._live, opened, sink)
        is_complete = source.exhausted and source.total == self._totals.requests
        exit_code = self._exit_code(answers.num_errors, is_complete)
        if references is not None and references.earlier is not None and source.exhausted:
            references.earlier.warn_if_unused(self._printer.warn)
        self._totals.plan_s = source.plan_s
        if source.beyond_window_tokens:
            self._printer.note(
                f"a larger --window-tokens would have restored up to {source.beyond_window_tokens:,} tokens more, "
                "which earlier windows had"
            )
        if shard is not None and is_complete and self._run_file is not None:
            self._run_file.set(shard_requests=[feeder.num_requests, feeder.num_requests - feeder.num_elsewhere])
        elif feeder.exhausted and self._config.limit is None and not answers.is_compared:
            self._totals.answers_without_line = answers.count_rest()
            self._totals.already_done -= self._totals.answers_without_line
        self._places = answers.places
        return self._end(engine, sink, exit_code)

    def _begin(self, answers: PreviousAnswers) -> None:
        done = len(answers) - answers.num_without_line
        self._totals.begin_running(already_done=done)
        self._totals.answers_without_line = answers.num_without_line
        self._retryable_errors = answers.num_retryable
        if done:
            are = "is" if done == 1 else "are"
            self._printer.note(f"{counted(done, 'request')} {are} answered in {self._output.shown} already")

    def _describe(self, engine: JobEngine) -> None:
        config = self._config
        place = engine.device if config.gpus == 1 else f"{config.gpus} GPUs"
        gain = f", at least {config.min_gain_tokens} tokens saved by a snapshot for later runs"
        self._printer.detail(
            f"model {config.model}, {engine.dtype} on {place}; block size {config.block_size}, policy {config.policy}, "
            f"store {config.store or 'none'}" + gain * (engine.reading_tokens is not None)
        )

    def _next_request(self, engine: JobEngine, source: WorkSource, opened: OpenRun, sink: Sink) -> Request | None:
        """Return the next request for the engine, after writing the failures before it to OUT. None if no request is
        available now, or if the job must stop."""
        while not self._should_stop(engine) and not source.exhausted:
            if source.num_open_rollouts >= self._config.max_running:
                return None  # the next turns of open rollouts go before new conversations
            try:
                is_paused = source.pause()
                work = None if is_paused else source.next()
            except Interrupted:  # while a long text is tokenised
                continue
            self._write_ended(opened, sink)
            if is_paused:
                return None
            if isinstance(work, Request):
                return work
            if work is not None:
                self._write_error(work.ticket, work.error, sink)
        return None

    def _write_ended(self, opened: OpenRun, sink: Sink) -> None:
        """Write the turns and failures of live episodes whose tools have answered."""
        for one in () if self._live is None else self._live.take_ended():
            if isinstance(one, Failure):
                self._write_error(one.ticket, one.error, sink)
            else:
                self._finish_request(one, opened, sink)

    def _end_live(self, live: LiveFeeder, opened: OpenRun, sink: Sink) -> None:
        """Write the last turns, also those whose tools have not answered at a signal. Remove the turns that were
        answered anew."""
        for _ in live.drain():
            self._write_ended(opened, sink)
        self._write_ended(opened, sink)
        self._totals.idle_s, self._totals.restarted = live.idle_s, live.stage.num_restarted
        if live.stage.num_restarted and isinstance(sink, FileSink) and (stale := stale_records(sink.lines(), False)):
            sink.keep(lambda offset, line: offset not in stale)

    def _submit(self, work: Work, engine: JobEngine, sink: Sink) -> None:
        if isinstance(work, Failure):
            self._write_error(work.ticket, work.error, sink)
        else:
            engine.submit(work)

    def _finish_request(self, result: Result, opened: OpenRun, sink: Sink) -> None:
        ticket: Ticket = result.tag.ticket
        if result.error is not None:
            self._write_error(ticket, result.error, sink)
            return
        output_parser, now, ended = result.tag.output_parser, int(time.time()), result.tag.ended
        try:
            model, end_s = self._config.model, self._now_s() - (0.0 if ended is None else time.monotonic() - ended)
            record = result_record(ticket, result, opened.renderer, model, now, output_parser, end_s)
        except RequestError as error:  # the tokenizer cannot decode it
            self._write_error(ticket, error, sink)
            return
        sink.append(line_of(record))
        self._totals.add(result)
        self._totals.answers.add(record)
        self._totals.episodes.add(record["apcbatch"])
        if self._config.score and result.scores is not None:
            self._totals.scores.add(result.scores)
        self._printer.result(ticket.shown, result)

    def _write_error(self, ticket: Ticket, error: RequestError, sink: Sink) -> None:
        where = f" ({ticket.file_line[0]}, line {ticket.file_line[1]})" if ticket.file_line else ""
        located = RequestError(error.code, error.message + where, ticket.line)
        sink.append(line_of(error_record(ticket, located, self._now_s())))
        self._totals.add_error(located.code)
        self._totals.episodes.add(ticket.live)
        self._retryable_errors += error.retryable
        self._strict_stop |= self._config.strict
        self._printer.error(ticket.shown, located)

    def _should_stop(self, engine: JobEngine) -> bool:
        """Return whether no further request may begin. At the first signal, drop the waiting requests."""
        if self._signals.take_first():
            engine.drop_waiting()
            self._printer.note(
                f"stopping: {engine.num_unfinished} running requests are finished first; a second signal stops at once"
            )
        return self._strict_stop or self._signals.exit_code is not None

    def _exit_code(self, earlier_errors: int, is_complete: bool) -> int:
        """Return the exit code. earlier_errors: error records that OUT had before. is_complete: every request is
        answered, so a signal has stopped nothing."""
        if self._signals.exit_code is not None and not is_complete:
            return self._signals.exit_code
        if self._strict_stop:
            return EXIT_STOPPED
        return EXIT_REQUEST_ERRORS if self._totals.errors + earlier_errors else EXIT_OK

    def _end(self, engine: JobEngine | None, sink: Sink, exit_code: int) -> int:
        """Make everything durable, then print the summary. engine: None if nothing was left to answer. Return the exit
        code; EXIT_STOPPED if OUT could not be compressed or uploaded."""
        self._printer.end_progress()
        sink.finish(self._config.ordered, self._places)
        if engine is not None:
            engine.flush()
        answers = self._totals.answers
        if num_cut := answers.doubts(vars(self._config)).get("cut"):
            self._printer.note(
                f"{num_cut:,} of {answers.num_choices:,} answers are cut: they reached their limit of tokens before "
                "their end; give a larger --max-tokens, or max_tokens where lines have their own"
            )
        if (episodes := self._totals.episodes.sentence()) is not None:
            self._printer.note(episodes)
        summary = self._totals.summary(self._config, engine)
        place = self._output.shown
        if isinstance(sink, FileSink) and self._output.is_built_at_the_end:
            place, exit_code = self._make_output(sink, exit_code)
        self._end_process(exit_code, summary)
        self._printer.summary(summary, place)
        if self._config.summary is not None:
            self._write_summary(self._config.summary, orjson.dumps(summary, option=orjson.OPT_APPEND_NEWLINE))
        return exit_code

    def _make_output(self, sink: FileSink, exit_code: int) -> tuple[str, int]:
        """Compress and upload OUT if the run is complete. Return the place of the results, and the exit code."""
        output = self._output
        if exit_code not in (EXIT_OK, EXIT_REQUEST_ERRORS):
            return f"{output.lines}, for {output.shown} is made when the run is complete", exit_code
        try:
            output.finish(sink)
        except StoppedError as error:
            self._printer.warn(str(error))
            return output.lines if os.path.exists(output.lines) else output.target, EXIT_STOPPED
        return output.shown + f" and {output.target}" * output.is_remote, exit_code

    def _write_summary(self, name: str, document: bytes) -> None:
        try:
            check_summary(name, self._config)  # another program may have written there meanwhile
            if is_address(name):
                system, path = open_filesystem(name)
                system.pipe_file(path, document)
            else:
                write_file(name, [document], Disk())
        except Exception as error:  # the package of an address may raise anything; the answers are safe
            self._printer.warn(f"--summary {shown_address(name)} was not written: {reason_of(error, name)}")
