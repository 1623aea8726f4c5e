"""`--turns live`: episodes with tools that answer late, in any order, wrongly or never, and that are resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import xxhash

from apcbatch.config import Config
from apcbatch.data.tokenization.no_tokenizer import load_any_tokenizer
from apcbatch.job.tool_workers import opened_workers
from apcbatch.model.locate import DEMO_DIR
from tests.chats import read_records, write_lines
from tests.job.fakes import EOS, FakeEngine

CALL = '<tool_call>\n{"name": "add", "arguments": {"n": %d}}\n</tool_call>'
UNREAD = '<tool_call>\n{"name": "add", "argu'
ANSWERS = (
    CALL % 10**30,  # more than 64 bits
    CALL % 2 + "\n" + CALL % 3,
    "fine",
    CALL % 4,
    '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>',
    UNREAD,
)
TIMES = ("prefill_ms", "decode_ms", "begin_s", "end_s")
REUSE = ("cached_from", "cached_tokens", "computed_tokens", "ideal_cached_tokens", "boundary", "miss_reason")
LIVE = ("--turns", "live", "--tools", "live_tools:Adder", "-q")
CODE = '''
import ctypes, os, random, sqlite3, subprocess, sys, threading, time
from apcbatch import Tools

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
         for name in ("add", "other")]


class Adder(Tools):
    """Adds up what it is called with; its kind says what else it does in a call."""

    tools = TOOLS
    total = 0

    def __init__(self, row, sample=0):
        super().__init__(row, sample)
        self.kind = row.get("kind")
        self.replay = self.kind != "once"
        print(f"made {row['id']}\\n", end="")  # one write: other threads print too
        if self.kind == "make":
            raise ValueError("no")
        if self.kind == "timer":
            threading.Timer(0.3, os._exit, [7]).start()
        if self.kind == "slow":
            time.sleep(100)
        if self.kind == "wait":
            time.sleep(0.5)

    def call(self, name, arguments):
        print("called", self.row["id"])
        self.total += min(arguments["n"], 1000)
        if os.environ.get("LIVE_RAISES"): raise OSError("down")
        time.sleep(random.random() * float(os.environ.get("LIVE_SLEEP", "0")))
        match self.kind:
            case "raise": raise KeyError("x")
            case "half": raise OSError("\\udce9" + "y" * 700)
            case "hang": time.sleep(100)
            case "busy":
                while True: pass
            case "gil": ctypes.PyDLL(None).sleep(100)
            case "exit": os._exit(3)
            case "leave": sys.exit(4)
            case "late": time.sleep(0.9)
            case "first" if not os.path.exists("dead"):
                time.sleep(0.5)
                open("dead", "w")
                os._exit(3)
            case "fork":
                subprocess.Popen(["sleep", "100"])
                if not os.fork(): time.sleep(100)
            case "print": print("y" * 2_000_000)
        return {"total": self.total, "world": os.environ.get("LIVE_WORLD")}

    def next(self, messages):
        if self.kind == "next": return 5
        said = sum(message["role"] == "user" for message in messages)
        return None if said > 3 else {"role": "user", "content": f"and {said} more?"}

    def score(self, messages):
        if self.kind == "score": return {"a": float("inf")}
        if self.kind == "large": return {"a": 1 << 70}
        return {"total": self.total, "messages": len(messages)}


    def close(self):
        print("closed", self.row["id"])


class Base(Adder):
    """Coroutines and functions that use a connection of the thread that made it."""

    def __init__(self, row, sample=0):
        super().__init__(row, sample)
        self.base = sqlite3.connect(":memory:")

    async def call(self, name, arguments):
        return str(self.base.execute("select ?", [str(arguments)]).fetchone())

    def score(self, messages):
        return {"one": self.base.execute("select 1").fetchone()[0]}


class Large(Adder):
    """Results that fill a socket soon."""

    def call(self, name, arguments):
        return "x" * 100_000


class Hanging(Adder):
    """Starts a process, and never ends."""

    def __init__(self, row):
        other = os.fork()
        with open("pids", "a") as file:
            print(os.getpid(), file=file)
        time.sleep(1000)


class Blocking(Adder):
    """Coroutines of which one blocks its thread."""

    async def call(self, name, arguments):
        if self.row["id"] == "e0": time.sleep(100)
        return "fine"


class Threaded(Adder):
    """Coroutines that wait for threads, which no time limit ends."""

    async def call(self, name, arguments):
        import asyncio
        if self.kind == "interrupt": os.kill(os.getpid(), 2)
        await asyncio.to_thread(time.sleep, 100 * (self.kind == "hang"))
        return "fine"


class Beside(Adder):
    """Its two calls of one answer must run side by side."""

    async def call(self, name, arguments):
        import asyncio
        self.total += 1
        mine = self.total
        await asyncio.sleep(0.05 * (3 - mine))
        return {"calls": self.total}
'''


@pytest.fixture
def live(apcbatch, tmp_path, monkeypatch):
    """Runs live episodes with a fake engine that answers by a function of prompt and stream; gives the outcome and the
    records by custom_id."""
    (tmp_path / "live_tools.py").write_text(CODE)
    tokenizer = load_any_tokenizer(Path(DEMO_DIR), print)
    answers = [[*tokenizer.encode(text).ids, EOS] for text in ANSWERS]

    def token(self, request, prompt, number):
        salt = request.random_stream if request.temperature > 0 else ""
        return answers[xxhash.xxh3_64_intdigest(f"{salt}{prompt}".encode()) % len(answers)][number]

    monkeypatch.setattr(FakeEngine, "_token", token)
    write_lines(tmp_path / "in.jsonl", [line(f"e{number}") for number in range(8)])

    def run(*options, out="out.jsonl", inputs="in.jsonl"):
        done = apcbatch("run", inputs, "-o", out, *LIVE, *options)
        records = read_records(tmp_path / out) if (tmp_path / out).exists() else []
        found = {record["custom_id"]: record for record in records}
        assert len(found) == len(records), "a custom_id is there twice"
        return done, found

    return run


def line(name, **fields):
    return {"id": name, "messages": [{"role": "user", "content": f"Add for {name}."}], **fields}


def untimed(records):
    """The records without times and reuse, by custom_id."""
    found = json.loads(json.dumps(records))
    for record in found.values():
        for name in (*TIMES, *REUSE):
            record["apcbatch"].pop(name, None)
        for tool in record["apcbatch"].get("tools", ()):
            tool.pop("seconds")
        if record["response"] is not None:
            record["response"]["body"].pop("created")
            record["response"]["body"]["usage"].pop("prompt_tokens_details")
    return found


def episodes(records):
    """Episode -> its records in order of their turns."""
    found: dict = {}
    for record in sorted(records.values(), key=lambda one: one["turn"]):
        found.setdefault(record["apcbatch"]["episode"], []).append(record)
    return found


def test_a_turn_has_what_its_tools_said(live, tmp_path):
    """Faults: results under another call's id; a turn that is written before its tools have answered; a last turn
    without an end; output of tools in the run's own."""
    log = tmp_path / "out.jsonl.tools.log"
    log.write_text("mine\n")
    done, records = live()
    assert done.code == 0 and done.summary["restarted"] == 0
    kinds = set()
    for turns in episodes(records).values():
        assert [turn["apcbatch"]["end"] for turn in turns[:-1]] == [None] * (len(turns) - 1)
        last = turns[-1]["apcbatch"]
        assert last["end"] in ("done", "error") and last["score"]["messages"] >= len(turns)
        for number, turn in enumerate(turns, start=1):
            message, ours = turn["response"]["body"]["choices"][0]["message"], turn["apcbatch"]
            appended = ours["appended"]
            assert turn["custom_id"] == f"{ours['episode']}#{number}"
            ids = [call["id"] for call in message["tool_calls"]]
            results = [one for one in appended if one["role"] == "tool"]
            assert [one["tool_call_id"] for one in results] == ids and len(ours["tools"]) == len(ids)
            kinds.add((len(ids), tuple(one["error"] for one in ours["tools"]), "unread_call" in ours["warning_kinds"]))
            assert ours["end"] is not None or ids or appended[0]["role"] == "user"
    assert len(kinds) == 5, "one call, two, none, an unknown tool, and one that cannot be read"
    assert log.read_text().startswith("mine\nmade e"), "a file that was there is kept"
    assert "called" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--temperature", 0.8, "--samples", 3, "--history", "tokens")], ids=str)
