"""Gates: the grammar, and what a mistake in one says."""

import pytest

from lpxtop.errors import UsageError
from lpxtop.metrics.gates import parse


@pytest.mark.parametrize(
    ("text", "key", "figure", "op", "limit", "relative"),
    [
        ("p95 ttft > +10%", "ttft", "p95", ">", 10.0, True),
        ("p99 itl>=80ms", "itl", "p99", ">=", 80.0, False),
        ("P50 e2e > 1.5 s", "e2e", "p50", ">", 1500.0, False),
        ("output_tokens_per_s < -5%", "output_tokens_per_s", None, "<", -5.0, True),
        ("throughput < 100 tok/s", "output_tokens_per_s", None, "<", 100.0, False),
        ("error-rate > 1%", "error_rate", None, ">", 0.01, False),
        ("errors > +0.5%", "error_rate", None, ">", 0.5, True),
        ("goodput ≤ −3%", "goodput", None, "<=", -3.0, True),
    ],
)
def test_a_gate_says_metric_figure_comparison_and_limit(text, key, figure, op, limit, relative):
    """Latencies in ms, ratios as ratios, changes in percent; spelling is forgiving."""
    gate = parse(text)
    assert (gate.key, gate.figure, gate.op, gate.limit, gate.relative) == (
        key,
        figure,
        op,
        pytest.approx(limit),
        relative,
    )
    assert gate.text == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("p95 ttft", "is not [figure] metric comparison limit"),
        ("p95 tttf > 1ms", "no metric is called 'tttf'"),
        ("ttft > +10%", "needs a figure before it"),
        ("p42 ttft > +10%", "has no p42"),
        ("p95 ttft > 10%", "give a unit, ms or s; or a sign"),
        ("p95 ttft > +10ms", "a change needs %"),
        ("p95 ttft > 10", "give a unit"),
        ("p95 goodput < 3", "has no p95"),
        ("goodput < 5%", "say which way"),
        ("goodput < 5 ms", "is in req/s"),
        ("error_rate > 5 ms", "is a ratio"),
    ],
)
def test_a_mistake_is_named(text, says):
    """The error quotes the gate and says which part is wrong."""
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert text in str(caught.value)


def test_a_gate_fails_only_on_what_the_whole_interval_shows():
    """`> +10%` needs the lower end beyond it, `< -5%` the upper end."""
    slower, less = parse("p95 ttft > +10%"), parse("throughput < -5%")
    assert slower.proven(10.1, 30.0)
    assert not slower.proven(9.9, 30.0)
    assert less.proven(-9.0, -5.1)
    assert not less.proven(-9.0, -4.9)
