"""What a report consists of, whatever its format: headings, text, tables; every part knows its lines."""

import itertools
import re
from dataclasses import dataclass, field, replace

from expertile.audit.facts import Facts, facts, size_of_name
from expertile.audit.pattern import regex
from expertile.audit.quantity import RATIO, clean
from expertile.audit.units import RATES, unit_of_name

_RULE = regex(r"^[\s+|=─━┄┈═╪╫┼┿╋╂├┝┡┢┤┥┩┪┬┭┰┳┯╤┴┻┷╧╔╗╚╝╠╣╦╩╬┌┐└┘┏┓┗┛╞╡╭╮╰╯:_*~-]+$")
_BAR = "[|│┃║]"
_NUMERIC = regex(
    r"^(?:\d{4}-\d\d-\d\d[T ]|\d+-)?\d{1,3}(?::\d\d){1,2}$|"
    r"^[~<>(\[]*[-+−]?[\d.][\d.,]*(?:e[-+]?\d+)?\s*(?:[%x×)]|[kKMGTµumn]?[A-Za-z/]{0,8})?[)\]]?"
    r"(?: ?± ?[\d.]+| \([\d.,]+\))?$"
)
# Of LaTeX's tables: the end of a row, and lines that are none.
_END, _LATEX_RULE = regex(r"\\\\.*$"), regex(r"\s*\\(?:[a-z]*(?:rule|line)|multicolumn\{\d+\}(?!.*&))|\s*$")
# "[ 40,  42)" is one cell.
_INTERVAL = regex(r"([\[(]) *([\w.+-]+), +([\w.+-]+)([\])])(?=\s)")
_TOTAL = regex(r"(?i)\W*(?:total|sum|mean|average|overall|geomean)\b(?=.*\d)")
_GAP = regex(r"\s{2,}|\t+")
_MEASURES = regex(
    r"(?i)\b(?:time|latency|duration|throughput|bandwidth|memory|tokens?|requests|prompts|images|samples|batch|rate|"
    r"tflops|speed|power|energy|cost|params|ttft|tpot|itl|mfu)\b"
)


@dataclass(frozen=True)
class Line:
    number: int  # from 1
    text: str
    goes_on: bool = False  # the sentence of the line before, in the item of a list


@dataclass(frozen=True)
class Table:
    """`rows` are (line, cells), as many cells as `header` has; `lines` those of each cell, where a row has several."""

    header: tuple[str, ...]
    rows: tuple[tuple[int, tuple[str, ...]], ...]
    line: int
    lines: tuple[tuple[int, ...], ...] = ()


@dataclass
class Block:
    """`kind`: "heading", "prose", "list" or "code"; a table of any format has a `table` and no lines."""

    kind: str
    lines: list[Line] = field(default_factory=list)
    level: int = 0
    table: Table | None = None

    @property
    def first(self) -> int:
        return self.table.line if self.table else self.lines[0].number if self.lines else 0

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)


# "8,1 ms" as the Continent writes it, in a table without a point.
_DECIMAL_COMMA, _POINT = regex(r"(\d{1,3}),(\d{1,2})(?= ?\D{0,8}$)"), regex(r"\d\.\d")


def table_of(header: list[str], rows: list[tuple[int, list[str]]], line: int) -> Table:
    """A table whose rows are as long as its header; longer ones are cut, shorter ones filled."""
    width = len(header)
    cells = [cell for _, some in rows for cell in some]
    if not any(map(_POINT.search, cells)) and sum(bool(_DECIMAL_COMMA.fullmatch(cell)) for cell in cells) > 3:
        rows = [(number, [_DECIMAL_COMMA.sub(r"\1.\2", cell) for cell in some]) for number, some in rows]
    filled = tuple((number, tuple((some + [""] * width)[:width])) for number, some in rows)
    return Table(tuple(h.strip() for h in header), filled, line)


def is_numeric(cell: str) -> bool:
    return bool(_NUMERIC.match(cell.strip()))


def split_code(lines: list[Line]) -> list[Block]:
    """The tables in preformatted text, ruled, comma-separated or aligned, and the lines between them."""
    blocks: list[Block] = []
    i = 0
    while i < len(lines):
        readers = (_asciidoc, _dashed, _separated, _matrix, _aligned)
        table, used = next(filter(None, (read(lines, i) for read in readers)), (None, 1))
        if table or not blocks or blocks[-1].table:
            blocks.append(Block("code", table=table))
        blocks[-1].lines += [] if table else [lines[i]]
        i += used
    return [b for b in blocks if b.table or b.text.strip()]


