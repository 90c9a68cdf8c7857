"""The runner with the real client against a real server in the same loop: levels, phases, ends, and its frames."""

import asyncio
import itertools
import time
from contextlib import asynccontextmanager

import pytest
from load_process_server import Server

from lpxtop.events.commands import Start
from lpxtop.events.records import Arrivals, Finished, LoadSample, Mark, Phase, Request
from lpxtop.load.client import Client
from lpxtop.load.prompts import Prompts
from lpxtop.load.runner import Runner
from lpxtop.plan import Load, Negotiated, Plan, Secrets, Stop, Target, Warmup


class Run:
    """A runner at work: its events, and the moments the test looked at."""

    def __init__(self, url, worker=0, workers=1, prompts=Prompts, **plan):
        self.start = Start(
            plan=Plan(target=Target(url=url, model="m"), **plan),
            negotiated=Negotiated(),
            secrets=Secrets(),
            origin_ns=time.monotonic_ns(),
            src=f"load{worker}",
            worker=worker,
            workers=workers,
        )
        self.events = []
        self.client = Client(
            plan=self.start.plan, negotiated=self.start.negotiated, secrets=self.start.secrets,
            origin_ns=self.start.origin_ns, src=self.start.src,
        )  # fmt: skip
        made = prompts(self.start.plan, self.start.negotiated, worker=worker, workers=workers)
        self.runner = Runner(start=self.start, client=self.client, prompts=made, emit=self.events.append)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@asynccontextmanager
async def running(url, **plan):
    """A runner that has been told to send. It is awaited at the end, for 8 s at most."""
    run = Run(url, **plan)
    await run.client.start()
    task = asyncio.create_task(run.runner.run())
    try:
        run.runner.resume()
        yield run
        await asyncio.wait_for(task, 8)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await run.client.aclose()


async def until(condition, timeout=6.0):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)


# --- closed loop ---------------------------------------------------------------------------------------------------


async def test_the_level_is_reached_kept_and_left_without_a_cut():
    """From 4 to 12 to 2 users: the server sees each level and never more; going down lets every stream end."""
    async with Server(tokens=10, gap_s=0.01) as server, running(server.url, load=Load(concurrency=4)) as run:
        await until(lambda: server.in_flight == 4)
        await asyncio.sleep(0.2)
        assert server.most_in_flight == 4

        run.runner.set_concurrency(12)
        await until(lambda: server.in_flight == 12)
        await asyncio.sleep(0.2)
        assert server.most_in_flight == 12

        run.runner.set_concurrency(2)
        await until(lambda: server.in_flight == 2)
        server.most_in_flight = 0
        await asyncio.sleep(0.3)
        assert server.most_in_flight == 2
        run.runner.stop(5.0)

    assert all(seen.complete for seen in server.seen)
    assert {event.outcome for event in run.of(Finished)} == {"ok"}


async def test_events_and_the_servers_log_agree():
    """Requests and tokens of the events are those the server counted."""
    async with Server(tokens=7) as server, running(server.url, load=Load(concurrency=5), stop=Stop(requests=40)) as run:
        pass

    finished = run.of(Finished)
    assert sorted(event.request_id for event in finished) == sorted(seen.id for seen in server.seen)
    assert len(finished) == 40
    assert sum(event.output_tokens for event in finished) == sum(seen.tokens for seen in server.seen) == 280
    assert sum(sum(event.n) for event in run.of(Arrivals)) == 280
    assert run.of(LoadSample)[-1].due == run.of(LoadSample)[-1].sent == 40


def check_frames(events):
    """What must hold of every frame, whatever was measured."""
    owner, told, done, rank = {}, {}, set(), {Request: 0, Arrivals: 1, Finished: 2, LoadSample: 3}
    freed, last = set(), 0
    for event in events:
        if type(event) not in rank:
            continue
        assert rank[type(event)] >= last, "requests, arrivals, finished, load"
        last = rank[type(event)]
        if isinstance(event, Request):
            assert event.id not in done
            assert owner.setdefault(event.slot, event.id) == event.id, "a slot has one owner at a time"
            told[event.id] = event.sent
        elif isinstance(event, Arrivals):
            assert len(event.slot) == len(set(event.slot)) == len(event.n)
            assert sum(event.n) == len(event.gap)
            assert all(told[owner[slot]] is not None for slot in event.slot), "arrivals only of what was sent"
        elif isinstance(event, Finished):
            assert owner[event.slot] == event.id
            assert told[event.id] == event.sent
            done.add(event.id)
            freed.add(event.slot)
        else:
            for slot in freed:
                del owner[slot]
            freed, last = set(), 0
    assert done == set(told)
    assert [event.seq for event in events] == list(range(len(events)))


