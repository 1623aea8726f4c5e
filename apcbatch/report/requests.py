"""Read the records of OUT into columns, one row per request, for the report's table and sums.

Invariants: rows are in OUT's order; lines that are not records of this program are counted and left out; a request
takes a few hundred bytes of memory besides its texts, whose sum is bounded (texts.py).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

import xxhash

from apcbatch.errors import UsageError
from apcbatch.job.answer_counts import AnswerCounts, Episodes
from apcbatch.job.out_file import OutFile
from apcbatch.job.record import read_record
from apcbatch.report.texts import Calls, Texts

SOURCES = ("none", "memory", "disk")
UNKNOWN = -1
MOST_MS = 1 << 52  # exact as a JSON number, which many parsers read as float64
MOST_S = 1 << 32
MOST_ID_CHARACTERS = 512
NUMBERS = ("line", "turn", "prompt", "cached", "ideal", "computed", "out", "from", "reason", "prefill_ms", "decode_ms",
           "finish", "error", "drafted", "accepted")  # fmt: skip
DRAFT_NUMBERS = ("drafted", "accepted")
DIGEST_BYTES = 16


class Requests:
    """Requests of one OUT, as columns with one row per request.

    numbers: columns of integers by name. Counts are in tokens, times in 0.1 ms. `turn` is 0 for a line answered as a
    whole, and `ideal` is -1 if unknown. drafted, accepted: drafted and accepted tokens; 0 in records without them.
    `from` is an index into SOURCES. `reason`, `finish` and `error` are indices into reasons, finishes and texts.errors;
    index 0 stands for no reason, for the finish of a failed request, and for no error.

    begin_us, end_us: when a request was admitted and when it ended, in microseconds since OUT's first process began; -1
    if unknown. ids: shortened for display. record_ids: as in the records. answers: a digest of the answers per row.
    prompts: a digest of prompt and settings per row, all zeros if the record has none. codes: number of error records
    by code.
    ended: counts of how the answers ended, and of their warnings. episodes: sums over live episodes.
    num_foreign: lines that are not records. num_torn: torn lines.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.numbers = {name: array("q") for name in NUMBERS}
        self.begin_us, self.end_us = array("q"), array("q")
        self.reasons, self.finishes = [""], ["error"]
        self.texts = Texts()
        self.answers, self.prompts = bytearray(), bytearray()
        self.codes: Counter[str] = Counter()
        self.ended = AnswerCounts()
        self.episodes = Episodes()
        self.record_ids: list[str] = []
        self.num_foreign = self.num_torn = self.first_foreign = 0
        self._places = {"reasons": {"": 0}, "finishes": {"error": 0}}

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, record: dict[str, Any]) -> bool:
        """Append a record that `read_record` accepted; False if one of its numbers is missing or out of range."""
        error = record["error"]
        row = _answered(record) if error is None else ({**dict.fromkeys(NUMBERS, 0), "ideal": UNKNOWN}, "", "error")
        if row is None:
            return False
        numbers, reason, finish = row
        numbers["line"], numbers["turn"] = record["line"], record["turn"] or 0
        numbers["reason"], numbers["finish"] = self._index("reasons", reason), self._index("finishes", finish)
        if error is None:
            numbers["error"] = 0
            self.texts.add(*answer_of(record))
            self.ended.add(record)
        else:
            numbers["error"] = self.texts.error(f"{error['code']}: {error['message']}")
            self.codes[error["code"]] += 1
            self.texts.add("", None)
        for name in NUMBERS:
            self.numbers[name].append(numbers[name])
        own = record["apcbatch"]
        self.episodes.add(own)
        self.begin_us.append(_micros(own.get("begin_s")))
        self.end_us.append(_micros(own.get("end_s")))
        self.ids.append((record["custom_id"] or f"line-{record['line']}")[:MOST_ID_CHARACTERS])
        self.record_ids.append(record["id"])
        self.answers += answer_digest(record)
        self.prompts += _prompt_digest(record)
        return True

    def rows(self) -> dict[str, Any]:
        """Return the columns as a JSON object for the page. drafted, accepted: None if no request had drafts."""
        texts = self.texts
        return {
            "id": self.ids,
            **{name: column.tolist() for name, column in self.numbers.items()},
            **({} if any(self.numbers["drafted"]) else dict.fromkeys(DRAFT_NUMBERS)),
            "reasons": self.reasons,
            "finishes": self.finishes,
            "errors": texts.errors,
            "answer": texts.answers,
            "calls": texts.calls,
            "prompt_text": None,
            "answer_characters": texts.characters,
        }

    def ideal_tokens(self) -> int | None:
        """Return the ideal cached tokens of all answered requests; None if one of them lacks its ideal."""
        pairs = zip(self.numbers["ideal"], self.numbers["error"], strict=True)
        ideals = [ideal for ideal, error in pairs if not error]
        return None if min(ideals, default=0) < 0 else sum(ideals)

    def notes(self, path: str) -> Iterator[str]:
        """Yield a sentence for each kind of line that was left out."""
        if self.num_torn:
            yield f"torn lines of {path}, as a kill or a power cut leaves them, are left out: {self.num_torn}"
        if self.num_foreign:
            yield (
                f"lines of {path} that are not records of this program are left out: {self.num_foreign}, the first one "
                f"is line {self.first_foreign}"
            )

    def answer_digest(self, row: int) -> bytes:
        """Return the digest of a row's answers."""
        return bytes(self.answers[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES])

    def prompt_digest(self, row: int) -> bytes:
        """Return the digest of a row's prompt and settings."""
        return bytes(self.prompts[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES])

    def _index(self, column: str, name: str) -> int:
        names: list[str] = getattr(self, column)
        number = self._places[column].setdefault(name, len(names))
        if number == len(names):
            names.append(name)
        return number