def _asciidoc(lines: list[Line], i: int) -> tuple[Table, int] | None:
    """Cells behind bars, on as many lines as there are; the first line or `cols` says how many are a row."""
    below = list(itertools.takewhile(lambda line: line.text.strip() != "|===", lines[i + 1 :]))
    if lines[i].text.strip() != "|===" or len(below) == len(lines) - i - 1:
        return None
    split = [(line.number, re.split(r"(?:^|\s+)[\d.+*<^>]*[aehlmds]?\|", f" {line.text}")[1:]) for line in below]
    columns = next((len(cells) for _, cells in split if cells), 1)
    if columns == 1 and i and (cols := re.search(r"cols=\"([^\"]*)", lines[i - 1].text)):
        columns = int(cols[1].partition("*")[0]) if "*" in cols[1] else cols[1].count(",") + 1
    cells = [(number, re.sub(r"^([*_])(.*)\1$", r"\2", c.strip())) for number, some in split for c in some]
    rows = [cells[at : at + columns] for at in range(0, len(cells) - columns + 1, columns)]
    if len(rows) < 2 or columns < 2:
        return None
    return _of_cells(rows), len(below) + 2


def _of_cells(rows: list[list[tuple[int, str]]]) -> Table:
    """A table of cells that know their lines; the first row is the head."""
    head, *held = ([text for _, text in row] for row in rows)
    numbers = ([number for number, _ in row] for row in rows[1:])
    where = tuple((*of, *of[-1:] * (len(head) - len(of))) for of in numbers)  # a cell that is missing: its row's last
    found = table_of(head, [(at[0], cells) for at, cells in zip(where, held, strict=True)], rows[0][0][0])
    return replace(found, lines=where)


def _header_ok(header: list[str]) -> bool:
    # "FP16 ms" and "p50 ms" are names.
    outside = (re.sub(r"\([^()]*\)", "", h) for h in header)
    figures = any(re.search(r"\d\.\d|(?<![A-Za-z\d])\d+ ?(?:ms|us|s|GB|tokens)\b", h) for h in outside)
    named = [h for h in header if re.search(r"[A-Za-z%]", h) and not is_numeric(h)]
    return not figures and len(named) >= 2 and len(named) >= len([h for h in header if h.strip()]) - 1


def _dashed(lines: list[Line], i: int) -> tuple[Table, int] | None:
    """Columns as wide as the dashes below their names: nsys, psql, the simple tables of reStructuredText."""
    before, _, rule, _, below = (lines[k].text if 0 <= k < len(lines) else "" for k in range(i - 1, i + 4))
    # What stands above a ruled head is none.
    if not re.fullmatch(r"\s*(?:(-{2,}|={2,})\s+)+(?:-{2,}|={2,})\s*", rule) or before != rule == below:
        return None
    spans = [m.span() for m in re.finditer(r"[-=]+", rule)]

    def cut(text: str) -> list[str]:
        at = [0]
        for (_, end), (start, _) in itertools.pairwise(spans):
            word = text.rfind(" ", 0, start) + 1  # one that is wider than its column
            to = start if word == start or len(text) <= start else word if word >= end else f"{text} ".find(" ", start)
            at.append(to)
        return [text[a:b].strip() for a, b in itertools.pairwise([*at, 999])]

    body = list(itertools.takewhile(lambda line: line.text.strip() and not _RULE.match(line.text), lines[i + 2 :]))
    end, *total = (*lines[i + 2 + len(body) :][:2], lines[i])  # one may stand below another rule
    total = [n for n in total[:-1] if _RULE.match(end.text) and _TOTAL.match(n.text)]
    rows, head = [(line.number, cut(line.text)) for line in (*body, *total)], cut(lines[i].text)
    used = len(rows) + 2 + len(total)
    return (table_of(head, rows, lines[i].number), used) if rows and _header_ok(head) else None


def _separated(lines: list[Line], i: int) -> tuple[Table, int] | None:
    for mark in (_BAR, ",", ";", "\t", "&"):
        text, bars, latex = lines[i].text.lstrip("# "), mark == _BAR, mark == "&"
        within = rf"{mark}(?![^()]*\))" if len(text) < 999 and not bars else mark  # not within brackets
        header = _split(within, text)
        # Where the marks leave no doubt, a heading may name a part and its figures.
        names = [re.sub(r"\(.*?\)|(?<=[A-Za-z]) v?\d+(?:\.\d+)+", "", h) for h in header] if latex else header
        if len(header) < (2 if bars or latex else 3) or not _header_ok(names) or max(map(len, header)) > 40 + 99 * bars:
            continue
        rule = _RULE if bars else _LATEX_RULE if latex else re.compile("(?!)")
        below = ((line.number, _split(mark, line.text)) for line in lines[i + 1 :] if not rule.match(line.text))
        rows = list(itertools.takewhile(lambda row: len(row[1]) == len(header), below))  # noqa: B023
        if rows and (bars or all(any(is_numeric(clean(c)) for c in cells) for _, cells in rows)):
            return table_of(header, rows, lines[i].number), rows[-1][0] - lines[i].number + 1
    return None


