"""Each panel's lines, by value: what stands where, what is left out when there is no room, what unknown looks like."""

import re

import msgspec
import pytest
from screen_fakes import (
    EIGHT,
    EMPTY,
    ENDED,
    LIVE,
    NO_GPU,
    OPEN_LOOP,
    PAUSED,
    READY,
    REPLAY,
    STORM,
    UNTRUSTED,
    VIEWS,
    WATCH,
    WIDE_NAMES,
    gpu,
)

from lpxtop.metrics.view import RecordingView
from lpxtop.tui.look import Look
from lpxtop.tui.panels import card, events, gpus, latency, levels, requests, server, status, throughput, tiles, ttft
from lpxtop.tui.rows import plain, width_of
from lpxtop.tui.screens.live import PANELS


def text(rows) -> str:
    return "\n".join(plain(row).rstrip() for row in rows)


def styles_of(rows, word: str) -> set[str]:
    """The styles of the spans that hold a word."""
    return {style for row in rows for part, style in row if word in part}


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("view", VIEWS)
def test_a_panel_draws_any_view_at_any_size(panel, view):
    """No exception, never more rows than asked, and no row wider than the panel when it is framed."""
    for width, height in ((1, 1), (7, 3), (30, 5), (58, 12), (80, 1), (80, 24), (130, 40)):
        rows = PANELS[panel](VIEWS[view], width, height, Look(chosen=panel))

        assert len(rows) <= height
        if rows and plain(rows[0]).startswith("╭"):
            assert {width_of(row) for row in rows} == {width}


@pytest.mark.parametrize("view", VIEWS)
def test_no_control_character_reaches_a_terminal(view):
    """Whatever a server or a recording calls itself."""
    for name, draw in PANELS.items():
        shown = text(draw(VIEWS[view], 120, 20, Look(chosen=name))).replace("\n", "")
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown), name


# --- status ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "word"),
    [
        (READY, "○ READY"),
        (LIVE, "● LIVE"),
        (PAUSED, "○ PAUSED"),
        (ENDED, "■ ENDED"),
        (WATCH, "● WATCH"),
        (REPLAY, "▶ REPLAY x2"),
        (msgspec.structs.replace(REPLAY, replay=msgspec.structs.replace(REPLAY.replay, speed=0.0)), "▶ REPLAY max"),
        (
            msgspec.structs.replace(REPLAY, replay=msgspec.structs.replace(REPLAY.replay, playing=False)),
            "REPLAY paused",
        ),
        (msgspec.structs.replace(LIVE, phase="warmup"), "● WARM-UP"),
        (msgspec.structs.replace(LIVE, phase="drain"), "○ DRAINING"),
    ],
)
def test_the_state_is_a_word(view, word):
    """At 60 columns too, with time and errors."""
    for width in (60, 80, 120):
        shown = text(status.lines(view, width, 1, Look()))
        assert word in shown
        assert len(shown) <= width


def test_the_first_line_says_endpoint_recording_and_errors():
    """All of it at 80 columns."""
    assert text(status.lines(LIVE, 80, 1, Look())) == (
        " lpxtop   ● LIVE   qwen2.5-7b @ gpu01:8000          00:02:00  ■ REC 812B  err 0"
    )
    assert "run-1400.jsonl 812B" in text(status.lines(LIVE, 120, 1, Look()))


def test_errors_and_a_stopped_recording_stand_out():
    """2 323 failures since the start; a disk that is full."""
    assert text(status.lines(STORM, 80, 1, Look())).endswith("err 2 323")
    assert styles_of(status.lines(STORM, 80, 1, Look()), "err") == {"error"}
    full = msgspec.structs.replace(LIVE, recording=RecordingView(state="failed", path="x", error="disk full"))
    assert "X REC STOPPED" in text(status.lines(full, 80, 1, Look()))


def test_simulated_frozen_and_slow_are_said():
    """Three different words."""
    view = msgspec.structs.replace(LIVE, simulated=True)
    shown = text(status.lines(view, 120, 1, Look(frozen_s=12, link="slow link 1 Hz")))

    assert " SIM " in shown
    assert "FROZEN 12 s" in shown
    assert "slow link 1 Hz" in shown


# --- key figures -------------------------------------------------------------------------------------------------


def test_the_key_figures_at_80_columns():
    """Every figure with what it covers and its n; p99 of 96 samples is not shown."""
    assert text(tiles.lines(LIVE, 80, 4, Look())).split("\n") == [
        " last 30 s     p50     p95     p99       n │ out 1 284 tok/s  in 9 410 tok/s",
        " TTFT ms       142     227       –      96 │ req 3.20 /s      errors 0",
        " ITL ms       11.8    18.9    34.2  38 520 │ all 614 ok       0 failed",
        " E2E s        3.10    4.96       –      96 │ load 16 for 48 s, steady",
    ]


