"""Format the lines of a run for a terminal, folded at its width: a request, an error record, the summary.

A pipe gets other lines (see printer.py), whose columns are for scripts and do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apcbatch.data.checks import shown
from apcbatch.display import Paint, cells, counted, wrap
from apcbatch.job.answer_counts import shown_counts
from apcbatch.types import Result

_INDENT = "         "
_LABEL_CELLS = 9
_MOST_COLUMNS = 8  # names shown; the summary has all


def result_lines(name: str, columns: str, miss: str, result: Result, width: int, paint: Paint) -> Iterator[str]:
    """Yield the lines of a request that succeeded. name, columns, miss: the three parts of its line in a pipe; if they
    do not fit into `width` columns, a shorter form is used."""
    if cells(name + columns + miss) <= width:
        yield name + _first_word(columns, "green", paint) + paint(miss, "yellow")
        return
    if cells(name + columns) > width:
        share = min(99.9, 100 * result.cached_tokens / result.prompt_tokens)
        cached = f"{share:.1f} % from {result.cached_from}" if result.cached_tokens else "nothing cached"
        columns = f"ok  prompt {result.prompt_tokens}, {cached}, out {len(result.token_ids)}"
    first, *rest = wrap(name + columns, width, _INDENT)
    yield _first_word(first, "green", paint, name)
    yield from rest
    if miss:
        yield from (paint(line, "yellow") for line in wrap(_INDENT + miss.strip(), width, _INDENT))


def error_lines(name: str, sentence: str, width: int, paint: Paint) -> Iterator[str]:
    """Yield the lines of a request that failed. sentence: begins with the word `error`."""
    first, *rest = wrap(name + sentence, width, _INDENT)
    yield _first_word(first, "red", paint, name)
    yield from rest


def summary_lines(summary: dict[str, Any], output: str, width: int, paint: Paint) -> Iterator[str]:
    """Yield the lines of the summary. output: where the results are, in words."""
    seconds = summary["seconds"]
    before = f" ({summary['already_done']:,} more answered before)" if summary["already_done"] else ""
    errors = summary["errors"]
    head = f"{counted(summary['requests'], 'request')}{before} in {seconds['total']:.1f} s: "
    ok, failed = f"{summary['ok']:,} ok", counted(errors, "error")
    verdict = f"{paint(ok, 'green')}, {paint(failed, *['red'] * bool(errors))}"
    if cells(f"{head}{ok}, {failed}") <= width:
        yield paint(head, "bold") + verdict
    else:
        yield from (paint(line, "bold") for line in wrap(head.rstrip(), width, _INDENT))
        yield _INDENT + verdict
    rows = []
    if errors:
        rows.append(("errors", kinds_of(summary["errors_by_code"])))
    if columns := summary["ignored_columns"]:
        rows.append(("columns", _columns(columns)))
    if summary["prompt_tokens"]:
        rows += [("prompt", _prompt(summary)), ("computed", _rate(summary, "computed", "prefill"))]
        rows.append(("answers", _rate(summary, "completion", "decode")))
    if ended := shown_counts(summary):
        rows.append(("ended", ", ".join(ended)))
    if summary["answer_warnings"]:
        rows.append(("warnings", kinds_of(summary["answer_warnings"])))
    if summary["score"] and summary["score"]["tokens"]:
        rows.append(("scores", _scores(summary["score"])))
    if drafts := summary["drafts"]:
        rows.append(("drafts", _drafts(drafts, summary["tokens_per_pass"])))
    rows.append(("seconds", ", ".join(f"{name} {seconds[name]:.1f}" for name in seconds if name != "total")))
    if summary["store_skipped"]:
        rows.append(("store", f"{summary['store_skipped']:,} snapshots not stored; later runs compute them again"))
    if summary["workers"]:
        rows.append(("workers", _workers(summary["workers"])))
    rows.append(("results", output))
    for label, text in rows:
        first, *rest = wrap(f"{label:<{_LABEL_CELLS}}{text}", width, _INDENT)
        yield paint(first[:_LABEL_CELLS], "dim") + first[_LABEL_CELLS:]
        yield from rest


def kinds_of(counts: dict[str, int]) -> str:
    """Format counts by kind: `1 duplicate_id, 3 invalid_request`."""
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))


def _columns(ignored: dict[str, int]) -> str:
    """Format the columns that took no part, with the number of conversations that have each."""
    named = [f"{shown(name)} ({count:,})" for name, count in list(ignored.items())[:_MOST_COLUMNS]]
    return f"left out {', '.join(named)}" + f", and {len(ignored) - len(named):,} more" * (len(ignored) > len(named))


def _prompt(summary: dict[str, Any]) -> str:
    ideal = summary["ideal_hit_rate"]
    by_source = [f"{tokens:,} from {name}" for name, tokens in summary["cached_by_source"].items() if tokens]
    restored = f"{summary['prompt_tokens']:,} tokens, {100 * summary['hit_rate']:.1f} % restored"
    restored += f" ({', '.join(by_source)})" if by_source else ""
    return restored + (f"; ideal {100 * ideal:.1f} %" if ideal is not None else "")


def _scores(score: dict[str, Any]) -> str:
    """Format the means of --score. A perplexity beyond float64 is left out."""
    text = f"{counted(score['answers'], 'recorded answer')} of {score['tokens']:,} tokens: "
    text += f"perplexity {score['perplexity']:.4g}, " if score["perplexity"] is not None else ""
    shares = 100 * score["greedy_match_share"], 100 * score["exact_match_share"]
    return text + "greedy decoding gives {:.1f} % of the tokens, {:.1f} % of the answers whole".format(*shares)


def _drafts(drafts: dict[str, dict[str, int]], tokens_per_pass: float | None) -> str:
    """Format the accepted and drafted tokens, the accepted tokens of each source, and the tokens per pass."""
    drafted, accepted = (sum(one[name] for one in drafts.values()) for name in ("drafted", "accepted"))
    by_source = [f"{one['accepted']:,} from {source}" for source, one in drafts.items() if one["accepted"]]
    text = f"{accepted:,} of {drafted:,} tokens accepted" + (f" ({', '.join(by_source)})" if by_source else "")
    return text + (f"; {tokens_per_pass:.2f} tokens a pass" if tokens_per_pass is not None else "")


def _workers(workers: list[dict[str, Any]]) -> str:
    """Format the number of workers, the sum of their work, the slowest and the fastest."""
    num_lost = sum(one["ending"] == "lost" for one in workers)
    tokens = sum(one["prefill_tokens"] + one["decode_tokens"] for one in workers)
    busy = [one for one in workers if one["tokens_per_s"] is not None]
    text = f"{len(workers):,}" + (f" ({num_lost:,} lost)" if num_lost else "")
    text += f": {tokens:,} tokens in {sum(one['busy_s'] for one in workers):,.1f} s of work"
    ranked = sorted(busy, key=lambda one: float(one["tokens_per_s"]))
    if len(ranked) > 1:
        ends = (("slowest", ranked[0]), ("fastest", ranked[-1]))
        shown = [f"the {word} {one['tokens_per_s']:,.0f} a second ({one['id']} on {one['node']})" for word, one in ends]
        text += f"; {', '.join(shown)}"
    return text


def _rate(summary: dict[str, Any], tokens: str, phase: str) -> str:
    rate = summary[f"{phase}_tokens_per_s"]
    return f"{summary[f'{tokens}_tokens']:,} tokens" + (f", {rate:,.0f} a second" if rate is not None else "")


def _first_word(line: str, style: str, paint: Paint, name: str = "") -> str:
    """Return the line with the first word after the name in a colour."""
    word, gap, rest = line[len(name) :].partition(" ")
    return line[: len(name)] + paint(word, style) + gap + rest if line.startswith(name) else line
