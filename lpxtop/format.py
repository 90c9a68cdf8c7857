"""Numbers to text: the only place where a number becomes something a person reads. Unknown (None) is "–", never 0.

Also strips what must not reach a terminal from strings that servers and recordings send. Must not know what a
number means (definitions do) or how it is coloured (themes do).
"""

import re

UNKNOWN = "–"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufe00-\ufe0f\ufeff]+")


def significant(value: float | None, digits: int = 3) -> str:
    """A bare number with about `digits` significant digits and thousands in thin groups: 0.012, 1.23, 12.3, 1 284."""
    if value is None:
        return UNKNOWN
    magnitude = abs(value)
    if magnitude >= 10 ** (digits - 1) or value == 0:
        return f"{value:,.0f}".replace(",", " ")
    decimals = 0
    while decimals < 6 and magnitude < 10 ** (digits - 1 - decimals):
        decimals += 1
    return f"{value:.{decimals}f}"


def milliseconds(value: float | None) -> str:
    """A latency in ms, without unit (the column names it)."""
    return significant(value)


def with_unit(value: float | None, unit: str, digits: int = 3) -> str:
    """`significant` followed by the unit; just "–" when unknown."""
    return UNKNOWN if value is None else f"{significant(value, digits)} {unit}"


def latency(value_ms: float | None) -> str:
    """A latency with the unit that suits it: 0.42 ms, 418 ms, 3.1 s."""
    if value_ms is None:
        return UNKNOWN
    return f"{significant(value_ms)} ms" if value_ms < 1000 else f"{significant(value_ms / 1000, 3)} s"


def percent(ratio: float | None, decimals: int = 0) -> str:
    """A ratio 0..1 as a percentage."""
    return UNKNOWN if ratio is None else f"{100 * ratio:.{decimals}f}%"


def bytes_iec(value: float | None) -> str:
    """Bytes in binary units, short: 812B, 2.1M, 61.2G."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "K", "M", "G", "T"):
        if abs(value) < 1024 or unit == "T":
            break
        value /= 1024
    return f"{value:.0f}B" if unit == "B" else f"{value:.1f}{unit}"


def clock_time(microseconds: int | None) -> str:
    """A position in a session as hh:mm:ss."""
    if microseconds is None:
        return UNKNOWN
    seconds = max(0, microseconds) // 1_000_000
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def duration(seconds: float | None) -> str:
    """A length of time: 0.8 s, 42 s, 3 min 12 s, 1 h 02 min."""
    if seconds is None:
        return UNKNOWN
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole // 60 % 60:02d} min"


def count(value: int | None) -> str:
    """An integer with thousands in groups."""
    return UNKNOWN if value is None else f"{value:,}".replace(",", " ")


def clean(text: str, limit: int = 300) -> str:
    """One printable line of untrusted text: control, bidi and zero-width characters become spaces."""
    line = " ".join(_CONTROL.sub(" ", text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
