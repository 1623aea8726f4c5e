"""Resolve --draft and --draft-from to the sources of drafts of a run."""

from __future__ import annotations

from apcbatch.config import Config
from apcbatch.errors import UsageError
from apcbatch.option_values import brief, nearest
from apcbatch.types import DRAFT_SOURCES, DraftSource

AUTO, NONE = "auto", "none"


def draft_sources(config: Config) -> tuple[DraftSource, ...]:
    """Return the sources that apply to a run, in the order of DRAFT_SOURCES; empty if drafts are off. Raises
    UsageError for an unknown source, and for options that exclude each other."""
    words = [word.strip() for word in config.draft.split(",")]
    _check_words(words, config.origins.get("draft", "draft"))
    _check_options(config, words)
    if words == [NONE] or config.score or (words == [AUTO] and not config.exact):
        return ()
    named = {*words, *["previous"] * (config.draft_from is not None)}
    if words == [AUTO]:
        named |= set(DRAFT_SOURCES) - {"previous", *["recorded"] * (config.turns in ("rollout", "live"))}
    return tuple(source for source in DRAFT_SOURCES if source in named)


def _check_options(config: Config, words: list[str]) -> None:
    """Refuse sources that the other options of the run exclude. words: those of --draft."""
    draft, draft_from, score, turns = (
        config.origins.get(name, name) for name in ("draft", "draft_from", "score", "turns")
    )
    has_file = config.draft_from is not None
    if words == [NONE] and has_file:
        raise UsageError(f"{draft_from} is a source of drafts, and {draft} none takes none; leave one of them out")
    if words == [NONE]:
        return
    if config.score and (has_file or words != [AUTO]):
        given = draft_from if has_file else draft
        raise UsageError(f"{score} generates nothing, so that {given} has nothing to draft; leave it out")
    if words == [AUTO] and has_file and not config.exact:
        raise UsageError(
            f"{draft_from} is a source of drafts, and --draft auto takes none with --fast; give --draft previous "
            "too, or leave one of them out"
        )
    if "previous" in words and not has_file:
        raise UsageError(f"{draft} has previous, and no earlier answers are named; give --draft-from FILE too")
    if "recorded" in words and config.turns in ("rollout", "live"):
        raise UsageError(
            f"{draft} has recorded, and {turns} {config.turns} puts generated answers in the place of the recorded "
            "ones; leave recorded out, or give --turns each or last"
        )


def _check_words(words: list[str], where: str) -> None:
    """Refuse an unknown word, and `auto` or `none` beside another one. where: name of the option."""
    for word in words:
        if word not in (AUTO, NONE, *DRAFT_SOURCES):
            raise UsageError(
                f"{where} has {brief(word)}; expected auto, none, or of {', '.join(DRAFT_SOURCES)} those wanted, with "
                f"commas between{nearest(word, (AUTO, NONE, *DRAFT_SOURCES))}"
            )
    alone = [word for word in words if word in (AUTO, NONE)]
    if alone and len(words) > 1:
        raise UsageError(f"{where} has {alone[0]} beside another word; give {alone[0]} alone, or sources alone")
