"""A random run of a report document: its requests as columns, with tree, turns, sums and timeline."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "-->]]>",
    "<img src=x onerror=alert(1)>",
    "&lt;b&gt; &amp; \"quoted\" 'single' `tick` ${name}",
    "line one\u2028line two\u2029line three",
    "\u202eright to left\u202c \u05d0\u05d1\u05d2 \u0645\u0631\u062d\u0628\u0627",
    "a NUL \x00 and a bell \x07 and an escape \x1b[31mred",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 family \U0001f3f3\ufe0f\u200d\U0001f308",
    "combining e\u0301\u0302\u0303 and \u200b zero width",
    "javascript:alert(1)",
    "__proto__",
    "constructor",
    "\\u003c\\n\\",
    "",
)
WORDS = (  # noqa: SIM905
    "the order was shipped on Monday and your refund of 24 euros is on its way please check the file for errors then "
    "run the tests again I found three flights to Lisbon tomorrow morning which one shall I book table rows sorted"
).split()
TOOLS = ("find_order", "search_flights", "read_file", "run_tests", "create_event")
REASONS = ("", "cold", "below_grid", "diverged", "shorter_than_block", "evicted", "stranded", "disabled")
ERRORS = (
    "invalid_request: messages[2].content is a number; expected a text or a list of parts",
    "context_length_exceeded: the prompt has 9,000 tokens and the model takes 8,192",
    "out_of_memory: the state of 70,000 tokens does not fit",
)
ROLES = ("system", "user", "tool")
REMEDY = "One sentence that says what helps."
SOURCES = ("none", "memory", "disk")
FINISHES = ("error", "stop", "length", "tool_calls")
EDGE_COLUMNS = ("parent", "begin", "end", "requests", "restored", "computed", "memory", "disk", "hidden", "text")
TIMELINE_COLUMNS = 400
REQUEST_COLUMNS = (
    "id", "line", "turn", "prompt", "cached", "ideal", "computed", "out", "from", "reason", "prefill_ms", "decode_ms",
    "finish", "error", "drafted", "accepted", "answer", "calls",
)  # fmt: skip
MOST_EDGES = 4096
MOST_TURNS = 100


def text(draw: random.Random, words: int, hostile: bool = True) -> str:
    """Some words, and at times what must not run."""
    said = " ".join(draw.choices(WORDS, k=words))
    return f"{said} {draw.choice(HOSTILE)} {draw.choice(WORDS)}" if hostile and draw.random() < 0.3 else said


class Run:
    """One run: its requests as columns, and the tree that they make. Runs of one seed have the same requests and
    answers; what is restored, and the times, differ by number."""

    def __init__(
        self,
        seed: int,
        requests: int,
        number: int,
        unfinished: bool = False,
        *,
        entries: bool = True,
        tree: bool = True,
        prompts: bool = False,
        errors: bool = True,
        hostile: bool = True,
        processes: int = 2,
    ) -> None:
        self.requests, self.number, self.unfinished = requests, number, unfinished
        self.draw, self.times = random.Random(f"{seed}"), random.Random(f"{seed} {number}")
        self.entries, self.prompts, self.errors, self.hostile = entries, prompts, errors, hostile
        self.has_tree, self.num_processes = tree, processes if entries else 0
        self.rows: dict[str, list[Any]] = {name: [] for name in REQUEST_COLUMNS}
        self.edges: dict[str, list[Any]] = {name: [] for name in EDGE_COLUMNS}
        self.is_long = requests > 2000
        self._add_edge(-1, 0, 0, "")
        self._draw_requests()

    def _add_edge(self, parent: int, begin: int, end: int, words: str) -> int:
        row = {"parent": parent, "begin": begin, "end": end, "text": words}
        for name in EDGE_COLUMNS:
            self.edges[name].append(row.get(name, 0))
        return len(self.edges["parent"]) - 1

    def _draw_requests(self) -> None:
        """Conversations below shared edges; each turn is one request and one edge more."""
        draw, shared = self.draw, []
        for n in range(max(1, min(40, self.requests // 20))):
            end = draw.randint(200, 2000)
            first = self._add_edge(0, 0, end, f"<|system|> agent {n}: {text(draw, 6, self.hostile)}"[:80])
            second = self._add_edge(first, end, end + draw.randint(20, 300), f"tools {n}")
            shared.append(draw.choice((first, second)))
        line = 0
        while len(self.rows["id"]) < self.requests:
            line += 1
            edge = draw.choice(shared)
            node, position, name = edge, self.edges["end"][edge], draw.choice(("support", "search", "files"))
            for turn in range(1, draw.randint(2, 9)):
                if len(self.rows["id"]) >= self.requests:
                    break
                begin, position = position, position + draw.randint(20, 400)
                if len(self.edges["parent"]) < MOST_EDGES:
                    node = self._add_edge(node, begin, position, text(draw, 4, self.hostile)[:80])
                self._draw_request(f"{name}-{line}#{turn}", line, turn, node, position)

    def _draw_request(self, name: str, line: int, turn: int, node: int, length: int) -> None:
        draw, rows = self.draw, self.rows
        failed = self.errors and draw.random() < 0.02
        ideal = 0 if draw.random() < 0.05 else length - draw.randint(1, min(200, length - 1))
        cached = ideal // 64 * 64 if self.times.random() < 0.8 else ideal // 128 * 64
        source = 0 if cached == 0 else self.times.choice((1, 2))
        reason = 1 if ideal == 0 else 0 if cached == ideal else self.times.choice((2, 2, 2, 3, 3, 4, 5, 6))
        calls = None
        if draw.random() < 0.3:
            calls = [{"name": draw.choice(TOOLS), "arguments": f'{{"id": "A-{draw.randint(1, 99)}"}}'}]
        if failed:
            length = cached = source = reason = 0
            ideal = -1
            calls = None
        is_odd = self.hostile and not self.is_long and draw.random() < 0.05
        words = 3 if self.is_long else draw.choice((1, 10, 60))
        row = {
            "id": f"{name} {draw.choice(HOSTILE)}" if is_odd else name,
            "line": line, "turn": turn, "prompt": length, "cached": cached, "ideal": ideal,
            "computed": length - cached, "out": 0 if failed else draw.randint(0, 128), "from": source,
            "reason": reason, "prefill_ms": 0 if failed else self.times.randint(10, 3000),
            "decode_ms": 0 if failed else self.times.randint(10, 9000),
            "finish": 0 if failed else 3 if calls else draw.choice((1, 2)),
            "error": draw.randint(1, len(ERRORS)) if failed else 0, "drafted": 0, "accepted": 0,
            "answer": "" if failed else text(draw, words, self.hostile and not self.is_long), "calls": calls,
        }  # fmt: skip
        if not failed and not self.is_long and draw.random() < 0.01:
            row["answer"] = "x" * 1_000_000 if self.requests <= 200 and line % 7 == 0 else "one-word" * 500
        if not failed and self.number < 2 and self.times.random() < 0.7:
            row["accepted"] = self.times.randint(0, row["out"])
            row["drafted"] = row["accepted"] + self.times.randint(0, 60)
        for column, value in row.items():
            rows[column].append(value)
        if not failed:
            self._count(node, length, cached, source)

    def _count(self, node: int, length: int, cached: int, source: int) -> None:
        """Enter a request into the edges of its path; what lies beyond a node's end belongs to the node (folded)."""
        edges, first = self.edges, True
        while node >= 0:
            begin, end = edges["begin"][node], length if first else edges["end"][node]
            restored = max(0, min(end, cached) - begin)
            edges["requests"][node] += 1
            edges["hidden"][node] += first and edges["end"][node] < length
            edges["restored"][node] += restored
            edges["computed"][node] += end - begin - restored
            if source:
                edges[("memory", "disk")[source - 1]][node] += restored
            node, first = edges["parent"][node], False

    def timeline(self, number: int) -> dict[str, Any]:
        """What a process did over time; the last one of an unfinished run has no seconds by phase."""
        draw, killed = self.times, self.unfinished and number == self.num_processes - 1
        phases = {"load": 2.5, "plan": 0.25, "prefill": 4.0, "decode": 5.0, "store": 0.5, "idle": 0.25}
        failed, sums = 0, []
        for _ in range(TIMELINE_COLUMNS):
            failed += draw.random() < 0.02
            sums.append(failed)
        return {
            "begin": 1795219200.1 + 60 * number,
            "seconds": 12.5,
            "phases": None if killed else phases,
            "running": [draw.randint(0, 32) for _ in range(TIMELINE_COLUMNS)],
            "failed": sums,
        }

    def ran(self, process: int) -> dict[str, Any]:
        """What ran in a process."""
        bad = HOSTILE[0] if self.hostile else "plain"
        return {
            "version": "0.9.0", "begin": 1795219200.1 + 60 * process,
            "command": f"apcbatch run examples/agents.jsonl -o 'out {bad}.jsonl'",
            "model": "demo", "fingerprint": "5f" * 32, "dtype": "float32", "device": "cpu",
            "machine": {
                "cpu": "AMD EPYC 7B13", "cores": 2, "threads": 2, "memory_bytes": 8_324_000_000, "gpu": None,
                "system": "Linux 6.1 x86_64", "python": "3.12.3", "torch": "2.13.0", "instructions": "avx2",
            },
            "options": [
                ["model", "demo", "default"], ["block_size", 64 << self.number, "--block-size"],
                ["stop", [bad], "a configuration file"], ["store", None, "default"], ["exact", True, "default"],
            ],
            "input": "examples/agents.jsonl",
        }  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """The sums, under the summary's names."""
        rows = self.rows
        ok = [n for n, error in enumerate(rows["error"]) if not error]
        codes = Counter(ERRORS[error - 1].partition(":")[0] for error in rows["error"] if error)
        total = {
            name: sum(max(0, value) for value in rows[name])
            for name in ("prompt", "cached", "computed", "ideal", "out")
        }
        sources = {name: sum(c for c, f in zip(rows["cached"], rows["from"], strict=True) if SOURCES[f] == name)
                   for name in ("memory", "disk")}  # fmt: skip
        return {
            "requests": len(rows["id"]), "ok": len(ok), "errors": len(rows["id"]) - len(ok),
            "errors_by_code": dict(sorted(codes.items())),
            "finish_reasons": {FINISHES[f]: n for f, n in sorted(Counter(rows["finish"]).items()) if f},
            "empty_answers": 3 * self.number, "unread_calls": 2 * self.number,
            "answer_warnings": {"unread_call": 2 * self.number, "unread_keys": 1} if self.number else {},
            "prompt_tokens": total["prompt"], "cached_tokens": total["cached"], "computed_tokens": total["computed"],
            "completion_tokens": total["out"], "hit_rate": total["cached"] / max(1, total["prompt"]),
            "ideal_hit_rate": total["ideal"] / max(1, total["prompt"]), "cached_by_source": sources,
            "miss_reasons": {REASONS[r]: n for r, n in Counter(rows["reason"]).items() if r},
            "prefill_tokens_per_s": 2301.5, "decode_tokens_per_s": 801.25,
            "tokens_per_pass": 1.75 if any(rows["drafted"]) else 1.0, "drafts": self._drafts(),
            "drafts_saved_s": (3.5, -0.25)[self.number] if any(rows["drafted"]) else None,
            "seconds": {"load": 2.5, "plan": 0.25, "prefill": 4.5, "decode": 6.25, "store": 0.75, "total": 14.5},
            "peak_rss_bytes": 812_000_000, "peak_device_bytes": None, "store_skipped": self.number % 3,
            "ignored_columns": {HOSTILE[0] if self.hostile else "reward": 7} if self.number else {},
            "warnings": [f"the bundled model is tiny {HOSTILE[0] if self.hostile else ''}".strip()],
        }  # fmt: skip

    def _drafts(self) -> dict[str, dict[str, int]]:
        """The drafts by source: of the first two runs alone, in two sources."""
        drafted, accepted = (sum(self.rows[name]) for name in ("drafted", "accepted"))
        first = {"drafted": drafted - drafted // 3, "accepted": accepted - accepted // 3}
        second = {"drafted": drafted // 3, "accepted": accepted // 3}
        return {"history": first, "lookup": second} if drafted > 3 else {}

    def _prompt(self, row: int) -> str | list[list[str]]:
        """A prompt: of a chat its messages, of every fifth request a completion's text."""
        said = [text(self.times, 10, self.hostile) for _ in range(3)]
        return " ".join(said) if row % 5 == 4 else [[role, one] for role, one in zip(ROLES, said, strict=True)]

    def as_document(self) -> dict[str, Any]:
        """The run as the page gets it."""
        summary, rows, done = self.summary(), self.rows, not self.unfinished
        ideal = sum(max(0, value) for value in rows["ideal"])
        timed = (
            "prefill_tokens_per_s", "decode_tokens_per_s", "tokens_per_pass", "seconds", "peak_rss_bytes",
            "peak_device_bytes", "store_skipped",
        )  # fmt: skip
        copied = (
            "requests", "ok", "errors", "errors_by_code", "finish_reasons", "empty_answers", "unread_calls",
            "answer_warnings", "prompt_tokens", "cached_tokens", "computed_tokens",
            "completion_tokens", "hit_rate", "ideal_hit_rate", "ignored_columns", "warnings",
        )  # fmt: skip
        lost = [max(0, i - c) for i, c in zip(rows["ideal"], rows["cached"], strict=True)]
        misses = [
            {
                "reason": name,
                "requests": rows["reason"].count(number),
                "tokens": sum(t for t, r in zip(lost, rows["reason"], strict=True) if r == number),
                "remedy": REMEDY,
            }
            for number, name in enumerate(REASONS)
            if number and number in rows["reason"]
        ]
        table = rows | {
            "reasons": list(REASONS),
            "finishes": list(FINISHES),
            "errors": ["", *ERRORS],
            "prompt_text": [self._prompt(row) for row in range(len(rows["id"]))] if self.prompts else None,
            "answer_characters": 20 if self.is_long else None,
        }
        has_drafts = any(rows["drafted"])
        if not has_drafts:
            table |= {"drafted": None, "accepted": None}
        timed_drafts = self.entries and done
        drafts = {
            "drafted": sum(rows["drafted"]),
            "accepted": sum(rows["accepted"]),
            "completion_tokens": summary["completion_tokens"],
            "tokens_per_pass": summary["tokens_per_pass"] if timed_drafts else None,
            "decode_s": summary["seconds"]["decode"] if timed_drafts else None,
            "saved_s": summary["drafts_saved_s"] if timed_drafts else None,
            "sources": [{"source": name, **counts} for name, counts in summary["drafts"].items()]
            if self.entries
            else [],
        }
        return {
            "name": f"demo-out/run-{self.number}.jsonl",
            "notes": [] if self.entries else ["out.jsonl.run.json has no entry of a process"],
            "episodes": None,
            "verdict": {
                **{name: summary[name] for name in copied},
                **{name: summary[name] if done and self.entries else None for name in timed},
                "exit_code": None if not (done and self.entries) else 3 if summary["errors"] else 0,
                "continue": None if done else "apcbatch run examples/agents.jsonl -o out.jsonl --resume",
                "unfinished": self.unfinished,
                "doubts": [],
                "ideal_tokens": ideal,
                "processes": self.num_processes,
                "percentiles": [
                    {"name": name, "p50": 1 + at, "p95": 20.5 + at, "p99": 300 + at}
                    for at, name in enumerate(("seconds", "prefill_s", "decode_s", "prompt", "computed", "out"))
                ],
            },
            "tokens": {
                "computed": summary["computed_tokens"],
                **summary["cached_by_source"],
                "lost": sum(lost),
                "ideal": ideal,
                "misses": sorted(misses, key=lambda miss: -miss["tokens"]),
            },
            "tree": {**self.edges, "note": None} if self.has_tree else None,
            "timelines": [self.timeline(n) for n in range(self.num_processes)],
            "turns": self._turns(),
            "drafts": drafts if has_drafts else None,
            "requests": table,
            "ran": {"processes": [self.ran(n) for n in range(self.num_processes)], "run_file": {"version": "0.9.0"}},
        }

    def _turns(self) -> dict[str, list[int]]:
        sums: dict[int, list[int]] = {}
        for turn, cached, computed, error in zip(
            *(self.rows[name] for name in ("turn", "cached", "computed", "error")), strict=True
        ):
            if not error:
                one = sums.setdefault(min(turn, MOST_TURNS), [0, 0, 0])
                one[0], one[1], one[2] = one[0] + 1, one[1] + cached, one[2] + computed
        turns = sorted(sums)
        columns = {name: [sums[turn][n] for turn in turns] for n, name in enumerate(("requests", "cached", "computed"))}
        return {"turn": turns, **columns}
