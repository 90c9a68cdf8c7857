"""The fold, on event lists small enough to work out by hand, and against the truth of random ones."""

import random
from typing import Any

import pytest
from metrics_streams import Worker, header, session

from lpxtop.events.records import (
    Arrivals,
    Control,
    End,
    Event,
    Finished,
    LoadSample,
    Mark,
    Phase,
    Request,
    Source,
    Unknown,
)
from lpxtop.metrics import exact
from lpxtop.metrics.state import RunState
from lpxtop.metrics.summary import summary

S = 1_000_000


def fold(*events: Event | Unknown, **options: Any) -> RunState:
    state = RunState(**options)
    for event in events:
        state.apply(event)
    return state


def request(id: int, sent: int | None, *, due: int | None = None, src: str = "load0", **fields: Any) -> Request:
    at = sent if due is None else due
    assert at is not None
    return Request(t=at, src=src, id=id, slot=fields.pop("slot", id), due=at, sent=sent, **fields)


def finished(id: int, sent: int, first_ms: int, last_ms: int, tokens: int, **fields: Any) -> Finished:
    about: dict[str, Any] = {
        "t": sent + last_ms * 1000, "src": "load0", "slot": id, "due": sent, "outcome": "ok",
        "first_event_us": first_ms * 1000, "first_token_us": first_ms * 1000, "last_token_us": last_ms * 1000,
        "end_us": last_ms * 1000, "chunks": tokens, "first_chunk_tokens": 1, "output_tokens": tokens,
        "input_tokens": 10, "token_source": "continuous_usage",
    }  # fmt: skip
    return Finished(id=id, sent=sent, **(about | fields))


def measure(t: int = 0, level: int = 0, n: int = 1) -> Phase:
    return Phase(t=t, name="measure", level=level, concurrency=n)


def one_request() -> list[Event]:
    """Sent at 1.0 s; tokens after 100, 120 and 150 ms."""
    return [
        header(), measure(), request(1, S, prompt_tokens=10),
        Arrivals(t=1_250_000, src="load0", slot=[1], n=[3], gap=[10_000, 2_000, 3_000]),
        finished(1, S, 100, 150, 3),
    ]  # fmt: skip


def test_one_request_by_hand() -> None:
    """TTFT 100 ms, gaps 20 and 30 ms, TPOT 25 ms, E2E 150 ms; the first gap is no ICL."""
    found = summary(fold(*one_request(), End(t=2 * S, reason="done")))["latency_ms"]
    assert found["ttft"]["p50"] == 100.0
    assert (found["icl"]["count"], found["icl"]["mean"], found["icl"]["max"]) == (2, 25.0, 30.0)
    assert found["itl"] == found["icl"]
    assert found["tpot"]["mean"] == 25.0
    assert found["e2e"]["mean"] == 150.0


def test_window_by_hand() -> None:
    """From the first due request at 1.0 s to the frame at 1.25 s: 3 tokens, 1 request, 10 prompt tokens in 0.25 s."""
    window = fold(*one_request()).view().window
    assert window.covered_s == pytest.approx(0.25)
    assert window.output_tokens_per_s == pytest.approx(12.0)
    assert window.requests_per_s == pytest.approx(4.0)
    assert window.input_tokens_per_s == pytest.approx(40.0)
    assert (window.due, window.ok, window.failed, window.error_rate) == (1, 1, 0, 0.0)
    assert window.ttft.p50 == pytest.approx(100, rel=0.01)


def test_prompt_tokens_follow_the_server() -> None:
    """Expected 10 when the first token came; the server says 12: the window shows 12, once."""
    events = one_request()
    events[-1] = finished(1, S, 100, 150, 3, input_tokens=12)
    assert fold(*events).view().window.input_tokens_per_s == pytest.approx(48.0)


def test_running_requests_show_their_ttft() -> None:
    """A first token counts in the window before the request ends."""
    assert fold(*one_request()[:-1]).view().window.ttft.count == 1


