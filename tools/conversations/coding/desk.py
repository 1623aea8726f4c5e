"""Desk: where an agent edits the files of a repository and runs its tests, in answers that stay short.

Must not know: what is edited, or why.
"""

from __future__ import annotations

from random import Random

from examples_text.coding_task import Edit, Failure, Repository
from examples_text.script import Call, Script, to_json

from conversations.lengths import MOST_ANSWER_TOKENS, pieces

CALL_COSTS = 14  # pieces of a call besides its arguments
RUN = "python -m pytest -q --tb=short"


def edit_call(edits: tuple[Edit, ...], difference: str = "") -> Call:
    """The call that makes some edits of files that exist."""
    changes = [{"path": edit.path, "old": edit.old, "new": edit.new} for edit in edits]
    return "edit_files", {"edits": changes}, difference


def fits(remark: str, *calls: Call) -> bool:
    """Whether a remark and calls are short enough for one answer."""
    costs = [pieces(to_json(arguments)) + CALL_COSTS for _, arguments, _ in calls]
    return pieces(remark) + sum(costs) < MOST_ANSWER_TOKENS - 4


class Desk:
    """The repository and the conversation about it."""

    def __init__(self, rng: Random, script: Script, repository: Repository) -> None:
        self.rng, self.script, self.repository = rng, script, repository

    def written(self, edit: Edit) -> Call:
        """The call that makes a new file."""
        self.repository.apply(edit)
        arguments = {"path": edit.path, "content": edit.new}
        return "write_file", arguments, f"wrote {edit.path}, {len(edit.new.encode())} bytes"

    def edit_and_run(self, edits: tuple[Edit, ...], failed: tuple[Failure, ...], remark: str, between: str) -> None:
        """Make edits and run the tests, in one answer if that is short; `between` is said before a run of its own."""
        changed = [edit for edit in edits if edit.old]
        calls: list[Call] = [self.written(edit) for edit in edits if not edit.old]
        if changed:
            difference = "\n".join(map(self.repository.apply, changed))
            calls.append(edit_call(tuple(changed), difference))
        run: Call = ("run", {"command": RUN}, self.repository.run_tests(failed, self.rng.randrange(3, 30)))
        if fits(remark, *calls, run):
            self.script.call(remark or None, *calls, run)
        else:
            self.script.call(remark if remark and fits(remark, *calls) else None, *calls)
            self.script.call(between or None, run)
