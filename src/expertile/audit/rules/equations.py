"""Arithmetic that the text itself writes out: "51.44 / 17.52 = 2.94x", "6 × 1.3e9 × 524288 = 4.09e15"; and one figure
in two units."""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from expertile.audit.finding import INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import NUMBER, printed
from expertile.audit.pattern import regex
from expertile.audit.report import Report
from expertile.audit.units import match_unit

# A number, what it is raised to, and one word of unit; "x" between two numbers is none.
_UNIT = r"%|[xX](?![\w(]| ?\d)|(?![xX]\b)[A-Za-zµμ](?:[A-Za-zµμ/]|-(?=[a-z])){0,11}\b(?![(\d])"
_ATOM = rf"(?P<n>{NUMBER})(?: ?(?:\^|\*\*) ?(?P<power>\d+(?:\.\d+)?))?(?: ?(?P<unit>{_UNIT}))?"
_SIGN = r"(?: ?[*/×÷·] ?| [xX] | ?\+ ?| [-−–] )"
_TERM = rf"\(*{re.sub(r'[?]P<[a-z]+>', '?:', _ATOM)}\)*"
_SIDE = regex(rf"{_TERM}(?:{_SIGN}{_TERM})*")
_EQUALS, _TOKEN = regex(r" ?= ?"), regex(rf"{_ATOM}|[()]|{_SIGN}")
# "1/16/256 elements" is a list, "14/14 models × 2" no quotient.
_NO_SUM = regex(r"\d/\d+/\d|\d/\d+ [A-Za-z]+ ?[*x×·]")
_SPELL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹·×÷−–xX", "0123456789**/--**")
# "N × 3 / 4" and "sqrt(16 × 4)" are not made of the numbers alone; nor is "= 2 × M".
_PART_OF = regex(r"\b(?:over|by|per) $|[<>≤≥] ?$|[\w.,)\]]$|[*×/÷·+^−-] ?$| [xX] $|\d ?, ?$|[(\[]\w+, ?$")
_GOES_ON = regex(r" ?[*×/÷·^(] ?\w?|\w| ?[+−-] ?[A-Za-z(]")
# Where units stand beside the figures their prefixes are not spelled out: decimal steps, binary ones, bits, the clock.
_STEPS = [10.0 ** (3 * k) for k in range(-6, 7)]
_BINARY = [s * 1.024**j * b for s in _STEPS for j in range(-4, 5) for b in (1, 8, 0.125)]
_CLOCK = [s * c**e for s in _STEPS for c in (60, 3600, 86400, 24) for e in (1, -1)]
_WHOLE = regex(r"(?:[Bb](?:ytes?|its?)?|GPUs?|layers|heads|tokens)?")
# "2 × 32 × 8 × 128 × 2 bytes, in other words 512 KiB"
_SPOKEN = regex(r"(?<=[\w)]),? (?:in other words|i\.e\.,?|that is|which (?:is|makes|gives)|or) (?=\d)")
_BYTES = regex(r"(?:[KMGTkmgt]i?[Bb](?:ytes)?|[Bb]ytes?|[Bb]its?|[KMG]i?)(?:/s|ps)?\b")
_SPACED = regex(r"(?<![\d.,])(?<!\d )[1-9]\d{0,2}(?: \d{3})+(?! ?\d|[.,]\d)")  # "65 536 x 32 = 2 097 152"
_SAME = regex(
    r"(?i)[\s,;~≈]*(?:=|i\.e\.,?|that is|which (?:is|makes|gives)|or|in other words,?|thus|so)[\s~≈(]*"
    r"(?:about |roughly )?| ?\([~≈]?"
)
# What is off where a unit was mistaken: bits for bytes, a wrong prefix, and, of a binary one, 1.024 times itself.
_MISTAKEN, _BINARY_UNIT = (8.0, 10.0, 1000.0, 1024.0, 1e6), regex(r"[KMGT]iB")
_HOURS = regex(r"(?i)\b(?:h|hours?|hrs?|d|days?|min\w*|sec\w*|s|[km]?Wh?|[km]?J)\b")


class _Side(NamedTuple):
    """One side of an equation: what it comes to, by which share the print may be off, its first number, its units."""

    text: str
    value: float
    open: float
    first: float
    numbers: int
    units: set[str]


def _side(text: str) -> _Side | None:
    """`text` as a side; a bracket around the whole equation goes; None where it has no value."""
    text = text.strip()
    more = text.count("(") - text.count(")")
    text = text[more:] if more > 0 and text.startswith("(" * more) else text[: len(text) + min(more, 0)]
    spelled, off, first, units, count = "", list[tuple[float, float]](), 0.0, set[str](), 0
    for m in _TOKEN.finditer(text):
        if not m["n"]:
            spelled += m[0].translate(_SPELL)
            continue
        held, power = printed(m["n"]), float(m["power"] or 1)
        # A whole number without a unit is a count, and one of bytes or bits is exact.
        if not (m["n"].replace(",", "").isdigit() and _WHOLE.fullmatch(m["unit"] or "")):
            off.append((power * (held.hi - held.mid), held.mid or 1.0))
        try:
            first, count = (first if count else held.mid**power), count + 1
        except ArithmeticError:
            return None
        units |= {m["unit"]} if m["unit"] else set()
        spelled += f"{held.mid!r}**{power}"
    try:
        value = float(eval(spelled, {"__builtins__": {}}))  # of signs and numbers alone
    except (ArithmeticError, SyntaxError, TypeError):
        return None
    share = sum(x / (value if "+" in text else of) for x, of in off)
    # Of figures in several units no sum can be judged.
    mixed = len(units) > 1 and re.search(r"[+−–]| - ", text)
    return None if mixed or value <= 0 else _Side(text, value, share, first, count, units)


