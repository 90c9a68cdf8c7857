"""The key figures: TTFT, ITL and e2e percentiles with their n, throughput, requests, errors, and what they cover.

Each figure is of the window named in the head line, or says otherwise. Must not compute: the view holds the figures.
"""

from collections.abc import Callable

from lpxtop import format
from lpxtop.metrics.view import Quantiles, RunView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.server import whole
from lpxtop.tui.panels.states import failures, load_word, mode_of
from lpxtop.tui.rows import Row, Span, beside, line, pad

_NAME, _CELL, _RATE = 10, 8, 13
TABLE = _NAME + 4 * _CELL


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A table of latencies and, where there is room, the rates beside it."""
    if mode_of(view) == "watch":
        return _watch(view, width, height)
    table = [_head(view, width), *_latencies(view)]
    rates = _rates(view, width)
    if width < TABLE + 30:
        return _narrow(view, table, width, height)
    gap: Row = ((" │ ", "frame"),)
    rest = width - TABLE - 3
    if rest < 76:
        return beside([(table, TABLE), (rates, rest)], height, gap)
    return beside([(table, TABLE), (rates, 38), (_trust(view), rest - 41)], height, gap)


def _narrow(view: RunView, table: list[Row], width: int, height: int) -> list[Row]:
    """The latencies, and the most important rates in what is left at the right, or under them."""
    window = view.window
    short = [
        line((_output(view), "value")),
        line((format.with_unit(window.requests_per_s, "req/s"), "value")),
        line(*_errors(view)),
        line(("ok ", "label"), (format.count(view.load.done.get("ok", 0)), "value")),
    ]
    return beside([(table, TABLE), (short, width - TABLE - 3)], height, ((" │ ", "frame"),))


def _head(view: RunView, width: int) -> Row:
    columns = "".join(pad(name, _CELL, right=True) for name in ("p50", "p95", "p99", "n"))
    return line((pad(f" {covers(view)}", _NAME), "label"), (columns, "label"))


def covers(view: RunView) -> str:
    """What the window's figures cover: `last 30 s`, or less at the start."""
    seconds = min(view.window.window_s, view.window.covered_s)
    return f"last {seconds:.0f} s"


def per_token(view: RunView) -> tuple[str, Quantiles]:
    """ITL where the token counts can be trusted, else ICL under its own name."""
    return ("ITL", view.window.itl) if view.itl_trusted else ("ICL", view.window.icl)


def _latencies(view: RunView) -> list[Row]:
    name, gaps = per_token(view)
    window = view.window
    rows = [
        _quantiles("TTFT ms", window.ttft, format.milliseconds),
        _quantiles(f"{name} ms", gaps, format.milliseconds),
        _quantiles("E2E s", window.e2e, _seconds),
        _quantiles("TPOT ms", window.tpot, format.milliseconds),
    ]
    if view.load.mode != "closed" and view.level is not None:
        rows.insert(1, _quantiles("due,level", view.level.ttft_due, format.milliseconds))
    return rows


def _seconds(value: float | None) -> str:
    return format.significant(None if value is None else value / 1000)


def _quantiles(name: str, figures: Quantiles, text: Callable[[float | None], str]) -> Row:
    cells = "".join(pad(text(value), _CELL, right=True) for value in (figures.p50, figures.p95, figures.p99))
    return line(
        (pad(f" {name}", _NAME), "label"),
        (cells, "value"),
        (pad(short_count(figures.count), _CELL, right=True), "label"),
    )


def short_count(n: int) -> str:
    """A count in at most seven cells: 614, 19 284, 1.2 M."""
    return format.count(n) if n < 1_000_000 else format.with_unit(n / 1e6, "M")


def _output(view: RunView) -> str:
    """Tokens per second, or chunks where tokens are not known."""
    if view.window.output_tokens_per_s is None and view.window.chunks_per_s is not None:
        return format.with_unit(view.window.chunks_per_s, "chunk/s")
    return format.with_unit(view.window.output_tokens_per_s, "tok/s")


