"""A group packed for one worker: the unit that it gets, and the states that go with it.

Must not know: the seam, who gets what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apcbatch.cluster.items import Group, State
from apcbatch.cluster.localise import localise
from apcbatch.cluster.rates import Rates
from apcbatch.cluster.seam import WorkerFacts
from apcbatch.cluster.unit import Key, Piece, Unit
from apcbatch.types import Request


@dataclass(frozen=True, slots=True)
class Package:
    """exports, imports: by key. expected_s: what the unit should take. num_sent: the states that come from another
    node."""

    unit: Unit
    exports: dict[Key, State]
    imports: dict[Key, State]
    expected_s: float
    num_sent: int


class Packer:
    """Packs the groups of one run. send_slack_s: see ClusterSettings."""

    def __init__(self, to_wire: Callable[[Request], Any], send_slack_s: float) -> None:
        self._to_wire, self._send_slack_s = to_wire, send_slack_s
        self.num_packed = 0

    def pack(self, group: Group, facts: WorkerFacts, rates: Rates) -> Package:
        """Pack a group for a worker of these facts and rates."""

        def is_worth_sending(state: State, above: State | None) -> bool:
            tokens = state.position - (above.position if above is not None else 0)
            saved_s = rates.transfer_s(state.num_bytes) - tokens * rates.prefill_s
            return facts.node in state.nodes or saved_s < self._send_slack_s

        local = localise(group, facts.footprint, is_worth_sending)
        exports = {state.key: state for state in local.exports}
        imports = {state.key: state for state in local.imports}
        self.num_packed += 1
        pieces = [
            Piece(item.number, self._to_wire(item.request), plan)
            for item, plan in zip(group.items, local.plans, strict=True)
        ]
        unit = Unit(self.num_packed, tuple(pieces), frozenset(exports), tuple(imports))
        prefill_tokens = sum(item.prefill_tokens for item in group.items)
        expected_s = rates.seconds(prefill_tokens, sum(item.most_answer_tokens for item in group.items))
        num_sent = sum(facts.node not in state.nodes for state in imports.values())
        return Package(unit, exports, imports, expected_s, num_sent)
