"""Lines of styled text: what a panel draws. A row is a tuple of (text, style name); a theme turns names into colours.

Widths are terminal cells (CJK and emoji take two). Must not know colours, widgets or views.
"""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]
Row = tuple[Span, ...]

_ASCII = {
    "-": "–─━", ".": "…·▁▂", ">": "→▶▸≥", "<": "←≤", "o": "○□", "O": "●", "*": "◆×", "#": "■█▉▊▋▌▇▆▅▄▀", "v": "▾✓",
    "^": "▴", "'": "°", "u": "µ", "|": "│├┤▏", "+": "╭╮╰╯┌┐└┘┬┴┼", ":": "┊┄", "=": "═▍▎▃",
}  # fmt: skip
_CODEPAGE = {"┌": "╭", "┐": "╮", "└": "╰", "┘": "╯", "█": "▉▊▋▇▆", "▌": "▍▎", "▄": "▅▃▂▁", " ": "▏", "|": "┊", "-": "┄",
             "=": "━", "■": "◆", "►": "▶▸"}  # fmt: skip


def _table(groups: dict[str, str]) -> dict[int, str]:
    return {ord(character): plain for plain, drawn in groups.items() for character in drawn}


ASCII = _table(_ASCII)
"""Every drawing character the panels use, as plain ASCII of the same width."""
CODEPAGE = _table(_CODEPAGE)
"""Only the few that old console fonts lack."""


def line(*parts: str | Span) -> Row:
    """A row of spans; a bare string takes the style `text`."""
    return tuple((part, "text") if isinstance(part, str) else part for part in parts if part)


def plain(row: Row) -> str:
    """The row's text alone."""
    return "".join(text for text, _ in row)


def width_of(row: Row) -> int:
    """The row's width in cells."""
    return sum(cell_len(text) for text, _ in row)


def crop(text: str, width: int) -> str:
    """At most `width` cells of `text`, the last one … where something was left out."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…" if width > 0 else ""


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Exactly `width` cells: cropped with …, or filled with spaces on the right (left when `right`-aligned)."""
    text = crop(text, width)
    gap = " " * (width - cell_len(text))
    return gap + text if right else text + gap


def fit(row: Row, width: int) -> Row:
    """The row cut or filled to exactly `width` cells."""
    taken: list[Span] = []
    left = max(0, width)
    for text, style in row:
        cells = cell_len(text)
        if cells > left:
            taken.append((crop(text, left), style))
            left = 0
            break
        taken.append((text, style))
        left -= cells
    if left:
        taken.append((" " * left, "text"))
    return tuple(taken)


def spread(left: Row, right: Row, width: int) -> Row:
    """`left` at the left, `right` at the right end; the left part is cut when both do not fit."""
    end = width_of(right)
    if end >= width:
        return fit(right, width)
    return (*fit(left, width - end), *right)


def block(rows: Iterable[Row], width: int, height: int) -> list[Row]:
    """Exactly `height` rows of exactly `width` cells."""
    kept = [fit(row, width) for row in rows][: max(0, height)]
    return kept + [((" " * width, "text"),)] * (height - len(kept))


def beside(blocks: Sequence[tuple[Sequence[Row], int]], height: int, gap: Row = ((" ", "text"),)) -> list[Row]:
    """Blocks of (rows, width) next to one another."""
    filled = [block(rows, width, height) for rows, width in blocks]
    joined: list[Row] = []
    for parts in zip(*filled, strict=True):
        whole = parts[0]
        for part in parts[1:]:
            whole = (*whole, *gap, *part)
        joined.append(whole)
    return joined


def framed(
    rows: Sequence[Row], width: int, height: int, title: Row = (), caption: Row = (), *, chosen: bool = False
) -> list[Row]:
    """A box with a title in its upper edge, at the right end a caption. Without room for a box: just the rows."""
    if height < 3 or width < 8:
        return block(rows, width, height)
    style = "frame-chosen" if chosen else "frame"
    head: Row = (("╭─", style), *((("▸", style),) if chosen else (("─", style),)), (" ", style), *title, (" ", style))
    tail: Row = (*((((" ", style), *caption, (" ", style))) if caption else ()), ("─╮", style))
    room = width - width_of(tail)
    if width_of(head) > room:
        tail = (("─╮", style),)
        room = width - 2
    head = head if width_of(head) <= room else fit(head, room)
    top = (*head, ("─" * (room - width_of(head)), style), *tail)
    edge = ("│", style)
    body = [(edge, *row, edge) for row in block(rows, width - 2, height - 2)]
    return [top, *body, (("╰" + "─" * (width - 2) + "╯", style),)]


def wrapped(text: str, width: int, style: str = "text") -> list[Row]:
    """Words of a sentence on lines of at most `width` cells."""
    lines: list[str] = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return [((part, style),) for part in lines]


def bar(ratio: float | None, width: int, style: str) -> Row:
    """A horizontal bar in eighths of a cell; nothing but its track when unknown."""
    if ratio is None:
        return (("·" * width, "bar-empty"),)
    eighths = round(max(0.0, min(1.0, ratio)) * width * 8)
    full, part = divmod(eighths, 8)
    drawn = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
    return ((drawn, style), ("·" * (width - len(drawn)), "bar-empty"))
