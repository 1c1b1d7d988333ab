"""A report as rows of typed quantities, each with the set-up in its scope."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from expertile.audit.blocks import Block, Table, is_numeric
from expertile.audit.facts import Facts, facts, size_of_name
from expertile.audit.quantity import Quantity, cell_quantities, clean, quantities
from expertile.audit.read import read, repair
from expertile.audit.units import Unit, unit_of_name


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
    label: str = ""  # the words of a table's row

    def of(self, *kinds: str) -> list[Quantity]:
        return [q for q in self.quantities if q.kind in kinds]

    @cached_property
    def facts(self) -> Facts:
        return facts(self.text)


@dataclass(eq=False)
class Grid:
    """A table's rows and its columns of figures."""

    block: int
    header: tuple[str, ...]
    rows: list[Row]
    units: tuple[Unit | None, ...]

    def column(self, index: int) -> list[Quantity | None]:
        return [next((q for q in row.quantities if q.column == index), None) for row in self.rows]

    def columns(self, *kinds: str) -> list[int]:
        """The columns that hold one of `kinds` in at least half of their rows."""
        found = []
        for index in range(len(self.header)):
            held = [q for q in self.column(index) if q is not None]
            if held and sum(q.kind in kinds for q in held) * 2 >= len(self.rows):
                found.append(index)
        return found


_REACH = 60  # lines
_RATIO = re.compile(
    r"(?i)speed-?\s?up|\bratio\b|\brelative\b|\brel\b|slow-?down|improvement|\bgain\b|faster|\bvs\.?\b|\bfactor\b|normalized"
)
_PER_TOKEN = re.compile(r"(?i)\b(?:tpot|itl|inter-?token|per[ _-](?:output[ _-])?token)\b")
_SHARE = re.compile(r"(?i)%|percent|efficiency|utili[sz]ation|\bmfu\b|\bhfu\b|reduction|saved|savings?|overhead")


