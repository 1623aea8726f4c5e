"""Single questions to the functions of an incident search: one metric, one log, the deploys of a day.

Must not know: hypotheses.
"""

from __future__ import annotations

from random import Random
from typing import Any

from examples_text.incident_data import Deploy
from examples_text.script import Script
from examples_text.search_incident import SYSTEM, TOOLS

from conversations.incidents.faults import FAULTS
from conversations.incidents.more_faults import MORE_FAULTS
from conversations.incidents.world import World, decisive_line, values
from conversations.words import listed, plural, say

SYSTEMS = (
    "You [help|assist] the engineers of a [small|young] company who run {subject} services. [Look before you "
    "answer|Never guess a number]. You can only look, not change. [Times are UTC|All times are UTC]. [Be brief|Short "
    "answers].",
    "[Operations assistant|You are on call]. [Quote the number or the line that decides|Numbers with their unit and "
    "time]. [Two sentences are enough|Keep it short].",
)
METRIC_ASKS = (
    "What does {metric} of {service} look like since {start}?",
    "[Show me|Give me|How is] {metric} of {service} from {start} on[, every {every} minutes|]?",
    "Has {metric} of {service} changed since {start}?",
)
CHANGED = (
    "It was {before} {unit} at {till} and is {after} {unit} at {since}. The last value is {last} at {until}.",
    "[Yes|It changed]: from {before} at {till} to {after} {unit} at {since}[, and {last} at {until}|].",
)
FLAT = (
    "[No change|It is flat]: {before} {unit} at {till}, {last} {unit} at {until}.",
    "It stays at about {before} {unit}; the last value is {last} at {until}.",
)
LOG_ASKS = (
    "[Any|Are there] {level} lines from {service} since {start}?",
    "What does {service} log at level {level} since {start}?",
    "[Read|Look at] the {level} log of {service} from {start}, please.",
)
LOG_SAYS = (
    '{count} lines[ are shown|], {more}. The one that stands out: "{line}".',
    'Yes. The line to look at is "{line}"; {more}.',
)
DEPLOY_ASKS = (
    "What was deployed since {start}?",
    "[Did anybody deploy|Were there deploys] [after|since] {start}?",
    "[List|Show me] the changes since {start}[, please|].",
)
LAST_ASKS = ("[Which|What] was the last one?", "And the latest?", "What did the last one change?")
LAST_SAYS = (
    "The last one was {service} {version} at {at}: {change}.",
    '{service} {version}, at {at}. It says "{change}".',
)
HIGHEST_ASKS = ("[When|At what time] was it highest?", "What was the highest value?", "And the peak?")
HIGHEST = ("The highest value is {value} {unit}, at {at}.", "{value} {unit}, at {at}.")


def _metric(script: Script, world: World, rng: Random) -> None:
    """A metric that changed or did not, and its peak."""
    fault = rng.choice((*FAULTS, *MORE_FAULTS))
    level, role = rng.choice(((fault.alarm, "victim"), (fault.measure, fault.part)))
    calm = rng.random() < 0.3
    call = world.metric_call(level.draw(rng, world.names[role], world.change, calm))
    arguments, answer = call[1], call[2]
    script.user(
        say(
            rng,
            METRIC_ASKS,
            metric=level.name,
            service=world.names[role],
            start=arguments["since"],
            every=arguments["every"],
        )
    )
    script.call(None, call)
    seen = values(answer, world.change)
    seen["since"] = seen.pop("from")
    script.say(say(rng, FLAT if calm else CHANGED, **seen))
    if rng.random() < 0.4:
        known: dict[str, Any] = answer["values"]
        at = max(known, key=lambda time: known[time])
        script.user(say(rng, HIGHEST_ASKS))
        script.say(say(rng, HIGHEST, value=known[at], unit=level.unit, at=at))


def _logs(script: Script, world: World, rng: Random) -> None:
    """What a service wrote, and the line that matters."""
    fault = rng.choice((*FAULTS, *MORE_FAULTS))
    service = world.names[fault.part]
    logs = world.logs(service, fault.level, fault.traces, fault.decisive, rng.randrange(4, 8), slow=True)
    call = world.logs_call(logs)
    script.user(say(rng, LOG_ASKS, level=fault.level, service=service, start=call[1]["since"]))
    script.call(None, call)
    more = f"{plural(logs.more, 'more line')} were left off" if logs.more > 1 else "none was left off"
    script.say(say(rng, LOG_SAYS, count=logs.lines, more=more, line=decisive_line(call[2])))


def _deploys(script: Script, world: World, rng: Random) -> None:
    """The changes of the day, and the last of them."""
    fault = rng.choice([fault for fault in (*FAULTS, *MORE_FAULTS) if fault.guilty])
    call = world.deploys_call(world.names[fault.guilty], fault.kind, world.text(fault.change))
    entries = [Deploy(**entry) for entry in call[2]["deploys"]]
    script.user(say(rng, DEPLOY_ASKS, start=call[1]["since"]))
    script.call(None, call)
    if not entries:
        script.say("Nothing was deployed since then.")
        return
    names = [f"{entry.service} {entry.version} at {entry.at}" for entry in entries]
    script.say(f"{plural(len(entries), 'change')}: {listed(names)}.")
    if rng.random() < 0.5:
        last = entries[-1]
        script.user(say(rng, LAST_ASKS))
        script.say(say(rng, LAST_SAYS, service=last.service, version=last.version, at=last.at, change=last.change))


def conversation(rng: Random, name: str) -> Script:
    """One to three questions in a row."""
    world = World(rng)
    system = SYSTEM if rng.random() < 0.15 else say(rng, SYSTEMS, subject=world.names["subject"])
    script = Script(name, system, rng.sample(TOOLS, len(TOOLS)))
    for ask in rng.sample((_metric, _logs, _deploys), rng.randrange(1, 4)):
        ask(script, world, rng)
    return script
