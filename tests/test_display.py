"""Text for terminals: what is visible, how wide it is, where it is broken, when it has colours."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from apcbatch.display import Paint, cells, clip, fold, quoted, visible, wrap
from tests.effort import table

printable = st.text(st.characters(exclude_categories=("Cs",))).filter(str.isprintable)


@given(st.text())
def test_nothing_that_a_terminal_acts_on_is_left(text: str) -> None:
    """Fault: an escape sequence, a change of direction or a carriage return of the data reaches the terminal."""
    assert visible(text).isprintable() and quoted(text).isprintable()
    assert all(letter.isprintable() or letter == "\n" for letter in visible(text, keep="\n"))
    assert visible(text) == text or not text.isprintable()


@table(
    "text, shown",
    [("a\x1b[2J", "a\\x1b[2J"), ("\r\n\t\0\x9b", "\\r\\n\\t\\x00\\x9b"), ("\u202e\U000e0001", "\\u202e\\U000e0001")],
)
def test_escapes_are_those_of_python(text: str, shown: str) -> None:
    """Fault: an escape is not the one that readers know."""
    assert visible(text) == shown
    assert quoted('"\\') == '"\\"\\\\"'


@given(printable, st.integers(2, 30))
def test_folding_keeps_the_text_and_the_width(text: str, width: int) -> None:
    """Fault: a character is lost, or a wide one stands over the edge."""
    pieces = fold(text, width)
    assert "".join(pieces) == text and all(cells(piece) <= width for piece in pieces)
    assert pieces and (len(pieces) == 1 or all(pieces))


@given(st.lists(st.text("abc東é", min_size=1, max_size=12)), st.integers(8, 30))
def test_wrapping_keeps_the_words_and_the_width(words: list[str], width: int) -> None:
    """Fault: a word is lost or joined to another, or a line is longer than the terminal."""
    lines = wrap(" ".join(words), width, indent="    ")
    assert all(cells(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(words)
    if all(cells(word) <= width - 4 for word in words):
        assert " ".join(line.strip() for line in lines).split() == words


def test_what_is_indented_stays_indented() -> None:
    """Fault: the first line loses the spaces that it begins with."""
    assert wrap("   ab cd ef", 8, "  ") == ["   ab cd", "  ef"]


def test_widths() -> None:
    """Fault: Chinese counts one column a character, or an accent counts as one of its own."""
    assert (cells("abc"), cells("東京"), cells("e\u0301"), cells("é")) == (3, 4, 1, 1)
    assert fold("a東東b", 3) == ["a東", "東b"] and clip("abcdef", 4) == "abc…" and clip("abcd", 4) == "abcd"


def test_colours_are_for_terminals_alone() -> None:
    """Fault: a file is full of escape sequences, or NO_COLOR changes nothing."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    assert Paint(terminal, True)("a", "bold", "red") == "\x1b[1;31ma\x1b[0m"
    assert (
        Paint(terminal, False)("a", "bold") == Paint(io.StringIO(), True)("a", "red") == Paint(None, True)("a") == "a"
    )
