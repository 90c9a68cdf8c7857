"""Requests in flight, oldest first: what an on-call needs when nothing finishes. Pure lines."""

from lpxtop import format
from lpxtop.metrics.view import OpenRequest, RunView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.chart import empty
from lpxtop.tui.rows import Row, Span, framed, line, pad

SILENT_S = 5.0


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A framed list."""
    title = line(("6 ", "key"), ("requests in flight ", "title"), (format.count(view.open_count), "value"))
    chosen = look.chosen == "requests"
    inner = height - 2
    if not view.open_requests:
        return framed(empty(view, width - 2, inner, "nothing in flight"), width, height, title, chosen=chosen)
    head = line((pad("     id", 12) + pad("age", 9, right=True) + pad("TTFT", 10, right=True)
                 + pad("tokens", 9, right=True) + "  state", "label"))  # fmt: skip
    room = max(0, inner - 1)
    start = min(look.scroll.get("requests", 0), max(0, len(view.open_requests) - room))
    rows = [head, *(_row(request) for request in view.open_requests[start : start + room])]
    hidden = view.open_count - len(view.open_requests)
    caption = line((f"the {len(view.open_requests)} oldest", "label")) if hidden > 0 else ()
    return framed(rows, width, height, title, caption, chosen=chosen)


def _row(request: OpenRequest) -> Row:
    return line(
        (pad(f" {format.clean(request.source, 6)}/{request.id}", 12), "label"),
        (pad(format.duration(request.age_s), 9, right=True), "value"),
        (pad(format.latency(request.ttft_ms), 10, right=True), "value"),
        (pad(format.count(request.tokens), 9, right=True), "value"),
        "  ",
        _state(request),
    )


def _state(request: OpenRequest) -> Span:
    if not request.sent:
        return ("not sent yet", "label")
    if request.silent_s > SILENT_S:
        what = "no token" if request.ttft_ms is None else "silent"
        return (f"! {what} for {format.duration(request.silent_s)}", "warn")
    return ("waits for its first token", "label") if request.ttft_ms is None else ("streams", "good")
