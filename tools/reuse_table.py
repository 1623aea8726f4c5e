"""Prints the table of docs/caching.md that says how much of an input's prompts repeats an earlier prefix.

    python tools/reuse_table.py examples/agents.jsonl FILE ...

Each row is what `apcbatch plan FILE --block-sizes 16,64,256,1024` says with the bundled model's tokenizer and template
and `--turns each`: what `planned` restores, and `all` on each grid. No weights are read.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_SIZES = (16, 64, 256, 1024)


def survey(path: str, policy: str) -> dict[str, Any]:
    """What `apcbatch plan --json` says of an input."""
    sizes = ",".join(map(str, BLOCK_SIZES))
    words = ["plan", path, "--block-sizes", sizes, "--policy", policy, "--draft", "none", "--json", "-"]
    command = [sys.executable, "-m", "apcbatch", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def head() -> Iterator[str]:
    """The first two lines of the table."""
    sizes = " | ".join(f"grid {size:,}" for size in BLOCK_SIZES)
    yield f"| input | requests | prompt tokens | repeat an earlier prefix | planned | {sizes} |"
    yield "|---|" + "--:|" * (4 + len(BLOCK_SIZES))


def row(path: str) -> str:
    """The line of one input."""
    planned, found = survey(path, "planned"), survey(path, "all")
    dataset = found["dataset"]
    rates = {one["block_size"]: one["hit_rate"] for one in found["candidates"]}
    cells = [
        f"`{Path(path).name}`",
        f"{dataset['requests']:,}",
        f"{dataset['prompt_tokens']:,}",
        f"**{100 * dataset['ideal_hit_rate']:.1f} %**",
        f"{100 * planned['candidates'][0]['hit_rate']:.1f} %",
        *(f"{100 * rates[size]:.1f} %" for size in BLOCK_SIZES),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for line in [*head(), *map(row, sys.argv[1:])]:
        print(line)