def test_the_key_figures_at_60_columns_have_both_latencies():
    """Three rows: TTFT, ITL, and the rates beside them."""
    assert text(tiles.lines(LIVE, 60, 3, Look())).split("\n") == [
        " last 30 s     p50     p95     p99       n │ 1 284 tok/s",
        " TTFT ms       142     227       –      96 │ 3.20 req/s",
        " ITL ms       11.8    18.9    34.2  38 520 │ errors 0",
    ]


def test_unknown_is_a_dash_never_a_zero():
    """Nothing was measured: no figure is a number, apart from counts that are really 0."""
    shown = text(tiles.lines(EMPTY, 80, 5, Look()))

    assert "out –" in shown
    assert "req –" in shown
    assert re.search(r"TTFT ms +– +– +– +0 ", shown)


def test_without_trusted_token_counts_it_is_icl_and_chunks():
    """The label changes with what is measured."""
    shown = text(tiles.lines(UNTRUSTED, 80, 5, Look()))

    assert "ICL ms       23.5" in shown
    assert "ITL" not in shown
    assert "out 640 chunk/s" in shown
    assert "ICL ms" in text(latency.lines(UNTRUSTED, 80, 10, Look()))
    assert "out 640 chunk/s" in text(throughput.lines(UNTRUSTED, 80, 10, Look()))


def test_open_loop_has_ttft_from_due_and_the_slo():
    """The queue inside the client is part of what is shown; goodput with its terms."""
    shown = text(tiles.lines(OPEN_LOOP, 120, 5, Look()))

    assert re.search(r"due,level +150 +240 +435 +614", shown)
    assert "good –           ttft<500ms,tpot<50ms" in shown


def test_failures_are_a_word_and_a_share():
    """880 in the window, 98.6 %."""
    rows = tiles.lines(STORM, 80, 4, Look())

    assert "ERRORS 880 (98.6%)" in text(rows)
    assert "2 323 failed" in text(rows)


def test_a_level_is_judged_in_words():
    """settling, too short, steady, NOT STEADY."""
    for changes, word in (
        ({"settled": False}, "settling"),
        ({"steady": None}, "too short"),
        ({"steady": True}, "steady"),
        ({"steady": False}, "NOT STEADY"),
    ):
        view = msgspec.structs.replace(LIVE, level=msgspec.structs.replace(LIVE.level, **changes))
        assert f"for 48 s, {word}" in text(tiles.lines(view, 80, 5, Look()))


def test_the_widest_layout_says_how_far_to_trust_it():
    """Stamps, read delay, the client's own CPU and lag; verdicts first."""
    assert "kernel stamps  read delay p99 85.0 µs" in text(tiles.lines(LIVE, 200, 5, Look()))
    assert (
        text(tiles.lines(STORM, 200, 5, Look()))
        .split("\n")[0]
        .endswith("! the client was the limit: its loop ran 40 ms late")
    )


# --- charts ------------------------------------------------------------------------------------------------------


def test_the_latency_chart_has_its_figures_axis_names_and_marks():
    """Title, head-room, p99 above p95 above p50, the load changes at the top."""
    rows = [plain(row) for row in latency.lines(LIVE, 80, 13, Look())]
    named = [next(y for y, row in enumerate(rows) if row.endswith(f"{name}│")) for name in ("p99", "p95", "p50")]

    assert rows[0].startswith("╭─▸ 1 ITL ms p50 11.8  p95 18.9  p99 34.2 ")
    assert rows[0].endswith(" last 2 min 14 s ─╮")
    assert named == sorted(named)
    assert "C1" in rows[1]
    assert "C2" in rows[1]
    assert rows[-2].rstrip("│ ").endswith("now")


def test_an_empty_chart_says_what_to_do():
    """Before the load starts: which key starts it."""
    assert "no tokens yet: space starts the load" in text(latency.lines(READY, 80, 13, Look()))
    assert "nothing received yet" in text(throughput.lines(EMPTY, 80, 13, Look()))
    assert "watching sends no load" in text(latency.lines(WATCH, 80, 13, Look())) or WATCH.series.itl_p50_ms


def test_a_scale_is_kept_between_frames():
    """The look remembers the top, so that a smaller peak does not move the picture."""
    look = Look()
    latency.lines(LIVE, 80, 13, look)
    top = look.scales["latency"]
    lower = tuple(None if x is None else 0.6 * x for x in LIVE.series.itl_p99_ms)
    calm = msgspec.structs.replace(LIVE, series=msgspec.structs.replace(LIVE.series, itl_p99_ms=lower))
    latency.lines(calm, 80, 13, look)

    assert look.scales["latency"] == top == 50.0


