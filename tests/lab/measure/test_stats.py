"""The arithmetic of medians, intervals, ties and turns."""

import math
import random
from collections import Counter
from itertools import pairwise

import pytest

from expertile.lab.measure.stats import is_tie, median_ci95, turn_order


def coverage(n, rank):
    """P(X_(rank) <= median <= X_(n-1-rank)), 0-based, from the binomial distribution."""
    return 1 - 2 * sum(math.comb(n, i) for i in range(rank + 1)) / 2**n


@pytest.mark.parametrize("n", [6, 7, 9, 20, 21, 100, 201])
def test_order_interval_covers_95_percent_and_is_the_narrowest_that_does(n):
    middle, (low, high) = median_ci95([float(i) for i in range(n)])
    rank = int(low)
    assert high == n - 1 - rank
    assert middle == (n - 1) / 2
    assert coverage(n, rank) >= 0.95
    assert coverage(n, rank + 1) < 0.95


def test_interval_holds_the_true_median_of_a_skewed_distribution():
    rng = random.Random(0)
    hits = 0
    for _ in range(400):
        _, (low, high) = median_ci95([rng.expovariate(1.0) for _ in range(25)])
        hits += low <= math.log(2) <= high
    assert hits / 400 > 0.92


def test_few_samples_get_a_wide_interval():
    middle, (low, high) = median_ci95([1.0, 1.1, 1.2])
    assert middle == 1.1
    assert high - middle == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert low == pytest.approx(middle - (high - middle))
    assert median_ci95([2.0]) == (2.0, (2.0, 2.0))
    with pytest.raises(ValueError, match="samples: expected at least one"):
        median_ci95([])


def test_ties():
    assert is_tie(1.0, (0.9, 1.1), 1.2, (1.05, 1.3))
    assert is_tie(1.0, (1.0, 1.0), 1.009, (1.009, 1.009))
    assert not is_tie(1.0, (0.99, 1.01), 1.2, (1.19, 1.21))
    assert not is_tie(1.2, (1.19, 1.21), 1.0, (0.99, 1.01))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_turns_balance_places_and_predecessors(count):
    rounds = count if count % 2 == 0 else 2 * count
    orders = [turn_order(count, r) for r in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    places = Counter((place, who) for order in orders for place, who in enumerate(order))
    assert set(places.values()) == {rounds // count} and len(places) == count * count
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert len(follows) == count * (count - 1) and len(set(follows.values())) == 1


def test_a_single_candidate_has_its_turn():
    assert turn_order(1, 0) == turn_order(1, 5) == (0,)
