"""Laws of tables: a product of powers of several columns that is one constant in all rows but one. It asks.

TFLOP/s · ms / (tokens · top_k · hidden · ffn) is such, and so are the rates and times of two kernels on the same work.
`tables.proportions` has those of up to three columns.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import median_high

from expertile.audit.finding import QUESTION, Finding
from expertile.audit.quantity import same_statistic
from expertile.audit.records import Named, Sheet, sheets
from expertile.audit.report import Report
from expertile.audit.units import RATES

_TIMES = ("time", "s_per_item")
_MOST, _CLOSE, _ODD = 9, 0.004, 0.05
# Of a rate and a bandwidth of one time, whose bytes hold a little more than the columns say.
_ROUGHLY, _FAR = 0.08, 0.25


def laws(report: Report) -> Iterator[Finding]:
    for s in (s for s in sheets(report) if 5 < len(s.rows) < 80):
        columns = [c for c in s.numeric if _usable([row[c] for row in s.rows])]
        if len(columns) <= _MOST:
            yield from _sheet(s, columns)


def _usable(cells: Sequence[Named]) -> bool:
    values = [f.value for f in cells]
    return min(values) > 0 and max(values) > 1.08 * min(values) and len({f.kind for f in cells}) == 1


def _sheet(s: Sheet, columns: list[int]) -> Iterator[Finding]:
    logs = {c: [math.log(row[c].value) for row in s.rows] for c in columns}
    offs = {c: [row[c].off / row[c].value for row in s.rows] for c in columns}
    kinds = {c: s.rows[0][c].kind for c in columns}
    rates = [c for c in columns if kinds[c] in RATES]
    asked = set[int]()
    for n, first in itertools.product((3, 4, 5, 6), rates):
        alike = [c for c in columns if c != first and same_statistic(s.header[first], s.header[c])]
        for others in itertools.combinations(alike, n - 1):
            for signs in itertools.product((1, -1), repeat=n - 1):
                powers = {first: 1, **dict(zip(others, signs, strict=True))}
                if _balanced(powers, kinds):
                    yield from _odd(s, powers, logs, offs, kinds, asked)


def _balanced(powers: dict[int, int], kinds: dict[int, str]) -> bool:
    """Whether no second is left over; and what is left is not just one quotient, of kernels that are always as fast."""
    seconds = sum(p if kinds[c] in RATES else -p if kinds[c] in _TIMES else 0 for c, p in powers.items())
    return seconds == 0 and len({kinds[c] for c in powers}) > 1


def _odd(
    s: Sheet,
    powers: dict[int, int],
    logs: dict[int, list[float]],
    offs: dict[int, list[float]],
    kinds: dict[int, str],
    asked: set[int],
) -> Iterator[Finding]:
    size = range(len(s.rows))
    sums = [sum(p * logs[c][r] for c, p in powers.items()) for r in size]
    middle = median_high(sums)
    apart = [abs(x - middle) for x in sums]
    roughly = len(powers) > 2 and {"rate", "bandwidth"} <= {kinds[c] for c in powers} and len(s.rows) > 9
    if sum(x > (_ROUGHLY if roughly else 0.03) for x in apart) != 1:
        return
    odd = max(size, key=lambda r: apart[r])
    off = [sum(offs[c][r] for c in powers) for r in size]
    close = all(apart[r] <= off[r] + _CLOSE for r in size if r != odd) and apart[odd] > max(_ODD, 3 * off[odd])
    if not close and not (roughly and apart[odd] > _FAR):
        return
    if odd in asked or not _needed(s, powers, logs, odd, 0.1 if close else 0.3):
        return
    asked.add(odd)
    rate = next(c for c in powers if kinds[c] in RATES)
    f, *beside = (s.rows[odd][c] for c in (rate, *(c for c in powers if c != rate)))
    names = ", ".join(s.header[c].strip() for c in powers if c != rate)
    factor = math.exp(sums[odd] - middle)
    told = f"{s.header[rate].strip()} follows from {names} in all other rows; {f.text} is {factor:.3g} times that"
    yield Finding(
        QUESTION, "proportion", f.line, f.text, f"{told}: is it of the same work?", (f.line, *(b.line for b in beside))
    )


def _needed(s: Sheet, powers: dict[int, int], logs: dict[int, list[float]], odd: int, least: float) -> bool:
    """Whether every column differs among the rows that agree, so that they confirm its part."""
    rows = [r for r in range(len(s.rows)) if r != odd]
    return all(max(logs[c][r] for r in rows) - min(logs[c][r] for r in rows) > least for c in powers)
