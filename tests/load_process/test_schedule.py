"""Due times by hand calculation, and what a schedule must keep whatever happens to it."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpxtop.load.schedule import ClosedLoop, OpenLoop, backoff_ns, share

S = 1_000_000_000
MS = 1_000_000


def due_times(schedule, count):
    """The next `count` due times in seconds."""
    return [schedule.take().due_ns / S for _ in range(count)]


@given(st.integers(0, 5000), st.integers(1, 64))
def test_shares_sum_to_the_target(total, workers):
    """The workers' parts sum to exactly the target and differ by at most one."""
    parts = [share(total, worker, workers) for worker in range(workers)]

    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize(
    ("failures", "milliseconds"), [(0, 0), (1, 0), (2, 50), (3, 100), (6, 800), (7, 1000), (500, 1000)]
)
def test_backoff(failures, milliseconds):
    """One failure costs nothing, the second 50 ms, doubling up to a second."""
    assert backoff_ns(failures) == milliseconds * MS


# --- open loop -----------------------------------------------------------------------------------------------------


def test_constant_rate_by_hand():
    """At 4 requests per second from second 10 on, they are due every quarter of a second, the first at once."""
    loop = OpenLoop(4.0, "constant")
    loop.resume(10 * S)

    assert due_times(loop, 5) == [10.0, 10.25, 10.5, 10.75, 11.0]


def test_a_slow_rate_is_exact():
    """0.2 requests per second is one every five seconds."""
    loop = OpenLoop(0.2, "constant")
    loop.resume(0)

    assert due_times(loop, 4) == [0.0, 5.0, 10.0, 15.0]


def test_constant_rate_does_not_drift():
    """The millionth request at 3 per second is due at 333,333 s, to the nanosecond."""
    loop = OpenLoop(3.0, "constant")
    loop.resume(0)
    for _ in range(1_000_000):
        turn = loop.take()

    assert turn.due_ns == 333_333 * S


def test_nothing_is_due_before_the_start():
    """Before the first resume nothing is due, in either loop."""
    for loop in (OpenLoop(100.0), OpenLoop(100.0, "constant"), ClosedLoop(5)):
        assert loop.next_due_ns() is None
        assert loop.waiting(100 * S) == 0


