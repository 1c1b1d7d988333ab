"""Units of columns that print bare numbers: taken from the words around the table, never guessed from magnitude."""

from __future__ import annotations

import re

from expertile.lab.audit.columns import MEASURED, Column, TypedTable, retyped
from expertile.lab.audit.document import Document
from expertile.lab.audit.quantities import Quantity, find_quantities, unit_at

_SAID = re.compile(
    r"(?:\b(?:in|as|units?|values?|ylabel|y-axis|metric)\b\s*(?:is|are|:|=|in)?\s*|[(\[])(?=[A-Za-zµμ])", re.I
)
_RATES = ("time", "flop_rate", "byte_rate", "token_rate")


def with_units(doc: Document, tables: list[TypedTable]) -> list[TypedTable]:
    """The tables, bare-number columns read in the unit that the text gives for them."""
    tables = [_by_words(doc, typed) for typed in tables]
    known: dict[tuple[str, ...], tuple[str, float, str]] = {}
    for typed in tables:
        for column in _bare(typed):
            quantity, line = _told_of(doc, typed, column)
            if quantity is not None:
                known.setdefault(column.system, (quantity.kind, quantity.scale, f"line {line}"))
    return [_of_systems(typed, known) for typed in tables]


def _of_systems(typed: TypedTable, known: dict[tuple[str, ...], tuple[str, float, str]]) -> TypedTable:
    """Systems set side by side are measured in one unit: what is said of one holds for its neighbours."""
    bare = [c for c in _bare(typed) if c.system]
    said = {known[c.system] for c in bare if c.system in known}
    if len({unit[:2] for unit in said}) != 1:
        return typed
    kind, scale, source = next(iter(said))
    for column in bare:
        typed = retyped(typed, column.index, kind, scale, source)
    return typed


def _bare(typed: TypedTable) -> list[Column]:
    return [
        c
        for c in typed.columns
        if c.kind == "number" and not re.search(r"score|rank|id\b|index|layer|run|epoch|#", c.header, re.I)
    ]


def _by_words(doc: Document, typed: TypedTable) -> TypedTable:
    """ "value in TFLOPS, higher is better" or a lone "(GB/s)" beside a table without any measured column."""
    bare = _bare(typed)
    if not bare or [c for c in typed.of_kind(*MEASURED) if c.kind not in ("ratio", "percent")]:
        return typed
    t = typed.table
    near = [s for s in doc.statements if s.section == t.section and (s.block == t.block or 0 < t.line - s.line <= 4)]
    last = t.lines[-1]
    near += [s for s in doc.statements if s.section == t.section and 0 < s.line - last <= 2 and s not in near]
    found: dict[tuple[str, float], str] = {}
    for text, where in [(t.lead, "the line above"), *((s.text, f"line {s.line}") for s in near)]:
        for match in _SAID.finditer(text):
            unit = unit_at(text, match.end())
            if unit and unit[0] in _RATES and unit[3] - match.end() > 1:
                found.setdefault(unit[:2], where)
    if len(found) != 1:
        return typed
    (kind, scale), where = next(iter(found.items()))
    for column in bare:
        typed = retyped(typed, column.index, kind, scale, where)
    return typed


def _told_of(doc: Document, typed: TypedTable, column: Column) -> tuple[Quantity | None, int]:
    """ "trtllm peak: 1753 TFLOPs/s" names a column and prints its greatest cell with a unit."""
    cells = [q for r in typed.body() if (q := typed.at(r, column)) is not None]
    if column.system and len(cells) >= 2:
        for s in doc.statements:
            quantity = _told(s.text, column, cells) if s.kind not in ("code", "shell") else None
            if quantity is not None:
                return quantity, s.line
    return None, 0


def _told(text: str, column: Column, cells: list[Quantity]) -> Quantity | None:
    name = re.compile(r"\W*".join(re.escape(w) for w in column.system), re.I)
    best = max(c.value for c in cells)
    for quantity in find_quantities(text):
        near = text[max(0, quantity.start - 40) : quantity.start]
        named = name.search(near)
        if quantity.kind not in _RATES or not named or re.search(r"\bvs\b|,", near[named.end() :]):
            continue
        if any((c.interval * quantity.scale).meets(quantity.interval) and c.value == best for c in cells):
            return quantity
    return None