def test_open_requests_say_how_long_they_are_silent() -> None:
    """Sent at 1.0 s, last token at 1.15 s, now 4.0 s: silent for 2.85 s with 3 tokens."""
    view = fold(*one_request()[:-1], LoadSample(t=4 * S, src="load0")).view()
    assert view.open_count == 1
    stuck = view.open_requests[0]
    assert (stuck.age_s, stuck.silent_s, stuck.tokens, stuck.ttft_ms, stuck.sent) == (3.0, 2.85, 3, 100.0, True)


def test_a_due_request_that_waits_is_open_and_not_sent() -> None:
    """It ages from its due time and is counted as due, not as sent."""
    view = fold(header(), measure(), request(1, None, due=S), LoadSample(t=3 * S, src="load0", due_not_sent=1)).view()
    assert (view.load.due, view.load.sent, view.load.due_not_sent) == (1, 0, 1)
    assert (view.open_requests[0].sent, view.open_requests[0].age_s) == (False, 2.0)


def test_the_second_request_line_brings_the_sending() -> None:
    """One request told twice counts once, and its gaps are from when it was sent."""
    told = [
        header(), measure(), request(1, None, due=S), request(1, S + 50_000, due=S),
        Arrivals(t=1_250_000, src="load0", slot=[1], n=[1], gap=[10_000]),
    ]  # fmt: skip
    view = fold(*told).view()
    assert (view.load.due, view.load.sent, view.open_count) == (1, 1, 1)
    assert view.open_requests[0].ttft_ms == 100.0
    assert view.open_requests[0].silent_s == pytest.approx(0.1)


def test_sent_again_on_a_fresh_connection() -> None:
    """A third line with a later `sent` moves the clock of a request that has no chunk yet."""
    view = fold(
        header(), measure(), request(1, S), request(1, S + 20_000, due=S),
        Arrivals(t=1_250_000, src="load0", slot=[1], n=[1], gap=[10_000]),
    ).view()  # fmt: skip
    assert view.load.sent == 1
    assert view.t - view.open_requests[0].silent_s * 1e6 == S + 20_000 + 100_000


def test_tokens_per_chunk_split_the_gap() -> None:
    """A gap of 40 ms that brought 4 tokens is one ICL of 40 ms and four ITL of 10 ms; throughput counts tokens."""
    state = fold(
        header(), measure(), request(1, S),
        Arrivals(t=1_250_000, src="load0", slot=[1], n=[3], gap=[10_000, 4_000, 4_000], tokens=[(0, 2), (1, 4)]),
        finished(1, S, 100, 180, 7, chunks=3, first_chunk_tokens=2),
    )  # fmt: skip
    found = summary(state)
    assert (found["latency_ms"]["icl"]["count"], found["latency_ms"]["icl"]["mean"]) == (2, 40.0)
    itl = found["latency_ms"]["itl"]
    assert (itl["count"], itl["mean"], itl["p50"], itl["max"]) == (5, 16.0, 10.0, 40.0)  # 4 × 10 and 1 × 40
    assert found["latency_ms"]["tpot"]["mean"] == 16.0  # 80 ms over 7 − 2 tokens
    window = state.view().window
    assert window.output_tokens_per_s == pytest.approx(7 / 0.25)
    assert window.tokens_per_chunk == pytest.approx(7 / 3)
    assert window.itl.mean == pytest.approx(16.0, rel=0.01)


def test_final_usage_with_more_tokens_than_chunks() -> None:
    """nⱼ are unknown: ITL equals ICL and is not trusted, the live rate is chunks, tokens/s is usage of what finished,
    tpot takes n₁ = 1 and is flagged."""
    running = [
        header(), measure(), request(1, S),
        Arrivals(t=1_250_000, src="load0", slot=[1], n=[3], gap=[10_000, 4_000, 4_000]),
    ]  # fmt: skip
    ended = finished(1, S, 100, 180, 9, chunks=3, first_chunk_tokens=None, token_source="usage")
    state = fold(*running, ended)
    view = state.view()
    assert not view.itl_trusted
    assert view.window.itl == view.window.icl
    assert view.window.chunks_per_s == pytest.approx(12.0)
    assert view.window.output_tokens_per_s == pytest.approx(36.0)
    assert view.series.output_tokens_per_s == (None,)
    found = summary(state)
    assert found["latency_ms"]["tpot"]["mean"] == 10.0
    assert found["tokens"]["tpot_first_chunk_assumed"] == 1
    assert found["tokens"]["per_chunk_known"] is False
    assert found["throughput"]["output_tokens_by"] == "finished"
    assert "tokens_per_chunk" in [verdict.code for verdict in view.quality.verdicts]


