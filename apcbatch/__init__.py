"""apcbatch: offline batch inference for agentic multi-turn workloads on recurrent and hybrid models.

The Python surface is `LLM` and `Answer` for conversations and text, `Tools` for the tools of live episodes, and
`Engine`, `Request` and `Result` for token ids. `LLM`, `Tools` and `Engine` are imported on first use, so
`import apcbatch` and the command line's help load neither torch nor asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from apcbatch.answer import Answer
from apcbatch.process import settle_thread_waiting
from apcbatch.types import Request, Result
from apcbatch.version import VERSION as __version__

if TYPE_CHECKING:
    from apcbatch.engine.engine import Engine
    from apcbatch.llm import LLM
    from apcbatch.tools import Tools

settle_thread_waiting()  # before anything below this package loads torch

__all__ = ["LLM", "Answer", "Engine", "Request", "Result", "Tools", "__version__"]
_LAZY = {"Engine": "apcbatch.engine.engine", "LLM": "apcbatch.llm", "Tools": "apcbatch.tools"}


def __getattr__(name: str) -> Any:
    """Import `Engine`, `LLM` or `Tools` on first use."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'apcbatch' has no attribute '{name}'")