class Report:
    """What one text says; `given` is a set-up for what it leaves out. Raises ValueError if it is said to be JSON and
    is not."""

    def __init__(self, text: str, name: str = "", given: str = "") -> None:
        self.name = name
        self.lines = text.splitlines()
        self.given = given
        self.blocks = read(repair(text), name)
        self.sections = _sections(self.blocks)
        self._scopes: dict[Row, Scope] = {}
        self._stated: dict[int, dict[str, list[tuple[int, tuple[Any, ...]]]]] = {}
        self.grids: list[Grid] = []
        self.rows: list[Row] = []  # sentences, lines and records; the tables' rows stand in their grids
        for index, block in enumerate(self.blocks):
            if block.table is not None:
                self._grid(index, block.table)
            elif block.kind != "heading":
                self._texts(index, block)
            else:
                self.rows.extend(_lines(index, block))
        self.facts = [_block_facts(block) for block in self.blocks]

    @cached_property
    def text(self) -> str:
        """The whole report in lower case."""
        return "\n".join(self.lines).lower()

    @cached_property
    def everything(self) -> Facts:
        """What the whole report states."""
        return facts(self.given + "\n" + clean("\n".join(self.lines)))

    def _grid(self, index: int, table: Table) -> None:
        header = tuple(clean(h) for h in table.header)
        caption = self._caption(index)
        units = list(map(unit_of_name, header))
        rows = []
        for at, (number, raw) in enumerate(table.rows):
            cells = [clean(c) for c in raw]
            found: list[Quantity] = []
            own: dict[str, float] = {}
            label = []
            for column, (cell, name) in enumerate(zip(cells, header, strict=True)):
                size = size_of_name(name)
                where = table.lines[at][column] if table.lines else number
                figures = cell_quantities(cell, where, name, units[column], column)
                plain = re.fullmatch(r"\s*(\d[\d,]*)([kK]?)\s*", cell)
                if size and plain and units[column] is None:
                    own[size] = float(plain[1].replace(",", "")) * (1024 if plain[2] else 1)
                    continue
                if not figures or not is_numeric(re.split(r"[(±]", cell)[0].strip() or "x"):
                    label.append(cell)
                if figures and figures[0].kind == "number":
                    quotient = _RATIO.search(name) or is_quotient(name, header)
                    kind = "ratio" if quotient else "share" if _SHARE.search(name) else "number"
                    kind = "time" if kind == "number" and caption and caption.kind == "time" else kind
                    figures[0] = replace(figures[0], kind=kind)
                    if kind == "time" and caption:
                        figures[0] = replace(figures[0], value=figures[0].value * caption.low)
                if figures and figures[0].kind == "time" and _PER_TOKEN.search(name):
                    figures[0] = replace(figures[0], kind="s_per_token")
                found.extend(figures)
            text = "; ".join(f"{h}: {c}" for h, c in zip(header, cells, strict=True) if c)
            row = Row("table", number, text, found, index, own, " ".join(label))
            rows.append(row)
        # A table of key and value is a set-up or one record.
        if len(header) == 2 and rows and not self._looks_measured(header, rows):
            pairs = [(row.line, row.text.split("; ")) for row in rows]
            record = [f"{p[0].partition(': ')[2]}: {p[-1].partition(': ')[2]}" for _, p in pairs]
            found = [q for (number, _), text in zip(pairs, record, strict=True) for q in quantities(text, number)]
            self.rows.append(Row("record", rows[0].line, "\n".join(record), found, index))
            return
        self.grids.append(Grid(index, header, rows, tuple(units)))

    def _looks_measured(self, header: tuple[str, ...], rows: list[Row]) -> bool:
        return unit_of_name(header[1]) is not None or len({q.kind for row in rows for q in row.quantities}) == 1

    def _caption(self, index: int) -> Unit | None:
        """The unit that the heading or the line just above a table states for the whole of it."""
        above = self.blocks[index - 1] if index else None
        if above is None or above.table is not None or not above.lines:
            return None
        text = clean(above.lines[-1].text)
        inside = re.findall(r"[(\[]([^()\[\]]*)[)\]]|\bin ([a-zµ]+)\b", text)
        found = [u for pair in inside for u in (unit_of_name(f"({pair[0] or pair[1]})"),) if u]
        return found[0] if len(found) == 1 else None

    def _texts(self, index: int, block: Block) -> None:
        lines = _lines(index, block)
        self.rows.extend(lines)
        if block.kind == "prose":
            return
        record: list[Row] = []
        seen: set[str] = set()

        def close() -> None:
            if len(record) > 1:
                figures = [q for row in record for q in row.quantities]
                text = "\n".join(row.text for row in record)
                self.rows.append(Row("record", record[0].line, text, figures, index))
            record.clear()
            seen.clear()

        previous = 0
        for row in lines:
            key = re.match(r"\W*([A-Za-z][^:=]{0,48}?)\s*[:=]", row.text)
            name = key[1].lower() if key else ""
            if not key or (record and row.line > previous + 1 and block.kind == "code") or name in seen:
                close()
            if key:
                record.append(row)
                seen.add(name)
            previous = row.line
        close()

    def scope(self, row: Row) -> Scope:
        if row not in self._scopes:
            self._scopes[row] = Scope(self, row)
        return self._scopes[row]

    @lru_cache  # noqa: B019  (a report lives for one audit)
    def names_gpu(self, block: int) -> bool:
        """Whether a block has a line "Device: …"."""
        return bool(re.search(r"(?im)\b(?:device|gpu|processor|graphics)[\w ]*[:|=] *\w", self.blocks[block].text))

    def nearest(self, block: int, what: str, line: int) -> tuple[int, tuple[Any, ...]] | None:
        """The last line of a block, above `line`, that states a size, "devices", "formats" or "tuples"; and what.

        A statement further up than a long page is another run's.
        """
        if block not in self._stated:
            held: dict[str, list[tuple[int, tuple[Any, ...]]]] = {}
            for at in self.blocks[block].lines:
                stated = facts(clean(at.text))
                plain = {"devices": stated.devices, "formats": stated.formats, "tuples": stated.tuples}
                for name, value in (*stated.sizes.items(), *plain.items()):
                    if value:
                        held.setdefault(name, []).append((at.number, value))
            self._stated[block] = held
        entries = self._stated[block].get(what, [])
        at_or_after = bisect_left(entries, line, key=lambda entry: entry[0])
        found = entries[at_or_after - 1] if at_or_after else None
        return found if found is not None and line - found[0] <= _REACH else None


def is_quotient(name: str, header: tuple[str, ...]) -> bool:
    """Whether a column called "LLM/PyTorch" stands beside columns of these names."""
    sides = [side.strip().lower() for side in name.split("/")]
    others = " ".join(h for h in header if h != name).lower()
    return len(sides) == 2 and all(len(side) > 1 and side in others for side in sides)


def _sections(blocks: list[Block]) -> list[tuple[int, ...]]:
    """For every block the headings above it, outermost first."""
    stack: list[int] = []
    found = []
    for index, block in enumerate(blocks):
        if block.kind == "heading":
            while stack and blocks[stack[-1]].level >= block.level:
                stack.pop()
            stack.append(index)
        found.append(tuple(stack))
    return found


def _block_facts(block: Block) -> Facts | None:
    if block.table is not None:
        if len(block.table.header) == 2 and len(block.table.rows) < 30:
            keys = [f"{cells[0]}: {cells[1]}" for _, cells in (*block.table.rows, (0, block.table.header))]
            return facts(clean("\n".join(keys)))
        return facts(clean(" ; ".join(block.table.header)))
    return facts(clean(block.text))


