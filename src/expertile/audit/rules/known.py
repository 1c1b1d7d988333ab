"""Figures of programs and methods whose formulas are published: vLLM's benchmark of a server, ZeRO's memory, occupancy,
the mean without the fastest and the slowest run, molecular dynamics. All but the first and occupancy ask.
"""

import itertools
import math
import re
from collections.abc import Iterator

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report
from expertile.audit.rules.terms import parameters

# Of `vllm bench serve` and its like: a rate is so many of something over the duration.
_DURATION = re.compile(r"(?i)^\W*(?:benchmark )?duration")
_IN, _OUT = (re.compile(rf"(?i)^\W*total[ _](?:{w})[ _]tokens") for w in ("input|prompt", "generated|output"))
_RATES = ((r"^\W*total[ _]token[ _]throughput", "both"), (r"^\W*output[ _](?:token[ _])?throughput", "out"))
# Bytes of a parameter that ZeRO leaves whole and that it shards, with Adam in mixed precision: 2 of weights, 2 of
# gradients, 12 of the optimizer's state (Rajbhandari et al. 2020, arXiv:1910.02054).
_ZERO = {"1": (4, 12), "2": (2, 14), "3": (0, 16)}
_STAGE = re.compile(r"(?i)\bzero\W{0,3}(?:stage\W{0,3})?([123])\b")
_RANKS = re.compile(r"(?i)\b(\d+) ?(?:gpus?|ranks)\b")
_TRIMMED = re.compile(
    r"(?i)\b(?:drop|discard|exclud|without|remov|ignor)\w* (?:the )?(?:fastest|best|lowest|shortest)(?: \w+)? "
    r"(?:and|&) (?:the )?(?:slowest|worst|highest|longest)|olympic"
)
_REGISTERS = re.compile(r"reg(?:ister)?s?(?: (?:per )?thread)?")
_THREADS = re.compile(r"threads(?: per)?(?: block)?|block(?: size| dim)?")
_PERIOD = re.compile(r"(?:per|/|a)[_ ]?(hour|day|month|year)\b")
_HOURS = {"hour": 1.0, "day": 24.0, "month": 730.0, "year": 8760.0}
_WARP = 32
# Warps and blocks that a multiprocessor holds (CUDA C++ Programming Guide, "Compute Capabilities").
_MOST = {(7, 5): (32, 16), (8, 6): (48, 16), (8, 7): (48, 16), (8, 9): (48, 24), (12, 0): (48, 24)}


def served(report: Report) -> Iterator[Finding]:
    """Tokens per second of a benchmark that prints its tokens and its duration."""
    for row in (r for r in report.all_rows if r.kind in ("record", "table")):
        named = [(q.label.replace("_", " "), q) for q in row.quantities if q.exact and q.value.mid]

        def one(form: re.Pattern[str], kind: str, held: list[tuple[str, Quantity]] = named) -> Quantity | None:
            found = [q for label, q in held if q.kind == kind and form.search(label)]
            return found[0] if len(found) == 1 else None

        t, given, made = one(_DURATION, "time"), one(_IN, "tokens"), one(_OUT, "tokens")
        if not (t and given and made):
            continue
        for form, of in _RATES:
            q = one(re.compile(f"(?i){form}"), "tokens_per_s")
            tokens = made.value + given.value if of == "both" else made.value
            if q and not q.value.meets(tokens / t.value, 0.01):
                told = f"{given.text} + {made.text}" if of == "both" else made.text
                message = f"{told} in {t.text} is {si((tokens / t.value).mid, 'tokens/s')}, not {q.text}"
                yield finding(INCONSISTENT, "tokens/s", message, q, t, given, made)


def sharded(report: Report) -> Iterator[Finding]:
    """The states of a model for each rank, by ZeRO's stage: where all other cells agree, one is asked about."""
    stated = {*report.everything.of("gpus"), *(float(n) for n in re.findall(r"n_?d ?= ?(\d+)", report.text))}
    for grid in report.grids:
        held: list[tuple[Quantity, float, float, tuple[int, int]]] = []
        for row in grid.rows:
            for q in (q for q in row.of("bytes", "number", "other") if q.exact and q.value.mid):
                name = grid.header[q.column]
                stage, ranks = (form.search(name) or form.search(row.label) for form in (_STAGE, _RANKS))
                if stage and (params := parameters(row)):
                    nbytes = q.value.mid * (1.0 if q.kind == "bytes" else 1e9)
                    held.append((q, nbytes / params, float(ranks[1]) if ranks else 0.0, _ZERO[stage[1]]))
        for n in stated if len(held) > 4 else ():
            off = [(q, (whole + shared / (of or n)) / each) for q, each, of, (whole, shared) in held]
            odd = [(q, x) for q, x in off if not q.plain.meets(q.plain.mid * x, 0.005)]
            if len(odd) == 1 and abs(odd[0][1] - 1) > 0.03:
                (q, x), scale = odd[0], 1.0 if odd[0][0].kind == "bytes" else 1e9
                message = f"ZeRO leaves {si(q.value.mid * x * scale, 'B')} by its formula, not {q.text}: of what is it?"
                yield finding(QUESTION, "memory", message, q)
                break


