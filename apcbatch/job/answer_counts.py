"""Count how answers ended, and their warnings by kind: for a run's summary, and for the report of its OUT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from apcbatch.answer import FINISH_REASONS, WARNING_KINDS
from apcbatch.data.checks import shown
from apcbatch.display import counted
from apcbatch.job.processes import is_seconds

EPISODE_ENDS = ("done", "max_turns", "context", "error")
MOST_SCORES = 8  # whose means are shown
MOST_SCORE = 1e300
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


class Episodes:
    """Sums over the records of live episodes. Values that this version does not write are left out."""

    def __init__(self) -> None:
        self._ends: Counter[str] = Counter()
        self._num_turns = self._num_calls = 0
        self._tool_s = 0.0
        self._scores: dict[str, tuple[int, float]] = {}  # name -> (episodes, sum)

    def add(self, own: Mapping[str, Any]) -> None:
        """Count a record, if it is a turn of an episode. own: its `apcbatch`."""
        if not isinstance(own.get("episode"), str):
            return
        self._num_turns += 1
        tools, end, score = own.get("tools"), own.get("end"), own.get("score")
        for one in tools if isinstance(tools, list) else ():
            seconds = one.get("seconds") if isinstance(one, dict) else None
            self._num_calls += 1
            self._tool_s += seconds if is_seconds(seconds) else 0
        self._ends.update([end] if isinstance(end, str) and end in EPISODE_ENDS else ())
        for name, value in score.items() if isinstance(score, dict) else ():
            if isinstance(value, int | float) and abs(value) < MOST_SCORE:
                count, total = self._scores.get(name, (0, 0.0))
                if count or len(self._scores) < MOST_SCORES:
                    self._scores[name] = count + 1, total + value

    def sentence(self) -> str | None:
        """Return the sums as a sentence; None without an episode that has ended."""
        count = self._ends.total()
        if not count:
            return None
        ends = ", ".join(f"{number:,} {end}" for end, number in self._ends.most_common())
        means = [f"{shown(name)} {total / scored:.4g}" for name, (scored, total) in self._scores.items()]
        return (
            f"{counted(count, 'episode')} ended ({ends}) in {counted(self._num_turns, 'turn')}, with "
            f"{counted(self._num_calls, 'call')} of tools in {self._tool_s:.1f} s"
            + ("; mean scores: " + ", ".join(means) if means else "")
        )


def shown_counts(summary: Mapping[str, Any]) -> list[str]:
    """Return the counts of a summary that are not 0, in words: `13 cut`, `2 stop`, `13 empty`."""
    words = {"length": "cut"}
    found = [(count, words.get(reason, reason)) for reason, count in summary["finish_reasons"].items()]
    found += [(summary["empty_answers"], "empty"), (summary["unread_calls"], "with an unread call")]
    return [f"{count:,} {word}" for count, word in found if count]
