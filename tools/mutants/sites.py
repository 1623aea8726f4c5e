"""The places where the code can be changed, and the fixed sample of them.

Each place (a site) is an operator of cosmic-ray, or the removal of a statement, at one position of the source.
Several replacements may be possible at a site (`<` by `<=`, `==`, ...); it counts once, and its hash picks one.
Which sites are in the sample depends on the text of their lines alone: a change elsewhere in a file leaves the rest of
the sample as it was.
Left out: annotations, protocols and code under `if TYPE_CHECKING`, which nothing executes; `strict`, `frozen`, `slots`
and `abstractmethod`, which guard against faults of the code itself; replacements across kinds (`+` by `<<`, `==` by
`is`), which any test notices or which change nothing.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

from tools.mutants.operators import RemoveStatement, ReplaceException

KINDS = [
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod"},
    {"BitOr", "BitAnd", "BitXor"},
    {"LShift", "RShift"},
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"},
    {"Is", "IsNot"},
    {"USub", "UAdd"},
    {"Delete", "Not"},
]
NOT_USED = {"VariableReplacer", "VariableInserter"}  # they need to be told which variables
GUARDS = {"strict", "frozen", "slots"}
STATEMENTS = {"simple_stmt", "if_stmt", "while_stmt", "for_stmt", "with_stmt", "try_stmt", "funcdef", "classdef"}


@dataclass(frozen=True)
class Mutant:
    """path: relative to the root. line: where the change is; lines: the whole statement's, or its head's.
    on_import: it runs when the module is imported, before any test."""

    path: str
    line: int
    lines: range
    on_import: bool
    operator: str
    occurrence: int

    def code(self, source: str) -> str:
        """The whole module with the change."""
        changed = mutate_code(source, _operators()[self.operator], self.occurrence)
        assert changed is not None, f"{self} is not in the source that it was found in"
        return str(changed)

    def diff(self, source: str) -> str:
        """The lines that the change removes and adds."""
        lines = difflib.unified_diff(source.splitlines(), self.code(source).splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def sample(root: Path, files: list[str], size: int, seed: int) -> list[Mutant]:
    """Draw `size` mutants of these files: the same ones for the same seed and text."""
    ranked: list[tuple[str, Mutant]] = []
    for path in files:
        source = (root / path).read_text(encoding="utf-8")
        seen: dict[str, int] = {}
        for (family, line, _), variants in _sites(path, source).items():
            name = f"{seed} {path} {family} {source.splitlines()[line - 1].strip()}"
            seen[name] = seen.get(name, 0) + 1
            rank = hashlib.sha256(f"{name} {seen[name]}".encode()).hexdigest()
            ranked.append((rank, variants[int(rank[-8:], 16) % len(variants)]))
    ranked.sort(key=lambda entry: entry[0])
    return [mutant for _, mutant in ranked[:size]]


def _sites(path: str, source: str) -> dict[tuple[str, int, int], list[Mutant]]:
    """By kind of operator, line and column: what may be put there."""
    found: dict[tuple[str, int, int], list[Mutant]] = {}
    nodes = list(ast_nodes(get_ast(source)))
    for name, operator in _operators().items():
        occurrence = -1
        for node in nodes:
            for (line, column), _ in operator.mutation_positions(node):
                occurrence += 1
                if _is_idle(node):
                    continue
                lines, on_import = _runs_with(node)
                mutant = Mutant(path, line, lines, on_import, name, occurrence)
                found.setdefault((name.partition("_")[0], line, column), []).append(mutant)
    return dict(sorted(found.items()))


def _operators() -> dict[str, Any]:
    provider = OperatorProvider()
    names = [name for name in provider if name not in NOT_USED and _of_one_kind(name)]
    return {name: provider[name]() for name in names} | {
        "RemoveStatement": RemoveStatement(),
        "ExceptionReplacer": ReplaceException(),
    }


def _of_one_kind(name: str) -> bool:
    _, *between = name.split("_")
    return not between or any(set(between) <= kind for kind in KINDS)


def _is_idle(node: Any) -> bool:
    return any(
        above.type == "tfpdef"
        or (above.type == "argument" and above.children[0].get_code().strip() in GUARDS)
        or (above.type == "annassign" and above.children[1] is below)
        or (above.type == "funcdef" and above.annotation is below)
        or (below.type == "decorator" and below.children[1].get_code().strip() == "abstractmethod")
        or (above.type == "classdef" and _is_protocol(above))
        or _is_for_types(below)
        or _is_for_types(above)
        for below, above in _upward(node)
    )


def _is_protocol(node: Any) -> bool:
    bases = node.get_super_arglist()
    return bases is not None and "Protocol" in bases.get_code()


def _is_for_types(node: Any) -> bool:
    return node.type == "if_stmt" and node.children[1].get_code().strip() == "TYPE_CHECKING"


def _runs_with(node: Any) -> tuple[range, bool]:
    """The lines that run when the node does, and whether that is on import."""
    below, statement = node, node
    if node.type not in STATEMENTS:
        below, statement = next(pair for pair in _upward(node) if pair[1].type in STATEMENTS | {"file_input"})
    part = statement if statement.type == "simple_stmt" else below
    inside = any(
        above.type == "funcdef" and below.type == "suite" for below, above in [*_upward(node), *_upward(statement)]
    )
    if node.type in STATEMENTS - {"simple_stmt"}:  # its head alone is changed
        return range(node.start_pos[0], node.children[-1].start_pos[0] + 1), not inside
    return range(part.start_pos[0], part.end_pos[0] + 1), not inside


def _upward(node: Any) -> Iterator[tuple[Any, Any]]:
    """(a node, its parent) from a node up to the module."""
    while node.parent is not None:
        yield node, node.parent
        node = node.parent
