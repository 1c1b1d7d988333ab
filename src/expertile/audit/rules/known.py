"""Figures of known formulas: the output of a convolution, the bytes of a tensor."""

import math
import re
from collections.abc import Iterator

from expertile.audit.facts import BITS, facts
from expertile.audit.finding import INCONSISTENT, QUESTION, Finding, finding, si
from expertile.audit.report import Report

_TUPLE = re.compile(r"\d+(?: ?[x×,*] ?\d+)+")
_ELEMENTS = re.compile(r"(?i)#? ?(?:num(?:ber of)? )?(?:numel|elements?|elems|params?|parameters|values|count)(?: ?#)?")
# A size that is not of the one tensor of its row.
_NOT = re.compile(r"(?i)shard|pad|per (?:gpu|rank|layer)|packed|scale|total|peak|grad|optim|saved|traffic|moved|cache")


def _sides(cell: str) -> tuple[int, ...]:
    m = _TUPLE.search(cell)
    return tuple(map(int, re.findall(r"\d+", m[0]))) if m else ()


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
