"""apcbatch: offline batch inference for agentic multi-turn workloads on recurrent and hybrid models.

The Python surface is `LLM` and `Answer` for conversations and text, `Tools` for the tools of live episodes, and
`Engine`, `Request` and `Result` for token ids.
`LLM` and `Engine` are imported on first use, so `import apcbatch` and the command line's help do not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from apcbatch.answer import Answer
from apcbatch.process import settle_thread_waiting
from apcbatch.tools import Tools
from apcbatch.types import Request, Result
from apcbatch.version import VERSION as __version__

if TYPE_CHECKING:
    from apcbatch.engine.engine import Engine
    from apcbatch.llm import LLM

settle_thread_waiting()  # before anything below this package loads torch

__all__ = ["LLM", "Answer", "Engine", "Request", "Result", "Tools", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `Engine` or `LLM` on first use."""
    if name == "Engine":
        from apcbatch.engine.engine import Engine

        return Engine
    if name == "LLM":
        from apcbatch.llm import LLM

        return LLM
    raise AttributeError(f"module 'apcbatch' has no attribute '{name}'")
