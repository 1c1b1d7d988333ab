"""Reads a report of any format into blocks: Markdown, HTML, CSV, JSON, JSON lines, YAML, notebooks, logs."""

import csv
import itertools
import json
import re
from typing import Any

from markdown_it import MarkdownIt

from expertile.audit.blocks import Block, Line, Table, split_code, table_of
from expertile.audit.html import read_html

_FOREIGN = re.compile(r"[^\x00-\x7f]+")
# 1536³ in reStructuredText and in HTML.
_RAISED = re.compile(r"(?<=\d)(?:(?:\\ )?:sup:`(-?\d+)`|<sup>(-?\d+)</sup>)")


def repair(text: str) -> str:
    """Undo a wrong decoding: UTF-8 read as Mac Roman, Windows-1252 or Latin-1 ("√ó" for "×"), where nearly all fits."""
    if "ransaction" in text and "oken" not in text:
        text = re.sub(r"(?i)\btps\b", "transactions/s", text)
    text = _with_points(_RAISED.sub(lambda m: f"^{m[1] or m[2]}", text))
    runs = _FOREIGN.findall(text)
    for charset in ("mac_roman", "cp1252", "latin-1"):
        if runs and sum(_decoded(run, charset) != run for run in runs) >= 0.8 * len(runs):
            return _FOREIGN.sub(lambda m, c=charset: _decoded(m[0], c), text)  # type: ignore[misc]
    return text


_COMMA = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3})*,\d{1,2}(?![\d,])(?= ?[^\W\d_]|[ ]?%)")
_POINT = re.compile(r"(?<![\d.,])\d+\.\d{1,2}(?![\d.])(?= ?(?:[KMGT]?i?B|[mµn]?s\b|%|x\b|T?FLOP))")


def _with_points(text: str) -> str:
    """German and French decimals ("3,1 s", "1.234,5") as English ones, where the text has no other."""
    if len(_COMMA.findall(text)) < 3 or _POINT.search(text):
        return text
    return _COMMA.sub(lambda m: m[0].translate(str.maketrans(".,", ",.")), text)


def _decoded(run: str, charset: str) -> str:
    """`run` as UTF-8, or as it is where that gives none, or controls."""
    try:
        fixed = run.encode(charset).decode("utf-8")
    except UnicodeError:
        return run
    return fixed if fixed.isprintable() or fixed.isspace() else run


_ENDS = {
    "markdown": "md markdown",
    "html": "html htm",
    "csv": "csv tsv",
    "json": "json",
    "yaml": "yaml yml",
    "jsonl": "jsonl ndjson",
    "notebook": "ipynb",
    "log": "log out rst",
}
_KINDS = {end: kind for kind, ends in _ENDS.items() for end in ends.split()}
_MARKDOWN = re.compile(
    r"(?m)^ *```|^\s*\|?[\s:]*-{3,}[\s:]*\|[\s:|-]*$|(?:\A|\n\s*\n)#{1,6} +\w.*\n\s*\n|^#{2,6} \w|^[-*] \*\*"
)


def format_of(name: str, text: str) -> str:
    """ "markdown", "html", "csv", "json", "jsonl", "yaml", "notebook" or "log", by the name's end, else by the text."""
    known = _KINDS.get(name.rpartition(".")[2].lower())
    start = text.lstrip()[:4000]
    if known or start[:1] in ("{", "["):
        loaded = None if known else _loads(text)
        if known or loaded is not None:
            return known or ("notebook" if isinstance(loaded, dict) and "nbformat" in loaded else "json")
        if _jsonl(text):
            return "jsonl"
    if re.match(r"(?i)<!doctype html|<html|<table|<body", start):
        return "html"
    return "markdown" if _MARKDOWN.search(text) else "log"


def read(text: str, name: str = "") -> list[Block]:
    """The blocks of a report. Raises ValueError where a .json or .ipynb file is none."""
    kind = format_of(name, text)
    # Several objects one after the other are lines of records, whatever the file's name says.
    if kind == "json" and text.lstrip()[:1] == "{" and _loads(text) is None and _jsonl(text):
        kind = "jsonl"
    if kind in ("json", "notebook", "jsonl", "yaml"):
        return {"json": _json, "jsonl": _jsonl, "notebook": _notebook, "yaml": _json}[kind](text)
    return {"markdown": _markdown, "html": read_html, "csv": _csv, "log": _text}[kind](_numbered(text))


