#!/usr/bin/env python3
"""Writes the example conversations, one JSON object a line: python tools/make_examples.py [--output FILE].

Running it again gives the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from examples_text import all_conversations
from examples_text.script import to_json

OUTPUT = Path(__file__).resolve().parent.parent / "examples" / "agents.jsonl"


def main() -> None:
    """Write the file and say how large it is."""
    parser = argparse.ArgumentParser(description="write the example conversations")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    path = parser.parse_args().output
    lines = [to_json(script.record()) + "\n" for script in all_conversations()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{path}: {len(lines)} conversations, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
