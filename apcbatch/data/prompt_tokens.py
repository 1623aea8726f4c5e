"""The tokens of a prompt with the part of its text that each one is, for a person to look at.

Must not know: requests, files. Invariant: the texts of the tokens, one after the other, are the text that was
tokenised, with the special tokens that a completion's prompt is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from apcbatch.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptToken:
    """text: of a character that takes several tokens, the last one has it, and the others have none."""

    id: int
    text: str
    special: bool


def prompt_tokens(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str | None, *, adds_special: bool
) -> list[PromptToken]:
    """A prompt's tokens.

    text: what it was tokenised from, None if it came as ids; then each token has the text that it has alone.
    adds_special: special tokens were put around the text.
    """
    encoding = None if text is None else tokenizer.encode(text, adds_special)
    if text is None or encoding is None or encoding.ids != list(token_ids):
        texts = [_alone(tokenizer, number) for number in token_ids]
    else:
        texts = list(_parts(tokenizer, text, encoding.ids, encoding.offsets))
    return [
        PromptToken(number, part, number in tokenizer.special) for number, part in zip(token_ids, texts, strict=True)
    ]


def _parts(tokenizer: Tokenizer, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> Iterator[str]:
    """What each token covers, with what no token covers before it; the last one has the rest."""
    end = 0
    last = max((at for at, (begin, until) in enumerate(offsets) if begin < until), default=-1)
    for at, (number, (begin, until)) in enumerate(zip(ids, offsets, strict=True)):
        if begin == until == 0:  # it was put there, and stands in no text
            yield _alone(tokenizer, number)
            continue
        following = offsets[at + 1][1] if at + 1 < len(offsets) else 0
        if at == last:
            until = len(text)
        elif following == until and offsets[at + 1][0] == begin:
            until = end  # a part of a character that goes on
        yield text[end : max(end, until)]
        end = max(end, until)


def _alone(tokenizer: Tokenizer, number: int) -> str:
    return tokenizer.decode_all([number])
