"""plotext's figures as plain lines: size, marks at their place, and counts that can be read off."""

import re

import pytest

from lpxtop import figures

EDGES = [10.0 * 1.25**i for i in range(21)]


def bars(rows: list[str]) -> list[int]:
    """The height in rows of each column of a histogram."""
    canvas = [
        row[row.index("│" if "│" in row else "┤") + 1 :] for row in rows[1:] if "┤" in row or row.lstrip()[:1] == "│"
    ]
    width = max(map(len, canvas))
    return [sum(row.ljust(width)[x] == "█" for row in canvas) for x in range(width)]


@pytest.mark.parametrize("size", [(58, 12), (40, 6), (100, 20), (24, 4)])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_histogram_has_its_size(size, ascii_only):
    """As many lines as asked, none wider; in ASCII nothing else."""
    rows = figures.histogram(EDGES, [0] * 9 + [1, 5, 9] + [0] * 8, *size, marks={"p50": 90.0}, ascii_only=ascii_only)

    assert len(rows) == size[1]
    assert max(map(len, rows)) <= size[0]
    assert not ascii_only or all(row.isascii() for row in rows)


def test_bars_stand_for_counts():
    """The fullest bin is the highest bar; an empty neighbour on either side is shown, the rest is not."""
    rows = figures.histogram(EDGES, [0] * 9 + [2, 8, 4] + [0] * 8, 60, 14)
    heights = [h for x, h in enumerate(bars(rows)) if x == 0 or h != bars(rows)[x - 1]]

    assert max(heights) == max(bars(rows)) > 0
    assert bars(rows)[1] == 0
    assert [h for h in heights if h][1] == max(heights)


def test_marks_stand_where_their_value_is():
    """On a grid of twenty bins, a mark in the middle of bin 10 stands in the middle of bin 10's bar."""
    counts = [0] * 20
    counts[0] = counts[10] = counts[19] = 4
    rows = figures.histogram(EDGES, counts, 80, 12, marks={"p50": (EDGES[10] * EDGES[11]) ** 0.5})
    middle = rows[1].index("█", rows[1].index("█") + 8)
    name = rows[0].index("p50") + 1

    assert middle <= name <= middle + 4


def test_of_colliding_marks_the_first_named_stays():
    """SLO, p50, p95 in this order: the later ones give way rather than overwrite."""
    rows = figures.histogram(EDGES, [0, 4, 0] + [0] * 17, 40, 8, marks={"SLO": 12.6, "p50": 12.7, "p95": 15.0})

    assert "SLO" in rows[0]
    assert "p50" not in rows[0]


def test_a_value_outside_the_grid_is_at_its_end():
    """A p99 beyond the last edge is no error."""
    rows = figures.histogram(EDGES, [1] * 20, 60, 8, marks={"p99": 1e9, "p50": 0.0})

    assert rows[0].index("p50") < rows[0].index("p99")


def test_a_curve_names_its_points():
    """Each load stands at its point, larger throughput further right."""
    points = [(110.0, 9.0, "1"), (420.0, 9.5, "4"), (1284.0, 12.0, "16"), (1400.0, 41.0, "64")]
    rows = figures.curve(points, 70, 16, x_label="tok/s", y_label="ITL p50 ms")

    def column(name):
        found = [re.search(rf"(?<!\d){name}(?!\d)", row[6:]) for row in rows[2:-3]]
        return next(match.start() for match in found if match)

    assert len(rows) == 16
    assert "ITL p50 ms" in rows[0]
    assert "tok/s" in rows[-1]
    assert column("64") > column("4")
