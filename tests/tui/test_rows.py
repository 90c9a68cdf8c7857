"""Rows of cells: cutting, filling, framing, by width in terminal cells; and what is redrawn of a changed row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpxtop.tui.paint import changed
from lpxtop.tui.rows import ASCII, bar, beside, crop, fit, framed, line, pad, plain, spread, width_of, wrapped


def test_cutting_counts_cells_not_letters():
    """A CJK character takes two cells; one that would stand half outside is left out whole."""
    assert crop("深度求索", 5) == "深度…"
    assert crop("深度求索", 8) == "深度求索"
    assert pad("世界", 6) == "世界  "
    assert pad("7", 3, right=True) == "  7"


@given(st.lists(st.text(alphabet="ab界🚀 é", max_size=6), max_size=5), st.integers(0, 20))
def test_fit_is_exact(texts, width):
    """Whatever is in a row, it fits exactly."""
    assert width_of(fit(tuple((text, "text") for text in texts), width)) == width


def test_spread_keeps_the_right_part():
    """The left part gives way."""
    assert plain(spread(line("a long name"), line("00:01"), 10)) == "a lo…00:01"
    assert plain(spread(line("a"), line("00:01"), 10)) == "a    00:01"


def test_a_frame_has_title_and_caption_or_neither():
    """The caption goes first when there is no room; without room for a frame the rows stand alone."""
    rows = framed([line("x")], 24, 3, line("title"), line("last 60 s"))

    assert [plain(row) for row in rows] == [
        "╭── title ─ last 60 s ─╮"[:24],
        "│x" + " " * 21 + "│",
        "╰" + "─" * 22 + "╯",
    ]
    assert plain(framed([], 14, 3, line("title"), line("last 60 s"))[0]) == "╭── title ───╮"
    assert [plain(row) for row in framed([line("x")], 24, 1)] == ["x" + " " * 23]


@pytest.mark.parametrize("width", range(1, 40))
def test_frames_have_their_width(width):
    """Every row of a frame is as wide as asked, whatever the title."""
    rows = framed([line("深度求索")], width, 4, line("深度 title"), line("caption"), chosen=True)

    assert [width_of(row) for row in rows] == [width] * 4


def test_blocks_stand_side_by_side():
    """Shorter blocks are filled."""
    rows = beside([([line("a")], 2), ([line("b"), line("c")], 2)], 2, line("|"))

    assert [plain(row) for row in rows] == ["a |b ", "  |c "]


def test_a_bar_in_eighths():
    """Half of five cells is two and a half; unknown is an empty track, not zero."""
    assert plain(bar(0.5, 5, "util")) == "██▌··"
    assert plain(bar(1.0, 5, "util")) == "█████"
    assert [style for _, style in bar(None, 5, "util")] == ["bar-empty"]


def test_every_drawing_character_has_an_ascii_form():
    """Frames, bars and marks survive without Unicode, in the same width."""
    drawn = "".join(plain(row) for row in framed([bar(0.37, 9, "x")], 20, 3, line("1 → 2 … – ● ▶ ■ × °")))

    assert drawn.translate(ASCII).isascii()
    assert len(drawn.translate(ASCII)) == len(drawn)


def test_wrapping_keeps_words():
    """Words are never cut."""
    assert [plain(row) for row in wrapped("the driver was not found", 10)] == ["the driver", "was not", "found"]


def test_only_changed_cells_are_redrawn():
    """A digit that changes is one cell; a style that changes is its span; nothing is nothing."""
    before = (("out ", "label"), ("1 284", "value"), (" tok/s", "label"))
    after = (("out ", "label"), ("1 294", "value"), (" tok/s", "label"))

    assert changed(before, before, 15) is None
    assert changed(before, after, 15) == (7, 1)
    assert changed(before, (("out ", "label"), ("1 284", "warn"), (" tok/s", "label")), 15) == (4, 5)


@given(st.text(alphabet="ab界", min_size=1, max_size=8), st.text(alphabet="ab界", min_size=1, max_size=8))
def test_what_is_redrawn_covers_every_difference(old, new):
    """Outside the redrawn cells both rows are the same text."""
    width = 20
    before, after = fit(((old, "a"),), width), fit(((new, "a"),), width)
    found = changed(before, after, width)
    cells = [expand(row) for row in (before, after)]

    start, end = (0, 0) if found is None else (found[0], found[0] + found[1])
    assert cells[0][:start] == cells[1][:start]
    assert cells[0][end:] == cells[1][end:]


def expand(row):
    """One entry per cell."""
    return [part for text, _ in row for letter in text for part in ([letter, "+"] if letter == "界" else [letter])]
