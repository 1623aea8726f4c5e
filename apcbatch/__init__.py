"""apcbatch: offline batch inference for agentic multi-turn workloads on Mamba and Jamba models.

`LLM` and `Answer` (conversations and text), `Engine`, `Request` and `Result` (token ids) are the Python surface. `LLM`
and `Engine` are imported on first use, so that `import apcbatch` and the command line's help stay free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from apcbatch.answer import Answer
from apcbatch.process import settle_thread_waiting
from apcbatch.types import Request, Result
from apcbatch.version import VERSION as __version__

if TYPE_CHECKING:
    from apcbatch.engine.engine import Engine
    from apcbatch.llm import LLM

settle_thread_waiting()  # before anything below this package loads torch

__all__ = ["LLM", "Answer", "Engine", "Request", "Result", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from apcbatch.engine.engine import Engine

        return Engine
    if name == "LLM":
        from apcbatch.llm import LLM

        return LLM
    raise AttributeError(f"module 'apcbatch' has no attribute '{name}'")
