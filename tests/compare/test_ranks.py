"""Rank tests against brute force and by hand; the corrections against their definitions."""

import random
from itertools import combinations, product
from statistics import median

import pytest

from lpxtop.metrics import ranks


def brute_force_p(a, b):
    """Two-sided p by counting, over every split of the values, how often U is as far from its mean."""
    values = [*a, *b]

    def far(chosen):
        group = [values[i] for i in chosen]
        rest = [values[i] for i in range(len(values)) if i not in chosen]
        u = sum((x > y) + 0.5 * (x == y) for x, y in product(group, rest))
        return abs(u - len(a) * len(b) / 2)

    observed = far(tuple(range(len(a))))
    splits = list(combinations(range(len(values)), len(a)))
    return sum(far(chosen) >= observed - 1e-9 for chosen in splits) / len(splits)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (3, 3), (5, 5), (4, 6), (6, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_mann_whitney_is_the_exact_test_by_enumeration(n, m, tied):
    """For small groups p equals the count over every possible split, with and without ties."""
    rng = random.Random(n * 10 + m)
    for _ in range(5):
        a = [rng.randrange(4) if tied else rng.random() for _ in range(n)]
        b = [rng.randrange(5) if tied else rng.random() + 0.3 for _ in range(m)]
        assert ranks.mann_whitney(a, b) == pytest.approx(brute_force_p(a, b), abs=1e-12)


def test_five_runs_a_side_reach_two_in_252():
    """Complete separation of 5 and 5 is p = 2 / C(10, 5)."""
    assert ranks.mann_whitney([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)


def test_large_groups_take_the_normal_approximation_close_to_the_exact():
    """Where both can be had they agree within 0.003."""
    rng = random.Random(3)
    a, b = [rng.gauss(0, 1) for _ in range(40)], [rng.gauss(0.4, 1) for _ in range(40)]
    both = ranks.midranks([*a, *b])
    u = sum(both[:40]) - 40 * 41 / 2
    exact = ranks.mann_whitney(a, b)
    assert ranks._approximate(both, 40, 40, u) == pytest.approx(exact, abs=0.003)
    assert 0 < exact < 1


def test_identical_values_say_nothing():
    """All values equal, or an empty side: p = 1."""
    assert ranks.mann_whitney([2.0] * 30, [2.0] * 30) == 1.0
    assert ranks.mann_whitney([], [1.0]) == 1.0


def test_hodges_lehmann_is_the_median_of_differences_with_the_exact_interval():
    """5 × 5: the third and the third-last of 25 sorted differences (P(U ≤ 2) = 4/252 ≤ 0.025 < 7/252)."""
    a, b = [1.0, 2.0, 4.0, 7.0, 11.0], [3.0, 5.0, 8.0, 12.0, 17.5]
    differences = sorted(y - x for x in a for y in b)
    assert ranks.hodges_lehmann(a, b) == (median(differences), differences[2], differences[22])


def test_holm_by_hand():
    """0.01, 0.04, 0.03 become 0.03, 0.06, 0.06."""
    assert ranks.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert ranks.holm([]) == []


def test_a_permuted_family_of_one_counts_splits():
    """One figure, 3 and 3, fully apart: the true split and its mirror are the only ones as far, 2 of 20."""
    assert ranks.permuted([([1.0, 1.1, 1.2], [2.0, 2.1, 2.2])], seed=0) == pytest.approx([2 / 20])


def test_a_permuted_family_finds_the_one_that_moved_with_five_runs():
    """Among 16 figures of noise one moved by 10 sigma: found, and the others are not."""
    rng = random.Random(1)
    family = [([rng.gauss(0, 0.02) for _ in range(5)], [rng.gauss(0, 0.02) for _ in range(5)]) for _ in range(15)]
    family.append(([rng.gauss(0, 0.02) for _ in range(5)], [rng.gauss(0.2, 0.02) for _ in range(5)]))
    adjusted = ranks.permuted(family, seed=0)
    assert adjusted[-1] == pytest.approx(2 / 252)
    assert min(adjusted[:-1]) > 0.05


def test_the_family_errs_at_its_level():
    """Ten independent figures without any difference: some adjusted p ≤ 0.05 in about 5 % of 200 families."""
    rng = random.Random(8)
    wrong = 0
    for _ in range(200):
        family = [([rng.gauss(0, 1) for _ in range(5)], [rng.gauss(0, 1) for _ in range(5)]) for _ in range(10)]
        wrong += min(ranks.permuted(family, seed=0)) <= 0.05
    assert wrong <= 20
