"""The YAML of `tune-block-size --write`: the choice as a file for `--config`.

Must not know: how anything was found, where it goes.
"""

from __future__ import annotations

from apcbatch.config import Config
from apcbatch.tuning.choice import Tuning


def tuning_yaml(tuning: Tuning, config: Config) -> str:
    """A file for `--config`."""
    lines = [f"# {tuning.reason}", f"policy: {config.policy}", f"block_size: {tuning.recommended.block_size}"]
    return "\n".join([*lines, f"min_gain_tokens: {tuning.min_gain_tokens}", ""])
