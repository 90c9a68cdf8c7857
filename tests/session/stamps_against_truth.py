"""The error of every stamp of a recording against the write times the simulated server kept, in ns."""

import json
from itertools import accumulate
from pathlib import Path

TICK_NS = 10_000


def stamp_errors(recording: Path, log: list[dict]) -> tuple[list[int], list[int]]:
    """(errors of chunks that were the last of their read, errors of the others), stamp − write time.

    `arrivals` carries ticks of 10 µs since `sent`, and `sent` whole µs: the error is known to ±5 µs.
    """
    events = [json.loads(line) for line in recording.read_bytes().splitlines()]
    origin_ns = events[0]["mono_ns"]
    arrivals, same, sent, names = _streams(events)
    by_name = {record["request_id"]: record for record in log}
    alone: list[int] = []
    earlier: list[int] = []
    for key, gaps in arrivals.items():
        record = by_name[names[key]]
        begin = origin_ns + sent[key] * 1000
        times = [begin + tick * TICK_NS for tick in accumulate(gaps)]
        assert len(times) == len(record["writes"])
        for index, (stamp, write) in enumerate(zip(times, record["writes"], strict=True)):
            shares_with_next = index + 1 in same[key]
            (earlier if shares_with_next else alone).append(stamp - write)
    return alone, earlier


def _streams(events: list[dict]) -> tuple[dict, dict, dict, dict]:
    """Gaps and same-read indexes per request, and its `sent` and X-Request-Id, for requests that ended well."""
    slots: dict = {}
    gaps: dict = {}
    same: dict = {}
    sent: dict = {}
    names: dict = {}
    for event in events:
        source = event.get("src")
        if event["k"] == "request":
            slots[source, event["slot"]] = (source, event["id"])
        elif event["k"] == "arrivals":
            position = 0
            marked = set(event.get("same", ()))
            for slot, count in zip(event["slot"], event["n"], strict=True):
                key = slots[source, slot]
                known = gaps.setdefault(key, [])
                same.setdefault(key, set()).update(
                    len(known) + index - position for index in range(position, position + count) if index in marked
                )
                known += event["gap"][position : position + count]
                position += count
        elif event["k"] == "finished" and event["outcome"] == "ok":
            key = (source, event["id"])
            sent[key], names[key] = event["sent"], event["request_id"]
    return {key: gaps[key] for key in names}, {key: same.get(key, set()) for key in names}, sent, names


def quantile(values: list[int], q: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(q * 1_000_000) * len(ordered) // 1_000_000) - 1)]
