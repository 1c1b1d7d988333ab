"""Figures by their names, with or without a unit: what each row, object, list or line of a report says of one thing.

A `Record` holds figures that stand together: a table's row, a JSON object, lines of `name value`. A `Series` holds
figures of one name: a table's column, lines that list them, a line of several numbers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby

from expertile.audit.blocks import Block, Line, Table
from expertile.audit.interval import printed
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity, clean
from expertile.audit.report import Report
from expertile.audit.units import NO_UNIT, RATES, Unit, match_unit, unit_of_name

NUMBER = r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?"
_CELL = regex(rf"[~≈]?(?P<n>{NUMBER})(?P<rest>(?: ?[%x×])?|[ ]?[^\d\s]\S{{0,7}})?(?: ?(?:±|\+/-) ?[\d.]+ ?\S{{0,3}})?")
# "mean       3.48 ms", "L2 hits ....... 12,000", "engine_hits_total{model="a"} 12"
_PAIR = regex(
    rf"^\W*(?P<name>[A-Za-z\[(].*?)(?:\s*[:=]\s*|\s*\.{{3,}}\s*|\s{{2,}}|\t|(?<=}})\s)[(\[~≈]?"
    rf"(?P<n>{NUMBER})(?![\d.,:x×/^-]*\d)(?P<rest>(?:[ )%].*|[A-Za-zµ%].*)?)$"
)
_PARTS = regex(r"(?:[|;]|,(?!\d{3}(?!\d)))\s+|\s{2,}(?=[\w.]+ ?[:=])")
_INNER = regex(rf"(?<![\w.])(?P<name>[A-Za-z][\w./-]*)=(?P<n>{NUMBER})(?P<rest>[^\s,;|)]{{0,8}})")
_SPOKEN = regex(
    rf"^\W*(?P<name>[A-Za-z][A-Za-z_0-9 /()-]{{0,40}}?)[ :=]+(?P<n>{NUMBER})"
    r"(?P<rest>(?: ?[^\d\s]\S{0,8})?)(?:\s*\([a-z][^()]*\))?$"
)
# "  99.900%   14.63ms"
_PERCENTILE = regex(
    rf"\s*(?P<p>\d\d(?:\.[1-9]+)?)0*\.?0*(?:%|th)[ :=]+(?P<n>{NUMBER})(?P<rest>(?: ?[^\d\s]\S{{0,4}})?)\s*"
)
# "mean 6.51 ms std 0.81 ms", "1284 hits, 509 misses", "hit rate 91.6 %"
_RANKED = regex(
    rf"(?<![\w-])(?P<name>min|max|mean|avg|median|std|stddev|"
    rf"p\d\d)[ :=]+(?P<n>{NUMBER})(?P<rest> ?(?:[nµmu]?s)?)(?![\w.%])"
)
_COUNTED = regex(
    rf"(?<![\w.])(?P<n>{NUMBER})(?P<rest>) (?P<name>hits|misses|lookups|queries|accesses|passed|failed|"
    rf"succeeded|accepted|"
    r"rejected|drafted|proposed)\b"
)
_RATE = regex(
    rf"\b(?P<name>(?:hit|miss|acceptance|success|pass)[ _-](?:rate|"
    rf"ratio))[ :=of]+(?P<n>{NUMBER})(?P<rest> ?%?)(?![\w.])"
)
_BEFORE = regex(rf"(?P<name>.*[A-Za-z]\w*)[:=]? +(?P<n>{NUMBER}) ?(?P<rest>[A-Za-zµ%/]+),?")
_ARRAY = regex(r"\"?(?P<name>[A-Za-z]\w*)\"?\s*:\s*\[(?P<all>\s*\d[\d.]*(?:,\s*\d[\d.]*){2,}\s*)\]")
_STATISTICS = {"mean", "avg", "average", "median", "min", "max", "best", "worst", "std", "fastest", "slowest"}
_DIGIT = regex(r"\d")
_LABELS = regex(r"\{[^{}]*\}")
_SPLIT = regex(r"[^a-z0-9@+%µ]+|(?<=[a-z]{4})(?=\d{1,2}\b)")
_COMMENT = regex(r"\s*#\s*(?:HELP|TYPE)\b")
_STAMP = regex(r"^\W*\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\]? +(?=[A-Za-z])")
_UNITS = {"us", "µs", "ms", "ns", "s", "sec", "seconds", "pct", "percent", "%", "gb", "gib", "mib", "mb", "kib", "kb"}


@lru_cache(maxsize=1 << 14)
def words(name: str) -> tuple[str, ...]:
    """The words of a name without its unit: "max_allocated (GiB)" -> ("max", "allocated")."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", _LABELS.sub(" ", name))
    name = re.sub(r"(?i)\btop[ _-]?(?=\d)", "top", re.sub(r"\[[^\[\]]*\]|\([^()]*\)", " ", name)).lower()
    return tuple(w for w in _SPLIT.split(re.sub(r"(?<=p)(\d\d)[_.](?=\d)", r"\1", name)) if w and w not in _UNITS)


