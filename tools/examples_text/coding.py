"""Coding conversations: one repository and one task each, from the first look at the files to the summary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from examples_text import (
    coding_tasks_gridroute,
    coding_tasks_queuelet,
    coding_tasks_recipebox,
    coding_tasks_stocktake,
    coding_tasks_tidelog,
)
from examples_text.coding_task import Edit, Failure, Repository, Task
from examples_text.script import Call, Script, function

SYSTEM = (Path(__file__).parent / "prompts" / "coding.txt").read_text(encoding="utf-8").strip()
PATH = "Path relative to the root of the repository."
TOOLS = [
    function("list_files", "Every file of the repository with its size in bytes.", {}),
    function(
        "read_files",
        "One or several files with line numbers.",
        {"paths": {"type": "array", "items": {"type": "string", "description": PATH}}},
    ),
    function("search", "Lines that contain a text, with file and line.", {"text": "What to look for."}),
    function(
        "edit_files",
        "Make edits in their order; each replaces a text that occurs exactly once. Returns the differences.",
        {
            "edits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "path": {"type": "string", "description": PATH},
                        "old": {"type": "string", "description": "The text to replace."},
                        "new": {"type": "string", "description": "What to put in its place."},
                    },
                    "required": ["path", "old", "new"],
                },
            }
        },
    ),
    function("write_file", "Make a new file.", {"path": PATH, "content": "The whole file."}),
    function("run", "Run a command in the root of the repository.", {"command": "The command."}),
]
TASKS: tuple[Task, ...] = (
    *coding_tasks_stocktake.TASKS,
    *coding_tasks_queuelet.TASKS,
    *coding_tasks_gridroute.TASKS,
    *coding_tasks_recipebox.TASKS,
    *coding_tasks_tidelog.TASKS,
)
LOOKS = (
    "Let me look at the repository first.",
    "I'll start with the files.",
    "First a look at what there is.",
)


class Session:
    """One task being worked on."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.name = f"coding-{task.project}-{task.name}"
        self.rng = Random(self.name)
        self.repository = Repository.read(task.project)
        self.script = Script(self.name, SYSTEM, TOOLS)

    def look_around(self, thoroughly: bool) -> None:
        """List the files and read those that matter, or all of them."""
        repository, task = self.repository, self.task
        self.script.user(task.ask)
        self.script.call(self.rng.choice(LOOKS), ("list_files", {}, repository.listing()))
        others = [path for path in repository.files if path not in task.reads] if thoroughly else []
        paths = [*task.reads, *others]
        self.script.call(
            f"{' and '.join(task.reads[:2])} should tell. I also search for where \"{task.search}\" occurs.",
            ("search", {"text": task.search}, repository.search(task.search)),
            ("read_files", {"paths": paths}, "\n\n".join(map(repository.numbered, paths))),
        )

    def edit_and_run(self, edits: tuple[Edit, ...], failed: tuple[Failure, ...], before: str = "") -> None:
        """Make edits and run the tests; `before` and the remarks of the edits are said first."""
        remark = " ".join(part for part in (before, *(edit.remark for edit in edits)) if part) or None
        calls: list[Call] = [self.written(edit) for edit in edits if not edit.old]
        changes = [{"path": edit.path, "old": edit.old, "new": edit.new} for edit in edits if edit.old]
        if changes:
            differences = "\n".join(self.repository.apply(edit) for edit in edits if edit.old)
            calls.append(("edit_files", {"edits": changes}, differences))
        printed = self.repository.run_tests(failed, self.rng.randrange(3, 30))
        self.script.call(remark, *calls, ("run", {"command": "python -m pytest -q --tb=short"}, printed))

    def written(self, edit: Edit) -> Call:
        """The call that makes a new file."""
        self.repository.apply(edit)
        answer = f"wrote {edit.path}, {len(edit.new.encode())} bytes"
        return "write_file", {"path": edit.path, "content": edit.new}, answer

    def work(self) -> None:
        """From the failing test to the summary."""
        self.edit_and_run((self.task.test,), self.task.failures, self.task.understood)
        if self.task.wrong:
            edit, failed = self.task.wrong
            self.edit_and_run((edit,), (failed,))
        self.edit_and_run(self.task.fix, ())
        self.script.say(self.task.done)

    def follow(self, answered: bool) -> None:
        """What the developer asks afterwards, and what comes of it."""
        if self.task.follow is None:
            return
        ask, edits, answer = self.task.follow
        self.script.user(ask)
        if answered:
            self.edit_and_run(edits, ())
            self.script.say(answer)


def conversations() -> Iterator[Script]:
    """All coding conversations; some break off while reading, after a run of the tests, or with a wish."""
    for number, task in enumerate(TASKS):
        session = Session(task)
        session.look_around(thoroughly=number % 3 == 0)
        if number % 10 != 9:
            session.work()
            session.follow(answered=number % 6 != 3)
        if number % 6 == 5:
            session.script.drop_answer()
        yield session.script