def _numbered(text: str) -> list[Line]:
    return [Line(i, line) for i, line in enumerate(text.splitlines(), 1)]


def _markdown(lines: list[Line]) -> list[Block]:
    tokens = MarkdownIt("commonmark").enable("table").parse("\n".join(line.text for line in lines))
    blocks: list[Block] = []
    depth, i = 0, 0
    while i < len(tokens):
        token = tokens[i]
        here = lines[slice(*(token.map or (0, 0)))]
        if token.type == "heading_open":
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


# A line of a wrapped paragraph.
_WRAPPED = re.compile(r"[\w\"'(*`~@\[](?!.*(?:\S {3,}\S|\t| \| )).*[a-z]{2}.*")
_MARKED = re.compile(r"(?:[-*+]|\d+[.)]) |\[|\w+ \d\d? \d\d:\d\d|[\w -]{1,24}: |\d{4}-")


_SPEAKER = re.compile(r"@?[\w.-]{2,24}(?: \w+)?(?: wrote)?:|[\w.-]{2,24} +[—–-] .*\d\d:\d\d")


def _text(lines: list[Line]) -> list[Block]:
    """Plain text: wrapped paragraphs are prose, all else is preformatted."""
    found: list[Block] = []
    for block in split_code(lines):
        parts: list[list[Line]] = [[]]
        for line in block.lines:
            parts += [] if line.text.strip() else [[]]
            parts[-1] += [line] if line.text.strip() else []
            parts += [[]] if _SPEAKER.fullmatch(line.text.strip()) else []
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
    longest = max((len(line.text) for line in lines), default=0)
    wrapped = all(
        _WRAPPED.match(line.text) and (i == 0 or not _MARKED.match(line.text)) for i, line in enumerate(lines)
    )
    words = all(len(re.findall(r"[A-Za-z]{2,}", line.text)) > 5 for line in lines[:-1])
    other = len({re.sub(r"[\d.,]+", "0", line.text) for line in lines}) == len(lines)  # lines alike are a log's
    return (
        len(lines) > 1
        and other
        and wrapped
        and words
        and all(len(line.text) > 0.7 * longest > 40 for line in lines[:-1])
    )


def _csv(lines: list[Line]) -> list[Block]:
    lines = [line for line in lines if line.text.strip()]
    mark = max((",", ";", "\t", "|"), key=lambda mark: sum(line.text.count(mark) for line in lines[:9]))
    rows = [(line.number, next(csv.reader([line.text], delimiter=mark))) for line in lines]
    # The head is the widest of the first lines; what stands above it is text.
    head = max(range(min(6, len(rows))), key=lambda r: (sum(bool(c.strip()) for c in rows[r][1]), -r), default=0)
    if len(rows) < head + 2 or len(rows[head][1]) < 2:
        return split_code(lines)
    table = table_of(rows[head][1], rows[head + 1 :], rows[head][0])
    return [Block("code", lines[:head]), Block("code", table=table)]


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_float=str)  # 1.70 has three digits
    except ValueError:
        return None


def _jsonl(text: str) -> list[Block]:
    records = [(line.number, _loads(line.text)) for line in _numbered(text) if line.text.strip()]
    if not all(isinstance(record, dict) for _, record in records):
        return []
    flat = [(number, _flat(record)) for number, record in records]
    return _records([(dict.fromkeys(record, number), record) for number, record in flat])


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    if (unit := record.get("time_unit")) in ("ns", "us", "ms", "s"):  # Google Benchmark
        record = {f"{k} ({unit})" if k in ("real_time", "cpu_time") else k: v for k, v in record.items()}
    for key, value in record.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{key} "))
        elif isinstance(value, (str, int, float)) and len(str(value)) < 200:
            found[prefix + key] = str(value)
    return found


def _records(records: list[tuple[dict[str, int], dict[str, str]]]) -> list[Block]:
    """Records, each with its keys' lines; those with the same keys, one after the other, are a table."""
    blocks: list[Block] = []
    for lines, record in records:
        header, at = tuple(record), tuple(lines.values())
        last = blocks[-1].table if blocks else None
        if last is not None and last.header == header:
            rows, where = (*last.rows, (at[0], tuple(record.values()))), (*last.lines, at)
            blocks[-1].table = Table(header, rows, last.line, where)
        elif record:
            blocks.append(Block("code", table=Table(header, ((at[0], tuple(record.values())),), at[0], (at,))))
    return blocks