def test_the_order_of_tools_changes_nothing(live, monkeypatch, options):
    """Fault: ids, draws or prompts depend on when a tool answers, or on what runs beside an episode."""
    whole = untimed(live(*options)[1])
    monkeypatch.setenv("LIVE_SLEEP", "0.03")
    for number, others in enumerate(
        [("--max-running", 1), ("--max-running", 64), ("--tool-workers", 1), ("--limit", 2)]
    ):
        found = untimed(live(*options, *others, out=f"{number}.jsonl")[1])
        assert found == {name: whole[name] for name in found} and (len(found) == len(whole) or "--limit" in others)


HOSTILE = {
    "make": "the factory raised ValueError: no",
    "slow": "the factory took more than 1 s (--tool-timeout)",
    "raise": "call('add') raised KeyError: 'x'",
    "hang": "call('add') took more than 1 s (--tool-timeout)",
    "busy": "call('add') took more than 1 s (--tool-timeout)",
    "gil": "call('add') took more than 1 s (--tool-timeout)",
    "exit": "call('add') ended its worker process with exit status 3",
    "leave": "call('add') raised SystemExit: 4",
    "half": "call('add') raised OSError: \\udce9yyy",
    "next": "next returned neither",
    "score": "score returned what cannot be written as JSON",
    "large": "score returned what no record can hold",
    "fork": None,
    "print": None,
}


