"""GPUs: a chart of utilisation and memory, and a table with a line each. Or the sentence why there is none.

Utilisation is the share of time in which any kernel ran, so the table shows power and clocks beside it. Pure lines.
"""

from lpxtop import format
from lpxtop.metrics.view import GpuView, RunView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.chart import centred, draw, span_caption
from lpxtop.tui.plot import Trace, tick
from lpxtop.tui.rows import Row, Span, bar, framed, line, pad

STALE_S = 5.0
_WIDE = 112
NO_GPU = "no GPU is watched"
_SPARK = " ▁▂▃▄▅▆▇█"


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A framed panel: the chart, and with room for both the table."""
    title = line(("4 ", "key"), ("GPU", "title"), *((" simulated", "sim"),) * any(gpu.simulated for gpu in view.gpus))
    inner_width, inner = width - 2, height - 2
    chosen = look.chosen == "gpu"
    if not view.gpus:
        return framed(
            centred(view.gpu_note or NO_GPU, inner_width, inner), width, height, title, chosen=look.chosen == "gpu"
        )
    listed = table(view, inner_width, min(len(view.gpus) + 1, inner), look) if look.zoomed or inner < 5 else []
    if inner < 5:
        return framed(table(view, inner_width, inner, look), width, height, title, chosen=chosen)
    caption = span_caption(view, inner_width, look, "mean of", labels=4)
    body = [*_charts(view, inner_width, inner - len(listed), look), *listed]
    return framed(body, width, height, title, caption, chosen=chosen)


def _charts(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """Utilisation and memory in per cent; from twelve rows on the power of all GPUs under it."""
    series = view.series
    memory = [None if ratio is None else 100 * ratio for ratio in series.gpu_memory_ratio]
    shares = [
        Trace(memory, "memory", "mem", "line", "m", "mean"),
        Trace(series.gpu_utilization_percent, "util", "util", "thick", "u", "mean"),
    ]
    watts = [Trace(series.gpu_power_watts, "power", "W", "area", "#", "mean")]
    below = height // 3 if height >= 12 else 0
    rows = draw(view, shares, width, height - below, look, key="gpu", ceiling=100.0, label=_percent)
    power = draw(view, watts, width, below, look, key="power", floor=100.0, time_axis=False) if below else []
    return [*(rows or centred("no sample yet", width, height - below)), *(power or [])]


def _percent(value: float) -> str:
    return f"{tick(value)}%"


def table(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """One line a GPU, a head line where it is wide, and a sum for those that have no room."""
    if height < 1:
        return []
    if not view.gpus:
        return [line((f" GPU  {view.gpu_note or NO_GPU}", "label"))]
    head = [_head(width)] if width >= _WIDE and height > min(len(view.gpus), 2) else []
    room = height - len(head)
    start = min(look.scroll.get("gpu", 0), max(0, len(view.gpus) - room))
    shown = view.gpus[start : start + (room if len(view.gpus) <= room else room - 1)]
    rows = [*head, *(_row(gpu, width) for gpu in shown)]
    if len(shown) < len(view.gpus):
        rows.append(_total(view, len(view.gpus) - len(shown)))
    return rows


def short_name(name: str) -> str:
    """H200 for NVIDIA H200."""
    return format.clean(name.removeprefix("NVIDIA "), 24)


def _head(width: int) -> Row:
    names = " gpu " + pad("name", 15) + pad("util", 16) + pad("memory", 26) + pad("power", 15) + pad("SM clock", 15)
    return line((names + pad("mem clock", 11) + pad("temp", 6) + "throttle", "label"))


def _row(gpu: GpuView, width: int) -> Row:
    if gpu.status != "ok":
        return line((f" GPU{gpu.index} {short_name(gpu.name)} ", "value"), (format.clean(gpu.status), "error"))
    if width >= _WIDE:
        return _wide_row(gpu, width)
    cells = max(4, min(10, (width - 56) // 2))
    parts: list[str | Span] = [(f" GPU{gpu.index} ", "value"), *_share(gpu, cells)]
    parts += [" ", (_memory(gpu, short=width < 76), "value"), " ", (_power(gpu), "value")]
    if width >= 66:
        parts += [" ", (pad(f"{_plain(gpu.sm_clock_mhz)}MHz", 8), "value")]
        parts += [(_celsius(gpu), "value"), " "]
    return line(*parts, *_state(gpu))


def _wide_row(gpu: GpuView, width: int) -> Row:
    ratio = _ratio(gpu)
    clock = f"{_plain(gpu.sm_clock_mhz)}/{_plain(gpu.sm_clock_max_mhz)} MHz"
    parts: list[str | Span] = [
        (f"{gpu.index:4d} ", "value"), (pad(short_name(gpu.name), 15), "text"), *_share(gpu, 9), "  ",
        *bar(ratio, 9, "memory"), (pad(" " + _memory(gpu), 17), "value"), (pad(_power(gpu), 15), "value"),
        (pad(clock, 15), "value"), (pad(f"{_plain(gpu.memory_clock_mhz)} MHz", 11), "value"),
        (pad(_celsius(gpu), 6), "value"),
    ]  # fmt: skip
    return line(*parts, *_state(gpu))


def _share(gpu: GpuView, cells: int) -> tuple[Span, ...]:
    percent = gpu.utilization_percent
    text = format.percent(None if percent is None else percent / 100)
    return (*bar(None if percent is None else percent / 100, cells, "util"), (pad(text, 5, right=True), "value"))


def _ratio(gpu: GpuView) -> float | None:
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    return None if used is None or not total else used / total


def _memory(gpu: GpuView, *, short: bool = False) -> str:
    used, total = format.bytes_iec(gpu.memory_used_bytes), format.bytes_iec(gpu.memory_total_bytes)
    return used if short else f"{used}/{total}"


def _power(gpu: GpuView) -> str:
    return f"{_plain(gpu.power_watts)}/{_plain(gpu.power_limit_watts)} W"


def _plain(value: float | None) -> str:
    """A whole number without groups."""
    return format.UNKNOWN if value is None else f"{value:.0f}"


def _celsius(gpu: GpuView) -> str:
    return f"{_plain(gpu.temperature_c)}°C"


def _state(gpu: GpuView) -> tuple[Span, ...]:
    """Why clocks are held down, by words; and samples that are old."""
    stale: tuple[Span, ...] = ((f"{gpu.age_s:.0f} s old ", "warn"),) if gpu.age_s > STALE_S else ()
    if gpu.throttle:
        return (*stale, ("! " + ", ".join(gpu.throttle), "warn"))
    return (*stale, ("-", "label"))


def _total(view: RunView, hidden: int) -> Row:
    known = [(gpu.utilization_percent, gpu.index) for gpu in view.gpus if gpu.utilization_percent is not None]
    busiest = max(known, default=None)
    most = f"   max util {busiest[0]:.0f}% GPU{busiest[1]}" if busiest else ""
    watts = [gpu.power_watts for gpu in view.gpus if gpu.power_watts is not None]
    power = f"   total {format.with_unit(sum(watts) / 1000, 'kW')}" if watts else ""
    throttled = sum(1 for gpu in view.gpus if gpu.throttle)
    held: tuple[Span, ...] = ((f"   ! {throttled} throttled", "warn"),) if throttled else ()
    return line((f" +{hidden} GPUs (4 z: all)", "label"), *held, (most, "value"), (power, "value"))


def strip(gpu: GpuView, cells: int) -> str:
    """The last seconds' utilisation, a cell each; a hole where nothing was sampled."""
    history = [None] * cells + list(gpu.utilization_history)
    return "".join(" " if value is None else _SPARK[max(1, round(value / 100 * 8))] for value in history[-cells:])


