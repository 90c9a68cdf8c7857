"""What a session tells a load process: one JSON line each on its stdin. Must not do I/O.

The first line is `Start`; the process answers with events. Closing stdin means `Stop` with a short drain.
"""

import msgspec

from lpxtop.plan import Negotiated, Plan, Secrets


class Start(msgspec.Struct, frozen=True, kw_only=True, tag_field="c", tag="start"):
    """The plan, what the pre-flight found, and this process's share. `origin_ns` is session time 0 on CLOCK_MONOTONIC.

    Worker i of n starts with its share of the concurrency; nothing is sent before `Resume`.
    """

    plan: Plan
    negotiated: Negotiated
    secrets: Secrets
    origin_ns: int
    src: str = "load0"
    worker: int = 0
    workers: int = 1


class SetConcurrency(msgspec.Struct, frozen=True, kw_only=True, tag_field="c", tag="concurrency"):
    """Keep `n` in flight. Going down drains; going up is spread over `ramp_s`."""

    n: int
    ramp_s: float = 0.0


class SetRate(msgspec.Struct, frozen=True, kw_only=True, tag_field="c", tag="rate"):
    """Open loop at this process's share of the rate, requests per second."""

    rate: float


class Pause(msgspec.Struct, frozen=True, tag_field="c", tag="pause"):
    """No new requests; those in flight go on."""


class Resume(msgspec.Struct, frozen=True, tag_field="c", tag="resume"):
    """Send load (again)."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag_field="c", tag="stop"):
    """No new requests; wait up to `drain_s` for those in flight, then cut them, then exit."""

    drain_s: float = 30.0


class Cancel(msgspec.Struct, frozen=True, tag_field="c", tag="cancel"):
    """Cancel what is in flight now (outcome `cancelled`); the load goes on as it was."""


Command = Start | SetConcurrency | SetRate | Pause | Resume | Stop | Cancel

_decode = msgspec.json.Decoder(Command).decode


def encode(command: Command) -> bytes:
    """The command as one line, newline included."""
    return msgspec.json.encode(command) + b"\n"


def decode(line: bytes) -> Command:
    """Raises msgspec.DecodeError for what is not a command."""
    return _decode(line)