@pytest.mark.slow
def test_hostile_tools_fail_alone(live, tmp_path, monkeypatch):
    """Faults: one episode's tool, or the text of what it raises, ends the run or another episode; its error does not
    say what happened, or has no transcript; the episodes of a worker that died differ from undisturbed ones."""
    monkeypatch.setattr("apcbatch.job.tool_workers.DROP_SECONDS", 1.0)
    whole = untimed(live()[1])
    caller = next(
        name for name, turns in episodes(whole).items()
        if [one["name"] for one in turns[0]["apcbatch"]["tools"]] == ["add"] and "more?" in json.dumps(turns)
    )  # fmt: skip
    asked = line(caller)["messages"]
    lines = [{"id": f"{kind}{number}", "kind": kind, "messages": asked} for number in (1, 2) for kind in HOSTILE]
    write_lines(tmp_path / "bad.jsonl", [*lines, *[line(f"e{number}") for number in range(8)]])
    done, records = live("--tool-timeout", 1, "--tool-workers", 2, inputs="bad.jsonl", out="bad.out")
    assert done.code == 3 and "Traceback" not in done.stderr
    found = episodes(records)
    for name, reason in ((f"{kind}{number}", reason) for number in (1, 2) for kind, reason in HOSTILE.items()):
        last = found[name][-1]
        if reason is None:
            assert last["apcbatch"]["end"] in ("done", "error") and last["error"] is None, name
        else:
            assert (last["error"] or {}).get("message", "").startswith(reason), (name, last["error"])
            assert last["error"]["code"] == "tool_failed" and last["apcbatch"]["end"] == "error"
            assert len(last["apcbatch"]["transcript"]) >= 1 + (reason[:4] == "call")
    assert "NoneType" not in (tmp_path / "bad.out.tools.log").read_text(), "what was not made is not closed"
    for name, record in whole.items():
        other = untimed(records)[name]
        assert [one["response"]["body"]["choices"] for one in (record, other)] == 2 * [
            record["response"]["body"]["choices"]
        ]
        assert record["apcbatch"] == other["apcbatch"], name


