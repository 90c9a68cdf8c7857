"""The server's own metrics: queue, KV cache, preemptions; as one line, or as a panel. Pure lines."""

from lpxtop import format
from lpxtop.metrics.view import RunView, ServerView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.chart import centred, draw
from lpxtop.tui.plot import Trace
from lpxtop.tui.rows import Row, Span, beside, framed, line, width_of

_STALE_S = 10.0
NO_SERVER = "the server's own metrics are not known (no /metrics found)"


def one_line(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A line per server."""
    if not view.servers:
        return [line((f" server  {NO_SERVER}", "label"))][:height]
    rows = [line((" server ", "label"), *_figures(server)) for server in view.servers][:height]
    return [row if width_of(row) <= width else row[:-2] for row in rows]


def _figures(server: ServerView) -> list[str | Span]:
    if not server.ok:
        return [
            ("! " + format.clean(server.error or "no answer", 80), "error"),
            (f"  {server.age_s:.0f} s ago", "label"),
        ]
    parts: list[str | Span] = []
    for name, text in (
        ("running ", whole(server.running)),
        ("  waiting ", whole(server.waiting)),
        ("  KV ", format.percent(server.kv_usage)),
        ("  prefix hits ", format.percent(server.prefix_hit_rate)),
        ("  preempt ", format.with_unit(server.preemptions_per_s, "/s")),
        ("  out ", format.with_unit(server.output_tokens_per_s, "tok/s")),
    ):
        parts += [(name, "label"), (text, "warn" if _worrying(name, server) else "value")]
    if server.age_s > _STALE_S:
        parts.append((f"  {server.age_s:.0f} s old", "warn"))
    return parts


def whole(value: float | None) -> str:
    """A gauge that counts things."""
    return format.count(None if value is None else round(value))


def _worrying(name: str, server: ServerView) -> bool:
    return {
        "waiting": bool(server.waiting),
        "KV": server.kv_usage is not None and server.kv_usage > 0.9,
        "preempt": bool(server.preemptions_per_s),
    }.get(name.strip(), False)


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A framed panel: KV cache and waiting requests over time, and every figure."""
    title = line(("5 ", "key"), ("server's own metrics", "title"))
    chosen = look.chosen == "server"
    inner_width, inner = width - 2, height - 2
    if not view.servers:
        return framed(centred(NO_SERVER, inner_width, inner), width, height, title, chosen=chosen)
    rows = [row for server in view.servers for row in _details(server, inner_width)]
    room = inner - len(rows)
    if room >= 4:
        rows = [*_charts(view, inner_width, room, look), *rows]
    return framed(rows, width, height, title, chosen=chosen)


def _charts(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    kv = [None if ratio is None else 100 * ratio for ratio in view.series.kv_usage]
    half = width // 2
    left = draw(view, [Trace(kv, "memory", "KV%", "area", "#", "mean")], half, height, look, key="kv", ceiling=100.0)
    right = draw(
        view,
        [Trace(view.series.waiting, "warn", "wait", "line", "o")],
        width - half,
        height,
        look,
        key="waiting",
        floor=4.0,
    )
    none: list[Row] = [()] * height
    return beside([(left or none, half), (right or none, width - half)], height, ())


def _details(server: ServerView, width: int) -> list[Row]:
    """All figures of one server."""
    info = "  ".join(f"{key} {value}" for key, value in server.info.items())
    head = line((f" {format.clean(server.url)}  ", "label"), (format.clean(info), "text"))
    if not server.ok:
        return [head, line(" ", *_figures(server))]
    figures = _figures(server)
    latencies: list[str | Span] = [
        ("  TTFT mean ", "label"), (format.latency(server.ttft_mean_ms), "value"),
        ("  ITL mean ", "label"), (format.latency(server.itl_mean_ms), "value"),
    ]  # fmt: skip
    if width >= 110:
        return [head, line(" ", *figures, *latencies)]
    return [head, line(" ", *figures[:8]), line(" ", *_unindented(figures[8:]), *latencies)]


def _unindented(parts: list[str | Span]) -> list[str | Span]:
    first = parts[0]
    return [(first[0].lstrip(), first[1]) if isinstance(first, tuple) else first, *parts[1:]]
