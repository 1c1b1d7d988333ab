"""Formulas that the text states of its own columns: "speedup = eager / compiled", "t = t0 + bytes / bw"."""

import re
from collections.abc import Iterator

from expertile.audit.finding import INCONSISTENT, QUESTION, Finding
from expertile.audit.named import Named, Record, records, words
from expertile.audit.report import Report

_NAME = r"[A-Za-zµ][\w.]*(?:[ -][A-Za-z]\w*){0,2}"
_OPERAND = rf"(?:{_NAME}|\d+(?:\.\d+)?)"
_FORMULA = re.compile(
    rf"(?P<of>{_NAME}) ?(?:=|\bis\b|:=) ?(?P<by>\(*{_OPERAND}\)*(?:(?: ?[*/×÷+] ?|"
    rf" [-−–] )\(*{_OPERAND}\)*)+)(?![\w(]| ?[=*/(])"
)
_TOKEN = re.compile(rf"{_OPERAND}|[-+*/()×÷−–]")
_SIGNS = str.maketrans("×÷−–", "*/--")
_STEPS = (1.0, 100.0, 0.01)
_MARKS = re.compile(r"[`*_]{1,2}(?=[\s).,;]|$)|(?<=\s)[`*]{1,2}(?=\w)|^[`*]+")
_MODEL = ("model", "predicted", "prediction", "fit", "fitted", "estimate", "estimated")


def formulas(report: Report) -> Iterator[Finding]:
    """Every record that has all names of a formula; where most records keep it, the one that does not is accused."""
    stated = [
        (number, m)
        for number, line in enumerate(report.lines, 1)
        if re.search(r"(?:=|\bis\b).*[*/×÷+−–-]", line)
        for m in _FORMULA.finditer(_MARKS.sub("", line))
        if len(re.findall(r"[A-Za-zµ]\w*", m["by"])) > 1
    ][:24]
    held = [*records(report)] if stated else []
    constants: dict[tuple[str, ...], set[Named]] = {}
    for f in (f for r in held if r.kind != "row" for f in r.figures):
        constants.setdefault(f.words, set()).add(f)
    lone = {k: next(iter(v)) for k, v in constants.items() if len({f.value for f in v}) == 1}
    known = {w for r in held for f in r.figures for w in f.words}
    for number, m in stated:
        names = [words(t) or (t.lower(),) for t in re.findall(_NAME, m["by"])]
        if all({*n[:1]} & known for n in names):
            yield from _kept(
                m["of"], m["by"], number, [r for r in held if any({*n[:1]} & r.known for n in names)], lone
            )


def _like(record: Record, name: tuple[str, ...]) -> Named | None:
    """The one figure of a record whose name has these words, or begins with the first of them."""
    same = [f for f in record.figures if f.words == name] or [
        f for f in record.figures if name and {*name} <= {*f.words}
    ]
    return same[0] if len(same) == 1 else None


def _operand(text: str, record: Record, lone: dict[tuple[str, ...], Named]) -> Named | float | None:
    if re.fullmatch(r"[\d.]+", text):
        return float(text)
    name = words(text) or (text.lower(),)
    return _like(record, name) or lone.get(name) or (_like(record, (name[0],)) if len(name) == 1 else None)


def _kept(of: str, by: str, number: int, held: list[Record], lone: dict[tuple[str, ...], Named]) -> Iterator[Finding]:
    tokens = _TOKEN.findall(by)
    names = [t for t in tokens if re.match(r"[A-Za-zµ]", t)]
    if len(names) < 2:
        return
    rows: list[tuple[Named, float, float, list[Named]]] = []
    for record in held:
        target = _operand(of, record, {}) or _operand(of.split()[-1], record, {})
        if target is None and len(of) <= 2:
            target = next((f for f in record.figures if {*f.words} & {*_MODEL}), None)
        parts = {t: _operand(t, record, lone) for t in names}
        own = [f for f in parts.values() if isinstance(f, Named) and f in record.figures]
        if not isinstance(target, Named) or not own or any(p is None or p is target for p in parts.values()):
            continue
        used = [p for p in parts.values() if isinstance(p, Named)]
        value = _value(tokens, {t: p.value if isinstance(p, Named) else float(p or 0) for t, p in parts.items()})
        if value is None:
            continue
        off = target.off
        for t, p in parts.items():  # by how much each may move it
            if isinstance(p, Named) and p.off:
                moved = _value(
                    tokens,
                    {
                        u: (q.value if isinstance(q, Named) else float(q or 0)) + (p.off if u == t else 0)
                        for u, q in parts.items()
                    },
                )
                off += abs((moved if moved is not None else value) - value)
        rows.append((target, value, off, used))
    rows = [*{(r[0].line, r[0].text): r for r in rows}.values()]
    best: tuple[int, float] = (0, 1.0)
    for step in _STEPS:
        good = sum(
            abs(t.value - v * step) <= (off - t.off) * step + t.off + 0.003 * abs(v * step) for t, v, off, _ in rows
        )
        best = max(best, (good, step), key=lambda x: x[0])
    good, step = best
    odd = [
        (t, v * step, used)
        for t, v, off, used in rows
        if abs(t.value - v * step) > 1.5 * ((off - t.off) * step + t.off) + 0.02 * abs(v * step)
    ]
    if len(odd) == 1 and good >= 2 and good == len(rows) - 1:
        t, v, used = odd[0]
        scale = t.value and float(
            re.sub(r"[^\d.]", "", re.sub(r"^[^\d]*", "", t.text).split(" ")[0]).rstrip(".") or 0
        ) / abs(t.value)
        message = f"{of.strip()} = {by.strip()} is {v * (scale or 1.0):.4g} here, not {t.text}"
        lines = (number, *(f.line for f in used))
        yield Finding(INCONSISTENT if good > 2 else QUESTION, "formula", t.line, t.text, message, lines)
    elif len(odd) == len(rows) > 2 and good == 0:
        ratios = sorted(t.value / v for t, v, _ in odd if v)
        constant = {f for _, _, used in odd for f in used if f in lone.values()}
        if ratios and ratios[0] > 0 and ratios[-1] < 1.02 * ratios[0] and len(constant) == 1 and 0.2 < ratios[0] < 5:
            (f,) = constant
            message = (
                f"{of.strip()} = {by.strip()} holds in no row; all are off by {ratios[0]:.3g}: is {f.name} {f.text}?"
            )
            yield Finding(QUESTION, "formula", f.line, f.text, message, (number, *(t.line for t, _, _ in odd)))


def _value(tokens: list[str], of: dict[str, float]) -> float | None:
    spelled = " ".join(repr(of[t]) if t in of else t.translate(_SIGNS) for t in tokens)
    try:
        return float(eval(spelled, {"__builtins__": {}}))  # of signs and numbers alone
    except (ArithmeticError, SyntaxError, TypeError):
        return None
