"""Reads a report of any format into blocks: Markdown, HTML, CSV, JSON, JSON lines, YAML, notebooks, logs."""

import csv
import itertools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from expertile.audit.blocks import Block, Line, is_numeric, split_code, table_of
from expertile.audit.data import Leaf, json_values, read_values, read_yaml
from expertile.audit.html import read_html
from expertile.audit.pattern import regex
from expertile.audit.quantity import clean

_FOREIGN = regex(r"[^\x00-\x7f]+")
# 1536³ in reStructuredText and in HTML.
# "12\,300" of LaTeX, and other narrow spaces.
_THOUSANDS = regex(r"(?<=\d)(?:\\,|[\u2009\u202f\u00a0])(?=\d{3}(?!\d))")
_RAISED = regex(r"(?<=\d)(?:(?:\\ )?:sup:`(-?\d+)`|<sup>(-?\d+)</sup>)")
_COMMA = regex(r"(?<![\d.,])\d{1,3}(?:\.\d{3})*,\d{1,2}(?![\d,])(?= ?[^\W\d_]|[ ]?%)")
_ANY_COMMA = regex(_COMMA.pattern + r"|(?<![\d.,])\d{1,3},\d{1,2}(?= *(?:[|&×]|</t[dh]>))")  # those of a cell too
_LONG_COMMA = regex(r"(?m)(?<![\d.,])\d{1,3},\d{3,}(?= *[|;]|$)")  # "0,0224"
_DOTTED, _CELL = regex(r"(?<![\d.,])\d{1,3}(?:\.\d{3})+(?!\d|[.,]\d)"), regex(r"[|;] *(\d+\.\d+) *(?=[|;])")
_POINT = regex(r"(?<![\d.,])\d+\.\d{1,2}(?![\d.])(?= ?(?:[KMGT]?i?B|[mµn]?s\b|%|x\b|T?FLOP))")
_ENDS = "markdown md, html htm, csv tsv, json jsonl ndjson ipynb, yaml yml, log out rst"
_KINDS = {end: ends.split()[0] for ends in _ENDS.split(", ") for end in ends.split()}
_MARKDOWN = regex(
    r"(?m)^ *```|^\s*\|?[\s:]*-{3,}[\s:]*\|[\s:|-]*$|(?:\A|\n\s*\n)#{1,6} +\w.*\n\s*\n|^#{2,6} \w|^[-*] \*\*"
)
# A line of a wrapped paragraph.
_WRAPPED = regex(r"[\w\"'(*`~@\[](?!.*(?:\S {3,}\S|\t| \| )).*[a-z]{2}.*")
_MARKED = regex(r"(?:[-*+]|\d+[.)]) |\[|\w+ \d\d? \d\d:\d\d|[\w -]{1,24}: |\d{4}-")
SPOKEN = regex(
    r"\S.*?(?:[.!?](?=\s+(?:[a-z]{0,2}[A-Z]|p\d\d\b|[*(\[#])|\s{2}|\s*$)|(?:(?<=[a-z]{4})|(?<=[A-Za-z]/s))\.(?=\s+\d)|"
    r"(?<=\d\d)\.(?=\s+\d+ [a-z]{3})|$)"
)
_ITEM = regex(r"\s*[*+•-] ")
_PER_MILLION = regex(r"(?i)(?:per|/) ?(?:(?:1 )?million|1?M) (?:output |input |generated )?tokens?\b")
_COMMAND = regex(r"\s*\\[a-z]+(?:\{|\[|$)")  # of LaTeX
_SPEAKER = regex(r"@?[\w.-]{2,24}(?: \w+)?(?: wrote)?:|[\w.-]{2,24} +[—–-] .*\d\d:\d\d")


