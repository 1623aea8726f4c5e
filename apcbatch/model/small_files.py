"""What tells two model folders apart besides their weights: tokenizer, chat template, generation config.

Must not know: what is in those files.
"""

from __future__ import annotations

from pathlib import Path

import xxhash


def model_files_digest(model_dir: Path) -> str:
    """xxh3-128, in hex, over the small files of a model folder, `config.json` among them."""
    digest = xxhash.xxh3_128()
    for path in sorted(model_dir.iterdir()):
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith(".index.json"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
