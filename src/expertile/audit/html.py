"""Reads HTML: headings, text, preformatted text and tables with cells that span others."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from expertile.audit.blocks import Block, Line, split_code, table_of

_TEXT = {"p": "prose", "li": "list", "caption": "prose", "figcaption": "prose", "summary": "prose", "dt": "list",
         "dd": "list", "div": "prose", "blockquote": "prose", "span": ""}  # fmt: skip
_SILENT = ("script", "style", "svg", "noscript")


def read_html(text: str, first: int = 1) -> list[Block]:
    """The blocks of `text`, whose first line has the number `first`."""
    reader = _Reader(first)
    reader.feed(text)
    reader.close()
    reader.flush()
    return [b for b in reader.blocks if b.table or b.text.strip()]


class _Reader(HTMLParser):
    def __init__(self, first: int) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self._first = first
        self._kind, self._level = "prose", 0
        self._lines: list[Line] = []
        self._silent = self._pre = 0
        self._rows: list[tuple[int, bool, list[tuple[str, int, int]]]] | None = None
        self._cell: list[str] | None = None
        self._span = (1, 1)

    def _line(self) -> int:
        return self.getpos()[0] + self._first - 1

    def flush(self) -> None:
        lines = [line for line in self._lines if line.text.strip()]
        if lines and self._kind == "code":
            self.blocks.extend(split_code(lines))
        elif lines and self._kind == "list" and self.blocks and self.blocks[-1].kind == "list":
            self.blocks[-1].lines.extend(lines)
        elif lines and self._kind == "heading":
            joined = Line(lines[0].number, " ".join(line.text.strip() for line in lines))
            self.blocks.append(Block("heading", [joined], self._level))
        elif lines:
            self.blocks.append(Block(self._kind or "prose", lines))
        self._lines, self._kind = [], "prose"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in _SILENT:
            self._silent += 1
        elif tag == "table":
            self.flush()
            self._rows = []
        elif tag == "tr" and self._rows is not None:
            self._rows.append((self._line(), True, []))
        elif tag in ("td", "th") and self._rows:
            self._end_cell()
            self._cell = []
            self._span = (_span(given.get("colspan")), _span(given.get("rowspan")))
            if tag == "td":
                number, _, cells = self._rows[-1]
                self._rows[-1] = (number, False, cells)
        elif tag == "br":
            self.handle_data("\n" if self._cell is None else " ")
        elif self._cell is not None:
            return
        elif re.fullmatch(r"h[1-6]", tag):
            self.flush()
            self._kind, self._level = "heading", int(tag[1])
        elif tag == "pre":
            self.flush()
            self._kind, self._pre = "code", self._pre + 1
        elif _TEXT.get(tag) and not self._pre:
            self.flush()
            self._kind = _TEXT[tag]

    def handle_endtag(self, tag: str) -> None:
        if tag in _SILENT:
            self._silent = max(0, self._silent - 1)
        elif tag in ("td", "th", "tr"):
            self._end_cell()
        elif tag == "table" and self._rows is not None:
            self._end_cell()
            self._end_table()
        elif self._cell is None and (_TEXT.get(tag) or re.fullmatch(r"h[1-6]|pre", tag)):
            self._pre = 0 if tag == "pre" else self._pre
            self.flush()

    def handle_data(self, data: str) -> None:
        if self._silent:
            return
        if self._cell is not None:
            self._cell.append(data)
            return
        if self._rows:
            return
        # A text that goes on in its line after a tag is one line still.
        for i, piece in enumerate(data.split("\n")):
            number = self._line() + i
            if self._lines and self._lines[-1].number == number:
                self._lines[-1] = Line(number, self._lines[-1].text + piece)
            else:
                self._lines.append(Line(number, piece))

    def _end_cell(self) -> None:
        if self._cell is not None and self._rows:
            text = re.sub(r"\s+", " ", "".join(self._cell)).strip()
            self._rows[-1][2].append((text, *self._span))
        self._cell = None

    def _end_table(self) -> None:
        rows, self._rows = self._rows or [], None
        grid: list[list[str]] = []
        open_cells: dict[int, tuple[str, int]] = {}  # column -> text, rows still to fill
        for _, _, cells in rows:
            out: list[str] = []
            queue = list(cells)
            while queue or len(out) in open_cells:
                if len(out) in open_cells:
                    text, left = open_cells.pop(len(out))
                    if left > 1:
                        open_cells[len(out)] = (text, left - 1)
                    out.append(text)
                    continue
                text, wide, high = queue.pop(0)
                for _ in range(wide):
                    if high > 1:
                        open_cells[len(out)] = (text, high - 1)
                    out.append(text)
            grid.append(out)
        heads = 0
        while heads < len(rows) and rows[heads][1]:
            heads += 1
        heads = min(max(1, heads), len(rows) - 1)
        if len(rows) < 2:
            return
        width = max(map(len, grid))
        padded = [(row + [""] * width)[:width] for row in grid]
        # Several head rows: "Time (ms)" over "cuBLAS" is the column "Time (ms) cuBLAS".
        header = [" ".join(dict.fromkeys(padded[r][c] for r in range(heads) if padded[r][c])) for c in range(width)]
        body = [(rows[r][0], padded[r]) for r in range(heads, len(rows))]
        self.blocks.append(Block("prose", table=table_of(header, body, rows[0][0])))


def _span(text: str | None) -> int:
    return min(max(int(text), 1), 50) if text and text.isdigit() else 1
