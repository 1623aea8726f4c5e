"""Tokenise the common prefix of texts once: reuse the first tokens of a base text for other texts.

The prompts of one conversation have one base, and the bases of conversations that begin alike share their tokens.

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
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from apcbatch.data.tokenization.tokenizer import Tokenizer
from apcbatch.prefix import TokenArray

_WINDOW_CHARACTERS = 4096
_WORD_GUARD_CHARACTERS = 16  # minimum distance from a word joint to the first different character
_WORD_LEAD_CHARACTERS = 64  # minimum distance from the window's begin to a word joint
_WORD_GAPS = 64  # number of last gaps that are candidates
_LEAD_TOKENS = 4  # number of tokens before a word joint that must agree
_SHORTEST_BEGINNING = 128
_MOST_KEPT = 1 << 18  # characters; their tokens with their places take 8 MB
_WORD_GAP = re.compile(r"(?<=[^\W_]) ")


def common_length(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts, in characters."""
    if one == other:
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class BaseText:
    """A base text and its tokens, whose first tokens other texts reuse. token_ids: (tokens,) int32. earlier: a base
    whose first `common` characters are those of the text, and whose tokens it reuses; None to tokenise it as a
    whole."""

    def __init__(self, tokenizer: Tokenizer, text: str, earlier: BaseText | None = None, common: int = 0) -> None:
        self.text = text
        self._tokenizer = tokenizer
        self._joint = joint = None if earlier is None else earlier._find_joint(text, common)
        if joint is None:
            self._encoding = tokenizer.encode(text)
            self.token_ids: TokenArray = np.array(self._encoding.ids, dtype=np.int32)
        else:
            self.token_ids = np.concatenate((joint.head.token_ids[: joint.kept], joint.fresh))

    @property
    def is_whole(self) -> bool:
        """Return whether no token is reused from another base."""
        return self._joint is None

    def tokenise(self, text: str, common: int) -> TokenArray:
        """Tokenise a text whose first `common` characters are those of the base.

        Return (tokens,) int32: a view of the base's tokens if these begin with the text's tokens, else a new array."""
        if common == len(text) == len(self.text):
            return self.token_ids
        joint = self._find_joint(text, common)
        kept, fresh = (0, BaseText(self._tokenizer, text).token_ids) if joint is None else (joint.kept, joint.fresh)
        end = kept + len(fresh)
        if np.array_equal(self.token_ids[kept:end], fresh):
            return self.token_ids[:end]
        return np.concatenate((self.token_ids[:kept], fresh))

    def _find_joint(self, text: str, common: int) -> _Joint | None:
        return self._marker_joint(text, common) or self._word_joint(text, common)

    def _marker_joint(self, text: str, common: int) -> _Joint | None:
        """Join at the last marker in the common prefix."""
        markers = self._tokenizer.markers
        if markers is None:
            return None
        places = list(markers.finditer(text, max(0, common - _WINDOW_CHARACTERS), common))
        if not places:
            return None
        place = places[-1]
        kept = self._token_at(place.start())
        if kept is None or self._span_of(kept) != place.span():
            return None
        rest = BaseText(self._tokenizer, text[place.start() :])
        marker_id = self._tokenizer.marker_id(place.group())
        is_same = self.token_ids[kept] == marker_id == rest.token_ids[0]
        return _Joint(self, kept, place.start(), rest, place.start(), 0) if is_same else None

    def _word_joint(self, text: str, common: int) -> _Joint | None:
        """Join at a gap between words in the common prefix. Return None without a gap at which the tokens agree."""
        end = max(0, common - _WORD_GUARD_CHARACTERS)
        places = _WORD_GAP.finditer(text, max(0, end - _WINDOW_CHARACTERS), end)
        gaps = [place.start() for place in places][-_WORD_GAPS:]
        joints = [gap for gap in gaps if gap >= gaps[0] + _WORD_LEAD_CHARACTERS]
        joint = next((gap for gap in reversed(joints) if self._tokens_before(gap) is not None), None)
        if joint is None:
            return None
        begin = next(gap for gap in reversed(gaps) if gap <= joint - _WORD_LEAD_CHARACTERS)
        window = BaseText(self._tokenizer, text[begin:])
        kept, lead = self._tokens_before(joint), window._tokens_before(joint - begin)
        if kept is None or lead is None or lead < _LEAD_TOKENS:
            return None
        ours, theirs = self.token_ids[kept - _LEAD_TOKENS : kept], window.token_ids[lead - _LEAD_TOKENS : lead]
        return _Joint(self, kept, joint, window, begin, lead) if np.array_equal(ours, theirs) else None

    def _tokens_before(self, place: int) -> int | None:
        """Return the number of tokens before the character at `place`; None if no token ends exactly there."""
        index = self._token_at(place - 1)
        if index is None:
            return None
        span = self._span_of(index)
        return index + 1 if span is not None and span[1] == place else None

    def _token_at(self, place: int) -> int | None:
        """Return the index of the token that holds the character at `place`, if any."""
        joint = self._joint
        if joint is None:
            return self._encoding.char_to_token(place)
        if place < joint.place:
            return joint.head._token_at(place)
        index = joint.rest._token_at(place - joint.begin)
        return None if index is None else index + joint.kept - joint.lead

    def _span_of(self, index: int) -> tuple[int, int] | None:
        """Return the characters of the token at `index`, as (begin, end)."""
        joint = self._joint
        if joint is None:
            return self._encoding.token_to_chars(index)
        if index < joint.kept:
            return joint.head._span_of(index)
        span = joint.rest._span_of(index - joint.kept + joint.lead)
        return None if span is None else (span[0] + joint.begin, span[1] + joint.begin)


class _Joint(NamedTuple):
    """A joint of the base `head` and a text, at the character `place`: the text has the base's first `kept` tokens,
    then those of `rest`, its part from the character `begin` on, but for their first `lead`."""

    head: BaseText
    kept: int
    place: int
    rest: BaseText
    begin: int
    lead: int

    @property
    def fresh(self) -> TokenArray:
        """Return the tokens after the joint."""
        return self.rest.token_ids[self.lead :]


class BaseTexts:
    """Makes bases that reuse the tokens of earlier ones, of other conversations with the same system prompt.

    It keeps bases of up to _MOST_KEPT characters, each under the hashes of its beginnings of 128, 256, 512 ...
    characters, and forgets all of them at once. A base that reuses tokens is not kept. Several threads may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: dict[int, BaseText] = {}
        self._num_kept = 0  # characters

    def make(self, text: str) -> BaseText:
        """Make the base of a text. It reuses the tokens of the base with the longest such beginning, if at least half
        of the text is in both.

        RequestError if the text cannot be tokenised."""
        self._tokenizer.check_length(text)
        hashes = [hash(text[:length]) for length in _beginnings(len(text))]
        kept = self._kept  # which another thread may replace
        earlier = next((kept[one] for one in reversed(hashes) if one in kept), None)
        common = 0 if earlier is None else common_length(text, earlier.text)
        base = BaseText(self._tokenizer, text, earlier if 2 * common >= len(text) else None, common)
        if base.is_whole and len(text) <= _MOST_KEPT:
            self._num_kept += len(text)
            if self._num_kept > _MOST_KEPT:
                self._kept, self._num_kept = {}, len(text)
            self._kept |= dict.fromkeys(hashes, base)
        return base


def _beginnings(length: int) -> Iterator[int]:
    """Yield 128, 256, 512 ... up to a length."""
    size = _SHORTEST_BEGINNING
    while size <= length:
        yield size
        size *= 2