def test_a_rate_change_counts_from_the_change_on():
    """1 per second until 2.5 s, then 10 per second: the half interval that is left takes 50 ms, then every 100 ms."""
    loop = OpenLoop(1.0, "constant")
    loop.resume(0)
    assert due_times(loop, 3) == [0.0, 1.0, 2.0]

    loop.set_rate(10.0, 5 * S // 2)

    assert due_times(loop, 3) == pytest.approx([2.55, 2.65, 2.75], abs=1e-9)


def test_overdue_requests_keep_their_due_times_over_a_rate_change():
    """What was due before the change and not yet sent stays due when it was."""
    loop = OpenLoop(1.0, "constant")
    loop.resume(0)

    loop.set_rate(100.0, 5 * S // 2)

    assert due_times(loop, 5) == pytest.approx([0.0, 1.0, 2.0, 2.505, 2.515], abs=1e-9)


def test_rate_zero_and_back():
    """At rate 0 nothing is due; a new rate goes on from there."""
    loop = OpenLoop(1.0, "constant")
    loop.resume(0)
    loop.take()
    loop.set_rate(0.0, S // 2)
    assert loop.next_due_ns() is None

    loop.set_rate(1.0, 10 * S)

    assert loop.next_due_ns() == 10_500 * MS


def test_a_pause_moves_what_lies_ahead():
    """A pause of 7 s at 2.5 s: overdue and coming requests are due 7 s later, and nothing bunches up."""
    loop = OpenLoop(1.0, "constant")
    loop.resume(0)
    assert due_times(loop, 2) == [0.0, 1.0]
    loop.pause(5 * S // 2)
    assert loop.next_due_ns() is None
    assert loop.waiting(9 * S) == 0

    loop.resume(19 * S // 2)

    assert due_times(loop, 3) == pytest.approx([9.0, 10.0, 11.0], abs=1e-9)


def test_poisson_by_hand():
    """Gaps are exponential draws of the seeded generator, divided by the rate."""
    loop = OpenLoop(8.0, "poisson", seed=7)
    loop.resume(S)
    generator = random.Random("arrivals 7")
    t, expected = 0.0, []
    for _ in range(20):
        t += generator.expovariate(1.0)
        expected.append(1.0 + t / 8.0)

    assert due_times(loop, 20) == pytest.approx(expected, abs=2e-9)


def test_poisson_has_the_rate_and_spread_of_a_poisson_process():
    """Over 100 000 arrivals at 50 per second: the mean gap is 20 ms, and so is its standard deviation, within 1 %."""
    loop = OpenLoop(50.0, "poisson", seed=1)
    loop.resume(0)
    times = due_times(loop, 100_000)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5

    assert mean == pytest.approx(0.020, rel=0.01)
    assert deviation == pytest.approx(0.020, rel=0.01)


@pytest.mark.parametrize("kind", ["constant", "poisson"])
@pytest.mark.parametrize("workers", [2, 3, 7])
def test_workers_together_make_the_arrivals_of_one(kind, workers):
    """However many workers share a rate, the merged due times are those of a single one."""
    alone = OpenLoop(20.0, kind, seed=3)
    alone.resume(0)
    several = [OpenLoop(20.0, kind, seed=3, worker=index, workers=workers) for index in range(workers)]
    merged = []
    for loop in several:
        loop.resume(0)
        merged += due_times(loop, 30)

    assert sorted(merged)[:30] == pytest.approx(due_times(alone, 30), abs=2e-9)


@given(st.integers(0, 40), st.integers(0, 3000))
def test_waiting_counts_what_is_due(taken, now_ms):
    """`waiting` is the number of due times up to now that nobody took."""
    loop = OpenLoop(10.0, "constant")
    loop.resume(0)
    due_times(loop, taken)

    assert loop.waiting(now_ms * MS) == max(0, now_ms // 100 + 1 - taken)


# --- closed loop ---------------------------------------------------------------------------------------------------


def test_a_closed_loop_sends_again_when_a_request_ended():
    """Two users are due at the start; each is due again at the moment its request ended, not when it was noticed."""
    loop = ClosedLoop(2)
    loop.resume(S)
    first, second = loop.take(), loop.take()
    assert (first.due_ns, second.due_ns) == (S, S)
    assert loop.next_due_ns() is None

    loop.ended(second, 3 * S, True)

    assert loop.next_due_ns() == 3 * S


def test_a_ramp_by_hand():
    """Four users over four seconds come in one a second."""
    loop = ClosedLoop(4, 4.0)
    loop.resume(0)

    assert due_times(loop, 4) == [0.0, 1.0, 2.0, 3.0]


def test_two_workers_ramp_in_turn():
    """Two workers of two users each over four seconds: together one user a second."""
    loops = [ClosedLoop(2, 4.0, worker=index, workers=2) for index in (0, 1)]
    for loop in loops:
        loop.resume(0)

    assert [due_times(loop, 2) for loop in loops] == [[0.0, 2.0], [1.0, 3.0]]


def test_going_down_removes_idle_users_then_those_that_end():
    """From 4 users (3 in flight) to 2: the idle one goes, then the first to end is not replaced."""
    loop = ClosedLoop(4)
    loop.resume(0)
    turns = [loop.take() for _ in range(3)]

    loop.set_target(2, S)

    assert loop.next_due_ns() is None
    loop.ended(turns[0], 2 * S, True)
    assert loop.next_due_ns() is None
    loop.ended(turns[1], 3 * S, True)
    assert loop.next_due_ns() == 3 * S


def test_a_ramp_cut_short_forgets_the_late_comers():
    """Down to 2 in the middle of a ramp to 10: the users that would have come last never do."""
    loop = ClosedLoop(10, 10.0)
    loop.resume(0)
    loop.set_target(2, S // 2)

    assert due_times(loop, 2) == [0.0, 1.0]
    assert loop.next_due_ns() is None


def test_the_target_before_the_start_is_noted():
    """A target set before the first resume is the one the loop starts with."""
    loop = ClosedLoop(1)
    loop.set_target(3, 0)
    assert loop.next_due_ns() is None

    loop.resume(5 * S)

    assert due_times(loop, 3) == [5.0, 5.0, 5.0]


def test_a_failing_user_backs_off_and_recovers():
    """Failures in a row delay one user alone: 0, 50, 100 ms; a success resets it; the target never changes."""
    loop = ClosedLoop(1)
    loop.resume(0)
    delays = []
    for ok in (False, False, False, True, False):
        turn = loop.take()
        end_ns = turn.due_ns + S
        loop.ended(turn, end_ns, ok)
        delays.append((loop.next_due_ns() - end_ns) // MS)

    assert delays == [0, 50, 100, 0, 0]
    assert loop.target == 1


def test_a_pause_is_nobodys_delay():
    """Users that became idle before or in a pause are due when it ends."""
    loop = ClosedLoop(3)
    loop.resume(0)
    turns = [loop.take(), loop.take()]
    loop.pause(S)
    loop.ended(turns[0], 2 * S, True)
    assert loop.next_due_ns() is None

    loop.resume(9 * S)

    assert due_times(loop, 2) == [9.0, 9.0]


@given(st.lists(st.one_of(st.tuples(st.just("target"), st.integers(0, 20)), st.sampled_from(["take", "end"]))))
def test_in_flight_never_grows_beyond_the_target(steps):
    """Whatever the order of changes, sends and ends: a send never leaves more in flight than the target."""
    loop, flying = ClosedLoop(3), []
    loop.resume(0)
    for now, step in enumerate(steps):
        if isinstance(step, tuple):
            loop.set_target(step[1], now)
        elif step == "take" and loop.next_due_ns() is not None:
            flying.append(loop.take())
            assert len(flying) <= loop.target
        elif step == "end" and flying:
            loop.ended(flying.pop(0), now, True)
        if len(flying) < loop.target:
            assert loop.next_due_ns() is not None
