"""`apcbatch` on a cluster whose workers have two kinds of processors: AVX512 with bfloat16 products, and AVX2."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from apcbatch.cli.program import main
from apcbatch.cluster import opening
from apcbatch.cluster.driver import LONGEST_WAIT_S, ClusterEngine
from apcbatch.cluster.seam import WorkerFacts, WorkerKind
from apcbatch.config import Config

OLDER = WorkerKind("older")


def kinds_for(*_: object) -> tuple[WorkerKind, ...]:
    return WorkerKind(), OLDER


def options_of(
    config: Config, salt: str | None, kind: WorkerKind, plain: Any = opening._options_of
) -> Mapping[str, Any]:
    options = plain(config, salt, kind)
    return options | {"config": options["config"] | {"isa": "avx2" if kind == OLDER else "avx512bf16"}}


class Patient(ClusterEngine):
    """Begins once both are ready: else the first might do all the work."""

    def _first_facts(self) -> WorkerFacts:
        while len(self._crew.ready) < 2:
            self._listen(LONGEST_WAIT_S)
        return super()._first_facts()


if __name__ == "__main__":
    opening.kinds_for, opening._options_of, opening.ClusterEngine = kinds_for, options_of, Patient
    sys.exit(main(sys.argv[1:]))
