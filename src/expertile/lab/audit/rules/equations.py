"""Arithmetic that a report writes out: "24 × 0.170ms = 4.07ms" must come out, within the digits printed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from expertile.lab.audit.context import Context
from expertile.lab.audit.finding import INCONSISTENT, POSSIBLE, Finding
from expertile.lab.audit.interval import Interval, printed
from expertile.lab.audit.quantities import NUMBER, show, unit_at

_TOKEN = re.compile(
    rf"(?P<number>(?<![\w.])[~≈]?{NUMBER})|(?P<op>[×*·÷/()+]|(?<=\s)[-−–](?=\s)|(?<=[\s\d)])[xX](?=[\s\d(]))"
    r"|(?P<word>[A-Za-zµμ_%][\w%µμ'-]*)"
)
_QUOTIENT = {
    ("bytes", "time"): "byte_rate",
    ("flops", "time"): "flop_rate",
    ("flops", "flop_rate"): "time",
    ("bytes", "byte_rate"): "time",
    ("flop_rate", "byte_rate"): "intensity",
    ("flops", "bytes"): "intensity",
}
_PURE = {"", "ratio", "percent"}


@dataclass(frozen=True)
class Value:
    """An intermediate result: interval in SI, its kind ("" for a pure number), and the nominal value."""

    interval: Interval
    kind: str
    nominal: float


class _NotArithmetic(Exception):
    pass


def equations(context: Context) -> list[Finding]:
    """Every "expression = figure" of every line and cell."""
    found = []
    for s in context.report.doc.statements:
        if s.kind in ("code", "shell") or "=" not in s.text:
            continue
        for left, right, text in _equalities(s.text):
            finding = _judge(left, right, text)
            if finding is None:
                continue
            ok, explanation = finding
            verdict = POSSIBLE if ok else INCONSISTENT
            here = context.by_line.get(s.line, [])
            at = next((c.anchor for c in here if right.start <= c.quantity.start < right.end), (s.line, right.start))
            found.append(Finding(s.line, s.text.strip(), verdict, "equation", explanation, anchor=at))
    return found


@dataclass(frozen=True)
class _Side:
    value: Value
    operators: int
    start: int
    end: int


def _equalities(text: str) -> list[tuple[_Side, _Side, str]]:
    cuts = list(re.finditer(r"(?<![=<>!:≤≥])[=≈](?!=)", text))
    found = []
    for i, cut in enumerate(cuts):
        start = max(cuts[i - 1].end() if i else 0, _clause_start(text, cut.start()))
        end = cuts[i + 1].start() if i + 1 < len(cuts) else len(text)
        left = _side(text, start, cut.start(), whole=True)
        right = _side(text, cut.end(), end, whole=i + 1 < len(cuts))
        if left and right and left.operators and not (right.operators and left.operators > 3):
            found.append((left, right, text))
    return found


def _clause_start(text: str, end: int) -> int:
    breaks = [m.end() for m in re.finditer(r"[:;→]\s|\.\s|, ", text[:end])]
    return breaks[-1] if breaks else 0


def _side(text: str, start: int, end: int, whole: bool) -> _Side | None:
    """The expression in text[start:end]; unless `whole`, reading stops at the first break after a figure."""
    piece = text[start:end]
    if not whole:
        stop = re.search(
            r"(?<=\d|[A-Za-z%)])\s*(?:,(?!\d{3})|[;→:]|\.\s|\.$|\(|\b(?:or|and|in|for|at|with|on|when|if|which"
            r"|to)\b|-?->|\bvs\b|\bper\b|@)",
            piece,
        )
        piece = piece[: stop.start()] if stop and re.search(r"\d", piece[: stop.start()]) else piece
    if re.search(r"\^|\[|\]|²|³|\.\.|,\s*\d", re.sub(r"(?<=\d),(?=\d{3})", "", piece)):
        return None
    try:
        tokens = _tokens(piece)
        if not tokens:
            return None
        value, rest = _sum(tokens)
        if rest:
            return None
    except _NotArithmetic:
        return None
    operators = sum(1 for t in tokens if isinstance(t, str) and t not in "()")
    return _Side(value, operators, start, start + len(piece))


def _tokens(piece: str) -> list[Value | str]:
    found: list[Value | str] = []
    position = 0
    while position < len(piece):
        match = _TOKEN.search(piece, position)
        if not match:
            break
        between = piece[position : match.start()]
        if re.search(r"[^\s,:$~≈.\"'!?#&|-]", between):
            raise _NotArithmetic
        position = match.end()
        if match["number"]:
            number = match["number"]
            unit = unit_at(piece, position) or (
                unit_at(piece, position + 1) if piece[position : position + 1] in (" ", "-") else None
            )
            if unit and unit[0] == "ratio" and piece[position : position + 1] == " ":
                unit = None
            after = piece[unit[3] if unit else position :][:1]
            if after.isalpha():
                raise _NotArithmetic  # "2n + 1"
            kind, scale = (unit[0], unit[1]) if unit else ("", 1.0)
            approximate = number[0] in "~≈"
            text = number.lstrip("~≈")
            interval = printed(text, approximate)
            value = float(text.replace(",", ""))
            if not unit and not approximate and "." not in text and "e" not in text.lower():
                interval = Interval.of(value)
            found.append(Value(interval * scale, "" if kind in _PURE else kind, value * scale))
            if unit:
                position = unit[3]
        elif match["op"]:
            found.append(
                {"x": "*", "X": "*", "×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"}.get(match["op"], match["op"])
            )
        elif re.search(r"\d", match["word"]) or piece[position : position + 1] == "(":
            raise _NotArithmetic  # a name with digits, or a function such as ceil(...)
    return _without_asides(found)


def _without_asides(tokens: list[Value | str]) -> list[Value | str]:
    """Drop "()" left by bracketed words."""
    text: list[Value | str] = []
    for token in tokens:
        if token == ")" and text and text[-1] == "(":
            text.pop()
        else:
            text.append(token)
    return text


def _sum(tokens: list[Value | str]) -> tuple[Value, list[Value | str]]:
    value, tokens = _product(tokens)
    while tokens and tokens[0] in ("+", "-"):
        sign, tokens = tokens[0], tokens[1:]
        other, tokens = _product(tokens)
        if other.kind != value.kind:
            raise _NotArithmetic
        if sign == "+":
            value = Value(value.interval + other.interval, value.kind, value.nominal + other.nominal)
        else:
            value = Value(value.interval - other.interval, value.kind, value.nominal - other.nominal)
    return value, tokens


def _product(tokens: list[Value | str]) -> tuple[Value, list[Value | str]]:
    value, tokens = _atom(tokens)
    while tokens and tokens[0] in ("*", "/"):
        sign, tokens = tokens[0], tokens[1:]
        other, tokens = _atom(tokens)
        if sign == "*":
            if value.kind and other.kind:
                raise _NotArithmetic
            value = Value(value.interval * other.interval, value.kind or other.kind, value.nominal * other.nominal)
        else:
            if other.nominal == 0:
                raise _NotArithmetic
            kind = (
                ""
                if value.kind == other.kind
                else value.kind
                if not other.kind
                else _QUOTIENT.get((value.kind, other.kind))
            )
            if kind is None:
                raise _NotArithmetic
            value = Value(value.interval / other.interval, kind, value.nominal / other.nominal)
    return value, tokens


def _atom(tokens: list[Value | str]) -> tuple[Value, list[Value | str]]:
    if not tokens:
        raise _NotArithmetic
    head, rest = tokens[0], tokens[1:]
    if head == "(":
        value, rest = _sum(rest)
        if not rest or rest[0] != ")":
            raise _NotArithmetic
        return value, rest[1:]
    if isinstance(head, Value):
        return head, rest
    raise _NotArithmetic


def _judge(left: _Side, right: _Side, text: str) -> tuple[bool, str] | None:
    a, b = left.value, right.value
    if a.kind != b.kind:
        return None
    # A cut-off last digit is not an error; neither is reading GB as GiB on one side.
    half = (b.interval.hi - b.interval.lo) / 2
    allowed = Interval(b.interval.lo - 0.02 * half, b.interval.hi + 0.98 * half)
    said = text[left.start : right.end].strip(" :-")
    result = show(a.kind, a.nominal) if a.kind else f"{a.nominal:.6g}"
    ok = allowed.meets(a.interval)
    if not ok and a.kind == "bytes":
        ok = any(allowed.meets(a.interval * f) or allowed.meets(a.interval / f) for f in (1.024, 1.024**2, 1.024**3))
    if not ok and not a.kind and half == 0 and a.nominal:
        whole = not float(a.nominal).is_integer()
        ok = whole and abs(a.nominal - b.nominal) < 1  # rounded, or divided in whole numbers
    return ok, f"{said}: the left side is {result}"
