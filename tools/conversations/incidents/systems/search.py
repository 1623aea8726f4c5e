"""The search for a cause in one of the examples' systems: the flow and the words of the examples, and others.

Must not know: what can be wrong.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from examples_text.script import Call, Script
from examples_text.search_incident import ASKS, PICKS, SYSTEM, TOOLS

from conversations.incidents.systems.system import System, SystemWorld
from conversations.incidents.world import Level, decisive_line, values
from conversations.lengths import MOST_ANSWER_TOKENS, num_tokens
from conversations.words import say

LONGEST_LIST = MOST_ANSWER_TOKENS - 9  # tokens before the question

ALERTS = (
    "PagerDuty: {victim} {metric} {now}[ for ten minutes|]. {effect} It started around {at}[, I think|]. "
    "[Nothing is planned today. |]Where do we start?",
    "Alert: {metric} of {victim} {now}. {effect} It is {clock} now and it [got bad|began] [quite suddenly|all "
    "at once] [around|at about] {at}. [I'd like to have this fixed soon.|Can you find out what is going on?]",
    "Alert: {metric} of {victim} {now}. {effect} [The instances are all up and look green. |]Since {at}[, I think|]"
    ". [Can you find out what is going on?|What is it?]",
    "[Hello|Hi]. {effect} We see {metric} of {victim} {now} since about {at}. [Where do we start?|What do "
    "you see?|Can you have a look?]",
)
BEGIN = "I begin with the errors of the affected service and the metric behind the alert."
SHOWN = (
    "The log is dominated by one kind of line, with {more} more like it, and the metric changes at the same time. "
    "These are the hypotheses:",
    "The log is dominated by one kind of line, with {more} more like it, and the metric changes at the same time. "
    "These are the hypotheses:",
    "The log is dominated by one kind of line, and {metric} goes to {after} at {since}. These are the hypotheses:",
    "{more} more lines like these, and {metric} goes from {before} to {after} at {since}. The hypotheses:",
)
SHOWN_BRIEFLY = "These are the hypotheses:"
FULL = "{}. {}. If so, I expect {}; it is ruled out by {}."
BRIEF = "{}. {}: expect {}; ruled out by {}."
MORE_PICKS = (
    *PICKS,
    *PICKS,
    "[Start with|Number|Test] {n}[, please|].",
    "I would [test|try] number {n}.",
    "You choose.",
)
FIRST_LOOKS = (
    "If number {n} is true, I expect {expect}. I look at {part} first.",
    "If number {n} is true, I expect {expect}. I look at {part} first.",
    "For number {n} I expect {expect}, so {part} comes first.",
)
SECOND_LOOK = "And the number that belongs to it."
HOLDS = ("Makes sense. What would you look at next?", "[OK|Good]. [What is behind it|Why now]?", "What next?")
CLOSED = (
    "OK. Is it really closed, then?",
    "OK. Is it really closed, then?",
    "Makes sense. What would you look at next?",
    "[Are you sure|Sure]? One more look, please.",
)
CALM = (
    'The log of {part} is what it always is ("{line}"), and {measure} has not moved: {before} at {till}, {last} at '
    "{until}. That contradicts the hypothesis.",
    "{measure} of {part} is {before} {unit} at {till} and {last} at {until}, so it does not change when the errors "
    "begin. [The log shows nothing but routine. |]This is ruled out as far as that goes.",
    "Neither expectation is met: {part} writes routine lines, and {measure} stays at about {before} {unit}. [An "
    "incident like this would show there. |]That contradicts the hypothesis.",
)
DEPLOYS = (
    "Something must have changed, so I look at the deploys and settings of today.",
    "It does not happen by itself, so I look at what was deployed before {at}.",
    "Was anything changed around {at} that touches {part}?",
)
TAILS = (
    "Before I close it, one check of the warnings of {part}.",
    "To be sure I look for failures that would not show up in the numbers.",
    "One more look, at the warnings of {part}.",
)
TAIL_SAYS = (
    'Nothing but routine, such as "{line}". I close this hypothesis. New evidence would be {expect}.',
    'There are only lines like "{line}", nothing that would explain it. I close number {n}; new evidence would be '
    "{expect}.",
)
WAITS = (
    "If it were {part}, {part} should be busy. I look at its {measure}.",
    "I check whether {part} has more to do than before.",
)
WAIT_SAYS = (
    "{measure} of {part} falls from {before} at {till} to {after} at {since}: it gets less to do than before. What is "
    "wrong happens before {part} is asked. I close this hypothesis and recommend number {other} next.",
    "{part} has become idle, from {before} to {after} {unit} at {since}. Something else is waited for, so number "
    "{other} should be next. I close this one.",
)
IDLE = (
    Level("requests_per_minute", "requests", (240, 980), (40, 150)),
    Level("cpu", "percent of one core", (24, 60), (2, 9)),
)
SUMMARIES = (
    "Since {at} UTC {because}. {metric} of {victim} is at {now}. Now: {act}. Tomorrow: {tomorrow}.",
    "Since {at} UTC {metric} of {victim} is at {now}: {because}. Now: {act}. Tomorrow: {tomorrow}.",
)


def threshold(value: float, unit: str) -> str:
    """The round limit that a value exceeds, as an alert says it: 5 %, 4 s, 50,000."""
    if unit == "ms" and value >= 1000:
        value, unit = value / 1000, "s"
    digits = len(str(int(value))) - 1
    limit = int(value) // 10**digits * 10**digits
    return f"{limit:,} {'%' if unit == 'percent' else unit}" if unit in ("percent", "s", "ms") else f"{limit:,}"


class SystemSearch:
    """One incident, from the alert to the summary. `causes` are the true trouble and another one, as numbered."""

    def __init__(self, rng: Random, name: str, system: System) -> None:
        self.rng, self.world = rng, SystemWorld(rng, system)
        self.script = Script(name, SYSTEM, TOOLS)
        self.true, wrong = rng.sample(system.troubles, 2)
        self.causes = [self.true, wrong] if rng.random() < 0.6 else [wrong, self.true]
        self.expects = [self.world.text(cause.expect) for cause in self.causes]
        self.now = ""

    def _log(self, part: str, level: str, patterns: tuple[str, ...], decisive: str, slow: bool) -> Call:
        """A look at a log."""
        lines = self.rng.randrange(6, 13)
        return self.world.logs_call(self.world.logs(part, level, patterns, decisive, lines, slow))

    def _known(self, number: int) -> dict[str, Any]:
        """What is said of a hypothesis."""
        cause = self.causes[number - 1]
        known = {"n": number, "other": 3 - number, "part": cause.part, "expect": self.expects[number - 1]}
        return known | {"at": self.world.names["at"], "measure": cause.measure.name}

    def begin(self) -> None:
        """The alert, the first look, the hypotheses."""
        rng, world, true = self.rng, self.world, self.true
        victim = world.names["victim"]
        level = world.system.level if rng.random() < 0.8 else rng.choice(("error", "warning"))
        errors = world.logs(victim, level, true.symptoms, "", rng.randrange(9, 15), slow=True)
        errors = replace(errors, more=rng.randrange(60, 24000))
        metric = world.metric_call(true.alarm.draw(rng, victim, world.change))
        seen = values(metric[2], world.change)
        self.now = f"{seen['last']} {true.alarm.unit}"
        spoken = true.alarm.name.replace("_", " ")
        said = f"above {threshold(float(seen['last']), true.alarm.unit)}"
        if true.alarm.before[0] > true.alarm.after[0] or rng.random() < 0.3:
            said = f"at {self.now}"
        known = {"victim": victim, "metric": spoken, "now": said, "clock": world.names["clock"]}
        alert = say(rng, ALERTS, effect=world.text(true.effect), at=world.names["at"], **known)
        self.script.user(f"{alert}\n\nFor reference: {world.platform()}")
        self.script.call(BEGIN, world.logs_call(errors), metric)
        after, since = ("last", "until") if true.alarm.gradual else ("after", "from")
        told = {"before": seen["before"], "after": seen[after], "since": seen[since], "metric": true.alarm.name}
        self.script.say(self._hypotheses(say(rng, SHOWN, more=errors.more, **told)))

    def _hypotheses(self, shown: str) -> str:
        """Both causes as the examples tell them, or in fewer words, with as many others as there is room for."""
        told = [
            (number, self.world.text(cause.title), expect, self.world.text(cause.ruled_out))
            for number, (cause, expect) in enumerate(zip(self.causes, self.expects, strict=True), start=1)
        ]
        full, brief = ([form.format(*one) for one in told] for form in (FULL, BRIEF))
        others = self.rng.sample(self.world.system.others, self.rng.choice((0, 0, 0, 1, 2, 2)))
        more = [f"{number}. {other}" for number, other in enumerate(others, start=3)]
        if more:
            ways = [[SHOWN_BRIEFLY, *brief, *more], [SHOWN_BRIEFLY, *brief, *more[:1]], [SHOWN_BRIEFLY, *full]]
        else:
            ways = [[shown, *full], *self.rng.sample([[shown, *brief], [SHOWN_BRIEFLY, *full]], 2)]
        fits = (way for way in ways if sum(map(num_tokens, way)) + len(way) <= LONGEST_LIST)
        return "\n".join([*next(fits, [SHOWN_BRIEFLY, *brief]), "Which one do we test?"])

    def test(self, number: int, pick: str) -> None:
        """Look at the part and then at its number, and say what they mean."""
        rng, world, cause = self.rng, self.world, self.causes[number - 1]
        true, known = cause is self.true, self._known(number)
        self.script.user(pick)
        patterns, decisive = (cause.traces, cause.decisive) if true else (cause.calm, "")
        look = self._log(cause.part, cause.level, patterns, decisive, slow=true)
        self.script.call(say(rng, FIRST_LOOKS, **known), look)
        measured = world.metric_call(cause.measure.draw(rng, cause.part, world.change, calm=not true))
        self.script.call(SECOND_LOOK, measured)
        seen = values(measured[2], world.change) | {"line": decisive_line(look[2])}
        self.script.say(world.text(cause.found, **seen) if true else say(rng, CALM, **known, **seen))

    def change(self, number: int) -> None:
        """The change behind the true cause, among the deploys of the day."""
        world, true = self.world, self.true
        self.script.user(say(self.rng, HOLDS))
        kind = world.names["version"] if true.version == "version" else "config"
        look = world.deploys_call(true.guilty, kind, world.text(true.change))
        self.script.call(say(self.rng, DEPLOYS, **self._known(number)), look)
        self.script.say(world.text(true.mechanism))

    def deeper(self) -> None:
        """A second log that shows the mechanism of the true cause."""
        world, true = self.world, self.true
        self.script.user(say(self.rng, HOLDS))
        look = self._log(true.deep_part, true.deep_level, true.deep_traces, true.deep_decisive, slow=True)
        self.script.call(world.text(true.deep_reason), look)
        self.script.say(world.text(true.deep_found, line=decisive_line(look[2])))

    def close(self, number: int) -> None:
        """A second look at a hypothesis that seems to be wrong: at its warnings, or at how busy its part is."""
        rng, world, part = self.rng, self.world, self.causes[number - 1].part
        known = self._known(number)
        self.script.user(say(rng, CLOSED))
        if part == world.names["victim"] or rng.random() < 0.5:
            look = self._log(part, "warning", world.system.warnings[part], "", slow=False)
            self.script.call(say(rng, TAILS, **known), look)
            self.script.say(say(rng, TAIL_SAYS, line=decisive_line(look[2]), **known))
            return
        idle = rng.choice(IDLE)
        known["measure"] = idle.name
        look = world.metric_call(idle.draw(rng, part, world.change))
        self.script.call(say(rng, WAITS, **known), look)
        seen = values(look[2], world.change)
        self.script.say(say(rng, WAIT_SAYS, since=seen.pop("from"), **known, **seen))

    def sum_up(self) -> None:
        """What happens, since when, why, what to do now and tomorrow."""
        world, true = self.world, self.true
        told = {"because": true.because, "act": true.now, "tomorrow": true.tomorrow}
        known: dict[str, Any] = {key: world.text(text) for key, text in told.items()}
        known |= {"at": world.names["at"], "victim": world.names["victim"], "metric": true.alarm.name}
        self.script.user(say(self.rng, ASKS))
        self.script.say(say(self.rng, SUMMARIES, now=self.now, **known))


def conversation(rng: Random, name: str, system: System) -> Script:
    """A search in the system: the true cause first or the wrong one, each with a second look or without."""
    search = SystemSearch(rng, name, system)
    search.begin()
    right = search.causes.index(search.true) + 1
    if rng.random() < 0.45:
        search.test(3 - right, say(rng, MORE_PICKS, n=3 - right))
        if rng.random() < 0.65:
            search.close(3 - right)
            return search.script
        search.test(right, say(rng, ("Then number {n}.", "[OK, then|Next] number {n}[, please|]."), n=right))
    else:
        search.test(right, say(rng, MORE_PICKS, n=right))
        looks = rng.choice(("change", "deeper", "both", "change", "deeper"))
        if looks in ("deeper", "both"):
            search.deeper()
        if looks in ("change", "both"):
            search.change(right)
    if len(search.script.messages) <= 18 and rng.random() < 0.8:
        search.sum_up()
    return search.script
