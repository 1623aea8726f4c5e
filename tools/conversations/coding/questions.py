"""Questions about a project: where something is, what it gives, whether the tests pass.

Must not know: how a mistake is put right.
"""

from __future__ import annotations

from random import Random
from typing import Any

from examples_text.coding import SYSTEM, TOOLS
from examples_text.script import Script

from conversations.coding.example_projects import Checkout, Place
from conversations.coding.projects import Function, Project
from conversations.words import listed, say

RUN = "python -m pytest -q --tb=short"
SYSTEMS = (
    "You answer questions about the Python project {package}. [Read before you answer|Look it up, do not guess]. [You "
    "change nothing|Nothing is to be changed]. [Short answers|Be brief].",
    "You are a coding agent in a checkout of {package}. [Name the file and the line|Say where it is]. [Keep it "
    "short|One or two sentences].",
)
WHERE = (
    "Where is {name} [defined|used]?",
    "In which [file|module] is {name}?",
    "[Find|Search for] {name}[, please|].",
)
WHERE_SAYS = (
    "{name} is defined in {path}, line {line}, and used in {tests}.",
    "In {path}, line {line}. {tests} [has a test for it|tests it].",
)
RUNS = (
    "[Do the tests pass|Are the tests green]?",
    "Please run the tests.",
    "Run pytest[ and tell me the result|, please].",
)
PASSES = ("Yes, all {count} pass.", "All {count} tests pass, in {time} seconds.", "{count} passed[, none failed|].")
FILES = ("Which files are there?", "What is in this repository?", "[List|Show me] the files[, please|].")
FILES_SAYS = (
    "{count} files. The code is in {code}, the tests in {tests}.",
    "The package {package} has {code}; there are tests in {tests}, a README and a changelog.",
)
LARGEST = ("Which [one|file] is the largest?", "And the largest?")
LARGEST_SAYS = ("{path}, with {size} bytes.", "The largest is {path} ({size} bytes).")
DOES = ("What does {name} do?", "[Explain|Tell me about] {name}.", "What is {name} for?")
DOES_SAYS = (
    "{doc} It is in {path}.",
    "{name}({parameters}): {doc}",
)
EXAMPLES = ("[Give me an example|Is there an example]?", "What does it give, for example?")
EXAMPLES_SAYS = ("{call} gives {want}; that is what {tests} expects.", "In {tests}: {call} == {want}.")


def _line(project: Any, function: Function | Place) -> int:
    return project.repository.line_number(project.path(function), f"def {function.names['name']}(")


def _where(script: Script, rng: Random, project: Any, function: Function | Place) -> None:
    """A search for a name."""
    name = function.names["name"]
    script.user(say(rng, WHERE, name=name))
    script.call(None, ("search", {"text": name}, project.repository.search(name)))
    places = {"path": project.path(function), "tests": project.test_path(function), "line": _line(project, function)}
    script.say(say(rng, WHERE_SAYS, name=name, **places))


def _run(script: Script, rng: Random, project: Any, function: Function | Place) -> None:
    """A run of the tests, which pass."""
    script.user(say(rng, RUNS))
    hundredths = rng.randrange(3, 30)
    script.call(None, ("run", {"command": RUN}, project.repository.run_tests((), hundredths)))
    script.say(say(rng, PASSES, count=len(project.repository.tests()), time=f"0.{hundredths:02d}"))


def _files(script: Script, rng: Random, project: Any, function: Function | Place) -> None:
    """The list of files, and the largest of them."""
    files = project.repository.files
    script.user(say(rng, FILES))
    script.call(None, ("list_files", {}, project.repository.listing()))
    code = listed(list(dict.fromkeys(map(project.path, sorted(project.functions, key=lambda one: one.module)))))
    tests = "tests/"
    known = {"count": len(files), "code": code, "tests": tests, "package": project.package}
    script.say(say(rng, FILES_SAYS, **known))
    if rng.random() < 0.5:
        path = max(files, key=lambda one: len(files[one].encode()))
        script.user(say(rng, LARGEST))
        script.say(say(rng, LARGEST_SAYS, path=path, size=len(files[path].encode())))


def _does(script: Script, rng: Random, project: Any, function: Function | Place) -> None:
    """What a function is for, and an example out of its test."""
    name, path, tests = function.names["name"], project.path(function), project.test_path(function)
    script.user(say(rng, DOES, name=name))
    numbered = "\n\n".join(map(project.repository.numbered, (path, tests)))
    script.call(None, ("read_files", {"paths": [path, tests]}, numbered))
    head, doc = function.right.splitlines()[:2]
    parameters = head[head.index("(") + 1 : -2]
    script.say(say(rng, DOES_SAYS, name=name, path=path, parameters=parameters, doc=doc.strip().strip('"')))
    if isinstance(project, Project) and rng.random() < 0.5:
        line = project.repository.files[tests].splitlines()[-1].strip().removeprefix("assert ")
        call, _, want = line.rpartition(" == ")
        script.user(say(rng, EXAMPLES))
        script.say(say(rng, EXAMPLES_SAYS, call=call, want=want, tests=tests))


def conversation(rng: Random, name: str, project: Project | Checkout) -> Script:
    """One to three questions."""
    system = SYSTEM if rng.random() < 0.3 else say(rng, SYSTEMS, package=project.package)
    script = Script(name, system, TOOLS if rng.random() < 0.6 else rng.sample(TOOLS, len(TOOLS)))
    for ask in rng.sample((_where, _run, _files, _does), rng.randrange(1, 4)):
        tested = [one for one in project.functions if project.test_path(one) in project.repository.files]
        ask(script, rng, project, rng.choice(tested))
    return script