def trimmed(report: Report) -> Iterator[Finding]:
    """A score that is said to be the mean without the fastest and the slowest run."""
    grids = [[t for r in g.rows for t in r.of("time")] for g in report.grids if len(g.columns("time")) == 1]
    said = [q for row in report.lines_of_text for q in row.of("time") if re.search(r"(?i)score|result", q.label)]
    for runs, q in itertools.product(grids, said) if _TRIMMED.search(report.text) else ():
        times = sorted(t.value.mid for t in runs)[1:-1]
        mean = sum(times) / max(len(times), 1)
        if len(times) > 1 and q.exact and 0.5 < mean / q.value.mid < 2 and not q.value.meets(mean, 0.002):
            message = f"the mean of {len(runs)} runs without the fastest and the slowest is {si(mean, 's')}"
            yield finding(QUESTION, "total", f"{message}, not {q.text}: which does it count?", q)


def periods(report: Report) -> Iterator[Finding]:
    """One amount for a month and for a year, a day and a month: names that differ in the period alone."""
    for row in (r for r in report.all_rows if r.kind in ("record", "table")):
        held = [
            (m[1], q, _HOURS[m[1]], _PERIOD.sub("", name))
            for q in row.quantities
            if (m := _PERIOD.search(name := q.label.lower())) and q.exact and q.value.mid
        ]
        for (a, p, short, of), (b, q, long, same) in itertools.permutations(held, 2):
            made = q.value * (short / long)
            if short < long and (of, p.kind) == (same, q.kind) and not p.value.meets(made, 0.045):
                message = f"{q.text} a {b} is {si(made.mid, UNIT_OF.get(p.kind, ''))} a {a}, not {p.text}"
                yield finding(QUESTION, "product", f"{message}: are they of the same rate?", p, q)


def simulated(report: Report) -> Iterator[Finding]:
    """Nanoseconds of a simulation a day, of its one time step and the time that each takes."""
    steps = {float(n) for n in re.findall(r"(?:time ?)?step\w*(?: of|:| =|,)? (\d+(?:\.\d+)?) ?fs\b", report.text)}
    for row in (r for grid in report.grids for r in grid.body) if len(steps) == 1 else ():
        rate = [q for q in row.of("items_per_s") if re.search(r"(?i)\bns ?(?:/|per) ?day", f"{q.label} {q.text}")]
        each = [q for q in row.of("s_per_item", "time") if re.search(r"(?i)/ ?step|per step|\bstep", q.label)]
        if len(rate) == len(each) == 1 and rate[0].exact and each[0].value.mid:
            days = 86400e-6 * min(steps) / each[0].value.mid
            if not (rate[0].value * 86400).meets(days, 0.03):
                message = f"{min(steps):g} fs each {each[0].text} are {days:.4g} ns/day, not {rate[0].text}"
                yield finding(QUESTION, "throughput", f"{message}: of which step?", rate[0], each[0])


def resident(report: Report) -> Iterator[Finding]:
    """An occupancy that the threads of a block and their registers do not allow."""
    for row in (r for r in report.all_rows if len({d.capability for d in r.devices}) == 1):
        numbers = {q.label: q.value.mid for q in row.of("number", "other")} | row.bare
        found = {re.sub(r"[^a-z]+", " ", name.lower()).strip(): n for name, n in numbers.items()}
        registers, threads = (
            [n for name, n in found.items() if form.fullmatch(name)] for form in (_REGISTERS, _THREADS)
        )
        said = [p for p in row.of("percent") if "occup" in p.words and p.exact]
        of = row.devices[0].capability  # None but for NVIDIA's
        if len(said) != 1 or len(threads) != 1 or threads[0] % _WARP or not 0 < threads[0] <= 1024 or not of:
            continue
        warps, (most, blocks) = threads[0] / _WARP, _MOST.get(of, (64, 32))
        if registers and registers[0]:  # a warp has them in steps of 256
            blocks = min(blocks, int(65536 // (math.ceil(registers[0] * _WARP / 256) * 256) // warps))
        held = min(blocks, int(most // warps)) * warps / most
        if said[0].value.lo > 1.03 * held:
            each = f" of {registers[0]:.0f} registers" if registers else ""
            message = f"{threads[0]:.0f} threads{each} allow an occupancy of {100 * held:.3g} %, not {said[0].text}"
            yield finding(INCONSISTENT, "occupancy", message, said[0])
