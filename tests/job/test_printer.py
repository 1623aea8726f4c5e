"""The terminal: stable columns, the bar, the plain lines."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys

import pytest

from apcbatch.config import Config
from apcbatch.display import cells
from apcbatch.errors import RequestError
from apcbatch.job import printer as printer_module
from apcbatch.job.printer import Printer
from apcbatch.job.terminal_lines import result_lines, summary_lines
from apcbatch.job.totals import Totals
from apcbatch.types import Result
from tests.chats import conversation, write_lines


def result(prompt, cached, source, out, reason=None, detail=None):
    return Result(
        "apc-000000", prompt, list(range(out)), cached_tokens=cached, computed_tokens=prompt - cached,
        cached_from=source, miss_reason=reason, miss_detail=detail,
    )  # fmt: skip


def test_the_lines_have_their_columns(capsys):
    """Fault: a column moves, and scripts that cut columns break, as behind a long id or for 99.99 %; a line break or an
    escape sequence in an id or a sentence forges lines; a short prompt is called a miss, or a real miss is not; an
    error of no line names one; -v changes nothing."""
    printer = Printer(Config(), Totals(), False)
    printer.result("c-9#3", result(1842, 1792, "disk", 128))
    printer.result("c-10#1", result(611, 0, "none", 64, "diverged", "diverged at token 38 (first boundary 256)"))
    printer.error("c-11#1", RequestError("invalid_request", 'messages[2].role is "asistant"; expected user', 11))
    printer.result("x\n\x1b[2J", result(9, 0, "none", 1, "below_grid", "9 of 64"))
    printer.result("conversation-12", result(9999, 9998, "memory", 1))
    printer.error("z\r", RequestError("internal", "a\nb"))
    Printer(Config(verbose=True), Totals(), False).result("a", result(9, 0, "none", 1, "cold"))
    assert capsys.readouterr().out.splitlines() == [
        "c-9#3    ok     prompt  1842   cached  1792 (97.3 %)  disk    new    50   out  128",
        "c-10#1   ok     prompt   611   cached     0 ( 0.0 %)  -       new   611   out   64"
        "   miss: diverged at token 38 (first boundary 256)",
        'c-11#1   error  invalid_request line 11: messages[2].role is "asistant"; expected user',
        "x  [2J   ok     prompt     9   cached     0 ( 0.0 %)  -       new     9   out    1",
        "conversation-12 ok     prompt  9999   cached  9998 (99.9 %)  memory  new     1   out    1",
        "z               error  internal a b",
        "a        ok     prompt     9   cached     0 ( 0.0 %)  -       new     9   out    1"
        "   miss: cold   prefill 0.0 ms, decode 0.0 ms",
    ]


def test_a_pipe_gets_a_plain_line_every_ten_seconds(capsys, monkeypatch):
    """Fault: a log file is filled with bars, or hears nothing for hours; a rate counts the loading of the model."""
    now = [950.0]
    monkeypatch.setattr(printer_module.time, "monotonic", lambda: now[0])
    totals = Totals()
    printer = Printer(Config(), totals, False)
    printer.stage("loading")
    now[0] += 50
    printer.begin_progress()
    totals.begin_running(0)
    totals.add(result(100, 80, "memory", 5))
    for _ in range(25):
        now[0] += 1.0
        printer.tick(None if now[0] < 1015 else 4)
    assert capsys.readouterr().err.splitlines() == [
        "1 requests, prompt 10 tok/s, decode 0 tok/s, hit 80.0 %",
        "1 of 4 requests, prompt 5 tok/s, decode 0 tok/s, hit 80.0 %, eta 01:00",
    ]
    for number, left_out in ((200, 184), (16, None)):
        workers = [SUMMARY["workers"][0] | {"id": at} for at in range(number)]
        printer.summary(SUMMARY | {"workers": workers}, "out.jsonl")
        printed = capsys.readouterr()
        expected = SUMMARY | {"workers": workers[:16]} | ({"workers_left_out": left_out} if left_out else {})
        assert json.loads(printed.out.splitlines()[-1]) == expected, "200 workers are 45 KB of JSON"
        assert printed.err.endswith("results in out.jsonl\n")


@pytest.mark.parametrize("progress", ["none", "plain"])
def test_a_run_without_an_answer_has_no_eta(capsys, monkeypatch, progress):
    """Fault: ten seconds without an answer end the run, or --progress none prints lines all the same."""
    now = [1000.0]
    monkeypatch.setattr(printer_module.time, "monotonic", lambda: now[0])
    printer = Printer(Config(progress=progress), Totals(), False)
    printer.begin_progress()
    for _ in range(15):
        now[0] += 1.0
        printer.tick(4)
    printer.end_progress()
    now[0] += 20
    printer.tick(4)
    shown = ["0 of 4 requests, prompt 0 tok/s, decode 0 tok/s, hit 0.0 %"] * (progress == "plain")
    assert capsys.readouterr().err.splitlines() == shown


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def test_a_terminal_gets_one_bar(monkeypatch):
    """Fault: no bar on a terminal, or one where it was turned off; the bar stays on the screen; a rate runs over a bar
    of 60 columns, or is a thousand times another."""
    now = [1000.0]
    monkeypatch.setattr(printer_module.time, "monotonic", lambda: now[0])
    for progress, columns in itertools.product(("auto", "bar", "plain", "none"), (40, 60, 80, 99, 100, 120)):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        totals, shown = Totals(), progress in ("auto", "bar")
        with Printer(Config(progress=progress), totals, False) as printer:
            printer.stage("loading a model with a very long name, longer than the terminal is wide")
            printer.begin_progress()
            totals.begin_running(0)
            totals.add(result(100, 80, "memory", 5))
            now[0] += 1.0
            printer.tick(4)
        text = terminal.getvalue()
        hit = "prompt 100 tok/s, decode 5 tok/s, hit 80.0 %" if columns >= 100 else "in 100/s, out 5/s, hit 80 %"
        if columns >= 60:
            assert (hit in text and "1/4" in text and "eta 00:00" in text) == shown, (progress, columns)
        assert ("loading a model" in text) == shown, (progress, columns)
        assert text.endswith("\r") == shown and "\n" not in text, (progress, columns)
        assert all(cells(part) < columns for part in text.split("\r") if "loading" in part), (progress, columns)
    for tokens, seconds, rate in ((2, 5.0, "0"), (9_999, 1.0, "9999"), (10_000, 1.0, "10k"), (12_600, 1.0, "13k")):
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        with Printer(Config(progress="bar"), totals := Totals(), False) as printer:
            printer.begin_progress()
            totals.begin_running(0)
            totals.add(result(tokens, 0, "none", 5))
            now[0] += seconds
            printer.tick(4)
        assert f"in {rate}/s, " in terminal.getvalue(), rate


def test_the_bar_is_drawn_five_times_a_second(monkeypatch):
    """Fault: drawing takes the run's time, or a bar stands still."""
    terminal, now, totals = Terminal(), [1000.0], Totals()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(printer_module.time, "monotonic", lambda: now[0])
    drawn = []
    with Printer(Config(progress="bar"), totals, False) as printer:
        printer.begin_progress()
        totals.begin_running(0)
        for now[0] in (1000.0, 1000.15, 1000.25, 1000.4, 1000.5):
            totals.add(result(100, 80, "memory", 5))
            before = len(terminal.getvalue())
            printer.tick(9)
            drawn.append(len(terminal.getvalue()) > before)
    assert drawn == [False, False, True, False, True]
    assert "3/9" in terminal.getvalue() and "5/9" in terminal.getvalue() and "4/9" not in terminal.getvalue()


