"""Derived columns of tables: speed-ups, ratios and percentages that must follow from their own row."""

from __future__ import annotations

import re
from collections.abc import Callable

from expertile.lab.audit.columns import Column, TypedTable
from expertile.lab.audit.context import Context
from expertile.lab.audit.finding import INCONSISTENT, NOT_CHECKABLE, POSSIBLE, Finding
from expertile.lab.audit.formulas import (
    COMPARABLE,
    Formula,
    change_of_columns,
    change_to_row,
    follows,
    named_pair,
    negated,
    ratio_of_columns,
    ratio_to_row,
    share_of,
    support,
)
from expertile.lab.audit.quantities import Quantity
from expertile.lab.audit.wholes import stated_and_known_peaks

BASELINE = re.compile(
    r"pytorch|torch|eager|baseline|naive|cublas|cudnn|\bcpu\b|numpy|reference|\bref\b|vanilla|native|before"
    r"|\bold\b|original"
    r"|unfused|loop|default|standard|fp32|fp16|bf16|dense|\bhf\b|hugging",
    re.I,
)
_CHANGE = re.compile(
    r"improv|reduc|overhead|gain|delta|Δ|diff|\bvs\b|sav|chang|faster|slower|speed|increas|decreas|drop|degrad"
    r"|relative|lower|higher",
    re.I,
)
_SHARE = re.compile(r"\bof\b|relative|\bvs\b|/|efficien|compared|scal|speed", re.I)
_OF_PEAK = re.compile(r"peak|\bmfu\b|\bhfu\b|\bsol\b|roofline|theoretical|utili[sz]ation|efficiency|max", re.I)


def derived(context: Context) -> list[Finding]:
    """Every ratio and percent column of every table, row by row; summary rows are left to `summaries`."""
    found: list[Finding] = []
    for t, typed in enumerate(context.report.tables):
        for column in typed.of_kind("ratio", "percent"):
            printed = {r: q for r in typed.body() if (q := typed.at(r, column)) is not None and q.bound != "<"}
            if printed:
                found += _judge(context, t, typed, column, printed, formulas_for(context, t, typed, column))
        for column in typed.columns:
            found += _beside(context, t, typed, column)
    return found


def _beside(context: Context, t: int, typed: TypedTable, column: Column) -> list[Finding]:
    """Ratios printed in brackets beside a figure: "0.33 ms (2.5x)"."""
    found: list[Finding] = []
    for kind in ("ratio", "percent"):
        if column.kind not in COMPARABLE:
            continue
        printed = {}
        for r in typed.body():
            extra = [q for q in typed.cells[r][column.index].extra if q.kind == kind]
            if len(extra) == 1:
                printed[r] = extra[0]
        if len(printed) < 2:
            continue
        others = [c for c in typed.of_kind(column.kind) if c is not column]
        formulas = [f for c in others for f in (ratio_of_columns(typed, c, column), ratio_of_columns(typed, column, c))]
        if kind == "percent":
            formulas += [
                f for c in others for f in (change_of_columns(typed, c, column), change_of_columns(typed, column, c))
            ]
            formulas += [negated(f) for f in list(formulas) if f.name.startswith("change")]
        found += [f for f in _judge(context, t, typed, column, printed, formulas) if f.verdict != NOT_CHECKABLE]
    return found


def formulas_for(context: Context, t: int, typed: TypedTable, column: Column) -> list[Formula]:
    """Every formula that may explain `column`, those named by its header first.

    Ratios may be of any two comparable columns, or to a baseline row. A percentage is a change, a share of another
    column, or a share of a peak only if its header says something of the kind ("Noise" and "Occupancy" are neither).
    """
    rivals = [c for c in typed.of_kind(*COMPARABLE) if c is not column]
    pair = named_pair(column.header, [c for c in rivals if c.system])
    found: list[Formula] = []
    if pair:
        found += [ratio_of_columns(typed, *pair, named=True), ratio_of_columns(typed, pair[1], pair[0], named=True)]
    percent = column.kind == "percent"
    others = [
        (a, b) for a in rivals for b in rivals if a is not b and a.kind == b.kind and (a, b) != pair and (b, a) != pair
    ]
    if not percent or _SHARE.search(column.header):
        found += [ratio_of_columns(typed, a, b) for a, b in others]
        measured = [c for c in rivals if c.kind != "number" or not typed.of_kind("time", "flop_rate", "byte_rate")]
        bases = [_first_row] if percent else [_base_by_unity(typed, column), _first_row]
        found += [
            ratio_to_row(typed, a, base, inverse) for a in measured for base in bases for inverse in (False, True)
        ]
    if percent:
        found += _percent_formulas(context, t, typed, column, rivals)
    return found