def repair(text: str) -> str:
    """Undo a wrong decoding: UTF-8 read as Mac Roman, Windows-1252 or Latin-1 ("√ó" for "×"), where nearly all fits."""
    if "ransaction" in text and "oken" not in text:
        text = re.sub(r"(?i)\btps\b", "transactions/s", text)
    if _PER_MILLION.search(text):
        text = re.sub(r"(?<=\d )per M(?=[\s.,;)]|$)", "per M tokens", text)
    text = _RAISED.sub(lambda m: f"^{m[1] or m[2]}", _THOUSANDS.sub("", text))
    # German and French decimals ("3,1 s", "1.234,5"), where the text has no English ones.
    if len(_COMMA.findall(text)) > 2 and not _POINT.search(text):
        # Where all points of a table part thousands ("1.024"), so do all others.
        if _CELL.search(text) and all(map(_DOTTED.fullmatch, _CELL.findall(text))):
            text = _LONG_COMMA.sub(_english, _DOTTED.sub(lambda m: m[0].replace(".", ""), text))
        text = _ANY_COMMA.sub(_english, text)
    runs = _FOREIGN.findall(text)
    for charset in ("mac_roman", "cp1252", "latin-1"):
        if runs and sum(_decoded(run, charset) != run for run in runs) >= 0.8 * len(runs):
            return _FOREIGN.sub(lambda m, c=charset: _decoded(m[0], c), text)  # type: ignore[misc]
    return text


def _english(m: re.Match[str]) -> str:
    return m[0].translate(str.maketrans(".,", ",."))


def _decoded(run: str, charset: str) -> str:
    """`run` as UTF-8, or as it is where that gives none, or controls."""
    try:
        fixed = run.encode(charset).decode("utf-8")
    except UnicodeError:
        return run
    return fixed if fixed.isprintable() or fixed.isspace() else run


def format_of(name: str, text: str) -> str:
    """ "markdown", "html", "csv", "json", "yaml" or "log", by the name's end, else by the text."""
    known = _KINDS.get(name.rpartition(".")[2].lower())
    start = text.lstrip()[:4000]
    if known:
        return known
    if start[:1] in ("{", "["):
        with suppress(ValueError):
            json_values(text)
            return "json"
    if re.match(r"(?i)<!doctype html|<html|<table|<body", start):
        return "html"
    return "markdown" if _MARKDOWN.search(text) else "log"


def read(text: str, name: str = "") -> list[Block]:
    """The blocks of a report. Raises ValueError, with its name, where a .json or .ipynb file is none."""
    kind = format_of(name, text)
    if kind == "json":
        try:
            values = json_values(text)
        except ValueError as error:
            what = getattr(error, "msg", error)  # its place is one of the marked text
            raise ValueError(f"{name or 'standard input'}: expected JSON, got something else: {what}") from None
        cells = values[0].get("cells") if isinstance(values[0], dict) else None
        if isinstance(cells, list) and all(isinstance(cell, dict) for cell in cells):
            return _notebook(cells)
        return read_values(values)
    if kind == "yaml":
        return read_yaml(text)
    lines = [Line(i, line) for i, line in enumerate(text.splitlines(), 1)]
    return {"markdown": _markdown, "html": read_html, "csv": _csv, "log": _text}[kind](lines)


