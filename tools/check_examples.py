#!/usr/bin/env python3
"""Runs the code of the coding conversations: python tools/check_examples.py.

At every step of every task the tests that fail must be the ones that the conversation shows as failing.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from examples_text.coding import TASKS
from examples_text.coding_task import Failure, Repository, Task


def failing(repository: Repository, folder: Path) -> list[str]:
    """The tests that fail, when the repository is written to an empty folder and imported from there."""
    for path, text in repository.files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    before = set(sys.modules)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    failed = []
    for test in repository.tests():
        path, _, function = test.partition("::")
        try:
            getattr(importlib.import_module(Path(path).stem), function)()
        except BaseException:  # pytest.raises fails with one that is no Exception
            failed.append(test)
    del sys.path[:2]
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
    return failed


def check(task: Task, repository: Repository, expected: tuple[Failure, ...], step: str) -> None:
    """Raise AssertionError unless exactly the expected tests fail."""
    with tempfile.TemporaryDirectory() as folder:
        found = failing(repository, Path(folder))
    names = [failure.test for failure in expected]
    if found != names:
        raise AssertionError(f"{task.name}, {step}: expected {names} to fail, but {found} did")


def check_task(task: Task) -> None:
    """Follow one task through all of its steps."""
    repository = Repository.read(task.project)
    check(task, repository, (), "as it is")
    repository.apply(task.test)
    check(task, repository, task.failures, "with the new test")
    if task.wrong:
        repository.apply(task.wrong[0])
        check(task, repository, (task.wrong[1],), "after the first attempt")
    for edit in task.fix:
        repository.apply(edit)
    check(task, repository, (), "after the fix")
    for edit in task.follow[1] if task.follow else ():
        repository.apply(edit)
    check(task, repository, (), "at the end")


def main() -> None:
    """Check every task."""
    sys.dont_write_bytecode = True
    importlib.import_module("pytest")  # once, so that it outlives the modules of a project
    for task in TASKS:
        check_task(task)
    print(f"{len(TASKS)} tasks do what their conversations show")


if __name__ == "__main__":
    main()
