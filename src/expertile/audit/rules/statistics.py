"""Figures of one record whose names say how they stand to each other.

Least, mean, percentiles and greatest; deviations; a part and its whole; so many of so many and their share; so much per
thing counted.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace

from expertile.audit.finding import INCONSISTENT, QUESTION, Finding
from expertile.audit.records import Named, Record, records
from expertile.audit.report import Report
from expertile.audit.units import RATES, TYPED, match_unit

_RANKS = {"min": 0.0, "minimum": 0.0, "median": 50.0, "max": 100.0, "maximum": 100.0}
_MEANS, _STDS = ("mean", "avg", "average"), ("std", "stdev", "stddev", "sd", "sigma")
_RATE_WORDS = {"throughput", "bandwidth", "tps", "qps", "rps", "speed"}
_RATE_WORDS |= {"tflops", "gflops", "flops", "rate", "util", "fps"}
_ERRORS = {"error", "err", "errors", "diff", "abs", "absolute"}
_DEVIATIONS = ({"mae", "mean_abs"}, {"rmse"}, {"max_abs", "maxabs", "linf", "max"})
# What counts a part of what: no such figure exceeds the other. Of memory, of accuracy, of requests, of occupancy.
_NESTED = (
    ("allocated", "reserved"),
    ("top1", "top5"),
    ("goodput", "completed"),
    ("goodput", "throughput"),
    ("achieved", "theoretical"),
)
# What should be below another, and is of the same run or not.
_BELOW = (
    ({"measured", "achieved", "actual", "observed"}, {"roof", "roofline", "ceiling", "bound", "attainable"}),
    ({"weights", "weight"}, {"peak", "total"}),
)
_RELATED = {w for pair in _NESTED for w in pair}.union(*(a | b for a, b in _BELOW))
_AT = re.compile(r"(?:pass|recall|acc|hit|hits)@(\d+)$")
# A share's names, those of the part and of the whole; or of the two parts of the whole.
_SHARES = (
    ({"hit"}, {"hits"}, {"lookups", "queries", "accesses", "requests"}, {"misses"}),
    ({"miss"}, {"misses"}, {"lookups", "queries", "accesses", "requests"}, {"hits"}),
    ({"acceptance", "accept", "accepted"}, {"accepted"}, {"drafted", "proposed", "draft"}, {"rejected"}),
    ({"pass", "success"}, {"passed", "succeeded", "successful", "ok"}, {"total", "run", "sent"}, {"failed"}),
)
_RATIO = {"rate", "ratio", "share", "fraction"}
_HALF = re.compile(r"95 ?%[^±\n]*±\s*(?P<n>\d+(?:\.\d+)?) ?(?P<unit>[^\W\d]\S*)")
_APART = {"wall", "with", "incl", "including"}
_COUNTS = {"iterations", "iters", "iter", "launches", "repetitions", "reps", "repeats", "calls"}


def related(report: Report) -> Iterator[Finding]:
    """All relations of each record; where many rows of a table break one, their names mean something else."""
    for _, some in itertools.groupby(records(report), lambda r: (r.block, r.kind)):
        held = [*some]
        text = report.blocks[held[0].block].text
        for rule in (_ordered, _deviations, _nested, _shares, _repeated, _objective, _outcomes):
            found = [[*rule(record)] for record in held]
            broken = [f for each in found for f in each]
            if len(held) < 2 or sum(map(bool, found)) <= max(1, 0.25 * len(held)):
                yield from broken
        yield from _interval(held[0], text) if "±" in text and len(held) == 1 else ()


def _says(verdict: str, rule: str, message: str, f: Named, *beside: Named) -> Finding:
    quote = ", ".join(dict.fromkeys(x.text for x in (f, *beside)))
    return Finding(verdict, rule, f.line, quote, message, tuple(x.line for x in (f, *beside)))


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
        mean, std = held.get("mean"), held.get("std")
        pairs = [(a, b) for (_, a), (_, b) in itertools.combinations(ranked, 2)]
        pairs += [(f, mean) for r, f in ranked if r == 0 and mean] + [(mean, f) for r, f in ranked if r == 100 and mean]
        wrong = [(a, b) for a, b in pairs if a and b and a.value - a.off > (b.value + b.off) * 1.002 and b.value > 0]
        for a, b in wrong[:1]:
            yield _says(INCONSISTENT, "order", f"{a.name}, {a.text}, is more than {b.name}, {b.text}", b, a)
        if std and 0.0 in held and 100.0 in held and not wrong:
            span = held[100.0].value + held[100.0].off - held[0.0].value + held[0.0].off
            if std.value - std.off > span / math.sqrt(2) > 0:
                message = f"values within {held[0.0].text} and {held[100.0].text} deviate by {span / 2:.3g} at most"
                yield _says(INCONSISTENT, "order", f"{message}, not {std.text}", std, held[0.0], held[100.0])


def _deviations(record: Record) -> Iterator[Finding]:
    """The root mean square is never below the mean, the greatest never below either."""
    found: dict[tuple[str, ...], dict[int, Named]] = {}
    for f in record.figures:
        name = " ".join(f.words).replace("max abs", "max_abs").replace("mean abs", "mean_abs").split()
        for rank, names in enumerate(_DEVIATIONS):
            if {*name} & names and (rank < 2 or {*name} & {"max_abs", "linf", "maxabs"}):
                rest = tuple(w for w in name if w not in names | _ERRORS)
                found.setdefault(rest, {}).setdefault(rank, f)
    for held in found.values():
        for low, high in itertools.combinations(sorted(held), 2):
            a, b = held[low], held[high]
            if a.kind == b.kind and a.value - a.off > b.value + b.off:
                yield _says(INCONSISTENT, "order", f"{a.name}, {a.text}, is more than {b.name}, {b.text}", b, a)
                break


def _nested(record: Record) -> Iterator[Finding]:
    held = [f for f in record.figures if {*f.words} & _RELATED or "@" in f.name]
    for a, b in itertools.permutations(held, 2):
        if a.kind != b.kind or a.value - a.off <= 1.005 * (b.value + b.off):
            continue
        x, y = {*a.words}, {*b.words}
        bad = {"error", "err", "loss", "target", "offered", "free"} & (x | y)
        for part, whole in _NESTED:
            if part in x and whole in y and not bad and (x - {part} == y - {whole} or part == "goodput"):
                if part in ("achieved", "allocated") and a.kind != {"achieved": "percent", "allocated": "bytes"}[part]:
                    continue
                if part == "goodput" and (x ^ y) - {part, whole, "request", "req", "requests"}:
                    continue
                sure = INCONSISTENT if part != "achieved" or "occupancy" in x else QUESTION
                yield _says(sure, "order", f"{a.name}, {a.text}, is a part of {b.name}, {b.text}", a, b)
        for small, large in _BELOW:
            same = x - small == y - large or (small & {"weights"} and a.kind == "bytes")
            if x & small and y & large and not bad and same and a.kind in TYPED and a.value > 1.02 * b.value:
                message = f"{a.name}, {a.text}, is more than {b.name}, {b.text}: are both of the same run?"
                yield _says(QUESTION, "order", message, a, b)
        at = [m for f in (a, b) for m in map(_AT.fullmatch, f.name.lower().split()) if m]
        if (
            len(at) == 2
            and int(at[0][1]) < int(at[1][1])
            and re.sub(r"@\d+", "", a.name) == re.sub(r"@\d+", "", b.name)
        ):
            yield _says(INCONSISTENT, "order", f"{a.name}, {a.text}, is more than {b.name}, {b.text}", a, b)


def _shares(record: Record) -> Iterator[Finding]:
    """ "hits", "misses" or "lookups", and the rate of the hits."""
    for f in record.figures:
        said, scale = {*f.words}, 0.01 if f.kind == "number" and f.value > 1 else 1.0
        for names, part, all_of, rest in _SHARES:
            if not (said & names and said & _RATIO | ({*f.words} & names if f.kind == "percent" else set())):
                continue
            beside = said - names - _RATIO - {"pct", "percent"}
            like = [x for x in record.figures if x.whole and beside <= {*x.words} and x is not f]
            parts, wholes, rests = ([x for x in like if {*x.words} & of] for of in (part, all_of, rest))
            parts = [x for x in parts if not {*x.words} & all_of]
            if len(parts) == 0 and len(wholes) == len(rests) == 1:
                part_of = wholes[0].value - rests[0].value
                parts = [replace(rests[0], value=part_of, text=f"{part_of:.0f}")]
            if len(parts) != 1 or len(wholes) + len(rests) == 0 or len(wholes) > 1 or len(rests) > 1:
                continue
            made = [
                parts[0].value / n
                for n in (*(x.value for x in wholes), *(parts[0].value + x.value for x in rests))
                if n
            ]
            if (
                made
                and all(m <= 1 for m in made)
                and not any(abs(f.value * scale - m) <= f.off * scale + 0.006 for m in made)
            ):
                beside_of = (*wholes, *rests)[:1]
                whole = beside_of[0].value + parts[0].value * (not wholes)
                message = f"{parts[0].value:,.0f} of {whole:,.0f} make {100 * made[0]:.3g} %, not {f.text}"
                sure = QUESTION if wholes and "requests" in wholes[0].words else INCONSISTENT  # others may be asked
                yield _says(sure, "ratio", message, f, parts[0], *beside_of)


def _stem(word: str) -> str:
    return word.rstrip("s") if len(word) > 3 else word


def _repeated(record: Record) -> Iterator[Finding]:
    """So many iterations of a mean time each are the loop's total; so are sweeps and a time per sweep."""
    times = [f for f in record.figures if f.kind in ("time", "s_per_item") and f.value > 0]
    totals = [f for f in times if {"total", "whole"} & {*f.words} and not {*f.words} & _APART]
    counts = [
        f for f in record.figures if f.words and f.whole and f.value > 1 and f.kind in ("number", "items", "other")
    ]
    for mean in times if len(totals) == 1 else ():
        per = mean.words[mean.words.index("per") + 1 :] if "per" in mean.words else ()
        each = {_stem(w) for w in per} or (
            {"iteration", "iter", "call", "launch", "run"} if {*mean.words} & {*_MEANS} else set()
        )
        of = [f for f in counts if (f.words[-1] in _COUNTS if not per else _stem(f.words[-1]) in each)]
        if "warm" in " ".join(f.name for f in record.figures).lower() or re.search(r"(?i)warm", totals[0].label):
            continue
        of = [f for f in of if not {"warmup", "warm", "per"} & {*f.words}]
        if len(of) != 1 or mean is totals[0] or not each:
            continue
        (n,), (total,) = of, totals
        made = n.value * mean.value
        if abs(made - total.value) > n.value * mean.off + total.off + 0.05 * made and 0.1 < made / total.value < 10:
            message = f"{n.text} × {mean.text} is {made:.4g} s, not {total.text}"
            yield _says(INCONSISTENT if "loop" in total.words else QUESTION, "product", message, total, n, mean)


