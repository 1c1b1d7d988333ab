"""What a table's columns mean: dimensions, measured figures with their units, ratios, labels."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from expertile.lab.audit.dims import dim_name, shapes_in
from expertile.lab.audit.document import Table
from expertile.lab.audit.quantities import Quantity, find_quantities, plain_number, unit_at, with_unit

MEASURED = (
    "time",
    "flop_rate",
    "flops",
    "byte_rate",
    "bytes",
    "ratio",
    "percent",
    "token_rate",
    "event_rate",
    "intensity",
)
_RATIO = re.compile(
    r"speed-?\s?up|\bratio\b|\bvs\.?\b|\brelative\b|\bfactor\b|\bnormali[sz]ed\b|\bfaster\b|\bslower\b|\bcompression\b"
    r"|^[\w.+ -]{1,30}\s?/\s?[A-Za-z][\w.+ -]{0,30}$", re.I)  # fmt: skip
_PER_UNIT = re.compile(
    r"/\s?(?:s|sec|second|min|hour|iter\w*|tokens?|op|acc|joule|j|watt|w|dollar|\$|gpu|byte|param\w*|step|sm"
    r"|block|thread|layer|query"
    r"|row|element|request|m|k|mm)\b|\$", re.I)  # fmt: skip
_PERCENT = re.compile(r"%|\bpercent|\bmfu\b|\bhfu\b|\butili[sz]ation\b|\befficiency\b|\bsol\b", re.I)
_TIME = re.compile(r"\b(?:time|latency|duration|runtime|elapsed|wall[- ]?clock)\b", re.I)
_STATISTIC = re.compile(
    r"\bp\d\d\b|\bmin(?:imum)?\b|\bmax(?:imum)?\b|\bstd\b|\bstdev\b|\bsigma\b|±|\bmedian\b|\bmean\b|\bavg\b"
    r"|\baverage\b|\bci\b"
    r"|\bvariance\b|\berror\b", re.I)  # fmt: skip
_PHASE = re.compile(
    r"\bprefill\b|\bdecode\b|\bforward\b|\bbackward\b|\bfwd\b|\bbwd\b|\bttft\b|\btpot\b|\bitl\b|\bcompile\b"
    r"|\bwarm-?up\b"
    r"|\bfirst\b|\btotal\b|\bkernel\b|\be2e\b|\bend-to-end\b|\bload\b|\bsetup\b|\boverhead\b|\blaunch\b"
    r"|\bquant\w*\b", re.I)  # fmt: skip
_METRIC_WORDS = re.compile(
    r"\b(?:time|latency|duration|runtime|throughput|performance|perf|bandwidth|bw|memory|mem|speed|gflops|tflops"
    r"|tflop|flops"
    r"|ms|us|µs|μs|ns|sec|s|gb|mb|gib|mib|tb|kb|tokens|tok|per|second|usage|peak|achieved|measured|effective|used|x|t|g"
    r"|compute|computation|rate|avg|average|mean|median|min|max|p50|p95|p99)\b", re.I)  # fmt: skip
_SUMMARY = re.compile(
    r"^\W*(?P<what>average|avg|mean|geo(?:metric)?[- ]?mean|gmean|median|total|sum|overall|minimum|min|maximum"
    r"|max|all)\b", re.I)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """`kind` is one of MEASURED, "dim", "label" or "number" (numeric, unit unknown); `scale` turns cells into SI."""

    index: int
    header: str
    kind: str
    scale: float = 1.0
    dim: str | None = None
    source: str = ""  # where the unit came from when not from the header or cells

    @property
    def statistic(self) -> bool:
        """A spread or quantile rather than one system's figure."""
        return bool(_STATISTIC.search(self.header))

    @property
    def phase(self) -> bool:
        """A part of the work ("prefill", "compile") rather than one system's figure."""
        return bool(_PHASE.search(self.header))

    @property
    def system(self) -> tuple[str, ...]:
        """The words that say whose figure this is: "PyTorch (ms)" -> ("pytorch",); () for a bare metric."""
        bare = re.sub(r"\([^)]*/s[^)]*\)|\((?:ms|us|µs|μs|s|gb|mb|x|%|tflops?)\)", " ", self.header, flags=re.I)
        bare = re.sub(r"[TGMP]?(?:FLOPS|FLOPs?/s|B/s)|%", " ", bare, flags=re.I)
        words = re.findall(r"[a-z][a-z0-9_.+-]*|\d+[a-z][a-z0-9-]*", _METRIC_WORDS.sub(" ", bare).lower())
        return tuple(w.strip(".-") for w in words if w.strip(".-"))


