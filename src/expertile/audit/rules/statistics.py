"""The least, the mean, percentiles and the greatest of one record; and statistics by name ("Avg bus bandwidth",
"geomean_speedup") against the lists and columns of that name, wherever these stand in the report."""

import itertools
import re
import statistics
from collections.abc import Callable, Iterator
from itertools import chain

from expertile.audit.finding import INCONSISTENT, QUESTION, Finding, finding
from expertile.audit.pattern import regex
from expertile.audit.records import (
    Named,
    Record,
    Series,
    arrays,
    digits,
    in_line,
    logged,
    records,
    series,
    sheets,
    words,
)
from expertile.audit.report import Report
from expertile.audit.units import RATES

_RANKS = {"min": 0.0, "minimum": 0.0, "median": 50.0, "med": 50.0, "max": 100.0, "maximum": 100.0}
_MEANS, _STDS = ("mean", "avg", "average"), ("std", "stdev", "stddev", "sd", "sigma")
_RATE_WORDS = {"throughput", "bandwidth", "tps", "qps", "rps", "speed"}
_RATE_WORDS |= {"tflops", "gflops", "flops", "rate", "util", "fps"}
_OF: dict[str, tuple[Callable[[list[float]], float], ...]] = {
    "mean": (statistics.fmean, statistics.harmonic_mean, statistics.geometric_mean),
    "geomean": (statistics.geometric_mean,),
    "median": (statistics.median,),
    "min": (min,),
    "max": (max,),
    "best": (min, max),
    "worst": (max, min),
    "sum": (sum,),
    "std": (statistics.stdev, statistics.pstdev),
}
_NAMES = {name: name for name in _OF} | {"avg": "mean", "average": "mean", "gmean": "geomean", "geometric": "geomean"}
_NAMES |= {"minimum": "min", "maximum": "max", "stdev": "std", "stddev": "std", "total": "sum"}
_NAMES |= {"fastest": "best", "slowest": "worst"}
_MIDDLE = ("mean", "geomean", "median")
_FILLER = {*re.findall(r"\w+", "time times took takes of the all over value runs run samples latency overall result")}
_PART = {"without", "excl", "excluding", "after", "warm", "warmup", "up", "steady", "first", "skipping", "ignoring"}
_SOME = regex(r"(?i)trim|outlier|select|subset|excerpt|\bcut\b|omit|dropped|\.\.\.|…|weight|moving|running|ema\b")
_LISTED = regex(r"(?i)\b(?:listed|shown|above|these)\b")
_WARM = regex(r"(?i)warm|discard|exclud|skip|steady|first")
_SPELL = {"latencies": ("latency",), "busbw": ("bus", "bandwidth"), "algbw": ("alg", "bandwidth"), "bw": ("bandwidth",)}


def related(report: Report) -> Iterator[Finding]:
    """All relations of each record; where many rows of a table break one, their names mean something else."""
    for _, some in itertools.groupby(records(report), lambda r: (r.block, r.kind)):
        held = [*some]
        found = [[*_ordered(record)] for record in held]
        if len(held) < 2 or sum(map(bool, found)) <= max(1, 0.25 * len(held)):
            yield from itertools.chain(*found)


def _rank(word: str) -> float | None:
    # P4, P40 and P100 are GPUs, p2 and p5 machines.
    m = re.fullmatch(r"(?:p(?=\d+(?:th)?$)|(?=\d+(?:th|%)$))([1257]0|[27]5|[68]0|9\d)(\d?)(?:th|%)?", word)
    return _RANKS.get(word, float(f"{m[1]}.{m[2] or 0}") if m else None)


def statistic(words: tuple[str, ...]) -> tuple[float | str, tuple[str, ...]] | None:
    """The rank, "mean" or "std" that a name has, and the words beside."""
    found = [(i, "mean" if w in _MEANS else "std" if w in _STDS else _rank(w)) for i, w in enumerate(words)]
    found = [(i, s) for i, s in found if s is not None]
    if len(found) != 1 or {"limit", "allowed", "len", "length", "tokens", "batch", "duration", "clock", "count"} & {
        *words
    }:
        return None
    at, of = found[0]
    return of, words[:at] + words[at + 1 :]  # type: ignore[return-value]


