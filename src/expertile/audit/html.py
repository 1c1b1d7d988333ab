"""Reads HTML: headings, text, preformatted text and tables with cells that span others."""

import itertools
import re
from html import unescape

from expertile.audit.blocks import Block, Line, Table, split_code, table_of
from expertile.audit.pattern import regex

_SILENT = regex(r"(?is)<!--.*?-->|<(script|style|svg|noscript)\b.*?</\1\s*>")
_PART = regex(r"(?is)(<table\b.*?</table\s*>|<pre\b.*?</pre\s*>|<h[1-6]\b.*?</h[1-6]\s*>)")
_BREAK = regex(r"(?i)(</?(?:p|div|ul|ol|li|dt|dd|section|blockquote|summary|figcaption|caption|tr)\b[^>]*>)")
_CELL = regex(r"(?is)<t([hd])\b([^>]*)>(.*?)(?=<t[hdr]\b|</t[hdr]|</table|</tbody|</thead|$)")
_TAG = regex(r"(?s)</?[a-zA-Z!][^>]*>")


def read_html(lines: list[Line]) -> list[Block]:
    """The blocks of a text. What is not shown leaves its lines behind, so that the numbers of the others stay."""
    shown = _SILENT.sub(lambda m: "\n" * m[0].count("\n"), "\n".join(line.text for line in lines))
    numbers = [line.number for line in lines]
    blocks: list[Block] = []
    at = 0
    for part in _PART.split(shown):
        kind = part[:3].lower() if _PART.fullmatch(part) else ""
        if kind == "<ta":
            if caption := re.search(r"(?is)<caption\b[^>]*>.*?</caption\s*>", part):
                _texts(caption[0], numbers[at + part[: caption.start()].count("\n") :], blocks)
            table = _table(part, numbers[at:])
            blocks += [Block("prose", table=table)] if table else []
        elif kind == "<pr":
            blocks += split_code(_plain(part, numbers[at:]))
        elif kind:
            joined = " ".join(line.text.strip() for line in _plain(part, numbers[at:]))
            blocks.append(Block("heading", [Line(numbers[at], joined)], level=int(kind[2])))
        else:
            _texts(part, numbers[at:], blocks)
        at += part.count("\n")
    return [b for b in blocks if b.table or b.text.strip()]


def _plain(part: str, numbers: list[int]) -> list[Line]:
    breaks = re.sub(r"(?i)<br\s*/?>(?!\s*\n)", "\r", part)
    bare = _TAG.sub(lambda m: "\n" * m[0].count("\n"), breaks)
    split = ((number, text.split("\r")) for number, text in zip(numbers, bare.split("\n"), strict=False))
    return [Line(number, unescape(piece)) for number, pieces in split for piece in pieces if piece.strip()]


def _texts(part: str, numbers: list[int], blocks: list[Block]) -> None:
    """Paragraphs; the items of a list are one block."""
    kind, at = "prose", 0
    for piece in _BREAK.split(part):
        if _BREAK.fullmatch(piece):
            kind = "list" if re.match(r"(?i)<(?:li|dt|dd)\b", piece) else "prose"
        elif lines := _plain(piece, numbers[at:]):
            blocks += [] if kind == "list" and blocks and blocks[-1].kind == "list" else [Block(kind, [])]
            blocks[-1].lines.extend(lines)
        at += piece.count("\n")


def _table(text: str, numbers: list[int]) -> Table | None:
    starts = [m.end() for m in re.finditer(r"(?i)<tr\b[^>]*>", text)]
    grid: dict[tuple[int, int], str] = {}
    heads = 0  # rows of heads only
    for r, (start, end) in enumerate(itertools.pairwise([*starts, len(text)])):
        cells, column = _CELL.findall(text, start, end), 0
        heads += heads == r and all(tag in "hH" for tag, _, _ in cells)
        for _, given, inner in cells:
            while (r, column) in grid:
                column += 1
            spans = (re.search(rf"(?i){way}span\s*=\s*[\"']?(\d+)", given) for way in ("col", "row"))
            wide, high = (min(max(int(m[1]), 1), 50) if m else 1 for m in spans)
            plain = " ".join(unescape(_TAG.sub(" " if "<br" in inner else "", inner)).split())
            grid |= {(r + down, column + right): plain for down in range(high) for right in range(wide)}
    if len(starts) < 2 or not grid:
        return None
    heads = min(max(1, heads), len(starts) - 1)
    columns = range(1 + max(c for _, c in grid))
    lines = [numbers[text.count("\n", 0, start)] for start in starts]
    # Several head rows: "Time (ms)" over "cuBLAS" is the column "Time (ms) cuBLAS".
    names = [" ".join(dict.fromkeys(filter(None, (grid.get((r, c)) for r in range(heads))))) for c in columns]
    body = [(lines[r], [grid.get((r, c), "") for c in columns]) for r in range(heads, len(starts))]
    return table_of(names, body, lines[0])
