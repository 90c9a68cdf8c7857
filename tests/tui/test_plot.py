"""Time strips as text: what is drawn where, by hand."""

import pytest

from lpxtop.tui.plot import Axis, Trace, by_column, chart, nice, span_of, top_of
from lpxtop.tui.rows import plain, width_of


def texts(rows):
    """The strip without its axis gutter."""
    return [plain(row)[7:] for row in rows]


def test_a_rising_line_in_ascii():
    """One column a second, the newest at the right; the axis runs from 0 to a round top."""
    rows, top = chart(
        [Trace([0.0, 1.0, 2.0, 3.0], "a", glyph="o")], 7 + 4, 4, first_slot=0, window_s=4, glyphs="ascii", ceiling=3.0
    )

    assert top == 3.0
    assert texts(rows) == ["   o", "  o ", " o  ", "o   "]


def test_a_hole_is_not_drawn_and_not_bridged():
    """None leaves its column empty, and no line joins the values around it."""
    rows, _ = chart(
        [Trace([3.0, 3.0, None, 0.0, 0.0, 0.0], "a")], 7 + 3, 2, first_slot=0, window_s=6, ceiling=3.0, time_axis=False
    )

    # columns 3 3 | - 0 | 0 0: dots at the top of the first cell, at the bottom right of the second, of the third
    assert texts(rows) == ["⠉  ", " ⢀⣀"]


def test_an_area_fills_from_zero():
    """Half of the height in a two-row braille canvas is the lower row, full."""
    rows, _ = chart([Trace([3.0, 3.0, 7.0, 7.0], "a", shape="area")], 7 + 2, 2, first_slot=0, window_s=4, ceiling=7.0)

    assert texts(rows) == [" ⣿", "⣿⣿"]


def test_blocks_have_half_cells():
    """Without braille an area is drawn with half blocks: 0.5 of 2 rows fills one half cell of four... the second row's
    lower half."""
    rows, _ = chart(
        [Trace([0.0, 1.0, 2.0, 3.0], "a", shape="area")],
        7 + 4,
        2,
        first_slot=0,
        window_s=4,
        glyphs="block",
        ceiling=3.0,
    )

    assert texts(rows) == ["  ▄█", "▄███"]


def test_columns_are_aligned_to_session_time():
    """With two seconds a column, slots 4-5 and 6-7 belong together wherever the series starts."""
    assert by_column([1.0, 9.0, 2.0, 3.0], 3, 3, 2, "worst") == [1.0, 9.0, 3.0]
    assert by_column([9.0, 2.0, 3.0], 4, 3, 2, "worst") == [None, 9.0, 3.0]


def test_worst_keeps_peaks_and_mean_averages():
    """A percentile is never averaged: a column of several seconds shows its worst; rates show their mean."""
    assert by_column([1.0, 9.0], 0, 1, 2, "worst") == [9.0]
    assert by_column([1.0, 9.0], 0, 1, 2, "mean") == [5.0]
    assert by_column([None, 9.0], 0, 1, 2, "mean") == [9.0]


def test_a_strip_moves_only_when_a_cell_is_full():
    """The second half of a braille cell fills in place: the cells before it do not change."""
    values = [float(i % 5) for i in range(40)]
    before, _ = chart([Trace(values[:39], "a")], 7 + 10, 3, first_slot=0, window_s=10, ceiling=5.0)
    after, _ = chart([Trace(values[:40], "a")], 7 + 10, 3, first_slot=0, window_s=10, ceiling=5.0)

    assert [row[:9] for row in texts(before)] == [row[:9] for row in texts(after)]
    assert texts(before) != texts(after)


def test_a_mark_stands_at_its_second_behind_what_is_drawn():
    """The change at second 2 of 0..3 is a vertical line in its column with its code at the top."""
    rows, _ = chart(
        [Trace([0.0, 0.0, 0.0, 0.0], "a", glyph="o")],
        7 + 4, 3, first_slot=0, window_s=4, glyphs="ascii", ceiling=3.0, marks=[(2, "C1"), (-5, "C0")],
    )  # fmt: skip

    assert texts(rows) == ["  C1", "  ┊ ", "oooo"]


def test_traces_are_named_at_the_right_the_larger_above():
    """Two values in one row: the larger one's name gets the upper place."""
    rows, _ = chart(
        [Trace([5.0], "low", "p50"), Trace([5.1], "high", "p99")], 7 + 2 + 4, 4, first_slot=0, window_s=1, ceiling=10.0
    )
    names = [plain(row)[-3:] for row in rows]

    assert names.index("p99") + 1 == names.index("p50")


@pytest.mark.parametrize("glyphs", ["braille", "block", "ascii"])
@pytest.mark.parametrize("log", [True, False])
def test_every_row_has_the_width_asked_for(glyphs, log):
    """At any size, with names, marks and holes."""
    trace = Trace([None, 1.0, 100.0, 3.0, 0.0], "a", "p99")
    for width in (12, 20, 77):
        for height in range(1, 14):
            rows, _ = chart(
                [trace], width, height, first_slot=3, window_s=60, glyphs=glyphs, log=log, marks=[(5, "C12")]
            )

            assert [width_of(row) for row in rows] == [width] * height


def test_tops_are_round_with_headroom():
    """1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten, at least five per cent above the peak."""
    assert [nice(x) for x in (0.9, 1.0, 11, 42, 700, 8.1)] == [1.0, 1.0, 15, 50, 800, 10]
    assert top_of(19.5, 1.0) == 30.0
    assert top_of(None, 10.0) == 10.0


def test_a_top_stays_until_it_is_too_low_or_much_too_high():
    """No jitter: 30 stays for peaks of 14 to 30, and gives way to 40 for 31 and to 10 for 9."""
    assert top_of(14.0, 1.0, before=30.0) == 30.0
    assert top_of(29.9, 1.0, before=30.0) == 30.0
    assert top_of(31.0, 1.0, before=30.0) == 40.0
    assert top_of(9.0, 1.0, before=30.0) == 10.0


def test_a_log_axis_places_decades_evenly():
    """1, 10, 100 on an axis from 1 to 100 stand at the bottom, the middle and the top."""
    axis = Axis(1.0, 100.0, log=True)

    assert [axis.place(value, 21) for value in (1.0, 10.0, 100.0, 0.0)] == [0, 10, 20, 0]
    assert axis.value(0.5) == pytest.approx(10.0)


def test_how_much_time_fits():
    """Braille has two columns a cell; what does not fit is joined in steps of 1, 2, 5, 10, 15, 30 s…"""
    assert span_of(50, 60, "braille") == (100, 1)
    assert span_of(50, 60, "ascii") == (50, 2)
    assert span_of(50, 300, "braille") == (100, 5)
