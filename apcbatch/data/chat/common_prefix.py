"""Tokenise the common prefix of texts once: reuse the first tokens of a base text for other texts.

Invariant: a text gets the same tokens as if it were tokenised alone. Tokens of the base are reused only up to a
joint, a position where both texts are split alike. The text after the joint is tokenised again. A joint is
* a marker: an added token at which a text is split before all else. The text on its left does not affect the tokens on
  its right.
* otherwise the gap between two words, well before the place where the texts differ. The tokens before the gap must be
  the same in the base and in a window of the text that begins a few words earlier. Then both continue alike: word
  splitting runs left to right, and a sequence of BPE tokens is correct if each pair of neighbours in it is correct.
Without a joint, a text is tokenised alone.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from apcbatch.data.tokenization.tokenizer import Tokenizer
from apcbatch.prefix import TokenArray

if TYPE_CHECKING:
    from tokenizers import Encoding

_WINDOW_CHARACTERS = 4096
_WORD_GUARD_CHARACTERS = 16  # minimum distance from a word joint to the first different character
_WORD_LEAD_CHARACTERS = 64  # minimum distance from the window's begin to a word joint
_WORD_GAPS = 64  # number of last gaps that are candidates
_LEAD_TOKENS = 4  # number of tokens before a word joint that must agree
_WORD_GAP = re.compile(r"(?<=[^\W_]) ")


def common_length(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts, in characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class BaseText:
    """A base text and its tokens, whose first tokens other texts reuse. token_ids: (tokens,) int32."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.text = text
        self._tokenizer = tokenizer
        self._encoding = tokenizer.encode(text)
        self.token_ids: TokenArray = np.array(self._encoding.ids, dtype=np.int32)

    def tokenise(self, text: str, common: int) -> TokenArray:
        """Tokenise a text whose first `common` characters are those of the base.

        Return (tokens,) int32: a view of the base's tokens if these begin with the text's tokens, else a new array."""
        if common == len(text) == len(self.text):
            return self.token_ids
        kept, fresh = self._marker_joint(text, common) or self._word_joint(text, common) or (0, None)
        if fresh is None:
            fresh = np.array(self._tokenizer.encode(text).ids, dtype=np.int32)
        end = kept + len(fresh)
        if np.array_equal(self.token_ids[kept:end], fresh):
            return self.token_ids[:end]
        return np.concatenate((self.token_ids[:kept], fresh))

    def _marker_joint(self, text: str, common: int) -> tuple[int, TokenArray] | None:
        """Join at the last marker in the common prefix: return (number of base tokens reused, tokens after them)."""
        markers = self._tokenizer.markers
        if markers is None:
            return None
        places = list(markers.finditer(text, max(0, common - _WINDOW_CHARACTERS), common))
        if not places:
            return None
        place = places[-1]
        kept = self._encoding.char_to_token(place.start())
        if kept is None or self._encoding.token_to_chars(kept) != place.span():
            return None
        fresh = np.array(self._tokenizer.encode(text[place.start() :]).ids, dtype=np.int32)
        marker_id = self._tokenizer.marker_id(place.group())
        return (kept, fresh) if self.token_ids[kept] == marker_id == fresh[0] else None

    def _word_joint(self, text: str, common: int) -> tuple[int, TokenArray] | None:
        """Join at a gap between words in the common prefix: return (number of base tokens reused, tokens after them).

        Return None without a gap at which the tokens agree."""
        end = max(0, common - _WORD_GUARD_CHARACTERS)
        places = _WORD_GAP.finditer(text, max(0, end - _WINDOW_CHARACTERS), end)
        gaps = [place.start() for place in places][-_WORD_GAPS:]
        joints = [gap for gap in gaps if gap >= gaps[0] + _WORD_LEAD_CHARACTERS]
        joint = next((gap for gap in reversed(joints) if _tokens_before(self._encoding, gap) is not None), None)
        if joint is None:
            return None
        begin = next(gap for gap in reversed(gaps) if gap <= joint - _WORD_LEAD_CHARACTERS)
        window = self._tokenizer.encode(text[begin:])
        fresh = np.array(window.ids, dtype=np.int32)
        kept, lead = _tokens_before(self._encoding, joint), _tokens_before(window, joint - begin)
        if kept is None or lead is None or lead < _LEAD_TOKENS:
            return None
        same = np.array_equal(self.token_ids[kept - _LEAD_TOKENS : kept], fresh[lead - _LEAD_TOKENS : lead])
        return (kept, fresh[lead:]) if same else None


def _tokens_before(encoding: Encoding, position: int) -> int | None:
    """Return the number of tokens before the character at `position`; None if no token ends exactly there."""
    index = encoding.char_to_token(position - 1)
    if index is None:
        return None
    span = encoding.token_to_chars(index)
    return index + 1 if span is not None and span[1] == position else None
