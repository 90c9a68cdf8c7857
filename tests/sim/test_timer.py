"""The step timer against the clock it promises to keep."""

import asyncio
import sys
import time
from statistics import median

import pytest

from lpxtop.sim import timer as sim_timer
from lpxtop.sim.timer import StepTimer


@pytest.fixture
async def timer():
    made = StepTimer()
    yield made
    made.close()


async def lateness_ms(timer, count=60, step_s=0.0023):
    """How late each of `count` waits of `step_s` ended; negative: early."""
    late, deadline = [], time.monotonic()
    for _ in range(count):
        deadline = max(deadline + step_s, time.monotonic())
        await timer.until(deadline)
        late.append(1000 * (time.monotonic() - deadline))
    return late


@pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")
async def test_it_wakes_on_time_and_never_early(timer):
    """Waits of 2.3 ms end within 0.4 ms (median), where asyncio's own sleep ends after 3 ms."""
    late = await lateness_ms(timer)

    assert min(late) >= 0
    assert median(late) < 0.4


async def test_without_a_timerfd_it_is_as_good_as_asyncio(monkeypatch):
    """Where the call is missing the waits still end, a millisecond or so late."""
    monkeypatch.setattr(sim_timer, "_timer", lambda: (-1, sim_timer._never))
    timer = StepTimer()
    late = await lateness_ms(timer, count=20)
    timer.close()

    assert median(late) < 3


async def test_a_deadline_that_has_passed_gives_way_once(timer):
    """It returns at once, after the loop had a turn."""
    turns = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    begin = time.monotonic()
    await timer.until(begin - 1)

    assert turns == [1]
    assert time.monotonic() - begin < 0.1


async def test_a_wait_can_be_cancelled_and_the_next_one_is_exact(timer):
    """A cancelled wait leaves nothing behind that ends the next one early."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await timer.until(time.monotonic() + 0.03)
    deadline = time.monotonic() + 0.06
    await timer.until(deadline)

    assert time.monotonic() >= deadline


async def test_close_gives_the_descriptor_back():
    """A hundred timers made and closed leave no descriptor behind; closing twice is harmless."""
    numbers = set()
    for _ in range(100):
        timer = StepTimer()
        numbers.add(timer._fd)
        timer.close()
        timer.close()

    assert len(numbers) == 1
