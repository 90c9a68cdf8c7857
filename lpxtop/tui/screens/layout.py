"""Where each panel is, by width and height apart: a pure function from a size to places. Must not draw.

Below 60x16 a card; a column of charts from 60 on, two from 110, and from 180x40 the lists get a column of their own.
Lines go to the header, the slider, the key figures and the last line first; charts get what is left.
"""

from dataclasses import dataclass

from lpxtop.tui.panels.card import LEAST

CHARTS = ("latency", "ttft", "throughput", "gpu", "server", "requests", "events", "levels")
"""In the order of their digits."""
WATCHED = ("gpu", "server", "events")
"""The same without load: only these have something to show."""
LEAST_CHART = 6


def charts_of(mode: str) -> tuple[str, ...]:
    """The panels of a kind of screen, in their order."""
    return WATCHED if mode == "watch" else CHARTS


@dataclass(frozen=True)
class Place:
    """A panel's rectangle, in cells."""

    panel: str
    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True)
class Facts:
    """What of a view decides the layout."""

    mode: str = "live"
    gpus: int = 0
    servers: int = 0
    chosen: str = "latency"
    zoomed: bool = False


def arrange(width: int, height: int, facts: Facts) -> list[Place]:
    """Rectangles that do not overlap and lie within the size."""
    if width < LEAST[0] or height < LEAST[1]:
        return [Place("card", 0, 0, width, height)]
    slider = 2 if height >= 40 else 1
    bottom = height - 1
    places = [
        Place("status", 0, 0, width, 1),
        Place("slider", 0, 1, width, slider),
        Place("footer", 0, bottom, width, 1),
    ]
    top = 1 + slider
    if facts.zoomed:
        return [*places, Place(facts.chosen, 0, top, width, bottom - top)]
    tiles = _tiles_height(width, height, facts)
    places.append(Place("tiles", 0, top, width, tiles))
    top += tiles
    if width >= 180 and height >= 40:
        return [*places, *_wide(width, top, bottom, facts)]
    lists = _lists(height, facts, bottom - top)
    charts_end = bottom - sum(rows for _, rows in lists)
    places += _charts(width, top, charts_end, facts)
    y = charts_end
    for name, rows in lists:
        places.append(Place(name, 0, y, width, rows))
        y += rows
    return [place for place in places if place.height > 0]


def _tiles_height(width: int, height: int, facts: Facts) -> int:
    if facts.mode == "watch":
        return 2
    if height < 24:
        return 3 if height < 20 else 4
    return 5 if height >= 36 else 4


def _lists(height: int, facts: Facts, free: int) -> list[tuple[str, int]]:
    """The lines under the charts: GPUs, server, events; fewer of them until a chart has room."""
    most = 1 if height < 24 else 2 if height < 36 else 5 if height < 56 else 9
    gpus = min(max(1, facts.gpus), most) + (1 if height >= 36 and facts.gpus else 0)
    events = 1 if height < 24 else 2 if height < 36 else 3 if height < 56 else 6
    server = min(facts.servers, 1 if height < 40 else 3) if height >= 20 else 0
    while free - gpus - server - events < LEAST_CHART and (events or server or gpus > 1):
        if gpus > 1:
            gpus -= 1
        elif events:
            events -= 1
        else:
            server -= 1
    return [("gputable", gpus), ("serverline", server), ("eventtail", events)]


def _charts(width: int, top: int, end: int, facts: Facts) -> list[Place]:
    """A grid; the chosen panel is always in it."""
    free = end - top
    across = 1 if width < 110 else 2 if width < 180 else 3
    down = max(1, min(2 if across > 1 else 3, free // 9))
    order = charts_of(facts.mode)
    across = min(across, len(order))
    down = min(down, len(order) // across)
    shown = list(order[: across * down])
    if facts.chosen not in shown and facts.chosen in order:
        shown[-1] = facts.chosen
    heights = _shares(free, down)
    places = []
    y = top
    for row, rows in enumerate(heights):
        x = 0
        for column, cells in enumerate(_shares(width, across)):
            places.append(Place(shown[row * across + column], x, y, cells, rows))
            x += cells
        y += rows
    return places


def _wide(width: int, top: int, bottom: int, facts: Facts) -> list[Place]:
    """Charts at the left, lists at the right; every panel is there."""
    left = width * 13 // 20
    right = width - left
    free = bottom - top
    heights = _shares(free, 3)
    half = left // 2
    places = [
        Place("latency", 0, top, left, heights[0]),
        Place("throughput", 0, top + heights[0], left, heights[1]),
        Place("ttft", 0, top + heights[0] + heights[1], half, heights[2]),
        Place("levels", half, top + heights[0] + heights[1], left - half, heights[2]),
    ]
    gpus = min(max(3, 2 * facts.gpus) + 2, free * 2 // 5)
    server = 5 if facts.servers else 3
    requests = (free - gpus - server) // 2
    y = top
    for name, rows in (("gpuhistory", gpus), ("server", server), ("requests", requests)):
        places.append(Place(name, left, y, right, rows))
        y += rows
    places.append(Place("events", left, y, right, bottom - y))
    return places


def _shares(whole: int, parts: int) -> list[int]:
    """A length in nearly equal parts, the first ones larger."""
    return [whole // parts + (1 if part < whole % parts else 0) for part in range(parts)]