def test_a_line_is_folded_where_it_has_no_room():
    """Fault: a line that fits is folded, or one that does not is cut in the middle of a column."""
    for width, lines in [
        (58, ["a ok " + "x" * 40 + "   miss: cold"]),
        (57, ["a ok " + "x" * 40, "         miss: cold"]),
        (45, ["a ok " + "x" * 40, "         miss: cold"]),
        (44, ["a ok  prompt 100, 80.0 % from memory, out 5", "         miss: cold"]),
    ]:
        parts = ("a ", "ok " + "x" * 40, "   miss: cold")
        found = result_lines(*parts, result(100, 80, "memory", 5), width, lambda text, *styles: text)
        assert list(found) == lines


def terminal_of(monkeypatch, columns, **environment):
    """Standard output and error as one terminal."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": str(columns), **environment}.items():
        monkeypatch.setenv(name, value)
    return stream


SUMMARY = {
    "requests": 9, "ok": 5, "errors": 4, "errors_by_code": {"duplicate_id": 1, "invalid_request": 3}, "already_done": 2,
    "ignored_columns": {f"c{number}": 1000 + number for number in range(10)},
    "prompt_tokens": 123456, "cached_tokens": 120000, "computed_tokens": 3456, "completion_tokens": 900,
    "hit_rate": 0.972, "ideal_hit_rate": 0.975, "cached_by_source": {"memory": 100000, "disk": 20000},
    "seconds": {"load": 1.0, "plan": 0.1, "prefill": 2.0, "decode": 3.0, "store": 0.2, "total": 6.5},
    "prefill_tokens_per_s": 1728.0, "decode_tokens_per_s": None, "store_skipped": 7,
    "drafts": {"history": {"drafted": 900, "accepted": 0}, "lookup": {"drafted": 1800, "accepted": 1234}},
    "tokens_per_pass": 1.786, "finish_reasons": {"length": 4, "stop": 2000}, "empty_answers": 3, "unread_calls": 0,
    "answer_warnings": {"cut_reasoning": 3, "unread_keys": 1},
    "score": {"answers": 1, "tokens": 1000, "mean_logprob": -2.0, "perplexity": 7.389056,
              "greedy_match_share": 0.75, "exact_match_share": 0.0},
    "workers": [
        {"id": id, "node": node, "prefill_tokens": prefill, "decode_tokens": 100, "busy_s": busy_s,
         "tokens_per_s": rate, "ending": ending}
        for id, node, prefill, busy_s, rate, ending in (
            (1, "a", 900, 2.0, 500.0, None), (2, "b", 0, 0.0, None, "lost"), (3, "a", 0, 1.0, 100.0, None),
            (4, "c", 2900, 2.0, 1500.0, None),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_is_not_overrun(monkeypatch, columns, colour):
    """Fault: the terminal breaks a line in the middle of a word, a number is lost, or NO_COLOR changes nothing."""
    terminal = terminal_of(monkeypatch, columns, **({} if colour else {"NO_COLOR": "1"}))
    printer = Printer(Config(verbose=True), Totals(), False)
    printer.result("c-9#3", result(1842, 1792, "disk", 128))
    printer.result("a-conversation-with-a-long-name#12", result(9999, 9998, "memory", 1))
    printer.result("c-10#1", result(611, 0, "none", 64, "diverged", "diverged at token 38 (first boundary 256)"))
    printer.error("c-11#1", RequestError("invalid_request", 'messages[2].role is "asistant"; expected user', 11))
    printer.warn("the model has no chat template, and a sentence is folded where a word ends")
    printer.summary(SUMMARY, "out.jsonl")
    text = terminal.getvalue()
    assert ("\x1b[32mok\x1b[0m" in text) == ("\x1b[31merror\x1b[0m" in text) == colour
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in plain and all(len(line) <= columns for line in plain.splitlines())
    words = " ".join(plain.split())
    for part in ("c-9#3", "1842", "out 1", "diverged at token 38 (first boundary 256)", "invalid_request line 11",
                 "9 requests (2 more answered before) in 6.5 s: 5 ok, 4 errors",
                 "errors 1 duplicate_id, 3 invalid_request", 'columns left out "c0" (1,000), "c1" (1,001), "c2"',
                 '"c7" (1,007), and 2 more', "ended 4 cut, 2,000 stop, 3 empty",
                 "warnings 3 cut_reasoning, 1 unread_keys", "123,456 tokens, 97.2 % restored", "ideal 97.5 %",
                 "100,000 from memory, 20,000 from disk", "3,456 tokens, 1,728 a second", "answers 900 tokens",
                 "warning: the model has no chat template, and a sentence is folded where a word ends",
                 "scores 1 recorded answer of 1,000 tokens: perplexity 7.389, greedy decoding gives 75.0 % of the "
                 "tokens, 0.0 % of the answers whole",
                 "drafts 1,234 of 2,700 tokens accepted (1,234 from lookup); 1.79 tokens a pass",
                 "load 1.0, plan 0.1, prefill 2.0, decode 3.0, store 0.2", "results out.jsonl",
                 "store 7 snapshots not stored; later runs compute them again",
                 "workers 4 (1 lost): 4,200 tokens in 5.0 s of work; the slowest 100 a second (3 on a), "
                 "the fastest 1,500 a second (4 on c)"):  # fmt: skip
        assert part in words, part
    assert "{" not in plain


FEWER = SUMMARY | {
    "errors": 0, "already_done": 0, "ignored_columns": {},
    "cached_by_source": {"memory": 0, "disk": 7}, "ideal_hit_rate": None,
    "drafts": {"history": {"drafted": 3, "accepted": 0}}, "tokens_per_pass": None, "store_skipped": 0,
    "workers": SUMMARY["workers"][:2],
    "finish_reasons": {}, "empty_answers": 0, "answer_warnings": {}, "score": None,
}  # fmt: skip


def test_a_summary_has_no_line_for_nothing():
    """Fault: a terminal shows a rate, a source or a worker that there was not."""
    for changes, lines in [
        (
            {},
            [
                "<b>9 requests in 6.5 s: </><g>5 ok</>, 0 errors",
                "<d>prompt   </>123,456 tokens, 97.2 % restored (7 from disk)",
                "<d>computed </>3,456 tokens, 1,728 a second",
                "<d>answers  </>900 tokens",
                "<d>drafts   </>0 of 3 tokens accepted",
                "<d>seconds  </>load 1.0, plan 0.1, prefill 2.0, decode 3.0, store 0.2",
                "<d>workers  </>2 (1 lost): 1,100 tokens in 2.0 s of work",
                "<d>results  </>x",
            ],
        ),
        (
            {"prompt_tokens": 0, "drafts": {}, "workers": None},
            [
                "<b>9 requests in 6.5 s: </><g>5 ok</>, 0 errors",
                "<d>seconds  </>load 1.0, plan 0.1, prefill 2.0, decode 3.0, store 0.2",
                "<d>results  </>x",
            ],
        ),
    ]:
        paint = lambda text, *styles: f"<{styles[0][0]}>{text}</>" if styles else text  # noqa: E731
        assert list(summary_lines(FEWER | changes, "x", 200, paint)) == lines


def test_the_verdict_has_a_line_of_its_own_where_it_must():
    """Fault: the first line of the summary is folded though it fits, or runs over the edge."""
    for width, count in [(60, 1), (59, 2)]:
        lines = list(summary_lines(FEWER | {"already_done": 2}, "x", width, lambda text, *styles: text))
        head, verdict = "9 requests (2 more answered before) in 6.5 s:", "5 ok, 0 errors"
        assert lines[:count] == ([f"{head} {verdict}"] if count == 1 else [head, " " * 9 + verdict])


def test_the_sentence_is_for_whoever_sees_no_summary(monkeypatch):
    """Fault: a terminal shows the summary twice, or a log of stderr has none."""
    for stdout, stderr in [(True, True), (True, False), (False, True), (False, False)]:
        streams = {name: (Terminal if is_one else io.StringIO)() for name, is_one in (("out", stdout), ("err", stderr))}
        monkeypatch.setattr(sys, "stdout", streams["out"])
        monkeypatch.setattr(sys, "stderr", streams["err"])
        Printer(Config(), Totals(), False).summary(SUMMARY, "o.jsonl")
        assert ("results in o.jsonl" in " ".join(streams["err"].getvalue().split())) == (not (stdout and stderr))
        assert streams["out"].getvalue().startswith("{") != stdout
    terminal = terminal_of(monkeypatch, 80, NO_COLOR="1")
    Printer(Config(), Totals(), True).summary(SUMMARY, "-")
    assert terminal.getvalue().endswith("results  standard output\n"), "not a file called `-`"


def test_a_narrow_terminal_has_twenty_columns(monkeypatch):
    """Fault: a terminal of a few columns gets a word a line, or one character."""
    for columns, width in [(5, 20), (20, 20), (21, 21)]:
        terminal = terminal_of(monkeypatch, columns, NO_COLOR="1")
        Printer(Config(), Totals(), False).error("a", RequestError("internal", "x" * 100))
        assert max(map(len, terminal.getvalue().splitlines())) == width


EVIL = "a\x9b31m\u202eb\x1b]0;t\x07\u2066c"


def test_nothing_that_is_printed_acts_on_a_terminal(apcbatch, tmp_path):
    """Fault: a C1 control or a mark of direction of a name, an id or a text reaches the terminal as it is."""
    for words in [
        ("run", f"{EVIL}.jsonl", "-o", "o.jsonl"),
        ("run", "in.jsonl", "-o", f"{EVIL}/o.jsonl"),
        ("run", "in.jsonl", "-o", f"{EVIL}.jsonl", "--turns", "last", "-v"),
        ("run", "in.jsonl", "-o", f"{EVIL}.jsonl.gz"),
        ("run", "in.jsonl", "-o", f"memory://b/{EVIL}.jsonl"),
        ("run", "in.jsonl", "-o", "o.jsonl", "--model", EVIL),
        ("run", "in.jsonl", "-o", "o.jsonl", "--config", EVIL),
        ("run", "in.jsonl", "-o", "o.jsonl", "--summary", f"{EVIL}/s", "--store", EVIL),
        ("run", "in.jsonl", "-o", "o.jsonl", f"--{EVIL}"),
        ("run", "in.jsonl", "--show-config", "--stop", EVIL, "--summary", EVIL, "--store", EVIL),
        ("run", "in.jsonl", "-o", "o.jsonl", "--device", EVIL),
        ("plan", EVIL),
        ("plan", "in.jsonl", "--json", f"{EVIL}/x"),
        ("plan", "in.jsonl", "--json", "-"),
        ("show", "in.jsonl", "--line", "1"),
        ("show", "in.jsonl", "--line", "2", "--json"),
        ("show", "in.jsonl", "--line", "3"),
        ("report", EVIL),
        ("store", "stat", EVIL),
        ("store", "prune", ".", "--older-than", EVIL),
        ("doctor", EVIL),
        (EVIL,),
    ]:
        lines = [
            {"id": EVIL, "messages": [{"role": "user", "content": EVIL}], EVIL: 1, "model": EVIL},
            {"id": f"{EVIL}2", "messages": [{"role": EVIL, "content": "x"}]},
            {"custom_id": EVIL, "method": "POST", "url": EVIL, "body": {}},
        ]
        write_lines(tmp_path / "in.jsonl", lines)
        done = apcbatch(*words)
        assert done.stdout + done.stderr, "it says something"
        bad = {letter for letter in done.stdout + done.stderr if not letter.isprintable()} - {"\n"}
        assert not bad, (bad, done.stdout, done.stderr)
        assert "internal error" not in done.stderr


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "password",
    ["p@hush", "p/hush", "p?hush@", "p hush", "p#hush", "p:hush", "p[hush", "hush\u202e", "hush::hush", "%70hush"],
)
def test_no_part_of_a_password_is_printed(apcbatch, tmp_path, password):
    """Fault: what stands behind the first @ of a password, or a slash in it, is shown; in a message, an option's value,
    the command that continues the run, or a file that is kept."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    address = f"memory://user:{password}@host/s.json"
    for words in (
        ("run", address, "-o", "o.jsonl"),
        ("run", "in.jsonl", "-o", address),
        ("run", "in.jsonl", "-o", "o.jsonl", "--overwrite", "--summary", address, "-v"),
        ("run", "in.jsonl", "-o", "o.jsonl", "--overwrite", "--report", address),
        ("run", "in.jsonl", "--show-config", "--summary", address),
        ("run", address.replace("memory", "ftp").replace("host", "127.0.0.1:1"), "-o", "o.jsonl"),
        ("run", address.replace("memory", "nosuch"), "-o", "o.jsonl"),
        ("report", address),
        ("plan", "in.jsonl", "--json", address),
    ):
        done = apcbatch(*words)
        kept = "".join(path.read_text() for path in tmp_path.rglob("*.json*"))
        assert "hush" not in done.stdout + done.stderr + kept, (words, done.stderr)


class Broken(io.StringIO):
    """A stream that cannot be written to."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


def test_a_stream_that_breaks_is_warned_of_once_unless_its_reader_left(monkeypatch):
    """Fault: `apcbatch run | head` ends with a warning, or a full disk behind stdout goes unsaid."""
    for error in [BrokenPipeError(), OSError(28, "No space left on device")]:
        for name in ["stdout", "stderr"]:
            silenced = []
            monkeypatch.setattr(printer_module, "silence", silenced.append)
            other = io.StringIO()
            monkeypatch.setattr(sys, "stdout", Broken(error) if name == "stdout" else other)
            monkeypatch.setattr(sys, "stderr", Broken(error) if name == "stderr" else other)
            printer = Printer(Config(), Totals(), False)
            if name == "stdout":
                printer.result("a", result(9, 0, "none", 1))
                printer.result("b", result(9, 0, "none", 1))
            else:
                printer.note("a sentence")
            assert silenced == [getattr(sys, name)], "Python would complain of it again at its end"
            is_said = name == "stdout" and not isinstance(error, BrokenPipeError)
            assert ("standard output cannot be written: No space left on device" in other.getvalue()) == is_said
            assert bool(other.getvalue()) == is_said