def cut(path, keep):
    """Leave only the first lines of OUT, as a kill does."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:keep]))
    return len(lines)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"kind": "once"}], ids=str)
def test_a_killed_run_is_continued(live, tmp_path, fields):
    """Faults: a turn is answered twice, or a tool has another state than before the kill; an episode whose calls must
    not be made twice goes on without them."""
    write_lines(tmp_path / "in.jsonl", [line(f"e{number}", **fields) for number in range(8)])
    whole = untimed(live("--samples", 2)[1])
    out = tmp_path / "out.jsonl"
    for keep in (1, 5, len(whole) // 2, len(whole) - 1):
        cut(out, keep)
        partly = [turns for turns in episodes({r["custom_id"]: r for r in read_records(out)}).values()
                  if turns[-1]["apcbatch"]["end"] is None]  # fmt: skip
        done, found = live("--samples", 2, "--resume")
        assert done.summary["restarted"] == (len(partly) if fields else 0)
        found = untimed(found)
        for record in found.values():
            assert record["apcbatch"].pop("attempt") in ((1, 2, 3, 4, 5) if fields else (1,))
        assert found == {name: one | {"apcbatch": {k: v for k, v in one["apcbatch"].items() if k != "attempt"}}
                         for name, one in whole.items()}  # fmt: skip


@pytest.mark.slow
def test_an_episode_whose_tools_answer_otherwise_begins_anew(live, tmp_path, monkeypatch):
    """Faults: an episode goes on from results that its tools do not give any more; its earlier records stay in OUT."""
    whole = untimed(live()[1])
    out = tmp_path / "out.jsonl"
    cut(out, len(whole) // 2)
    monkeypatch.setenv("LIVE_WORLD", "another")
    done, found = live("--resume")
    assert done.summary["restarted"] > 0
    anew = {name: turns for name, turns in episodes(found).items() if turns[0]["apcbatch"]["attempt"] == 2}
    assert len(anew) == done.summary["restarted"]
    for turns in anew.values():
        assert {one["apcbatch"]["attempt"] for one in turns} == {2} and turns[-1]["apcbatch"]["end"] is not None
        text = json.dumps([one["apcbatch"]["appended"] for one in turns])
        assert "another" in text and "null" not in text
    log = (tmp_path / "out.jsonl.tools.log").read_text()
    assert log.count("closed") == log.count("made"), "an episode that was begun anew is closed too"


@pytest.mark.slow
def test_calls_that_fail_when_made_again_begin_the_episode_anew(live, tmp_path, monkeypatch):
    """Fault: a second record of a turn that OUT has, so that no later run continues it."""
    whole = untimed(live()[1])
    cut(tmp_path / "out.jsonl", len(whole) // 2)
    with monkeypatch.context() as patch:
        patch.setenv("LIVE_RAISES", "1")
        done, found = live("--resume")
    failed = {one["apcbatch"]["episode"]: one["apcbatch"]["attempt"] for one in found.values() if one["error"]}
    assert done.code == 3 and done.summary["restarted"] > 0 and 2 in failed.values()
    done, found = live("--retry-errors")
    assert done.code == 0 and untimed(found) == whole


def stop_at(number, patch, turn=""):
    """Raise SIGINT at the answer of a number, of those whose ids end so; return the list that gets all answers."""
    step, answered = FakeEngine.step, []

    def stopping(self):
        before, results = num_counted(), step(self)
        answered.extend(results)
        if before < number <= num_counted():
            signal.raise_signal(signal.SIGINT)
        return results

    def num_counted():
        return sum(one.tag.ticket.custom_id.endswith(turn) for one in answered)

    patch.setattr(FakeEngine, "step", stopping)
    return answered


@pytest.mark.slow
@pytest.mark.parametrize("at", [10, None], ids=str)
def test_answers_that_are_there_at_a_signal_are_written(live, monkeypatch, at):
    """Fault: an answer that is generated, or whose tools are called, at the first signal is thrown away; or a run whose
    last answer it was counts as stopped."""
    whole = untimed(live()[1])
    monkeypatch.setenv("LIVE_SLEEP", "0.3")
    with monkeypatch.context() as patch:
        answered = stop_at(at or len(whole), patch)
        done, found = live("--overwrite")
    assert done.code == (130 if at else 0) and len(found) == len(answered) >= (at or len(whole))
    assert untimed(live("--resume")[1]) == whole


@pytest.mark.slow
def test_a_stopped_run_ends_while_episodes_wait_for_workers(live, tmp_path, monkeypatch):
    """Fault: an episode that waits for the engine, which has stopped, keeps the worker that another one waits for."""
    write_lines(tmp_path / "in.jsonl", [line(f"e{number}", kind="first") for number in range(8)])
    stop_at(8, monkeypatch, "#1")
    done, found = live("--tool-workers", 1)
    assert done.code == 130 and (tmp_path / "dead").exists()
    assert found.keys() >= {f"e{number}#1" for number in range(8)}


@pytest.mark.slow
def test_a_stopped_run_makes_no_episode_again(live, tmp_path, monkeypatch):
    """Fault: while the tools of an answer are waited for, the factories of other episodes are called again and
    again."""
    lines, log = [line("e0", kind="wait"), line("e1", kind="late")], tmp_path / "out.jsonl.tools.log"
    write_lines(tmp_path / "in.jsonl", lines[:1])
    live()
    cut(tmp_path / "out.jsonl", 1)
    log.unlink()
    write_lines(tmp_path / "in.jsonl", lines)
    stop_at(1, monkeypatch)
    done, _ = live("--resume", "--tool-workers", 1)
    assert done.code == 130 and log.read_text().count("made e0") == 1


@pytest.mark.slow
def test_a_bound_of_memory_bounds_the_open_episodes(live, tmp_path):
    """Fault: so many episodes are open that their threads have no room in --tool-memory, and good ones fail."""
    write_lines(tmp_path / "in.jsonl", [line(f"e{number}", kind="wait") for number in range(90)])
    done, found = live("--tool-workers", 1, "--tool-memory", "300M")
    assert done.code == 0 and len(episodes(found)) == 90


@pytest.mark.slow
def test_replies_that_waited_for_the_run_are_not_late(live, tmp_path, monkeypatch):
    """Fault: in an engine step longer than --tool-timeout replies fill the socket, and those behind are taken for calls
    that took too long."""
    monkeypatch.chdir(tmp_path)
    config, keys = Config(tools="live_tools:Large", tool_timeout=0.5, tool_workers=1), range(40)
    with opened_workers(config, str(tmp_path / "log"), pytest.fail) as workers:
        for do, *values in (("make", {"id": "e"}, 0), ("call", [("add", {})])):
            for key in keys:
                workers.ask(key, do, *values)
            time.sleep(1.5 if do == "call" else 0)
            found = []
            while len(found) < len(keys):
                found += workers.poll(0.0)
            assert {reply.error for reply in found} == {None}


@pytest.fixture
def one_worker(live, tmp_path, monkeypatch):
    """Makes tool workers, of which one has the episodes 1, 2, .. of a factory and of these kinds."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def begin(factory, kinds, **options):
            config = Config(tools=f"live_tools:{factory}", tool_workers=1, **options)
            workers = stack.enter_context(opened_workers(config, str(tmp_path / "log"), lambda sentence: None))
            for key, kind in enumerate(kinds, start=1):
                workers.ask(key, "make", {"id": f"e{key}", "kind": kind}, 0)
            assert {reply.error for reply in replies(workers, len(kinds))} == {None}
            return workers

        yield begin