def _percent_formulas(
    context: Context, t: int, typed: TypedTable, column: Column, rivals: list[Column]
) -> list[Formula]:
    found: list[Formula] = []
    measured = [c for c in rivals if c.kind != "number"]
    if _CHANGE.search(column.header):
        changes = [change_of_columns(typed, a, b) for a in rivals for b in rivals if a is not b and a.kind == b.kind]
        changes += [change_to_row(typed, a, _first_row, inverse) for a in measured for inverse in (False, True)]
        found += [f for change in changes for f in (change, negated(change))]
    if _OF_PEAK.search(column.header):
        place = context.report.cell(t, 0, column.index)
        for a in measured:
            if a.kind in ("flop_rate", "byte_rate"):
                found += [
                    share_of(typed, a, whole, words, True)
                    for whole, words in stated_and_known_peaks(context, place, a.kind)
                ]
    return found


def _first_row(row: int) -> int | None:
    return 0


def _base_by_unity(typed: TypedTable, column: Column) -> Callable[[int], int | None]:
    """The nearest row, first above then below, whose ratio is printed as 1: the baseline of its group."""
    ones = [r for r in typed.body() if (q := typed.at(r, column)) is not None and q.value == 1.0 and not q.approximate]

    def base(row: int) -> int | None:
        above = [r for r in ones if r <= row]
        return above[-1] if above else (ones[0] if ones else None)

    return base


def _judge(
    context: Context, t: int, typed: TypedTable, column: Column, printed: dict[int, Quantity], formulas: list[Formula]
) -> list[Finding]:
    scored = [(support(f, printed), f) for f in formulas]
    scored = [(s, f) for s, f in scored if s[1]]
    named = [(s, f) for s, f in scored if f.named]
    best = max(named or scored, key=lambda x: (x[0][0], -x[0][1]), default=None)
    if best is None or (best[0][0] == 0 and not _sure(typed, column, best[1], len(printed))):
        return _unexplained(context, printed)
    (fits, evaluable), formula = best
    trusted = (
        (formula.named and (fits > 0 or evaluable < 3))
        or (fits >= 2 and fits >= 0.6 * evaluable)
        or _sure(typed, column, formula, evaluable)
    )
    also = [f for (n, of), f in scored if f is not formula and n >= max(2, 0.6 * of) and not named]
    found = []
    for row, quantity in printed.items():
        claim = context.of(quantity)
        if claim is None:
            continue
        term = formula.at(row)
        if term is not None and follows(quantity, term) and (trusted or evaluable < 3):
            found.append(context.finding(claim, POSSIBLE, "derived_column", f"{formula.name}: {term.words}"))
            continue
        other = next((x for f in also if (x := f.at(row)) is not None and follows(quantity, x)), None)
        if other is not None:
            found.append(context.finding(claim, POSSIBLE, "derived_column", other.words))
            continue
        lucky = None if formula.named else _explained(row, quantity, [f for _, f in scored])
        if term is None or not trusted or lucky:
            why = lucky or "the figures it would follow from are not in its row"
            found.append(context.finding(claim, NOT_CHECKABLE, "derived_column", f"{quantity.text}: {why}"))
            continue
        text = (
            f"printed {quantity.text}, but {formula.name}: {term.words} ({fits} of {evaluable} rows follow this "
            "formula)"
        )
        value, limit = quantity.value, term.value.mid
        if column.kind == "percent":
            value, limit = 100 * value, 100 * limit
        unit = "%" if column.kind == "percent" else "x"
        found.append(context.finding(claim, INCONSISTENT, "derived_column", text, value, limit, unit))
    return found


def _explained(row: int, quantity: Quantity, formulas: list[Formula]) -> str:
    if quantity.value == 1.0:
        return ""
    for f in formulas:
        term = f.at(row)
        if term is not None and "baseline" not in f.name and follows(quantity, term):
            return f"follows from {term.words}, unlike its column"
    return ""


def _sure(typed: TypedTable, column: Column, formula: Formula, rows: int) -> bool:
    """Whether a formula must hold although no majority of rows shows it: two rival systems and one speed-up."""
    if column.kind != "ratio" or " / " not in formula.name:
        return False
    if formula.named:
        return True
    kinds = [c for c in typed.of_kind(*COMPARABLE) if not c.statistic and not c.phase and c.kind != "bytes"]
    by_kind = {k: [c for c in kinds if c.kind == k] for k in {c.kind for c in kinds}}
    pairs = [cs for cs in by_kind.values() if len(cs) >= 2]
    if len(pairs) != 1 or len(pairs[0]) != 2 or len(kinds) != 2:
        return False
    a, b = pairs[0]
    speedup = bool(re.search(r"speed-?\s?up|\bratio\b|faster|slower", column.header, re.I))
    baseline = bool(BASELINE.search(a.header)) != bool(BASELINE.search(b.header))
    return speedup and baseline and formula.name in (f"{a.header} / {b.header}", f"{b.header} / {a.header}")


def _unexplained(context: Context, printed: dict[int, Quantity]) -> list[Finding]:
    found = []
    for quantity in printed.values():
        claim = context.of(quantity)
        if claim is not None:
            text = f"{quantity.text}: no two columns of this table give it"
            found.append(context.finding(claim, NOT_CHECKABLE, "derived_column", text))
    return found
