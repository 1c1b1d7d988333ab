"""Arithmetic that the text itself writes out: "51.44 / 17.52 = 2.94x", "6 × 1.3e9 × 524288 = 4.09e15"."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from expertile.audit.finding import INCONSISTENT, Finding
from expertile.audit.interval import NUMBER, printed
from expertile.audit.report import Report
from expertile.audit.units import match_unit

# A number, what it is raised to, and one word of unit; "x" between two numbers is none.
_UNIT = r"%|[xX](?![\w(]| ?\d)|(?![xX]\b)[A-Za-zµμ](?:[A-Za-zµμ/]|-(?=[a-z])){0,11}\b(?![(\d])"
_ATOM = rf"(?P<n>{NUMBER})(?: ?(?:\^|\*\*) ?(?P<power>\d+(?:\.\d+)?))?(?: ?(?P<unit>{_UNIT}))?"
_SIGN = r"(?: ?[*/×÷·] ?| [xX] | ?\+ ?| [-−–] )"
_TERM = rf"\(*{re.sub(r'[?]P<[a-z]+>', '?:', _ATOM)}\)*"
_SIDE = re.compile(rf"{_TERM}(?:{_SIGN}{_TERM})*")
_EQUALS, _TOKEN = re.compile(r" ?= ?"), re.compile(rf"{_ATOM}|[()]|{_SIGN}")
# "1/16/256 elements" is a list, "14/14 models × 2" no quotient.
_NO_SUM = re.compile(r"\d/\d+/\d|\d/\d+ [A-Za-z]+ ?[*x×·]")
_SPELL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹·×÷−–xX", "0123456789**/--**")
# "N × 3 / 4" and "sqrt(16 × 4)" are not made of the numbers alone; nor is "= 2 × M".
_PART_OF = re.compile(r"[<>≤≥] ?$|[\w.,)\]]$|[*×/÷·+^−-] ?$| [xX] $|\d ?, ?$|[(\[]\w+, ?$")
_GOES_ON = re.compile(r" ?[*×/÷·^(] ?\w?|\w| ?[+−-] ?[A-Za-z(]")
# Where units stand beside the figures their prefixes are not spelled out: decimal steps, binary ones, bits, the clock.
_STEPS = [10.0 ** (3 * k) for k in range(-6, 7)]
_BINARY = [s * 1.024**j * b for s in _STEPS for j in range(-4, 5) for b in (1, 8, 0.125)]
_CLOCK = [s * c**e for s in _STEPS for c in (60, 3600, 86400, 24) for e in (1, -1)]
_WHOLE = re.compile(r"(?:[Bb](?:ytes?|its?)?|GPUs?|layers|heads|tokens)?")
_BYTES = re.compile(r"(?:[KMGTkmgt]i?[Bb](?:ytes)?|[Bb]ytes?|[Bb]its?|[KMG]i?)(?:/s|ps)?\b")
_HOURS = re.compile(r"(?i)\b(?:h|hours?|hrs?|d|days?|min\w*|sec\w*|s|[km]?Wh?|[km]?J)\b")


@dataclass(frozen=True)
class _Side:
    """One side of an equation: what it comes to, by which share the print may be off, its first number, its units."""

    text: str
    value: float
    open: float
    first: float
    count: int
    units: frozenset[str]


def _side(text: str) -> _Side | None:
    """`text` as a side; a bracket around the whole equation goes; None where it has no value."""
    text = text.strip()
    more = text.count("(") - text.count(")")
    text = text[more:] if more > 0 and text.startswith("(" * more) else text[: len(text) + min(more, 0)]
    atoms = [m for m in _TOKEN.finditer(text) if m["n"]]
    held = [printed(m["n"]) for m in atoms]
    # A whole number without a unit is a count, and one of bytes or bits is exact.
    off = [
        0.0 if m["n"].replace(",", "").isdigit() and _WHOLE.fullmatch(m["unit"] or "") else h.hi - h.mid
        for m, h in zip(atoms, held, strict=True)
    ]
    numbers = iter(range(len(atoms)))
    spelled = [f"v[{next(numbers)}]" if m["n"] else m[0].translate(_SPELL) for m in _TOKEN.finditer(text)]

    def value(i: int = -1) -> float:
        powers = [float(m["power"] or 1) for m in atoms]
        v = [(h.mid + off[j] * (j == i)) ** powers[j] for j, h in enumerate(held)]
        return float(eval("".join(spelled), {"__builtins__": {}, "v": v}))  # of signs and numbers alone

    try:
        middle = value()
        share = sum(abs(value(i) / middle - 1) for i in range(len(held)))
    except (ArithmeticError, SyntaxError, TypeError):
        return None
    units = [m["unit"] for m in atoms if m["unit"]]
    # Of figures in several units no sum can be judged.
    mixed = len({*units}) > 1 and re.search(r"[+−–]| - ", text)
    first = held[0].mid ** float(atoms[0]["power"] or 1)
    return None if mixed or middle <= 0 else _Side(text, middle, share, first, len(held), frozenset(units))


def equations(report: Report) -> Iterator[Finding]:
    """Every equation of plain numbers, each side of it against the next."""
    for row in (r for r in report.all_rows if r.kind != "record" and "=" in r.text):
        raw = report.lines[row.line - 1] if 0 < row.line <= len(report.lines) else ""
        text = re.sub(r"(?<=\d)[⁰¹²³⁴-⁹]+", lambda m: "^" + m[0].translate(_SPELL), row.text.replace("€", ""))
        # "4 ms + queue 11 ms"
        text, at = re.sub(r"(?<=\+ )[A-Za-z][A-Za-z ]{1,24}(?=\d)|(?<= ) +", "", text), 0
        while (left := _SIDE.search(text, at)) and not re.search(r"\d ?\*\* ?\d|\\frac|//", raw):
            at = left.end()
            equals = _EQUALS.match(text, at)
            right = _SIDE.match(text, equals.end()) if equals else None
            if not (equals and right) or _PART_OF.search(text[: left.start()]) or _GOES_ON.match(text, right.end()):
                continue
            at = right.start()
            a, b = _side(left[0]), _side(right[0])
            if (
                a
                and b
                and a.count > 1
                and not (_NO_SUM.search(left[0]) or (len(a.units) > 1 and b.units <= {"x", "X"}))
                # "6.5 + 0.26 × 2048 = 7 GB" has MB in it that are not spelled out.
                and not (not a.units and b.units and "+" in a.text and re.search("[×*x/]", a.text))
                and not (_counts(a) or b.count > 1 or _is_tile(a, b) or _holds(a, b))
            ):
                line = max((q.line for q in row.quantities if left.start() <= q.start <= right.end()), default=row.line)
                message = f"{a.text} is {a.value:.4g}, not {b.text}"
                yield Finding(INCONSISTENT, "arithmetic", line, f"{a.text} = {b.text}", message, (line,))


def _counts(a: _Side) -> bool:
    """Whether it multiplies things, of which not every factor may be spelled out, or billions of something."""
    return any(match_unit(unit) is None or unit == "B" for unit in a.units)


def _is_tile(a: _Side, b: _Side) -> bool:
    """ "64×64×32 = 6.1 TF" is a tile's rate, "8192×8192 = 128 MiB" a matrix of some format."""
    return bool(re.fullmatch(r"\d+(?:[x×]\d+){1,2}", a.text) and b.units)


def _holds(a: _Side, b: _Side) -> bool:
    made, units = a.value, a.units | b.units
    forms = [made]
    if "%" in units:  # a share, or the change that it is
        forms = [f * s for f in (made, made - 1, 1 - made, 1 - 1 / made) for s in (1, 100, 0.01)]
    elif units - {"x", "X"} or "10^" in a.text + b.text:
        steps = (_STEPS, _BINARY * any(map(_BYTES.match, units)), _CLOCK * any(map(_HOURS.search, units)))
        forms = [made * s for some in steps for s in some]
    share = a.open + b.open + 0.012
    # "4096 / 128 = 32 tiles × 56" goes on with what it is.
    return any(abs(said - f) <= share * max(said, f) for f in forms if f > 0 for said in (b.value, b.first))