def _markdown(lines: list[Line]) -> list[Block]:
    from markdown_it import MarkdownIt  # reports of other formats need none

    # What stands within a line is read by the rules, not by Markdown's.
    tokens = MarkdownIt("commonmark").enable("table").disable("inline").parse("\n".join(line.text for line in lines))
    blocks: list[Block] = []
    depth, i = 0, 0
    while i < len(tokens):
        token = tokens[i]
        here = lines[slice(*(token.map or (0, 0)))]
        if token.type == "heading_open" and token.markup in "=-" and len(here) > 3:
            blocks.extend(split_code(here[:-1]))  # the output of a tool, above a drawn rule
        elif token.type == "heading_open":
            blocks.append(Block("heading", [Line(here[0].number, tokens[i + 1].content)], level=int(token.tag[1])))
        elif token.type in ("fence", "code_block"):
            closed = here[-1].text.strip(" >").startswith(("```", "~~~"))
            blocks.extend(split_code(here[1 : -1 if closed else None] if token.type == "fence" else here))
        elif token.type == "html_block":
            blocks.extend(read_html(here))
        elif token.type == "table_open":
            rows: list[tuple[int, list[str]]] = []
            while tokens[i].type != "table_close":
                if tokens[i].type == "tr_open":
                    rows.append((lines[(tokens[i].map or [0])[0]].number, []))
                elif tokens[i].type == "inline":
                    rows[-1][1].append(tokens[i].content)
                i += 1
            blocks.append(Block("prose", table=table_of(rows[0][1], rows[1:], rows[0][0])))
        elif token.type.endswith("_list_open"):
            blocks += [Block("list")] if depth == 0 else []
            depth += 1
        elif token.type.endswith("_list_close"):
            depth -= 1
        elif token.type == "inline" and tokens[i - 1].type == "paragraph_open":
            inside = [Line(line.number, re.sub(r"^\s*(?:[-*+]|\d+[.)])\s+|^\s*>\s?", "", line.text)) for line in here]
            if depth:
                inside = wrapped(inside)
                blocks += [Block("list")] if blocks[-1].kind != "list" else []
                blocks[-1].lines.extend(inside)
            else:
                # A paragraph of bars or columns is a table whose author forgot the rule.
                parts = split_code(inside)
                # Lines that differ in their figures alone are no sentence.
                alike = len({re.sub(r"[\d.,]+", "0", line.text) for line in inside}) < len(inside)
                alike |= len(inside) > 1 and all(re.match(r"[\w .()/-]{1,40}[:=] *\S", line.text) for line in inside)
                blocks.extend(parts if alike or any(b.table for b in parts) else [Block("prose", inside)])
        i += 1
    return [b for b in blocks if b.table or b.lines]


def wrapped(item: list[Line]) -> list[Line]:
    """The lines of a list's item, of which the first and all but the last are as long as those of a wrapped text."""
    on = _is_paragraph([replace(line, text=line.text.strip()) for line in item])
    return [replace(line, goes_on=on and i > 0) for i, line in enumerate(item)]


def _text(lines: list[Line]) -> list[Block]:
    """Plain text: wrapped paragraphs are prose, all else is preformatted."""
    found: list[Block] = []
    for block in split_code(lines):
        parts: list[list[Line]] = [[]]
        for line in block.lines:
            alone = _SPEAKER.fullmatch(line.text.strip()) or _COMMAND.match(line.text)
            parts += [] if line.text.strip() and not (_ITEM.match(line.text) or _COMMAND.match(line.text)) else [[]]
            parts[-1] += [line] if line.text.strip() else []
            parts += [[]] if alone else []
        if block.table or not any(map(_is_paragraph, parts)):
            found.append(block)
            continue
        for part in (p for p in parts if p):
            kind = "prose" if _is_paragraph(part) else "code"
            last = found[-1] if found else None
            joined = last is not None and last.kind == kind == "code" and not last.table
            found += [] if joined else [Block(kind)]
            found[-1].lines += part
    return found


def _is_paragraph(lines: list[Line]) -> bool:
    texts = [line.text for line in lines]
    texts = [t.strip() for t in texts] if texts and _ITEM.match(texts[0]) else texts
    longest = max(map(len, texts), default=0)
    wrapped = all(_WRAPPED.match(t) and (i == 0 or not _MARKED.match(t)) for i, t in enumerate(texts))
    words = all(len(re.findall(r"[A-Za-z]{2,}", t)) > 5 and len(t) > 0.7 * longest > 40 for t in texts[:-1])
    # Lines that are alike, or each a name and its figure, are a log's.
    alike = len({re.sub(r"[\d.,]+", "0", t) for t in texts}) < len(texts)
    named = all(re.search(r"[:=] *[\d.,]+ ?\S*$", t) for t in texts)
    return len(lines) > 1 and wrapped and words and not (alike or named)


def items_of(block: Block) -> Iterator[Block]:
    """Each item of a list by itself; one that runs over several lines is prose."""
    starts = [i for i, line in enumerate(block.lines) if i == 0 or not line.goes_on]
    for a, b in itertools.pairwise([*starts, len(block.lines)]):
        lines = [replace(line, goes_on=False) for line in block.lines[a:b]]
        yield replace(block, kind="prose" if b - a > 1 else block.kind, lines=lines)