def _split(mark: str, text: str) -> list[str]:
    plain = text.strip().strip("|│┃║") if mark == _BAR else _END.sub("", text)
    return [c.strip() for c in re.split(mark, plain)]


def _matrix(lines: list[Line], i: int) -> tuple[Table, int] | None:
    """GPUs against GPUs, as nvbandwidth prints them; the line above has the unit, the diagonal is of one GPU."""
    names = re.sub(r"^\s*[A-Z]\\[A-Z]", "", lines[i].text).split()
    unit = re.search(r"\([KMGT]i?B/s\)", lines[i - 1].text) if i else None
    if not unit or len(names) < 2 or names != [str(c) for c in range(len(names))]:
        return None
    rows = [(line.number, line.text.split()) for line in lines[i + 1 : i + 1 + len(names)]]
    rows = [(n, cells) for r, (n, cells) in enumerate(rows) if cells[:1] == [str(r)] and len(cells) == len(names) + 1]
    for r, (_, cells) in enumerate(rows if len(rows) == len(names) else ()):
        cells[r + 1] = ""
    return (table_of(["from", *(f"to {c} {unit[0]}" for c in names)], rows, lines[i].number), len(rows) + 1)


def _placed(lines: list[Line], i: int) -> tuple[Table, int] | None:
    """Columns under heads that single spaces part, or whose rows' names have a column more: each word belongs to the
    figures below it."""
    rows: list[tuple[int, list[re.Match[str]]]] = []
    for line in (line for line in lines[i + 1 :] if not _RULE.match(line.text)):
        cells = [*re.finditer(r"\S+(?: \S+)*", line.text)]
        if len(cells) < 3 or (rows and len(cells) != len(rows[0][1])) or not is_numeric(cells[-1][0]):
            break
        rows.append((line.number, cells))
    spans = [(min(m.start() for m in of), max(m.end() for m in of)) for of in zip(*(c for _, c in rows), strict=True)]
    if len(rows) < 3 or any(a[1] >= b[0] for a, b in itertools.pairwise(spans)):
        return None
    header = [""] * len(spans)
    for m in re.finditer(r"\S+(?: \([^()]*\))?", lines[i].text):
        near = [max(a - m.end(), m.start() - b, 0) for a, b in spans]
        at = near.index(min(near))
        header[at] = f"{header[at]} {m[0]}".strip()
    figures = [c for c in range(len(spans)) if all(is_numeric(cells[c][0]) for _, cells in rows)]
    if len(figures) < 2 or not all(header[c] for c in figures) or not _header_ok(header):
        return None
    used = rows[-1][0] - lines[i].number + 1
    return table_of(header, [(n, [m[0] for m in cells]) for n, cells in rows], lines[i].number), used


_BLANK = ("-", "–", "—", "--", "n/a", "N/A")


