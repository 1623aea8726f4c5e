"""Random datasets of the shapes that hurt a prefix cache: the lines of one INPUT, drawn from a generator."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np

from tests.soak.settings import line_settings

WORDS = [
    "the", "a", "run", "file", "error", "test", "agent", "state", "token", "open", "read", "list", "data", "plan", "0",
    "17", "3.14", "naïve", "Größe", "東京", "データ", "привет", "мир", "שלום", "مرحبا", "👍", "👩\u200d💻", "e\u0301",
    "﷽", "𝔘", "{}", "[]", "()", "=>", "<tool>", "</s>", "\u200b", "\n", "\n\n\n", "\t", " ", "",
]  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("search", "read_file", "größe")
]
# Around the ends of blocks and pages.
COMPLETION_TOKENS = (1, 2, 15, 16, 17, 47, 48, 49, 63, 64, 65, 100, 128, 129, 543, 544, 545)
FIRST_PLAIN_ID, LAST_PLAIN_ID = 300, 4000
STUB = "[elided]"

Message = dict[str, Any]
Chat = dict[str, Any]


class Dataset:
    """Draws the lines of one input; each conversation may build on those before it."""

    def __init__(self, draw: np.random.Generator) -> None:
        self._draw = draw
        self._chats: list[Chat] = []
        self._prefixes = [self._words(5, 70) for _ in range(2)]
        self._ids = [int(i) for i in draw.integers(FIRST_PLAIN_ID, LAST_PLAIN_ID, 600)]

    def lines(self) -> list[str]:
        """2 to 6 pieces of input as lines of JSON, a broken one and a repeated id among them now and then."""
        makers = [self._fresh, self._fork, self._elided, self._duplicate, self._single, self._completions]
        found: list[dict[str, Any]] = []
        for _ in range(int(self._draw.integers(2, 7))):
            make = makers[int(self._draw.choice(len(makers), p=[0.3, 0.25, 0.15, 0.1, 0.1, 0.1]))]
            found += make()
        order = self._draw.permutation(len(found)) if self._chance(0.3) else range(len(found))
        lines = [json.dumps(self._named(found[i], i), ensure_ascii=self._chance(0.5)) for i in order]
        if self._chance(0.15):
            lines.insert(int(self._draw.integers(len(lines) + 1)), '{"messages": [{"role"')
        if self._chance(0.1):
            lines.append(lines[0])
        return lines

    def _fresh(self) -> list[dict[str, Any]]:
        """A conversation with a prefix that others may have too."""
        prefix = self._prefixes[int(self._draw.integers(len(self._prefixes)))]
        if self._chance(0.3):
            prefix = prefix[: int(self._draw.integers(1, len(prefix) + 1))]
        chat: Chat = {"messages": [{"role": "system", "content": prefix}]}
        if self._chance(0.4):
            chat["tools"] = TOOLS[: int(self._draw.integers(1, 1 + len(TOOLS)))]
        for _ in range(int(self._draw.integers(1, 4))):
            chat["messages"] += self._turn("tools" in chat)
        return [self._kept(chat)]

    def _fork(self) -> list[dict[str, Any]]:
        """A conversation that leaves an earlier one in the middle of a message, or between two."""
        chat = self._earlier()
        at = int(self._draw.integers(len(chat["messages"])))
        content = chat["messages"][at]["content"]
        chat["messages"] = chat["messages"][: at + 1]
        kept = int(self._draw.integers(len(content) + 1))
        chat["messages"][at]["content"] = content[:kept] + self._words(0, 20)
        for _ in range(int(self._draw.integers(3))):
            chat["messages"] += self._turn("tools" in chat)
        return [self._kept(chat)]

    def _elided(self) -> list[dict[str, Any]]:
        """An agent's requests one by one: each has the old results of its tools, or its first question, rewritten."""
        chat, lines = self._earlier(), []
        ends = [n for n, message in enumerate(chat["messages"]) if message["role"] == "assistant" and n]
        for end in ends:
            messages = copy.deepcopy(chat["messages"][:end])
            results = [message for message in messages if message["role"] == "tool"]
            for message in results[:-1] or messages[1:2]:
                message["content"] = STUB
            lines.append({**chat, "messages": messages, "batch": True})
        return lines

    def _duplicate(self) -> list[dict[str, Any]]:
        """The whole of an earlier conversation again."""
        return [self._earlier()]

    def _single(self) -> list[dict[str, Any]]:
        """One message, mostly shorter than a block."""
        return [{"messages": [{"role": "user", "content": self._words(0, 6)}]}]

    def _completions(self) -> list[dict[str, Any]]:
        """Beginnings of one list of token ids, cut around the ends of blocks."""
        counts = self._draw.choice(COMPLETION_TOKENS, size=int(self._draw.integers(1, 5)))
        return [{"prompt": self._ids[: int(count)]} for count in counts]

    def _turn(self, with_tools: bool) -> list[Message]:
        """A question and its answer, through a tool if there are any."""
        messages: list[Message] = [{"role": "user", "content": self._words(1, 20)}]
        if with_tools and self._chance(0.7):
            call = {"name": "search", "arguments": {"query": self._words(1, 4)}}
            call_id = f"call{int(self._draw.integers(9))}"
            messages += [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": call_id, "type": "function", "function": call}],
                },
                {
                    "role": "tool",
                    "tool_call_id": call_id,
                    "content": self._words(1, 150 if self._chance(0.1) else 30),
                },
            ]
        if self._chance(0.9):
            messages.append({"role": "assistant", "content": self._words(1, 15)})
        return messages

    def _named(self, chat: dict[str, Any], number: int) -> dict[str, Any]:
        """A line in one of the formats that can hold it."""
        chat = dict(chat)
        settings = line_settings(self._draw, "completions" if "prompt" in chat else "chat")
        if chat.pop("batch", False) or "prompt" in chat or self._chance(0.2):
            chat |= settings
            if self._chance(0.2):
                chat["max_tokens"] = int(self._draw.integers(1, 12))
            url = "/v1/completions" if "prompt" in chat else "/v1/chat/completions"
            return {"custom_id": f"b-{number}", "method": "POST", "url": url, "body": chat}
        if "tools" not in chat and self._chance(0.2):
            speakers = {"system": "system", "user": "human", "assistant": "gpt"}
            said = [{"from": speakers[m["role"]], "value": m["content"]} for m in chat["messages"]]
            return {"id": f"s-{number}", "conversations": said, **settings}
        return {"id": f"c-{number}", **chat, **(settings if self._chance(0.7) else {})}

    def _kept(self, chat: Chat) -> Chat:
        self._chats.append(chat)
        return chat

    def _earlier(self) -> Chat:
        """A copy of a conversation that there is already."""
        if not self._chats:
            self._fresh()
        return copy.deepcopy(self._chats[int(self._draw.integers(len(self._chats)))])

    def _words(self, least: int, most: int) -> str:
        return " ".join(self._draw.choice(WORDS, size=int(self._draw.integers(least, most + 1))))

    def _chance(self, probability: float) -> bool:
        return bool(self._draw.random() < probability)
