"""A comparison as text (100 columns), markdown or JSON (`lpxtop.compare/1`). Layer 6: no arithmetic beyond scaling.

Failures and what differs come before any latency.
"""

import textwrap
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from lpxtop import format
from lpxtop.metrics.comparability import Difference
from lpxtop.metrics.comparison import Comparison, LevelResult, Row
from lpxtop.metrics.definitions import BY_KEY
from lpxtop.metrics.gates import Outcome

SCHEMA = "lpxtop.compare/1"
WIDTH = 100
_UNITS = {"tok/s": "", "ratio": "%"}
"""How a unit is written behind the label; other units as they are."""
_MARKS = {"better": "+", "worse": "!", "same": "=", "undecided": "~"}
_HEADS = ("metric", "A", "B", "B − A", "95 % interval", "verdict")
_METHODS = {
    "runs": "runs against runs: Mann-Whitney and Hodges-Lehmann, corrected for all {n} figures by permuting runs",
    "bootstrap": "bootstrap over blocks of time; verdicts corrected for all {n} figures (Holm)",
}


# --- words of one figure ------------------------------------------------------------------------------------------


def load(level: tuple[str, float]) -> str:
    """16 in flight, or 2.5 req/s."""
    kind, amount = level
    return f"{format.count(round(amount))} in flight" if kind == "concurrency" else format.with_unit(amount, "req/s")


def name(row: Row) -> str:
    """TTFT p95 ms."""
    metric = BY_KEY[row.key]
    return " ".join(part for part in (metric.label, row.figure, _UNITS.get(metric.unit, metric.unit)) if part)


def value(row: Row, amount: float | None, *, unit: bool = False) -> str:
    """The number in the unit of `name`; with `unit` it is written behind it."""
    metric = BY_KEY[row.key]
    if metric.unit == "ratio":
        return format.percent(amount, 2)
    return format.with_unit(amount, metric.unit) if unit else format.significant(amount)


def change(row: Row) -> str:
    """+20.4 %, or +1.20 points for a ratio."""
    if row.difference is None:
        return format.UNKNOWN
    return f"{_signed(row, row.difference)} {'points' if row.points else '%'}"


def interval(row: Row) -> str:
    """[+14.1, +26.9]."""
    if row.interval is None:
        return format.UNKNOWN
    low, high = row.interval
    return f"[{_signed(row, low)}, {_signed(row, high)}]"


def _signed(row: Row, ratio: float) -> str:
    shown = f"{100 * ratio:+.{2 if row.points else 1}f}".replace("-", "−")
    return shown.replace("−", "+") if not any(digit in "123456789" for digit in shown) else shown


# --- text ---------------------------------------------------------------------------------------------------------


def text(found: Comparison, gates: Sequence[Outcome], notes: Sequence[str]) -> str:
    """What a terminal of 100 columns shows."""
    blocks = [
        _head(found), _gate_lines(gates), _differences(found), *(_level(level) for level in found.levels),
        _foot(found, notes),
    ]  # fmt: skip
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _side(mark: str, labels: Sequence[str]) -> str:
    names = [format.clean(PurePath(label).name, 60) for label in labels]
    return f"{mark}  {names[0]}" if len(names) == 1 else f"{mark}  {len(names)} runs: {', '.join(names)}"


def _head(found: Comparison) -> list[str]:
    lines = [f"COMPARE{'  SIMULATED' if found.simulated else ''}", _fit(_side("A", found.a)), _fit(_side("B", found.b))]
    if not found.comparable:
        lines += _wrap("!! ", f"not comparable because {'; '.join(found.reasons)}. Figures stand without verdicts.")
    return lines


def _gate_lines(gates: Sequence[Outcome]) -> list[str]:
    return [
        _fit(f"gate {outcome.state:<8}{format.clean(outcome.gate, 40)}{_at(outcome)}: {outcome.text}")
        for outcome in gates
    ]


def _at(outcome: Outcome) -> str:
    return f" at {outcome.level}" if outcome.level else ""


def _differences(found: Comparison) -> list[str]:
    lines = []
    for row in found.differences:
        mark = {"blocks": "!! ", "withholds": "!  ", "noted": "   "}[row.effect]
        lines += _wrap(mark, f"{row.what}: {row.a} → {row.b}{_effect(row)}")
    if lines:
        lines.insert(0, "differs (A → B)")
    if found.same:
        lines += _wrap("same  ", " · ".join(f"{what} {shown}" for what, shown in found.same))
    for mark, loads in zip("AB", found.only, strict=True):
        if loads:
            lines += _wrap(f"only in {mark}  ", ", ".join(load(level) for level in loads))
    return lines


def _effect(row: Difference) -> str:
    if row.effect != "withholds":
        return ""
    return f" (no verdict for {', '.join(BY_KEY[key].label for key in row.withheld)})"


def _level(level: LevelResult) -> list[str]:
    ended = " and ".join(format.count(n) for n in level.ended)
    measured = " and ".join(format.duration(seconds) for seconds in level.seconds)
    blocks = "" if level.blocks is None else f" · {level.blocks} blocks of {level.block_s} s"
    lines = [_fit(f"{load(level.load)} · {ended} requests · measured {measured}{blocks}")]
    shared = _shared_reason(level)
    lines.append(f"  {_HEADS[0]:<22}{_HEADS[1]:>9}{_HEADS[2]:>9}{_HEADS[3]:>14}{_HEADS[4]:>19}  {_HEADS[5]}")
    for row in level.rows:
        lines += _row_lines(row, "" if row.why == shared else row.why)
    if shared:
        lines += _wrap("~ undecided: ", shared)
    return lines


