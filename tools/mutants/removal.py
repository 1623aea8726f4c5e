"""The one operator that cosmic-ray lacks: a statement is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Keyword


class RemoveStatement(Operator):
    """Puts `pass` in the place of a call, a raise, a del, or an assignment other than to plain new names."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.type == "simple_stmt" and _has_an_effect(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.children[0].get_first_leaf()
        node.children[0] = Keyword("pass", first.start_pos, prefix=first.prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(x)\n", "pass\n"), Example("self.x = 1\n", "pass\n"), Example("x += 1\n", "pass\n"))


def _has_an_effect(node: Any) -> bool:
    if node.type == "expr_stmt":
        target, how = node.children[0], node.children[1]
        plain = all(part.type == "name" for part in getattr(target, "children", [target])[::2])
        return how.type != "annassign" and not (plain and how.get_code().strip() == "=")
    called = node.type in ("atom_expr", "power") and node.children[-1].get_code().startswith("(")
    return called or node.type in ("raise_stmt", "del_stmt")
