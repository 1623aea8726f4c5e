"""Count how answers ended, and their warnings by kind: for a run's summary, and for the report of its OUT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from apcbatch.answer import FINISH_REASONS, WARNING_KINDS

MANY = 10  # a count is worth a sentence if it is more than one choice in MANY


class AnswerCounts:
    """Counts over the choices of records that succeeded, by how they ended; and their warnings, by kind.

    num_choices: choices. finish_reasons: choices by finish_reason. num_cut: choices that a limit of tokens ended,
    without those that were to have no token. num_empty: choices without content and without a call. warnings: warnings
    by kind. Values that this version does not write, as a damaged file may have, are left out.
    """

    def __init__(self) -> None:
        self.num_choices = self.num_cut = self.num_empty = 0
        self.finish_reasons: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one record that succeeded."""
        body, own = record["response"]["body"], record["apcbatch"]
        usage = body.get("usage")
        has_tokens = bool(usage.get("completion_tokens")) if isinstance(usage, dict) else True
        for choice in body["choices"]:
            if not isinstance(choice, dict) or choice.get("finish_reason") not in FINISH_REASONS:
                continue
            message = choice.get("message")
            message = message if isinstance(message, dict) else {}
            self.num_choices += 1
            self.finish_reasons[choice["finish_reason"]] += 1
            self.num_cut += choice["finish_reason"] == "length" and has_tokens
            self.num_empty += not (message.get("content") or message.get("tool_calls") or choice.get("text"))
        kinds = own.get("warning_kinds")
        known = (one for one in (kinds if isinstance(kinds, list) else ()) if isinstance(one, str))
        self.warnings.update(kind for kind in known if kind in WARNING_KINDS)

    def summary(self) -> dict[str, Any]:
        """Return the counts as entries of a run's summary. An answer has one warning for all calls in it that cannot
        be read, so their number is that of the choices with one."""
        return {
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "empty_answers": self.num_empty,
            "unread_calls": self.warnings["unread_call"],
            "answer_warnings": dict(sorted(self.warnings.items())),
        }

    def doubts(self, options: Mapping[str, Any]) -> dict[str, int]:
        """Return the counts of `cut`, `empty` and `unread` that exceed one choice in MANY; none with `ignore_eos` or
        `score`, where answers do not end by themselves. options: those of the run, by name."""
        if options.get("ignore_eos") or options.get("score"):
            return {}
        counts = {"cut": self.num_cut, "empty": self.num_empty, "unread": self.warnings["unread_call"]}
        return {name: count for name, count in counts.items() if count * MANY > self.num_choices}


def shown_counts(summary: Mapping[str, Any]) -> list[str]:
    """Return the counts of a summary that are not 0, in words: `13 cut`, `2 stop`, `13 empty`."""
    words = {"length": "cut"}
    found = [(count, words.get(reason, reason)) for reason, count in summary["finish_reasons"].items()]
    found += [(summary["empty_answers"], "empty"), (summary["unread_calls"], "with an unread call")]
    return [f"{count:,} {word}" for count, word in found if count]
