"""Print a run: a line for each request, stages, the progress bar or plain progress lines, warnings, the summary.

All that a job prints goes through here, except results on standard output (sink.py) and the last line on stderr. A pipe
gets stable columns and a summary in JSON. A terminal gets colours, lines folded at its width, and a summary for people.

With `-o -`, standard output has only the results, and everything else goes to stderr. If the reader of a pipe closes
it, printing to it ends, and the job continues.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from typing import Any, TextIO

import orjson
from tqdm import tqdm

from apcbatch.config import Config
from apcbatch.display import Paint, cells, clip, json_escaped, visible, wrap
from apcbatch.errors import RequestError
from apcbatch.job.terminal_lines import error_lines, result_lines, summary_lines
from apcbatch.job.totals import Totals
from apcbatch.process import silence
from apcbatch.resolution import colour_wanted
from apcbatch.types import Result

PLAIN_EVERY_S = 10.0
BAR_EVERY_S = 0.2
FIRST_ID_WIDTH = 8
MOST_WORKERS = 16  # entries of the printed summary; the file of --summary has all
BAR_FORMAT = "{desc}{n_fmt}{postfix}"
BAR_FORMAT_WITH_TOTAL = "{desc}{percentage:3.0f} % |{bar}| {n_fmt}/{total_fmt}{postfix}, eta {remaining}"
NARROW_BAR_FORMAT_WITH_TOTAL = "|{bar}| {n_fmt}/{total_fmt}{postfix}, eta {remaining}"
NARROW = 100  # columns; on a narrower terminal the progress bar has a shorter text


class Printer:
    """Printer of one run. Use it as a context manager, so that the bar is removed before anything else is printed."""

    def __init__(self, config: Config, totals: Totals, results_on_stdout: bool) -> None:
        self._totals, self._verbose, self._quiet = totals, config.verbose, config.quiet
        self._lines: TextIO | None = sys.stderr if results_on_stdout else sys.stdout
        self._paint = Paint(self._lines, colour_wanted())
        self._id_width = FIRST_ID_WIDTH
        self._bar: tqdm[Any] | None = None
        self._plain = False
        self._next_tick = 0.0
        self._mode = config.progress
        if self._mode == "auto":
            self._mode = "bar" if sys.stderr.isatty() else "plain"

    def __enter__(self) -> Printer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_progress()

    def stage(self, what: str) -> None:
        """Show the name of a step of loading in place of the bar; print nothing without a bar."""
        if self._mode == "bar":
            self._show_bar(f"{what} ...", "{desc}")

    def begin_progress(self) -> None:
        """Start the bar, or the timer of the plain progress lines."""
        if self._mode == "bar":
            self._show_bar("requests ", BAR_FORMAT)
        self._plain = self._mode == "plain"
        self._next_tick = time.monotonic() + (PLAIN_EVERY_S if self._plain else BAR_EVERY_S)

    def end_progress(self) -> None:
        """Remove the bar, and stop the plain progress lines."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
            self._bar = None
        self._plain = False

    def _show_bar(self, words: str, bar_format: str) -> None:
        """Replace the bar, if there is one, by a new one."""
        self.end_progress()
        with suppress(OSError):  # stderr is closed
            words = clip(visible(words), max(2, shutil.get_terminal_size().columns - 1))
            self._bar = tqdm(desc=words, file=sys.stderr, dynamic_ncols=True, bar_format=bar_format, leave=False)

    def tick(self, total: int | None) -> None:
        """Show the progress if enough time has passed. total: requests of this run, None if not known yet."""
        now = time.monotonic()
        if now < self._next_tick:
            return
        if self._bar is not None:
            self._next_tick = now + BAR_EVERY_S
            is_narrow = shutil.get_terminal_size().columns < NARROW
            if total is not None:
                self._bar.total = total
                self._bar.bar_format = NARROW_BAR_FORMAT_WITH_TOTAL if is_narrow else BAR_FORMAT_WITH_TOTAL
            self._bar.n = self._totals.requests
            try:
                self._bar.set_postfix_str(self._rates(is_narrow), refresh=True)
            except OSError:
                self._bar = None  # stderr was closed
        elif self._plain:
            self._next_tick = now + PLAIN_EVERY_S
            done = self._totals.requests
            of = f" of {total}" if total is not None else ""
            left = self._totals.running_s / done * (total - done) if total is not None and done else None
            eta = f", eta {tqdm.format_interval(left)}" if left is not None else ""
            self.note(f"{done}{of} requests, {self._rates()}{eta}")

    def result(self, custom_id: str, result: Result) -> None:
        """Print the line of a request that succeeded."""
        if self._quiet:
            return
        name, columns, miss = self._id(custom_id), format_result(result), format_miss(result)
        if self._verbose:
            miss += f"   prefill {result.prefill_ms:.1f} ms, decode {result.decode_ms:.1f} ms"
        width = self._width
        lines = [name + columns + miss]
        for line in lines if width is None else result_lines(name, columns, miss, result, width, self._paint):
            self._print(line)

    def error(self, custom_id: str, error: RequestError) -> None:
        """Print the line of an error record."""
        if not self._quiet:
            where = f"line {error.line}: " if error.line is not None else ""
            name, sentence = self._id(custom_id), f"error  {error.code} {where}{plain(error.message)}"
            width = self._width
            for line in [name + sentence] if width is None else error_lines(name, sentence, width, self._paint):
                self._print(line)

    def warn(self, sentence: str) -> None:
        """Print a warning, and keep it for the summary; the run continues."""
        self._totals.note_warning(sentence)
        self.note(f"warning: {sentence}")

    def note(self, sentence: str) -> None:
        """Print a sentence, even with --quiet."""
        width = max(20, shutil.get_terminal_size().columns) if sys.stderr.isatty() else None
        self._write(sys.stderr, "\n".join(wrap(visible(sentence, "\n"), width, "")))

    def hint(self, sentence: str) -> None:
        """Print advice for a person at the terminal; --quiet hides it."""
        if not self._quiet:
            self.note(sentence)

    def detail(self, sentence: str) -> None:
        """Print a sentence only with --verbose."""
        if self._verbose:
            self.note(sentence)

    def summary(self, summary: dict[str, Any], output: str) -> None:
        """Print the summary: several lines on a terminal; in a pipe, one line of JSON after all request lines. stderr
        gets one sentence too, unless request lines and stderr both go to a terminal. output: where the results are."""
        self.end_progress()
        width = self._width
        if width is None or not sys.stderr.isatty():
            self.note(self._totals.sentence(output))
        if width is None:
            workers = summary["workers"] or ()
            if len(workers) > MOST_WORKERS:
                shown = {"workers": workers[:MOST_WORKERS], "workers_left_out": len(workers) - MOST_WORKERS}
                summary = summary | shown
            self._print(json_escaped(orjson.dumps(summary).decode()))
            return
        for line in summary_lines(summary, "standard output" if output == "-" else visible(output), width, self._paint):
            self._print(line)

    def _rates(self, is_narrow: bool = False) -> str:
        totals = self._totals
        seconds = max(totals.running_s, 1e-9)
        if is_narrow:
            rates = (tokens / seconds for tokens in (totals.prompt_tokens, totals.completion_tokens))
            prompt, decode = (f"{rate:.0f}" if rate < 10_000 else f"{rate / 1000:.0f}k" for rate in rates)
            return f"in {prompt}/s, out {decode}/s, hit {100 * totals.hit_rate:.0f} %"
        return (
            f"prompt {totals.prompt_tokens / seconds:.0f} tok/s, "
            f"decode {totals.completion_tokens / seconds:.0f} tok/s, hit {100 * totals.hit_rate:.1f} %"
        )

    def _id(self, custom_id: str) -> str:
        """Format the id as the first column. The column widens for a long id and stays wide."""
        shown = plain(custom_id)
        width = self._width
        most = cells(shown) if width is None else min(cells(shown), width // 4)
        self._id_width = max(self._id_width, most)
        return shown + " " * (max(0, self._id_width - cells(shown)) + 1)

    @property
    def _width(self) -> int | None:
        """Columns of the terminal that request lines go to; None if they go elsewhere."""
        is_terminal = self._lines is not None and self._lines.isatty()
        return max(20, shutil.get_terminal_size().columns) if is_terminal else None

    def _print(self, line: str) -> None:
        if self._lines is not None and not self._write(self._lines, line):
            self._lines = None

    def _write(self, stream: TextIO, line: str) -> bool:
        """Write a line, after clearing the bar, and flush; return False if the stream cannot be written."""
        try:
            if self._bar is not None and stream.isatty():
                self._bar.clear()
            stream.write(line + "\n")
            stream.flush()
        except OSError as error:
            silence(stream)
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                self.warn(f"standard output cannot be written: {error.strerror}; the results are in OUT alone")
            return False
        return True


def format_result(result: Result) -> str:
    """Format the columns after the id: prompt tokens, cached tokens with their source, computed tokens (`new`), and
    answer tokens (`out`)."""
    share = min(99.9, 100 * result.cached_tokens / result.prompt_tokens)
    num_new = sum(len(answer.token_ids) for answer in result.answers)
    source = "-" if result.cached_from == "none" else result.cached_from
    return (
        f"ok     prompt {result.prompt_tokens:>5}   cached {result.cached_tokens:>5} ({share:>4.1f} %)  "
        f"{source:<7} new {result.computed_tokens:>5}   out {num_new:>4}"
    )


def format_miss(result: Result) -> str:
    """Format the reason why less was cached than possible; empty without one. `below_grid` is left out, because the
    block size alone explains it; OUT has the reason."""
    miss = None if result.miss_reason == "below_grid" else result.miss_detail or result.miss_reason
    return f"   miss: {miss}" if miss else ""


def plain(text: str) -> str:
    """Return the text as one line, with a space for each character that is not printable."""
    return "".join(character if character.isprintable() else " " for character in text)
