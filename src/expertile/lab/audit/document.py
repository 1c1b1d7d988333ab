"""A report as data: sections, tables, result blocks and lines, each with its line number.

Block structure (headings, fences, lists, tables) comes from markdown-it-py; tables inside result blocks and plain
text (pipes, aligned columns, commas) are read by `texttable`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from markdown_it import MarkdownIt
from markdown_it.token import Token

from expertile.lab.audit import htmltable, texttable
from expertile.lab.audit.encoding import repair

_CODE = {"python", "py", "cpp", "c++", "c", "cuda", "cu", "rust", "json", "yaml", "toml", "go", "java", "diff", "mojo"}
_SHELL = {"bash", "sh", "shell", "zsh", "console"}
_CODE_LINE = re.compile(
    r"^\s*(?:#include|import |from \w+ import|def |class |for \(|template|__global__|@\w+|return\b|//)"
)


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; `parent` indexes `Document.sections` (-1 at the root)."""

    index: int
    level: int
    title: str
    line: int
    parent: int


@dataclass(frozen=True)
class Statement:
    """One line of text without markup. `block` groups the lines of one fence, list or paragraph."""

    text: str
    raw: str
    line: int
    section: int
    block: int
    kind: str  # "heading" | "fence" | "list" | "paragraph" | "shell" | "code"
    lead: str = ""  # the paragraph that introduces this list or fence, or the list item this one is nested in


@dataclass(frozen=True)
class Table:
    """`header` cells, `rows` of as many cells, the line of each row; `block` as in Statement."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    line: int
    section: int
    block: int
    lead: str = ""


@dataclass
class Document:
    """The parsed report. `raw` holds the source lines (repaired), raw[0] being line 1."""

    raw: list[str]
    sections: list[Section] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def quote(self, line: int) -> str:
        """The source line, stripped."""
        return self.raw[line - 1].strip() if 0 < line <= len(self.raw) else ""

    def ancestors(self, section: int) -> Iterator[Section]:
        """The section itself, its parent, and so on up to the root."""
        while section >= 0:
            yield self.sections[section]
            section = self.sections[section].parent


def parse(text: str) -> Document:
    """The document in `text`. Mis-decoded UTF-8 is repaired first; line numbers are those of the input."""
    raw = re.sub(r"\r\n?", "\n", repair(text.lstrip("\ufeff"))).split("\n")
    document = Document(raw)
    document.sections.append(Section(0, 0, "", 0, -1))
    _Builder(document).read(MarkdownIt("commonmark").enable("table").disable("lheading").parse("\n".join(raw)))
    return document


def clean(text: str) -> str:
    """`text` without Markdown and HTML markup: emphasis, code ticks, links and tags."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<br\s*/?>", " ", text, flags=re.I)
    text = re.sub(
        r"</?(?:b|i|u|em|strong|code|sub|sup|td|th|tr|p|span|div|details|summary|a)(?:\s[^>]*)?>", "", text, flags=re.I
    )
    text = re.sub(r"\*\*|__|`|~~", "", text)
    text = re.sub(r"(?<![\w*])\*(?=\S)([^*]+?)(?<=\S)\*(?![\w*])", r"\1", text)
    text = text.replace("\\times", "×").replace("&times;", "×").replace("&nbsp;", " ").replace("\\_", "_")
    return text.replace("\u2212", "-").replace("⁄", "/").strip()