def test_unknown_tokens_per_s_stay_unknown_until_something_finishes() -> None:
    """With usage at the end only and several tokens per chunk the rate is None, never the chunk rate in disguise."""
    first = finished(1, S, 100, 180, 9, chunks=3, first_chunk_tokens=None, token_source="usage")
    state = fold(
        header(), measure(), request(1, S), first, request(2, 50 * S),
        Arrivals(t=50_250_000, src="load0", slot=[2], n=[2], gap=[10_000, 4_000]),
    )  # fmt: skip
    window = state.view().window
    assert window.output_tokens_per_s is None
    assert window.chunks_per_s is not None


def test_an_end_token_without_a_chunk_does_not_spoil_trust() -> None:
    """Usage of 4 with 3 chunks (the end-of-sequence token has none) still means one token per chunk."""
    state = fold(
        *one_request()[:-1], finished(1, S, 100, 150, 4, chunks=3, first_chunk_tokens=None, token_source="usage")
    )
    assert state.view().itl_trusted
    assert state.view().token_source == "usage"


def test_failures_have_no_latency_but_their_gaps_count() -> None:
    """A truncated answer: its two gaps are ICL, its TTFT, TPOT and E2E are nowhere, its outcome is counted."""
    events = one_request()
    events[-1] = finished(1, S, 100, 150, 3, outcome="truncated")
    found = summary(fold(*events))
    assert found["requests"]["by_outcome"] == {"truncated": 1}
    assert (found["requests"]["failed"], found["requests"]["error_rate"]) == (1, 1.0)
    assert found["latency_ms"]["icl"]["count"] == 2
    for key in ("ttft", "ttft_due", "ttfo", "tpot", "e2e"):
        assert found["latency_ms"][key] == {
            "count": 0, "mean": None, "p50": None, "p90": None, "p95": None, "p99": None, "max": None
        }  # fmt: skip
    assert found["latency_ms"]["schedule_delay"]["count"] == 1


@pytest.mark.parametrize("outcome", ["cut", "cancelled"])
def test_cut_and_cancelled_are_no_errors(outcome: str) -> None:
    """Counted and shown, but neither in the error rate's numerator nor in a latency."""
    events = one_request()
    events[-1] = finished(1, S, 100, 150, 3, outcome=outcome)
    found = summary(fold(*events))
    assert found["requests"]["by_outcome"] == {outcome: 1}
    assert found["requests"]["error_rate"] == 0.0
    assert found["latency_ms"]["e2e"]["count"] == 0


def test_not_streamed_answers_have_a_wait_and_tokens() -> None:
    """E2E and throughput take them, as their end; TTFT and TPOT do not."""
    state = fold(
        header(), measure(), request(1, S),
        Finished(
            t=1_800_000, src="load0", id=1, slot=1, due=S, sent=S, outcome="not_streamed", end_us=800_000,
            output_tokens=40, input_tokens=10, token_source="usage",
        ),
    )  # fmt: skip
    found = summary(state)
    assert found["latency_ms"]["e2e"]["mean"] == 800.0
    assert found["latency_ms"]["ttft"]["count"] == 0
    assert found["throughput"]["request_tokens_per_s"]["mean"] == 50.0
    assert state.view().window.output_tokens_per_s == pytest.approx(40 / 0.8)
    assert "not_streaming" in [verdict["code"] for verdict in found["verdicts"]]


