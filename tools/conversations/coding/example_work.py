"""Work in the examples' five projects: other mistakes and wishes than theirs, in their order and close to their words.

Must not know: which mistakes there are.
"""

from __future__ import annotations

import re
from random import Random

from examples_text.coding import LOOKS, SYSTEM, TOOLS
from examples_text.coding_task import Edit, changelog
from examples_text.script import MAX_MESSAGES, Call, Script

from conversations.coding import questions
from conversations.coding.desk import Desk, edit_call, fits
from conversations.coding.example_projects import PACKAGES, Case, Checkout, literal, put_behind, repository, written
from conversations.incidents.world import fill
from conversations.words import listed, say

QUESTIONS = 0.1  # of the conversations
READ = (
    '{both} should tell. I also search for where "{search}" occurs.',
    '{both} should tell. I also search for where "{search}" occurs.',
    'I read {both}, and search for "{search}".',
    '{path} is where it must be. I also search for "{search}".',
)
SHOWN = (
    "{call} gives {got}, [but it should be|and I expect|where I want] {want}.",
    "For example, {call} is {got} [instead of|and should be] {want}.",
    "{call} should be {want}.",
)
PLEASE = ("Please fix it.", "Can you fix that?", "Can you have a look?", "Please make it right.", "What's going on?")
TESTS = (
    "{reason} I'll write a test first.",
    "{reason} I'll write a test for it.",
    "{reason} First a test that shows it.",
    "{reason}",
    "{reason}",
)
RUNS = ("", "", "Now the tests.", "It should fail now.")
FIXES = (
    "{got} instead of {want}, as reported. {cure}",
    "It fails for the reason that was reported. {cure}",
    "It fails as reported. {cure}",
    "The same result as yours. {cure}",
    "{cure}",
)
CURES = (
    "Now the change itself.",
    "The smallest change is in {path}.",
    "{fixed} with this[ change| line|].",
    "The line in {path} has to change.",
)
AGAIN = ("", "", "All tests again.", "Now all of them again.")
DONE = (
    "{fixed} now. {reason} I changed one line in {path}, and {test} keeps it that way. All tests pass.",
    "{fixed}; the change is in {path}. [I did not change anything else|Nothing else has changed]. All {count} tests "
    "pass.",
    "{fixed} now. {reason} The new test in {tests} [says so|keeps it that way]. I left the rest as it is.",
    "{reason} {fixed} now, with a change in {path} and a test in {tests}. All {count} tests pass.",
)
CHANGELOG = (
    "Looks good. [Please put it into the changelog before I merge|Now put it into the changelog].",
    "Thanks. [Now|Please add] a line [for|to] the changelog.",
    "[Good|Great|Right]. And the line for the changelog, please.",
)
NOTED = (
    "It's in CHANGELOG.md under Unreleased. All {count} tests pass[, so it is ready to merge|].",
    "CHANGELOG.md says it now, under Unreleased. Tests are unchanged and pass.",
    'The line "{line}." is in CHANGELOG.md[ under Unreleased|]. All tests pass.',
)
SECOND = (
    "[Good|Right]. Add a second test with other values, and the line for the changelog.",
    "One more test with another value would be good. And the changelog[, please|].",
)
SECONDED = (
    "There is a second test now, {second}, and CHANGELOG.md has its line. All {count} tests pass.",
    "{second} is in {tests}, and CHANGELOG.md says it. All tests pass.",
)
DOCUMENT = (
    "[Good|Right]. Please write that into the docstring, and into the changelog.",
    "Add it to the docstring [as well|too], it's important. And the changelog.",
)
DOCUMENTED = (
    "The docstring in {path} says it now, and so does the changelog. Tests are unchanged and pass.",
    "It is in the docstring and in CHANGELOG.md under Unreleased. All {count} tests pass.",
)
USES = ("Where else does `{search}` occur?", "Is `{search}` used [anywhere else|in other files]?")
FOUND = ("`{search}` occurs in {found}.", "In {found}; I changed only {path}.")
ANSWERS = (
    (("Which files did you change?", "What did you change[, exactly|]?"), ("{path} and {tests}.",)),
    (("What is the new test called?", "What's the name of the test?"), ("{test}, in {tests}.",)),
    (("How many tests are there now?", "How many tests did you run?"), ("{count}, and all of them pass.",)),
    (
        ("[Thanks|Great|Perfect]. That's all.", "[Thank you|Thanks][, I'll merge it|]."),
        ("You're welcome.", "Good. {test} will tell if it comes back."),
    ),
)