@dataclass(frozen=True)
class Cell:
    """One cell: the figure the column is about, and any further figures printed with it ("4.2 (84%)")."""

    text: str
    value: Quantity | None
    extra: tuple[Quantity, ...] = ()


@dataclass(frozen=True)
class TypedTable:
    """A table with its columns understood. `cells[row][column]`."""

    table: Table
    columns: tuple[Column, ...]
    cells: tuple[tuple[Cell, ...], ...]

    def summary(self, row: int) -> str:
        """ "average", "geomean", "total" … for a row that sums up others, else ""."""
        label = next((c for c in self.table.rows[row] if c.strip()), "")
        match = _SUMMARY.match(label)
        if not match:
            return ""
        word = match["what"].lower()
        if word.startswith(("geo", "gmean")):
            return "geomean"
        word = {"avg": "average", "mean": "average", "sum": "total", "minimum": "min", "maximum": "max"}.get(word, word)
        return "" if word == "all" and len(label.split()) > 1 else word

    @property
    def elided(self) -> bool:
        """Whether rows are left out ("...")."""
        return any(re.fullmatch(r"\W*(?:\.{2,}|…|⋮)\W*", c) for row in self.table.rows for c in row)

    def body(self) -> list[int]:
        """The rows that are not summaries."""
        return [r for r in range(len(self.cells)) if not self.summary(r)]

    def of_kind(self, *kinds: str) -> list[Column]:
        """The columns of those kinds, in order."""
        return [c for c in self.columns if c.kind in kinds]

    def label(self, row: int) -> str:
        """The row's first text cell, or its dimensions."""
        for column in self.columns:
            if column.kind == "label" and self.table.rows[row][column.index].strip():
                return self.table.rows[row][column.index]
        dims = [f"{c.header}={self.table.rows[row][c.index]}" for c in self.columns if c.kind == "dim"]
        return ", ".join(dims) or f"row {row + 1}"

    def at(self, row: int, column: Column) -> Quantity | None:
        """The figure in that cell, if there is one."""
        return self.cells[row][column.index].value


def understand(table: Table) -> TypedTable:
    """The table with a kind for every column. Rows are padded or cut to the header's width."""
    width = len(table.header)
    rows = tuple(tuple(row[:width]) + ("",) * (width - len(row)) for row in table.rows)
    table = replace(table, rows=rows)
    columns = tuple(_column(i, header, [row[i] for row in rows]) for i, header in enumerate(table.header))
    cells = tuple(tuple(_cell(row[c.index], c) for c in columns) for row in rows)
    return TypedTable(table, columns, cells)


def retyped(typed: TypedTable, index: int, kind: str, scale: float, source: str) -> TypedTable:
    """The same table with one column read in another unit, `source` saying why."""
    old = typed.columns[index]
    new = replace(old, kind=kind, scale=scale, source=source)
    columns = tuple(new if c.index == index else c for c in typed.columns)
    cells = tuple(tuple(_cell(row[c.index], c) for c in columns) for row in typed.table.rows)
    return TypedTable(typed.table, columns, cells)


