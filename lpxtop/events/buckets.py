"""Log buckets: the one grid on which every mergeable histogram of the product lies. Pure arithmetic.

Bucket b covers values v with 1.02**b <= v < 1.02**(b+1); its representative is the geometric middle, so a value
read back is within 1 % of the true one. Values below 1 fall into bucket 0.
"""

from math import log

GAMMA = 1.02
_INVERSE_LOG = 1 / log(GAMMA)
_ROOT: float = GAMMA**0.5


def bucket(value: float) -> int:
    """The bucket of a value (any unit; the product uses µs and ticks)."""
    return int(log(value) * _INVERSE_LOG) if value > 1 else 0


def value(index: int) -> float:
    """The value that stands for a bucket: the geometric middle of its edges."""
    return _ROOT * float(GAMMA**index)


def low_edge(index: int) -> float:
    """The smallest value of a bucket."""
    return float(GAMMA**index)
