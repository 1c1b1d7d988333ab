"""Medians with intervals, ties, and the order in which candidates take turns."""

import math
import statistics
from collections.abc import Sequence

# Two-sided 95 % quantiles of Student's t for 1, 2, 3, 4 degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776)
WIDE = 0.1  # half an interval, as a share of the median, from which on times that overlap are inconclusive
MIN_ORDER_SAMPLES = 6  # the range of n samples holds the median with probability 1 - 2^(1-n); 96.9 % at 6


def median_ci95(samples: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median of `samples` and a 95 % interval of the distribution's median.

    From six samples on, the interval is made of the narrowest symmetric pair of order statistics whose coverage is at
    least 95 % whatever the distribution: P(l <= Binomial(n, 1/2) < n+1-l) for ranks l and n+1-l (Conover, Practical
    Nonparametric Statistics, 3.2). Two to five samples cannot give that; the interval is then Student's t about the
    median, clipped at 0, which supposes normal noise. One sample: no width. ValueError for none."""
    n = len(samples)
    if n == 0:
        raise ValueError("samples: expected at least one, got none")
    middle = statistics.median(samples)
    if n == 1:
        return middle, (middle, middle)
    if n < MIN_ORDER_SAMPLES:
        half = _T95[n - 2] * statistics.stdev(samples) / math.sqrt(n)
        return middle, (max(middle - half, 0.0), middle + half)
    ordered = sorted(samples)
    tail, rank = 0.5**n, 0  # tail = P(Binomial(n, 1/2) <= rank)
    while tail + math.comb(n, rank + 1) * 0.5**n <= 0.025:
        rank += 1
        tail += math.comb(n, rank) * 0.5**n
    return middle, (ordered[rank], ordered[n - 1 - rank])


def overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Whether two closed intervals share a point."""
    return first[0] <= second[1] and second[0] <= first[1]


def is_tie(time_1: float, ci_1: tuple[float, float], time_2: float, ci_2: tuple[float, float]) -> bool:
    """Whether two medians cannot be told apart: their intervals overlap, or they differ by less than 1 %."""
    return overlap(ci_1, ci_2) or abs(time_1 - time_2) < 0.01 * min(time_1, time_2)


def too_wide(time: float, ci95: tuple[float, float]) -> bool:
    """Whether a time says too little to call anything a tie: its interval reaches further than `WIDE` from it."""
    return max(ci95[1] - time, time - ci95[0]) > WIDE * time


def log_half_width(value: float, ci95: tuple[float, float]) -> float:
    """Half a 95 % interval in the logarithm: the larger side, for intervals of medians are not symmetric."""
    low, high = ci95
    return max(math.log(value / low), math.log(high / value), 0.0) if low > 0 else math.inf


def turn_order(count: int, round_index: int) -> tuple[int, ...]:
    """The order of `count` candidates in one round: a row of a Williams design (Australian J. Sci. Research A2, 1949).
    Over `count` rounds (2 * count where it is odd) every candidate stands at every place equally often, and follows
    every other one equally often, so that the heat and clocks its predecessor leaves behind favour none."""
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    row = [(x + round_index) % count for x in zigzag]
    if count % 2 and (round_index // count) % 2:
        row.reverse()
    return tuple(row)