def replies(workers, number):
    """So many replies; each must come in 10 s."""
    found = []
    while len(found) < number:
        found += (more := workers.poll(10))
        assert more, found
    return found


def call(workers, *keys):
    for key in keys:
        workers.ask(key, "call", [("add", {"n": 1})])


def test_a_dropped_episode_gets_no_worker(one_worker):
    """Fault: after Ctrl-C, each episode that nothing waits for has a worker started before those that are waited
    for."""
    workers = one_worker("Adder", ("exit", "hang"))
    call(workers, 2, 1)
    assert all(reply.is_lost for reply in replies(workers, 2))
    for key in (1, 2):
        workers.ask(key, "make", {"id": "again"}, 0)
    workers.drop(1)
    assert [reply.key for reply in replies(workers, 1)] == [2]


def test_an_episode_is_not_blamed_for_one_that_was_dropped(one_worker):
    """Fault: after Ctrl-C, an answered episode gets the error of one that is made again beside it."""
    workers = one_worker("Adder", ("exit", "hang"))
    call(workers, 1, 2)
    workers.drop(1)
    assert {reply.key: reply.is_lost for reply in replies(workers, 2)} == {1: True, 2: True}


def test_an_interrupted_worker_ends_at_once(one_worker):
    """Fault: its main thread ends and waits for the threads of coroutines, so that all of its episodes hang."""
    workers = one_worker("Threaded", ("interrupt", "hang"))
    call(workers, 2, 1)
    assert all(reply.is_lost for reply in replies(workers, 2))


def test_a_worker_that_outlives_its_kill_holds_nothing_up(one_worker, monkeypatch):
    """Fault: a process that the system cannot end, as it waits for a dead file server, stops the run for ever."""

    def wait(process, timeout=None):
        assert timeout is not None, "waits without a bound"
        raise subprocess.TimeoutExpired("", timeout)

    workers = one_worker("Adder", ("exit",))
    call(workers, 1)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", wait)
        [reply] = replies(workers, 1)
    assert reply.error == "call('add') ended its worker process by signal 9, which has no effect yet"


def test_a_request_that_waits_to_be_read_is_not_late(one_worker, monkeypatch):
    """Fault: a request that fills the socket is taken for one that took too long if the run is busy for a while."""
    workers = one_worker("Adder", (None,))
    workers.ask(1, "score", [{"content": "x" * 1_000_000}])
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 100)
    assert [reply.error for reply in replies(workers, 1)] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["Adder", "Threaded"])