def test_a_buffered_answer_keeps_only_its_wait() -> None:
    """Ten chunks in one read: something gathered them; TTFT and TPOT are left out and a verdict says so."""
    state = fold(
        header(), measure(), request(1, S),
        Arrivals(t=1_500_000, src="load0", slot=[1], n=[10], gap=[40_000] + [0] * 9, same=list(range(1, 10))),
        finished(1, S, 400, 400, 10, coalesced=9),
    )  # fmt: skip
    found = summary(state)
    assert found["latency_ms"]["ttft"]["count"] == 0
    assert found["latency_ms"]["tpot"]["count"] == 0
    assert found["latency_ms"]["e2e"]["mean"] == 400.0
    assert "buffered" in found["quality"]["verdicts"]


def test_a_long_queue_before_a_short_answer_is_not_buffering() -> None:
    """20 s of queue, then 64 tokens 10 ms apart, each in its own read: that TTFT is what overload looks like."""
    gaps = [2_000_000] + [1_000] * 63
    state = fold(
        header(), measure(), request(1, S), Arrivals(t=22 * S, src="load0", slot=[1], n=[64], gap=gaps),
        finished(1, S, 20_000, 20_630, 64),
    )  # fmt: skip
    found = summary(state)
    assert found["latency_ms"]["ttft"]["mean"] == 20_000.0
    assert "buffered" not in found["quality"]["verdicts"]


def test_warmup_is_apart_everywhere() -> None:
    """Its requests, tokens, gaps, failures and errors are in no figure; only its number is told."""
    state = fold(
        header(), Phase(t=0, name="warmup", level=0, concurrency=1), request(1, S, warmup=True),
        Arrivals(t=1_250_000, src="load0", slot=[1], n=[3], gap=[10_000, 2_000, 3_000], tokens=[(1, 4)]),
        finished(1, S, 100, 150, 3, warmup=True, outcome="http_5xx"),
    )  # fmt: skip
    view, found = state.view(), summary(state)
    assert (view.window.due, view.window.failed, view.window.icl.count, view.window.ttft.count) == (0, 0, 0, 0)
    assert view.series.failed in ((), (0,))
    assert found["requests"]["due"] == 0
    assert found["requests"]["warmup"] == 1
    assert found["latency_ms"]["icl"]["count"] == 0
    assert found["tokens"]["output"] is None
    assert not any(line.code == "E" for line in view.events)


def test_two_sources_with_the_same_slots_do_not_mix() -> None:
    """Slot 1 of load0 was sent at 1.0 s, slot 1 of load1 at 1.1 s: each TTFT counts from its own sending."""
    state = fold(
        header(), measure(), request(1, S), request(1, S + 100_000, src="load1"),
        Arrivals(t=1_250_000, src="load0", slot=[1], n=[1], gap=[20_000]),
        Arrivals(t=1_250_000, src="load1", slot=[1], n=[1], gap=[5_000]),
    )  # fmt: skip
    ttft = {opened.source: opened.ttft_ms for opened in state.view().open_requests}
    assert ttft == {"load0": 200.0, "load1": 50.0}
    assert state.view().load.due == 2


def test_samples_of_several_load_processes_add_up() -> None:
    """Target 8 + 4 and in flight 7 + 3; one that left no longer counts."""
    events = [
        header(), Source(t=1, src="a", kind="load", state="joined"), Source(t=1, src="b", kind="load", state="joined"),
        LoadSample(t=250_000, src="a", target=8, in_flight=7), LoadSample(t=250_000, src="b", target=4, in_flight=3),
    ]  # fmt: skip
    load = fold(*events).view().load
    assert (load.applied, load.in_flight, load.workers) == (12, 10, 2)
    load = fold(*events, Source(t=300_000, src="b", seq=1, kind="load", state="left")).view().load
    assert (load.applied, load.in_flight, load.workers) == (8, 7, 1)


