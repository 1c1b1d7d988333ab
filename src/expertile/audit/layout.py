"""Tables that are not runs by measures: turned on their side, with a column of units, or a set-up."""

import re

from expertile.audit.blocks import Block, Table
from expertile.audit.facts import Facts, facts, size_of_name
from expertile.audit.quantity import RATIO, clean
from expertile.audit.units import unit_of_name

_MEASURE = re.compile(
    r"(?i)\b(?:time|latency|duration|throughput|bandwidth|memory|tokens?|requests|prompts|images|samples|batch|rate|"
    r"tflops|speed|power|energy|cost|params|ttft|tpot|itl|mfu)\b"
)


def valued(table: Table) -> Table:
    """A table of names, units and values as one of two columns."""
    plain = [h.lower().split()[-1] if h.split() else "" for h in table.header]
    if len(plain) != 3 or plain[1] != "unit" or plain[2] not in ("value", "avg", "average"):
        return table
    rows = tuple((number, (f"{name} ({unit})" if unit else name, value)) for number, (name, unit, value) in table.rows)
    return Table((table.header[0], table.header[2]), rows, table.line)


def turned(table: Table) -> Table | None:
    """A table of which every row is a measure and every column a run, with runs as rows."""
    names = [cells[0] for _, cells in table.rows]
    measures = [n for n in names if unit_of_name(clean(n)) or size_of_name(clean(n)) or _MEASURE.search(n)]
    runs = table.header[1:]
    if len(runs) < 2 or len(names) < 2 or len(measures) < 0.6 * len(names) or len({*names}) < len(names):
        return None
    if any(unit_of_name(clean(h)) or RATIO.search(h) for h in runs):
        return None
    numbers = tuple(number for number, _ in table.rows)
    columns = [(h, *(cells[c] for _, cells in table.rows)) for c, h in enumerate(runs, 1)]
    rows = tuple((table.line, cells) for cells in columns)
    return Table((table.header[0], *names), rows, table.line, ((table.line, *numbers),) * len(rows))


def block_facts(block: Block) -> Facts:
    text, table = block.text, block.table
    if table is not None and len(table.header) == 2 and len(table.rows) < 30:
        text = "\n".join(f"{cells[0]}: {cells[1]}" for _, cells in (*table.rows, (0, table.header)))
    elif table is not None:
        text = " ; ".join(table.header)
    return facts(clean(text))