def test_threads_that_hang_do_not_pile_up(live, tmp_path, monkeypatch, factory):
    """Faults: threads that hang fill --tool-memory, so that good episodes fail; a worker with such threads stays, or
    takes its other episodes with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("apcbatch.job.tool_workers.GRACE_SECONDS", 0.0)
    config = Config(tools=f"live_tools:{factory}", tool_timeout=0.1, tool_workers=1, tool_memory=100 << 20)

    def ask(keys, do, *values):
        found = []
        for key in keys:
            workers.ask(key, do, *values)
        while len(found) < len(keys):
            found += workers.poll(0.2)
        return {reply.error for reply in found}

    with opened_workers(config, str(tmp_path / "log"), pytest.fail) as workers:
        assert ask([99], "make", {"id": "good"}, 0) == {None}
        [first] = workers._workers
        for begin in range(0, 25, 5):
            keys = range(begin, begin + 5)
            assert ask(keys, "make", {"id": "e", "kind": "hang"}, 0) == {None}
            assert ask(keys, "call", [("add", {"n": 1})]) == {"call('add') took more than 0.1 s (--tool-timeout)"}
            for key in keys:
                workers.drop(key)
        assert ask([99], "call", [("add", {"n": 1})]) == {None} and len(workers._workers) == 2
        workers.drop(99)
        assert ask([100], "make", {"id": "good"}, 0) == {None}
        while first in workers._workers:
            workers.poll(0.1)


@pytest.mark.slow
def test_an_episode_that_ends_its_worker_between_calls_is_found(live, tmp_path):
    """Faults: it is made again without an end; an episode beside it fails for it."""
    write_lines(tmp_path / "bad.jsonl", [*[line(f"e{number}") for number in range(8)], line("x", kind="timer")])
    whole = untimed(live()[1])
    done, records = live("--tool-workers", 1, inputs="bad.jsonl", out="bad.out")
    found = {name: record for name, record in untimed(records).items() if name[0] == "e"}
    for name in whole:
        assert found[name] == whole[name], name
    assert all(one["error"] is None or one["error"]["code"] == "tool_failed" for one in records.values())
    assert episodes(records)["x"][-1]["apcbatch"]["end"] is not None


def is_gone(number):
    """Whether a process has ended, even if nothing has waited for it."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_processes_of_tools_end_with_a_run_that_is_killed(live, start, tmp_path):
    """Fault: what the tools have started goes on without the run."""
    process = start("run", "in.jsonl", *LIVE[:3], "live_tools:Hanging", "--tool-workers", 2)
    pids = tmp_path / "pids"
    while not (pids.exists() and pids.read_text().count("\n") == 16):
        time.sleep(0.05)
    assert not any(is_gone(number) for number in pids.read_text().split())
    process.send(signal.SIGKILL)
    while not all(is_gone(number) for number in pids.read_text().split()):
        time.sleep(0.05)


def test_functions_and_coroutines_of_an_episode_share_a_thread(live):
    """Fault: a connection that the constructor opens cannot be used in a coroutine."""
    done, records = live("--tools", "live_tools:Base")
    assert done.code == 0 and {turns[-1]["apcbatch"]["score"]["one"] for turns in episodes(records).values()} == {1}


@pytest.mark.slow
def test_retrying_errors_begins_episodes_anew(live, tmp_path):
    """Fault: an episode whose tool failed goes on behind the failure, or its earlier turns stay."""
    module = tmp_path / "live_tools.py"
    module.write_text(
        CODE.replace(
            "match self.kind:",
            'if "tool" in str(arguments) or self.total > 4: raise ValueError(self.total)\n        match self.kind:',
        )
    )
    done, failed = live()
    errors = {name for name, turns in episodes(failed).items() if turns[-1]["error"]}
    assert (
        done.code == 3 and errors and any(len(turns) > 1 for name, turns in episodes(failed).items() if name in errors)
    )
    module.write_text(CODE)
    done, found = live("--retry-errors")
    assert done.code == 0 and "the module of --tools live_tools:Adder has changed" in done.stderr
    again = untimed(live("--overwrite")[1])
    assert untimed(found) == again


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--turns", "live"), 2, "needs --tools PACKAGE.MODULE:FACTORY"),
        (("--turns", "each", "--tools", "live_tools:Adder"), 2, "--tools needs --turns live"),
        (("--ray", "local"), 2, "--ray cannot be used with --turns live"),
        (("--shard", "1/2"), 2, "--shard cannot be used with --turns live"),
        (("--draft-from", "in.jsonl"), 2, "--draft-from cannot be used with --turns live"),
        (("--score",), 2, "scores recorded answers"),
        (("--tools", "live_tools:Missing"), 2, "--tools live_tools:Missing cannot be used: AttributeError"),
        (("--tools", "no_such_module:Adder"), 2, "ModuleNotFoundError"),
        (("--tools", "live_tools"), 2, "--tools live_tools does not name a factory"),
        (("--tools", ":Adder"), 2, "--tools :Adder does not name a module"),
        (("--tools", "live_tools:TOOLS"), 2, "is no function or class"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(live, apcbatch, tmp_path, options, code, words):
    """Fault: episodes begin that cannot end, or options that change nothing."""
    if options == ("--turns", "live"):
        done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *options)
    else:
        done, _ = live(*options)
    assert done.code == code and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert "cannot be used: " not in words or "Traceback" in (tmp_path / "out.jsonl.tools.log").read_text()