def history(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A framed list with each GPU's last seconds, for the wide layout: two lines a GPU, one when there is less room."""
    title = line(("4 ", "key"), ("GPU", "title"), *((" simulated", "sim"),) * any(gpu.simulated for gpu in view.gpus))
    inner = height - 2
    chosen = look.chosen == "gpu"
    if not view.gpus:
        return framed(centred(view.gpu_note or NO_GPU, width - 2, inner), width, height, title, chosen=chosen)
    pairs = inner >= 2 * len(view.gpus)
    rows: list[Row] = []
    for gpu in view.gpus:
        rows += _with_history(gpu, width - 2) if pairs else _with_history(gpu, width - 2)[:1]
    return framed(rows, width, height, title, chosen=chosen)


def _with_history(gpu: GpuView, width: int) -> list[Row]:
    """A line with the last seconds, and one with the rest."""
    percent = format.percent(None if gpu.utilization_percent is None else gpu.utilization_percent / 100)
    memory = _memory(gpu)
    cells = max(6, width - len(memory) - 14)
    figures = f"{_power(gpu)}  {_plain(gpu.sm_clock_mhz)} MHz  {_celsius(gpu)}  "
    return [
        line((f" GPU{gpu.index:<2d}", "value"), (pad(percent, 5, right=True), "value"), " ",
             (strip(gpu, cells), "util"), " ", (memory, "value")),
        line((f"      {short_name(gpu.name)}  ", "label"), (figures, "value"), *_state(gpu)),
    ]  # fmt: skip
