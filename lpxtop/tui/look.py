"""How the screen is looked at: what a panel needs besides the view. Changed by keys; never recorded.

Must not hold anything that a view says.
"""

from dataclasses import dataclass, field

from lpxtop.tui.rows import Row


@dataclass
class Look:
    """One per screen. `scales` keeps the tops of y axes so that they do not jitter, `figures` the last figure drawn of
    each kind with what it was drawn from (figures are redrawn once a second at most)."""

    glyphs: str = "braille"  # braille, block, ascii
    log: bool = False
    chosen: str = "latency"
    zoomed: bool = False
    pending: float | None = None  # a target the slider has, not yet asked of the session
    frozen_s: int | None = None
    link: str = ""
    message: str = ""
    closing: str = ""
    figures_ready: bool = True
    scroll: dict[str, int] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    figures: dict[str, tuple[object, list[Row]]] = field(default_factory=dict)
