"""Every figure of a report that claims something: where it stands, whose it is, and what words surround it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertile.device import Device
from expertile.lab.audit import vocabulary
from expertile.lab.audit.columns import MEASURED, Column, TypedTable
from expertile.lab.audit.quantities import Quantity, find_quantities
from expertile.lab.audit.report import GPU_KEY, Place, Report

_BREAK = re.compile(r"[,;|()→]|\s[-–—]\s|\bvs\b|\band\b|\.\s")
_GPU_NAME = re.compile(r"(?:\b[AHLVBT]\d{2,3}|\bRTX \w+|\bGB\d{3}|\bSXM\d?|\bPCIe|\bNVL)[ -]?\(?$", re.I)
_SIDE_BREAK = re.compile(r",(?!\d)|[;|→]|\s[-–—]\s|\b(?:vs|and|while|but)\b|\.\s")
_COMPARED = re.compile(r"\b(?:than|over|against|versus|compared|relative)\b", re.I)
_PROSE = 160  # characters: a longer line may go on to speak of another GPU in any place
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+(?=[\"'(*A-Z])")
_NOT_A_RUN = re.compile(
    r"overhead|launch|sav(?:ed|es|ing)|\bstd\b|stdev|±|jitter|compil|warm-?\s?up|set-?up|\bload(?:ing)?\b|startup"
    r"|\bdelta\b"
    r"|\bdiff|tun(?:e|ing)|reduc|timeout|per[- ](?:token|layer|gemm|tile|element|kernel|step|head|expert|launch"
    r"|call|row|sm|block|thread|warp|sample)\b"
    r"|average per|budget|interval|resolution|\bideal\b|theoretic|lower bound|roofline|speed of light|\bsol\b"
    r"|expected|estimated"
    r"|projected|target|would\b|\bif\b|\bgap\b|sync"
    r"|transfer|\bcpu\b|\bhost\b|\bmin\b per|bubble|\bidle\b", re.I)  # fmt: skip
_LIMIT_AFTER = re.compile(
    r"^\W{0,2}(?:\w+\s){0,3}(?:peak|max(?:imum)?|theoretical|limit|roofline|spec)\b(?!\s*[=:])", re.I
)
_LIMIT_BEFORE = re.compile(
    r"theoretical|hardware|\bspecs?\b|specification|roofline|speed of light|\blimit|capab|datasheet"
    r"|\bpeak (?:memory )?(?:bandwidth|compute|throughput|performance|flops|hbm|dram|fp\d+|bf16"
    r"|tensor)[^:]{0,20}:?\s*[~≈]?\s*$"
    r"|\bof (?:a |the )?(?:peak )?[~≈]?$", re.I)  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One figure. `words` is the clause around it; `column` is set for table cells; `anchor` identifies it."""

    place: Place
    quantity: Quantity
    quote: str
    words: str
    anchor: tuple[int, int]
    column: Column | None = None
    sentence: str = ""  # the sentence of running text, or the cell
    sentence_start: int = 0
    is_limit: bool = False  # states what the hardware could do, not what was measured

    @property
    def kind(self) -> str:
        """Kind of the quantity."""
        return self.quantity.kind

    @property
    def is_run(self) -> bool:
        """Whether a time is that of the whole operation, as far as its words tell."""
        if self.column is not None and (
            self.column.phase or re.search(r"\bstd|±|stdev|\bci\b|error|diff|delta", self.column.header, re.I)
        ):
            return bool(re.search(r"\bforward\b|\bfwd\b|\bkernel\b|\btotal\b|\be2e\b", self.column.header, re.I))
        if (self.quantity.start and self.place.text[self.quantity.start - 1 : self.quantity.start] == "+") or re.search(
            r"(?:^|: )\+", self.quote
        ):
            return False
        if self.place.kind == "fence" and re.match(r"\s+\d[\d.]*\s?%", self.place.text[self.quantity.end :]):
            return False  # a line of a breakdown: "Dequantization  0.367ms  34%"
        return not _NOT_A_RUN.search(self.words)