def test_code_is_named_on_the_command_line_alone(apcbatch, live, tmp_path, monkeypatch):
    """Fault: a configuration file, the environment or a run file runs code."""
    (tmp_path / "a.yaml").write_text("tools: live_tools:Adder\nturns: live\n")
    for options, variables in ((("--config", "a.yaml"), {}), ((), {"APCBATCH_TOOLS": "live_tools:Adder"})):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--turns", "live", *options)
        assert done.code == 2 and "give --tools on the command line" in done.stderr
    live("--limit", 1)
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--resume")
    assert done.code == 2 and 'a run with --tools "live_tools:Adder"; give that again' in done.stderr


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        (("--max-turns", 1), {"max_turns"}),
        (("--max-turns", 2), {"max_turns", "done"}),
        (("--max-episode-tokens", 250), {"context", "done"}),
    ],
    ids=["one turn", "two turns", "tokens"],
)
def test_bounds_end_episodes_without_an_error(live, options, ends):
    """Fault: an episode has no end, or becomes an error record at its bound."""
    done, records = live(*options)
    assert done.code == 0
    found = {turns[-1]["apcbatch"]["end"] for turns in episodes(records).values()}
    assert found <= ends | {"error"} and found & ends
    assert all(turns[-1]["apcbatch"]["score"] for turns in episodes(records).values())


def test_episodes_without_tools_are_warned_of(live, tmp_path):
    """Fault: neither the line nor the episode offers tools, and nothing says so."""
    assert "has tools, and others like it" not in live()[0].stderr
    module = tmp_path / "live_tools.py"
    module.write_text(CODE.replace("tools = TOOLS", "tools = None"))
    assert "neither its episode nor its line has tools, and others like it" in live("--overwrite")[0].stderr


def test_lines_that_cannot_begin_an_episode(live, tmp_path):
    """Fault: a bad line ends the run, or has the id of an episode's turn."""
    write_lines(tmp_path / "bad.jsonl", [
        line("n", n=2), {"id": "done", "messages": [*line("x")["messages"], {"role": "assistant", "content": "a"}]},
        {"id": "bad", "messages": 5}, line("good"), line("good"),
    ])  # fmt: skip
    done, records = live("--samples", 2, inputs="bad.jsonl")
    words = {name: record["error"]["message"] for name, record in records.items() if record["error"]}
    assert done.code == 3 and set(words) >= {"n#1", "done#1", "bad#1", "good#1"}
    assert "--samples" in words["n#1"] and "after a user's message" in words["done#1"]
    assert {name.partition("#")[0] for name in records} >= {"good/0", "good/1"}


def test_async_calls_of_one_answer_run_side_by_side(live):
    """Fault: calls of one answer wait for each other; or the one that ends first gets the first id."""
    _, records = live("--tools", "live_tools:Beside")
    two = next(one for one in records.values() if len(one["apcbatch"]["tools"]) == 2)
    results = [json.loads(one["content"])["calls"] for one in two["apcbatch"]["appended"]]
    assert len(set(results)) == 1, "both were under way at once"


def test_a_transcript_is_shown(live, apcbatch, tmp_path):
    """Fault: messages in another order, of another episode, or of an attempt that was given up; a traceback for an OUT
    that was edited."""
    _, records = live()
    name, turns = next((name, turns) for name, turns in episodes(records).items() if len(turns) > 2)
    done = apcbatch("show", "out.jsonl", "--episode", name, "--json")
    found = json.loads(done.stdout)
    assert (found["end"], found["score"]) == (turns[-1]["apcbatch"]["end"], turns[-1]["apcbatch"]["score"])
    assert found["score"]["messages"] == len(found["messages"]) + 1, "the line has one message"
    shown = apcbatch("show", "out.jsonl", "--episode", name).stdout.splitlines()
    said = [turn["response"]["body"]["choices"][0]["message"] for turn in turns]
    assert shown[0] == f"line {turns[0]['line']} of INPUT has the messages before these"
    assert shown[-1] == f"score: {json.dumps(found['score'])}"
    assert sum(line.startswith("assistant:") for line in shown) == len(said)
    assert sum(line.startswith("  calls ") for line in shown) == sum(len(one["tool_calls"]) for one in said)
    none = apcbatch("show", "out.jsonl", "--episode", "nobody")
    assert none.code == 2 and "no record has the episode 'nobody'; give the OUT of" in none.stderr
    text = (tmp_path / "out.jsonl").read_text()
    for old, new, words in (
        ('"appended":[', '"appended":[5,', "are not as this program writes them"),
        ('"attempt":1', '"attempt":"x"', "no record has the episode"),
        ('"tool_calls":[{', '"tool_calls":[5,{', "are not as this program writes them"),
    ):
        (tmp_path / "odd.jsonl").write_text(text.replace(old, new))
        odd = apcbatch("show", "odd.jsonl", "--episode", name)
        assert odd.code == 2 and words in odd.stderr


