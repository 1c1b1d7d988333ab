"""Configurations that a report states away from its results: tables of models, and the commands that ran them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from expertile.lab.audit.columns import MEASURED, TypedTable
from expertile.lab.audit.dims import Shape, dims_in, shapes_in
from expertile.lab.audit.document import Document


@dataclass(frozen=True)
class RemoteConfig:
    """Dimensions, where they come from, and whether the text says that its results were run with them."""

    dims: dict[str, int]
    why: str
    preferred: bool
    shapes: tuple[Shape, ...] = ()


def remote_configs(doc: Document, tables: Sequence[TypedTable], shapes: Sequence[str]) -> list[RemoteConfig]:
    """Every configuration that results without sizes of their own may mean.

    A command line is joined with the configuration row it names ("--config mixtral"), else with every row. A command
    whose comment speaks of results, and a shape the caller gives, exclude the others.
    """
    rows = _config_rows(tables)
    found: list[RemoteConfig] = []
    for dims, words, comment, line in _commands(doc):
        named = [(d, why) for label, d, why in rows if label and label in words]
        preferred = bool(re.search(r"result|reproduc|paper|reported", comment, re.I))
        if not named and not dims:
            continue
        for row_dims, why in named or [(d, why) for _, d, why in rows] or [({}, "")]:
            text = f"line {line} ({doc.quote(line)})" + (f" with {why}" if why else "")
            found.append(RemoteConfig({**row_dims, **dims}, text, preferred))
    if not found:
        found = [RemoteConfig(d, why, False) for _, d, why in rows]
    found += [RemoteConfig(dims_in(text), f"--shape {text}", True, tuple(shapes_in(text))) for text in shapes]
    preferred_only = [c for c in found if c.preferred]
    return preferred_only or found


def _config_rows(tables: Sequence[TypedTable]) -> list[tuple[str, dict[str, int], str]]:
    """(label, dimensions, where) of each row of a table that holds dimensions and no measurement."""
    found = []
    for typed in tables:
        dims = typed.of_kind("dim")
        if len(dims) < 2 or typed.of_kind(*MEASURED):
            continue
        for r, line in enumerate(typed.table.lines):
            values = {c.dim: int(re.sub(r"\D", "", typed.table.rows[r][c.index]) or 0) for c in dims if c.dim}
            label = typed.label(r).strip().lower()
            found.append((label, {k: v for k, v in values.items() if v}, f"the row of line {line}"))
    return found


def _commands(doc: Document) -> list[tuple[dict[str, int], set[str], str, int]]:
    """(dimensions, words, comment above, line) of each command line with options."""
    found = []
    comment = ""
    for s in doc.statements:
        if s.kind in ("shell", "fence") and s.text.lstrip().startswith("#"):
            comment = s.text
        elif re.search(r"\s--[a-z]", s.text):
            found.append((dims_in(s.text), set(s.text.lower().split()), comment, s.line))
            comment = ""
    return found
