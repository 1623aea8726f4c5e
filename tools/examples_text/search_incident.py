"""Branching search for the cause of an incident: each hypothesis is a branch that parts once more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples_text.incident_checkout import CHECKOUT
from examples_text.incident_data import Deploy, Hypothesis, Incident, Logs, Metric, stamp
from examples_text.incident_login import LOGIN
from examples_text.incident_mail import MAIL
from examples_text.script import Call, Script, function

SYSTEM = (Path(__file__).parent / "prompts" / "incident.txt").read_text(encoding="utf-8").strip()
INCIDENTS = (CHECKOUT, MAIL, LOGIN)
SINCE = {"type": "string", "description": "The first minute, HH:MM."}
TOOLS = [
    function(
        "logs",
        "Lines that a service wrote, oldest first.",
        {
            "service": "The name of the service or node.",
            "level": {"type": "string", "enum": ["error", "warning", "info", "debug"]},
            "since": SINCE,
        },
        contains="Only lines with this text.",
    ),
    function(
        "metric",
        "One metric of a service, a value every few minutes.",
        {"service": "The name of the service.", "name": "The metric, such as p99.", "since": SINCE},
        every={"type": "integer", "description": "Minutes between two values; 2 or 5."},
    ),
    function(
        "deploys",
        "Deploys and configuration changes of all services, oldest first.",
        {"since": SINCE},
        service="Only this service.",
    ),
]
PICKS = ("Let's test number {n} first.", "Take number {n}, please.")
REACTIONS = ("Makes sense. What would you look at next?", "OK. Is it really closed, then?")
ASKS = (
    "Thanks. Write me the summary for the channel, please.",
    "Good work. Can you sum up what we know for those who join now?",
)


def look(incident: Incident, what: Logs | Metric | tuple[Deploy, ...]) -> Call:
    """The call that shows it, and what it returns."""
    if isinstance(what, tuple):
        return "deploys", {"since": "06:00"}, {"deploys": [entry.as_json() for entry in what]}
    arguments: dict[str, Any] = {"service": what.service}
    if isinstance(what, Logs):
        start = (incident.metric.change_minute + 7) * 60
        arguments |= {"level": what.level, "since": stamp(start)[:5]}
        return "logs", arguments, what.as_json(start, incident.name)
    arguments |= {"name": what.name, "since": stamp(incident.start * 60)[:5], "every": what.every}
    return "metric", arguments, what.as_json(incident.start, incident.name)


def root(incident: Incident, name: str) -> Script:
    """Everything before a hypothesis is chosen."""
    script = Script(name, SYSTEM, TOOLS)
    script.user(f"{incident.alert}\n\nFor reference: {incident.platform}")
    script.call(
        "I begin with the errors of the affected service and the metric behind the alert.",
        look(incident, incident.errors),
        look(incident, incident.metric),
    )
    listed = [
        f"{number}. {one.title}. If so, I expect {one.expect}; it is ruled out by {one.ruled_out}."
        for number, one in enumerate(incident.hypotheses, start=1)
    ]
    listed += [f"{number}. {text}" for number, text in enumerate(incident.others, start=len(listed) + 1)]
    script.say(
        f"The log is dominated by one kind of line, with {incident.errors.more} more like it, and the metric "
        "changes at the same time. These are the hypotheses:\n"
        + "\n".join([*listed, "Which one do we test?"])
    )
    return script


def explore(script: Script, incident: Incident, number: int, hypothesis: Hypothesis, deeper: int) -> None:
    """Test one hypothesis, first broadly, then with one of its two deeper looks."""
    script.user(PICKS[number % 2].format(n=number))
    script.call(
        f"If number {number} is true, I expect {hypothesis.expect}. I look at {hypothesis.first.service} "
        "first.",
        look(incident, hypothesis.first),
    )
    script.call("And the number that belongs to it.", look(incident, hypothesis.second))
    script.say(hypothesis.finding)
    script.user(REACTIONS[number - 1])
    chosen = hypothesis.looks[deeper]
    script.call(chosen.reason, look(incident, chosen.what))
    script.say(chosen.finding)


def conversations() -> Iterator[Script]:
    """All incident conversations; those that found the cause end with a summary or the request for it."""
    count = 0
    for incident in INCIDENTS:
        for number, hypothesis in enumerate(incident.hypotheses, start=1):
            for deeper in range(2):
                script = root(incident, f"search-incident-{incident.name}-{'abcd'[2 * number - 2 + deeper]}")
                explore(script, incident, number, hypothesis, deeper)
                count += 1
                if number == 1:
                    script.user(ASKS[deeper])
                    script.say(incident.summary)
                if count % 5 == 0:
                    script.drop_answer()
                yield script
