"""Units that the text near a table states for its columns."""

import re
from dataclasses import replace

from expertile.audit.blocks import Block, Table
from expertile.audit.facts import size_of_name
from expertile.audit.pattern import regex
from expertile.audit.quantity import RATIO, clean
from expertile.audit.units import RATES, TIMES, Unit, match_unit, unit_of_name

# "All rates in TFLOP/s", "(times in us)", "units: GB/s"
_ALL_IN = regex(
    r"(?im)^\W*(?=(?:milli|micro)?seconds (?:for|per|of) )|"
    r"(?<=[.;] )(?=(?:[mµu]s|seconds) per [a-z]+, )|^[\w .-]{3,60} \((?=[A-Za-zµ/]{1,9}\):$)|"
    r"^\W*table\b[^\n]{3,50}, (?=[A-Za-zµ]+/s, )|"
    r"\b(?:all|both|rates?|bandwidths?|times?|timings?|latenc\w+|values?|numbers|figures|results?|units?|memory|sizes?|"
    r"throughputs?)\b(?: of [\w ]{1,16})?"
    r"[\"'`]*(?: (?:are|is|were|given|shown|measured|reported))*(?: in | ?[:=] *[\"']?)"
    r"(?:(?:median|mean|best) )?(?=[A-Za-zµμ])"
)
_NO_MEASURE = regex(
    r"(?i)^\W*$|%|±|_per_|\b(?:[mnk]|ids?|ranks?|calls|counts?|rounds|iter\w*|runs|size|batch|loss|err\w*|acc\w*|ops|"
    r"versions?|gpus?|score|g?flops?|bytes|per|of|share|seq\w*|delta|change|power|"
    r"watts?|energy|mem\w*|clock|freq\w*|temp\w*|util\w*|occup\w*|intensity|params?|price|cost)\b"
)
_KINDS = ("time", "bytes", *RATES)  # whose units a text states for a whole column


def _odd(cell: str) -> bool:
    """Whether a whole number looks measured: large, and neither a round one nor one of a machine's sizes."""
    n = int(cell.replace(",", "")) if re.fullmatch(r"[\d,]*\d", cell) else 0
    return n >= 100 and bool(n % 5 and n % 8)


def with_units(blocks: list[Block], text: str) -> list[Block]:
    """The blocks with the one unit that the text near a table states for all figures, in heads that have none."""
    found = [(u, m.end()) for m in _ALL_IN.finditer(text) if (u := match_unit(text[m.end() :]))]
    typed = [(u, n, at) for (u, n), at in found if u.kind in (*_KINDS, "s_per_item")]
    told = [(u, text[at : at + n], text.count("\n", 0, at)) for u, n, at in typed]
    reach = 40 if text.count("\n") > 80 else 80
    units = [{u: name for u, name, line in told if abs(line - b.first) < reach} for b in blocks]
    for above, of in zip(blocks, units[1:], strict=False):  # a table under "Copy rate (GB/s)"
        m = re.search(r"\(([^()]+)\)\W*$", above.text) if above.kind == "heading" else None
        if m and (u := match_unit(m[1])) and u[1] == len(m[1]) and u[0].kind in _KINDS:
            of.setdefault(u[0], m[1])
    lines = text.splitlines()
    told_by = [_legend(b.table, "\n".join(lines[max(0, b.first - 16) : b.first])) if b.table else None for b in blocks]
    each = zip(blocks, told_by, units, strict=True)
    return [replace(b, table=_with_unit(t, of)) if t else b for b, t, of in each]


def _legend(table: Table, above: str) -> Table:
    """A table whose columns' units the text above it states by their names: "size in MiB, time in ms"."""
    header = list(table.header)
    for c, h in enumerate(map(clean, table.header)):
        plain = re.fullmatch(r"[A-Za-z][A-Za-z ]{2,20}", h) and not unit_of_name(h)
        m = re.search(rf"(?i)\b{h}s?\s+(?:is\s+|are\s+)?in\s+(?=[A-Za-zµ])", above) if plain else None
        found = match_unit(above[m.end() :]) if m else None
        if m and found and found[0].kind in _KINDS:
            header[c] = f"{h} ({above[m.end() : m.end() + found[1]]})"
    return replace(table, header=tuple(header))


def _with_unit(table: Table, units: dict[Unit, str]) -> Table:
    if len(units) != 1 or any(re.search(r"(?i)\bunits?$", h) for h in table.header):
        return table
    ((unit, name),) = units.items()
    known = [unit_of_name(clean(h)) for h in table.header]
    header = list(table.header)
    peaks = [bool(re.search(r"(?i)peak|theor", h)) and u == unit for h, u in zip(table.header, known, strict=True)]
    others = [u for u, peak in zip(known, peaks, strict=True) if u and not peak]
    if any(u.kind == unit.kind or {u.kind, unit.kind} < {*TIMES} for u in others):
        return table
    for c, h in enumerate(header):
        cells = [clean(cells[c]) for _, cells in table.rows if cells[c].strip()]
        measured = sum(bool(re.match(r"\d[\d,]*\.\d", cell) or _odd(cell)) for cell in cells) * 2 > len(cells)
        measured |= any(peaks) and all(re.fullmatch(r"\d{1,3}(?:,\d{3})+", cell) for cell in cells)
        if measured and not (known[c] or size_of_name(h) or RATIO.search(h) or _NO_MEASURE.search(clean(h))):
            header[c] = f"{h} ({name})"
    return replace(table, header=tuple(header))
