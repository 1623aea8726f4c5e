"""README.md shows what a run prints today."""

from __future__ import annotations

from tools.make_readme import RUN, SECONDS, TARGET, document, shortened, without_seconds


def test_the_figures_are_those_of_a_run() -> None:
    """Fault: a column, a key, or a number of the example changes, and the first page shows the old one (run
    tools/make_readme.py)."""
    page = TARGET.read_text(encoding="utf-8")
    assert RUN.search(page) and SECONDS.search(page), "there is nothing to compare"
    assert without_seconds(document(page)) == without_seconds(page)


def test_dots_stand_for_what_is_left_out() -> None:
    """Fault: a summary that looks whole and is not."""
    names = ("requests", "ok", "errors", "new", "prompt_tokens", "cached_tokens", "computed_tokens", "hit_rate",
             "ideal_hit_rate", "x", "cached_by_source", "miss_reasons", "end")  # fmt: skip
    first, second, third = shortened(dict.fromkeys(names, 1))
    assert first == '{"requests":1,"ok":1,"errors":1,...,"prompt_tokens":1,"cached_tokens":1,"computed_tokens":1,'
    assert second == ' "hit_rate":1,"ideal_hit_rate":1,...,"cached_by_source":1,' and third == ' "miss_reasons":1,...}'