@dataclass(frozen=True)
class Named:
    """`value` in SI where a unit is known; it may be `off` by as much as the print leaves open."""

    name: str
    value: float
    off: float
    text: str
    line: int
    kind: str
    column: int = -1
    label: str = ""  # of its row

    @cached_property
    def words(self) -> tuple[str, ...]:
        return words(self.name)

    @property
    def whole(self) -> bool:
        """Whether it may count something."""
        return self.off == 0.0 or (self.value % 1 == 0 and self.kind in ("number", "other", "items", "tokens"))

    def meets(self, x: float, slack: float = 0.0) -> bool:
        return abs(self.value - x) <= self.off * 1.001 + slack * abs(x)


@dataclass
class Record:
    figures: list[Named]
    block: int
    kind: str  # "row" | "lines" | "line"

    @cached_property
    def known(self) -> set[str]:
        return {w for f in self.figures for w in f.words}


@dataclass
class Series:
    """`labels`: the names of its rows or lines; `table`: its column."""

    name: str
    figures: list[Named]
    block: int
    labels: list[str] = field(default_factory=list)
    table: int = -1

    @property
    def values(self) -> list[float]:
        return [f.value for f in self.figures]

    @property
    def lines(self) -> tuple[int, ...]:
        return tuple(f.line for f in self.figures)


def named(name: str, digits: str, rest: str, line: int, unit: Unit | None, column: int = -1, label: str = "") -> Named:
    """A figure of its own unit, of the one that `unit` lends, or of none."""
    found = match_unit(rest.lstrip(" )]")) if rest.strip() else None
    of = found[0] if found else unit or NO_UNIT
    if found and unit and of.kind == "params" and unit.kind in (*RATES, "tokens"):
        of = replace(unit, low=unit.low * of.low)  # "tokens/s: 264.3k"
    held, scale = printed(digits.lstrip("-+−")), of.low
    signed = -held.mid if digits[0] in "-−" else held.mid
    counted = "." not in digits and of.kind in ("number", "other", "items", "tokens", "bytes", "flop") and of.low == 1
    shown = digits + (rest.rstrip()[: found[1] + 1] if found else "")
    off = 0.0 if counted else (held.hi - held.mid) * scale
    return Named(name, signed * scale, off, shown.strip(), line, of.kind, column, label)


def cell(name: str, text: str, line: int, unit: Unit | None, column: int = -1, label: str = "") -> Named | None:
    """The figure of a table's cell, which holds nothing else."""
    m = _CELL.fullmatch(text.strip())
    return named(name, m["n"], m["rest"] or "", line, unit, column, label) if m else None


