"""Reads a report of any format into blocks: Markdown, HTML, CSV, JSON, JSON lines, notebooks, logs."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from typing import Any

from markdown_it import MarkdownIt

from expertile.audit.blocks import Block, Line, Table, split_code, table_of
from expertile.audit.html import read_html

_RUN = re.compile(r"[^\x00-\x7f]+")
_NEVER_MEANT = ("Cc", "Cn", "Co", "Cs", "Zl", "Zp")  # controls, unassigned, private use, line separators


def repair(text: str) -> str:
    """Undo a wrong decoding: UTF-8 read as Mac Roman, Windows-1252 or Latin-1 ("√ó" for "×"), where nearly all fits."""
    runs = _RUN.findall(text)
    for charset in ("mac_roman", "cp1252", "latin-1"):
        if runs and sum(_decoded(run, charset) is not None for run in runs) >= 0.8 * len(runs):
            return _RUN.sub(lambda m, c=charset: _decoded(m[0], c) or m[0], text)  # type: ignore[misc]
    return text


def _decoded(run: str, charset: str) -> str | None:
    try:
        fixed = run.encode(charset).decode("utf-8")
    except (UnicodeEncodeError, UnicodeDecodeError):
        return None
    return fixed if all(unicodedata.category(c) not in _NEVER_MEANT for c in fixed) else None


def format_of(name: str, text: str) -> str:
    """ "markdown", "html", "csv", "json", "jsonl", "notebook" or "log", by the name's end, else by the text."""
    end = name.rsplit(".", 1)[-1].lower() if "." in name else ""
    known = {"md": "markdown", "markdown": "markdown", "html": "html", "htm": "html", "csv": "csv", "tsv": "csv",
             "json": "json", "jsonl": "jsonl", "ndjson": "jsonl", "ipynb": "notebook", "log": "log", "out": "log",
             "rst": "log"}  # fmt: skip
    if end in known:
        return known[end]
    start = text.lstrip()[:4000]
    if start[:1] in "{[":
        try:
            loaded = json.loads(text)
            return "notebook" if isinstance(loaded, dict) and "nbformat" in loaded else "json"
        except ValueError:
            if _jsonl(text):
                return "jsonl"
    if re.match(r"(?i)<!doctype html|<html|<table|<body", start):
        return "html"
    if _MARKDOWN.search(text):
        return "markdown"
    lines = [line for line in start.splitlines() if line.strip()][:6]
    for mark in (",", "\t", ";"):
        counts = {line.count(mark) for line in lines}
        if len(lines) > 1 and len(counts) == 1 and min(counts) >= 2 and not re.search(r"[:=] ?\d", lines[0]):
            return "csv"
    return "log"


_MARKDOWN = re.compile(r"(?m)^ *```|^\s*\|?[\s:]*-{3,}[\s:]*\|[\s:|-]*$|^#{1,6} +\w.*\n\s*\n|^#{2,6} \w|^[-*] \*\*")


def read(text: str, name: str = "") -> list[Block]:
    """The blocks of a report. Raises ValueError where a .json or .ipynb file is none."""
    kind = format_of(name, text)
    if kind == "markdown":
        return _markdown(text)
    if kind == "html":
        return read_html(text)
    if kind == "csv":
        return _csv(text)
    if kind == "notebook":
        return _notebook(text)
    if kind == "json":
        # Several objects one after the other are lines of records, whatever the file's name says.
        return _jsonl(text) if _jsonl(text) and text.lstrip()[:1] == "{" and not _loads(text) else _json(text)
    if kind == "jsonl":
        return _jsonl(text)
    return _log(text)


def _numbered(text: str, first: int = 1) -> list[Line]:
    return [Line(first + i, line) for i, line in enumerate(text.splitlines())]


def _log(text: str) -> list[Block]:
    return split_code(_numbered(text))