def equations(report: Report) -> Iterator[Finding]:
    """Every equation of plain numbers, each side of it against the next."""
    for row in (r for r in report.all_rows if r.kind != "record" and ("=" in r.text or _SPOKEN.search(r.text))):
        raw = report.lines[row.line - 1] if 0 < row.line <= len(report.lines) else ""
        text = re.sub(r"(?<=\d)[⁰¹²³⁴-⁹]+", lambda m: "^" + m[0].translate(_SPELL), row.text.replace("€", ""))
        text = re.sub(r"(?<=\d)([BM]) (?:param\w*|weights|tokens)", lambda m: {"B": "e9", "M": "e6"}[m[1]], text)
        text = _SPOKEN.sub(" = ", re.sub(r"(?<=\d) ?\([A-Za-z][A-Za-z ,]*\)(?= ?[×x*])", "", text))
        text = _SPACED.sub(lambda m: m[0].replace(" ", ""), text)
        # "4 ms + queue 11 ms"
        # "14 GB read + 3 GB written"
        text = re.sub(r"(\d ?[A-Za-z/%]{1,5}) \(?[a-z]{3,12}\)?(?= ?[+=] ?\d)", r"\1", text)
        text = re.sub(r"(?<=[a-z]) per [a-z]+(?= ?[=×x*] ?\d)", "", text)
        text, at = re.sub(r"(?<=\+ )[A-Za-z][A-Za-z ]{1,24}(?=\d)|(?<= ) +", "", text), 0
        while (left := _SIDE.search(text, at)) and not re.search(r"\d ?\*\* ?\d|\\frac|//", raw):
            at = left.end()
            equals = _EQUALS.match(text, at)
            right = _SIDE.match(text, equals.end()) if equals else None
            if not right or _PART_OF.search(text[: left.start()]) or _GOES_ON.match(text, right.end()):
                continue
            at = right.start()
            a, b = _side(left[0]), _side(right[0])
            if not a or not b or a.numbers < 2 or b.numbers != 1 or _NO_SUM.search(left[0]):
                continue
            if not _open(a, b, "€" in row.text) and not _holds(a, b):
                line = max((q.line for q in row.quantities if left.start() <= q.start <= right.end()), default=row.line)
                message = f"{a.text} is {a.value:.4g}, not {b.text}"
                yield Finding(INCONSISTENT, "arithmetic", line, f"{a.text} = {b.text}", message, (line,))


def _open(a: _Side, b: _Side, priced: bool) -> bool:
    """Whether it multiplies things, of which not every factor may be spelled out, or billions of something; is a tile
    ("64×64×32 = 6.1 TF") or a matrix of some format; compares units; or has MB that are not spelled out."""
    things = any((match_unit(unit) is None and unit not in ("GPU", "GPUs")) or unit == "B" for unit in a.units)
    tile = re.fullmatch(r"\d+(?:[x×]\d+){1,2}", a.text) and b.units
    unsaid = not a.units and b.units and "+" in a.text and re.search("[×*x/]", a.text.rpartition(")")[0] or a.text)
    return bool(things or tile or unsaid or (len(a.units) > 1 and b.units <= {"x", "X"} and not priced))


def _holds(a: _Side, b: _Side) -> bool:
    made, units = a.value, a.units | b.units
    forms = [made]
    if "%" in units:  # a share, or the change that it is
        forms = [f * s for f in (made, made - 1, 1 - made, 1 - 1 / made) for s in (1, 100, 0.01)]
    elif a.units == b.units and len(units) == 1 and "+" in a.text:
        forms = [made]  # a sum in one unit
    elif units - {"x", "X"} or "10^" in a.text + b.text:
        steps = (_STEPS, _BINARY * any(map(_BYTES.match, units)), _CLOCK * any(map(_HOURS.search, units)))
        forms = [made * s for some in steps for s in some]
    share = a.open + b.open + 0.012
    # "4096 / 128 = 32 tiles × 56" goes on with what it is.
    return any(abs(said - f) <= share * max(said, f) for f in forms if f > 0 for said in (b.value, b.first))


def conversions(report: Report) -> Iterator[Finding]:
    """ "375.2 Gb/s, in other words 469 GB/s": one figure in two units, apart by what lies between units."""
    for row in report.lines_of_text:
        for a, b in itertools.pairwise(row.quantities):
            between, units = row.text[a.end : b.start], [re.sub(r"[\d.,\s]", "", q.text) for q in (a, b)]
            same = a.kind == b.kind and a.kind in ("bandwidth", "bytes", "time") and _SAME.fullmatch(between)
            made = re.search(r"[×x*·/+−-] ?$", row.text[: a.start])  # "1000 batches x 261.4 ms = 261.4 s"
            if not same or made or units[0] == units[1] or not (a.exact and b.exact and a.value.mid and b.value.mid):
                continue
            binary = len({bool(_BINARY_UNIT.match(unit)) for unit in units}) > 1
            steps = (*_MISTAKEN, *(1.024**k for k in (2, 3, 4, 6, 8) if binary))
            off = a.value.mid / b.value.mid
            near = 0.02 if re.search(r"about|roughly|[~≈]", between) else 0.004
            if not a.value.meets(b.value, near) and any(abs(max(off, 1 / off) / s - 1) < near for s in steps):
                message = f"{a.text} is {si(a.value.mid, UNIT_OF[a.kind])}, not {b.text}: which is it?"
                yield finding(QUESTION if "(" in between else INCONSISTENT, "conversion", message, b, a)
