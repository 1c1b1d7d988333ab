"""A report with the means to answer: what was computed here, in which format, on which GPU, by which systems.

Facts are looked for from near to far: the row or line itself, its block, its section, the sections above, and last
the configuration tables and command lines of the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from expertile.device import Device
from expertile.lab.audit import vocabulary
from expertile.lab.audit.columns import TypedTable, understand
from expertile.lab.audit.configs import RemoteConfig, remote_configs
from expertile.lab.audit.dims import Shape, dim_name, dims_in, named_sizes, power_of_two, shapes_in
from expertile.lab.audit.document import Document, Statement
from expertile.lab.audit.limits import Limit, cache_bytes, compute_limit, memory_limit
from expertile.lab.audit.quantities import find_quantities
from expertile.lab.audit.units import with_units

_SETUP = re.compile(
    r"config|setup|set-up|parameter|setting|environment|shape|input|problem|hardware|system info|workload"
    r"|methodology|dimensions"
    r"|specification|test bed|testbed|conditions", re.I)  # fmt: skip
_LONG = 160  # characters: a line beyond this is prose rather than a result
_MEASURED_UNITS = {"time", "flop_rate", "byte_rate", "ratio", "token_rate", "percent"}
GPU_KEY = re.compile(
    r"^\W*(?:gpu|gpus|hardware|device|platform|system|machine|accelerator|card|testbed|tested on)\b[\w "
    r"/()]{0,24}(?::|=|\|)",
    re.I,
)
_GPU_CELL = re.compile(r"\W*(?:gpus?|hardware|device|platform|system|machine|accelerator|card)\W*", re.I)
_GPU_PHRASE = re.compile(
    r"\b(?:run|ran|tested|measured|benchmarked|results?|executed|benchmarks?|numbers?)\b.{0,60}\b(?:on|for|are)\b", re.I
)


_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """Where a claim stands: one statement, or one cell of one table."""

    section: int
    line: int
    block: int
    text: str  # the statement, or the row with its column header
    kind: str = "paragraph"  # the statement's kind, or "cell"
    lead: str = ""
    table: int | None = None
    row: int | None = None
    column: int | None = None
    gpu: Device | None = None  # the one that the figure's own clause names, on a line of several


@dataclass(frozen=True)
class Scope:
    """Texts at one distance from a claim, with the dimensions and shapes they name."""

    name: str
    dims: dict[str, int]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Options:
    """What the caller says that the text leaves out."""

    shapes: tuple[str, ...] = ()
    dtype: str | None = None
    gpu: Device | None = None


@dataclass
class Report:
    """The document and its typed tables; every answer is derived from these and `options`."""

    doc: Document
    options: Options
    tables: list[TypedTable] = field(default_factory=list)
    _block_scopes: dict[int, Scope] = field(default_factory=dict)
    _section_scopes: dict[int, Scope] = field(default_factory=dict)
    _known: dict[tuple[str, Place], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tables:
            self.tables = with_units(self.doc, [understand(t) for t in self.doc.tables])

    # ---- places -------------------------------------------------------------------------------------------------
    def cell(self, table: int, row: int, column: int) -> Place:
        """The place of one table cell."""
        typed = self.tables[table]
        t = typed.table
        head = typed.columns[column].header
        parts = [f"{c.header}: {t.rows[row][c.index]}" if c.kind == "dim" else t.rows[row][c.index]
                 for c in typed.columns if c.kind in ("dim", "label")]  # fmt: skip
        return Place(t.section, t.lines[row], t.block, " | ".join([*parts, head]), "cell", t.lead, table, row, column)

    def place(self, s: Statement) -> Place:
        """The place of one statement."""
        return Place(s.section, s.line, s.block, s.text, s.kind, s.lead)

    @cached_property
    def by_block(self) -> dict[int, list[Statement]]:
        """Statements of each block, in order."""
        found: dict[int, list[Statement]] = {}
        for s in self.doc.statements:
            found.setdefault(s.block, []).append(s)
        return found

    @cached_property
    def by_section(self) -> dict[int, list[Statement]]:
        """Statements directly under each heading."""
        found: dict[int, list[Statement]] = {}
        for s in self.doc.statements:
            found.setdefault(s.section, []).append(s)
        return found

    # ---- dimensions ---------------------------------------------------------------------------------------------
    def scopes(self, place: Place) -> list[Scope]:
        """Dimensions and shapes around `place`, nearest first."""
        found = [self._own_scope(place)]
        if place.kind in ("fence", "list"):
            found.append(self._block_scope(place.block, place.kind))
        if place.lead:
            found.append(_scope("lead", [place.lead]))
        found += [self._section_scope(section.index) for section in self.doc.ancestors(place.section)]
        stated = [_scope("--shape", [text]) for text in self.options.shapes if len(self.options.shapes) == 1]
        return [s for s in [*found, *stated] if s.dims or s.shapes]

    def _section_scope(self, section: int) -> Scope:
        if section not in self._section_scopes:
            title = self.doc.sections[section].title
            self._section_scopes[section] = _scope(title or "text", [s.text for s in self.setup.get(section, [])])
        return self._section_scopes[section]

    @cached_property
    def setup(self) -> dict[int, list[Statement]]:
        """The lines of each section that state what holds for all of it."""
        found: dict[int, list[Statement]] = {}
        for s in self.doc.statements:
            if self._is_setup(s):
                found.setdefault(s.section, []).append(s)
        return found

    def _own_scope(self, place: Place) -> Scope:
        if place.table is None or place.row is None or place.column is None:
            return _scope("line", [place.text])
        typed = self.tables[place.table]
        row = typed.table.rows[place.row]
        dims: dict[str, int] = {}
        texts = []
        for c in typed.columns:
            text = row[c.index]
            if c.kind == "dim" and c.dim:
                match = re.match(r"[\d,]+", text.strip())
                if match:
                    dims.setdefault(c.dim, int(match[0].replace(",", "")) * (1024 if text.strip()[-1] in "kK" else 1))
            elif c.kind == "label":
                sizes = named_sizes(c.header, text)
                for size, value in sizes.items():
                    dims.setdefault(size, value)
                if not sizes:
                    texts.append(text)
                name = dim_name(c.header)
                if name and re.fullmatch(r"[\d,]+", text.strip()):
                    dims.setdefault(name, int(text.replace(",", "")))
        texts.append(typed.columns[place.column].header)
        inner = _scope("row", texts)
        return Scope("row", {**inner.dims, **dims}, inner.shapes)

    def _block_scope(self, block: int, kind: str) -> Scope:
        if block not in self._block_scopes:
            lines = self.by_block.get(block, [])
            texts = [s.text for s in lines if (not _measures(s.text) if kind == "fence" else self._is_setup(s))]
            self._block_scopes[block] = _scope("block", texts)
        return self._block_scopes[block]

    def _is_setup(self, s: Statement) -> bool:
        """Whether a line states a configuration that holds for its whole section."""
        if s.kind in ("fence", "code", "shell"):
            return False
        if s.kind == "heading":
            return True
        key = re.match(r"[^:]{1,40}(?=:)", s.text)
        if _SETUP.search(s.lead) and not _measures(s.text):
            return True
        if key and (dim_name(key[0]) or _SETUP.search(key[0])):
            return not _measures(s.text)
        return bool(dims_in(s.text)) and not _measures(s.text)

    @cached_property
    def remote_configs(self) -> list[RemoteConfig]:
        """Configurations that the text states away from its results; those of its reported runs are preferred."""
        return remote_configs(self.doc, self.tables, self.options.shapes)

    # ---- operation, format, GPU ---------------------------------------------------------------------------------
    def operation(self, place: Place) -> str | None:
        """The operation computed at `place`, or None if the text is silent or ambiguous."""
        return self._once("operation", place, self._operation)

    def _once(self, name: str, place: Place, find: Callable[[Place], _T]) -> _T:
        if (name, place) not in self._known:
            self._known[name, place] = find(place)
        return self._known[name, place]

    def _operation(self, place: Place) -> str | None:
        for text in self._near_to_far(place):
            found = vocabulary.operations(text)
            if found:
                return found[0] if len(found) == 1 else None
        near = [scope.dims.keys() for scope in self.scopes(place)]
        if any({"m", "n", "k"} <= dims for dims in near):
            return "gemm"  # M, N and K together are a matrix product wherever they stand
        stated = [op for text in self.options.shapes if (op := _operation_of_shape(text))]
        return stated[0] if stated else None

    def _near_to_far(self, place: Place) -> Iterable[str]:
        yield place.text
        if place.kind == "fence":
            yield " ".join(s.text for s in self.by_block.get(place.block, [])[:2])
        if place.lead:
            yield place.lead
        for section in self.doc.ancestors(place.section):
            yield section.title
            yield " ".join(s.text for s in self.setup.get(section.index, []) if s.kind != "heading")
        yield self.title

    @cached_property
    def title(self) -> str:
        """The first heading, or the first line."""
        return next((s.title for s in self.doc.sections if s.title), "") or next(
            (s.text for s in self.doc.statements), ""
        )

    def formats(self, place: Place) -> list[str]:
        """The number formats in force at `place`; [] if the text names none."""
        return self._once("formats", place, self._formats)

    def _formats(self, place: Place) -> list[str]:
        apart = self._told_apart(place) - set(vocabulary.formats(place.text))
        for text in self._near_to_far(place):
            found = [f for f in vocabulary.formats(text) if f not in apart]
            if found:
                return found
        if self.options.dtype:
            return vocabulary.formats(self.options.dtype)
        return [f for f in self._all_formats if f not in apart]

    def _told_apart(self, place: Place) -> set[str]:
        """Formats that only some rows or columns of this table name: the others are then in another format."""
        if place.table is None:
            return set()
        typed = self.tables[place.table]
        labels = [typed.label(r) for r in range(len(typed.cells))] + [c.header for c in typed.columns]
        return {f for label in labels for f in vocabulary.formats(label)}

    @cached_property
    def _all_formats(self) -> list[str]:
        text = "\n".join(s.text for s in self.doc.statements if s.kind != "code")
        return vocabulary.formats(text)

    @cached_property
    def _gpu_of_text(self) -> tuple[list[Device], list[str]]:
        if self.options.gpu is not None:
            return [self.options.gpu], []
        keyed = [s for s in self.doc.statements if GPU_KEY.match(s.text) and s.kind != "code"]
        phrased = [s for s in self.doc.statements if _GPU_PHRASE.search(s.text) and s.kind != "code"]
        tables = [" ".join(r) for t in self.doc.tables for r in t.rows if r and _GPU_CELL.fullmatch(r[0])]
        everything = [s.text for s in self.doc.statements if s.kind != "code"]
        everything += [c for t in self.doc.tables for c in t.header]
        for texts in ([s.text for s in keyed] + tables, [self.title], [s.text for s in phrased], everything):
            known: list[Device] = []
            unknown: list[str] = []
            for text in texts:
                more, others = vocabulary.devices(text)
                known += [d for d in more if d not in known]
                unknown += others
            if known or unknown:
                return known, unknown
        return [], []

    def devices(self, place: Place | None) -> tuple[list[Device], str]:
        """(GPUs that `place` may be about, the reason if none is known)."""
        if place is None:
            known, unknown = self._gpu_of_text
            return known, "" if known else _unknown_gpu(unknown)
        return self._once("devices", place, self._devices)

    def _devices(self, place: Place) -> tuple[list[Device], str]:
        if place.gpu is not None:
            return [place.gpu], ""
        texts: list[str] = []
        if place.table is not None and place.row is not None:
            t = self.tables[place.table].table
            texts.append(" | ".join(t.rows[place.row]))
        texts += [place.text, place.lead]
        texts += [s.title for s in self.doc.ancestors(place.section)]
        general, others = self._gpu_of_text
        for text in texts:
            known, unknown = vocabulary.devices(text)
            if unknown:
                return [], _unknown_gpu(unknown)
            if known and len(text) > _LONG:  # a paragraph may go on to speak of another GPU
                return ([], _unknown_gpu(others)) if others else ([*known, *(d for d in general if d not in known)], "")
            if known:
                return known, ""
        known, unknown = general, others
        return ([], _unknown_gpu(unknown)) if unknown or not known else (known, "")

    def gpus(self, place: Place) -> int:
        """How many GPUs may have worked together on what `place` claims."""
        return max(
            self._gpu_count, self._once("gpus", place, lambda p: vocabulary.gpu_count([p.text, p.lead, self._row(p)]))
        )

    def _row(self, place: Place) -> str:
        if place.table is None or place.row is None:
            return ""
        t = self.tables[place.table].table
        return " | ".join((*t.header, *t.rows[place.row]))

    @cached_property
    def _gpu_count(self) -> int:
        """The largest count in headings, set-up lines, commands and lines that name the hardware."""
        texts = [s.text for lines in self.setup.values() for s in lines]
        texts += [
            s.text
            for s in self.doc.statements
            if s.kind == "shell" or GPU_KEY.match(s.text) or _GPU_PHRASE.search(s.text)
        ]
        return vocabulary.gpu_count(texts)

    @cached_property
    def _sparse(self) -> bool:
        return any(
            re.search(r"2:4|structured sparsity|with sparsity|sparse tensor", s.text, re.I) for s in self.doc.statements
        )

    @cached_property
    def _integers(self) -> bool:
        """Whether the text speaks of integer arithmetic or of quantised values anywhere."""
        words = re.compile(r"\bu?int[48]\b|\bi8\b|TOPS?\b|\bOPs?/s|quanti[sz]|\bw\d+a\d+\b|\b[48][- ]?bit", re.I)
        return any(words.search(line) for line in self.doc.raw)

    def compute_limit(self, place: Place) -> tuple[Limit | None, str]:
        """(the most FLOP/s `place` may claim, the reason if unknown)."""
        known, why = self.devices(place)
        if not known:
            return None, why
        formats = self.formats(place)
        limit = compute_limit(known, formats, self.gpus(place), self._sparse, self._integers)
        return limit, "" if limit else f"no peak is known for {', '.join(formats)} on {known[0].name}"

    def memory_limit(self, place: Place) -> tuple[Limit | None, int, str]:
        """(the most DRAM bytes/s, the cache bytes that may spare DRAM, the reason if unknown)."""
        known, why = self.devices(place)
        if not known:
            return None, 0, why
        limit = memory_limit(known, self.gpus(place))
        return limit, cache_bytes(known, self.gpus(place)), "" if limit else f"{known[0].name} states no bandwidth"


def _operation_of_shape(text: str) -> str | None:
    """The operation that a --shape names ("softmax 4096x4096"), or that alone has such dimensions."""
    named = vocabulary.operations(text)
    dims = dims_in(text).keys()
    if named:
        return named[0]
    if {"batch", "heads", "seq", "head_dim"} <= dims:
        return "attention"
    if {"hidden", "ffn"} <= dims:
        return "moe"
    three = any(len(shape.sizes) == 3 for shape in shapes_in(text))
    return "gemm" if three or {"m", "n", "k"} <= dims else None


def _unknown_gpu(unknown: Sequence[str]) -> str:
    if unknown:
        return f"the limits of {unknown[0]} are not known here"
    return "the text names no GPU (say which with --gpu)"


def _measures(text: str) -> bool:
    return any(q.kind in _MEASURED_UNITS for q in find_quantities(text))


def _scope(name: str, texts: Sequence[str]) -> Scope:
    dims: dict[str, int] = {}
    shapes: list[Shape] = []
    for text in texts:
        for key, value in dims_in(text).items():
            dims.setdefault(key, value)
        shapes += shapes_in(text)
        power = power_of_two(text)
        if power:
            dims.setdefault("elements", power)
    return Scope(name, dims, tuple(shapes))
