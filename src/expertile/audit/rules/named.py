"""Figures by the names that reports give them: "train.micro_batch_size: 2", "32-way data parallelism", "Waves Per SM".

A name stands before its figure (a key, a table's head, the first cell of a table of two columns), or a sentence says
it. NAMES has each by the units that it may have, the form of its key, and what a sentence says.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from expertile.audit.blocks import valued
from expertile.audit.facts import DIGITS
from expertile.audit.interval import NUMBER, Interval, exact, printed
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity, clean
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import own_words
from expertile.audit.rules.names import NAMES, Name
from expertile.audit.units import match_unit


@dataclass(frozen=True)
class Named:
    """A figure, the words of its key (of a sentence none), and the row that it stands in."""

    key: str
    kind: str
    value: Interval
    text: str
    line: int
    row: Row
    q: Quantity | None = None


_WORDS = regex(rf"(?i)\b(?:{'|'.join(DIGITS)})\b")
# A figure, what may stand between its key and it, and where its key begins.
_VALUE = regex(rf"(?<![\w.])(?<!\w[-/:]){NUMBER}(?![\d:]|\.\d|/\d|-\d)")
_SIGN = regex(r"(?:\s*[:=]+>?\s*[(\[]?|\s*\.{3,}\s*|\s+)$")
_BEGIN = regex(r"[,;|{}\"'\]]|\s{2,}|[:=] |: ")
_WORKED_OUT = regex(rf"^\W*(?P<key>[A-Za-z][\w ]*?)(?:\s{{2,}}|\s*:\s)[^=]*\d[^=]*= ?(?P<v>{NUMBER})[^=]*$")
_BRACKETS = regex(r"\([^()]*\d[^()]*\)(?=\s*(?:[:=]|\.{3}))|\{[^{}]*\}(?= \d)")
# Nsight Compute's and other columns: name, unit, value.
_COLUMNS = regex(rf"^\s*(?P<key>\S.*?)\s{{2,}}(?P<unit>%|[#A-Za-z][\w/]*)\s{{2,}}(?P<v>{NUMBER})\s*$")
_NCU = {"cycle": ("cycles", 1.0), "%": ("percent", 0.01)}
_NCU |= {f"cycle/{p}second": ("cycle/s", s) for p, s in (("n", 1e9), ("u", 1e6), ("", 1.0))}
_NCU |= {f"{p}second": ("time", s) for p, s in (("n", 1e-9), ("u", 1e-6), ("m", 1e-3), ("", 1.0))}
_NCU |= {f"{p}byte/block": ("bytes", s) for p, s in (("", 1.0), ("K", 1e3), ("M", 1e6))}
_NCU |= {"GHz": ("cycle/s", 1e9), "MHz": ("cycle/s", 1e6)}
_UNIT_END = regex(
    r" (?:[kmgt]?i?b|bytes|[mun]?s|sec(?:onds)?|k?wh?|pct|percent|hours|kj|gb ?/ ?s|mib ?/ ?s|[kmg]i?bps|[kmg]?hz|"
    r"t?flops?)$"
)
_MINUTES = regex(r"(\d+)m([\d.]+)s\b")  # "3m12.4s"


@lru_cache(maxsize=1 << 14)
def key_of(text: str) -> str:
    """The lower-case words of a key, without marks, brackets with a unit and the unit behind."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", text)
    text = re.sub(
        r"\s*[(\[](?P<i>[^()\[\]]*)[)\]]\s*$",
        lambda m: "" if match_unit(m["i"]) or "/" in m["i"] else f" {m['i']}",
        text,
    )
    text = re.sub(r"(?i)(?<=[a-z])/(?=(?:block|thread|sm|row|wave|cta)\b)", " per ", text)
    text = re.sub(r"[\s_.:,()\[\]=-]+", " ", text.lower()).strip(" /")
    return re.sub(r"(?<=\w )(?<!per )(?<!thread )(?:block|warp|thread)$", "", text).strip()  # Nsight's column of units


def _plain(digits: str) -> Interval:
    """A number without a unit: a whole one is exact."""
    return exact(printed(digits).mid) if re.fullmatch(r"[\d,]+", digits) else printed(digits)


def _pair(row: Row, key: str, value: str, line: int, q: Quantity | None, unit: str = "") -> Named:
    words = key_of(key)
    if known := _NCU.get(unit or (re.findall(r"[(\[]([^()\[\]]*)[)\]]\s*$", key) or [""])[-1]):
        return Named(words, known[0], printed(value) * known[1], value, line, row, q)
    if q and q.kind not in ("number", "other", "ratio") and not (q.kind == "params" and len(q.text) == len(value)):
        return Named(words, q.kind, q.value, q.text, q.line, row, q)
    kind = q.kind if q and re.search(r"[x×X]$", q.text) else "n"
    return Named(words, kind, _plain(value), value, q.line if q else line, row, q)


def _digits(q: Quantity) -> str:
    m = re.search(NUMBER, q.text)
    return m[0] if m else f"{q.value.mid!r}"


def _of_table(row: Row, header: tuple[str, ...], lines: tuple[int, ...]) -> Iterator[Named]:
    for column, name in enumerate(header):
        q = next((q for q in row.quantities if q.column == column), None)
        cell = re.search(rf"(?:^|; ){re.escape(name)}: ([^;]*)", row.text) if name else None
        value = re.match(rf"\s*({NUMBER})(?P<k>[kK]?)(?![\w./:-])", cell[1]) if cell else None
        if q is not None and q.exact:
            yield _pair(row, name, _digits(q), q.line, q)
        elif value and q is None:
            f = _pair(row, name, value[1], lines[column] if lines else row.line, None)
            yield replace(f, value=f.value * 1024, text=value[0].strip()) if value["k"] else f  # a block of "4k"


