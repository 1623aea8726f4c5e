#!/usr/bin/env python3
"""Makes the bundled models, Hugging Face checkpoint folders, from nothing: python tools/make_demo_model.py.

The tokenizer is trained on the example conversations and on the texts in tools/demo_model/texts; the network on
conversations that tools/conversations makes while it learns. Everything but the weights is the same bytes on every
machine: --without-weights makes only that. docs/demo-model.md says how long training takes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from demo_model import recipe, shapes, tokenizer
from demo_model.corpus import training_texts

TOOLS = Path(__file__).resolve().parent
PACKAGE = TOOLS.parent / "apcbatch"
OUTPUTS = {"mamba": PACKAGE / "demo", "jamba": PACKAGE / "demo_jamba"}


def write_json(path: Path, document: dict[str, Any], sort_keys: bool = True) -> None:
    """One JSON document, indented, with a final newline."""
    text = json.dumps(document, indent=2, sort_keys=sort_keys, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_all_but_weights(folder: Path, shape: shapes.Shape) -> None:
    """Write every file of the checkpoint but its tensors into folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", shapes.config(shape))
    write_json(folder / "generation_config.json", shapes.generation_config())
    trained = tokenizer.train(training_texts())
    write_json(folder / "tokenizer.json", tokenizer.tokenizer_json(trained), sort_keys=False)
    write_json(folder / "tokenizer_config.json", tokenizer.tokenizer_config())
    shutil.copyfile(TOOLS / "demo_model" / "chat_template.jinja", folder / "chat_template.jinja")


def write_weights(folder: Path, shape: shapes.Shape, chosen: recipe.Recipe, device_name: str, workers: int) -> None:
    """Train, and write the tensors, with what made them in the file's metadata. The file is written now and then, so
    that a run that is cut short leaves something."""
    import torch
    from demo_model import training
    from demo_model.batches import batches
    from demo_model.network import Network
    from safetensors.torch import save_file

    def save(network: Network, progress: training.Progress) -> None:
        training.print_progress(progress)
        step, _, _ = progress.losses[-1]
        if step % SAVE_STEPS and not progress.done:
            return
        made = {"steps": str(progress.steps), "tokens": str(progress.tokens), "recipe": json.dumps(asdict(chosen))}
        metadata = {"format": "pt", "digest": recipe.digest(chosen, shape), **made}
        save_file(network.checkpoint(), folder / "model.safetensors", metadata=metadata)
        (folder / "model.safetensors").chmod(0o644)
        write_json(folder.with_name(f"{folder.name}-losses.json"), asdict(progress))

    stream = batches(folder, chosen, workers)
    training.train(shape, chosen, stream, torch.device(device_name), save)


SAVE_STEPS = 500


def main() -> None:
    """Write the folder and say how large it is."""
    parser = argparse.ArgumentParser(description="make a bundled model")
    parser.add_argument("--output", type=Path, help="default: the bundled folder of the shape")
    parser.add_argument("--shape", choices=sorted(shapes.SHAPES), default="mamba", help="default: %(default)s")
    parser.add_argument("--without-weights", action="store_true", help="write everything but the tensors")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that make text")
    parser.add_argument("--steps", type=int, default=recipe.Recipe.steps, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=recipe.Recipe.minutes, help="at most; default: %(default)s")
    parser.add_argument("--batch-tokens", type=int, default=recipe.Recipe.batch_tokens, help="default: %(default)s")
    options = parser.parse_args()
    shape, output = shapes.SHAPES[options.shape], options.output or OUTPUTS[options.shape]
    write_all_but_weights(output, shape)
    if not options.without_weights:
        chosen = replace(
            recipe.Recipe(), steps=options.steps, minutes=options.minutes, batch_tokens=options.batch_tokens
        )
        write_weights(output, shape, chosen, options.device, options.workers)
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"{output}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