async def test_slots_are_never_ambiguous():
    """Over many short requests, level changes and cancellations: frames in order, one owner per slot, no gap in seq."""
    async with (
        Server(tokens=3, gap_s=0.002, first_s=0.001) as server,
        running(server.url, load=Load(concurrency=20), stop=Stop(duration_s=0.9)) as run,
    ):
        for level in (3, 40, 11, 25):
            await asyncio.sleep(0.15)
            run.runner.set_concurrency(level)
            run.runner.cancel()

    check_frames(run.events)
    assert len(run.of(Finished)) > 300
    assert {event.outcome for event in run.of(Finished)} <= {"ok", "cancelled"}
    assert max(event.slot for event in run.of(Request)) < 1000


async def test_gaps_sum_to_the_last_token():
    """A stream's gaps over all frames sum to its last token's time: rounding never accumulates."""
    async with Server(tokens=200, gap_s=0.003) as server, running(server.url, stop=Stop(requests=1)) as run:
        pass

    (finished,) = run.of(Finished)
    ticks = sum(sum(event.gap) for event in run.of(Arrivals))
    assert len(run.of(Arrivals)) > 1
    assert abs(ticks * 10 - finished.last_token_us) <= 6


async def test_starts_are_paced():
    """100 users at once: no turn of the loop starts more than 16."""
    turns, turn, counting = [], 0, True

    class Counting(Prompts):
        def take(self):
            turns.append(turn)
            return super().take()

    def next_turn():
        nonlocal turn
        turn += 1
        if counting:
            asyncio.get_running_loop().call_soon(next_turn)

    async with Server(tokens=1, first_s=0.2) as server:
        plan = {"load": Load(concurrency=100), "stop": Stop(requests=100), "prompts": Counting}
        async with running(server.url, **plan):
            next_turn()
            await until(lambda: server.in_flight == 100)
            counting = False

    assert max(turns.count(number) for number in set(turns)) <= 16
    assert len(turns) == 100


async def test_a_ramp_is_even():
    """Ten users over half a second: requests are due every 50 ms."""
    async with Server(tokens=1, first_s=2.0) as server:
        load = Load(concurrency=10, ramp_s=0.5)
        async with running(server.url, load=load) as run:
            await until(lambda: server.in_flight == 10)
            run.runner.stop(0.0)

    due = sorted(event.due for event in run.of(Finished))
    assert [b - a for a, b in itertools.pairwise(due)] == pytest.approx([50_000] * 9, abs=2)


async def test_pause_sends_nothing_and_cuts_nothing():
    """In a pause what is in flight ends and nothing new is sent; afterwards the level is back, and nobody was late."""
    async with Server(tokens=4, gap_s=0.01) as server, running(server.url, load=Load(concurrency=3)) as run:
        await until(lambda: len(server.seen) > 6)
        run.runner.pause()
        await until(lambda: server.in_flight == 0)
        seen = len(server.seen)
        await asyncio.sleep(0.4)
        assert len(server.seen) == seen
        run.runner.resume()
        await until(lambda: server.in_flight == 3)
        run.runner.stop(5.0)

    assert all(seen.complete for seen in server.seen)
    assert max(event.sent - event.due for event in run.of(Finished)) < 200_000


async def test_cancel_ends_what_is_in_flight_and_keeps_the_level():
    """Cancelled requests end as cancelled; as many new ones take their place."""
    async with Server(tokens=1, first_s=5.0) as server, running(server.url, load=Load(concurrency=4)) as run:
        await until(lambda: server.in_flight == 4)
        run.runner.cancel()
        await until(lambda: len(server.seen) == 8)
        run.runner.stop(0.0)

    assert sorted(event.outcome for event in run.of(Finished)) == ["cancelled"] * 4 + ["cut"] * 4


async def test_a_dead_server_is_not_hammered():
    """503 on everything for a second at 4 users: each backs off (0, 50, 100, 200, 400 ms …), none is lost."""
    async with (
        Server(status=503, error="overloaded") as server,
        running(server.url, load=Load(concurrency=4), stop=Stop(duration_s=1.0)) as run,
    ):
        pass

    assert 4 * 5 <= len(server.seen) <= 4 * 7
    assert {event.outcome for event in run.of(Finished)} == {"unavailable"}
    assert {event.target for event in run.of(LoadSample)} == {4}


