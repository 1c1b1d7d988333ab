"""Figures of methods whose formulas are published: ZeRO's memory, the mean without the fastest and the slowest run, the
output of a convolution, the bytes of a tensor; and amounts of two periods."""

import itertools
import math
import re
from collections.abc import Iterator

from expertile.audit.facts import BITS, facts
from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.terms import parameters

# Bytes of a parameter that ZeRO leaves whole and that it shards, with Adam in mixed precision: 2 of weights, 2 of
# gradients, 12 of the optimizer's state (Rajbhandari et al. 2020, arXiv:1910.02054).
_ZERO = {"1": (4, 12), "2": (2, 14), "3": (0, 16)}
_STAGE = re.compile(r"(?i)\bzero\W{0,3}(?:stage\W{0,3})?([123])\b")
_RANKS = re.compile(r"(?i)\b(\d+) ?(?:gpus?|ranks)\b")
_TRIMMED = re.compile(
    r"(?i)\b(?:drop|discard|exclud|without|remov|ignor)\w* (?:the )?(?:fastest|best|lowest|shortest)(?: \w+)? "
    r"(?:and|&) (?:the )?(?:slowest|worst|highest|longest)|olympic"
)
_PERIOD = re.compile(r"(?:per|/|a)[_ ]?(hour|day|month|year)\b")
_HOURS = {"hour": 1.0, "day": 24.0, "month": 730.0, "year": 8760.0}
_TUPLE = re.compile(r"\d+(?: ?[x×,*] ?\d+)+")
_PLAIN = re.compile(r"(?i)\b(?:dilat|transpos|deconv|ceil mode|same padding|asymmetric|valid)")
_ELEMENTS = re.compile(r"(?i)#? ?(?:num(?:ber of)? )?(?:numel|elements?|elems|params?|parameters|values|count)(?: ?#)?")
# A size that is not of the one tensor of its row.
_NOT = re.compile(r"(?i)shard|pad|per (?:gpu|rank|layer)|packed|scale|total|peak|grad|optim|saved|traffic|moved|cache")


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


def _cell(row: Row, form: str) -> tuple[str, str]:
    """The head and the cell of the one column whose head has this form."""
    cells = [part.partition(": ") for part in row.text.split("; ")]
    found = [(name, cell) for name, _, cell in cells if re.search(rf"(?i){form}", name)]
    return found[0] if len(found) == 1 else ("", "")


def _sides(cell: str) -> tuple[int, ...]:
    m = _TUPLE.search(cell)
    return tuple(map(int, re.findall(r"\d+", m[0]))) if m else ()


def convolved(report: Report) -> Iterator[Finding]:
    """An output that floor((H + 2·pad − kernel) / stride) + 1 does not make (Dumoulin and Visin 2016,
    arXiv:1603.07285); where three rows and more keep it."""
    for grid in report.grids:
        broken, kept = [], 0
        for row in grid.body if not _PLAIN.search(report.text) else ():
            (head, given), (to, made) = _cell(row, r"^in(?:put)?\b"), _cell(row, r"^out(?:put)?\b")
            kernel, stride, pad = (_cell(row, form)[1] for form in (r"kernel|filter|window", r"stride", r"pad"))
            sides, out, window = _sides(given), _sides(made), _sides(kernel)
            if not (sides and len(out) == len(sides) and window and stride.isdigit() and pad.isdigit() and int(stride)):
                continue
            first = 1 if re.search(r"(?i)c ?[x×,*] ?h|nchw|chw", head + to) else 0
            for h, k, said in zip(sides[first : first + 2], window[:2], out[first : first + 2], strict=False):
                side = (h + 2 * int(pad) - k) // int(stride) + 1
                if side != said:
                    broken.append((row, f"({h} + 2·{pad} − {k}) / {stride} + 1 is {side}, not {said}", made))
                    break
            else:
                kept += 1
        for row, message, made in broken if kept > 2 > len(broken) else ():
            yield Finding(INCONSISTENT, "shape", row.line, made, message, (row.line,))


def tensors(report: Report) -> Iterator[Finding]:
    """Elements that a shape does not make, or bytes that it does not make in its format; where two rows and more of
    the table do."""
    for grid in report.grids:
        broken, kept = [], 0
        for row in grid.body:
            text = re.sub(r"(?<![\d([,])\d{1,3}(?:,\d{3})+(?![\d)\],])", "", row.text)
            shapes, formats = [m[0] for m in _TUPLE.finditer(text)], facts(text).of("formats")
            q, n = row.only("bytes"), [*{v for name, v in (row.bare | row.own).items() if _ELEMENTS.fullmatch(name)}]
            n += [p.value.mid for p in row.of("params") if _ELEMENTS.fullmatch(p.label)]  # "16.8 M"
            elements = math.prod(_sides(shapes[0])) if len(shapes) == 1 else 0
            if len(n) == 1 and n[0] and elements:
                kept += (near := abs(n[0] / elements - 1) < (0.01 if row.of("params") else 1e-9))
                if not near and n[0] % elements and elements % n[0] and 1 / 9 < n[0] / elements < 9:
                    message = f"{shapes[0]} has {elements:,} elements, not {n[0]:,.0f}"
                    broken.append(Finding(INCONSISTENT, "shape", row.line, f"{n[0]:,.0f}", message, (row.line,)))
            elif elements and len(formats) == 1 and q and not _NOT.search(f"{q.label} {row.label}"):
                made = elements * BITS[formats[0]] / 8
                kept += q.value.meets(made, 0.01)
                if not q.value.meets(made, 0.01) and 1 / 9 < q.value.mid / made < 9:
                    message = f"{shapes[0]} in {formats[0]} is {si(made, 'B')}, not {q.text}"
                    broken.append(finding(QUESTION, "memory", f"{message}: of which tensor is it?", q))
        yield from broken if kept > 1 >= len(broken) else ()