@pytest.mark.parametrize("history", ["template", "tokens"])
def test_what_was_sampled_is_in_the_next_prompt(live, history):
    """Faults: an answer is rendered again where the record does not say so; `sampled` names other tokens; token ids
    that are not those of prompt and answer."""
    _, records = live("--history", history, "--token-ids")
    num_kept = 0
    for turns in episodes(records).values():
        said = []
        for turn in turns:
            body, ours = turn["response"]["body"], turn["apcbatch"]
            prompt, [choice] = body["prompt_token_ids"], body["choices"]
            assert len(prompt) == body["usage"]["prompt_tokens"]
            assert choice["token_ids"] == ours["completion_token_ids"]
            parts = [prompt[begin:end] for begin, end in ours["sampled"]]
            if "rendered_again" not in ours["warning_kinds"]:
                assert parts == said[len(said) - len(parts) :] and (len(parts) == len(said) or history == "template")
                assert bool(parts) == bool(said)
                num_kept += bool(parts)
            said.append(choice["token_ids"])
    assert num_kept > 10


def test_a_report_sums_episodes_up(live, apcbatch, tmp_path):
    """Fault: ends, turns or scores of episodes are nowhere in a report, or at the end of the run; or a damaged OUT ends
    the report."""
    ran, records = live()
    found = episodes(records)
    calls = sum(len(one["apcbatch"]["tools"]) for one in records.values())
    mean = sum(turns[-1]["apcbatch"]["score"]["total"] for turns in found.values()) / len(found)
    words = f"{len(records)} turns, with {calls} calls of tools"
    done = apcbatch("report", "out.jsonl", "-o", "again.html")
    for text in (ran.stderr, done.stderr + done.stdout):
        assert "8 episodes ended" in text and words in text and f"{mean:.4g}" in text
    out = tmp_path / "out.jsonl"
    odd = (
        out.read_text()
        .replace('"end":"done"', '"end":[5]')
        .replace('"total":', '"\u2028":')
        .replace('"tools":[{', '"tools":[5,{')
    )
    out.write_text(odd)
    assert apcbatch("report", "out.jsonl", "-o", "odd.html").code == 0


@pytest.mark.slow
def test_a_coroutine_that_blocks_fails_alone(live, monkeypatch):
    """Fault: the other episodes of its worker are taken for slow."""
    monkeypatch.setattr("apcbatch.job.tool_workers.DROP_SECONDS", 1.0)
    done, records = live("--tools", "live_tools:Blocking", "--tool-workers", 1, "--tool-timeout", 1)
    failed = {name for name, turns in episodes(records).items() if turns[-1]["error"] is not None}
    assert failed == {"e0"} and len(episodes(records)) == 8


def test_other_commands_know_first_turns_alone(live, apcbatch, start, tmp_path):
    """Faults: a plan of one turn passes for that of whole episodes; prompts without the episodes' tools; memory without
    the episodes that are open; a traceback of what the tools raise."""
    write_lines(tmp_path / "in.jsonl", [*[line(f"e{number}") for number in range(8)], line("x", kind="make")])
    for options, words, has_tools in (((), "of the lines", False), (LIVE[2:4], "that --tools gives", True)):
        done = apcbatch("show", "in.jsonl", "--turns", "live", "--json", *options)
        assert done.code == 0 and f"only the first turns are known here, with the tools {words}" in done.stderr
        assert ('"name": "add"' in json.loads(done.stdout)["text"]) == has_tools
        done = apcbatch("plan", "in.jsonl", "--turns", "live", "--samples", 3, *options)
        assert done.code == 0 and words in done.stderr
        assert ("1 tool_failed" in done.stdout) == has_tools
        assert f"two states of each of {24 if has_tools else 27} open episodes" in done.stdout.replace("\n", " ")
    done = apcbatch("plan", "in.jsonl", *LIVE[2:4])
    assert done.code == 2 and "--tools needs --turns live" in done.stderr
    done = start("doctor", "--model", DEMO_DIR, "--tools", "live_tools:Adder").end()
    assert "live_tools:Adder can be loaded; of an empty line it makes no episode" in done.stdout
    assert "Traceback" not in done.stderr
    done = apcbatch("doctor", "--tools", "live_tools:Missing")
    assert done.code == 1 and "AttributeError" in done.stdout
