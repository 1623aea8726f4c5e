"""Target of live episodes: tools that hang, die, fork, print, and return what no record can hold."""

from __future__ import annotations

import json

from tests.fuzz.case import Case
from tests.fuzz.child import Fault

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
GOOD = ("text", "object", "print", "fork", "long", "sleep", "odd")
BAD = ("raise", "hang", "busy", "gil", "exit", "kill", "leave", "nan", "bytes", "cycle", "big", "none", "deep", "half")
CODE = """
import asyncio, ctypes, os, signal, subprocess, sys, time

CYCLE = []
CYCLE.append(CYCLE)


def act(kind):
    match kind:
        case "text": return "fine"
        case "print": print("y" * 3_000_000)
        case "fork":
            subprocess.Popen(["sleep", "300"])
            if not os.fork(): time.sleep(300)
        case "long": return "x" * 1_100_000
        case "sleep": time.sleep(0.05)
        case "odd": return "\\x00\\u2028<tool_call><|end|>"
        case "raise": raise RuntimeError("no\\udce9" * 10_000)
        case "hang": time.sleep(300)
        case "busy":
            while True: pass
        case "gil": ctypes.PyDLL(None).sleep(300)
        case "exit": os._exit(0)
        case "kill": os.killpg(0, signal.SIGKILL)
        case "leave": sys.exit()
        case "nan": return {"a": float("nan")}
        case "bytes": return b"x"
        case "cycle": return {"a": CYCLE}
        case "big": return "x" * 20_000_000
        case "none": return None
        case "half": return "\\ud800"
        case "deep":
            made = {}
            for _ in range(100_000): made = {"a": made}
            return made
    return {"kind": kind}


class Sync:
    def __init__(self, row):
        self.acts = list(row["acts"])
        self.said = 0
        self.replay = row["replay"]
        if row["make"]: act(row["make"])

    def do(self):
        return act(self.acts.pop(0) if self.acts else "text")

    def call(self, name, arguments):
        return self.do()

    def next(self, messages):
        self.said += 1
        return {"role": "user", "content": "And in Rome?"} if self.said < 3 else None

    def score(self, messages):
        return {"left": len(self.acts)}


class Async(Sync):
    async def call(self, name, arguments):
        await asyncio.sleep(0.01)
        return self.do()
"""


def fuzz_live_tools(case: Case) -> None:
    """Every episode ends in a record with an end, whatever its tools and those beside it do."""
    draw = case.draw
    case.write("hostile.py", CODE.encode())
    lines = []
    for number in range(draw.randint(1, 10)):
        acts = draw.choices(GOOD * 3 + BAD, k=draw.randint(1, 4))
        make = draw.choice((None,) * 8 + BAD)
        question = f"What is the weather in city {number}?"
        lines.append({
            "id": f"e{number}", "messages": [{"role": "user", "content": question}], "tools": [TOOL],
            "acts": acts, "make": make if make in ("raise", "exit", "hang") else None, "replay": draw.random() < 0.8,
        })  # fmt: skip
    case.write("in.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    options = ["--tools", f"hostile:{draw.choice(('Sync', 'Async'))}", "--tool-workers", str(draw.randint(1, 3))]
    options += ["--tool-timeout", "1", "--max-tokens", "40", "--max-turns", str(draw.randint(1, 6)), "-q"]
    outcome = case.run("run", "in.jsonl", "-o", "out.jsonl", "--turns", "live", *options, expect=(0, 3))
    ended = [one["apcbatch"]["episode"] for one in case.records() if one["apcbatch"].get("end") is not None]
    if sorted(ended) != sorted(line["id"] for line in lines):
        raise Fault(f"{len(lines)} episodes, of which these ended: {ended}\nstderr: {outcome.stderr[-1500:]}")