def in_line(line: Line) -> list[Named]:
    """The named figures of a line of text."""
    text = clean(line.text).rstrip()
    if not _DIGIT.search(text) or _COMMENT.match(text):
        return []
    text = _STAMP.sub("", re.sub(r"[\[(] *(\S+?), +(\S+?)([\])]) ", r"[\1,\2\3 ", text))
    if m := _PERCENTILE.fullmatch(text):
        return [named(f"p{m['p']}", m["n"], m["rest"], line.number, None)]
    found = [(m["name"], m["n"], m["rest"]) for m in _INNER.finditer(text)]
    if not found and (m := _PAIR.match(text)):
        found = [(m["name"].rstrip(" ."), m["n"], m["rest"])]
    of = re.match(r"\W*(\w[\w.-]*): +(?=[a-z])", text)  # "fp32: mean 184.36  median 170.95"
    for several in (_RANKED, _COUNTED):
        before = of[1] + " " if of and several is _RANKED else ""
        each = [(before + m["name"], m["n"], m["rest"]) for m in several.finditer(text)]
        each += [(m["name"], m["n"], m["rest"]) for m in _RATE.finditer(text)] if several is _COUNTED else []
        found = each if len(each) > max(1, len(found)) else found
    parts = _PARTS.split(text)
    if not found or len(parts) > 1:
        spoken = [m for p in parts if (m := _SPOKEN.match(p.strip()))]
        found = (
            [(m["name"], m["n"], m["rest"]) for m in spoken]
            if 2 * len(spoken) >= len(parts) and len(spoken) > len(found)
            else found
        )
    return [named(n.strip(), digits, rest, line.number, unit_of_name(n)) for n, digits, rest in found]


@lru_cache(maxsize=2)
def records(report: Report) -> tuple[Record, ...]:
    """Every row of every table, and every run of lines with names and figures."""
    return tuple(_records(report))


def _records(report: Report) -> Iterator[Record]:
    tables = {s.block: s for s in sheets(report)}
    for index, block in enumerate(report.blocks):
        if index in tables:
            yield from _rows(tables[index])
        elif block.kind in ("code", "list"):
            yield from _listed(index, block)


def _rows(s: "Sheet") -> Iterator[Record]:
    for row in s.rows:
        yield Record([*row.values()], s.block, "row")
    # Where the rows have different names each column is a record too.
    named = len({*s.keys}) == len(s.keys) < 40 and any(re.search("[a-z]", key) for key in s.keys)
    for c in range(1, len(s.header)) if named else ():
        pairs = [(row[c], key) for row, key in zip(s.rows, s.keys, strict=True) if c in row and re.search("[a-z]", key)]
        yield Record([_renamed(f, key) for f, key in pairs], s.block, "lines")


def _renamed(f: Named, name: str) -> Named:
    return replace(f, name=name)


def table_rows(table: Table) -> Iterator[tuple[list[Named], str]]:
    """The figures of each row and its words."""
    header = [clean(h) for h in table.header]
    units = [unit_of_name(h) for h in header]
    for r, (number, raw) in enumerate(table.rows):
        cells = [clean(c) for c in raw]
        where = table.lines[r] if table.lines else (number,) * len(cells)
        label = " ".join(c for c in cells if c and not _CELL.fullmatch(c))
        found = (
            cell(h, c, n, u, at, label) for at, (h, c, n, u) in enumerate(zip(header, cells, where, units, strict=True))
        )
        yield [f for f in found if f], label


def _listed(index: int, block: Block) -> Iterator[Record]:
    """Lines of names and figures; one name again begins another record."""
    held: dict[str, dict[tuple[str, ...], Named]] = {}  # of each set of labels
    for line in block.lines:
        found = in_line(line)
        if len(found) > 1:
            yield Record(found, index, "line")
        for f in found if len(found) == 1 else ():
            of = held.setdefault("".join(_LABELS.findall(f.name)), {})
            if f.words in of:
                yield Record([*of.values()], index, "lines")
                of.clear()
            of[f.words] = f
    yield from (Record([*of.values()], index, "lines") for of in held.values() if len(of) > 1)


@lru_cache(maxsize=2)
def series(report: Report) -> tuple[Series, ...]:
    """Every column of figures, and lines below each other that have one figure each."""
    return tuple(_series(report))


def _series(report: Report) -> Iterator[Series]:
    tables = {s.block: s for s in sheets(report)}
    for index, block in enumerate(report.blocks):
        if index in tables:
            s = tables[index]
            for c, name in enumerate(s.header):
                held = [(row[c], label) for row, label in zip(s.rows, s.labels, strict=True) if c in row]
                if len(held) > 1:
                    yield Series(name, [f for f, _ in held], index, [label for _, label in held], table=c)
            if len(s.rows) == 1:  # of an object within an object
                for name, some in groupby(s.rows[0].values(), lambda f: f.name.rpartition(" ")[0]):
                    parts = [*some]
                    if name and len(parts) > 2:
                        yield Series(name, parts, index, [f.name.rpartition(" ")[2] for f in parts])
        elif block.kind in ("code", "list"):
            yield from _runs(index, block)