def claims(report: Report) -> list[Claim]:
    """All figures with units in tables and statements, by line. Code is not read."""
    found: list[Claim] = []
    for t, typed in enumerate(report.tables):
        for r, line in enumerate(typed.table.lines):
            for column in typed.columns:
                cell = typed.cells[r][column.index]
                place = report.cell(t, r, column.index)
                figures = ([cell.value] if cell.value is not None else []) + list(cell.extra)
                for i, quantity in enumerate(figures):
                    if quantity.kind not in MEASURED:
                        continue
                    words = f"{column.header} {cell.text}" if column.kind != "label" else cell.text
                    limit = bool(
                        re.search(r"theoretical|\bspecs?\b|\bpeak$|\broofline|speed of light", column.header, re.I)
                        or _LIMIT_BEFORE.search(typed.label(r))
                    )
                    anchor = (line, column.index * 1000 + i)
                    found.append(
                        Claim(
                            place,
                            quantity,
                            _cell_quote(typed, r, column, cell.text),
                            words,
                            anchor,
                            column,
                            cell.text,
                            0,
                            limit,
                        )
                    )
    for s in report.doc.statements:
        if s.kind in ("code", "shell"):
            continue
        quantities = find_quantities(s.text)
        sides = _sides(s.text, quantities)
        for quantity in quantities:
            if quantity.kind == "bytes" and _GPU_NAME.search(s.text[: quantity.start]):
                continue  # "A100 40GB" is a name
            words = _clause(s.text, quantity)
            limit = bool(_LIMIT_AFTER.match(s.text[quantity.end :]) or _LIMIT_BEFORE.search(_before(s.text, quantity)))
            limit = limit or (s.kind == "list" and bool(_LIMIT_BEFORE.search(s.lead)))
            limit = limit or bool(GPU_KEY.match(s.text))  # "GPU: H100, 990 TFLOPS"
            limit = limit and quantity.kind in ("flop_rate", "byte_rate")
            anchor = (s.line, quantity.start)
            start, end = _sentence(s.text, quantity)
            gpu = next((gpu for first, last, gpu in sides if first <= quantity.start < last), None)
            place = replace(report.place(s), gpu=gpu)
            found.append(Claim(place, quantity, s.text.strip(), words, anchor, None, s.text[start:end], start, limit))
    return sorted(found, key=lambda c: c.anchor)


def _sides(text: str, quantities: Sequence[Quantity]) -> list[tuple[int, int, Device]]:
    """(start, end, GPU) of the clauses of a line such as "H100: 700 TFLOP/s, A100: 250 TFLOP/s".

    None if the line names fewer than two GPUs, is long, compares them in words, or names one away from any figure:
    "H100 and A100: 700 TFLOP/s and 250 TFLOP/s" takes a reader to sort out."""
    known, unknown = vocabulary.devices(text)
    if len(text) > _PROSE or len(known) + len(unknown) < 2 or _COMPARED.search(text):
        return []
    figures = [q.start for q in quantities if q.kind in ("time", "flop_rate", "byte_rate")]
    ends = [m.end() for m in _SIDE_BREAK.finditer(text)]
    found = []
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        known, unknown = vocabulary.devices(text[start:end])
        if not known and not unknown:
            continue
        if len(known) + len(unknown) > 1 or not any(start <= at < end for at in figures):
            return []
        found += [(start, end, gpu) for gpu in known]
    return found


def _sentence(text: str, quantity: Quantity) -> tuple[int, int]:
    """Where the sentence around a figure starts and ends."""
    starts = [m.end() for m in _SENTENCE_END.finditer(text) if m.end() <= quantity.start]
    end = next((m.start() for m in _SENTENCE_END.finditer(text) if m.start() >= quantity.end), len(text))
    return (starts[-1] if starts else 0), end


def _cell_quote(typed: TypedTable, row: int, column: Column, text: str) -> str:
    """ "1024×1024 · PyTorch (ms): 0.016": a cell as a reader would cite it."""
    label = typed.label(row)
    head = f"{column.header}: " if column.header else ""
    return f"{head}{text.strip()}" if label == text else f"{label} · {head}{text.strip()}"


def _before(text: str, quantity: Quantity) -> str:
    starts = [m.end() for m in _BREAK.finditer(text[: quantity.start])]
    return text[starts[-1] if starts else 0 : quantity.start]


def _clause(text: str, quantity: Quantity) -> str:
    after = _BREAK.search(text, quantity.end)
    return _before(text, quantity) + text[quantity.start : after.start() if after else len(text)]
