"""A report as rows of typed quantities, each with the set-up in its scope."""

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from expertile.audit.blocks import Block, Table, block_facts, is_numeric, sections_of, turned, valued
from expertile.audit.facts import Facts, facts, of_rows, one_variant, seconds, size_of_name
from expertile.audit.legends import with_units
from expertile.audit.pattern import regex, says
from expertile.audit.quantity import Quantity, clean, named, quantities
from expertile.audit.read import SPOKEN, items_of, read, repair, sentences
from expertile.audit.units import NO_UNIT, unit_of_name
from expertile.device import Device

_TAG = regex(r"</?[a-zA-Z][^<>]*>")
_LATER = regex(r"(?im)\b(?:next time|next step|to-?do|future work|later on)\b[^.\n]*")
_ARGUMENT = regex(r"^[A-Za-z]\w*(?:<.*>)?/(\d{2,})$|^\d\^\d+ = (\d+)$")  # "BM_sort/4096", "2^12 = 4096"
_COUNTED = regex(
    r"\b(step|iter\w*|epoch|n|size|batch|bs|seq\w*|tokens|samples|rows|cols|columns|hidden|heads|count)[^\w,]{1,9}"
    r"(\d+)(?![\d.]|,\d)"
)
_SPARSE = regex(r"spars|2:4")
_LONG = regex(r"^(?=.{91})(?:.*)[\w%)]{2}\. [A-Z][a-z]+ ")
_CLOCK = regex(r"(?i)\bm+(?:in)?:s+(?:ec)?\b")  # "epoch (m:s)", "hh:mm:ss"
_SUMMARY = regex(
    r"(?i)^\W*(?:(?:overall|grand|arithmetic|harmonic|plain)\s+)?(?:average|avg\.?|mean|geo(?:metric|\.)?-?\s?mean|total|sum|"
    r"median|overall|(?:whole|full|entire) (?:step|run|pass|iteration|pipeline|model|forward|request)(?=\W*$)|"
    r"all(?!-)(?! others?\b))\b"
)


@dataclass(frozen=True)
class Size:
    """`near`: stated in the row, its block, the lines that lead to it or its heading; else it may be another run's."""

    value: float
    line: int
    near: bool