class _Finder:
    """The lines of strings in a JSON text, looked for one after the other."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def peek(self, piece: str) -> int:
        """The line of what may stand behind others that are looked for later."""
        at, line = self._at, self.line(piece)
        self._at = at
        return line

    def line(self, piece: str) -> int:
        found = (self._text.find(json.dumps(piece, ensure_ascii=a)[1:-1], self._at) for a in (False, True))
        self._at = next((at for at in found if at >= 0), self._at)
        return self._text.count("\n", 0, self._at) + 1


def _json(text: str) -> list[Block]:
    finder, blocks = _Finder(text), list[Block]()

    def records(values: list[dict[str, Any]]) -> None:
        # A nested key ends its flattened name.
        flat = [(value, _flat(value)) for value in values]
        found = [({k: finder.line(k if k in value else k.rpartition(" ")[2]) for k in f}, f) for value, f in flat]
        blocks.extend(_records(found))

    def walk(value: Any, level: int) -> None:
        if isinstance(value, list):
            if value and all(isinstance(v, dict) and _is_leaf(v) for v in value):
                records(value)
            else:
                for inner in value:
                    walk(inner, level)
        elif isinstance(value, dict):
            nested = {k: v for k, v in value.items() if isinstance(v, (dict, list))}
            if not nested or (_is_leaf(value) and len(nested) <= 6 and len(nested) <= len(value) < 40):
                records([value])
                return
            plain = [Line(finder.peek(k), f"{k}: {v}") for k, v in value.items() if k not in nested]
            blocks.extend([Block("code", plain)] if plain else [])
            for key, inner in nested.items():
                blocks.append(Block("heading", [Line(finder.line(key), key)], level=level + 1))
                walk(inner, level + 1)

    walk(json.loads(text, parse_float=str) if text.lstrip()[:1] in ("{", "[") else _yaml(text), 0)
    return blocks


_PAIR = re.compile(r"([^:#'\"][^:#]*|\"[^\"]*\"|'[^']*')\s*:(?:\s+(.*))?$")


def _yaml(text: str) -> Any:
    """YAML's maps, lists and plain values; anchors, flow style and texts of several lines are not read."""
    bare = (re.sub(r"(?:^|\s)#.*|^---.*", "", line).rstrip() for line in text.splitlines())

    def value(lines: list[str]) -> Any:
        if not lines:
            return ""
        depth = len(lines[0]) - len(lines[0].lstrip())
        starts = [i for i, s in enumerate(lines) if len(s) - len(s.lstrip()) <= depth]
        if lines[0][depth:].startswith("- "):
            starts = [i for i in starts if lines[i].lstrip().startswith("-")]
            items = (lines[a:b] for a, b in itertools.pairwise([*starts, len(lines)]))
            return [value([item[0].replace("- ", "  ", 1), *item[1:]]) for item in items]
        # The items of a list may stand as far left as its name.
        starts = [i for i in starts if not lines[i].lstrip().startswith("- ")]
        parts = [
            (_PAIR.match(lines[a].strip()), lines[a + 1 : b]) for a, b in itertools.pairwise([*starts, len(lines)])
        ]
        if not all(m for m, _ in parts):
            return " ".join(s.strip() for s in lines).strip("'\"")
        return {m[1].strip("'\""): value([m[2]] if m[2] else below) for m, below in parts if m}

    return value([line for line in bare if line.strip()])


def _is_leaf(value: dict[str, Any]) -> bool:
    """Whether a record holds plain values only, lists of whole numbers, and such records."""
    lists = all(isinstance(x, int) for v in value.values() if isinstance(v, list) for x in v)
    return lists and all(_is_leaf(v) for v in value.values() if isinstance(v, dict))


def _notebook(text: str) -> list[Block]:
    loaded, finder, blocks = json.loads(text), _Finder(text), list[Block]()

    def lines_of(source: str | list[str]) -> list[Line]:
        return [Line(finder.line(piece), piece) for piece in "".join(source).splitlines()]

    for cell in loaded.get("cells", []) if isinstance(loaded, dict) else []:
        if cell.get("cell_type") == "markdown":
            blocks.extend(_markdown(lines_of(cell.get("source", ""))))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/html" in data:
                blocks.extend(read_html(lines_of(data["text/html"])))
            else:
                plain = output.get("text") or data.get("text/markdown") or data.get("text/plain") or ""
                blocks.extend(split_code(lines_of(plain)))
    return blocks
