"""What a coding conversation is made of: tasks, edits, failures, and the repository while it changes.

The projects are real files under projects/; a task says how they are wrong and how they are put right.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

PROJECTS = Path(__file__).parent / "projects"
RULE = 80


@dataclass(frozen=True)
class Edit:
    """Replace `old`, which occurs once in the file, by `new`; without `old` the file is new."""

    path: str
    old: str
    new: str
    remark: str


def after(path: str, anchor: str, addition: str, remark: str) -> Edit:
    """Keep a piece of text and put something behind it."""
    return Edit(path, anchor, anchor + addition, remark)


def changelog(line: str) -> Edit:
    """A line under "Unreleased"."""
    return after("CHANGELOG.md", "## Unreleased\n", f"- {line}\n", "")


Frame = tuple[str, str, str]  # path, function, a piece of the line that was running


@dataclass(frozen=True)
class Failure:
    """A failing test: blocks of frames and error lines, one for each exception in a chain of causes."""

    test: str
    blocks: tuple[tuple[tuple[Frame, ...], tuple[str, ...]], ...]

    @property
    def function(self) -> str:
        """The name of the test function."""
        return self.test.partition("::")[2]


def failure(test: str, line: str, *errors: str) -> Failure:
    """A failure in the test itself, at the line that contains `line`."""
    path, _, function = test.partition("::")
    return Failure(test, ((((path, function, line),), errors),))


@dataclass(frozen=True)
class Task:
    """One request of the developer, and everything that happens until it is done.

    reads are the files that matter, search is a text that finds where the code in question is used.
    failures are those of the new tests before the fix. wrong is a first attempt that does not work, with the
    failure it leaves. follow is what the developer asks afterwards, the edits for that, and the answer.
    """

    name: str
    project: str
    ask: str
    reads: tuple[str, ...]
    search: str
    understood: str
    test: Edit
    failures: tuple[Failure, ...]
    fix: tuple[Edit, ...]
    done: str
    wrong: tuple[Edit, Failure] | None = None
    follow: tuple[str, tuple[Edit, ...], str] | None = None


def ruled(character: str, title: str) -> str:
    """A title in the middle of a line of one character, as pytest draws it."""
    side = character * ((RULE - len(title) - 2) // 2)
    line = f"{side} {title} {side}"
    return line + character if len(line) < RULE else line


def shortened(start: str, message: str) -> str:
    """A line of the summary; the message is cut where the line would be too long."""
    line = f"{start} - {message}"
    return line if len(line) <= RULE else f"{line[: RULE - 3]}..."


class Repository:
    """The files of a project in memory."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    @classmethod
    def read(cls, project: str) -> Repository:
        """A project of projects/."""
        root = PROJECTS / project
        paths = (path for path in root.rglob("*") if path.suffix in (".py", ".md"))
        return cls({p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in sorted(paths)})

    def listing(self) -> str:
        """What list_files shows."""
        width = max(map(len, self.files))
        sizes = {path: len(text.encode()) for path, text in sorted(self.files.items())}
        return "\n".join(f"{path:{width}} {size:6}" for path, size in sizes.items())

    def numbered(self, path: str) -> str:
        """What read_files shows of one file."""
        lines = self.files[path].splitlines()
        rows = [f"{number:4}  {line}".rstrip() for number, line in enumerate(lines, start=1)]
        return "\n".join([f"==> {path}", *rows])

    def search(self, text: str) -> str:
        """What search shows."""
        hits = [
            f"{path}:{number}: {line.strip()}"
            for path, content in sorted(self.files.items())
            for number, line in enumerate(content.splitlines(), start=1)
            if text in line
        ]
        return "\n".join(hits) or "no matches"

    def apply(self, edit: Edit) -> str:
        """Make an edit; returns the difference."""
        before = self.files.get(edit.path, "")
        if edit.old and before.count(edit.old) != 1:
            count = before.count(edit.old)
            raise ValueError(f"{edit.path}: expected the old text once, found it {count} times")
        after = before.replace(edit.old, edit.new) if edit.old else edit.new
        self.files[edit.path] = after
        lines = difflib.unified_diff(
            before.splitlines(), after.splitlines(), f"a/{edit.path}", f"b/{edit.path}", lineterm=""
        )
        return "\n".join(lines)

    def tests(self) -> list[str]:
        """Every test, in the order in which they run."""
        found = []
        for path in sorted(self.files):
            if path.startswith("tests/"):
                names = re.findall(r"^def (test_\w+)", self.files[path], re.MULTILINE)
                found += [f"{path}::{name}" for name in names]
        return found

    def line_number(self, path: str, text: str) -> int:
        """The one line that contains a text."""
        numbers = [n for n, line in enumerate(self.files[path].splitlines(), start=1) if text in line]
        if len(numbers) != 1:
            raise ValueError(f"{path}: expected one line with {text!r}, found {len(numbers)}")
        return numbers[0]

    def run_tests(self, failed: tuple[Failure, ...], hundredths: int) -> str:
        """What pytest prints, given the tests that fail."""
        tests = self.tests()
        names = [failure.test for failure in failed]
        if unknown := set(names) - set(tests):
            raise ValueError(f"there is no test {unknown}")
        dots = "".join("F" if test in names else "." for test in tests)
        lines = [f"{dots:73}[100%]"]
        if failed:
            lines.append(ruled("=", "FAILURES"))
            for one in failed:
                lines += [ruled("_", one.function), *self.traceback(one)]
            lines.append(ruled("=", "short test summary info"))
            lines += [shortened(f"FAILED {one.test}", one.blocks[-1][1][0]) for one in failed]
        passed = len(tests) - len(failed)
        counts = f"{len(failed)} failed, {passed} passed" if failed else f"{passed} passed"
        lines.append(f"{counts} in 0.{hundredths:02d}s")
        return "\n".join(lines)

    def traceback(self, failed: Failure) -> list[str]:
        """The frames and errors of a failure."""
        lines: list[str] = []
        for frames, errors in failed.blocks:
            if lines:
                lines += ["", "The above exception was the direct cause of the following exception:"]
            for path, function, text in frames:
                number = self.line_number(path, text)
                lines.append(f"{path}:{number}: in {function}")
                lines.append(f"    {self.files[path].splitlines()[number - 1].strip()}")
            lines.extend(f"E   {error}" for error in errors)
        return lines
