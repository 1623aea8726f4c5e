"""Branching search for the cause of an incident in a company that is drawn, or in one of the examples' systems.

The examples' three incidents are held out.
"""

from __future__ import annotations

from random import Random
from typing import Any

from examples_text.incident_data import Logs
from examples_text.script import MAX_MESSAGES, Call, Script
from examples_text.search_incident import SYSTEM, TOOLS

from conversations.incidents import questions, systems
from conversations.incidents.faults import FAULTS, Fault
from conversations.incidents.more_faults import MORE_FAULTS
from conversations.incidents.world import World, decisive_line, values
from conversations.words import say

KNOWN_SYSTEMS = 0.4  # of the conversations
SEARCHES = 0.7  # of those in a drawn company; the others are single questions
LONGEST_LIST = 245  # characters of the hypotheses; where they are longer, they are told in fewer words
EVERY_FAULT = (*FAULTS, *MORE_FAULTS)

ALERTS = (
    "PagerDuty: {metric} of {victim} is {now}. [It started around|It began at about] {at}[, I think|]. {effect} "
    "[Nothing is planned today|I know of no maintenance]. Where do we start?",
    "Alert: {metric} of {victim} at {now}. {effect} It [got bad|started] [quite suddenly |]around {at}. [I'd like to "
    "have this fixed soon.|Can you have a look?|What do you make of it?]",
    "[Good morning|Hello|Hi], {victim} [does not feel well|is in trouble] since {at}: {metric} is {now}. {effect} "
    "[Please find out why|Where would you begin].",
    "{victim}: {metric} {now} since {at}. {effect} [I have ten minutes before a call|I am new on this team], so [tell "
    "me what you see|lead the way].",
)
EFFECTS = (
    "Support has {n} tickets[ so far|].",
    "[Customers|Shops|Users] write that {subject}s [take forever|fail now and then|are not saved].",
    "[Nobody has complained yet|We have seen it on the status page only].",
    "About one {subject} in {n} [fails|is lost].",
    "",
)
BEGINS = (
    "I begin with the errors of the affected service and the metric behind the alert.",
    "I begin with the errors of the affected service and the metric behind the alert.",
    "[First|Let me read] the [log|errors] of {victim} and {metric}.",
    "[I start with what is certain|First what is certain]: the errors of {victim}, and {metric} since before {at}.",
)
SHOWN = (
    "The log is dominated by one kind of line, and the metric changes at the same time. These are the hypotheses:",
    "{metric} goes from {before} at {till} to {after} at {since}. These are the hypotheses:",
    "{metric} was {before} at {till} and is {after} at {since}. [What could it be|Possible causes]:",
)
PICKS = (
    "Let's test number {n} first.",
    "Take number {n}, please.",
    "[Number|Start with] {n}[, please|].",
    "[I'd go for|I suspect] number {n}.",
    "You choose.",
)
LOOKS = (
    "If number {n} is true, I expect {expect}. I look at {part} first.",
    "If number {n} is true, I expect {expect}. I look at {part} first.",
    "Number {n}: I expect {expect}, so I read [the log of |]{part}.",
)
BOTH_LOOKS = (
    "[For|To test] number {n} I look at {part}.",
    "Number {n}: the log of {part} and its {measure}.",
)
SECOND_LOOKS = ("And the number that belongs to it.", "And the number that belongs to it.", "Now {measure} of {part}.")
CALM = (
    "{part} shows nothing but routine, and {measure} is {after} at {since}, as it was before ({before} at {till}). "
    "That contradicts the hypothesis, so I close it. New evidence would be {expect}.",
    'The log has only lines like "{line}", and {measure} stays at about {before}. I close number {n}. New evidence '
    "would be {expect}.",
    "[No|It is not that]: {measure} was {before} at {till} and {last} at {until}. Number {n} is closed.",
)
REACTIONS = (
    "Makes sense. What would you look at next?",
    "[OK|Good]. [Was anything deployed|Did anybody change something]?",
    "[And why today|Why now]?",
    "[What has changed|What is behind it], then?",
)
CHANGES = (
    "[An incident seldom comes by itself|Something must have changed], so I look at what was deployed[ before {at}|].",
    "I look at the deploys and settings of today.",
    "The deploys of today should tell.",
)
ASKS = (
    "Thanks. Write me the summary for the channel, please.",
    "Good work. Can you sum up what we know for those who join now?",
    "[Please sum it up.|A summary, please.|What do I tell the others?]",
    "[What should we do now|And what do we do]?",
)
SUMMARIES = (
    "Since {at} UTC {victim} is in trouble: {metric} is {now}. The cause: {because}. Now: {act}. The risk: {risk}. "
    "Tomorrow: {tomorrow}.",
    "Since {at} UTC {metric} of {victim} is at {now}, because {because}. Now: {act}. Risk: {risk}. Tomorrow: "
    "{tomorrow}.",
)
OTHERS = ("Then the other one.", "[OK|Good], [then|next] number {n}.", "[And|What about] number {n}?")