def _objective(record: Record) -> Iterator[Finding]:
    """A share of the requests within a limit of which a percentile says that it is larger, or smaller."""
    shares = [f for f in record.figures if {*f.words} >= {"within", "slo"} and (f.kind == "percent" or f.value > 1)]
    limits = [f for f in record.figures if "slo" in f.words and f not in shares]
    for share, limit in ((s, x) for s in shares for x in limits if {*x.words} < {*s.words}):
        name = {*limit.words} - {"slo"}
        value = share.value * (100 if share.kind == "percent" else 1)
        for f in record.figures if name else ():
            of = statistic(f.words)
            rank = of[0] if of and {*of[1]} == name and f.kind == limit.kind else None
            if not isinstance(rank, float) or not 0 < rank < 100:
                continue
            least, most = (rank, 100.0) if f.value <= limit.value else (0.0, rank)
            if not least - 0.11 <= value <= most + 0.11:
                bound = "at least" if least else "at most"
                message = (
                    f"{f.name} is {f.text} of {limit.text}, so that {bound} {rank:g} % are within, not {share.text}"
                )
                # Those that failed may count as outside.
                yield _says(QUESTION, "order", f"{message}: of which requests?", share, f, limit)
                break


def _outcomes(record: Record) -> Iterator[Finding]:
    """Passed and failed, hits and misses, and how many they are together: it asks."""
    for part, rest, whole in (("passed", "failed", "total"), ("hits", "misses", "lookups"), ("ok", "failed", "sent")):
        held = [record.one(name) for name in (part, rest, whole)]
        p, r, w = held
        other = {"skipped", "errors", "timeout", "aborted", "pending", "cancelled", "stale", "xfailed", "warnings"}
        if p and r and w and all(x.whole for x in (p, r, w)) and len({p.line, r.line, w.line}) in (1, 3):
            alike = {*p.words} - {part} == {*r.words} - {rest} == {*w.words} - {whole}
            if alike and p.value + r.value != w.value and not other & record.known:
                message = f"{p.text} + {r.text} is {p.value + r.value:,.0f}, not {w.text}: are there others?"
                yield _says(QUESTION, "total", message, w, p, r)


def _interval(record: Record, text: str) -> Iterator[Finding]:
    """The 95 % interval of a mean, of the standard deviation and the number of runs."""
    n, half = record.one("n", "samples", "runs"), _HALF.search(text)
    stds = [f for f in record.figures if {*f.words} >= {"standard", "deviation"} or {*f.words} & {*_STDS}]
    unit = match_unit(half["unit"]) if half else None
    if half and unit and n and n.value >= 10 and len(stds) == 1 and unit[0].kind == stds[0].kind:
        made = 1.96 * stds[0].value / math.sqrt(n.value)
        f = stds[0]
        line = f.line + text[: half.start()].count("\n") - text[: max(text.find(f.text), 0)].count("\n")
        if made and not 0.6 < float(half["n"]) * unit[0].low / made < 1.6:
            made_of = f"{f.text} of {n.text} runs make an interval of ±{made / unit[0].low:.3g} {half['unit']}"
            message = f"{made_of}, not {half['n']}"
            yield Finding(INCONSISTENT, "order", line, half["n"], message, (f.line, n.line))