def arrays(report: Report) -> Iterator[Series]:
    """Arrays of figures in JSON and YAML."""
    text = "\n".join(report.lines)
    for m in _ARRAY.finditer(text):
        unit = unit_of_name(m["name"])
        each = [(x[0], text.count("\n", 0, m.start("all") + x.start()) + 1) for x in re.finditer(NUMBER, m["all"])]
        yield Series(m["name"], [named(m["name"], n, "", line, unit) for n, line in each], -1)


def logged(report: Report) -> Iterator[Series]:
    """Lines of several figures of the same names, as a log's steps: a list for each name."""
    for index, block in enumerate(report.blocks):
        held: dict[tuple[str, ...], list[list[Named]]] = {}
        for figures in map(in_line, block.lines) if block.kind == "code" else ():
            if len(figures) > 1:
                held.setdefault(tuple(f.name for f in figures), []).append(figures)
        for names, rows in held.items():
            for c, name in enumerate(names) if len(rows) > 2 else ():
                yield Series(name, [replace(row[c], column=c) for row in rows], index, table=0)


def _runs(index: int, block: Block) -> Iterator[Series]:
    run, heading, last = list[Named](), "", 0
    found = list[Series]()
    for line in block.lines:
        several = re.fullmatch(
            rf"(?P<name>[A-Za-z][^:=\[]{{0,40}}?)[:=] *[\[(]?(?P<all>(?:{NUMBER}[ ,;]+){{2,}}{NUMBER})\W*",
            clean(line.text),
        )
        figures = [] if several else in_line(line)
        if several:
            each = [named(several["name"], m[0], "", line.number, None) for m in re.finditer(NUMBER, several["all"])]
            found.append(Series(several["name"], each, index))
            continue
        ranked = {bool({*f.words} & _STATISTICS) for f in (*figures[:1], *run[-1:])}
        turns = len(figures) == 1 and len(ranked) > 1
        if len(figures) == 1 and run and run[-1].kind == figures[0].kind and line.number - last == 1 and not turns:
            run.append(figures[0])
        else:
            found += [Series(heading, run, index, [f.name for f in run])] if len(run) > 1 else []
            run = figures if len(figures) == 1 else []
            heading = line.text if not figures else heading
        last = line.number
    found += [Series(heading, run, index, [f.name for f in run])] if len(run) > 1 else []
    for s in found:  # "run 1/6  load 41.2 s   3.42 GB/s" has two figures
        first = [m for x in s.labels if (m := _BEFORE.fullmatch(x))]
        if len(first) == len(s.labels) > 2:
            own = [named(m["name"], m["n"], m["rest"], f.line, None) for m, f in zip(first, s.figures, strict=True)]
            yield Series(s.name, own, index, [m["name"] for m in first])
    yield from found


@dataclass(frozen=True)
class Sheet:
    """A table's figures by row and column; `keys` are the rows' first cells."""

    block: int
    header: tuple[str, ...]
    rows: tuple[dict[int, Named], ...]
    labels: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def numeric(self) -> list[int]:
        return [c for c in range(len(self.header)) if sum(c in row for row in self.rows) == len(self.rows)]

    def column(self, c: int) -> list[Named]:
        return [row[c] for row in self.rows if c in row]


@lru_cache(maxsize=2)
def sheets(report: Report) -> list[Sheet]:
    """Every table."""
    found = []
    for index, block in enumerate(report.blocks):
        if (table := block.table) and table.rows:
            rows = [*table_rows(table)]
            keys = tuple(clean(cells[0]).strip() for _, cells in table.rows)
            header = tuple(map(clean, table.header))
            found.append(
                Sheet(index, header, tuple({f.column: f for f in r} for r, _ in rows), tuple(x for _, x in rows), keys)
            )
    return found


def digits(f: Named | Quantity) -> float:
    """The number as it is printed."""
    m = re.search(NUMBER, f.text)
    return printed(m[0].lstrip("+-−")).mid if m else 0.0
