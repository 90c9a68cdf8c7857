"""Where panels are: at every size within the screen, without overlap, with what matters."""

import pytest

from lpxtop.tui.screens.layout import CHARTS, Facts, arrange

SIZES = [
    (w, h)
    for w in (1, 10, 59, 60, 61, 79, 80, 99, 110, 120, 179, 180, 200)
    for h in (1, 5, 15, 16, 17, 20, 23, 24, 31, 36, 39, 40, 50, 60)
]
FACTS = [
    Facts(),
    Facts(gpus=1, servers=1),
    Facts(gpus=8, servers=2),
    Facts(gpus=16, servers=4, chosen="levels"),
    Facts(mode="watch", gpus=2, servers=1, chosen="gpu"),
    Facts(mode="replay", gpus=8, zoomed=True, chosen="requests"),
]


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_panels_cover_the_screen_without_overlap(facts):
    """Every cell belongs to exactly one panel, at any size."""
    for width, height in SIZES:
        cells = [[0] * width for _ in range(height)]
        for place in arrange(width, height, facts):
            assert place.width > 0
            assert place.height > 0
            for y in range(place.y, place.y + place.height):
                for x in range(place.x, place.x + place.width):
                    cells[y][x] += 1
        assert all(n == 1 for row in cells for n in row), (width, height)


@pytest.mark.parametrize("chosen", CHARTS)
@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 40), (200, 60)])
def test_the_chosen_panel_is_there(chosen, size):
    """Whatever the size; in the widest layout GPUs are their list with histories."""
    panels = {place.panel for place in arrange(*size, Facts(gpus=8, servers=1, chosen=chosen))}

    assert chosen in panels or (chosen == "gpu" and "gpuhistory" in panels)


def test_a_chart_has_room_at_every_size():
    """At least six rows for a chart wherever there is no card."""
    for facts in (Facts(), Facts(gpus=8, servers=2)):
        for width, height in SIZES:
            places = arrange(width, height, facts)
            if places[0].panel != "card":
                assert max(place.height for place in places if place.panel in CHARTS) >= 6


def test_the_card_below_60_by_16():
    """59x16 and 60x15 are too small, 60x16 is not."""
    assert [place.panel for place in arrange(59, 16, Facts())] == ["card"]
    assert [place.panel for place in arrange(60, 15, Facts())] == ["card"]
    assert "footer" in [place.panel for place in arrange(60, 16, Facts())]


def test_charts_by_width():
    """One at a time at 80, two by two at 120; at 200 all panels."""
    charts = [sum(place.panel in CHARTS for place in arrange(w, h, Facts(gpus=1))) for w, h in ((80, 24), (120, 40))]
    wide = {place.panel for place in arrange(200, 60, Facts(gpus=8, servers=1))}

    assert charts == [1, 4]
    assert wide >= {"latency", "ttft", "throughput", "gpuhistory", "server", "requests", "events", "levels"}
