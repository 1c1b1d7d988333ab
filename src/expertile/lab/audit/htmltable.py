"""Tables written as HTML inside Markdown."""

from __future__ import annotations

from html.parser import HTMLParser

from expertile.lab.audit.texttable import Grid


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[tuple[int, list[tuple[str, int]]]]] = []
        self.cell: list[str] | None = None
        self.span = 1

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append((self.getpos()[0], []))
        elif tag in ("td", "th") and self.tables and self.tables[-1]:
            self.cell = []
            span = dict(attrs).get("colspan") or "1"
            self.span = min(int(span), 50) if span.isdigit() else 1

    def handle_data(self, data: str) -> None:
        if self.cell is not None:
            self.cell.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self.cell is not None and self.tables and self.tables[-1]:
            self.tables[-1][-1][1].append((" ".join("".join(self.cell).split()), self.span))
            self.cell = None


def find(source: str, first_line: int) -> list[Grid]:
    """The tables of `source`, whose first line is line `first_line` of the document; only rectangular ones."""
    reader = _Reader()
    reader.feed(source)
    grids = []
    for rows in reader.tables:
        flat = [(line, [text for text, span in cells for _ in range(span)]) for line, cells in rows if cells]
        if len(flat) < 2:
            continue
        width = len(flat[-1][1])
        header_at = next((i for i, (_, cells) in enumerate(flat) if len(cells) == width), 0)
        body = [(line, cells) for line, cells in flat[header_at + 1 :] if len(cells) == width]
        if body and len(flat[header_at][1]) == width:
            line = first_line + flat[header_at][0] - 1
            grids.append(
                Grid(
                    tuple(flat[header_at][1]),
                    tuple(tuple(cells) for _, cells in body),
                    tuple(first_line + at - 1 for at, _ in body),
                    line,
                )
            )
    return grids