def header_unit(header: str) -> tuple[str, float] | None:
    """Kind and scale of the unit a header gives: "PyTorch (ms)", "TFLOPS", "GB/s", "Size [MB]", "Latency, us"."""
    for match in re.finditer(r"[(\[]\s*([^)\]]+?)\s*[)\]]", header):
        unit = unit_at(match[1], 0)
        if unit and unit[3] >= len(match[1]) - 1:
            return unit[0], unit[1]
    for match in re.finditer(r"(?<![\w/%])(?=[A-Za-zµμ%])", header):
        unit = unit_at(header, match.start())
        if unit is None or unit[0] == "ratio":
            continue
        word = header[match.start() : unit[3]]
        if (
            word.lower() in ("s", "h", "t/s")
            and word != header.strip()
            and header[match.start() - 1 : match.start()] != "_"
        ):
            continue
        if unit[0] == "bytes" and unit[1] == 1.0:
            continue
        return unit[0], unit[1]
    return None


def _column(index: int, header: str, cells: list[str]) -> Column:
    filled = [c for c in cells if c.strip() and not re.fullmatch(r"[-–—.…n/aN/A]+", c.strip())]
    numeric = [c for c in filled if plain_number(c)]
    unit = header_unit(header)
    in_cells = Counter(q[0].kind for c in filled if (q := find_quantities(c)) and _leads(c, q[0]))
    kind_in_cells = in_cells.most_common(1)[0][0] if in_cells else None
    ratios_of = unit is not None and unit[0] != kind_in_cells and kind_in_cells == "ratio"
    if kind_in_cells and in_cells[kind_in_cells] >= max(1, len(filled) / 2) and not ratios_of:
        return Column(index, header, kind_in_cells, unit[1] if unit and unit[0] == kind_in_cells else 1.0)
    if not numeric or len(numeric) < len(filled) / 2 or any(shapes_in(c) for c in filled):
        return Column(index, header, "label")
    dim = dim_name(header)
    if dim and unit is None and all(re.fullmatch(r"[\d,]+(?:\.0)?[kK]?", c.strip()) for c in filled):
        return Column(index, header, "dim", dim=dim)
    if unit:
        percent_of = unit[0] in ("flop_rate", "byte_rate", "bytes", "time") and "%" in header
        return Column(index, header, "percent", 0.01) if percent_of else Column(index, header, *unit)
    if _RATIO.search(header) and not _PERCENT.search(header) and not _PER_UNIT.search(header):
        return Column(index, header, "ratio")
    if _PERCENT.search(header):
        values = [float(m["a"].replace(",", "")) for c in numeric if (m := plain_number(c))]
        return Column(index, header, "percent", 0.01 if max(values) > 1.5 or "%" in header else 1.0)
    bare = sum(bool(re.fullmatch(r"\s*[~≈<>]?[-+]?[\d.,]+(?:[eE][-+]?\d+)?\s*(?:\(.*\))?\s*", c)) for c in numeric)
    return Column(index, header, "number" if header.strip() and bare >= 0.8 * len(numeric) else "label")


def _leads(cell: str, quantity: Quantity) -> bool:
    return not re.search(r"\w", cell[: quantity.start].replace("~", ""))


def _cell(text: str, column: Column) -> Cell:
    quantities = find_quantities(text)
    if column.kind in MEASURED:
        same = [q for q in quantities if q.kind == column.kind]
        if same and same[0] is quantities[0]:
            return Cell(text, same[0], tuple(q for q in quantities if q is not same[0]))
        plain = with_unit(text, column.kind, column.scale)
        if plain is not None and (not quantities or quantities[0].start > plain.start):
            return Cell(text, plain, tuple(quantities))
        return Cell(text, same[0] if same else None, tuple(q for q in quantities if not same or q is not same[0]))
    if column.kind == "number":
        return Cell(text, with_unit(text, "number", 1.0), tuple(quantities))
    if quantities and column.kind == "label" and _leads(text, quantities[0]):
        return Cell(text, quantities[0], tuple(quantities[1:]))
    return Cell(text, None, tuple(quantities))