class Search:
    """One incident, from the alert to the summary. `causes` holds the true fault and others; `number` counts from 1."""

    def __init__(self, rng: Random, name: str) -> None:
        self.rng, self.world = rng, World(rng)
        self.script = Script(name, SYSTEM, TOOLS)
        self.true = rng.choice(EVERY_FAULT)
        self.causes = [self.true, *rng.sample([fault for fault in EVERY_FAULT if fault is not self.true], 2)]
        self.told = [self._tell(fault) for fault in self.causes]
        if sum(sum(map(len, one)) + 30 for one in self.told) > LONGEST_LIST:
            del self.causes[2:], self.told[2:]
        order = rng.sample(range(len(self.causes)), len(self.causes))
        self.causes = [self.causes[at] for at in order]
        self.told = [self.told[at] for at in order]
        self.now = ""

    def _tell(self, fault: Fault) -> tuple[str, str, str]:
        """Title, expectation, and what rules it out."""
        text = self.world.text
        return text(fault.title), text(fault.expect), text(fault.ruled_out)

    def begin(self) -> None:
        """The alert, the first look, the hypotheses."""
        rng, world, fault = self.rng, self.world, self.true
        names = world.names
        symptoms = world.logs_call(
            world.logs(names["victim"], rng.choice(("error", "warning")), fault.symptoms, slow=True)
        )
        metric = world.metric_call(fault.alarm.draw(rng, names["victim"], world.change))
        seen = values(metric[2], world.change)
        self.now = f"{seen['last']} {fault.alarm.unit}"
        known = {"victim": names["victim"], "at": names["at"], "metric": fault.alarm.name, "now": self.now}
        effect = say(rng, EFFECTS, subject=names["subject"], n=rng.randrange(3, 20))
        alert = say(rng, ALERTS, effect=effect, **known).replace("  ", " ")
        self.script.user(f"{alert}\n\nFor reference: {world.platform()}" if rng.random() < 0.8 else alert)
        self.script.call(say(rng, BEGINS, **known), symptoms, metric)
        told = list(enumerate(self.told, start=1))
        listed = [f"{n}. {title}. If so, I expect {yes}; it is ruled out by {no}." for n, (title, yes, no) in told]
        if sum(map(len, listed)) > LONGEST_LIST or rng.random() < 0.2:
            listed = [f"{n}. {title}. I expect {yes}; against it: {no}." for n, (title, yes, no) in told]
        after = ("last", "until") if fault.alarm.gradual else ("after", "from")
        since = {"before": seen["before"], "till": seen["till"], "after": seen[after[0]], "since": seen[after[1]]}
        shown = say(rng, SHOWN, metric=fault.alarm.name, **since)
        self.script.say("\n".join([shown, *listed, "Which one do we test?"]))

    def test(self, number: int, pick: str, together: bool) -> None:
        """Look at the part and at its number, in one message or in two, and say what it means."""
        rng, world, fault = self.rng, self.world, self.causes[number - 1]
        part, true = world.names[fault.part], fault is self.true
        expect = self.told[number - 1][1]
        patterns, decisive = (fault.traces, fault.decisive) if true else (fault.calm, "")
        logs: Logs = world.logs(part, fault.level, patterns, decisive, slow=true)
        look = world.logs_call(logs)
        measured = world.metric_call(fault.measure.draw(rng, part, world.change, calm=not true))
        self.script.user(pick)
        first = say(rng, LOOKS, n=number, expect=expect, part=part)
        if together:
            self.script.call(say(rng, BOTH_LOOKS, n=number, part=part, measure=fault.measure.name), look, measured)
        else:
            self.script.call(first, look)
            self.script.call(say(rng, SECOND_LOOKS, measure=fault.measure.name, part=part), measured)
        seen = values(measured[2], world.change) | {"line": decisive_line(look[2])}
        if true:
            self.script.say(world.text(rng.choice(fault.found), **seen))
            return
        rest = {key: value for key, value in seen.items() if key not in ("from", "unit")}
        told: dict[str, Any] = {"n": number, "part": part, "measure": fault.measure.name, "expect": expect}
        self.script.say(say(rng, CALM, since=seen["from"], **told, **rest))

    def ask_why(self) -> None:
        """The change behind the cause, among the deploys of the day."""
        world, fault = self.world, self.true
        self.script.user(say(self.rng, REACTIONS))
        guilty = world.names[fault.guilty] if fault.guilty else ""
        look: Call = world.deploys_call(guilty, fault.kind, world.text(fault.change))
        self.script.call(say(self.rng, CHANGES, at=world.names["at"]), look)
        self.script.say(world.text(fault.mechanism))

    def sum_up(self) -> None:
        """What happens, since when, why, what to do now and tomorrow."""
        world, fault = self.world, self.true
        parts = {"because": fault.because, "act": fault.now, "risk": fault.risk, "tomorrow": fault.tomorrow}
        told = {key: world.text(value) for key, value in parts.items()}
        known = {"victim": world.names["victim"], "at": world.names["at"], "metric": fault.alarm.name}
        self.script.user(say(self.rng, ASKS))
        self.script.say(say(self.rng, SUMMARIES, now=self.now, **known, **told))


def conversation(rng: Random, name: str) -> Script:
    """A search for a cause, or single questions."""
    if rng.random() < KNOWN_SYSTEMS:
        return systems.conversation(rng, name)
    if rng.random() > SEARCHES:
        return questions.conversation(rng, name)
    search = Search(rng, name)
    search.begin()
    right = search.causes.index(search.true) + 1
    wrong = rng.choice([n for n in range(1, len(search.causes) + 1) if n != right])
    first = right if rng.random() < 0.6 else wrong
    pick = say(rng, PICKS, n=first)
    search.test(first, pick, together=first != right)
    if first != right:
        if rng.random() < 0.2:
            return search.script
        pick = say(rng, OTHERS[1:] if len(search.causes) > 2 else OTHERS, n=right)
        search.test(right, pick, together=rng.random() < 0.5)
    if len(search.script.messages) <= MAX_MESSAGES - 4 and (first == right or rng.random() < 0.4):
        search.ask_why()
    if rng.random() < 0.7 and len(search.script.messages) <= MAX_MESSAGES - 2:
        search.sum_up()
    return search.script