class _Builder:
    """Walks the token stream once; holds only where it is."""

    def __init__(self, document: Document) -> None:
        self.doc = document
        self.section = 0
        self.block = 0
        self.lead = ""
        self.announces = False  # whether the lead says that something follows ("Results:")

    def read(self, tokens: list[Token]) -> None:
        i = 0
        while i < len(tokens):
            token = tokens[i]
            start, end = token.map or (0, 0)
            if token.type == "heading_open":
                self._heading(int(token.tag[1]), tokens[i + 1].content, start + 1)
                i += 1
            elif token.type == "table_open":
                i = self._table(tokens, i)
            elif token.type in ("fence", "code_block"):
                self._fence(token, start, end)
            elif token.type in ("bullet_list_open", "ordered_list_open") and token.level == 0:
                i = self._list(tokens, i)
            elif token.type == "html_block":
                self._html(start, end)
            elif token.type == "inline" and token.map:
                self._paragraph(start, end)
            i += 1

    def _heading(self, level: int, text: str, line: int) -> None:
        parent = self.section
        while parent > 0 and self.doc.sections[parent].level >= level:
            parent = self.doc.sections[parent].parent
        self.section = len(self.doc.sections)
        self.doc.sections.append(Section(self.section, level, clean(text), line, parent))
        self.block += 1
        self.lead = ""
        self._say(line, "heading", clean(text))

    def _say(self, line: int, kind: str, text: str | None = None, lead: str = "") -> None:
        raw = self.doc.raw[line - 1]
        shown = clean(raw) if text is None else text
        if shown.strip():
            inherited = self.lead if kind != "paragraph" or self.announces else ""
            self.doc.statements.append(Statement(shown, raw, line, self.section, self.block, kind, lead or inherited))

    def _paragraph(self, start: int, end: int) -> None:
        numbered = [(n + 1, re.sub(r"^\s*>\s?", "", self.doc.raw[n])) for n in range(start, end)]
        if end - start == 2 and re.fullmatch(r"=+", self.doc.raw[start + 1].strip()):
            end -= 1  # a line of equals signs: Markdown's other kind of heading
        below = self.doc.raw[end].strip() if end < len(self.doc.raw) else ""
        underlined = end - start == 1 and re.fullmatch(r"=+|-+", below)
        if underlined and not re.search(r"\S\s{2,}\S|\|", numbered[0][1]):
            self._heading(1 if "=" in below else 2, numbered[0][1], start + 1)
            return
        if all(re.fullmatch(r"[=\-\s]*", text) for _, text in numbered):
            return
        self.block += 1
        rest = self._text_tables(self._with_rows_below(numbered, end))
        for line, text in rest:
            self._say(line, "paragraph", clean(text))
        words = clean(numbered[-1][1])
        bold = re.fullmatch(r"\s*(?:\*\*|__).+(?:\*\*|__):?\s*", numbered[-1][1])
        self.announces = words.endswith(":") or bool(bold)
        if self.announces:
            self.lead = words.rstrip(": ")
        elif end - start == 1:
            self.lead = words if len(words) < 120 else ""
        else:
            self.lead = ""

    def _with_rows_below(self, lines: list[tuple[int, str]], end: int) -> list[tuple[int, str]]:
        # "header / ------ / rows": Markdown sees a rule between two paragraphs, a reader sees one table.
        raw = self.doc.raw
        rule = end < len(raw) and re.fullmatch(r"\s*[-=]{3,}[-=\s]*", raw[end])
        if not rule or not re.search(r"\S\s{2,}\S", lines[-1][1]):
            return lines
        n = end + 1
        more = []
        while n < len(raw) and raw[n].strip():
            more.append((n + 1, raw[n]))
            n += 1
        return [*lines, (end + 1, raw[end]), *more]

    def _fence(self, token: Token, start: int, end: int) -> None:
        self.block += 1
        language = (token.info or "").strip().split(" ")[0].lower()
        closed = token.type == "fence" and re.match(r"[\s>]*(?:`{3,}|~{3,})\s*$", self.doc.raw[end - 1])
        first, last = start + (token.type == "fence"), end - 1 if closed else end
        numbered = [(n + 1, self.doc.raw[n]) for n in range(first, min(last, len(self.doc.raw)))]
        if numbered and token.type == "fence" and end - start < 2:
            return
        code = language in _CODE or (not language and sum(bool(_CODE_LINE.match(t)) for _, t in numbered) >= 2)
        kind = "code" if code else "shell" if language in _SHELL else "fence"
        rest = numbered if kind != "fence" else self._text_tables(numbered)
        for line, text in rest:
            self._say(line, kind, text.strip() if kind != "fence" else text.rstrip())

    def _text_tables(self, numbered: list[tuple[int, str]]) -> list[tuple[int, str]]:
        seen = {line for table in self.doc.tables for line in (table.line, *table.lines)}
        numbered = [(line, text) for line, text in numbered if line not in seen]
        grids, rest = texttable.find(numbered)
        for grid in grids:
            cells = tuple(clean(c) for c in grid.header)
            rows = tuple(tuple(clean(c) for c in row) for row in grid.rows)
            self.doc.tables.append(
                Table(cells, rows, grid.lines, grid.line, self.section, self.block, grid.title or self.lead)
            )
        return rest

    def _list(self, tokens: list[Token], i: int) -> int:
        self.block += 1
        depth = 0
        parents: list[str] = []
        lead = self.lead
        while True:
            token = tokens[i]
            if token.type.endswith("_list_open"):
                depth += 1
            elif token.type.endswith("_list_close"):
                depth -= 1
                if depth == 0:
                    break
            elif token.type == "inline" and token.map:
                text = clean(re.sub(r"^\s*(?:[-*+]|\d+[.)])\s+", "", self.doc.raw[token.map[0]]))
                parents = [*parents[: depth - 1], text]
                outer = parents[-2] if len(parents) > 1 else lead
                self._say(token.map[0] + 1, "list", text, outer)
                for n in range(token.map[0] + 1, token.map[1]):
                    self._say(n + 1, "list", None, outer)
            elif token.type in ("fence", "code_block") and token.map:
                self._fence(token, *token.map)
            elif token.type == "table_open":
                i = self._table(tokens, i)
            i += 1
        self.lead = ""
        return i

    def _table(self, tokens: list[Token], i: int) -> int:
        header: tuple[str, ...] = ()
        rows: list[tuple[str, ...]] = []
        lines: list[int] = []
        start = (tokens[i].map or (0, 0))[0] + 1
        cells: list[str] = []
        line = start
        while tokens[i].type != "table_close":
            token = tokens[i]
            if token.type == "tr_open":
                cells, line = [], (token.map or (line, 0))[0] + 1
            elif token.type == "inline":
                cells.append(clean(token.content))
            elif token.type == "tr_close":
                if header:
                    rows.append(tuple(cells))
                    lines.append(line)
                else:
                    header = tuple(cells)
            i += 1
        self.block += 1
        self.doc.tables.append(Table(header, tuple(rows), tuple(lines), start, self.section, self.block, self.lead))
        return i

    def _html(self, start: int, end: int) -> None:
        self.block += 1
        source = "\n".join(self.doc.raw[start:end])
        for grid in htmltable.find(source, start + 1):
            header = tuple(clean(c) for c in grid.header)
            rows = tuple(tuple(clean(c) for c in row) for row in grid.rows)
            self.doc.tables.append(Table(header, rows, grid.lines, grid.line, self.section, self.block, self.lead))
        if "<table" not in source.lower():
            for n in range(start, end):
                self._say(n + 1, "paragraph")
