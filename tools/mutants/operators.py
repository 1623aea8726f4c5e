"""The operator that cosmic-ray lacks, and the one that it has for undotted names alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cosmic_ray.exceptions import CosmicRayTestingException
from cosmic_ray.operators.exception_replacer import ExceptionReplacer
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


class ReplaceException(ExceptionReplacer):
    """Puts an exception that nothing raises in the place of one that is caught, dotted (`json.JSONDecodeError`) or not.

    cosmic-ray's own replaces the dot, and fails where a dotted name stands in a tuple."""

    def mutate(self, node: Any, index: int) -> Any:
        caught = self._name_nodes(node)[index]
        leaf, last = caught.get_first_leaf(), caught.get_last_leaf()
        leaf.value = CosmicRayTestingException.__name__
        while leaf is not last:
            leaf = leaf.get_next_leaf()
            leaf.value = ""
        return node

    @staticmethod
    def _name_nodes(node: Any) -> list[Any]:
        """The exceptions of an except clause."""
        caught = node.children[1]
        if caught.type == "atom":  # in parentheses
            caught = caught.children[1]
        return list(caught.children[::2]) if caught.type == "testlist_comp" else [caught]


def _has_an_effect(node: Any) -> bool:
    if node.type == "expr_stmt":
        target, how = node.children[0], node.children[1]
        plain = all(part.type == "name" for part in getattr(target, "children", [target])[::2])
        return how.type != "annassign" and not (plain and how.get_code().strip() == "=")
    called = node.type in ("atom_expr", "power") and node.children[-1].get_code().startswith("(")
    return called or node.type in ("raise_stmt", "del_stmt")
