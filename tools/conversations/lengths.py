"""Whether the answers of a conversation are short enough: the one place that asks the bundled tokenizer.

`pieces` is a quick estimate, a little above the number of tokens, for the choice of what goes into one answer.

Must not know: what a conversation is about.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path

from examples_text.script import Message, Script
from tokenizers import Tokenizer

TOKENIZER = Path(__file__).parents[2] / "apcbatch" / "demo" / "tokenizer.json"
MOST_ANSWER_TOKENS = 118
_PIECE = re.compile(r"[A-Za-z]+|\d|[^\w\s]+|_|\n")
SURELY_SHORT = 118  # characters; such an answer is not counted


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@lru_cache(4096)
def num_tokens(text: str) -> int:
    """The tokens of a text; those of texts that come again soon are remembered."""
    return len(_tokenizer().encode(text, add_special_tokens=False).ids)


def pieces(text: str) -> int:
    """About how many tokens a text has: its words, digits and runs of other signs."""
    return len(_PIECE.findall(text))


def _text(answer: Message) -> str:
    """The answer as the chat template writes it."""
    called = [call["function"] for call in answer.get("tool_calls", [])]
    calls = [f'<tool_call>{{"name": "{one["name"]}", "arguments": {one["arguments"]}}}</tool_call>' for one in called]
    return "\n".join(filter(None, [answer["content"], *calls]))


def is_short(script: Script) -> bool:
    """Whether every answer has at most MOST_ANSWER_TOKENS tokens."""
    texts = [_text(message) for message in script.messages if message["role"] == "assistant"]
    long = [text for text in texts if len(text) > SURELY_SHORT]
    return all(num_tokens(text) < MOST_ANSWER_TOKENS for text in long)