def _ordered(record: Record) -> Iterator[Finding]:
    groups: dict[tuple[tuple[str, ...], str], dict[float | str, Named]] = {}
    for f in record.figures:
        of = statistic(f.words)
        if of and (f.kind == "time" or not any(w.endswith("%") for w in f.words)):
            groups.setdefault((of[1], f.kind), {}).setdefault(of[0], f)
    for (name, kind), held in groups.items():
        rate = kind in RATES or {*name} & _RATE_WORDS
        ranked = sorted(
            ((r, f) for r, f in held.items() if isinstance(r, float) and (not rate or r in (0, 100))),
            key=lambda x: x[0],
        )
        mean = held.get("mean")
        pairs = [(a, b) for (_, a), (_, b) in itertools.combinations(ranked, 2)]
        pairs += [(f, mean) for r, f in ranked if r == 0 and mean] + [(mean, f) for r, f in ranked if r == 100 and mean]
        wrong = [(a, b) for a, b in pairs if a and b and a.value - a.off > (b.value + b.off) * 1.002 and b.value > 0]
        for a, b in wrong[:1]:
            yield finding(INCONSISTENT, "order", f"{a.name}, {a.text}, is more than {b.name}, {b.text}", b, a)


def summaries(report: Report) -> Iterator[Finding]:
    """Every figure whose name is a statistic of something, against what has the rest of its name."""
    steps = [*logged(report)]
    some = [s for s in (*series(report), *arrays(report), *steps) if 2 < len(s.figures) < 400 and min(s.values) > 0]
    lists = [(_stems(s), held, s) for s in some if (held := _body(s))]
    figures = [f for b in report.blocks for line in ([] if b.table else b.lines) for f in in_line(line)]
    figures += [f for s in sheets(report) if len(s.rows) == 1 for f in s.rows[0].values()]
    found: dict[tuple[int, ...], list[tuple[Named, str, list[Named], bool]]] = {}
    for f in figures if lists else ():
        own = [_NAMES.get(w) for w in f.words]
        kinds = {k for k in own if k} - ({"mean"} if "geomean" in own else set())
        rest = {w for w, k in zip(f.words, own, strict=True) if not k} - _FILLER
        part, name = bool(rest & _PART), _spelled(rest - _PART)
        fit = (of for stems, of, s in lists if _same(name, stems, f, of) or _called(s, f) or _above(s, f, report, name))
        same: list[list[Named]] = [*fit]
        limit = name and not kinds & {*_MIDDLE} and f.kind == "number" and "." not in f.text  # a setting
        if (
            len(kinds) == 1
            and f.value > 0
            and same
            and not limit
            and not _SOME.search("\n".join((f.name, report.lines[f.line - 1])))
        ):
            (kind,), every = kinds, [*chain(*same)]
            fits = any(_fits(f, kind, of, part, report) for of in (*same, every))
            at = {x.line for x in every}  # shares of all say that no row is left out, nor counted twice
            of_all = (h for _, h, _ in lists if h[0].kind == "percent" and {x.line for x in h} == at)
            more = name and not any(abs(sum(x.value for x in h) - 1) < 0.005 for h in of_all)
            if kind == "sum" and (fits or more or f.kind != every[0].kind):
                continue  # which may be of more
            key = tuple(x.line for x in same[0])
            found.setdefault(key, []).append((f, kind, every, fits))
    for group in found.values():
        good, odd = sum(fits for *_, fits in group), [g for g in group if not g[3]]
        for f, kind, of, _ in odd if len(odd) == 1 else ():
            part = bool({*f.words} & _PART)
            made = _OF[kind][0](_scaled(of, f)[part:]) * digits(f) / f.value
            named = kind == "sum" and {*f.words} - {*_NAMES} - _FILLER
            text = "" if good or named or _LISTED.search(report.lines[f.line - 1]) else report.text
            values, lines = _scaled(of, f), tuple(x.line for x in of)
            outside = kind in _MIDDLE and not min(values) <= f.value <= max(values)
            some_steps = any(of[0] is s.figures[0] for s in steps) and not outside  # each of several, perhaps
            if 0.2 < made / digits(f) < 5 and not (some_steps or _SOME.search(text)):
                sure = f.line not in lines and ((good > 1 and outside) or (good > 0 and of[0].column < 0))
                message = f"the {kind} of the {len(of) - part} figures named so is {made:.4g}, not {f.text}"
                message += "" if sure else ": which of them does it count?"
                yield Finding(INCONSISTENT if sure else QUESTION, "total", f.line, f.text, message, lines)


