"""Show the tokens of a prompt, each with its part of the text.

Invariant: the concatenated texts of the tokens are the tokenised text. In a completion's prompt they also contain the
special tokens added around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from apcbatch.data.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of a prompt.

    text: its part of the prompt. If a character takes several tokens, the last one has it, and the others are empty.
    special: whether it is a special token.
    """

    id: int
    text: str
    special: bool


def prompt_tokens(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str | None, *, adds_special: bool
) -> list[PromptToken]:
    """Split a prompt into its tokens.

    text: text of the prompt; None if it was given as ids. Each token is decoded alone if there is no text, or if
    token_ids are not the tokens of the text. adds_special: special tokens were added around the text.
    """
    encoding = None if text is None else tokenizer.encode(text, adds_special)
    if text is None or encoding is None or encoding.ids != list(token_ids):
        texts = [_decode_one(tokenizer, number) for number in token_ids]
    else:
        texts = list(_parts(tokenizer, text, encoding.ids, encoding.offsets))
    return [
        PromptToken(number, part, number in tokenizer.special) for number, part in zip(token_ids, texts, strict=True)
    ]


def _parts(tokenizer: Tokenizer, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> Iterator[str]:
    """Yield the text of each token: what lies before the end of its offsets and has not been yielded.

    Of several tokens of one character, the last gets the character. The last token with offsets gets the rest of the
    text. A special token that is not in the text, with the offsets (0, 0), gives its own text.
    """
    end = 0
    last = max((at for at, (begin, until) in enumerate(offsets) if begin < until), default=-1)
    for at, (number, (begin, until)) in enumerate(zip(ids, offsets, strict=True)):
        if begin == until == 0:  # an added special token, which is not in the text
            yield _decode_one(tokenizer, number)
            continue
        following = offsets[at + 1][1] if at + 1 < len(offsets) else 0
        if at == last:
            until = len(text)
        elif following == until and offsets[at + 1][0] == begin:
            until = end  # the next token continues this character
        yield text[end : max(end, until)]
        end = max(end, until)


def _decode_one(tokenizer: Tokenizer, number: int) -> str:
    return tokenizer.decode_all([number])