def test_the_histogram_says_window_and_n_and_marks_percentiles_and_slo():
    """TTFT of the last 30 s, 96 samples; p99 is unknown and so has no mark."""
    rows = [plain(row) for row in ttft.lines(OPEN_LOOP, 100, 14, Look())]

    assert rows[0].endswith(" last 30 s, n 96 ─╮")
    assert "p50" in rows[1]
    assert "p95" in rows[1]
    assert "p99" not in rows[1]
    assert "SLO" in rows[1]


def test_figures_are_drawn_once_a_second_at_most():
    """Within a second of session time the figure before is shown, even if the counts moved on elsewhere."""
    look = Look()
    ttft.lines(LIVE, 80, 14, look)
    first = look.figures["ttft"][1]
    ttft.lines(msgspec.structs.replace(LIVE, t=LIVE.t + 300_000), 80, 14, look)
    assert look.figures["ttft"][1] is first
    ttft.lines(msgspec.structs.replace(LIVE, t=LIVE.t + 1_000_000), 80, 14, look)
    assert look.figures["ttft"][1] is not first


def test_before_the_first_paint_nothing_heavy_is_drawn():
    """A placeholder until plotext is there."""
    look = Look(figures_ready=False)
    rows = ttft.lines(LIVE, 80, 14, look)

    assert look.figures == {}
    assert "…" in text(rows)


@pytest.mark.parametrize(
    ("terms", "limit"),
    [(("ttft<500ms,tpot<50ms",), 500.0), (("tpot<50ms", "ttft<=1.5s"), 1500.0), (("e2e<5s",), None), ((), None)],
)
def test_the_slo_line(terms, limit):
    """Only TTFT's limit is drawn."""
    assert ttft.slo_ms(terms) == limit


# --- GPUs --------------------------------------------------------------------------------------------------------


def test_a_gpu_line_at_80_and_at_120_columns():
    """Utilisation, memory, power of its limit, clocks, temperature."""
    assert text(gpus.table(LIVE, 80, 1, Look())) == " GPU0 ████████▋·  86% 61.2G/140.0G 512/700 W 1980MHz 64°C -"
    head, row = text(gpus.table(LIVE, 120, 2, Look())).split("\n")
    assert head.split() == ["gpu", "name", "util", "memory", "power", "SM", "clock", "mem", "clock", "temp", "throttle"]
    assert row.split() == [
        "0", "H200", "███████▊·", "86%", "███▉·····", "61.2G/140.0G", "512/700", "W", "1980/1980", "MHz", "3201", "MHz",
        "64°C", "-",
    ]  # fmt: skip


def test_without_a_gpu_there_is_the_reason():
    """One sentence, in the table and in the panel."""
    assert "libnvidia-ml) was not found" in text(gpus.table(NO_GPU, 100, 1, Look()))
    assert "no GPU here" in text(gpus.lines(NO_GPU, 80, 8, Look()))


def test_many_gpus_are_summed_up():
    """Those without room in one line: how many, throttled, the busiest, the power of all."""
    rows = text(gpus.table(EIGHT, 80, 3, Look())).split("\n")

    assert rows[0].startswith(" GPU0")
    assert rows[2] == " +6 GPUs (4 z: all)   ! 1 throttled   max util 86% GPU0   total 4.10 kW"


def test_throttling_is_in_words_and_stale_samples_say_so():
    """The words the probe gives; the age beyond five seconds; a lost GPU by its status."""
    view = msgspec.structs.replace(
        LIVE,
        gpus=(gpu(0, throttle=("power cap", "thermal")), gpu(1, age_s=12.0), gpu(2, status="lost (Xid 79)")),
    )
    rows = text(gpus.table(view, 80, 3, Look())).split("\n")

    assert rows[0].endswith("! power cap, thermal")
    assert rows[1].endswith("12 s old -")
    assert rows[2] == " GPU2 H200 lost (Xid 79)"


def test_what_a_gpu_does_not_tell_is_a_dash():
    """No power limit, no clocks, no temperature."""
    view = msgspec.structs.replace(
        LIVE,
        gpus=(gpu(0, power_watts=None, power_limit_watts=None, sm_clock_mhz=None, temperature_c=None,
                  utilization_percent=None, memory_used_bytes=None),),
    )  # fmt: skip

    assert text(gpus.table(view, 80, 1, Look())) == " GPU0 ··········    – –/140.0G –/– W –MHz    –°C -"


