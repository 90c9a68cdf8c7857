"""Rows to Textual strips, in the colours of a theme and the glyphs of a terminal. Must not know panels."""

from collections.abc import Mapping

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from lpxtop.tui.rows import ASCII, CODEPAGE, Row


class Paint:
    """A theme's styles and a glyph set."""

    def __init__(self, styles: Mapping[str, Style], glyphs: str) -> None:
        self._styles = styles
        self._table = {"ascii": ASCII, "block": CODEPAGE}.get(glyphs)

    def strip(self, row: Row, width: int) -> Strip:
        """One line of exactly `width` cells."""
        table, styles = self._table, self._styles
        return Strip(
            [Segment(text if table is None else text.translate(table), styles.get(name)) for text, name in row], width
        )


def changed(before: Row, after: Row, width: int) -> tuple[int, int] | None:
    """(first cell, cells) that differ between two rows of the same width; None when nothing does."""
    if before == after:
        return None
    start = _same(before, after)
    end = _same(_mirrored(before), _mirrored(after))
    end = min(end, width - start)
    return start, max(1, width - start - end)


def _mirrored(row: Row) -> Row:
    return tuple((text[::-1], style) for text, style in reversed(row))


def _same(before: Row, after: Row) -> int:
    """How many cells agree from the left, text and style."""
    cells = 0
    for (old, old_style), (new, new_style) in zip(before, after, strict=False):
        if old == new and old_style == new_style:
            cells += cell_len(old)
            continue
        if old_style == new_style:
            common = next(
                (n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
            )
            cells += cell_len(old[:common])
        break
    return cells
