"""Kernel receive stamps on the monotonic clock. Must not touch a socket's data.

`SO_TIMESTAMPNS` stamps are CLOCK_REALTIME; the offset to CLOCK_MONOTONIC comes from bracketed samples at 4 Hz. A jump
of the offset means the wall clock was stepped: until the next sample the reader's own clock is used, and counted.
"""

import socket
import struct
import sys
import time
from collections.abc import Callable

SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)
SAMPLE_EVERY_NS = 250_000_000
JUMP_NS = 50_000
"""An offset that moved by more than this between two samples was stepped: slewing moves both clocks alike."""

TIMESPEC = struct.Struct("@ll")  # the machine's own struct timespec
unpack_timespec = TIMESPEC.unpack
ANCILLARY_BYTES = socket.CMSG_SPACE(TIMESPEC.size) if hasattr(socket, "CMSG_SPACE") else 0
_TCP_INFO_RTT, _TCP_INFO_MIN_RTT = 68, 148  # byte offsets in struct tcp_info, both u32 in µs


def sample_offset() -> int:
    """CLOCK_REALTIME − CLOCK_MONOTONIC in ns: the tightest of five bracketed samples."""
    best_width, best_offset = 1 << 62, 0
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        if after - before < best_width:
            best_width, best_offset = after - before, wall - (before + after) // 2
    return best_offset


class ClockOffset:
    """The current offset, refreshed as time passes. `trusted` is False after a step, until a sample agrees again."""

    __slots__ = ("_next_ns", "_sample", "offset_ns", "steps", "trusted")

    def __init__(self, sample: Callable[[], int] = sample_offset) -> None:
        self._sample = sample
        self._next_ns = 0
        self.offset_ns = sample()
        self.trusted = True
        self.steps = 0

    def refresh(self, now_ns: int) -> None:
        """Take a new sample when one is due."""
        if now_ns < self._next_ns:
            return
        self._next_ns = now_ns + SAMPLE_EVERY_NS
        found = self._sample()
        self.trusted = abs(found - self.offset_ns) <= JUMP_NS
        self.steps += not self.trusted
        self.offset_ns = found


def enable(sock: socket.socket) -> bool:
    """Ask the kernel to stamp what this socket receives. False where it refuses (not Linux, some sandboxes)."""
    if sys.platform != "linux":
        return False  # option 35 means something else there
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


def keep_on() -> socket.socket | None:
    """A socket that keeps the kernel stamping for as long as it is open; None where it refuses.

    Linux stamps packets only while some socket asks for it, and turns that on a moment after the first one did: what
    a lone new connection receives in that moment has no stamp.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    if enable(sock):
        return sock
    sock.close()
    return None


def round_trip_us(sock: socket.socket) -> tuple[int | None, int | None]:
    """(smoothed, least) round-trip time of a connection in µs from TCP_INFO; None where the kernel does not tell."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None, None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, option, 192)
    except OSError:
        return None, None
    smoothed = struct.unpack_from("I", info, _TCP_INFO_RTT)[0] if len(info) >= _TCP_INFO_RTT + 4 else 0
    least = struct.unpack_from("I", info, _TCP_INFO_MIN_RTT)[0] if len(info) >= _TCP_INFO_MIN_RTT + 4 else 0
    return smoothed or None, least if 0 < least < 0xFFFFFFFF else None
