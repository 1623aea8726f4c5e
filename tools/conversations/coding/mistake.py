"""One mistake that may be put into a real file of one of the examples' projects, or one small wish that is open there.

In texts and code `<name>` stands for a drawn value; in texts `<got>`, `<want>` and `<call>` are what the test shows.
Must not know: how the work is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Mistake:
    """`right` and `wrong` are fragments of a module; a wish has a `wrong` that the real file has already.

    search is looked for in the repository, test is the name of the new test, which runs the lines of setup and
    asserts that `shown` has the value which the right code gives. tests is its file if it is not the one of the
    module, imports is what a new file begins with, values are what the marks are drawn from,
    several at once where the key has several names.
    """

    module: str
    right: str
    wrong: str
    search: str
    test: str
    shown: str
    asks: tuple[str, ...]
    reasons: tuple[str, ...]
    fixed: str
    changelog: str
    setup: tuple[str, ...] = ()
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tests: str = ""
    imports: str = ""