async def test_a_mistake_of_ours_is_a_record_too():
    """A client that raises: the request has its finished line, the level is kept, nothing of the error's text leaks."""
    async with Server(tokens=1) as server, running(server.url, stop=Stop(requests=3)) as run:
        send, calls = run.client.send, itertools.count()

        async def sometimes(stream):
            if next(calls) == 1:
                raise RuntimeError("secret")
            return await send(stream)

        run.client.send = sometimes

    assert sorted(event.outcome for event in run.of(Finished)) == ["ok", "ok", "protocol_error"]
    assert {event.error_type for event in run.of(Finished)} == {None, "RuntimeError"}
    assert "secret" not in str(run.events)
    check_frames(run.events)


async def test_stop_before_anything_was_sent():
    """A session that is ended while READY: the load process ends at once."""
    async with Server() as server:
        run = Run(server.url)
        await run.client.start()
        task = asyncio.create_task(run.runner.run())
        await asyncio.sleep(0.05)
        run.runner.stop(30.0)
        await asyncio.wait_for(task, 1)
        await run.client.aclose()

    assert server.seen == []
    assert [type(event) for event in run.events] == [LoadSample]


@pytest.mark.parametrize(("status", "outcome"), [(401, "http_4xx"), (404, "http_4xx")])
async def test_a_refusal_repeated_ends_the_run(status, outcome):
    """Five times the same 401 or 404 at the very start: a mark of level error, code aborted, and the end."""
    async with (
        Server(status=status, error="no such thing") as server,
        running(server.url, load=Load(concurrency=1)) as run,
    ):
        pass

    (mark,) = run.of(Mark)
    assert (mark.level, mark.code) == ("error", "aborted")
    assert f"HTTP {status}: no such thing" in mark.text
    assert len(server.seen) == 5
    assert [event.outcome for event in run.of(Finished)] == [outcome] * 5


async def test_one_success_and_refusals_no_longer_end_it():
    """Refusals later in a run are results, not a reason to stop."""
    plan = {"load": Load(concurrency=5), "stop": Stop(requests=15)}
    async with Server(tokens=1, first_s=0.02) as server, running(server.url, **plan) as run:
        await until(lambda: server.seen)
        server.status = 404

    outcomes = [event.outcome for event in run.of(Finished)]
    assert run.of(Mark) == []
    assert sorted(set(outcomes)) == ["http_4xx", "ok"]
    assert outcomes.count("http_4xx") > 5
    assert len(outcomes) == 15


# --- open loop -----------------------------------------------------------------------------------------------------


async def test_constant_rate_keeps_its_due_times_into_a_slow_server():
    """40 requests per second into a server that needs half a second: due every 25 ms, sent in time, none waits."""
    async with Server(tokens=1, first_s=0.5) as server:
        load = Load(mode="constant", rate=40.0)
        async with running(server.url, load=load, stop=Stop(requests=20)) as run:
            pass

    due = sorted(event.due for event in run.of(Finished))
    assert [b - a for a, b in itertools.pairwise(due)] == pytest.approx([25_000] * 19, abs=1)
    assert max(event.sent - event.due for event in run.of(Finished)) < 40_000
    assert server.most_in_flight >= 8


async def test_a_rate_can_change():
    """5 per second, then 50 per second from the change on."""
    async with Server(tokens=1, first_s=0.0) as server:
        load = Load(mode="constant", rate=5.0)
        async with running(server.url, load=load, stop=Stop(requests=25)) as run:
            await until(lambda: len(server.seen) == 3)
            run.runner.set_rate(50.0)

    due = sorted(event.due for event in run.of(Finished))
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert gaps[:2] == pytest.approx([200_000] * 2, abs=1)
    assert gaps[3:] == pytest.approx([20_000] * 21, abs=1)
    assert run.of(LoadSample)[-1].rate == 50.0


