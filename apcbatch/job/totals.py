"""Sum up the results of a run, for the progress line and the summary.

The sums cover this process alone. `already_done` is the number of requests that were answered before a --resume, and
`answers_without_line` that of answers in OUT to requests that INPUT no longer has.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import Counter
from typing import Any

from apcbatch.config import Config
from apcbatch.display import counted
from apcbatch.engine.counters import Counters
from apcbatch.job.answer_counts import AnswerCounts, Episodes, shown_counts
from apcbatch.job.work import JobEngine
from apcbatch.types import Result, Scores
from apcbatch.version import VERSION

_LARGEST_EXPONENT = math.log(sys.float_info.max)
MOST_WARNINGS = 100
ENGINE_COUNTS = (
    "store_bytes_written",
    "store_bytes_read",
    "store_skipped",
    "snapshots_written",
    "snapshots_read",
    "snapshots_for_later",
    "snapshots_evicted",
    "peak_live_snapshots",
    "preempted",
    "recomputed_tokens",
)


class ScoreTotals:
    """Sums over the recorded answers that were scored. All are integers, so that they do not depend on the order."""

    def __init__(self) -> None:
        self.answers = self.tokens = self.greedy_matches = self.exact_matches = 0
        self._logprob_sum = 0  # in units of 2**-149, the smallest float32 above 0

    def add(self, scores: Scores) -> None:
        """Count one scored answer."""
        matches = sum(rank == 1 for rank in scores.ranks)
        self.answers += 1
        self.tokens += len(scores.ranks)
        self.greedy_matches += matches
        self.exact_matches += matches == len(scores.ranks)
        self._logprob_sum += sum(int(math.ldexp(logprob, 149)) for logprob in scores.logprobs)

    def summary(self) -> dict[str, Any]:
        """Return means over tokens and answers, None where there are none. perplexity: exp(-mean log-probability), None
        where a float64 cannot hold it."""
        mean = self._logprob_sum / (self.tokens << 149) if self.tokens else None
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "mean_logprob": mean,
            "perplexity": None if mean is None or mean < -_LARGEST_EXPONENT else math.exp(-mean),
            "greedy_match_share": self.greedy_matches / self.tokens if self.tokens else None,
            "exact_match_share": self.exact_matches / self.answers if self.answers else None,
        }


class Totals:
    """Sums over the results of one run, readable at any time."""

    def __init__(self) -> None:
        self._begin = self._loaded = time.monotonic()
        self.ok = self.already_done = self.answers_without_line = 0
        self.errors_by_code: Counter[str] = Counter()
        self.ignored_columns: Counter[str] = Counter()  # counted by the Feeder
        self.plan_s = self.idle_s = 0.0
        self.restarted = 0
        self.prompt_tokens = self.cached_tokens = self.computed_tokens = self.completion_tokens = 0
        self.cached_by_source: Counter[str] = Counter(memory=0, disk=0)
        self.miss_reasons: Counter[str] = Counter()
        self.scores = ScoreTotals()
        self.answers, self.episodes = AnswerCounts(), Episodes()
        self._decoded_tokens = 0  # answers that share a list of tokens count once; each first token comes from prefill
        self._ideal_tokens: int | None = 0
        self._ideal_is_bound = False
        self.warnings: list[str] = []

    @property
    def errors(self) -> int:
        """Error records that this process wrote."""
        return self.errors_by_code.total()

    @property
    def requests(self) -> int:
        """Requests that this process answered, error records included."""
        return self.ok + self.errors

    @property
    def hit_rate(self) -> float:
        """Restored share of all prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def running_s(self) -> float:
        """Seconds since loading ended."""
        return time.monotonic() - self._loaded

    def elapsed_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._begin

    def begin_running(self, already_done: int) -> None:
        """Mark the end of loading: `running_s` counts from here. already_done: number of requests that OUT already
        answers."""
        self._loaded = time.monotonic()
        self.already_done = already_done

    def add(self, result: Result) -> None:
        """Count one result that succeeded."""
        self.ok += 1
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        self.computed_tokens += result.computed_tokens
        self.completion_tokens += sum(len(answer.token_ids) for answer in result.answers)
        decoded = {id(answer.token_ids): len(answer.token_ids) - 1 for answer in result.answers}
        self._decoded_tokens += sum(max(0, count) for count in decoded.values())
        if result.cached_tokens:
            self.cached_by_source[result.cached_from] += result.cached_tokens
        if result.miss_reason:
            self.miss_reasons[result.miss_reason] += 1
        self._ideal_is_bound |= result.ideal_is_bound
        if self._ideal_tokens is not None:
            ideal = result.ideal_cached_tokens
            self._ideal_tokens = None if ideal is None else self._ideal_tokens + ideal

    def add_error(self, code: str) -> None:
        """Count one error record."""
        self.errors_by_code[code] += 1

    def note_warning(self, sentence: str) -> None:
        """Keep a warning for the summary: each sentence once, and at most MOST_WARNINGS of them."""
        if sentence not in self.warnings and len(self.warnings) < MOST_WARNINGS:
            self.warnings.append(sentence)

    def sentence(self, output: str) -> str:
        """Return the summary as one sentence. output: name of OUT."""
        before = f" ({self.already_done:,} more answered before)" if self.already_done else ""
        ended = ", ".join(shown_counts(self.answers.summary()))
        ended += "; " if ended else ""
        return (
            f"{counted(self.requests, 'request')}{before} in {self.elapsed_s():.1f} s: "
            f"{self.ok:,} ok, {counted(self.errors, 'error')}; {ended}"
            f"{100 * self.hit_rate:.1f} % of {self.prompt_tokens:,} prompt tokens restored; "
            f"results in {'standard output' if output == '-' else output}"
        )

    def summary(self, config: Config, engine: JobEngine | None) -> dict[str, Any]:
        """Return the summary object; times and bytes come from the engine's counters. engine: None if there was nothing
        to answer."""
        counters = Counters() if engine is None else engine.counters
        spent = counters.seconds
        ideal = self._ideal_tokens
        return {
            "requests": self.requests,
            "ok": self.ok,
            "errors": self.errors,
            "errors_by_code": dict(sorted(self.errors_by_code.items())),
            "ignored_columns": dict(self.ignored_columns),
            "already_done": self.already_done,
            "answers_without_line": self.answers_without_line,
            "restarted": self.restarted,
            "idle_s": self.idle_s,
            **self.answers.summary(),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
            "unique_tokens": counters.unique_tokens,
            "unique_tokens_is_bound": counters.unique_tokens_is_bound,
            "completion_tokens": self.completion_tokens,
            "hit_rate": self.hit_rate,
            "ideal_hit_rate": None if ideal is None else ideal / self.prompt_tokens if self.prompt_tokens else 0.0,
            "ideal_is_bound": self._ideal_is_bound,
            "cached_by_source": dict(self.cached_by_source),
            "miss_reasons": dict(self.miss_reasons),
            **{name: getattr(counters, name) for name in ENGINE_COUNTS},
            "drafts": {
                source: {"drafted": drafted, "accepted": accepted}
                for source, (drafted, accepted) in sorted(counters.drafts.items())
            },
            "tokens_per_pass": _rate(counters.decode_tokens, counters.decode_chunks),
            "drafts_saved_s": counters.drafts_saved_s,
            "workers": getattr(counters, "workers", None),  # only a cluster has them
            "score": self.scores.summary() if config.score else None,
            "seconds": {
                "load": self._loaded - self._begin,
                "plan": self.plan_s,
                **{name: spent[name] for name in ("prefill", "decode", "store")},
                "total": self.elapsed_s(),
            },
            "prefill_tokens_per_s": _rate(self.computed_tokens + counters.recomputed_tokens, spent["prefill"]),
            "decode_tokens_per_s": _rate(self._decoded_tokens, spent["decode"]),
            "peak_rss_bytes": _peak_rss(),
            "peak_device_bytes": counters.peak_device_bytes,
            "peak_draft_bytes": counters.peak_draft_bytes,
            "warnings": list(self.warnings),
            "block_size": config.block_size,
            "policy": config.policy,
            "model": config.model,
            "dtype": config.dtype if engine is None else engine.dtype,
            "device": None if engine is None else engine.device,
            "gpus": config.gpus,
            "version": VERSION,
        }


def _rate(tokens: int, over: float) -> float | None:
    return tokens / over if over > 0 else None


def _peak_rss() -> int:
    """Return the largest resident memory of this process in bytes. ru_maxrss would begin with that of the process that
    started it."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
