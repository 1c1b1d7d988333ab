"""Reads JSON, JSON lines and YAML into blocks. Every key and every value knows its line."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from expertile.audit.blocks import Block, Line, Table
from expertile.audit.pattern import regex

_TOKEN = regex(r"\"(?:[^\"\\]|\\.)*\"|-?\b\d[\w.+-]*|\b(?:true|false)\b|\n")
_PAIR = regex(r"([^:#'\"][^:#]*|\"[^\"]*\"|'[^']*')\s*:(?:\s+(.*))?$")
_FLOW = regex(r"( *)((?:- +)*)([^{}\[\]:'\"]+:)? *\{([^{}\[\]]+)\}")


class Leaf(str):
    """A key or plain value as it is printed (1.70 has three digits), and its line."""

    line = 0


def _leaf(text: str, line: int) -> Leaf:
    leaf = Leaf(text)
    leaf.line = line
    return leaf


def json_values(text: str) -> list[Any]:
    """The values that stand one after the other in JSON; null is None. Raises ValueError for anything else."""
    line = 1

    def marked(m: re.Match[str]) -> str:
        nonlocal line
        line += m[0] == "\n"
        return m[0] if m[0] == "\n" else f'"{line}:{m[0][1:]}' if m[0][0] == '"' else f'"{line}:{m[0]}"'

    rest, decoder, found = _TOKEN.sub(marked, text).strip(), json.JSONDecoder(strict=False), list[Any]()
    while rest:
        value, end = decoder.raw_decode(rest)
        found.append(_leaves(value))
        rest = rest[end:].lstrip()
    if not found:
        raise ValueError("no value")
    return found


def _leaves(value: Any) -> Any:
    if isinstance(value, dict):
        return {_leaves(k): _leaves(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_leaves(v) for v in value]
    line, _, text = value.partition(":") if isinstance(value, str) else ("", "", "")
    return _leaf(text, int(line)) if line else None


def read_values(values: list[Any]) -> list[Block]:
    """Several objects are records, of which those with the same keys are a table; else one value with its parts."""
    records = len(values) > 1 and all(isinstance(v, dict) for v in values)
    return _records(values) if records else [b for value in values for b in _walk(value, 0)]


def read_yaml(text: str) -> list[Block]:
    """Maps, lists and plain values; anchors, nested flow style and texts of several lines are not read."""
    bare = ((i, re.sub(r"(?:^|\s)#.*|^---.*", "", line).rstrip()) for i, line in enumerate(text.splitlines(), 1))
    return list(_walk(_yaml([n for i, line in bare if line.strip() for n in _unfolded(Line(i, line))]), 0))


def _unfolded(line: Line) -> list[Line]:
    """ "- {step: 1, ms: 2.5}" and "run: {step: 1}" as one line for each pair."""
    m = _FLOW.fullmatch(line.text)
    pairs = re.split(r",\s+", m[4].strip()) if m else []
    if not m or not (m[2] or m[3]) or not all(map(_PAIR.match, pairs)):
        return [line]
    inner = m[1] + " " * len(m[2]) + "  " * bool(m[3])
    head, *rest = [m[3], *pairs] if m[3] else pairs
    return [Line(line.number, text) for text in (m[1] + m[2] + head, *(inner + p for p in rest))]


def _yaml(lines: list[Line]) -> Any:
    if not lines:
        return _leaf("", 0)
    indents = [len(line.text) - len(line.text.lstrip()) for line in lines]
    listed = lines[0].text[indents[0] :].startswith("- ")
    # The items of a list may stand as far left as its name.
    starts = [i for i, line in enumerate(lines) if indents[i] <= indents[0]]
    starts = [i for i in starts if lines[i].text.lstrip().startswith("-" if listed else "- ") == listed]
    parts = [(lines[a], lines[a + 1 : b]) for a, b in pairwise([*starts, len(lines)])]
    if listed:
        return [_yaml([Line(line.number, line.text.replace("- ", "  ", 1)), *below]) for line, below in parts]
    pairs = [(_PAIR.match(line.text.strip()), line, below) for line, below in parts]
    if not all(m for m, _, _ in pairs):
        return _leaf(" ".join(line.text.strip() for line in lines).strip("'\""), lines[0].number)
    of = ((m, line.number, [Line(line.number, m[2])] if m[2] else below) for m, line, below in pairs if m)
    return {_leaf(m[1].strip("'\""), number): _yaml(below) for m, number, below in of}


def _walk(value: Any, level: int) -> Iterator[Block]:
    """Records where a value is one or a list of them, else headings with their parts."""
    if isinstance(value, list):
        if value and all(isinstance(v, dict) and _is_record(v) for v in value):
            yield from _records(value)
        elif value and all(isinstance(v, Leaf) and " " in v for v in value):
            yield Block("list", [Line(v.line, v) for v in value])
        else:
            for inner in value:
                yield from _walk(inner, level)
    elif isinstance(value, dict):
        nested = {k: v for k, v in value.items() if isinstance(v, (dict, list))}
        if _alike(value):
            yield from _records([{_leaf("name", k.line): k} | v for k, v in value.items()])
            return
        if not nested or (_is_record(value) and len(nested) <= 6 and len(nested) <= len(value) < 40):
            yield from _records([value])
            return
        plain = [Line(k.line, f"{k}: {v}") for k, v in value.items() if k not in nested and v is not None]
        yield from [Block("code", plain)] if plain else []
        for key, inner in nested.items():
            yield Block("heading", [Line(key.line, key)], level=level + 1)
            yield from _walk(inner, level + 1)


def _alike(value: dict[str, Any]) -> bool:
    """Whether it holds three runs and more, each by its name, of the same keys and plain values."""
    held = [v for v in value.values() if isinstance(v, dict) and all(isinstance(x, Leaf) for x in v.values())]
    return 2 < len(held) == len(value) and len(held[0]) > 1 and len({tuple(v) for v in held}) == 1


def _is_record(value: dict[str, Any]) -> bool:
    """Whether it holds plain values only, lists of whole numbers, and such records."""
    lists = all(isinstance(x, Leaf) and x.isdigit() for v in value.values() if isinstance(v, list) for x in v)
    return lists and not _alike(value) and all(_is_record(v) for v in value.values() if isinstance(v, dict))


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Leaf]:
    found: dict[str, Leaf] = {}
    if (unit := record.get("time_unit")) in ("ns", "us", "ms", "s"):  # Google Benchmark
        record = {f"{k} ({unit})" if k in ("real_time", "cpu_time") else k: v for k, v in record.items()}
    for key, value in record.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{key} "))
        elif isinstance(value, Leaf) and len(value) < 200:
            found[prefix + key] = value
    return found


def _records(records: list[dict[str, Any]]) -> list[Block]:
    """Records; those with the same keys, one after the other, are a table."""
    blocks: list[Block] = []
    for record in filter(None, map(_flat, records)):
        header, at = tuple(record), tuple(leaf.line for leaf in record.values())
        last = blocks[-1].table if blocks else None
        new = last is None or last.header != header
        old = last if last and not new else Table(header, (), at[0])
        table = Table(header, (*old.rows, (at[0], tuple(record.values()))), old.line, (*old.lines, at))
        blocks[len(blocks) - (not new) :] = [Block("code", table=table)]
    return blocks