def _of_line(row: Row) -> Iterator[Named]:
    if m := _COLUMNS.match(row.text):
        yield _pair(row, m["key"], m["v"], row.line, None, m["unit"])
        return
    if m := _WORKED_OUT.match(row.text):  # "Rpeak   128 cores x 2.45 GHz x 16 flop/cycle = 5.02 TFLOP/s"
        q = next((q for q in row.quantities if q.start == m.start("v") and q.exact), None)
        yield _pair(row, m["key"], m["v"], row.line, q)
    code, past = row.report.blocks[row.block].kind != "prose", 0
    at = {q.start: q for q in row.quantities if q.exact or re.match(r"\W*[Rr]max\b", row.text)}
    text = _BRACKETS.sub(lambda m: " " * len(m[0]), row.text)
    for m in _VALUE.finditer(text):
        sign = _SIGN.search(text, past, m.start())
        if sign and (code or sign[0].strip()):
            key = _BEGIN.split(text[past : sign.start()])[-1].strip()
            if timed := _MINUTES.match(text, m.start()):
                seconds = printed(timed[2]) + exact(60.0 * int(timed[1]))
                yield Named(key_of(key), "time", seconds, timed[0], row.line, row)
            elif re.search("[A-Za-z#]", key):
                yield _pair(row, key, m[0], row.line, at.get(m.start()))
        past = m.end()


@lru_cache(maxsize=8)
def figures(report: Report) -> tuple[Named, ...]:
    """Every figure that has a key."""
    found: list[Named] = []
    for row in report.lines_of_text:
        found += _of_line(row)
    for grid in report.grids:
        table = report.blocks[grid.block].table
        places = table.lines if table and len(table.lines) == len(grid.rows) else ()
        for at, row in enumerate(grid.rows):
            lines = places[at] if places else ()
            found += _of_table(row, grid.header, lines if len(lines) == len(grid.header) else ())
            if len(grid.header) == 2 and (q := row.figure(1)):
                found.append(_pair(row, row.label, _digits(q), q.line, q))
    for row in report.rows:  # a table of names and values
        table = report.blocks[row.block].table
        table = valued(table) if table else None
        for line, cells in table.rows if table and row.kind == "record" else ():
            text = clean(cells[1])
            q = next((q for q in row.quantities if q.line == line), None)
            if m := re.match(rf"\s*({NUMBER})(?![\w./:-])", text):
                found.append(_pair(row, clean(cells[0]), m[1], line, q))
    return tuple(found)


def _fits(name: Name, kind: str) -> bool:
    return kind in name.kinds.split() or (kind in ("n", "items", "tokens") and "n" in name.kinds.split())


_KEYS = {name: regex(rf"(?:^|[ /(])(?:{of.key})$") for name, of in NAMES.items()}


@lru_cache(maxsize=8)
def _by_key(report: Report) -> dict[str, list[tuple[int, Named]]]:
    """The figures of each key, numbered; a key is also that without the unit behind it."""
    held: dict[str, list[tuple[int, Named]]] = defaultdict(list)
    for i, f in enumerate(figures(report)):
        for key in {f.key, _UNIT_END.sub("", f.key)}:
            held[key].append((i, f))
    return held


@lru_cache(maxsize=2048)
def named(report: Report, name: str) -> tuple[Named, ...]:
    """The report's figures of one of NAMES."""
    of = NAMES.get(name)
    if of is None:
        return ()
    found = dict[int, Named]()
    for key, some in _by_key(report).items():
        fit = [(i, f) for i, f in some if _fits(of, f.kind) and of.least <= f.value.mid <= of.most]
        found |= fit if fit and _KEYS[name].search(key) else ()
    said = _said(report, of) if of.said else ()
    return (*(found[i] for i in sorted(found)), *(f for f in said if of.least <= f.value.mid <= of.most))


@lru_cache(maxsize=1 << 12)
def _in_digits(text: str) -> str:
    return _WORDS.sub(lambda m: DIGITS[m[0].lower()], text)


def _said(report: Report, of: Name) -> Iterator[Named]:
    form = re.compile(of.said)
    for row in report.lines_of_text:
        if form.groups:
            text = _in_digits(row.text)
            for m in form.finditer(text):
                digits = next(filter(None, m.groups()))
                if ":" in digits:
                    parts = [float(x) for x in digits.split(":")]
                    yield Named("", "time", exact(3600 * parts[0] + 60 * parts[1] + parts[2]), digits, row.line, row)
                    continue
                scale = {"k": 1e3, "K": 1e3, "M": 1e6}.get(digits[-1], 1.0)
                near = (
                    n for n in range(row.line, row.line + 5) if n <= len(report.lines) and m[0] in report.lines[n - 1]
                )
                yield Named("", "n", _plain(digits.rstrip("kKM")) * scale, digits, next(near, row.line), row)
        elif form.search(row.text):
            for q in row.of(*of.kinds.split()):
                if q.exact and form.search(own_words(row, q)):
                    yield Named("", q.kind, q.value, q.text, q.line, row, q)
