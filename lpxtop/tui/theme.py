"""Themes: TOML files with colours by role and styles by name, checked before Textual sees them.

A style is words and at most two colours: `bold warning`, `#56b4e9`, `bold background on warning`; a colour is a role of
[colors], a hex value or a name Textual knows. A file with a mistake is reported with its line and left out. Must not
decide what a style means: panels name styles, and say in words what a colour says.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.style import Style
from textual.color import Color, ColorParseError
from textual.theme import Theme

DEFAULT = "colour-blind-safe"
MONO = "mono"

_ROLES = (
    "background",
    "surface",
    "panel",
    "foreground",
    "primary",
    "secondary",
    "accent",
    "success",
    "warning",
    "error",
)
_WORDS = frozenset({"bold", "dim", "italic", "underline", "reverse"})

STYLES: Mapping[str, str] = {
    "text": "foreground",
    "value": "bold foreground",
    "label": "dim",
    "title": "bold primary",
    "key": "bold accent",
    "frame": "dim",
    "frame-chosen": "bold accent",
    "axis": "dim",
    "mark": "accent",
    "good": "success",
    "warn": "bold warning",
    "error": "bold error",
    "info": "dim",
    "rec": "bold error",
    "sim": "bold background on warning",
    "state-ready": "bold background on secondary",
    "state-live": "bold background on success",
    "state-paused": "bold background on warning",
    "state-replay": "bold background on primary",
    "track": "dim",
    "track-done": "primary",
    "head": "bold accent",
    "p50": "primary",
    "p95": "dim",
    "p99": "secondary",
    "ttft": "primary",
    "rate": "primary",
    "flight": "secondary",
    "util": "primary",
    "memory": "secondary",
    "power": "secondary",
    "bar-empty": "dim",
    "entry": "bold foreground",
    "cursor": "reverse",
}
"""Every style a panel may name, and what it is unless a theme says otherwise."""


class ThemeError(ValueError):
    """A theme file is wrong; the text names file and line."""


@dataclass(frozen=True)
class ScreenTheme:
    """A checked theme: Textual's part, and a Rich style for each name."""

    name: str
    theme: Theme
    styles: Mapping[str, Style]


def directories(user: Path | None) -> list[Path]:
    """Where themes are, later ones first in right: those that come with lpxtop, then the user's."""
    package = Path(__file__).resolve().parent.parent
    own = package / "themes"
    return [own if own.is_dir() else package.parent / "themes", *([user] if user is not None else [])]


def load_all(folders: Iterable[Path]) -> tuple[dict[str, ScreenTheme], list[str]]:
    """Every theme by name, and what is wrong with the files that were left out."""
    found: dict[str, ScreenTheme] = {}
    problems: list[str] = []
    for folder in folders:
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else ():
            try:
                theme = load(path)
            except ThemeError as error:
                problems.append(str(error))
            else:
                found[theme.name] = theme
    return found, problems


def load(path: Path) -> ScreenTheme:
    """One file; its name is the theme's. Raises ThemeError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ThemeError(f"theme {path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ThemeError(f"theme {path}: {error}") from None
    try:
        return _build(path.stem, data)
    except _Mistake as mistake:
        raise ThemeError(f"theme {path}, line {_line_of(text, mistake.key)}: {mistake}") from None


class _Mistake(ValueError):
    """What is wrong, and with which key."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(what)
        self.key = key


def _line_of(text: str, key: str) -> int:
    """The line that sets `key`, 1 when there is none."""
    for number, line in enumerate(text.splitlines(), 1):
        name = line.partition("=")[0].strip().strip("\"'[]")
        if name == key:
            return number
    return 1


def _build(name: str, data: Mapping[str, object]) -> ScreenTheme:
    for key in data:
        if key not in ("colors", "styles", "dark", "ansi"):
            raise _Mistake(key, f"there is no {key!r}; a theme has dark, ansi, [colors] and [styles]")
    colors = _colors(_table(data, "colors"))
    ansi = bool(data.get("ansi", False))
    named = _table(data, "styles")
    for key in named:
        if key not in STYLES:
            raise _Mistake(key, f"there is no style {key!r}")
    styles = {key: style(named.get(key, default), colors, key) for key, default in STYLES.items()}
    return ScreenTheme(
        name=name, theme=_theme(name, colors, dark=bool(data.get("dark", True)), ansi=ansi), styles=styles
    )


def _table(data: Mapping[str, object], name: str) -> dict[str, str]:
    table = data.get(name, {})
    if not isinstance(table, dict):
        raise _Mistake(name, f"{name} must be a table")
    for key, value in table.items():
        if not isinstance(value, str):
            raise _Mistake(key, f"{key} must be a text")
    return table


def _colors(table: Mapping[str, str]) -> dict[str, Color]:
    missing = [role for role in _ROLES if role not in table]
    if missing:
        raise _Mistake("colors", f"[colors] has no {', '.join(missing)}")
    for role in table:
        if role not in _ROLES:
            raise _Mistake(role, f"there is no colour role {role!r}; the roles are {', '.join(_ROLES)}")
    return {role: color(value, role) for role, value in table.items()}


def color(text: str, key: str = "") -> Color:
    """A colour by Textual's rules. Raises a mistake that names the key."""
    try:
        return Color.parse(text)
    except ColorParseError:
        raise _Mistake(key, f"{text!r} is not a colour (like #56b4e9, ansi_blue or ansi_default)") from None


def style(text: str, roles: Mapping[str, Color], key: str = "") -> Style:
    """`bold warning`, `#56b4e9`, `bold background on warning`, as a Rich style."""
    front, _, back = text.partition(" on ")
    words = front.split()
    names = [word for word in words if word not in _WORDS]
    if len(names) > 1 or (" on " in text and len(back.split()) != 1):
        raise _Mistake(key, f'{text!r} is not a style (like "bold warning" or "background on primary")')

    def parsed(name: str) -> Color:
        return roles[name] if name in roles else color(name, key)

    dim = "dim" in words and not names
    ink = _faded(roles) if dim and not _native(roles) else parsed(names[0]) if names else None
    return Style(
        color=None if ink is None else ink.rich_color,
        bgcolor=parsed(back.strip()).rich_color if back else None,
        bold="bold" in words or None,
        italic="italic" in words or None,
        underline="underline" in words or None,
        reverse="reverse" in words or None,
        dim=(dim and _native(roles)) or None,
    )


def _native(roles: Mapping[str, Color]) -> bool:
    """Whether the terminal's own colours are used: then `dim` is the terminal's too."""
    return roles["foreground"].ansi is not None


def _faded(roles: Mapping[str, Color]) -> Color:
    """What `dim` means in truecolor: readable everywhere, unlike the terminal's own dim."""
    return roles["foreground"].blend(roles["background"], 0.33)


def _theme(name: str, colors: Mapping[str, Color], *, dark: bool, ansi: bool) -> Theme:
    given = {role: _css(value) for role, value in colors.items()}
    variables = {"ansi-background": "ansi_default", "ansi-foreground": "ansi_default"} if ansi else {}
    return Theme(
        name=f"lpxtop-{name}", primary=given["primary"], secondary=given["secondary"], warning=given["warning"],
        error=given["error"], success=given["success"], accent=given["accent"], foreground=given["foreground"],
        background=given["background"], surface=given["surface"], panel=given["panel"], dark=dark, ansi=ansi,
        variables=variables,
    )  # fmt: skip


def _css(value: Color) -> str:
    return value.css if value.ansi is not None else value.hex
