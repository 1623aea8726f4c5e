"""The time that a chat template reads: one for a run and its resumes, and said where prompts are made."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from apcbatch.cluster.ray_cluster import Machine
from apcbatch.config import Config
from apcbatch.data.template_options import ChatOptions
from apcbatch.model.locate import DEMO_DIR
from tests.chats import conversation, read_records, write_lines
from tests.cluster.test_sizing import asked
from tests.job.conftest import Outcome, answers

EAST, WEST = "Pacific/Kiritimati", "Pacific/Pago_Pago"  # 25 hours apart, so that their dates differ always
WARNING = "the chat template puts the date into prompts (strftime_now, here {} for each): a store of another day misses"


@pytest.fixture
def dated(tmp_path: Path) -> Path:
    """The bundled model with a template that begins with the date."""
    folder = tmp_path / "dated"
    shutil.copytree(DEMO_DIR, folder)
    template = folder / "chat_template.jinja"
    template.write_text("{{- strftime_now('%Y-%m-%d') -}}" + template.read_text())
    return folder


@pytest.fixture
def within(apcbatch, monkeypatch) -> Callable[..., Outcome]:
    """within(zone, *arguments): a command line in a time zone."""

    def within(zone: str, *arguments: object) -> Outcome:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            outcome = apcbatch(*arguments)
        time.tzset()
        return outcome

    return within


@pytest.fixture
def run(within, dated, tmp_path) -> Callable[..., Outcome]:
    """run(zone, out, *options): a run of four conversations in a time zone."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(4)])
    words = ("run", "in.jsonl", "--model", dated, "--max-tokens", 2, "-o")
    return lambda zone, out, *options: within(zone, *words, out, *options)


def facts_of(out: Path) -> dict:
    """The run file of an OUT."""
    return json.loads(Path(f"{out}.run.json").read_text())


def test_a_run_and_its_resumes_have_one_date(run, tmp_path):
    """Fault: each conversation gets the date of its own moment, in the zone of whichever process renders it."""
    begun = run(EAST, "out.jsonl", "--limit", 2)
    clock = facts_of(tmp_path / "out.jsonl")["template_clock"]
    assert begun.code == 0 and clock.endswith("+14:00")
    assert f"warning: {WARNING.format(clock)}" in begun.stderr
    resumed = run(WEST, "out.jsonl", "--resume")
    assert resumed.code == 0 and resumed.summary["already_done"] == 4, resumed.stderr
    assert facts_of(tmp_path / "out.jsonl")["template_clock"] == clock
    alone = run(WEST, "alone.jsonl", "--template-date", clock[:10])
    assert WARNING[:40] not in alone.stderr and facts_of(tmp_path / "alone.jsonl")["template_clock"] == clock[:10]
    found, same, other = (tmp_path / f"{name}.jsonl" for name in ("out", "alone", "other"))
    assert run(WEST, "other.jsonl").code == 0
    assert answers(read_records(found)) == answers(read_records(same)) != answers(read_records(other))


def test_a_report_shows_the_prompts_of_another_day(run, within, tmp_path):
    """Fault: --prompts renders with its own clock, and says that each request was made from another prompt."""
    assert run(EAST, "out.jsonl").code == 0
    words = ("report", "out.jsonl", "--prompts", "in.jsonl", "--model", tmp_path / "dated", "-o", "r.html")
    done = within(WEST, *words)
    assert done.code == 0 and "are not shown" not in done.stderr, done.stderr


def test_another_date_is_another_run(run, tmp_path):
    """Fault: --resume mixes two dates that were given; or refuses the same one, or what an earlier version began."""
    given = ("--template-date", "2026-01-05")
    assert run(EAST, "out.jsonl", "--limit", 1, *given).code == 0
    refused = run(EAST, "out.jsonl", "--resume", "--template-date", "2026-01-06")
    assert refused.code == 2 and "template_clock  then '2026-01-05', now '2026-01-06'" in refused.stderr
    assert run(EAST, "out.jsonl", "--limit", 2, "--resume", *given).code == 0
    path, facts = tmp_path / "out.jsonl.run.json", facts_of(tmp_path / "out.jsonl")
    path.write_text(json.dumps(facts | {"template_clock": "tomorrow"}))
    refused = run(EAST, "out.jsonl", "--resume")
    assert refused.code == 2 and "run.json: template_clock is 'tomorrow'; expected a time in ISO 8601" in refused.stderr
    del facts["template_clock"]
    path.write_text(json.dumps(facts))
    assert run(EAST, "out.jsonl", "--limit", 2, "--resume").code == 0


@pytest.mark.drawn(2)
@pytest.mark.parametrize("command", [("plan", "in.jsonl"), ("show", "in.jsonl"), ("doctor", "--device", "cpu")])
def test_what_looks_at_prompts_says_that_they_have_a_date(command, apcbatch, dated, tmp_path):
    """Fault: a store that another day filled is said to be reused; or a date that was given is warned of."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    said = apcbatch(*command, "--model", dated)
    assert WARNING.split("here")[0] in said.stdout + said.stderr and said.code == 0
    quiet = apcbatch(*command, "--model", dated, "--template-date", "2026-01-05")
    assert "strftime_now" not in quiet.stdout + quiet.stderr and quiet.code == 0


def test_workers_have_the_clock_of_the_run():
    """Fault: a worker that begins later, or in another zone, reads a clock of its own."""
    config = Config(begin="2026-01-05T10:00:00+14:00")
    sent = asked(config, Machine(1))[2]["config"]
    assert ChatOptions.of(Config(**sent)).clock == config.begin == ChatOptions.of(config).clock