def test_a_late_event_lands_in_its_own_second() -> None:
    """A frame that comes 5 s late counts in the seconds of its arrivals, not of its coming."""
    on_time = fold(*one_request(), LoadSample(t=7 * S, src="load0"))
    late = fold(*one_request()[:3], LoadSample(t=7 * S, src="load0"), *one_request()[3:])
    assert late.view().series == on_time.view().series
    assert late.view().window == on_time.view().window
    assert late.view().t == 7 * S


def test_arrivals_are_split_at_the_second() -> None:
    """Tokens at 1.9, 1.99 and 2.1 s: two in the first second and one in the next."""
    state = fold(
        header(), measure(), request(1, 1_800_000),
        Arrivals(t=2_250_000, src="load0", slot=[1], n=[3], gap=[10_000, 9_000, 11_000]),
    )  # fmt: skip
    assert [slot.chunks for slot in state.ring] == [2, 1]
    assert [sum(slot.icl.values()) for slot in state.ring] == [1, 1]


def test_dropped_arrivals_are_counted_and_never_invent_a_ttft() -> None:
    """The frame with the first tokens is missing: no TTFT is made up, the hole is shown, finished brings the truth."""
    events = [
        header(), measure(), Request(t=S, src="load0", seq=0, id=1, slot=1, due=S, sent=S),
        Arrivals(t=1_500_000, src="load0", seq=2, slot=[1], n=[2], gap=[2_000, 2_000]),
    ]  # fmt: skip
    view = fold(*events).view()
    assert view.quality.dropped_events == 1
    assert view.window.ttft.count == 0
    assert view.window.icl.count == 1
    assert view.open_requests[0].silent_s == 0.0
    found = summary(fold(*events, finished(1, S, 100, 500, 9, seq=3)))
    assert found["latency_ms"]["ttft"]["mean"] == 100.0
    assert "dropped_events" in found["quality"]["verdicts"]


def test_the_source_may_count_its_own_drops() -> None:
    """Drops that the load process reports are not added to the holes they left."""
    view = fold(
        header(), LoadSample(t=S, src="load0", seq=0), LoadSample(t=2 * S, src="load0", seq=4, dropped_events=3)
    ).view()
    assert view.quality.dropped_events == 3


def test_an_empty_run_gives_nulls() -> None:
    """A header and an end: every figure that was not measured is None, not 0."""
    state = fold(header(), End(t=S, reason="done"))
    found, view = summary(state), state.view()
    assert found["requests"]["due"] == 0
    assert found["requests"]["error_rate"] is None
    for name in ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "chunks_per_s", "energy_per_token_j"):
        assert found["throughput"][name] is None
    assert found["tokens"]["output"] is None
    assert found["slo"] == {"terms": [], "attainment": None, "goodput_requests_per_s": None}
    assert found["quality"]["read_delay_us"] == {"p50": None, "p99": None}
    assert found["quality"]["coalesced_ratio"] is None
    assert found["run"]["duration_s"] is None
    assert (view.window.output_tokens_per_s, view.window.error_rate) == (None, None)
    assert view.phase == "ended"


def test_a_run_that_only_fails() -> None:
    """Ten refused connections: ten errors, one event line with its count, no latency, no throughput figure but 0."""
    failures = [
        Finished(t=(1 + n) * S, src="load0", id=n, slot=0, due=n * S, outcome="connect_error", error="refused :8000")
        for n in range(1, 11)
    ]
    requests = [request(n, None, due=n * S, slot=0) for n in range(1, 11)]
    events = [event for pair in zip(requests, failures, strict=True) for event in pair]
    state = fold(header(), measure(), *events, End(t=12 * S, reason="done"))
    found = summary(state)
    assert found["requests"] == {
        "due": 10, "sent": 0, "ok": 0, "failed": 10, "cancelled": 0, "cut": 0, "open": 0,
        "by_outcome": {"connect_error": 10}, "error_rate": 1.0, "warmup": 0,
    }  # fmt: skip
    assert all(row["count"] == 0 and row["mean"] is None for row in found["latency_ms"].values())
    assert found["throughput"]["requests_per_s"] == 0.0
    errors = [line for line in state.view().events if line.code == "E"]
    assert [line.text for line in errors] == ["connect_error: refused :8000 (×10)"]


