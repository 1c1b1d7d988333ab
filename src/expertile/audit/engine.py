"""Reads a report, asks every rule, and keeps one finding for each cause."""

import re
from dataclasses import dataclass, replace

from expertile.audit.facts import BITS, facts
from expertile.audit.finding import ACCUSATIONS, IMPOSSIBLE, QUESTION, VERDICTS, Finding
from expertile.audit.pattern import regex
from expertile.audit.report import Report
from expertile.audit.rules import (
    amounts,
    claims,
    clock,
    equations,
    formulas,
    limits,
    peaks,
    retold,
    shares,
    solve,
    stated,
    statistics,
    tables,
    told,
    totals,
)
from expertile.device import Device

RULES = (
    *(limits.above, shares.shares, shares.sparse_peaks, peaks.limits, tables.columns, tables.proportions),
    *(solve.rows, amounts.counted, amounts.spent, told.ratios, retold.retold, totals.totals, totals.orders),
    *(statistics.related, statistics.summaries, clock.elapsed, clock.steps, stated.stated),
    *(equations.equations, equations.conversions, formulas.formulas, limits.held),
    *(claims.compression, claims.equal_work, claims.unequal_work, totals.shared),
)
_HEDGED = regex(
    r"(?i)~|≈|\b(?:approx|up to|estimat|simulat|project(?:ed|ion)|effective|expect|predict|about|roughly|around|nearly|"
    r"almost|circa|some \d|would|assum|times \d)|\?[!?*_\"')]*(?:\s|$)"
)
# What a text says that knows of figures above a limit: they are of a cache, of products left out, somebody else's.
_EXPLAINED = regex(
    r"(?i)(?:above|beyond|exceed\w*|more than|(?:times|x) the) (?:\w+ ){0,6}(?:peak|limit|bandwidth(?! of the \w*\d)|"
    r"roof)|apparent|sparsity|\b2:4\b|counted as if|winograd|strassen|(?:if|when) (?:you|we|one) counts? |(?:as if|"
    r"equivalent to) dense|infinity cache|cache-resident|(?:in|from|fits?|sits?) (?:the |its |in )*(?:l2|cache)|"
    r"(?:do not|don't|never) quote|nothing to do with|lying|overclock"
)
# Somebody else's figure, or one that nobody should state.
_QUOTE = regex(r"(?i)\bclaim(?:ed|s?\b)|preprint|cannot be|which is their|n[o']t run at|do not do|counted as full")
_ABOVE = ("memory bandwidth", "limit", "link", "peak", "bandwidth", "decoding")
_CACHE = regex(
    r"(?i)\bnot (?:the )?(?:dram|hbm|vram|memory) bandwidth|above (?:what )?the (?:dram|hbm|vram|memory)\b|"
    r"is (?:an )?l2 (?:figure|traffic)"
)


@dataclass(frozen=True)
class Audit:
    """The findings of one report, the gravest first; `figures` were read, `rows` hold them."""

    name: str
    lines: tuple[str, ...]
    findings: tuple[Finding, ...]
    figures: int

    @property
    def accusations(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.verdict in ACCUSATIONS)


def audit_text(text: str, name: str = "", *, gpu: str = "", dtype: str = "", shape: str = "") -> Audit:
    """Everything that `text` says wrong. `name` tells the format by its end.

    `gpu`, `dtype` and `shape` (M x N x K, "4096x4096x1024") hold where the text states none. Raises ValueError for one
    of them that is not understood, and for a .json or .ipynb that cannot be read.
    """
    given = _given(gpu, dtype, shape)
    try:
        report = Report(text, name, given)
    except RecursionError:
        raise ValueError(f"{name or 'standard input'}: expected a report, got data nested too deeply") from None
    explained = _EXPLAINED.search(text) is not None
    found = [f for rule in RULES for f in rule(report)]
    if explained:
        near = {f.line: "\n".join(report.lines[max(0, f.line - 2) : f.line + 1]) for f in found}
        found = [f for f in found if f.rule not in ("peak", "limit") or not _QUOTE.search(near[f.line])]
    found = [f for f in found if f.rule not in _ABOVE or f.verdict != QUESTION or not _asks(report.lines, f.line)]
    if explained and not re.search(limits.COLD, report.text):
        found = _beyond_caches(found)
    found = [_voiced(finding, report.lines, explained) for finding in found]
    if explained and _CACHE.search(text):
        found = _beyond_caches(found)  # nor what has become a question
    figures = {(q.line, q.text, q.column) for row in report.all_rows for q in row.quantities}
    return Audit(name or "standard input", tuple(report.lines), tuple(_causes(found)), len(figures))


