"""Shapes of a table's rows: the output of a convolution, the bytes of a tensor of one format."""

import math
import re
from collections.abc import Iterator

from expertile.audit.facts import BITS, facts
from expertile.audit.finding import INCONSISTENT, QUESTION, Finding, finding, si
from expertile.audit.report import Report, Row

_TUPLE = re.compile(r"\d+(?: ?[x×,*] ?\d+)+")
_PLAIN = re.compile(r"(?i)\b(?:dilat|transpos|deconv|ceil mode|same padding|asymmetric|valid)")
# A size that is not of the one tensor of its row.
_OTHER = re.compile(
    r"(?i)shard|pad|per (?:gpu|rank|layer)|packed|scale|total|peak|grad|optim|saved|traffic|moved|cache"
)


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
    """Bytes that a shape and a format do not make; where two rows and more of the table do."""
    for grid in report.grids:
        broken, kept = [], 0
        for row in grid.body:
            shapes, formats = [m[0] for m in _TUPLE.finditer(row.text)], facts(row.text).of("formats")
            q = row.only("bytes")
            if len(shapes) != 1 or len(formats) != 1 or not q or _OTHER.search(f"{q.label} {row.label}"):
                continue
            made = math.prod(_sides(shapes[0])) * BITS[formats[0]] / 8
            if q.value.meets(made, 0.01):
                kept += 1
            elif 1 / 9 < q.value.mid / made < 9:
                message = f"{shapes[0]} in {formats[0]} is {si(made, 'B')}, not {q.text}"
                broken.append(finding(QUESTION, "memory", f"{message}: of which tensor is it?", q))
        yield from broken if kept > 1 >= len(broken) else ()