def test_slo_and_goodput_by_hand() -> None:
    """Three due: one good, one slow, one failed; a cut one does not count. Attainment 1/3 (due, minus cut)."""
    state = fold(
        header(slo=["ttft<150ms"]), measure(),
        *(request(n, S) for n in range(4)),
        finished(0, S, 100, 900, 3), finished(1, S, 200, 900, 3), finished(2, S, 100, 900, 3, outcome="stall"),
        finished(3, S, 100, 900, 3, outcome="cut"), LoadSample(t=2 * S, src="load0"),
        Phase(t=2 * S, name="drain", level=0),
    )  # fmt: skip
    found = summary(state)["slo"]
    assert found["terms"] == ["ttft<150ms"]
    assert (found["good"], found["judged"]) == (1, 3)
    assert found["attainment"] == pytest.approx(1 / 3)
    assert found["goodput_requests_per_s"] == pytest.approx(1.0)  # one in the second from the first due to the end
    assert state.view().window.goodput_requests_per_s == pytest.approx(1.0)


def test_event_list() -> None:
    """Load changes are C1, C2; notes m1; they are the marks of the charts, in order of time."""
    view = fold(
        header(), Control(t=S, what="concurrency", before=1, after=8), Mark(t=4 * S, text="\x1b[31mred\x07 flag"),
        Control(t=3 * S, what="concurrency", before=8, after=64, by="api"), Control(t=5 * S, what="pause"),
        Mark(t=6 * S, text="restarted", level="warn", code="server_restart"),
    ).view()  # fmt: skip
    assert [(line.code, line.text) for line in view.events] == [
        ("C1", "concurrency 1 → 8"), ("C2", "concurrency 8 → 64 (api)"), ("m1", "[31mred flag"), (None, "pause"),
        ("server_restart", "restarted"),
    ]  # fmt: skip
    assert view.marks == ((S, "C1"), (3 * S, "C2"), (4 * S, "m1"))
    assert view.load.target == 64


def test_bursts_of_errors_are_gathered_by_kind_and_time() -> None:
    """The same message with other ids is one line; after ten quiet seconds a new line begins."""

    def failure(id: int, t: int, text: str) -> Finished:
        return Finished(t=t, src="load0", id=id, slot=0, due=t, outcome="http_5xx", status=503, error=text)

    view = fold(
        header(), failure(1, S, "worker 17 died"), failure(2, 2 * S, "worker 4 died"), failure(3, 3 * S, "no memory"),
        failure(4, 30 * S, "worker 5 died"),
    ).view()  # fmt: skip
    assert [line.text for line in view.events] == [
        "http_5xx 503: worker 17 died (×2)", "http_5xx 503: no memory", "http_5xx 503: worker 5 died"
    ]  # fmt: skip


def test_the_event_list_is_bounded() -> None:
    """Of 500 notes the last 200 stay."""
    view = fold(header(), *(Mark(t=n, text=str(n)) for n in range(500))).view()
    assert len(view.events) == 200
    assert view.events[-1].text == "499"


def test_unknown_kinds_are_ignored_and_counted() -> None:
    """A newer version's event changes nothing that is shown."""
    state = fold(*one_request())
    before = state.view()
    state.apply(Unknown(t=9 * S, k="energy_price", raw={"k": "energy_price", "t": 9 * S}, src="x", seq=4))
    assert state.view() == before
    assert state.unknown_events == 1