def _given(gpu: str, dtype: str, shape: str) -> str:
    """The set-up of the command line, written as a report would write it."""
    m = re.fullmatch(r"(\d+)[x×*,](\d+)[x×*,](\d+)", shape.replace(" ", ""))
    if dtype and not facts(dtype).of("formats"):
        raise ValueError(f"dtype: expected one of {', '.join(BITS)}, got {dtype!r}")
    if shape and m is None:
        raise ValueError(f"shape: expected M x N x K as in 4096x4096x1024, got {shape!r}")
    sizes = "M={}, N={}, K={}".format(*m.groups()) if m else ""
    return "; ".join(filter(None, (gpu and Device.by_name(gpu).name, dtype, sizes)))


def _asks(lines: list[str], line: int) -> bool:
    """Whether a line is a title that asks, or calls the figure impossible: the text knows."""
    said = lines[line - 1] if 0 < line <= len(lines) else ""
    if re.search(r"(?i)\bimpossible\b|magic\b", "\n".join(lines[max(0, line - 2) : line + 1])):
        return True
    titled = re.match(r"#+ |Subject: |title: |> |\**Q: ", said) or line == 1
    return bool(titled and re.search(r"\?\?|\?[!?*_\"')]*\s*$", said))


def _beyond_caches(found: list[Finding]) -> list[Finding]:
    """The findings without questions that a cache answers."""
    return [f for f in found if f.verdict != QUESTION or f.rule not in ("memory bandwidth", "limit")]


def _voiced(f: Finding, lines: list[str], explained: bool) -> Finding:
    """`f` as a question where its line says that the figures were not measured, or, of a figure above a limit, the text
    that it knows of such figures."""
    said = lines[f.line - 1] if 0 < f.line <= len(lines) else ""
    above = f.verdict == IMPOSSIBLE or f.rule == "link"
    hedged = _HEDGED.search(said) or (above and explained)
    return replace(f, verdict=QUESTION) if f.verdict in ACCUSATIONS and hedged else f


def _causes(found: list[Finding]) -> list[Finding]:
    """One finding for each figure: the gravest; and one where the same claim is made on several lines."""
    found = sorted(found, key=lambda f: (VERDICTS.index(f.verdict), f.rule in ("bound", "proportion"), f.line))
    kept: list[Finding] = []
    seen: set[tuple[int, str]] = set()
    for f in found:
        figures = {(f.line, part) for part in f.quote.split(", ")}
        # A time under the bound and a rate above the peak, side by side, are one cause.
        same = f.rule == "bound" and any(k.rule == "peak" and abs(k.line - f.line) <= 6 for k in kept)
        # What a wrong row adds up to; not of many rows, nor of the ratios beside a wrong rate.
        ratio = f.quote[-1:] in ("x", "×")
        total = f.rule == "total" and len(f.lines) < 9
        same |= total and any(k.line in f.lines and not (ratio and k.rule == "rate") for k in kept)
        same |= f.rule == "arithmetic" and any(k.line == f.line and k.quote.split(", ")[0] in f.quote for k in kept)
        same |= f.verdict == QUESTION and any(k.line == f.line and k.verdict != QUESTION for k in kept)
        same |= any({*k.quote.split(", ")} == {*f.quote.split(", ")} and k.all_lines == f.all_lines for k in kept)
        same |= f.rule == "proportion" and any({*f.all_lines} & {*k.all_lines} for k in kept if k.rule != "total")
        # What a row's accused figure makes follows from it.
        made = f.message.partition(" is ")[0].split()
        same |= any(k.line == f.line and k.verdict == f.verdict and k.quote in made for k in kept)
        if not (figures & seen or same):
            seen |= figures
            kept.append(f)
    # Four and more lines that fail alike, one below the other, have one cause; so has one claim made again.
    runs: list[list[Finding]] = []
    for f in sorted(kept, key=lambda f: (f.verdict, f.rule, f.line)):
        last = runs[-1][-1] if runs else None
        if last and (f.verdict, f.rule) == (last.verdict, last.rule) and f.line - last.line <= 8:
            runs[-1].append(f)
        else:
            runs.append([f])
    causes: dict[tuple[str, str], list[Finding]] = {}
    for run in runs:
        for group in [run] if len(run) > 3 else [[f] for f in run]:
            causes.setdefault((group[0].rule, group[0].message), []).extend(group)
    merged = [replace(c[0], lines=tuple(sorted({n for f in c for n in f.all_lines}))) for c in causes.values()]
    return sorted(merged, key=lambda f: (VERDICTS.index(f.verdict), f.line))
