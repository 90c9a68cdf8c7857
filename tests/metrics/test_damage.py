"""Damaged events: a recording that was cut, edited or written by another version never breaks the fold."""

import random
from typing import Any

import msgspec
import pytest
from metrics_streams import session

from lpxtop import report
from lpxtop.events import codec
from lpxtop.metrics.state import RunState
from lpxtop.metrics.summary import summary

NUMBERS = (0, -1, 10**15, -(10**15), None, 1.5)


def damage(record: dict[str, Any], rng: random.Random) -> None:
    """Change, empty or drop one field, somewhere in the record."""
    name = rng.choice([key for key in record if key != "k"] or ["t"])
    value = record.get(name)
    if isinstance(value, dict) and value:
        damage(value, rng)
    elif isinstance(value, list) and value:
        value[rng.randrange(len(value))] = rng.choice(NUMBERS)
        if rng.random() < 0.3:
            value.pop()
    else:
        record[name] = rng.choice(NUMBERS)
    if rng.random() < 0.1:
        record.pop(name, None)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_lines_never_break_the_fold(seed: int) -> None:
    """One line in seven is damaged; every view, snapshot, summary and report still comes out, and is valid JSON."""
    rng = random.Random(seed)
    header, *events = session(seed, seconds=15)
    state = RunState()
    state.apply(header)
    for event in events:
        line = codec.encode(event)
        if rng.random() < 0.15:
            record = msgspec.json.decode(line)
            damage(record, rng)
            line = msgspec.json.encode(record)
        try:
            state.apply(codec.decode(line))
        except codec.CodecError:
            continue
        if rng.random() < 0.02:
            state.view()
            state.snapshot()
    found = summary(state)
    assert msgspec.json.decode(report.to_json(found))["schema"] == "lpxtop.summary/1"
    assert report.text(found)
    assert report.markdown(found)
    assert report.csv(found)
