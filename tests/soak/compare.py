"""Whether the records of one run are those of another but for reuse and time; if not, what differs first.

Invariant: what is compared is what `run` wrote to OUT, float by float as bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

REUSE = ("cached_tokens", "cached_from", "computed_tokens", "boundary", "miss_reason")


class Difference(AssertionError):
    """A way whose answers are not the cold run's."""


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of one OUT."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def compare(cold: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    """Each request once, and nothing but reuse and time different."""
    ids = [record["id"] for record in records]
    if sorted(ids) != sorted(record["id"] for record in cold):
        twice = sorted({name for name in ids if ids.count(name) > 1})
        lost = sorted({record["id"] for record in cold} - set(ids))
        raise Difference(f"requests answered twice: {twice[:5]}; not answered: {lost[:5]}")
    expected = {record["id"]: record for record in cold}
    for record in records:
        if _answer(record) != _answer(expected[record["id"]]):
            raise Difference(_describe(expected[record["id"]], record))
        reuse = record["apcbatch"]
        if record["error"] is None and not (
            reuse["cached_tokens"] + reuse["computed_tokens"] == num_prompt(record) > reuse["cached_tokens"]
        ):
            raise Difference(f"{record['custom_id']}: {num_prompt(record)} prompt tokens, but {reuse}")


def compare_reuse(plain: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    """The same hits and misses in two runs whose pool holds the plan."""
    expected = {record["id"]: _reuse(record) for record in plain}
    for record in records:
        if _reuse(record) != expected[record["id"]]:
            raise Difference(
                f"{record['custom_id']}: reuse with drafts {_reuse(record)}; without {expected[record['id']]}"
            )


def _reuse(record: dict[str, Any]) -> list[Any]:
    return [(record["apcbatch"] or {}).get(name) for name in REUSE]


def _answer(record: dict[str, Any]) -> bytes:
    """What must be the same, as bytes: two floats of the same bytes are the same bits."""
    body = record["response"] and record["response"]["body"]
    usage = body and [body["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")]
    return orjson.dumps(
        [
            *(record[key] for key in ("id", "custom_id", "line", "turn", "error")),
            *(body and (body["choices"], usage, record["apcbatch"]["completion_token_ids"]) or ()),
        ]
    )


def _describe(cold: dict[str, Any], record: dict[str, Any]) -> str:
    """The first difference of two records of one request."""
    if cold["error"] or record["error"]:
        return f"{record['custom_id']}: error {record['error']}; the cold run's was {cold['error']}"
    lines = [f"{record['custom_id']} differs from the cold run; {num_prompt(record)} prompt tokens,"]
    reuse = record["apcbatch"]
    lines[0] += f" cached {reuse['cached_tokens']} from {reuse['cached_from']}"
    ours, theirs = reuse["completion_token_ids"], cold["apcbatch"]["completion_token_ids"]
    same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if same is not None or len(ours) != len(theirs):
        lines.append(f"tokens from {same}: {ours[same:][:8]}; cold: {theirs[same:][:8]}")
    for name, found in (("this run", record), ("cold run", cold)):
        lines.append(f"logprobs, {name}: {_logprobs(found)[:8]}")
    return "\n".join(lines)


def _logprobs(record: dict[str, Any]) -> list[float]:
    """Log-probabilities of the first choice; empty if it has none."""
    logprobs = record["response"]["body"]["choices"][0]["logprobs"] or {"content": []}
    return logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or []]


def num_prompt(record: dict[str, Any]) -> int:
    """Prompt tokens of a request; 0 for an error."""
    return record["response"]["body"]["usage"]["prompt_tokens"] if record["response"] else 0
