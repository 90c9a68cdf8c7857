"""One scrape in canonical concepts: picks a server's candidates and joins its engines. Pure; must not do I/O.

Absent is absent, not 0; NaN and infinities are left out. Counters and queues are summed over engines, the KV cache is
the fullest engine's, histograms are summed only where their buckets are the same.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from lpxtop.probes.concepts import Candidate, ServerTable, Table, exposed_names
from lpxtop.probes.exposition import Series, finite

Samples = list[tuple[Series, float]]
MAX_INFO = 100
"""Longer label values are no settings."""


class Reading(msgspec.Struct, frozen=True):
    """What a scrape says. `engines` is empty with one engine; a histogram is {"le": {edge: cumulative count}, "sum",
    "count"}, its edges as text as on the wire."""

    concepts: dict[str, float]
    engines: dict[str, dict[str, float]]
    histograms: dict[str, dict[str, Any]]
    info: dict[str, str]


EMPTY = Reading({}, {}, {}, {})


def read(values: Mapping[Series, float], server: ServerTable, table: Table) -> Reading:
    """The concepts of one server's scrape."""
    by_name: dict[str, Samples] = {}
    for series, value in values.items():
        if all(series.labels.get(label, only) == only for label, only in server.only.items()):
            by_name.setdefault(table.plain(series.name), []).append((series, value))
    concepts: dict[str, float] = {}
    engines: dict[str, dict[str, float]] = {}
    histograms: dict[str, dict[str, Any]] = {}
    for name, definition in table.concepts.items():
        if definition.kind == "histogram":
            histogram = _histogram(by_name, server.candidates(name))
            if histogram:
                histograms[name] = histogram
            continue
        per_engine = _per_engine(by_name, server, name, definition.kind)
        if not per_engine:
            continue
        concepts[name] = _join(definition.join, list(per_engine.values()))
        if name == "kv_usage" and len(per_engine) > 1:
            concepts["kv_usage_mean"] = _join("mean", list(per_engine.values()))
        for engine, value in per_engine.items():
            engines.setdefault(engine, {})[name] = value
    return Reading(concepts, engines if len(engines) > 1 else {}, histograms, _info(by_name, server))


def _join(how: str, values: list[float]) -> float:
    total = max(values) if how == "max" else sum(values)
    return total / len(values) if how == "mean" else total


def _per_engine(by_name: dict[str, Samples], server: ServerTable, concept: str, kind: str) -> dict[str, float]:
    """The first candidate that is there, by engine."""
    for candidate in server.candidates(concept):
        found = _of_engines(_samples(by_name, kind, candidate.name, candidate.labels), server, kind)
        if candidate.over is not None:
            under = _of_engines(_samples(by_name, kind, candidate.over, candidate.over_labels), server, kind)
            found = {engine: value / under[engine] for engine, value in found.items() if under.get(engine)}
        if found:
            return {engine: value * candidate.scale for engine, value in found.items()}
    return {}


def _samples(by_name: dict[str, Samples], kind: str, family: str, labels: dict[str, str | list[str]]) -> Samples:
    """Of the first of the names a family may have."""
    samples = next((by_name[name] for name in exposed_names(kind, family) if name in by_name), [])
    return [(series, value) for series, value in samples if _has(series.labels, labels)]


def _has(labels: dict[str, str], wanted: dict[str, str | list[str]]) -> bool:
    return all(labels.get(name) in ([value] if isinstance(value, str) else value) for name, value in wanted.items())


def _of_engines(samples: Samples, server: ServerTable, kind: str) -> dict[str, float]:
    """Summed within an engine; a gauge that several processes of an engine repeat (label `pid`) counts once."""
    found: dict[str, float] = {}
    repeated: dict[str, float] = {}
    for series, raw in samples:
        value = finite(raw)
        if value is None:
            continue
        engine = _engine(series, server)
        if kind == "gauge" and "pid" in series.labels:
            repeated[engine] = max(value, repeated.get(engine, value))
        else:
            found[engine] = found.get(engine, 0.0) + value
    return repeated | found


def _engine(series: Series, server: ServerTable) -> str:
    return next((series.labels[label] for label in server.engine if label in series.labels), "0")


def _histogram(by_name: dict[str, Samples], candidates: list[Candidate]) -> dict[str, Any]:
    for candidate in candidates:
        count, total = (_total(by_name.get(f"{candidate.name}_{part}", [])) for part in ("count", "sum"))
        if count is not None and total is not None:
            edges = _edges(by_name.get(f"{candidate.name}_bucket", []), candidate.scale)
            return {"le": edges, "sum": total * candidate.scale, "count": count}
    return {}


def _total(samples: Samples) -> float | None:
    values = [value for value in (finite(raw) for _, raw in samples) if value is not None]
    return sum(values) if values else None


def _edges(samples: Samples, scale: float) -> dict[str, float]:
    """Cumulative counts by upper edge, summed over series; {} where series have different buckets."""
    parts: dict[str, dict[str, float]] = {}
    for series, value in samples:
        edge = series.labels.get("le")
        if edge is not None and finite(value) is not None:
            parts.setdefault(series.group, {})[_scaled(edge, scale)] = value
    if len({tuple(part) for part in parts.values()}) != 1:
        return {}
    first = next(iter(parts.values()))
    return {edge: sum(part[edge] for part in parts.values()) for edge in first}


def _scaled(edge: str, scale: float) -> str:
    return edge if scale == 1.0 or "Inf" in edge else f"{float(edge) * scale:g}"


def _info(by_name: dict[str, Samples], server: ServerTable) -> dict[str, str]:
    """The labels of the server's settings; {} where there are none."""
    for name in server.info:
        for series, _ in by_name.get(name, ()):
            return {label: value for label, value in series.labels.items() if len(value) <= MAX_INFO}
    return {}
