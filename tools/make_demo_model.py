#!/usr/bin/env python3
"""Writes the bundled model, a Hugging Face checkpoint folder: python tools/make_demo_model.py [--output DIR].

Running it again gives the same bytes. The weights are random; the tokenizer is trained on the example
conversations and on the texts in tools/demo_model/texts.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from demo_model import tokenizer, weights
from demo_model.corpus import training_texts
from safetensors.torch import save_file

TOOLS = Path(__file__).resolve().parent
OUTPUT = TOOLS.parent / "apcbatch" / "demo"


def write_json(path: Path, document: dict[str, Any], sort_keys: bool = True) -> None:
    """One JSON document, indented, with a final newline."""
    text = json.dumps(document, indent=2, sort_keys=sort_keys, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_model(folder: Path) -> None:
    """Write every file of the checkpoint into folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", weights.config())
    write_json(folder / "generation_config.json", weights.generation_config())
    save_file(weights.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    trained = tokenizer.train(training_texts())
    write_json(folder / "tokenizer.json", tokenizer.tokenizer_json(trained), sort_keys=False)
    write_json(folder / "tokenizer_config.json", tokenizer.tokenizer_config())
    shutil.copyfile(TOOLS / "demo_model" / "chat_template.jinja", folder / "chat_template.jinja")


def main() -> None:
    """Write the folder and say how large it is."""
    parser = argparse.ArgumentParser(description="write the bundled model")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    folder = parser.parse_args().output
    write_model(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
