"""Arithmetic that the text itself writes out: "51.44 / 17.52 = 2.94x", "6 × 1.3e9 × 524288 = 4.09e15"."""

import re
from collections.abc import Callable, Iterator

from expertile.audit.finding import INCONSISTENT, Finding
from expertile.audit.interval import NUMBER, printed
from expertile.audit.report import Report

# A number, what it is raised to, and one word of unit; "x" and a power's mark are no units.
_UNIT = r"%|[xX](?![\w(]| ?\d)|(?![xX]\b)[A-Za-zµμ][A-Za-zµμ/]{0,11}\b(?![(\d])"
_TERM = rf"\(*(?:{NUMBER})(?: ?(?:\^|\*\*) ?\d+(?:\.\d+)?)?(?: ?(?:{_UNIT}))?\)*"
_SIGN = r"(?: ?[*/×÷·] ?| [xX] | ?\+ ?| [-−–] )"
_SIDE = re.compile(rf"{_TERM}(?:{_SIGN}{_TERM})*")
_EQUALS = re.compile(r" ?(?P<sign>=|≈|≃|~=) ?(?P<about>[~≈]?) ?")
_TOKEN = re.compile(
    rf"(?P<n>{NUMBER})(?: ?(?:\^|\*\*) ?(?P<power>\d+(?:\.\d+)?))?(?: ?(?P<unit>{_UNIT}))?|[()]|{_SIGN}"
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_SUPER = re.compile(r"(?<=\d)[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
# Where units stand beside the figures their prefixes are not spelled out: decimal steps, binary ones, bits, the clock.
_STEPS = [10.0 ** (3 * k) for k in range(-6, 7)]
_BINARY = [s * 1.024**j * b for s in _STEPS for j in range(-4, 5) for b in (1, 8, 0.125)]
_CLOCK = [s * c for s in _STEPS for c in (60, 3600, 86400, 24, 1 / 60, 1 / 3600, 1 / 86400, 1 / 24)]
_BYTES = re.compile(r"(?:^|\b)(?:[KMGTkmgt]i?[Bb](?:ytes)?|[Bb]ytes?|[Bb]its?|[KMG]i?)(?:/s|ps)?\b")
_HOURS = re.compile(r"(?i)\b(?:h|hours?|hrs?|d|days?|min\w*|sec\w*|s|[km]?Wh?|[km]?J)\b")


class _Side:
    """One side of an equation: its tokens, what its numbers are and by how much each may be off, its units."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.signs: list[str] = []
        self.numbers: list[tuple[float, float, float]] = []  # value, what it may be off by, power
        self.units: list[str] = []
        for m in _TOKEN.finditer(text):
            if m["n"]:
                held = printed(m["n"])
                whole = m["n"].replace(",", "").isdigit()
                self.numbers.append(
                    (held.mid, 0.0 if whole and not m["unit"] else held.hi - held.mid, float(m["power"] or 1))
                )
                self.units += [m["unit"]] if m["unit"] else []
            sign = "#" if m["n"] else m[0].strip()
            self.signs.append({"*": "×", "·": "×", "x": "×", "X": "×", "/": "÷", "-": "−", "–": "−"}.get(sign, sign))

    def value(self, off: int = -1) -> float:
        """What the side comes to; with its number `off` by what the print leaves open."""
        numbers = [(v + d * (i == off)) ** p for i, (v, d, p) in enumerate(self.numbers)]
        return _sum(self.signs[:], numbers)

    def spread(self) -> float:
        middle = self.value()
        return sum(abs(self.value(i) - middle) for i in range(len(self.numbers)))


def _sum(signs: list[str], numbers: list[float]) -> float:
    return _chain(signs, numbers, "+−", lambda s, n: _chain(s, n, "×÷", _atom))


def _chain(signs: list[str], numbers: list[float], of: str, part: Callable[[list[str], list[float]], float]) -> float:
    value = part(signs, numbers)
    while signs and signs[0] in of:
        sign, other = signs.pop(0), part(signs, numbers)
        value = {"+": value + other, "−": value - other, "×": value * other}.get(sign, value / (other or float("nan")))
    return value


def _atom(signs: list[str], numbers: list[float]) -> float:
    if signs.pop(0) == "#":
        return numbers.pop(0)
    value = _sum(signs, numbers)
    signs.pop(0)
    return value


def _side(text: str) -> _Side | None:
    """`text` as a side; brackets around the whole equation go; None where they do not match."""
    text = text.strip()
    text = text[max(0, text.count("(") - text.count(")")) :] if text[0] == "(" else text
    text = text[: len(text) - max(0, text.count(")") - text.count("("))] if text[-1] == ")" else text
    depth = [text[: i + 1].count("(") - text[: i + 1].count(")") for i in range(len(text))]
    return _Side(text) if depth[-1] == 0 and min(depth) >= 0 else None


def equations(report: Report) -> Iterator[Finding]:
    """Every equation of plain numbers, each side of it against the next."""
    for row in (r for r in report.all_rows if r.kind != "record"):
        raw = report.lines[row.line - 1] if 0 < row.line <= len(report.lines) else ""
        if "=" not in row.text and "≈" not in row.text or re.search(r"\d ?\*\* ?\d|\\frac|//", raw):
            continue
        text = _SUPER.sub(lambda m: "^" + m[0].translate(_RAISED), row.text)
        text = re.sub(r"(?<=\+ )[A-Za-z][A-Za-z ]{1,24}(?=\d)", "", text)  # "4 ms + queue 11 ms"
        at = 0
        while left := _SIDE.search(text, at):
            at = left.end()
            equals = _EQUALS.match(text, at)
            right = _SIDE.match(text, equals.end()) if equals else None
            before = text[: left.start()]
            # "N × 3 / 4" and "sqrt(16 × 4)" are not made of the numbers alone; nor is "= 2 × M".
            open_end = right and re.match(r" ?[*×/÷·^(] ?\w?|\w| ?[+−-] ?[A-Za-z(]", text[right.end() :])
            if not (equals and right) or re.search(r"[\w.,)\]]$|[*×/÷·+^−-] ?$| [xX] $|\d ?, ?$|[(\[]\w+, ?$", before) or open_end:
                continue
            at = right.start()
            a, b = _side(left[0]), _side(right[0])
            about = bool(equals["about"]) or equals["sign"] != "="
            if a and b and len(a.numbers + b.numbers) > 2 and "B" not in a.units and not _holds(a, b, about):
                message = f"{a.text} is {a.value():.4g}, not {b.text}"
                here = [q.line for q in row.quantities if left.start() <= q.start <= right.end()]
                line = max(here, default=row.line)
                yield Finding(INCONSISTENT, "arithmetic", line, f"{a.text} = {b.text}", message, (line,))


def _holds(a: _Side, b: _Side, about: bool) -> bool:
    made, said = a.value(), b.value()
    units = {*a.units, *b.units}
    mixed = len({*a.units}) > 1 and ({"+", "−"} & {*a.signs})
    if not made > 0 or not said > 0 or mixed:
        return True
    forms = [made]
    if "%" in units:  # a share, or the change that it is
        forms = [f * s for f in (made, made - 1, 1 - made, 1 - 1 / made) for s in (1, 100, 0.01)]
    elif units - {"x", "X"} or "10^" in a.text + b.text:
        steps = (_STEPS, _BINARY * any(map(_BYTES.match, units)), _CLOCK * any(map(_HOURS.search, units)))
        forms = [made * s for some in steps for s in some]
    open_share = a.spread() / made + b.spread() / said + (0.06 if about else 0.012)
    # "4096 / 128 = 32 tiles × 56" goes on with what it is.
    said_first = b.numbers[0][0] ** b.numbers[0][2]
    if any(abs(said_first - f) <= open_share * max(said_first, f) for f in forms):
        return True
    return any(abs(said - f) <= open_share * max(said, f) for f in forms if f > 0)
