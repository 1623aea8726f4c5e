"""Other names for what a conversation is about: names that nobody has seen, so that a model must copy them.

The names are the capitalised words in the arguments of calls, and the parts of paths and of hyphened names there. Each
is replaced by the same invented word in the whole conversation, unless its system prompt or its tools have it too. So
are a few of the words that only users and tools say: a model must not lose its way at a word that it does not know.
Must not know: what conversations are about, tokens.
"""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

SHARE = 0.7  # of the conversations that get other names
UNKNOWN = 0.06  # of the words that only users and tools say, in half of these
SHORTEST = 3  # letters that a word has more of, if it is one of those
KEPT = {"None", "True", "False", "Unreleased", "tests", "python", "pytest"}
BEGIN = r"(?:(?<![A-Za-z\\])|(?<=\\n))"  # a name may follow a line's end that is written as JSON writes it
NAME = re.compile(rf"{BEGIN}[A-Z][a-z]{{2,}}(?![A-Za-z])")
PART = re.compile(rf"{BEGIN}[a-z]{{4,}}(?=[/-]|\.py)|(?<=[a-z]-)[a-z]{{4,}}(?![A-Za-z])")
WORD = re.compile(rf"{BEGIN}[A-Za-z][a-z]{{2,}}(?![A-Za-z])")
FIRST = "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl l m n p pl pr qu r s sh sk sl sn st str t th tr v w y z"
MIDDLE = "a e i o u a e i o u a e i o u ai au ea ee ie oa oo ou"
LAST = "b ck d f g l ld lf lk ll lm lt m mp n nd ng nk nt p r rd rk rm rn rs rt s sh sk ss st t th tt w x"
FIRSTS, MIDDLES, LASTS = FIRST.split(), MIDDLE.split(), LAST.split()


def invented(rng: Random) -> str:
    """A word of one to three syllables."""
    syllables = (rng.choice(FIRSTS) + rng.choice(MIDDLES) for _ in range(rng.choice((0, 0, 1, 1, 2))))
    return "".join(syllables) + rng.choice(FIRSTS) + rng.choice(MIDDLES) + rng.choice(LASTS)


def names_of(record: dict[str, Any]) -> list[str]:
    """What can have another name, in the order in which it comes."""
    messages = record["messages"]
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or []]
    fixed = [message["content"] for message in messages if message["role"] == "system"]
    known = KEPT | set(WORD.findall(json.dumps([fixed, record["tools"]], ensure_ascii=False)))
    found = (name for text in calls for pattern in (NAME, PART) for name in pattern.findall(text))
    return [name for name in dict.fromkeys(found) if name not in known]


def heard(record: dict[str, Any]) -> list[str]:
    """The words of users and tools that nobody else says, in the order in which they come."""
    said = [message for message in record["messages"] if message["role"] in ("system", "assistant")]
    known = set(WORD.findall(json.dumps([said, record["tools"]], ensure_ascii=False)))
    texts = (message["content"] or "" for message in record["messages"] if message["role"] in ("user", "tool"))
    words = dict.fromkeys(word for text in texts for word in WORD.findall(text) if len(word) > SHORTEST)
    return [word for word in words if word not in known]


def renamed(record: dict[str, Any]) -> dict[str, Any]:
    """The record (a line of JSONL) or, as its id decides, the same conversation with other names."""
    rng = Random(f"names/{record['id']}")
    if rng.random() >= SHARE:
        return record
    names = names_of(record)
    if rng.random() < 0.5:
        names += (word for word in heard(record) if rng.random() < UNKNOWN)
    other = {name: invented(rng) for name in names}
    other = {name: word.capitalize() if name[0].isupper() else word for name, word in other.items()}
    return {**record, "messages": [_message(message, other) for message in record["messages"]]}


def _message(message: dict[str, Any], other: dict[str, str]) -> dict[str, Any]:
    """The message, with names replaced in what is said and in arguments; roles, ids and functions keep theirs."""

    def told(text: str) -> str:
        return WORD.sub(lambda found: other.get(found.group(), found.group()), text)

    made = dict(message)
    if isinstance(message["content"], str):
        made["content"] = told(message["content"])
    if "tool_calls" in message:
        functions = [call["function"] for call in message["tool_calls"]]
        changed = [{**function, "arguments": told(function["arguments"])} for function in functions]
        made["tool_calls"] = [
            {**call, "function": one} for call, one in zip(message["tool_calls"], changed, strict=True)
        ]
    return made