def _errors(view: RunView) -> tuple[Span, ...]:
    """Failures in the window with their share, always a word besides the colour."""
    window = view.window
    if not window.failed:
        return (("errors ", "label"), ("0", "value"))
    return (("ERRORS ", "error"), (f"{format.count(window.failed)} ({format.percent(window.error_rate, 1)})", "error"))


def _rates(view: RunView, width: int) -> list[Row]:
    window = view.window
    ok = format.count(view.load.done.get("ok", 0))
    rows = [
        line(("out ", "label"), (pad(_output(view), _RATE), "value"), ("in ", "label"),
             (format.with_unit(window.input_tokens_per_s, "tok/s"), "value")),
        line(("req ", "label"), (pad(format.with_unit(window.requests_per_s, "/s"), _RATE), "value"), *_errors(view)),
        line(("all ", "label"), (pad(f"{ok} ok", _RATE), "value"),
             (f"{format.count(failures(view))} failed", "error" if failures(view) else "value")),
        _since(view),
    ]  # fmt: skip
    if view.slo:
        good = format.with_unit(window.goodput_requests_per_s, "/s")
        terms = ",".join(view.slo).replace(" ", "")
        rows.insert(3, line(("good", "label"), (pad(f" {good}", _RATE), "value"), (terms, "label")))
    return rows


def _since(view: RunView) -> Row:
    """The level: since when its load holds, and whether it is steady."""
    level = view.level
    if level is None:
        return line(("no load yet", "label"))
    since = format.duration(max(0, view.t - level.from_us) / 1e6)
    if not level.settled:
        steady: Span = ("settling", "label")
    elif level.steady is None:
        steady = ("too short", "label")
    else:
        steady = ("steady", "good") if level.steady else ("NOT STEADY", "warn")
    return line(
        ("load ", "label"), (load_word(level.concurrency, level.rate), "value"), (f" for {since}, ", "label"), steady
    )


def _trust(view: RunView) -> list[Row]:
    """How good the measurement is; what is wrong first."""
    quality = view.quality
    verdicts = [line((f"! {verdict.text}", verdict.level)) for verdict in quality.verdicts[:2]]
    stamps = {"kernel": "kernel stamps", "user": "user-space stamps"}.get(quality.timestamp_source or "", "stamps –")
    delay = format.with_unit(quality.read_delay_us_p99, "µs")
    return [
        *verdicts,
        line(("measured by ", "label"), (stamps, "value"), ("  read delay p99 ", "label"), (delay, "value")),
        line(("client CPU ", "label"), (format.percent(quality.client_cpu_ratio), "value"),
             ("  loop lag p99 ", "label"), (format.with_unit(quality.loop_lag_ms_p99, "ms"), "value")),
        line(("tokens per chunk ", "label"), (format.significant(view.window.tokens_per_chunk), "value"),
             ("  counted from ", "label"), (view.token_source or format.UNKNOWN, "value")),
    ]  # fmt: skip


def _watch(view: RunView, width: int, height: int) -> list[Row]:
    """Without load there is only what the server says of itself."""
    if not view.servers:
        return [line((" no load, no server metrics: only this node's GPUs are watched", "label"))][:height]
    server = view.servers[0]
    rows = [
        line((" running ", "label"), (whole(server.running), "value"), ("   waiting ", "label"),
             (whole(server.waiting), "value"), ("   KV cache ", "label"),
             (format.percent(server.kv_usage), "value")),
        line((" out ", "label"), (format.with_unit(server.output_tokens_per_s, "tok/s"), "value"),
             ("   TTFT mean ", "label"), (format.latency(server.ttft_mean_ms), "value"),
             ("   ITL mean ", "label"), (format.latency(server.itl_mean_ms), "value"),
             (" (the server's own)", "label")),
    ]  # fmt: skip
    return rows[:height]