def read_requests(out: OutFile) -> Requests:
    """Read all requests of an OUT. UsageError if the file is damaged, or if it has lines of another program and no
    record."""
    requests = Requests()
    number, torn = 0, False
    for number, line in out.read():
        requests.num_torn += torn
        record = None if line is None else read_record(line)
        torn = False
        if record is None or not requests.add(record):
            torn = line is not None and (b"\0" in line or line.startswith(b'{"id":"apc-') and record is None)
            if not torn:
                requests.num_foreign += 1
                requests.first_foreign = requests.first_foreign or number
    requests.num_torn += torn
    if requests.num_foreign and not len(requests):
        raise UsageError(f"{out.lines} has no record of this program; give the OUT of `apcbatch run`")
    return requests


def answer_of(record: dict[str, Any]) -> tuple[str, Calls | None]:
    """Return the text of all answers of a record, with their reasoning, and their tool calls."""
    parts: list[str] = []
    calls: Calls = []
    choices = record["response"]["body"]["choices"]
    for number, choice in enumerate(choices, start=1):
        message = choice.get("message") if isinstance(choice, dict) else None
        message = message if isinstance(message, dict) else {}
        text = message.get("content") or (choice.get("text") if isinstance(choice, dict) else None)
        if len(choices) > 1:
            parts.append(f"[answer {number} of {len(choices)}]")
        if isinstance(message.get("reasoning_content"), str):
            parts += ["[reasoning]", message["reasoning_content"], "[answer]"]
        if isinstance(text, str):
            parts.append(text)
        calls += _calls(message.get("tool_calls"))
    return "\n".join(parts), calls or None


def token_lists(record: dict[str, Any]) -> list[list[Any]]:
    """Return the token ids of each choice; the log-probabilities of a scored answer are one more list. Two answers are
    equal bit for bit if their lists are."""
    own = record["apcbatch"]
    choices = own.get("choices")
    several = isinstance(choices, list) and all(isinstance(one, dict) for one in choices)
    lists = [one.get("completion_token_ids") for one in choices] if several else [own["completion_token_ids"]]
    score = own.get("score")
    if isinstance(score, dict):
        lists += [score.get("token_logprobs")]
    return [one if isinstance(one, list) else [] for one in lists]


def answer_digest(record: dict[str, Any]) -> bytes:
    """Return a digest of 16 bytes, equal for equal answers and for equal errors."""
    error = record["error"]
    said = token_lists(record) if error is None else (error["code"], error["message"])
    return xxhash.xxh3_128_digest(repr(said).encode("utf-8", "surrogatepass"))


def _prompt_digest(record: dict[str, Any]) -> bytes:
    digest = record["apcbatch"].get("request_digest")
    try:
        data = bytes.fromhex(digest) if isinstance(digest, str) else b""
    except ValueError:
        data = b""
    return data if len(data) == DIGEST_BYTES else bytes(DIGEST_BYTES)


def _calls(calls: Any) -> Iterator[dict[str, str]]:
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            name, arguments = function.get("name"), function.get("arguments")
            if isinstance(name, str) and isinstance(arguments, str):
                yield {"name": name, "arguments": arguments}


def _answered(record: dict[str, Any]) -> tuple[dict[str, int], str, str] | None:
    """Return (numbers, miss reason, finish reason) of a record that succeeded; None if one of them is missing or
    invalid."""
    own, body = record["apcbatch"], record["response"]["body"]
    usage, ideal, reason = body.get("usage"), own.get("ideal_cached_tokens"), own.get("miss_reason")
    usage = usage if isinstance(usage, dict) else {}
    numbers = {
        "prompt": usage.get("prompt_tokens"),
        "cached": own.get("cached_tokens"),
        "computed": own.get("computed_tokens"),
        "ideal": UNKNOWN if ideal is None else ideal,
        "out": usage.get("completion_tokens"),
        "prefill_ms": _tenths(own.get("prefill_ms")),
        "decode_ms": _tenths(own.get("decode_ms")),
        "from": SOURCES.index(own["cached_from"]) if own.get("cached_from") in SOURCES else None,
        **{name: own.get(f"{name}_tokens", 0) for name in DRAFT_NUMBERS},
    }
    known = all(type(value) is int and UNKNOWN <= value < 1 << 52 for value in numbers.values())
    if not known or not isinstance(reason, str | None) or numbers["prompt"] != numbers["cached"] + numbers["computed"]:
        return None
    return numbers, (reason or "")[:MOST_ID_CHARACTERS], body["choices"][0]["finish_reason"]


def _micros(seconds: Any) -> int:
    is_number = type(seconds) in (int, float) and 0 <= seconds < MOST_S
    return round(1e6 * seconds) if is_number else UNKNOWN


def _tenths(milliseconds: Any) -> int | None:
    is_number = isinstance(milliseconds, int | float) and 0 <= milliseconds < MOST_MS
    return round(10 * milliseconds) if is_number else None