def _lines(index: int, block: Block) -> list[Row]:
    if block.kind != "prose":
        found = []
        for line in block.lines:
            text = clean(line.text)
            if text.strip():
                found.append(Row("line", line.number, text, quantities(text, line.number), index))
        return found
    # A paragraph's sentences may run over its lines.
    joined, starts = "", []
    for line in block.lines:
        starts.append((len(joined), line.number))
        joined += clean(line.text) + " "
    rows = []
    for m in re.finditer(r"\S.*?(?:[.!?](?=\s+[A-Z*(\[#]|\s*$)|$)", joined):
        number = max((s for s in starts if s[0] <= m.start()), default=(0, block.first))[1]
        figures = []
        for q in quantities(m[0], number):
            here = max((s for s in starts if s[0] <= m.start() + q.start), default=(0, number))[1]
            figures.append(replace(q, line=here))
        rows.append(Row("line", number, m[0], figures, index))
    return rows


class Scope:
    """The set-up that holds for a row: the nearest statement above wins, and two values in one place are unknown."""

    def __init__(self, report: Report, row: Row) -> None:
        self._report, self._row = report, row
        path = report.sections[row.block]
        reach = [b for b in range(row.block - 1, -1, -1) if report.sections[b] == path[: len(report.sections[b])]]
        self._above = [row.block, *reach]

    def _near(self, block: int) -> bool:
        report, row = self._report, self._row
        own_section = report.sections[block] == report.sections[row.block]
        return block == row.block or (own_section and row.block - block <= 2)

    def size(self, name: str) -> Size | None:
        """The value of a size, or None where none is stated or several are."""
        report, row = self._report, self._row
        if name in row.own:
            return Size(row.own[name], row.line, True)
        here = row.facts.sizes.get(name)
        if here:
            return Size(here[0], row.line, True) if len(here) == 1 else None
        for index in self._above:
            block, stated = report.blocks[index], report.facts[index]
            values = stated.sizes.get(name) if stated else None
            if index == row.block and block.lines and block.kind in ("code", "list"):
                found = report.nearest(index, name, row.line)
                if found:
                    return Size(found[1][0], found[0], True) if len(found[1]) == 1 else None
                continue
            if values and index != row.block:
                return Size(values[0], block.first, self._near(index)) if len(values) == 1 else None
        given = facts(report.given).sizes.get(name)
        return Size(given[0], row.line, True) if given else None

    def _names(self, what: str) -> tuple[tuple[str, ...], bool]:
        own = getattr(self._row.facts, what)
        if own:
            return own, True
        for index in self._above:
            stated = self._report.facts[index]
            block = self._report.blocks[index]
            if index == self._row.block and block.lines and block.kind == "code":
                found = self._report.nearest(index, what, self._row.line)
                if found:
                    return found[1], True
                continue
            if stated and getattr(stated, what):
                return getattr(stated, what), self._near(index)
        given = getattr(facts(self._report.given), what)
        return given, bool(given)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The names of the GPUs that the row may have run on."""
        found, near = self._names("devices")
        block = self._report.blocks[self._row.block]
        if not near and block.kind == "code" and self._report.names_gpu(self._row.block):
            return ()  # it names one that nobody knows here
        return found if near else self.everything.devices

    @cached_property
    def formats(self) -> tuple[str, ...]:
        return self._names("formats")[0]

    @property
    def everything(self) -> Facts:
        return self._report.everything

    @cached_property
    def words(self) -> str:
        """Lower-case words of the row, of its table's header, of the lines that lead to it and of its headings."""
        report, row = self._report, self._row
        parts = [row.text]
        for index in (*report.sections[row.block], *[b for b in self._above[1:] if self._near(b)]):
            block = report.blocks[index]
            parts.append(block.text if block.table is None else " ".join(block.table.header))
        return clean("\n".join(parts)).lower()

    @cached_property
    def headings(self) -> str:
        report, row = self._report, self._row
        grid = report.blocks[row.block].table
        names = " ".join(grid.header) if grid else ""
        return clean(" ".join([*(report.blocks[b].text for b in report.sections[row.block]), names])).lower()

    @cached_property
    def tuples(self) -> tuple[tuple[int, ...], ...]:
        """Sizes written as 4096x4096: the row's own, else those of the lines that lead to it."""
        if self._row.facts.tuples:
            return self._row.facts.tuples
        for index in self._above[1:3] if self._row.kind == "table" else self._above[:1]:
            stated = self._report.facts[index]
            block = self._report.blocks[index]
            if index == self._row.block and block.lines:
                found = self._report.nearest(index, "tuples", self._row.line)
                if found:
                    return found[1]
            elif stated and stated.tuples:
                return stated.tuples
        return ()
