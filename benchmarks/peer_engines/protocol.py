"""How a measured engine is asked: one JSON line in, one JSON line out, in a process of its own.

An engine's module makes an object with three methods and hands it to `answer`:
  prefill(tokens) -> seconds until the logits of the last one are there
  decode(running, prompt, new) -> seconds of `new` tokens for each of `running` sequences, behind `prompt` tokens each
  greedy(tokens, new) -> the likeliest next tokens, one after the other
Must not know: apcbatch, torch; an engine may have an interpreter of its own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def answer(engine: Any) -> None:
    """Serve stdin until it ends. What the engine prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        reply = getattr(engine, call["call"])(*call["arguments"])
        print(json.dumps({"reply": reply}), file=replies, flush=True)


def tokens_of(number: int, count: int, vocabulary: int) -> list[int]:
    """`count` scattered token ids, other ones for each number; the same in every engine."""
    return [(7 + 104729 * (number + 1) + 7919 * i * (i + number + 3)) % vocabulary for i in range(count)]
