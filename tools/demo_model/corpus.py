"""The text that the demo tokenizer learns from: the files of texts/ and the example conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from examples_text import all_conversations
from examples_text.script import to_json

TEXTS = Path(__file__).parent / "texts"
REPEATS = 3  # general text counts more, so that the vocabulary is not only about the examples


def training_texts() -> Iterator[str]:
    """Every text, in an order that never changes; what several conversations share comes once."""
    for path in sorted(TEXTS.glob("*.txt")):
        for _ in range(REPEATS):
            yield path.read_text(encoding="utf-8")
    seen = set()
    for script in all_conversations():
        for message in (*script.messages, *script.tools):
            text = to_json(message) if "function" in message else message["content"] or ""
            calls = "\n".join(call["function"]["arguments"] for call in message.get("tool_calls", []))
            for part in (text, calls):
                if part not in seen:
                    seen.add(part)
                    yield part
