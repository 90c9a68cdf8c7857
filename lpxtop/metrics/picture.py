"""The state as a keyframe carries it: what the screen needs, JSON-able, and back. Must not fold events."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lpxtop.errors import RecordingError
from lpxtop.metrics.counts import RequestCounts
from lpxtop.metrics.servers import ServerSource
from lpxtop.metrics.slots import Ring

if TYPE_CHECKING:
    from lpxtop.metrics.state import RunState

_VERSION = 1
_PLAIN = ("t", "second", "reason", "target", "rate", "unknown_events", "late_events", "gpu_note")


def of(state: "RunState") -> dict[str, Any]:
    """All that the screen shows, and of the chart's slots those changed since the last picture."""
    parts: dict[str, Any] = {"v": _VERSION}
    parts |= {name: getattr(state, name) for name in _PLAIN}
    parts |= {
        "ring": state.ring.snapshot(),
        "timeline": state.timeline.snapshot(),
        "streams": state.streams.snapshot(state.t, state.timeline.parts),
        "counts": state.counts.snapshot(),
        "log": state.log.snapshot(),
        "load": state.load.snapshot(),
        "gpus": {src: source.snapshot() for src, source in state.gpus.items()},
        "servers": {src: source.snapshot() for src, source in state.servers.items()},
    }
    return _copy(parts)


def fill(state: "RunState", pictures: Sequence[dict[str, Any]]) -> None:
    """Bring a fresh state to the last of a chain of pictures, oldest first. Raises RecordingError for one that another
    version made."""
    chain = [_copy(picture) for picture in pictures]
    if not chain or any(link.get("v") != _VERSION for link in chain):
        raise RecordingError("the recording's keyframes are of another version", "replay it from the start")
    last = chain[-1]
    for name in _PLAIN:
        setattr(state, name, last[name])
    state.ring = Ring.restore(link["ring"] for link in chain)
    state.timeline.restore(last["timeline"])
    state.streams.restore(last["streams"], state.t, state.timeline.parts)
    state.counts = msgspec.convert(last["counts"], RequestCounts)
    state.log.restore(last["log"])
    state.load.restore(last["load"])
    for src, source in last["gpus"].items():
        state.gpu_source(src).restore(source)
    for src, server in last["servers"].items():
        state.servers[src] = ServerSource(src)
        state.servers[src].restore(server)


def _copy(parts: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(parts))
    return copied