@dataclass(eq=False)
class Row:
    """Quantities that belong together: a table's row, one sentence, or a record of `key: value` lines."""

    kind: str  # "table" | "line" | "record"
    line: int
    text: str
    quantities: list[Quantity]
    block: int
    own: dict[str, float] = field(default_factory=dict)  # sizes in the row itself
    bare: dict[str, float] = field(default_factory=dict)  # whole numbers without a unit, by their columns' names
    label: str = ""  # the words of a table's row
    said: str = ""  # the sentence of which the row is a part
    report: "Report" = field(init=False)

    @cached_property
    def summary(self) -> bool:
        """Whether a table's row says something of the others: an average or a total. "Mean TPOT (ms)" is a measure."""
        first = [part.partition(": ")[2] for part in self.text.split("; ")[:3]]
        if self.kind == "line":  # of lines alike
            return any(re.fullmatch(r"(?i)\W*(?:total|sum|mean|average)\W*", q.label) for q in self.quantities[:1])
        return any(_SUMMARY.match(part) and unit_of_name(part) is None for part in first)

    def figure(self, column: int, kind: str = "") -> Quantity | None:
        """The figure (of a kind) in a table's column, if it equals something: no bound, no zero."""
        q = next((q for q in self.quantities if q.column == column and kind in ("", q.kind)), None)
        return q if q is not None and q.exact and q.value.mid > 0 else None

    def only(self, kind: str) -> Quantity | None:
        """The one figure of a kind, if there is one only and it equals something."""
        held = self.of(kind)
        return held[0] if len(held) == 1 and held[0].exact and held[0].value.mid > 0 else None

    def parts(self) -> list["Row"]:
        """A sentence that says the same of several ("19 ms (3,368/s), the other 33 ms (2,940/s)") as a row for each."""
        kinds = [q.kind for q in self.quantities]
        periods = [p for p in range(2, len(kinds) // 2 + 1) if kinds == kinds[:p] * (len(kinds) // p)]
        # "from 3 to 4 req/s (+33 %), from 90 to 60 ms (-33 %)"
        threes = zip(kinds[::3], kinds[1::3], kinds[2::3], strict=False)
        changes = all(b in (a, c) and a != c and {a, c} & {"percent", "ratio"} for a, b, c in threes)
        periods += [3] if len(kinds) > 3 and len(kinds) % 3 == 0 and changes else []
        starts = range(0, len(kinds), periods[0]) if periods and self.kind == "line" else ()
        rows = [self.of_these(self.quantities[s : s + periods[0]]) for s in starts]
        past = 0
        for row in rows if len(periods) == 1 else ():  # each has its own words
            end = row.quantities[-1].end
            row.said = self.text
            row.text = " " * past + self.text[past:end] + " " * (len(self.text) - end)
            past = end
        return rows or [self]

    def of_these(self, figures: list[Quantity]) -> "Row":
        """The row with some figures of its own."""
        row = replace(self, quantities=figures)
        row.report = self.report
        return row

    @cached_property
    def before(self) -> "Row | None":
        """The sentence before, in the same block; or the list before it, which may be one of two figures."""
        lines, at = self.report.lines_of_text, self.report.places.get((self.block, self.said or self.text), 0)
        if at and lines[at - 1].block == self.block:
            return lines[at - 1]
        listed = [q for r in lines if r.block == self.block - 1 for q in r.quantities]
        hence = len(listed) == 2 and re.match(r"\W*(?:So|Thus|Hence|That|This|Therefore)\b", self.text)
        of_it = hence or self.report.blocks[self.block - 1].kind == "list"
        return self.of_these(listed) if listed and of_it else None

    @cached_property
    def above_lines(self) -> list["Row"]:
        """The lines of text right above the row, in its block and the one before."""
        lines = self.report.lines_of_text
        return [r for r in lines if self.block - 1 <= r.block <= self.block and 0 < self.line - r.line < 14]

    def clause(self, q: Quantity) -> str:
        """The part of a sentence, between semicolons, that a figure stands in."""
        return self.text[self.text.rfind("; ", 0, q.start) + 1 :].split("; ")[0]

    def of(self, *kinds: str) -> list[Quantity]:
        return [q for q in self.quantities if q.kind in kinds]

    @cached_property
    def facts(self) -> Facts:
        return facts(self.text)

    # The set-up that holds for the row: the nearest statement above wins, and two values in one place are unknown.
    @cached_property
    def above(self) -> list[int]:
        """The blocks above that lead to the row's, the nearest first."""
        path = (sections := self.report.sections)[self.block]
        return [b for b in range(self.block - 1, -1, -1) if sections[b] == path[: len(sections[b])]]

    def is_near(self, block: int) -> bool:
        return self.report.sections[block] == self.report.sections[self.block] and self.block - block <= 2

    def _stated(self, what: str) -> tuple[tuple[Any, ...], int, bool]:
        """The nearest statement of `what`, its line, and whether it stands near the row."""
        report, block = self.report, self.report.blocks[self.block]
        if self.facts.of(what):
            return self.facts.of(what), self.line, True
        if block.lines and block.kind != "prose" and (found := report.nearest(self.block, what, self.line)):
            return found[1], found[0], True
        # A log's later lines say nothing of its earlier ones; a list or a paragraph is of one piece.
        for index in self.above if block.lines and block.kind == "code" else (self.block, *self.above):
            if values := report.facts[index].of(what):
                return values, report.blocks[index].first, index == self.block or self.is_near(index)
        given = facts(report.given).of(what)
        return given, self.line, bool(given)

    def size(self, name: str) -> Size | None:
        """The value of a size, or None where none is stated or several are."""
        if name in self.own:
            return Size(self.own[name], self.line, True)
        values, line, near = self._stated(name)
        return Size(values[0], line, near) if len(values) == 1 else None

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs that the row may have run on; none where the report speaks of accelerators unknown here."""
        report = self.report
        if not self.facts.of("devices") and not report.facts[self.block].of("devices") and report.names_gpu(self.block):
            return ()  # it names one that is not known here
        found, _, near = self._stated("devices")
        # Far from the row only where no other processor can be meant, and then any of the report's own.
        if not near:
            other = report.everything.foreign and not re.search(r"(?i)\bcuda\b", self.text)
            return () if other else report.everything.of("devices")
        # A paragraph may speak of another part than its headings.
        heads = () if self.facts.of("devices") else (report.facts[b].of("devices") for b in report.sections[self.block])
        return one_variant(tuple(found), itertools.chain(*heads), report.text)

    @lru_cache(1 << 13)  # noqa: B019
    def stated(self, what: str) -> tuple[Any, ...]:
        """The "formats" or "tuples" (4096x4096) that are stated near the row."""
        found, _, near = self._stated(what)
        return found if near else ()

    @cached_property
    def headings(self) -> str:
        """Lower-case words of the row's headings and of its table's header."""
        report = self.report
        table, path = report.blocks[self.block].table, report.sections[self.block]
        return clean("\n".join([*(report.blocks[b].text for b in path), *(table.header if table else ())])).lower()

    @cached_property
    def lead(self) -> str:
        """The lines of the row's block above it, and the sentence that leads to the block."""
        blocks = self.report.blocks
        of = blocks[self.block]
        own = [clean(n.text) for n in of.lines if self.line - 8 <= n.number < self.line or of.kind == "prose"]
        lead = blocks[self.block - 1].lines[-8:] if self.block and blocks[self.block - 1].kind != "list" else []
        return " ".join([*(clean(line.text) for line in lead), *own])

    @cached_property
    def words(self) -> str:
        """Lower-case words of the row, of its headings, and of the lines and tables' heads that lead to it."""
        blocks = [self.report.blocks[b] for b in self.above if self.is_near(b)]
        near = (" ".join(b.table.header) if b.table else b.text for b in blocks)
        return "\n".join(map(clean, (self.text, self.headings, *near))).lower()


@dataclass(eq=False)
class Grid:
    """A table's rows and its columns of figures."""

    block: int
    header: tuple[str, ...]
    rows: list[Row]
    drawn: bool = True  # else lines alike

    @lru_cache(1 << 13)  # noqa: B019
    def column(self, index: int) -> list[Quantity | None]:
        return [next((q for q in row.quantities if q.column == index), None) for row in self.rows]

    @cached_property
    def body(self) -> list[Row]:
        return [row for row in self.rows if not row.summary]

    @lru_cache(1 << 13)  # noqa: B019
    def columns(self, *kinds: str) -> list[int]:
        """The columns that hold one of `kinds` in at least half of their rows."""
        held = [[q.kind in kinds for q in self.column(c) if q is not None] for c in range(len(self.header))]
        return [c for c, fits in enumerate(held) if fits and 2 * sum(fits) >= len(self.rows)]


class Report:
    """What one text says; `given` is a set-up for what it leaves out. Raises ValueError if it is said to be JSON and
    is not."""

    def __init__(self, text: str, name: str = "", given: str = "") -> None:
        self.lines, self.given = text.splitlines(), given
        self.blocks = with_units(read(repair(text), name), text)
        self.sections = sections_of(self.blocks)
        self.grids: list[Grid] = []
        self.rows: list[Row] = []  # sentences, lines and records; the tables' rows stand in their grids
        for index, block in enumerate(self.blocks):
            if block.table is not None:
                self._grid(index, block.table)
            else:
                self._texts(index, block)
        self.all_rows = [*self.rows, *(row for grid in self.grids for row in grid.rows)]
        self.lines_of_text = [row for row in self.rows if row.kind == "line"]
        self.places = {(r.block, r.text): at for at, r in reversed([*enumerate(self.lines_of_text)])}
        self.tables = [*self.grids, *_alike(self.lines_of_text)]
        for row in (*self.rows, *(row for grid in self.tables for row in grid.rows)):
            row.report = self
        self.text = text.lower()
        self.sparse = says(_SPARSE, self.text)
        self.everything = facts(given + "\n" + clean(_TAG.sub(" ", _LATER.sub("", text))))  # of the whole report
        self.facts = [block_facts(block) for block in self.blocks]

    def _grid(self, index: int, table: Table) -> None:
        table = valued(table)
        rows, header = _rows(index, table)
        kinds = {q.kind for row in rows for q in row.quantities if q.column}
        # A table of key and value is a set-up or one record.
        if len(header) == 2 and rows and unit_of_name(header[1]) is None and len(kinds) != 1:
            pairs = [(number, clean(f"{cells[0]}: {cells[1]}")) for number, cells in table.rows]
            found = [q for number, text in pairs for q in quantities(text, number)]
            self.rows.append(Row("record", rows[0].line, "\n".join(text for _, text in pairs), found, index))
            return
        # "fft" and "total" in turn are no summaries.
        at = [i for i, row in enumerate(rows) if row.summary]
        in_turn = len(at) >= max(3, len(rows) / 2.5) and len(rows) - at[0] - len(at) >= 3
        for row in rows if in_turn else ():
            row.summary = False
        for some, names in ((rows, header), *(_rows(index, other) for other in (turned(table),) if other)):
            wide = any(q.column >= len(names) for row in some for q in row.quantities)
            self.grids.append(Grid(index, names * (1 + wide), some))

    def _texts(self, index: int, block: Block) -> None:
        lines = _lines(index, block)
        self.rows.extend(lines)
        record: dict[str, Row] = {}
        last = 0  # the line before, which may be a drawn rule
        for row in [*lines, Row("line", 0, "", [], index)] if block.kind in ("code", "list") else ():
            key = re.match(r"\W*(\w[^:=]{0,48}?)\s*[:=]", row.text)
            gap = block.kind == "code" and row.line > last + 1
            last = row.line
            if record and not gap and row.line and not re.search(r"\w", row.text):
                continue
            if not key or gap or key[1].lower() in record:
                held, record = list(record.values()), {}
                if len(held) > 1:
                    figures = [q for r in held for q in r.quantities]
                    self.rows.append(Row("record", held[0].line, "\n".join(r.text for r in held), figures, index))
            if key:
                record[key[1].lower()] = row

    @lru_cache(1 << 13)  # noqa: B019  (a report lives for one audit)
    def names_gpu(self, block: int) -> bool:
        """Whether preformatted text has a line "Device: …"."""
        of = self.blocks[block]
        text = of.text + "\n".join(": ".join(cells) for _, cells in (of.table.rows if of.table else ()))
        return of.kind == "code" and bool(re.search(r"(?i)\b(?:device|gpu|processor|graphics)[\w ]*[:|=] *[a-z]", text))

    @lru_cache(1 << 13)  # noqa: B019
    def _stated(self, block: int) -> dict[str, list[tuple[int, tuple[Any, ...]]]]:
        held: dict[str, list[tuple[int, tuple[Any, ...]]]] = {}
        for at in self.blocks[block].lines:
            for name, values in facts(clean(at.text)).stated.items():
                held.setdefault(name, []).append((at.number, values))
        return held

    def nearest(self, block: int, what: str, line: int) -> tuple[int, tuple[Any, ...]] | None:
        """The last line of a block above `line`, no further than a page, that states `what`; and its values."""
        entries = self._stated(block).get(what, [])
        at_or_after = bisect_left(entries, line, key=lambda entry: entry[0])
        found = entries[at_or_after - 1] if at_or_after else None
        return found if found is not None and line - found[0] <= 60 else None


def _alike(lines: list[Row]) -> Iterator[Grid]:
    """Lines that differ in their figures alone ("512: eager 1.5 ms, fused 0.75 ms -> 2.0x") as tables; a line that has
    the first of the figures only ("naive: 10.5 ms") is the baseline of the others."""
    alike: dict[int, dict[tuple[str, str], list[Row]]] = {}
    for row in lines:
        if 0 < len(row.quantities) < 7:
            behind = re.sub(r"[\d.,]+|\s+", lambda m: "0" if m[0].strip() else " ", row.text[row.quantities[0].start :])
            behind = re.sub(r"[-+−]?0( ?)[nµm]?(?=s\b)|[-+−]0", r"0\1", behind)  # whatever the prefix and the sign
            behind = re.sub(r"0 ?[kKMGT](?=[A-Za-z]+/s)", "0 ", behind)
            for whole in ("", re.sub(r"[\d.,]+", "0", row.text)):
                alike.setdefault(row.block, {}).setdefault((behind.strip(), whole), []).append(row)
    for block, groups in alike.items():
        for (behind, whole), rows in groups.items():
            # "Decode 3. latency: 9 ms" among "Prefill. latency: 200 ms" is of a table of its own.
            if whole and not 3 < len(rows) < len(groups[behind, ""]):
                continue
            others = (g for (b, form), g in groups.items() if not form and b != behind and behind.startswith(b))
            bare = [r for group in others for r in group if r.quantities[0].kind == rows[0].quantities[0].kind]
            if len(rows) + bool(bare) < 3 or len(rows) < 2:
                continue
            rows = sorted([*rows, *(bare if len(bare) == 1 else ())], key=lambda row: row.line)
            labels = max((tuple(q.label for q in row.quantities) for row in rows), key=len)
            numbered = [[replace(q, column=c) for c, q in enumerate(row.quantities)] for row in rows]
            held = [replace(r, quantities=q, own=r.facts.sizes) for r, q in zip(rows, numbered, strict=True)]
            for row in held:
                row.bare = {m[1].lower(): float(m[2]) for m in _COUNTED.finditer(row.text)}
            yield Grid(block, labels, held, False)


def _rows(index: int, table: Table) -> tuple[list[Row], tuple[str, ...]]:
    """A table's rows and its header."""
    header = tuple(re.sub(r"(?<=[a-z]{3})[A-Z][a-z]+", lambda m: f" {m[0].lower()}", clean(h)) for h in table.header)
    header = tuple(re.sub(r"^[a-z]+/(?=[a-z]+_[a-z0-9_]+$)|_6n$", "", h) for h in header)  # "perf/mfu_6n"
    units = list(map(unit_of_name, header))
    short, lone = {"b", "h", "s", "d"} <= set(header), "A" not in header  # of attention; else two variants
    products = {"N", "K"} <= {*header} and "M" not in header
    rows = []
    for at, (number, raw) in enumerate(table.rows):
        row, cells = Row("table", number, "", [], index), [clean(c) for c in raw]
        measure = re.search(r"[)\]]\s*$|_[a-z]{2,}$", cells[0]) or re.match(r"(?i)metric|measure|quantity|$", header[0])
        by_row = unit_of_name(cells[0]) if measure and not quantities(cells[0], number) else None
        for column, (cell, name) in enumerate(zip(cells, header, strict=True)):
            name, cell = of_rows(name, cell) if products else (name, cell)
            size = size_of_name(name.upper() if short and len(name) == 1 else name) if name != "B" or lone else None
            cell = seconds(cell) if _CLOCK.search(name) else cell
            plain = re.fullmatch(r"\s*(\d[\d,]*|\d*\.\d+(?=[kK]))([kK]?)\s*", cell)
            # "TTFT (ms)" before the row's figures is their unit.
            unit = units[column] or (by_row if column else None) or NO_UNIT
            if plain and not plain[2] and unit.kind in ("number", "other", "items", "params"):
                row.bare[name.strip().lower()] = float(plain[1].replace(",", ""))
            elif argument := _ARGUMENT.search(cell):
                row.bare[f"{name.strip().lower()} /"] = of = float(argument[1] or argument[2])
                row.own |= {size: of} if size else {}
            if size and plain and unit.kind in ("number", "other"):
                row.own.setdefault(size, float(plain[1].replace(",", "")) * (1024 if plain[2] else 1))  # GPUs, then TP
                continue
            found = quantities(cell.strip(), table.lines[at][column] if table.lines else number, unit)
            # "3.2 ms (2.1x)": what stands in brackets is a column of its own, behind the others.
            second = [bool(i) and q.kind == "ratio" and found[0].kind != "ratio" for i, q in enumerate(found)]
            figures = [
                replace(q, label=name, column=column + len(header) * s) for q, s in zip(found, second, strict=True)
            ]
            if not figures or not is_numeric(re.split(r"[(±]", cell)[0].strip() or "x"):
                row.label += cell + " " + "accumulator " * bool(re.search(r"(?i)\baccum", name))
            row.quantities += [named(figures[0]), *figures[1:]] if figures else []
        row.text = "; ".join(f"{h}: {c}" for h, c in zip(header, cells, strict=True) if c)
        rows.append(row)
    return rows, header


def _lines(index: int, block: Block) -> list[Row]:
    """The lines of a list or of preformatted text; the sentences of a paragraph, which may run over its lines."""
    if any(line.goes_on for line in block.lines):
        return [row for part in items_of(block) for row in _lines(index, part)]
    if block.kind != "prose":
        cleaned = [(line.number, clean(line.text)) for line in block.lines]
        if block.kind == "code":  # a paragraph in one line, as in LaTeX
            cleaned = [(n, part) for n, t in cleaned for part in (SPOKEN.findall(t) if _LONG.search(t) else [t])]
        return [Row("line", n, text, quantities(text, n), index) for n, text in cleaned if text.strip()]
    return [
        Row("line", number(0), text, [replace(q, line=number(q.start)) for q in quantities(text, 0)], index)
        for text, number in sentences(block.lines)
    ]