@pytest.mark.parametrize(
    "frame",
    [
        Arrivals(t=S, src="load0", slot=[1], n=[2], gap=[1]),
        Arrivals(t=S, src="load0", slot=[1, 2], n=[1], gap=[1]),
        Arrivals(t=S, src="load0", slot=[1], n=[0], gap=[]),
        Arrivals(t=S, src="load0", slot=[9], n=[1], gap=[5]),
        Arrivals(t=S, src="load0", slot=[1], n=[1], gap=[5], tokens=[(7, 3)], same=[99]),
        Arrivals(t=S, src="load0", slot=[1], n=[2], gap=[50, -3]),
        Arrivals(t=S, src="load0", slot=[1], n=[1], gap=[10**15]),
    ],
)
def test_damaged_frames_do_no_harm(frame: Arrivals) -> None:
    """A frame that contradicts itself or names unknown slots never raises and never makes negative counts."""
    state = fold(header(), measure(), request(1, S // 2), frame, LoadSample(t=2 * S, src="load0"))
    view = state.view()
    assert view.window.icl.count >= 0
    assert len(view.series.failed) <= 300
    summary(state)


def test_memory_of_the_screen_does_not_grow_with_time() -> None:
    """After 20 minutes with 100 level changes the ring holds 300 s and old levels hold only their figures."""
    state = RunState(exact=False)
    state.apply(header())
    for n in range(1200):
        t = n * S
        if n % 12 == 0:
            state.apply(measure(t, level=n // 12, n=n // 12 + 1))
        state.apply(request(n, t))
        state.apply(Arrivals(t=t + 250_000, src="load0", slot=[n], n=[2], gap=[5_000, 3_000]))
        state.apply(finished(n, t, 50, 80, 2))
    assert len(state.ring.slots) == 300
    assert len(state.timeline.parts) < 70
    assert not state.streams.by_id
    old = [level for level in state.timeline.levels.values() if level.frozen is not None]
    assert len(old) >= 95
    assert all(not level.icl and not level.ttft for level in old)
    assert state.view().levels[3].icl.count > 0


@pytest.mark.parametrize("seed", range(6))
def test_gaps_add_up_to_the_wait(seed: int) -> None:
    """Σ gaps = e2e − ttft for every request, exactly in ticks: pooled, the counts of a whole session say so too."""
    rng = random.Random(seed)
    worker = Worker("load0", rng)
    state = fold(header(), measure())
    for t in range(250_000, 20 * S, 250_000):
        for slot in range(4):
            if slot not in worker.live:
                worker.begin(t, slot, False, 1)
        for event in worker.frame(t):
            state.apply(event)
            if isinstance(event, Finished):
                made = next(made for made in worker.truth if made["id"] == event.id)
                assert event.last_token_us is not None
                assert event.first_token_us is not None
                assert sum(b - a for a, b in zip(made["ticks"], made["ticks"][1:], strict=False)) * 10 == (
                    event.last_token_us - event.first_token_us
                )
    told = [made for made in worker.truth if made["at"]]
    expected = sum(made["ticks"][made["at"] - 1] - made["ticks"][0] for made in told)
    assert state.exact is not None
    gaps = {tick: n for place in state.exact.all() for tick, n in place.gaps.items()}
    total = sum(tick * n for place in state.exact.all() for tick, n in place.gaps.items())
    assert gaps
    assert total == expected
    chunks, _, _ = exact.arrived(state.exact.all())
    assert chunks == sum(made["at"] for made in told)


@pytest.mark.parametrize("seed", range(4))
def test_a_session_against_its_truth(seed: int) -> None:
    """Counts, tokens, TTFT and gaps of a random session (without lost frames) equal what its load processes made."""
    events = session(seed, seconds=30, trouble=False)
    ended = [event for event in events if isinstance(event, Finished) and not event.warmup]
    found = summary(fold(*events))
    ok = [event for event in ended if event.outcome == "ok"]
    assert found["requests"]["ok"] == len(ok)
    assert sum(found["requests"]["by_outcome"].values()) == len(ended)
    assert found["tokens"]["output"] == sum(event.output_tokens or 0 for event in ended)
    streamed = [event for event in ok if event.first_token_us is not None]
    mean = sum(event.first_token_us or 0 for event in streamed) / len(streamed) / 1000
    assert found["latency_ms"]["ttft"]["count"] == len(streamed)
    assert found["latency_ms"]["ttft"]["mean"] == pytest.approx(mean)
