"""What a run says of chats: variables for the template, and how answers are read.

Must not know: templates, tokens, parsers.
"""

from __future__ import annotations

from dataclasses import dataclass

from apcbatch.config import Config


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """tool_parser, reasoning_parser: `auto`, `none` or a parser's name. template_kwargs: JSON text of an object."""

    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    template_kwargs: str | None = None

    @classmethod
    def of(cls, config: Config) -> ChatOptions:
        """Those of a configuration."""
        return cls(config.tool_parser, config.reasoning_parser, config.template_kwargs)
