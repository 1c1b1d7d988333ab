"""Times of day in a log and what it is said to take; its steps' times and rates."""

import re
from collections.abc import Iterator
from statistics import median_high

from expertile.audit.finding import INCONSISTENT, QUESTION, Finding, finding
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report

_STAMP = regex(r"(?<![\d:])(?:(\d{4})[-/](\d\d)[-/](\d\d)[T ])?(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?(?![\d:])")
_ELAPSED = regex(
    r"(?i)\b(?:elapsed|total (?:run ?)?time|finished in|done in|took|wall[- ]?(?:time|clock)(?: time)?)\b"
    r"(?:(?: from (?:launch|start|first \w+) to \w+)?[:= ]*)(?:(?P<hours>\d+\.\d+) ?h(?:ours?|rs?)?\b\W*$|"
    r"(?:(?P<h>\d+) ?h\w* ?)?(?:(?P<m>\d+) ?m(?:in\w*)? ?)?(?P<s>\d+(?:\.\d+)?) ?s(?:ec\w*)?\b\W*$)"
)
_Stamped = tuple[int, float, str]  # a line's number, its time in seconds, the rest of it


def steps(report: Report) -> Iterator[Finding]:
    """Lines of a log, each with the time of a step and a rate, of which all but one make one amount of work."""
    held: dict[tuple[int, str], list[tuple[Quantity, Quantity, float]]] = {}
    for row in report.lines_of_text:
        t = row.only("s_per_item") or row.only("time") if report.blocks[row.block].kind == "code" else None
        for kind in ("tokens_per_s", "items_per_s") if t else ():
            if t and (q := row.only(kind)) and not q.per_device:
                held.setdefault((row.block, kind), []).append((t, q, (t.value * q.value).mid))
    for some in held.values():
        middle = median_high(x for *_, x in some)
        odd = [(t, q, x) for t, q, x in some if abs(x / middle - 1) > 0.01]
        if len(some) > 3 and len(odd) == 1 and len({t.text for t, *_ in some}) > 2:
            ((t, q, x),) = odd
            made = f"{t.text} and {q.text} make {x:.4g}, those of all {len(some) - 1} other lines"
            if abs(x / middle - 1) > 0.03:
                yield finding(QUESTION, "throughput", f"{made} {middle:.4g}: is it the rate of that step?", q, t)


def _seconds(m: re.Match[str]) -> float:
    year, month, day = (int(x or 0) for x in m.groups()[:3])
    of_day = int(m[4]) * 3600 + int(m[5]) * 60 + int(m[6]) + float(f"0.{m[7]}" if m[7] else 0)
    return ((year * 12 + month) * 31 + day) * 86400.0 + of_day


def _stamped(report: Report) -> list[_Stamped]:
    """Lines that begin with a time, and the rest of them."""
    found = ((n, _STAMP.search(line[:40]), line) for n, line in enumerate(report.lines, 1))
    return [
        (n, _seconds(m), line[m.end() :]) for n, m, line in found if m and not re.search(r"[a-z]{4}", line[: m.start()])
    ]


def elapsed(report: Report) -> Iterator[Finding]:
    """A log's last line, which says how long all of it took."""
    lines = _stamped(report)
    if len(lines) < 4 or len(lines) < 0.8 * len([x for x in report.lines if x.strip()]):
        return
    # The last line of all; or one of its time of day, "wall-clock from launch to end".
    walls = (x for x in lines[:-8:-1] if x[1] == lines[-1][1] and re.search(r"(?i)\bwall.* from\b", x[2]))
    at = next((x for x in walls if _ELAPSED.search(x[2])), lines[-1])
    number, last, text = at
    m, span = _ELAPSED.search(text), last - lines[0][1]
    again = any(re.search(r"(?i)resum|restart(?!s?[:= ]*0\b)|attach|\bprevious\b", t) for _, _, t in lines)
    if m and 0 < span < 10 * 86400 and not again and not re.search(r"(?i)epoch|step|per\b", text):
        said = 3600 * float(m["hours"] or m["h"] or 0) + 60 * int(m["m"] or 0) + float(m["s"] or 0)
        # Before its first line a program may have loaded, and it may speak of a part.
        if said > 1.25 * span + 30 or (said < 0.8 * span and not re.search(r"(?i)took|in\b|only", text)):
            message = f"from the first line to this one {span:.0f} s pass, not {said:.0f}"
            verdict = INCONSISTENT if said > span else QUESTION  # else of a part
            yield Finding(verdict, "time", number, m[0].strip(), message, (lines[0][0], number))
