"""The examples' five projects with one of the mistakes in them, and what pytest prints of it.

The results of tests are computed by running the code, so that every value and every line of a traceback is right.
Must not know: how the work is told.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from random import Random
from types import CodeType
from typing import Any

from examples_text.coding_task import Edit, Failure, Frame, Repository, after, failure

from conversations.coding import (
    mistakes_gridroute,
    mistakes_queuelet,
    mistakes_recipebox,
    mistakes_stocktake,
    mistakes_tidelog,
)
from conversations.coding.mistake import Mistake
from conversations.coding.projects import difference
from conversations.incidents.world import fill
from conversations.lengths import pieces

INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>")  # frames that Python 3.12 has no more
_MARK = re.compile(r"<(\w+)>")
_ANCHORS = (20, 9)  # characters of the last line of a file that are enough to find it
_ROOM = 50  # pieces of a new test with what it is put behind, twice
_SHORT = 8
_FUNCTION = re.compile(r'^ *def (\w+)\((?:self(?:, )?)?(.*)\)(?: -> .*)?:\n +"""(.+)"""$', re.MULTILINE)
_EXTRAS = {
    "docs/usage.md": "# Usage\n\nSee the README[ for an example|, and the tests for examples].\n",
    "docs/index.md": "# {package}\n\n[Notes|Details] [will follow|are in the docstrings].\n",
    "CONTRIBUTING.md": "# Contributing\n\n[Run the tests|Run pytest] before you [send|propose] a change.\n",
    "AUTHORS.md": "# Authors\n\n[In the order of their first change|See the history].\n",
    "tests/__init__.py": "",
}


@dataclass(frozen=True)
class Package:
    """One project: its modules in the order of their imports with the file of their tests, and its mistakes."""

    modules: dict[str, str]
    mistakes: tuple[Mistake, ...]


PACKAGES = {
    "stocktake": Package(
        {"models": "test_report", "ledger": "test_ledger", "report": "test_report"}, mistakes_stocktake.MISTAKES
    ),
    "queuelet": Package(
        {"retry": "test_retry", "job": "test_queue", "queue": "test_queue"}, mistakes_queuelet.MISTAKES
    ),
    "gridroute": Package(
        {"grid": "test_route", "search": "test_route", "draw": "test_route"}, mistakes_gridroute.MISTAKES
    ),
    "recipebox": Package(
        {"units": "test_shopping", "parser": "test_parser", "shopping": "test_shopping"}, mistakes_recipebox.MISTAKES
    ),
    "tidelog": Package(
        {"record": "test_record", "series": "test_series", "summary": "test_series"}, mistakes_tidelog.MISTAKES
    ),
}


@cache
def _files(package: str) -> dict[str, str]:
    return Repository.read(package).files


@cache
def _compiled(package: str, path: str, text: str) -> CodeType:
    """A file without its imports from the package and of pytest, at the same lines."""
    own = re.compile(rf"^(from {package}\b|import pytest).*$", re.MULTILINE)
    return compile(own.sub("", text), path, "exec")


@lru_cache(maxsize=1024)
def namespace(package: str, path: str, text: str) -> dict[str, Any]:
    """All names of the package and its tests, where the file at path has this text."""
    files = {**_files(package), path: text}
    tests = sorted(name for name in files if name.startswith("tests/"))
    scope: dict[str, Any] = {"__name__": __name__}
    for name in (*(f"{package}/{module}.py" for module in PACKAGES[package].modules), *tests):
        exec(_compiled(package, name, files[name]), scope)
    return scope


def literal(value: object) -> str:
    """A value as the projects write it, with double quotes."""
    text = repr(value)
    return text if '"' in text else text.replace("'", '"')


def _marked(text: str, values: dict[str, str]) -> str:
    return _MARK.sub(lambda found: values.get(found[1], found[0]), text)


class Case:
    """A mistake with drawn values: the fragments of its file, and the test that shows it."""

    def __init__(self, rng: Random, package: str, mistake: Mistake) -> None:
        self.package, self.mistake = package, mistake
        self.values = _drawn(rng, mistake)
        self.path = f"{package}/{mistake.module}.py"
        self.tests = mistake.tests or f"tests/{PACKAGES[package].modules[mistake.module]}.py"
        self.right, self.wrong = _marked(mistake.right, self.values), _marked(mistake.wrong, self.values)
        text = _files(package)[self.path]
        self.text = text.replace(self.right, self.wrong)
        self.mended = text if self.right in text else text.replace(self.wrong, self.right)
        self.shown = _marked(mistake.shown, self.values)
        self.setup = [_marked(line, self.values) for line in mistake.setup]
        self.test = fill(rng, mistake.test, self.values)

    @cached_property
    def fix(self) -> Edit:
        """The edit that puts the file right: the fragment, or its line where the fragment is short or not alone."""
        old, new = self.wrong, self.right
        if len(old) < _SHORT or self.text.count(old) != 1:
            pairs = zip(self.text.splitlines(), self.mended.splitlines(), strict=True)
            old, new = next((before.strip(), after.strip()) for before, after in pairs if before != after)
        return Edit(self.path, old, new, "")

    def _run(self, text: str) -> Any:
        """What the expression gives where the file has this text."""
        scope = dict(namespace(self.package, self.path, text))
        exec(compile("\n".join([*self.setup, f"_result = {self.shown}"]), self.tests, "exec"), scope)
        return scope["_result"]

    @cached_property
    def want(self) -> Any:
        """The value that the right code gives."""
        return self._run(self.mended)

    @cached_property
    def body(self) -> str:
        """The test, ready to be written."""
        claim = {True: self.shown, False: f"not {self.shown}"}[self.want] if isinstance(self.want, bool) else None
        lines = [*self.setup, f"assert {claim or f'{self.shown} == {literal(self.want)}'}"]
        return "\n".join([f"def {self.test}():", *(f"    {line}" for line in lines)]) + "\n"

    @cached_property
    def seen(self) -> tuple[str, Failure]:
        """What the mistaken code gives, or the error, and how the test fails."""
        test, lines = f"{self.tests}::{self.test}", self.body.splitlines()[1:]
        try:
            got = self._run(self.text)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return said, Failure(test, ((self._frames(error, lines), (said,)),))
        if isinstance(got, bool):
            claim = f"assert not {got}" if got else f"assert {got}"
            return repr(got), failure(test, lines[-1].strip(), claim, f" +  where {got} = {self.shown}")
        return literal(got), failure(test, lines[-1].strip(), *difference(repr(got), repr(self.want), self.shown))

    def _frames(self, error: Exception, lines: list[str]) -> tuple[Frame, ...]:
        """Where the error went through: the new test, then the files."""
        files = {**_files(self.package), self.path: self.text}
        test, *inner = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename in files and frame.name not in INLINED
        ]
        rows = [
            (frame.filename, frame.name, files[frame.filename].splitlines()[(frame.lineno or 1) - 1]) for frame in inner
        ]
        first = (self.tests, self.test, lines[(test.lineno or 1) - 1])
        return tuple((path, name, row.strip()) for path, name, row in (first, *rows))


@dataclass(frozen=True)
class Place:
    """A function of a project as it stands in its module: its first two lines."""

    module: str
    names: dict[str, str]
    right: str


class Checkout:
    """A project of the examples as it is, for questions about it; `functions` are those that a test calls."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.repository = Repository(dict(_files(package)))
        self.functions = [
            Place(module, {"name": name}, f'def {name}({parameters}):\n    """{doc}"""')
            for module in PACKAGES[package].modules
            for name, parameters, doc in _FUNCTION.findall(self.repository.files[f"{package}/{module}.py"])
            if f"{name}(" in self.repository.files[f"tests/{PACKAGES[package].modules[module]}.py"]
        ]

    def path(self, place: Place) -> str:
        """The file of a function."""
        return f"{self.package}/{place.module}.py"

    def test_path(self, place: Place) -> str:
        """The file of its tests."""
        return f"tests/{PACKAGES[self.package].modules[place.module]}.py"