# --- phases and ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [0, 1])
async def test_warm_up_by_requests(worker):
    """Six warm-up requests of two workers: three each, flagged, not counted; worker 0 tells when measuring begins."""
    async with Server(tokens=2) as server:
        plan = {"load": Load(concurrency=4), "stop": Stop(requests=8), "warmup": Warmup(requests=6)}
        async with running(server.url, worker=worker, workers=2, **plan) as run:
            pass

    requests = {event.id: event for event in run.of(Request)}
    assert [requests[id].warmup for id in sorted(requests)] == [True] * 3 + [False] * 4
    assert [event.warmup for event in sorted(run.of(Finished), key=lambda event: event.id)] == [True] * 3 + [False] * 4
    phases = [(event.name, event.t) for event in run.of(Phase)]
    assert phases == ([("measure", requests[3].due)] if worker == 0 else [])


async def test_warm_up_by_seconds():
    """What is due in the first 0.3 s is warm-up; the phase begins with the first request due after it."""
    async with Server(tokens=1, first_s=0.02) as server:
        plan = {"load": Load(mode="constant", rate=20.0), "stop": Stop(requests=5), "warmup": Warmup(duration_s=0.3)}
        async with running(server.url, **plan) as run:
            pass

    finished = sorted(run.of(Finished), key=lambda event: event.id)
    assert [event.warmup for event in finished] == [True] * 6 + [False] * 5
    (phase,) = run.of(Phase)
    assert phase.t == finished[6].due == finished[0].due + 300_000


async def test_duration_counts_from_the_first_measured_request():
    """0.2 s of warm-up, then 0.4 s: nothing is due later, the drain phase begins there, and streams may end."""
    async with Server(tokens=5, gap_s=0.02) as server:
        plan = {"load": Load(concurrency=2), "stop": Stop(duration_s=0.4), "warmup": Warmup(duration_s=0.2)}
        async with running(server.url, **plan) as run:
            pass

    measure, drain = run.of(Phase)
    assert (measure.name, drain.name) == ("measure", "drain")
    assert drain.t - measure.t == 400_000
    assert max(event.due for event in run.of(Finished)) < drain.t
    assert {event.outcome for event in run.of(Finished)} == {"ok"}
    assert all(seen.complete for seen in server.seen)


async def test_drain_then_cut():
    """A drain of 0.1 s: what ends in it is ok, the rest is cut, and its arrivals are not lost."""
    async with Server(tokens=100, gap_s=0.02) as server:
        plan = {"load": Load(concurrency=2), "stop": Stop(duration_s=0.3, drain_s=0.1)}
        async with running(server.url, **plan) as run:
            pass

    finished = run.of(Finished)
    assert [event.outcome for event in finished] == ["cut", "cut"]
    assert sum(event.chunks for event in finished) == sum(sum(event.n) for event in run.of(Arrivals)) > 20
    check_frames(run.events)


async def test_a_run_by_requests_waits_for_the_last_one():
    """The drain limit is for ends by time: a run of two requests gets both answers, however long they take."""
    async with Server(tokens=10, gap_s=0.05) as server:
        plan = {"load": Load(concurrency=2), "stop": Stop(requests=2, drain_s=0.01)}
        async with running(server.url, **plan) as run:
            pass

    assert [event.outcome for event in run.of(Finished)] == ["ok", "ok"]


async def test_a_worker_without_a_share_ends_at_once():
    """One request for two workers: the second has nothing to do and ends when told to send."""
    async with Server() as server, running(server.url, worker=1, workers=2, stop=Stop(requests=1)) as run:
        pass

    assert server.seen == []
    assert run.of(Finished) == []


async def test_load_samples_tell_the_truth():
    """In flight is what the server has, cumulative counts never fall, buckets hold one lateness per sent request."""
    async with Server(tokens=20, gap_s=0.02) as server, running(server.url, load=Load(concurrency=6)) as run:
        await until(lambda: len(run.of(LoadSample)) >= 4)
        run.runner.stop(3.0)

    samples = run.of(LoadSample)
    assert samples[1].in_flight == 6
    assert [sample.sent for sample in samples] == sorted(sample.sent for sample in samples)
    assert sum(sum(sample.send_lateness_us.values()) for sample in samples) == samples[-1].sent == len(server.seen)
    assert all(sample.in_flight + sum(sample.done.values()) == sample.due for sample in samples)
    assert sum(sample.events for sample in samples) == sum(seen.tokens for seen in server.seen)
    assert all(sample.cpu_us <= sample.wall_us * 1.5 for sample in samples)
    assert all(200_000 < sample.wall_us < 400_000 for sample in samples[1:-1])
    assert samples[1].rss_bytes > 1 << 20
    assert sum(samples[1].loop_lag_us.values()) > 10
