"""The log grid."""

from hypothesis import given
from hypothesis import strategies as st

from lpxtop.events import buckets


@given(st.floats(1, 1e10))
def test_a_value_read_back_is_within_one_percent(value):
    """The representative of a value's bucket is within 1 % of the value."""
    assert abs(buckets.value(buckets.bucket(value)) / value - 1) < 0.0101


@given(st.floats(1.05, 1e9))
def test_a_value_lies_inside_its_bucket(value):
    """The edges of a value's bucket enclose it, to rounding."""
    index = buckets.bucket(value)

    assert buckets.low_edge(index) <= value * (1 + 1e-9)
    assert value <= buckets.low_edge(index + 1) * (1 + 1e-9)
