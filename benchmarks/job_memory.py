"""Peak resident memory of `apcbatch run` over few and over many short conversations.

    python benchmarks/job_memory.py [--few 2000] [--many 20000]

Both runs read the same generated file with --limit. The last line is one JSON document; `growth` is the peak of
the long run over that of the short one, minus 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def write_conversations(path: Path, count: int) -> None:
    """Conversations of one turn, each with words of its own."""
    with open(path, "w") as file:
        for number in range(count):
            messages = [{"role": "user", "content": f"{number}: what is {number * 7919 % 1000003}?"}]
            file.write(json.dumps({"id": f"c-{number}", "messages": messages}) + "\n")


def peak_rss_bytes(folder: Path, limit: int) -> int:
    """Peak resident bytes of one run over the first `limit` conversations."""
    command = [
        sys.executable,
        "-m",
        "apcbatch",
        "run",
        "in.jsonl",
        "-o",
        f"{limit}.jsonl",
        "--limit",
        str(limit),
    ]
    command += ["--max-tokens", "1", "-q", "--progress", "plain"]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])["peak_rss_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--few", type=int, default=2_000)
    parser.add_argument("--many", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_conversations(folder / "in.jsonl", options.many)
        few, many = (peak_rss_bytes(folder, limit) for limit in (options.few, options.many))
    found = {
        "few": options.few,
        "many": options.many,
        "few_bytes": few,
        "many_bytes": many,
        "growth": many / few - 1,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