class Work:
    """One mistake or wish in one of the projects, from the first look to the summary."""

    def __init__(self, rng: Random, name: str) -> None:
        package = rng.choice(list(PACKAGES))
        mistakes = PACKAGES[package].mistakes
        self.rng = rng
        self.case = case = Case(rng, package, rng.choice(mistakes))
        others = [Case(rng, package, one) for one in rng.sample(mistakes, 2)]
        self.repository = repository(rng, case, [one for one in others if one.mistake is not case.mistake])
        self.script = Script(name, SYSTEM, TOOLS if rng.random() < 0.9 else rng.sample(TOOLS, len(TOOLS)))
        self.desk = Desk(rng, self.script, self.repository)
        got, self.failure = case.seen
        self.known = {
            **case.values,
            "got": got,
            "want": literal(case.want),
            "call": case.shown,
            "path": case.path,
            "tests": case.tests,
            "test": case.test,
            "search": case.mistake.search,
            "both": f"{case.path} and {case.tests}" if case.tests in self.repository.files else case.path,
        }
        texts = {
            "reason": rng.choice(case.mistake.reasons),
            "fixed": case.mistake.fixed,
            "line": case.mistake.changelog,
        }
        self.known |= {key: fill(rng, text, self.known) for key, text in texts.items()}

    def text(self, templates: tuple[str, ...]) -> str:
        """One of the templates with what is known."""
        return say(self.rng, templates, **self.known)

    def wish(self) -> str:
        """What the developer writes."""
        rng, case = self.rng, self.case
        parts = [fill(rng, rng.choice(case.mistake.asks), self.known)]
        if not case.setup and len(case.shown) < 60 and rng.random() < 0.4:
            parts.append(self.text(SHOWN))
        if rng.random() < 0.4 and not parts[-1].endswith("?"):
            parts.append(rng.choice(PLEASE))
        return " ".join(parts)

    def look_around(self) -> None:
        """The list of files, the search and the files that matter, now and then with others."""
        rng, script, made = self.rng, self.script, self.repository
        script.user(self.wish())
        script.call(rng.choice(LOOKS), ("list_files", {}, made.listing()))
        paths = [path for path in (self.case.path, self.case.tests) if path in made.files]
        rest = [path for path in made.files if path not in paths and path.endswith(".py")]
        share = rng.random()
        if share < 0.45:
            paths += rng.sample(rest, 3 if share < 0.12 else 1)
        read: Call = ("read_files", {"paths": paths}, "\n\n".join(map(made.numbered, paths)))
        text = self.case.mistake.search
        script.call(self.text(READ), ("search", {"text": text}, made.search(text)), read)

    def put_right(self) -> None:
        """The test that fails, the change, the summary."""
        rng = self.rng
        edit = written(self.repository, self.case)
        self.desk.edit_and_run((edit,), (self.failure,), self._fitting(TESTS, edit), rng.choice(RUNS))
        self.known["cure"] = self.text(CURES)
        self.desk.edit_and_run((self.case.fix,), (), self._fitting(FIXES, self.case.fix), rng.choice(AGAIN))
        self.known["count"] = str(len(self.repository.tests()))
        self.script.say(self.text(DONE))

    def _fitting(self, templates: tuple[str, ...], edit: Edit) -> str:
        """A remark; just the reason, or nothing, where the edit is long."""
        texts = [self.text(templates), self.known["reason"] if templates is TESTS else ""]
        return next((text for text in texts if fits(text, edit_call((edit,)))), "")

    def follow(self) -> None:
        """What the developer asks afterwards."""
        asked = (self._changelog, self._second_test, self._docstring, self._uses, self._answer)
        self.rng.choices(asked, (3, 2, 3, 1, 2))[0]()

    def _line(self) -> Edit:
        return changelog(f"{self.known['line']}.")

    def _changelog(self) -> None:
        self.script.user(self.text(CHANGELOG))
        self.desk.edit_and_run((self._line(),), (), "", "")
        self.script.say(self.text(NOTED))

    def _second_test(self) -> None:
        """Two edits in one call: a test with other values, and the changelog."""
        case, rng = self.case, self.rng
        other = Case(rng, case.package, case.mistake)
        other.test = f"{case.test}_{rng.choice(('again', 'as_well', 'too', 'elsewhere'))}"
        edits = (put_behind(self.repository, case.tests, other.body), self._line())
        if not fits("", edit_call(edits)):
            return self._changelog()
        self.known["second"] = other.test
        self.script.user(self.text(SECOND))
        self.desk.edit_and_run(edits, (), "", rng.choice(AGAIN))
        self.known["count"] = str(len(self.repository.tests()))
        self.script.say(self.text(SECONDED))

    def _docstring(self) -> None:
        """Two edits in one call: what was changed goes into the docstring above it, and into the changelog."""
        path = self.case.path
        above = self.repository.files[path].partition(self.case.fix.new)[0].splitlines()
        found = [line.strip() for line in above if re.fullmatch(r' +""".{4,70}"""', line)]
        if not found or self.repository.files[path].count(found[-1]) != 1:
            return self._changelog()
        edit = Edit(path, found[-1], f'{found[-1][:-3]} {self.known["fixed"]}."""', "")
        self.script.user(self.text(DOCUMENT))
        self.desk.edit_and_run((edit, self._line()), (), "", self.rng.choice(AGAIN))
        self.script.say(self.text(DOCUMENTED))

    def _uses(self) -> None:
        text = self.case.mistake.search
        self.script.user(self.text(USES))
        self.script.call(None, ("search", {"text": text}, self.repository.search(text)))
        found = [path for path in sorted(self.repository.files) if text in self.repository.files[path]]
        self.known["found"] = listed(found)
        self.script.say(self.text(FOUND))

    def _answer(self) -> None:
        asks, answers = self.rng.choice(ANSWERS)
        self.script.user(self.text(asks))
        self.script.say(self.text(answers))


def conversation(rng: Random, name: str) -> Script:
    """A mistake put right or a wish fulfilled, in half of them with what is asked afterwards; or some questions."""
    if rng.random() < QUESTIONS:
        return questions.conversation(rng, name, Checkout(rng.choice(list(PACKAGES))))
    work = Work(rng, name)
    work.look_around()
    work.put_right()
    if rng.random() < 0.5 and len(work.script.messages) <= MAX_MESSAGES - 5:
        work.follow()
    return work.script