def _markdown(text: str, first: int = 1) -> list[Block]:
    lines = text.splitlines()
    # Line numbers are those of the report, so its kinds of line break count as str.splitlines counts them.
    tokens = MarkdownIt("commonmark").enable("table").parse("\n".join(lines))
    blocks: list[Block] = []
    depth, i = 0, 0
    while i < len(tokens):
        token = tokens[i]
        start, end = token.map or (0, 0)
        here = [Line(first + n, lines[n]) for n in range(start, min(end, len(lines)))]
        if token.type == "heading_open":
            text_line = Line(first + start, tokens[i + 1].content)
            blocks.append(Block("heading", [text_line], level=int(token.tag[1])))
        elif token.type in ("fence", "code_block"):
            inner = here[1 : -1 if here[-1].text.strip(" >").startswith(("```", "~~~")) else None]
            blocks.extend(split_code(inner if token.type == "fence" else here, token.info.strip().lower()))
        elif token.type == "html_block":
            blocks.extend(read_html("\n".join(line.text for line in here), first + start))
        elif token.type == "table_open":
            i, table = _table(tokens, i, first)
            blocks.append(Block("prose", table=table))
        elif token.type in ("bullet_list_open", "ordered_list_open"):
            if depth == 0:
                blocks.append(Block("list"))
            depth += 1
        elif token.type in ("bullet_list_close", "ordered_list_close"):
            depth -= 1
        elif token.type == "inline":
            if depth and (not blocks or blocks[-1].kind != "list"):
                blocks.append(Block("list"))
            inside = [Line(line.number, re.sub(r"^\s*(?:[-*+]|\d+[.)])\s+|^\s*>\s?", "", line.text)) for line in here]
            if tokens[i - 1].type == "paragraph_open" and depth:
                blocks[-1].lines.extend(inside)
            elif tokens[i - 1].type == "paragraph_open":
                # A paragraph of bars or columns is a table whose author forgot the rule.
                parts = split_code(inside)
                blocks.extend(parts if any(b.table for b in parts) else [Block("prose", inside)])
        i += 1
    return [b for b in blocks if b.table or b.lines]


def _table(tokens: list[Any], i: int, first: int) -> tuple[int, Table]:
    line = first + tokens[i].map[0]
    header: list[str] = []
    rows: list[tuple[int, list[str]]] = []
    while tokens[i].type != "table_close":
        token = tokens[i]
        if token.type == "tr_open" and header:
            rows.append((first + token.map[0] if token.map else line + 1 + len(rows), []))
        elif token.type == "inline":
            (rows[-1][1] if rows else header).append(token.content)
        elif token.type == "thead_close" and not header:
            header = [""]
        i += 1
    return i, table_of(header, rows, line)


def _csv(text: str) -> list[Block]:
    lines = _numbered(text)
    comments = [line for line in lines if line.text.startswith("#") and line.text.count(",") < 2]
    # A comment line stays as an empty one, so that the reader's line numbers are the file's.
    body = "\n".join("" if line in comments else line.text for line in lines)
    data = [line.text for line in lines if line.text.strip() and line not in comments]
    if not data:
        return []
    mark = max((",", ";", "\t", "|"), key=data[0].count)
    reader = csv.reader(io.StringIO(body), delimiter=mark)
    rows = [(reader.line_num, row) for row in reader if any(c.strip() for c in row)]
    blocks = [Block("code", [line]) for line in comments]
    if len(rows) < 2 or data[0].count(mark) == 0:
        return split_code(lines)
    wide = max(range(min(4, len(rows))), key=lambda r: (sum(bool(c.strip()) for c in rows[r][1]), -r))
    before = [Line(number, ", ".join(row)) for number, row in rows[:wide]]
    if before:
        blocks.append(Block("code", before))
    return [*blocks, Block("code", table=table_of(rows[wide][1], rows[wide + 1 :], rows[wide][0]))]


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _jsonl(text: str) -> list[Block]:
    records = [(line.number, _loads(line.text)) for line in _numbered(text) if line.text.strip()]
    if not records or not all(isinstance(record, dict) for _, record in records):
        return []
    return _records([(number, _flat(record)) for number, record in records])


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{key} "))
        elif isinstance(value, (str, int, float)) and len(str(value)) < 200:
            found[prefix + key] = repr(value) if isinstance(value, float) else str(value)
        elif isinstance(value, list) and 0 < len(value) <= 8 and all(isinstance(v, int) for v in value):
            found[prefix + key] = "x".join(map(str, value))
    return found


def _records(records: list[tuple[int, dict[str, str]]], where: list[tuple[int, ...]] | None = None) -> list[Block]:
    """Records with the same keys, one after the other, are a table; `where` has the line of every value."""
    blocks: list[Block] = []
    for i, (number, record) in enumerate(records):
        header = tuple(record)
        row = (number, tuple(record.values()))
        lines = (where[i],) if where else ()
        last = blocks[-1].table if blocks else None
        if last is not None and last.header == header:
            blocks[-1].table = Table(header, (*last.rows, row), last.line, (*last.lines, *lines))
        elif record:
            blocks.append(Block("code", table=Table(header, (row,), number, lines)))
    return blocks