def _drawn(rng: Random, mistake: Mistake) -> dict[str, str]:
    """A value for each mark; a thing comes with a capital too."""
    values: dict[str, str] = {}
    for names, choices in mistake.values.items():
        drawn = rng.choice(choices)
        values |= zip(names.split(), map(str, drawn if " " in names else (drawn,)), strict=True)
    if "thing" in values:
        values["Thing"] = values["thing"].capitalize()
    return values


def last_lines(text: str, addition: str) -> str:
    """The end of a file, as much as it takes to be found once; part of the last line where the addition is long."""
    lines = text.splitlines(keepends=True)
    count = next(count for count in range(1, len(lines) + 1) if text.count("".join(lines[-count:])) == 1)
    whole, last = "".join(lines[-count:]), lines[-1]
    starts = [index for index in range(1, len(last)) if last[index - 1] in " (" and last[index] != " "]
    ends = [
        last[max(index for index in starts if len(last) - index >= least) :] for least in _ANCHORS if len(last) > 30
    ]
    room = _ROOM - pieces(addition)
    choices = [whole, *(end for end in ends if text.count(end) == 1)]
    return next((end for end in choices if 2 * pieces(end) <= room), choices[-1])


def put_behind(made: Repository, path: str, body: str) -> Edit:
    """The edit that puts a test at the end of a file."""
    return after(path, last_lines(made.files[path], body), f"\n\n{body}", "")


def written(made: Repository, case: Case) -> Edit:
    """The edit that writes the test of a case."""
    if case.tests in made.files:
        return put_behind(made, case.tests, case.body)
    return Edit(case.tests, "", f"{case.mistake.imports}\n\n{case.body}", "")


def repository(rng: Random, case: Case, others: Iterable[Case]) -> Repository:
    """The files with the mistake; now and then with a test less, with those of other cases, or with other files."""
    files = {**_files(case.package), case.path: case.text}
    made = Repository(files)
    if case.tests in files and rng.random() < 0.35:
        kept = files[case.tests].rsplit("\n\n\ndef test_", rng.randrange(1, 3))[0] + "\n"
        files[case.tests] = kept if "def test_" in kept else files[case.tests]
    for other in others:
        claim = other.body.splitlines()[-1]
        if other.tests in files and claim not in f"{case.body}{files[other.tests]}" and rng.random() < 0.6:
            files[other.tests] += f"\n\n{other.body}"
    for path in _EXTRAS:
        if rng.random() < 0.15:
            files[path] = fill(rng, _EXTRAS[path], {}).replace("{package}", case.package)
    return made