def _shared_reason(level: LevelResult) -> str:
    """The reason that most rows give, said once below them."""
    reasons = [row.why for row in level.rows if row.verdict == "undecided" and row.why]
    most = max(reasons, key=reasons.count, default="")
    return most if 2 * reasons.count(most) > len(level.rows) else ""


def _row_lines(row: Row, reason: str) -> list[str]:
    start = (
        f"{_MARKS[row.verdict]} {name(row):<22}{value(row, row.a):>9}{value(row, row.b):>9}"
        f"{change(row):>14}{interval(row):>19}  "
    )
    why = f" ({reason})" if reason else ""
    wrapped = textwrap.wrap(f"{row.verdict}{why}", max(WIDTH - len(start), 20))
    return [start + wrapped[0], *(" " * len(start) + more for more in wrapped[1:])]


def _foot(found: Comparison, notes: Sequence[str]) -> list[str]:
    lines = []
    for caveat in found.caveats:
        lines += _wrap("!  ", caveat)
    if found.levels:
        lines += _wrap("   ", _METHODS[found.method].format(n=found.family))
        lines += _wrap("   ", "a verdict also needs a difference beyond ±5 % (error rate: 1 point); intervals are "
                              "95 % for their row alone")  # fmt: skip
    for note in notes:
        lines += _wrap("i  ", note)
    return lines


def _wrap(mark: str, sentence: str) -> list[str]:
    return textwrap.wrap(
        format.clean(sentence, 1000), WIDTH, initial_indent=mark, subsequent_indent=" " * len(mark)
    ) or [mark]


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


# --- markdown -----------------------------------------------------------------------------------------------------


def markdown(found: Comparison, gates: Sequence[Outcome], notes: Sequence[str]) -> str:
    """Sections to paste into a ticket."""
    lines = ["### Comparison", "", f"- {_side('A', found.a)}", f"- {_side('B', found.b)}"]
    if found.simulated:
        lines.append("- **simulated**")
    if not found.comparable:
        lines += ["", f"**Not comparable because {'; '.join(found.reasons)}.** Figures stand without verdicts."]
    if gates:
        lines += ["", *_table(["gate", "level", "result", ""], [
            [outcome.gate, outcome.level or "", outcome.state, outcome.text] for outcome in gates
        ])]  # fmt: skip
    if found.differences:
        lines += ["", *_table(["differs", "A", "B", ""], [
            [row.what, row.a, row.b, "blocks" if row.effect == "blocks" else _effect(row).strip(" ()")]
            for row in found.differences
        ])]  # fmt: skip
    for level in found.levels:
        lines += ["", f"#### {load(level.load)}", "", *_table([*_HEADS, "why"], [
            [name(row), value(row, row.a), value(row, row.b), change(row), interval(row), row.verdict, row.why]
            for row in level.rows
        ])]  # fmt: skip
    lines += ["", *(f"- {line.strip()}" for line in [*found.caveats, _METHODS[found.method].format(n=found.family)])]
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines).rstrip() + "\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_cells(heads), _cells(["---"] * len(heads)), *(_cells(row) for row in rows)]


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(format.clean(cell).replace('|', '/') for cell in cells)} |"


# --- JSON ---------------------------------------------------------------------------------------------------------


def as_dict(found: Comparison, gates: Sequence[Outcome], notes: Sequence[str]) -> dict[str, Any]:
    """The `lpxtop.compare/1` form."""
    return {
        "schema": SCHEMA,
        "a": list(found.a),
        "b": list(found.b),
        "simulated": found.simulated,
        "comparable": found.comparable,
        "reasons": list(found.reasons),
        "differences": [
            {"what": row.what, "a": row.a, "b": row.b, "effect": row.effect, "withheld": list(row.withheld)}
            for row in found.differences
        ],
        "same": [{"what": what, "value": shown} for what, shown in found.same],
        "method": found.method,
        "caveats": list(found.caveats),
        "levels": [_level_dict(level) for level in found.levels],
        "only_in_a": [{kind: _amount(kind, amount)} for kind, amount in found.only[0]],
        "only_in_b": [{kind: _amount(kind, amount)} for kind, amount in found.only[1]],
        "gates": [
            {"gate": outcome.gate, "level": outcome.level, "state": outcome.state, "text": outcome.text}
            for outcome in gates
        ],
        "notes": list(notes),
    }


def _amount(kind: str, amount: float) -> float:
    return round(amount) if kind == "concurrency" else amount


def _level_dict(level: LevelResult) -> dict[str, Any]:
    kind, amount = level.load
    return {
        kind: _amount(kind, amount),
        "requests": {"a": level.ended[0], "b": level.ended[1]},
        "measured_s": {"a": level.seconds[0], "b": level.seconds[1]},
        "block_s": level.block_s,
        "blocks": level.blocks,
        "metrics": [_row_dict(row) for row in level.rows],
    }


def _row_dict(row: Row) -> dict[str, Any]:
    """Ratios differ in points (`difference_points`), everything else in percent of A."""
    unit = "points" if row.points else "percent"
    return {
        "key": row.key,
        "figure": row.figure,
        "unit": BY_KEY[row.key].unit,
        "a": row.a,
        "b": row.b,
        f"difference_{unit}": None if row.difference is None else 100 * row.difference,
        f"interval_{unit}": None if row.interval is None else [100 * edge for edge in row.interval],
        "p_adjusted": row.p,
        "verdict": row.verdict,
        "why": row.why,
    }


def to_json(found: Comparison, gates: Sequence[Outcome], notes: Sequence[str]) -> str:
    """Indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(as_dict(found, gates, notes)), indent=2).decode() + "\n"
