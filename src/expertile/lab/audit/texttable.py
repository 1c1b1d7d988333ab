"""Tables drawn in plain text: `a | b` with or without borders, columns kept apart by spaces, comma-separated lines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from expertile.lab.audit.quantities import plain_number

_RULE = re.compile(r"^[\s|+│┃┆├┤┼┬┴┌┐└┘─━═╞╡╪╔╗╚╝╠╣║╦╩╬=:\-_*#]+$")
_PIPES = re.compile(r"[|│┃║]")


@dataclass(frozen=True)
class Grid:
    """Header and rows of equal width, with their lines; `title` is a lone line just above, if any."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    line: int
    title: str = ""


def find(numbered: list[tuple[int, str]]) -> tuple[list[Grid], list[tuple[int, str]]]:
    """The tables in (line number, text) pairs, and the lines that belong to none."""
    grids: list[Grid] = []
    rest: list[tuple[int, str]] = []
    i = 0
    while i < len(numbered):
        grid, used = _at(numbered, i)
        if grid is None:
            if not _RULE.match(numbered[i][1]) or not numbered[i][1].strip():
                rest.append(numbered[i])
            i += 1
            continue
        title = rest[-1][1].strip() if rest and rest[-1][0] >= grid.line - 2 and not grid.title else ""
        grids.append(Grid(grid.header, grid.rows, grid.lines, grid.line, title))
        i += used
    return grids, [r for r in rest if r[1].strip()]


def _at(numbered: list[tuple[int, str]], i: int) -> tuple[Grid | None, int]:
    text = numbered[i][1]
    if not text.strip() or _RULE.match(text):
        return None, 0
    for split in (_pipes, _commas, _spaces):
        header = split(text)
        if header is None or not _is_header(header):
            continue
        rows: list[tuple[str, ...]] = []
        lines: list[int] = []
        j = i + 1
        while j < len(numbered):
            line, below = numbered[j]
            if _RULE.match(below) and below.strip():
                j += 1
                continue
            cells = _fit(split(below), below, len(header), split is _spaces) if below.strip() else None
            if cells is None:
                break
            rows.append(cells)
            lines.append(line)
            j += 1
        width = max((len(r) for r in rows), default=0)
        numeric = sum(plain_number(c) is not None for r in rows for c in r)
        if (
            rows
            and (split is _pipes or numeric >= len(rows))
            and (len(rows) > 1 or split is _pipes or _ruled(numbered, i))
        ):
            head = header if width == len(header) else ["", *header]
            return Grid(tuple(head), tuple(rows), tuple(lines), numbered[i][0]), j - i
    return None, 0


def _ruled(numbered: list[tuple[int, str]], i: int) -> bool:
    return i + 1 < len(numbered) and bool(_RULE.match(numbered[i + 1][1])) and bool(numbered[i + 1][1].strip())


def _pipes(text: str) -> list[str] | None:
    if len(_PIPES.findall(text)) < 1:
        return None
    cells = [c.strip() for c in _PIPES.split(text)]
    if cells and not cells[0]:
        cells = cells[1:]
    if cells and not cells[-1]:
        cells = cells[:-1]
    pairs = sum(bool(re.match(r"[^:=]{1,40}[:=]\s*\S", c)) for c in cells)
    return cells if len(cells) >= 2 and pairs < len(cells) / 2 else None


def _commas(text: str) -> list[str] | None:
    cells = [c.strip() for c in text.split(",")]
    return cells if len(cells) >= 3 and all(len(c) < 40 for c in cells) else None


def _spaces(text: str) -> list[str] | None:
    if ": " in text.strip().rstrip(":") and not re.search(r"\S {3,}\S", text):
        return None
    cells = [c.strip() for c in re.split(r"\t+| {2,}", text.strip())]
    if len(cells) >= 2:
        return cells
    words = text.split()
    return words if len(words) >= 3 and all(plain_number(w) for w in words[1:]) else None


def _is_header(cells: list[str]) -> bool:
    words = [c for c in cells if c]
    numbers = sum(plain_number(c) is not None for c in words)
    sentences = sum(len(c.split()) > 7 for c in words)
    return len(words) >= 2 and numbers <= len(words) / 3 and sentences == 0


def _fit(cells: list[str] | None, text: str, width: int, spaces: bool) -> tuple[str, ...] | None:
    """`cells` if they make a row under a header of `width` columns (one more is a row index)."""
    if spaces and (cells is None or len(cells) not in (width, width + 1)):
        words = text.split()
        cells = words if len(words) in (width, width + 1) else cells
    if cells is None or len(cells) not in (width, width + (1 if spaces else 0)):
        return None
    if spaces and not any(plain_number(c) for c in cells):
        return None
    return tuple(cells)