def test_the_history_strip_is_a_cell_a_second():
    """0, 50 and 100 %, a hole where there was no sample, older seconds at the left."""
    found = gpu(0, utilization_history=(0.0, None, 50.0, 100.0))

    assert gpus.strip(found, 6) == "  ▁ ▄█"
    assert gpus.strip(found, 2) == "▄█"


# --- server, requests, events, levels ----------------------------------------------------------------------------


def test_the_server_line_warns_by_style_and_says_when_it_fails():
    """Waiting requests and a full cache stand out; an error is the line."""
    rows = server.one_line(LIVE, 100, 1, Look())
    assert text(rows) == " server running 16  waiting 3  KV 91%  prefix hits 12%  preempt 0 /s  out 1 290 tok/s"
    assert styles_of(rows, "91%") == {"warn"}
    assert styles_of(rows, "12%") == {"value"}
    broken = msgspec.structs.replace(LIVE.servers[0], ok=False, error="HTTP 503", age_s=7.0)
    view = msgspec.structs.replace(LIVE, servers=(broken,))
    assert text(server.one_line(view, 80, 1, Look())) == " server ! HTTP 503  7 s ago"


def test_requests_in_flight_say_what_they_wait_for():
    """Streaming, without a token for long, not sent yet."""
    shown = text(requests.lines(LIVE, 80, 8, Look())).split("\n")

    assert "requests in flight 16" in shown[0]
    assert "the 3 oldest" in shown[0]
    assert re.search(r"load0/631 +4\.2 s +140 ms +310  streams", shown[2])
    assert re.search(r"load0/640 +9\.5 s +– +0  ! no token for 9\.5 s", shown[3])
    assert "not sent yet" in shown[4]


def test_the_newest_events_are_at_the_end_under_the_verdicts():
    """Two verdicts, then the last line; errors and warnings with a sign."""
    shown = text(events.tail(STORM, 100, 3, Look())).split("\n")

    assert shown[0] == " ! errors dominate: 99% of the requests fail"
    assert shown[1] == " ! the client was the limit: its loop ran 40 ms late"
    assert shown[2].endswith("X rate_limited 429: slow down (×59)")


def test_a_replay_shows_positions_and_a_live_run_the_time_of_day():
    """What can be sought, and what other logs say."""
    assert events.when(REPLAY.events[1], REPLAY) == "00:01:12"
    assert re.fullmatch(r"\d\d:\d\d:12", events.when(LIVE.events[1], LIVE))


def test_the_event_list_scrolls_back():
    """Five lines up: that many are newer and below."""
    shown = text(events.lines(STORM, 80, 12, Look(scroll={"events": 5})))

    assert "5 newer below" in shown
    assert "(×54)" in shown
    assert "(×55)" not in shown


def test_levels_side_by_side():
    """Each load with its figures; what has no room is left out, never the load and the throughput."""
    shown = text(levels.lines(LIVE, 100, 8, Look())).split("\n")
    assert shown[1].split("│")[1].split() == [
        "load", "tok/s", "req/s", "TTFT", "p50", "TTFT", "p95", "ITL", "p50", "ITL", "p95", "n", "failed",
    ]  # fmt: skip
    assert shown[4].split("│")[1].split() == ["16", "1", "284", "3.20", "142", "227", "11.8", "18.9", "614", "0"]
    narrow = text(levels.lines(LIVE, 60, 8, Look())).split("\n")
    assert narrow[1].split("│")[1].split()[:2] == ["load", "tok/s"]
    assert "req/s" not in narrow[1]


def test_levels_with_room_have_the_knee():
    """Throughput against latency, each point named by its load."""
    shown = text(levels.lines(LIVE, 100, 24, Look()))

    assert "ITL p50 ms" in shown
    assert re.search(r"[⠀-⣿]+16\b|16[⠀-⣿]*", shown)


def test_the_card_has_what_matters_in_any_corner():
    """State first, then load, errors, latencies; what size is needed."""
    assert text(card.lines(LIVE, 30, 3, Look())).split("\n") == [
        "● LIVE 00:02:00",
        "conc 16 (16 in flight)",
        "err 0  REC",
    ]
    assert "40x10: need 60x16" in text(card.lines(LIVE, 40, 10, Look()))


def test_wide_names_keep_the_columns():
    """CJK and emoji in a model's and a GPU's name take their two cells."""
    (row,) = status.lines(WIDE_NAMES, 80, 1, Look())
    assert width_of(row) == 80
    assert "深度求索-v3 🚀" in plain(row)
    (line,) = gpus.table(WIDE_NAMES, 120, 1, Look())
    plain_line = gpus.table(LIVE, 120, 1, Look())[0]
    assert width_of(line) == width_of(plain_line)
