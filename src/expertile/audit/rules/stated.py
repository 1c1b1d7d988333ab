"""Formulas that the text states of its own columns: "speedup = eager / compiled", "t = t0 + bytes / bw", "computed as
1 / Mean"."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from expertile.audit.finding import INCONSISTENT, QUESTION, Finding
from expertile.audit.pattern import regex
from expertile.audit.records import Named, Record, digits, records, words
from expertile.audit.report import Report

_NAME = r"[A-Za-zµ][\w.]*(?:[ -][A-Za-z]\w*){0,2}"
_OPERAND = rf"(?:{_NAME}|\d+(?:\.\d+)?)"
_FORMULA = regex(
    rf"(?P<of>{_NAME}) ?(?:=|\bis\b|:=|: [\w ,]{{0,40}}\b(?P<told>computed as)) ?"
    rf"(?P<by>\(*{_OPERAND}\)*(?:(?: ?[*/×÷+] ?| [-−–] )\(*{_OPERAND}\)*)+)(?![\w(]| ?[=*/]| \((?!\w{{1,4}}\)))"
)
_TOKEN = regex(rf"{_OPERAND}|[-+*/()×÷−–]")
_SIGNS = str.maketrans("×÷−–", "*/--")
_STEPS = (1.0, 100.0, 0.01)
_MARKS = regex(r"(?<=\S)[`*_]{1,2}(?=[\s).,;]|$)|(?<=\s)[`*]{1,2}(?=\w)|^[`*]+")


def stated(report: Report) -> Iterator[Finding]:
    """Every record that has all names of a formula; where most records keep it, the one that does not is accused."""
    stated = [
        (number, m)
        for number, line in enumerate(report.lines, 1)
        if re.search(r"(?:=|\bis\b|computed as).*[*/×÷+−–-]", line)
        for m in _FORMULA.finditer(_MARKS.sub("", line))
        if len(re.findall(r"[A-Za-zµ]\w*", m["by"])) > (0 if m["told"] or re.search(r"\d\.\d", m["by"]) else 1)
    ][:24]
    held = [*records(report)] if stated else []
    constants: dict[tuple[str, ...], set[Named]] = {}
    for f in (f for r in held if r.kind != "row" for f in r.figures):
        constants.setdefault(f.words, set()).add(f)
    lone = {k: next(iter(v)) for k, v in constants.items() if len({f.value for f in v}) == 1}
    known = {w for r in held for f in r.figures if "=" not in f.name for w in f.words}
    for number, m in stated:
        names = [words(t) or (t.lower(),) for t in re.findall(_NAME, m["by"])]
        if all({*n[:1]} & known for n in names):
            some = [r for r in held if any({*n[:1]} & r.known for n in names)]
            yield from _kept(m["of"], m["by"], number, some, lone)


def _like(record: Record, name: tuple[str, ...]) -> Named | None:
    """The one figure of a record whose name has these words, or begins with the first of them."""
    same = [f for f in record.figures if f.words == name] or [
        f for f in record.figures if name and {*name} <= {*f.words}
    ]
    return same[0] if len(same) == 1 else None


def _begins(record: Record, of: str) -> Named | None:
    """The figure of a column whose name is the formula: "imbalance = busiest / average"."""
    return next((f for f in record.figures if re.match(rf"(?i){re.escape(of)} ?=", f.name)), None)


def _operand(text: str, record: Record, lone: dict[tuple[str, ...], Named]) -> Named | None:
    name = words(text) or (text.lower(),)
    return _like(record, name) or lone.get(name) or (_like(record, (name[0],)) if len(name) == 1 else None)


Row = tuple[Named, float, float, list[Named]]  # a figure, what it should be, by how much that may be off, of what


def _kept(of: str, by: str, number: int, held: list[Record], lone: dict[tuple[str, ...], Named]) -> Iterator[Finding]:
    of = re.split(r" is | = ", of)[-1]
    # Beside plain numbers the figures may count in the units of their columns.
    both = [_rows(of, _TOKEN.findall(by), held, lone, raw) for raw in (False, True)]
    ranked = [(sum(_fits(r, step, 1.0) for r in rows), -i, step) for i, rows in enumerate(both) for step in _STEPS]
    good, i, step = max(ranked, key=lambda x: x[:2])
    rows = both[-i]
    odd = [(t, v * step, used) for t, v, off, used in rows if not _fits((t, v, off, used), step, 1.5)]
    if len(odd) == 1 and good >= 2 and good == len(rows) - 1:
        t, v, used = odd[0]
        v *= 1.0 if i or not t.value else digits(t) / abs(t.value)
        message = f"{of.strip()} = {by.strip()} is {v:.4g} here, not {t.text}"
        lines = (number, *(f.line for f in used))
        yield Finding(INCONSISTENT if good > 2 else QUESTION, "formula", t.line, t.text, message, lines)


def _fits(row: Row, step: float, times: float) -> bool:
    t, v, off, _ = row
    slack = 0.003 if times == 1 else 0.02
    return abs(t.value - v * step) <= times * (off * step + t.off) + slack * abs(v * step)


def _rows(of: str, tokens: list[str], held: list[Record], lone: dict[tuple[str, ...], Named], raw: bool) -> list[Row]:
    """Every record that has the formula's names."""
    names, found = [t for t in tokens if re.match(r"[A-Za-zµ]", t)], dict[tuple[int, str], Row]()
    for record in held:
        target = _begins(record, of) or _operand(of, record, {}) or _operand(of.split()[-1], record, {})
        if isinstance(target, Named):
            record = replace(record, figures=[f for f in record.figures if f is not target])
        parts = {t: p for t in names if isinstance(p := _operand(t, record, lone), Named)}
        if not isinstance(target, Named) or len(parts) < len({*names}) or target in parts.values():
            continue
        target, parts = (_bare(target), {t: _bare(f) for t, f in parts.items()}) if raw else (target, parts)
        plain = {t: f.value for t, f in parts.items()}
        value = _value(tokens, plain)
        moved = [_value(tokens, plain | {t: f.value + f.off}) for t, f in parts.items()]  # by how much each may move it
        if value is not None and all(m is not None for m in moved):
            off = sum(abs((m or 0.0) - value) for m in moved)
            found[target.line, target.text] = (target, value, off, [*parts.values()])
    return [*found.values()]


def _bare(f: Named) -> Named:
    """The figure as it is printed, without its unit."""
    value = math.copysign(digits(f), f.value)
    return replace(f, value=value, off=f.off * abs(value / f.value) if f.value else f.off)


def _value(tokens: list[str], of: dict[str, float]) -> float | None:
    spelled = " ".join(repr(of[t]) if t in of else t.translate(_SIGNS) for t in tokens)
    try:
        return float(eval(spelled, {"__builtins__": {}}))  # of signs and numbers alone
    except (ArithmeticError, SyntaxError, TypeError):
        return None
