"""Conversations for tests, and JSON lines in files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

# A chat template that shows reasoning only after the last user message, as Qwen's do, unless it is told to keep it.
DROPS_THOUGHTS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% set words = (m.content or '').split('</think>') %}"
    "{% set thought = m.reasoning_content or (words[0].replace('<think>', '') if words|length > 1 else '') %}"
    "{% if thought and (loop.index0 > ns.last or preserve_thinking) %}<think>{{ thought }}</think>{% endif %}"
    "{{ words[-1] }}{% endfor %}"
)

WORDS = [
    "when",
    "which",
    "order",
    "ticket",
    "refund",
    "flight",
    "search",
    "table",
    "answer",
    "window",
    "number",
    "please",
    "return",
    "change",
    "status",
]


def conversation(number: int, turns: int = 2) -> dict[str, Any]:
    """A conversation of `turns` assistant turns, with words that tell it apart."""
    messages = [{"role": "system", "content": "Answer in one short sentence, whatever is asked."}]
    for turn in range(turns):
        messages.append(
            {"role": "user", "content": f"Question {turn} of conversation {number}: what is {number * 7 + turn}?"}
        )
        messages.append({"role": "assistant", "content": f"It is the number {number * 7 + turn}."})
    return {"id": f"c-{number}", "messages": messages}


def write_lines(path: Path, lines: list[Any]) -> Path:
    """JSON for everything that is not text already."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def forked_lines(num_lines: int, *, systems: int = 50, shuffled: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    """Lines of one short request each: `systems` system prompts, each followed by forks of 1 to 8 lines that share the
    beginning of the user's message too. shuffled: mix all lines, so that those of a fork lie far apart."""
    source = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(source.choice(WORDS) for _ in range(count))

    prompts = [words(75) for _ in range(systems)]
    lines: list[dict[str, Any]] = []
    while len(lines) < num_lines:
        system, shared = source.choice(prompts), words(source.randint(4, 20))
        for _ in range(min(source.randint(1, 8), num_lines - len(lines))):
            user = f"{shared} {words(source.randint(4, 20))}"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            lines.append({"id": f"f-{len(lines)}", "messages": messages})
    if shuffled:
        source.shuffle(lines)
    return lines
