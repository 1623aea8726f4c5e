"""A small Python project that is drawn: its files, one of which has a mistake, and what pytest prints of it.

The results of calls are computed by running the functions, so that every number is right.
Must not know: how the work is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from examples_text.coding_task import Failure, Repository, failure

from conversations.coding.bugs import BUGS, Bug
from conversations.coding.more_bugs import MORE_BUGS
from conversations.incidents.world import SUBJECTS, fill

_TAILS = ("book", "log", "kit", "desk", "box", "bench", "lane", "yard", "mill", "list", "pad", "note", "hub", "tool")
_ABOUT = (
    "Keeps [track of|order among] <nouns>[ for a small club| of a small shop|].",
    "[Helps with|Reads and sums up] <nouns>. [No dependencies|Needs nothing but Python].",
    "<nouns> in plain files.",
)
_LINES = ("First version.", "Read files in UTF-8.", "Faster start.", "Clearer messages.", "Works with Python 3.12.")
_DRAWS = 12
_ERRORS = (ValueError, IndexError, KeyError, ZeroDivisionError, TypeError)


@dataclass(frozen=True)
class Function:
    """A function of the project: its mistake, its names, and the text of its body, right and wrong."""

    bug: Bug
    module: str
    names: dict[str, str]
    right: str
    wrong: str
    fragments: tuple[str, str]  # the right piece and the wrong one

    @cached_property
    def _scopes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        scopes: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for source, scope in zip((self.right, self.wrong), scopes, strict=True):
            exec(source, scope)
        return scopes

    def result(self, arguments: str, mistaken: bool) -> str:
        """What a call gives: the text of the value, or the error as pytest shows it."""
        try:
            return repr(eval(f"{self.names['name']}({arguments})", self._scopes[mistaken]))
        except _ERRORS as error:
            return f"{type(error).__name__}: {error}"

    def lines(self) -> tuple[str, str]:
        """The line that differs, right and wrong."""
        pairs = zip(self.right.splitlines(), self.wrong.splitlines(), strict=True)
        good, bad = next(pair for pair in pairs if pair[0] != pair[1])
        return good.strip(), bad.strip()


def _source(bug: Bug, names: dict[str, str], rng: Random) -> str:
    head = f"def {names['name']}({fill(rng, bug.signature, names)}):"
    rows = [head, f'    """{fill(rng, bug.doc, names)}"""', *(f"    {fill(rng, row, names)}" for row in bug.body)]
    return "\n".join(rows) + "\n"


class Project:
    """A package with two or three modules and their tests; `fault` is the function with the mistake."""

    def __init__(self, rng: Random) -> None:
        noun = rng.choice(SUBJECTS)
        self.names = {"noun": noun, "nouns": noun + "s"}
        self.package = noun + rng.choice(_TAILS)
        bugs = rng.sample((*BUGS, *MORE_BUGS), rng.randrange(2, 4))
        self.functions: list[Function] = []
        for bug in bugs:
            free = [name for name in bug.modules if name not in [other.module for other in self.functions]]
            called = fill(rng, bug.name, self.names)
            if free and called not in [other.names["name"] for other in self.functions]:
                self.functions.append(self._function(rng, bug, rng.choice(free), called))
        self.fault = self.functions[0]
        self.shown, self.got, self.want = self._call(rng, self.fault, True) or ("", "", "")
        self.repository = Repository(self._files(rng))

    def _function(self, rng: Random, bug: Bug, module: str, called: str) -> Function:
        names = {**self.names, "name": called, "module": module}
        right = _source(bug, names, rng)
        good, bad = fill(rng, bug.right, names), fill(rng, bug.wrong, names)
        return Function(bug, module, names, right, right.replace(good, bad, 1), (good, bad))

    def _call(self, rng: Random, function: Function, differs: bool) -> tuple[str, str, str] | None:
        """Arguments with what the function gives and what it should; None if few draws have none of the wanted kind."""
        for _ in range(_DRAWS):
            arguments = fill(rng, function.bug.args(rng), {})
            got, want = function.result(arguments, True), function.result(arguments, False)
            if (got != want) == differs and not any(want.startswith(error.__name__) for error in _ERRORS):
                return arguments, got, want
        return None

    def path(self, function: Function) -> str:
        """The file of a function."""
        return f"{self.package}/{function.module}.py"

    def test_path(self, function: Function) -> str:
        """The file of its tests."""
        return f"tests/test_{function.module}.py"

    def _files(self, rng: Random) -> dict[str, str]:
        about = fill(rng, rng.choice(_ABOUT), self.names)
        about = about[0].upper() + about[1:]
        lines = "".join(f"- {line}\n" for line in rng.sample(_LINES, 2))
        files = {
            "CHANGELOG.md": f"# Changelog\n\n## Unreleased\n\n## 0.{rng.randrange(1, 9)}\n{lines}",
            "README.md": f"# {self.package}\n\n{about}\n",
            f"{self.package}/__init__.py": f'"""{about}"""\n',
        }
        for function in self.functions:
            body = function.wrong if function is self.fault else function.right
            title = f"{function.module.capitalize()} of {self.names['nouns']}."
            files[self.path(function)] = f'"""{title}"""\n\n\n{body}'
            found = self._call(rng, function, False)
            if found is None:
                continue  # a function without a test
            arguments, _, want = found
            name = function.names["name"]
            files[self.test_path(function)] = (
                f"from {self.package}.{function.module} import {name}\n\n\ndef test_{name}():\n"
                f"    assert {name}({arguments}) == {want}\n"
            )
        return dict(sorted(files.items()))

    def failure(self, test: str, path: str) -> Failure:
        """How the new test fails: in its assertion, or with an error in the function."""
        name = self.fault.names["name"]
        line = f"assert {name}({self.shown}) == {self.want}"
        if self.got.split(":")[0] in [error.__name__ for error in _ERRORS]:
            frames = ((path, test, line), (self.path(self.fault), name, self.fault.lines()[1]))
            return Failure(f"{path}::{test}", ((frames, (self.got,)),))
        return failure(f"{path}::{test}", line, *difference(self.got, self.want, f"{name}({self.shown})"))


def difference(got: str, want: str, call: str) -> tuple[str, ...]:
    """What pytest says about `assert got == want`."""
    first, second = eval(got), eval(want)
    if isinstance(first, str):
        return (f"AssertionError: assert {got} == {want}", "  ", f"  - {second}", f"  + {first}")
    if not isinstance(first, (list, tuple)):
        return (f"assert {got} == {want}", f" +  where {got} = {call}")
    head = f"AssertionError: assert {got} == {want}"
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return (head, "  ", f"  At index {index} diff: {one!r} != {other!r}", "  Use -v to get more diff")
    longer, side = (first, "Left") if len(first) > len(second) else (second, "Right")
    extra, more = longer[min(len(first), len(second))], abs(len(first) - len(second))
    what = f"one more item: {extra!r}" if more == 1 else f"{more} more items, first extra item: {extra!r}"
    return (head, "  ", f"  {side} contains {what}", "  Use -v to get more diff")


def draw(rng: Random) -> Project:
    """A project whose test and error fit on short lines."""
    while True:
        project = Project(rng)
        tested = project.test_path(project.functions[-1]) in project.repository.files
        if (
            len(project.functions) > 1
            and tested
            and project.want
            and len(project.shown) <= 44
            and len(project.got) <= 48
        ):
            return project