def _aligned(lines: list[Line], i: int) -> tuple[Table, int] | None:
    """Columns set with spaces; a column of row numbers before the header's first is dropped."""
    found: list[tuple[Table, int]] = []
    for split in (_GAP, re.compile(r"\s+")):
        found += [placed] if split is not _GAP and (placed := _placed(lines, i)) else []
        head = re.sub(r"\( +", "(", lines[i].text)
        header = split.split(head.lstrip("# ").strip())
        # Two columns are a table where the second has a unit.
        unit = unit_of_name(header[1]) if len(header) == 2 else None
        if len(header) == 2 and not (
            re.fullmatch(r"(?i)speed-?up|[mµun]?s|sec|[KMG]i?B|.*\(.+\)", header[1]) or (unit and unit.kind in RATES)
        ):
            continue
        # The rows' names may have no heading.
        first = split.split(lines[i + 1].text.strip()) if i + 1 < len(lines) else []
        first = split.split(lines[i + 2].text.strip()) if len(first) == 1 and i + 2 < len(lines) else first
        if len(first) == len(header) + 1 and lines[i].text[:3].isspace() and not is_numeric(first[0]):
            header = ["", *header]
        if len(header) < 2 or not _header_ok(header) or re.search("[:=]", re.sub(r"\(.*?\)", "", "".join(header))):
            continue
        rows: list[tuple[int, list[str]]] = []
        used, end, between = 1, 1, False
        # "(B) (us) (GB/s)" below the names of nccl-tests are their units, each under the end of its name.
        below = lines[i + 1].text.lstrip("# ").strip() if i + 1 < len(lines) else ""
        pieces = [*re.finditer(r"\([^()]*\)|\[[^\[\]]*\]|\S+(?: \S+)*", lines[i + 1].text)] if below else []
        if len([m for m in pieces if m[0][0] in "(["]) > len(pieces) / 2 and not any(is_numeric(m[0]) for m in pieces):
            used, at, ends = 2, 0, list[int]()
            for name in header:
                at = lines[i].text.index(name, at) + len(name)
                ends.append(at)
            for c, m in enumerate(pieces):
                at = c if len(pieces) == len(ends) else min(range(len(ends)), key=lambda c: abs(ends[c] - m.end()))
                header[at] += f" {m[0]}"
        for line in lines[i + used :]:
            text = _INTERVAL.sub(r"\1\2,\3\4", re.sub(r"\( +", "(", line.text.strip()))
            cells = [cell for cell in split.split(text) if cell != ":"]
            if len(cells) < len(header) == len(loose := text.split()):  # a figure as wide as its column
                cells = loose
            more = len(cells) - len(header)
            if split is _GAP and more > 0 and cells[0] not in _BLANK and not any(map(is_numeric, cells[: more + 1])):
                cells = [" ".join(cells[: more + 1]), *cells[more + 1 :]]  # "FP8,  TP8"
            if len(cells) == len(header) + 1 and cells[0] in (str(len(rows)), str(len(rows) + 1)):
                cells = cells[1:]
            if text and not _RULE.match(text):
                figures = sum(is_numeric(c) or c in _BLANK for c in cells) if any(map(is_numeric, cells)) else 0
                if len(cells) != len(header) or figures * 2 < len(cells):
                    # One line may stand between two rows.
                    if between or not rows or len(header) < 4:
                        break
                    between = True
                else:
                    end, between = used + 1, False
                    rows.append((line.number, cells))
            elif rows and not text:
                break
            used += 1
        used = end
        if rows and used <= 3 * len(rows) + 3:
            found.append((table_of(header, rows, lines[i].number), used))
    return max(found, key=lambda each: len(each[0].rows), default=None)


def sections_of(blocks: list[Block]) -> list[tuple[int, ...]]:
    """For every block the headings above it, outermost first."""
    stack: list[int] = []
    found = []
    for index, block in enumerate(blocks):
        if block.kind == "heading":
            stack = [*(s for s in stack if blocks[s].level < block.level), index]
        found.append(tuple(stack))
    return found


def valued(table: Table) -> Table:
    """A table of names, units and values as one of two columns."""
    plain = [h.lower().split()[-1] if h.split() else "" for h in table.header]
    if len(plain) != 3 or plain[1] != "unit" or plain[2] not in ("value", "avg", "average"):
        return table
    rows = tuple((number, (f"{name} ({unit})" if unit else name, value)) for number, (name, unit, value) in table.rows)
    return Table((table.header[0], table.header[2]), rows, table.line)


def turned(table: Table) -> Table | None:
    """A table of which every row is a measure and every column a run, with runs as rows."""
    names = [cells[0] for _, cells in table.rows]
    measures = [n for n in names if unit_of_name(clean(n)) or size_of_name(clean(n)) or _MEASURES.search(n)]
    runs = table.header[1:]
    if len(runs) < 2 or len(names) < 2 or len(measures) < 0.6 * len(names) or len({*names}) < len(names):
        return None
    if any(unit_of_name(clean(h)) or RATIO.search(h) for h in runs):
        return None
    numbers = tuple(number for number, _ in table.rows)
    columns = [(h, *(cells[c] for _, cells in table.rows)) for c, h in enumerate(runs, 1)]
    rows = tuple((table.line, cells) for cells in columns)
    return Table((table.header[0], *names), rows, table.line, ((table.line, *numbers),) * len(rows))


def block_facts(block: Block) -> Facts:
    text, table = block.text, block.table
    if table is not None and len(table.header) == 2 and len(table.rows) < 30:
        text = "\n".join(f"{cells[0]}: {cells[1]}" for _, cells in (*table.rows, (0, table.header)))
    elif table is not None:
        text = " ; ".join(table.header)
    return facts(clean(text))
