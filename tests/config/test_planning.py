"""Settings to plans: what is given, what is left to the plan, and what contradicts itself."""

import pytest

from lpxtop.errors import UsageError
from lpxtop.plan import Load, Plan, Step, Stop, Target, Warmup
from lpxtop.planning import make_plan

TARGET = Target(url="http://h/v1")


def plan(**settings):
    return make_plan(TARGET, settings)


def test_nothing_given_is_the_plans_own_defaults():
    """An empty set of settings is the default plan."""
    assert plan() == Plan(target=TARGET)


def test_settings_reach_their_fields():
    """One of each kind."""
    made = plan(concurrency=8, requests=100, duration=30.0, warmup=5, max_tokens=64, prompt_tokens=512, no_stream=True,
                slo=("ttft<500ms, tpot<50ms",), tag=("change=fp8",), settle=1.0, connect_timeout=3.0)  # fmt: skip

    assert made.load == Load(concurrency=8)
    assert made.stop == Stop(requests=100, duration_s=30.0)
    assert made.warmup == Warmup(requests=5)
    assert (made.sampling.max_tokens, made.sampling.stream, made.prompts.tokens) == (64, False, 512)
    assert made.slo == ("ttft<500ms", "tpot<50ms")
    assert made.tags == {"change": "fp8"}
    assert (made.settle_s, made.limits.connect_s) == (1.0, 3.0)


def test_a_rate_is_open_loop_and_poisson_unless_said():
    """--rate alone is Poisson; --arrival constant makes it constant."""
    assert plan(rate=5.0).load == Load(mode="poisson", rate=5.0)
    assert plan(rate=5.0, arrival="constant").load.mode == "constant"


def test_the_slider_reaches_what_was_asked_for():
    """A concurrency above the default end of the slider moves that end."""
    assert plan(concurrency=5000).load.max_concurrency == 5000


def test_profiles_of_concurrency_and_of_rate():
    """Steps are read in order; the load begins with the first one."""
    closed = plan(profile="8@30s, 16@1m,2000@500ms").load
    opened = plan(profile="0.5rps@10s,4rps@10s", arrival="constant").load

    assert closed.profile == (Step(duration_s=30, concurrency=8), Step(duration_s=60, concurrency=16),
                              Step(duration_s=0.5, concurrency=2000))  # fmt: skip
    assert (closed.mode, closed.concurrency, closed.max_concurrency) == ("closed", 8, 2000)
    assert (opened.mode, opened.rate, opened.profile[1].rate) == ("constant", 0.5, 4.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"rate": 2.0, "concurrency": 4},
        {"arrival": "constant"},
        {"profile": "8"},
        {"profile": "x@3s"},
        {"profile": "0@3s"},
        {"profile": "8@soon"},
        {"profile": "8@3s,2rps@3s"},
        {"profile": "8@3s", "concurrency": 8},
        {"tag": ("novalue",)},
        {"prompts": "/nonexistent"},
    ],
)
def test_contradictions_and_mistakes_are_usage_errors(settings):
    """What cannot be meant is refused with one line."""
    with pytest.raises(UsageError):
        plan(**settings)