def sentences(lines: list[Line]) -> Iterator[tuple[str, Callable[[int], int]]]:
    """The sentences of a paragraph, which may run over its lines, and the line of each of their characters."""
    joined, starts = "", list[int]()
    for line in lines:
        starts.append(len(joined))
        joined += clean(line.text).rstrip() + " "
        joined += " " * joined.endswith((". ", "! ", "? "))  # a line that ends so ends a sentence
    for m in SPOKEN.finditer(joined):
        yield m[0], partial(_number, lines, starts, m.start())


def _number(lines: list[Line], starts: list[int], sentence: int, at: int) -> int:
    return lines[bisect_right(starts, sentence + at) - 1].number


def _notebook(cells: list[dict[str, Any]]) -> list[Block]:
    def lines_of(source: list[Leaf] | Leaf) -> list[Line]:
        pieces = source if isinstance(source, list) else [source]
        return [Line(piece.line, text) for piece in pieces if isinstance(piece, Leaf) for text in piece.splitlines()]

    blocks: list[Block] = []
    for cell in cells:
        if cell.get("cell_type") == "markdown":
            blocks += _markdown(lines_of(cell.get("source", [])))
        outputs = cell.get("outputs")
        for output in (o for o in outputs if isinstance(o, dict)) if isinstance(outputs, list) else ():
            data = output["data"] if isinstance(output.get("data"), dict) else {}
            plain = output.get("text") or data.get("text/markdown") or data.get("text/plain") or []
            rich = data.get("text/html")
            blocks += read_html(lines_of(rich)) if rich else split_code(lines_of(plain))
    return blocks


def _begins(rows: list[tuple[int, list[str]]], i: int, names: list[str]) -> bool:
    """Whether a row behind a remark is the head of another table: without figures, or of another length."""
    (last, _), (line, cells), (_, below) = (*rows[i - 1 : i + 2], (0, []))[:3]
    bare = len(cells) > 1 and all(cells) and not any(map(is_numeric, cells))
    return line > last + 1 and ((any(map(is_numeric, below)) and bare) or len(names) != len(cells) == len(below) > 1)


def _csv(lines: list[Line]) -> list[Block]:
    lines = [line for line in lines if line.text.strip()]
    mark = max((",", ";", "\t", "|"), key=lambda mark: sum(line.text.count(mark) for line in lines[:9]))
    rows = [(line.number, next(csv.reader([line.text], delimiter=mark))) for line in lines]
    # Remarks may stand above, between and below; the head itself may begin with their sign.
    usual = Counter(len(cells) for _, cells in rows if not cells[0].startswith("#")).most_common(1)
    notes = [cells[0].startswith("#") and usual != [] and len(cells) != usual[0][0] for _, cells in rows]
    rows = [row for row, note in zip(rows, notes, strict=True) if not note]
    # The head is the widest of the first lines; what stands above it is text.
    # A remark with as many commas and spaces as a sentence is none; a head that begins with # ranks behind a plain one.
    spoken = [cells[0].startswith("#") and " " in cells[0][2:].strip() for _, cells in rows]
    head = max(
        range(min(9, len(rows))),
        key=lambda r: (not spoken[r], sum(map(bool, map(str.strip, rows[r][1]))), rows[r][1][0][:1] != "#", -r),
        default=0,
    )
    if len(rows) < head + 2 or len(rows[head][1]) < 2:
        return split_code(lines)
    names = rows[head][1]
    # The head may stand again, with another name in it, above other rows.
    alike = [sum(a == b != "" for a, b in zip(cells, names, strict=False)) for _, cells in rows]
    again = [i for i, n in enumerate(alike) if i > head and (2 * n > alike[head] or _begins(rows, i, names))]
    parts = itertools.pairwise([head, *again, len(rows)])
    tables = [table_of(rows[a][1], rows[a + 1 : b], rows[a][0]) for a, b in parts]
    above = [line for line in lines if line.number < rows[head][0]]
    below = [line for line, note in zip(lines, notes, strict=True) if note and line.number > rows[head][0]]
    return [Block("code", above), *(Block("code", table=t) for t in tables), *([Block("code", below)] if below else [])]