def _json(text: str) -> list[Block]:
    loaded = json.loads(text)
    cursor = 0

    def line_of(key: str) -> int:
        nonlocal cursor
        at = text.find(json.dumps(key), cursor)
        at = text.find(json.dumps(key, ensure_ascii=False), cursor) if at < 0 else at
        cursor = at + 1 if at >= 0 else cursor
        return text.count("\n", 0, cursor) + 1

    blocks: list[Block] = []

    def records(values: list[dict[str, Any]]) -> None:
        flat = [_flat(value) for value in values]
        # A nested key ends its flattened name.
        where = [tuple(line_of(key if key in value else key.rsplit(" ", 1)[-1]) for key in record)
                 for value, record in zip(values, flat, strict=True)]  # fmt: skip
        blocks.extend(_records([(w[0] if w else 1, r) for w, r in zip(where, flat, strict=True)], where))

    def walk(value: Any, path: str, level: int) -> None:
        if isinstance(value, dict):
            plain = {k: v for k, v in value.items() if not isinstance(v, (dict, list))}
            lists = {k: v for k, v in value.items() if k not in plain}
            small = all(isinstance(v, dict) and _is_leaf(v) for v in lists.values()) and len(lists) <= 3 and plain
            if not lists or small:
                records([value])
                return
            if plain:
                where = {k: line_of(k) for k in plain}
                blocks.append(Block("code", [Line(where[k], f"{k}: {v}") for k, v in plain.items()]))
            for key, inner in lists.items():
                blocks.append(Block("heading", [Line(line_of(key), str(key))], level=level + 1))
                walk(inner, f"{path} {key}", level + 1)
        elif isinstance(value, list):
            if value and all(isinstance(v, dict) and _is_leaf(v) for v in value):
                records(value)
            else:
                for inner in value:
                    if isinstance(inner, (dict, list)):
                        walk(inner, path, level)

    walk(loaded, "", 0)
    return blocks


def _is_leaf(value: dict[str, Any]) -> bool:
    return all(not isinstance(v, list) or all(isinstance(x, int) for x in v) for v in value.values()) and all(
        _is_leaf(v) for v in value.values() if isinstance(v, dict)
    )


def _notebook(text: str) -> list[Block]:
    loaded = json.loads(text)
    cursor = 0
    blocks: list[Block] = []

    def lines_of(source: str | list[str]) -> list[Line]:
        nonlocal cursor
        found = []
        for piece in ("".join(source) if isinstance(source, list) else source).splitlines():
            at = text.find(json.dumps(piece, ensure_ascii=False)[1:-1], cursor)
            at = at if at >= 0 else text.find(json.dumps(piece)[1:-1], cursor)
            cursor = at if at >= 0 else cursor
            found.append(Line(text.count("\n", 0, cursor) + 1, piece))
        return found

    for cell in loaded.get("cells", []) if isinstance(loaded, dict) else []:
        source = lines_of(cell.get("source", ""))
        if cell.get("cell_type") == "markdown":
            blocks.extend(_renumbered(_markdown("\n".join(line.text for line in source)), source))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text" in output:
                blocks.extend(split_code(lines_of(output["text"])))
            elif "text/html" in data:
                inner = lines_of(data["text/html"])
                blocks.extend(_renumbered(read_html("\n".join(line.text for line in inner)), inner))
            elif "text/markdown" in data or "text/plain" in data:
                inner = lines_of(data.get("text/markdown") or data["text/plain"])
                blocks.extend(split_code(inner))
    return blocks


def _renumbered(blocks: list[Block], source: list[Line]) -> list[Block]:
    """`blocks` read from `source` alone, with the lines that `source` has in the file."""

    def of(number: int) -> int:
        return source[min(number, len(source)) - 1].number if source else number

    for block in blocks:
        block.lines = [Line(of(line.number), line.text) for line in block.lines]
        if block.table:
            rows = tuple((of(number), cells) for number, cells in block.table.rows)
            block.table = Table(block.table.header, rows, of(block.table.line))
    return blocks
