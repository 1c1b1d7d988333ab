"""Comparisons that do not compare: unequal work called equal, and results that failed their own check."""

from __future__ import annotations

import re

from expertile.lab.audit.claims import Claim
from expertile.lab.audit.context import Context
from expertile.lab.audit.document import Statement
from expertile.lab.audit.finding import INCONSISTENT, POSSIBLE, Finding
from expertile.lab.audit.quantities import show
from expertile.lab.audit.workload import Workload

_EQUAL = re.compile(
    r"\b(?:equivalent|equal|same|identical|matching|comparable)\b(?:\s+\w+){0,2}\s+\b(?:work|flops?|compute"
    r"|computation|operations|workload)\b"
    r"|\biso-?flops?\b",
    re.I,
)
_CHECK = re.compile(
    r"\bcorrect(?:ness)?\b|\bverif\w+|\bvalidat\w+|\ballclose\b|\bnumeric\w*|\baccuracy\b|\bresults? match"
    r"|\bparity\b|\bmax(?:imum)? (?:abs )?(?:diff|err)\w*",
    re.I,
)
_FAILED = re.compile(r"[✗✘❌]|\bFAIL(?:ED|S|URE)?\b|\bfailed\b|\bmismatch(?:ed|es)?\b|\bincorrect\b|\bFalse\b|\bNaN\b")
_NONE_FAILED = re.compile(
    r"\b(?:no|0|zero|without|never|not|none)\s+(?:\w+\s+){0,2}(?:fail|mismatch|incorrect|NaN)|\b0 (?:failed|mismatch)",
    re.I,
)
_CHECK_HEADER = re.compile(r"correct|verified|match|pass|allclose|valid|accuracy", re.I)
_DIFFERENCE = re.compile(r"max(?:imum)?\.? (?:abs(?:olute)? )?(?:diff\w*|err\w*)\D{0,4}(\d[\d.]*(?:e[-+]?\d+)?)", re.I)
_UNIT_ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4}


def equal_work(context: Context) -> list[Finding]:
    """Where a section says that two timed forms do equal work, their FLOPs must be equal."""
    found = []
    for block in context.report.by_block.values():
        if block[0].kind not in ("fence", "list", "paragraph"):
            continue
        said = _says_equal(context, block)
        timed = _timed(context, block) if said is not None else []
        if said is None or len(timed) < 2:
            continue
        (time_a, work_a), (time_b, work_b) = timed[0], timed[1]
        a, b = work_a.standard.flops, work_b.standard.flops
        if not a or not b:
            continue
        ratio = max(a, b) / min(a, b)
        text = (
            f"{work_a.standard.how} = {show('flops', a)} (line {time_a.place.line}) against "
            f"{work_b.standard.how} = {show('flops', b)} "
            f"(line {time_b.place.line}): {ratio:.3g} times the work"
        )
        ratios = [c for s in block for c in context.by_line.get(s.line, []) if c.kind == "ratio"]
        told = ratios[0] if ratios else time_b
        if ratio <= 1.02:
            found.append(context.finding(told, POSSIBLE, "equal_work", text))
            continue
        rate_a, rate_b = a / time_a.quantity.value, b / time_b.quantity.value
        text += (
            f", though line {said.line} calls it equal ({said.text.strip()!r}). Per FLOP: "
            f"{show('flop_rate', rate_a)} against "
            f"{show('flop_rate', rate_b)}"
        )
        if (time_a.quantity.value < time_b.quantity.value) != (rate_a > rate_b):
            text += ", so the slower-looking one is the faster"
        found.append(context.finding(told, INCONSISTENT, "equal_work", text, ratio, 1.0, "x"))
    return found


def _timed(context: Context, block: list[Statement]) -> list[tuple[Claim, Workload]]:
    found = []
    for claim in [c for s in block for c in context.by_line.get(s.line, [])]:
        if claim.kind == "time" and claim.is_run:
            work = context.work(claim.place)
            if isinstance(work, Workload):
                found.append((claim, work))
    return found


def _says_equal(context: Context, block: list[Statement]) -> Statement | None:
    section = block[0].section
    first, last = block[0].line, block[-1].line
    for s in context.report.by_section.get(section, []):
        if first - 12 <= s.line <= last + 8 and _EQUAL.search(s.text):
            return s
    return None


def failed_checks(context: Context) -> list[Finding]:
    """A result that fails its own correctness check has no performance: its figures do not count."""
    found = []
    for s in context.report.doc.statements:
        if (
            s.kind in ("code", "shell")
            or not _CHECK.search(s.text)
            or not _FAILED.search(s.text)
            or _NONE_FAILED.search(s.text)
        ):
            continue
        verdict = re.match(
            r"\W*(?:\w+ ){0,2}(?:correctness|verification|validation|accuracy|check|test|allclose"
            r"|match\w*)\b[^:=.]{0,24}[:=]\s*(.+)",
            s.text,
            re.I,
        )
        if not verdict or not _FAILED.search(verdict[1][:24]):
            continue
        text = "the result fails its own check, so its times do not count" + _rows_of(context, s) + _too_far(context, s)
        found.append(Finding(s.line, s.text.strip(), INCONSISTENT, "failed_check", text, anchor=(s.line, -1)))
    for t, typed in enumerate(context.report.tables):
        for column in typed.columns:
            if not _CHECK_HEADER.search(column.header) or column.kind not in ("label", "number"):
                continue
            for row in typed.body():
                cell = typed.table.rows[row][column.index]
                if _FAILED.search(cell) or re.fullmatch(r"\W*(?:no|false|✗|❌)\W*", cell, re.I):
                    quote = context.report.doc.quote(typed.table.lines[row])
                    found.append(
                        Finding(
                            typed.table.lines[row],
                            quote,
                            INCONSISTENT,
                            "failed_check",
                            (
                                f"{column.header}: {cell}: the result fails its own check, so the figures of "
                                "this row do "
                                "not count"
                            ),
                            anchor=(typed.table.lines[row], -1 - t),
                        )
                    )
    return found


def _rows_of(context: Context, s: Statement) -> str:
    tables = [t for t in context.report.tables if t.table.section == s.section and t.table.lines]
    if len(tables) != 1:
        return ""
    lines = tables[0].table.lines
    return f" (the table of lines {lines[0]}–{lines[-1]})"


def _too_far(context: Context, s: Statement) -> str:
    match = _DIFFERENCE.search(s.text)
    formats = [f for f in context.report.formats(context.report.place(s)) if f in _UNIT_ROUNDING]
    if not match or not formats:
        return ""
    unit = max(_UNIT_ROUNDING[f] for f in formats)
    times = float(match[1]) / unit
    return (
        (
            f"; a difference of {match[1]} is {times:.2g} times the rounding unit of {formats[-1]} ({unit:.2g}): the "
            "order of the sum does not explain it"
        )
        if times > 1e3
        else ""
    )
