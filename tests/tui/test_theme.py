"""Themes: those that come with lpxtop are whole, and a mistake in a file is told with its line."""

from pathlib import Path

import pytest

from lpxtop.tui import theme

WHOLE = """dark = true

[colors]
background = "#101418"
surface = "#161b20"
panel = "#1f262d"
foreground = "#d8dee4"
primary = "#56b4e9"
secondary = "#e69f00"
accent = "#f0e442"
success = "#56b4e9"
warning = "#e69f00"
error = "#ff8a65"

[styles]
p50 = "bold primary"
"state-live" = "background on #00ff00"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def contrast(one, other) -> float:
    """WCAG's contrast ratio of two colours."""

    def luminance(color) -> float:
        parts = [c / 255 for c in color.get_truecolor()]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_themes_that_come_with_lpxtop_are_whole():
    """All six load without a word."""
    themes, problems = theme.load_all(theme.directories(None))

    assert problems == []
    assert set(themes) == {"ansi", "colour-blind-safe", "dark", "high-contrast", "light", "mono"}
    assert theme.DEFAULT in themes


@pytest.mark.parametrize("name", ["colour-blind-safe", "dark", "high-contrast", "light"])
def test_every_style_can_be_read(name):
    """Each style against its background has at least WCAG's 4.5 for text, what only decorates (frames, tracks) 2.5."""
    themes, _ = theme.load_all(theme.directories(None))
    found = themes[name]
    ground = theme.color(found.theme.background).rich_color
    for key, style in found.styles.items():
        if style.color is not None:
            least = 2.5 if key in ("frame", "axis", "track", "bar-empty") else 4.5
            assert contrast(style.color, style.bgcolor or ground) >= least, key


def test_mono_and_ansi_name_no_rgb_colour():
    """mono has no colour at all, ansi only the terminal's sixteen."""
    themes, _ = theme.load_all(theme.directories(None))

    assert all(style.color is None or style.color.is_default for style in themes["mono"].styles.values())
    assert all(style.color is None or style.color.triplet is None for style in themes["ansi"].styles.values())


def test_states_differ_without_colour():
    """In mono, a warning, an error and a plain value look different."""
    styles = theme.load_all(theme.directories(None))[0]["mono"].styles

    assert len({str(styles[name]) for name in ("value", "label", "warn", "error")}) == 4


def test_a_style_is_words_and_colours(tmp_path):
    """A role, a colour of its own, a background."""
    found = theme.load(write(tmp_path, WHOLE))

    assert str(found.styles["p50"]) == "bold #56b4e9"
    assert str(found.styles["state-live"]) == "#101418 on #00ff00"
    assert found.name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ('"#56b4e9"\nsecondary', '"bluish"\nsecondary', 8, "'bluish' is not a colour"),
        ('p50 = "bold primary"', 'p50 = "bold primary secondary"', 16, "is not a style"),
        ('p50 = "bold primary"', 'p51 = "primary"', 16, "there is no style 'p51'"),
        ('p50 = "bold primary"', "p50 = 7", 16, "p50 must be a text"),
        ('error = "#ff8a65"\n', "", 3, r"\[colors\] has no error"),
        ('error = "#ff8a65"', 'error = "#ff8a65"\nfoo = "red"', 14, "there is no colour role 'foo'"),
        ("dark = true", "dark = true\nfonts = 1", 2, "there is no 'fonts'"),
    ],
)
def test_a_mistake_is_told_with_file_and_line(tmp_path, old, new, line, what):
    """What, in which line of which file."""
    assert old in WHOLE
    path = write(tmp_path, WHOLE.replace(old, new, 1))

    with pytest.raises(theme.ThemeError, match=what) as caught:
        theme.load(path)
    assert f"{path}, line {line}:" in str(caught.value)


def test_broken_toml_is_told_too(tmp_path):
    """The parser's own place is kept."""
    with pytest.raises(theme.ThemeError, match="line 1"):
        theme.load(write(tmp_path, "dark = = true"))


def test_a_users_theme_wins_and_a_bad_one_leaves_the_others(tmp_path):
    """Later folders win by name; what is wrong is told and left out."""
    (tmp_path / "dark.toml").write_text(WHOLE)
    (tmp_path / "bad.toml").write_text("[colors]\n")
    themes, problems = theme.load_all(theme.directories(tmp_path))

    assert themes["dark"].theme.background == "#101418"
    assert "bad" not in themes
    assert len(problems) == 1
