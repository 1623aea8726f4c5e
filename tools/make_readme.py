"""Writes the figures of README.md from runs: what `make demo` prints at the end, one of its answers, and what the
example in Python prints.

    python -m tools.make_readme

A test makes the same runs, which draft nothing, and compares all but the seconds. What is around the figures is written
by hand.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.terminal import in_terminal

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "README.md"
RUN = re.compile(r"(?<=```text\n)\.\.\.\n.*?(?=```)", re.DOTALL)
ANSWER = re.compile(r"(?P<before>\.custom_id == \"(?P<id>[^\"]+)\".*?```json\n).*?(?=```)", re.DOTALL)
EXAMPLE = re.compile(
    r"```python\n(?P<code>from apcbatch import LLM\n.*?)```\n\nIt prints:\n\n```text\n(?P<output>.*?)```", re.DOTALL
)
SECONDS = re.compile(r"(?<= in )[\d.]+(?= s\b)|[\d,]+(?= a second)|(?<=seconds  ).*")
COLUMNS = 80  # of the terminal
LAST_REQUESTS = 3


def keep_all() -> list[str]:
    """The options of both runs of `make demo`, as the Makefile has them."""
    [options] = re.findall(r"^KEEP_ALL := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return str(options).split()


def demo_runs(custom_id: str) -> tuple[str, str]:
    """What the second of the two runs of `make demo` prints: its last lines, and what it says of the whole; and one of
    its answers."""
    with tempfile.TemporaryDirectory() as folder:
        shown = ""
        for name, options in (("cold", ["-q", "--max-tokens", "1"]), ("warm", [])):  # what is restored is the same
            command = ["run", "examples/agents.jsonl", "-o", f"{folder}/{name}.jsonl", "--store", f"{folder}/s"]
            command += [*keep_all(), "--device", "cpu", "--progress", "none", *options]
            command += ["--draft", "none"]  # how much is drafted, and so the order, depends on measured seconds
            code, shown = in_terminal(command, COLUMNS, ROOT, NO_COLOR="1")
            if code != 0:
                raise SystemExit(shown)
        lines = shown.splitlines()
        end = next(at for at, line in enumerate(lines) if " requests in " in line)
        begins = [at for at in range(end) if not lines[at].startswith(" ")]
        lines = lines[begins[-LAST_REQUESTS] :]
        answer = answer_in(Path(folder, "warm.jsonl"), custom_id)
    return "\n".join(["...", *lines]).replace(folder, "demo-out") + "\n", answer


def answer_in(output: Path, custom_id: str) -> str:
    """The text of an answer and the functions it calls, each as JSON on a line of its own."""
    for line in output.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["custom_id"] == custom_id:
            message = record["response"]["body"]["choices"][0]["message"]
            parts = [message["content"], *(call["function"] for call in message["tool_calls"])]
            return "".join(json.dumps(part, ensure_ascii=False, separators=(",", ":")) + "\n" for part in parts)
    raise SystemExit(f"README.md shows the answer of {custom_id}, which is not among those of the run")


def example_output(code: str) -> str:
    """What the example in Python prints."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=folder, env=_environment(), check=True, capture_output=True, text=True)
    return done.stdout


def document(page: str) -> str:
    """The page with new figures."""
    shown = ANSWER.search(page)
    if shown is None:
        raise SystemExit("README.md shows no answer after a `jq` that selects its custom_id")
    said, answer = demo_runs(shown["id"])
    page = RUN.sub(lambda _: said, page, count=1)
    page = ANSWER.sub(lambda found: found["before"] + answer, page, count=1)
    found = EXAMPLE.search(page)
    if found is None:
        raise SystemExit("README.md has no example that begins with `from apcbatch import LLM`, or not what it prints")
    return page[: found.start("output")] + example_output(found["code"]) + page[found.end("output") :]


def without_seconds(page: str) -> str:
    """The page without what differs from machine to machine."""
    return SECONDS.sub("?", page)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("APCBATCH_")} | {
        "PYTHONPATH": str(ROOT)
    }


if __name__ == "__main__":
    before = TARGET.read_text(encoding="utf-8")
    after = document(before)
    if without_seconds(after) != without_seconds(before):  # seconds alone are no news: this machine may be busy
        TARGET.write_text(after, encoding="utf-8")