def _spelled(names: set[str]) -> set[str]:
    return {w.rstrip("s") if len(w) > 3 else w for n in names for w in _SPELL.get(n, (n,))} - _FILLER


def _stems(s: Series) -> set[str]:
    """The words of a list's name; a star where it is itself one of statistics."""
    own = words(s.name)
    return {"*"} if any(w in _NAMES or re.fullmatch(r"p\d+", w) for w in own) else _spelled({*own} - _FILLER)


def _called(s: Series, f: Named) -> bool:
    """Whether a column is called as the figure is, but for the statistic: "Average latency" of "latency (ms)"."""
    own = {w for w in f.words if w not in _NAMES}
    return s.table >= 0 and f.column < 0 and own != set() and own == {*words(s.name)} and f.kind == s.figures[0].kind


def _above(s: Series, f: Named, report: Report, name: set[str]) -> bool:
    """Whether runs, one below the other, stand right above a figure of the same name or of none."""
    if s.table >= 0 or s.block < 0 or not 0 <= f.line - s.figures[-1].line < 14:
        return False
    if not (name <= _spelled({w for x in s.labels[:1] for w in words(x)}) and _one_kind(f, s.figures[0])):
        return False
    same = any(f.line == n.number for n in report.blocks[s.block].lines)
    alike = len({re.sub(r"\d+|\s*\([^()]*\)", "", x) for x in s.labels}) <= 1 and not any(
        statistic(x.words) for x in s.figures
    )
    return same and alike


def _body(s: Series) -> list[Named]:
    """Its figures but those of rows called mean or total."""
    labels = s.labels if s.table >= 0 and len(s.labels) == len(s.figures) else [""] * len(s.figures)
    held = [
        f for f, x in zip(s.figures, labels, strict=True) if not re.match(r"(?i)\W*(?:total|sum|mean|av|geo|all\b)", x)
    ]
    return held if len(held) > 2 and len({f.kind for f in held}) == 1 else []


def _same(name: set[str], stems: set[str], f: Named, of: list[Named]) -> bool:
    """Whether a list has the name; of a record's that is a unit alone, "median_us", it is the unit's column."""
    if not name and not stems:
        return (
            re.fullmatch(r"\w+_\w+", f.name) is not None
            and f.kind == of[0].kind != "number"
            and (of[0].line != f.line or of[0].column < 0)
        )
    alike = name == stems or (len(stems) > 1 and len(name) > 1 and name < stems) or (stems != set() and stems < name)
    return bool(name) and alike and _one_kind(f, of[0]) and all(x is not f for x in of)


def _one_kind(a: Named, b: Named) -> bool:
    """Whether two figures may be of one kind: a plain number may be of any."""
    return len({a.kind, b.kind}) == 1 or "number" in (a.kind, b.kind)


def _scaled(of: list[Named], f: Named) -> list[float]:
    """The values in the unit of the figure, which may have none of its own."""
    values = [x.value for x in of]
    if f.kind == "number" and of[0].kind != "number":
        values = [digits(x) for x in of]
    return values


def _fits(f: Named, kind: str, of: list[Named], part: bool, report: Report) -> bool:
    values = _scaled(of, f)
    off = max(x.off * (v / x.value) for x, v in zip(of, values, strict=True))
    ways = [values] * (not part)
    lead = report.lines[max(0, f.line - 4) : f.line]
    warm = part or _WARM.search("\n".join((*lead, *(report.lines[x.line - 1] for x in of[:3]))))
    ways += [values[k:] for k in range(1, 1 + len(values) // 2) if len(values) - k > 1] if warm else []
    made = [of_all(v) for v in ways for of_all in _OF[kind] if len(v) > 1]
    if kind in ("min", "max", "best", "worst", "median"):
        return any(abs(f.value - m) <= f.off + off for m in made)
    return any(f.meets(m, 0.004) or abs(f.value - m) <= f.off + off for m in made)
