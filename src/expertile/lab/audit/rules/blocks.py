"""Result blocks and lists whose lines belong together: speed-ups, averages per item, totals, savings, tiles."""

from __future__ import annotations

import math
import re

from expertile.lab.audit.claims import Claim
from expertile.lab.audit.context import Context
from expertile.lab.audit.dims import dims_in
from expertile.lab.audit.document import Statement
from expertile.lab.audit.finding import INCONSISTENT, NOT_CHECKABLE, POSSIBLE, Finding
from expertile.lab.audit.formulas import Term, follows
from expertile.lab.audit.interval import Interval
from expertile.lab.audit.quantities import show
from expertile.lab.audit.rules.sentences import change_terms

_COMPARED = ("time", "flop_rate", "byte_rate", "token_rate", "event_rate", "bytes")
_KEYED_SPEEDUP = re.compile(r"\W*(?:\w+[ -]){0,2}(?:speed-?\s?up|ratio|improvement|gain)\s*(?:\([^)]*\))?\s*[:=]", re.I)
_ELSEWHERE = re.compile(
    r"\bblog\b|\bpaper\b|reported (?:by|in)|et al|\breports?\b|according to|published|claims?\b", re.I
)
_PER_ITEM = re.compile(r"(?:average|avg|mean)?[ :]*\bper[- ](?P<item>[a-z]+)|each\b", re.I)
_NEAR = 20  # lines above a ratio in which its own figure is looked for
_MANY = 20  # figures under one key: beyond this the key tells nothing
_Keyed = dict[tuple[str, str], list[Claim]]
_TILES = re.compile(r"(?P<rows>\d[\d,]*)\s+(?:tokens|rows|elements)\b.{0,12}?(?P<tiles>\d+)\s+(?:tiles|blocks)\b", re.I)


def speedups(context: Context) -> list[Finding]:
    """Ratios in text: against the two figures of their own block, else against parallel figures of the report."""
    found = []
    keyed: _Keyed = {}
    for c in context.claims:
        if _is_run(c) and c.kind != "bytes" and (key := _key(c)):
            keyed.setdefault((c.kind, key), []).append(c)
    for claim in context.claims:
        if claim.kind != "ratio" or claim.place.table is not None or claim.quantity.high is not None:
            continue
        finding = _speedup(context, claim, keyed)
        if finding is not None:
            found.append(finding)
    return found


def _speedup(context: Context, claim: Claim, keyed: _Keyed) -> Finding | None:
    line = [c for c in context.by_line.get(claim.place.line, []) if _is_run(c)]
    if len(line) > 1:
        return None  # its figures stand in its own line
    own = _rivals_in_block(context, claim) if not line else []
    pairs = [(own[0], own[1])] if len(own) == 2 else _parallel(context, claim, keyed)
    for a, b in pairs:
        for term in change_terms(a.quantity.span, b.quantity.span, "ratio", a.kind):
            if follows(claim.quantity, term) or _rounded(claim, [term]):
                lines = f"lines {a.place.line} and {b.place.line}"
                return context.finding(claim, POSSIBLE, "speedup_in_block", f"{lines}: {term.words}")
    if not pairs or not _KEYED_SPEEDUP.match(claim.place.text) or _repeats(context, claim) or claim.quantity.bound:
        same = _same_ratio_in_table(context, claim)
        return context.finding(claim, POSSIBLE, "speedup_in_report", same) if same else None
    if any(len({a.quantity.value for a, b in pairs if b.kind == kind}) != 1 for kind in {b.kind for _, b in pairs}):
        return None  # several figures it may be compared with
    told = []
    for a, b in pairs:
        terms = change_terms(a.quantity.span, b.quantity.span, "ratio", a.kind)
        told += [f"lines {a.place.line} and {b.place.line} give {terms[0].words}"] if terms else []
    if not told:
        return None
    first = change_terms(pairs[0][0].quantity.span, pairs[0][1].quantity.span, "ratio", pairs[0][0].kind)[0]
    text = f"printed {claim.quantity.text}, but {'; '.join(told)}"
    return context.finding(claim, INCONSISTENT, "speedup_in_block", text, claim.quantity.value, first.value.mid, "x")


def _rivals_in_block(context: Context, claim: Claim) -> list[Claim]:
    """The figures of one kind in the claim's block, each on a line of its own that says "name: figure"."""
    if (
        claim.place.kind not in ("fence", "list", "paragraph")
        or len(context.by_block.get(claim.place.block, [])) > 3 * _MANY
    ):
        return []
    block = [c for c in context.by_block.get(claim.place.block, []) if _is_run(c) and c.place.line != claim.place.line]
    for kind in _COMPARED:
        last: dict[int, Claim] = {}  # of "24 × 0.17 ms = 4.07 ms" the result counts
        for c in block:
            if c.kind == kind and (_key(c) or c.place.line in last):
                last[c.place.line] = c
        if last:
            return list(last.values())
    return []


def _parallel(context: Context, claim: Claim, keyed: _Keyed) -> list[tuple[Claim, Claim]]:
    """Pairs (figure of another block, figure of the claim's block or line) whose keys end in the same word."""
    block = context.by_block.get(claim.place.block, [])
    here = [c for c in block if claim.place.line - _NEAR <= c.place.line <= claim.place.line and _is_run(c)]
    found = []
    for b in here:
        others = keyed.get((b.kind, _key(b)), [])
        found += [(a, b) for a in others if a.place.block != b.place.block] if len(others) <= _MANY else []
    return found


def _is_run(c: Claim) -> bool:
    plain = c.place.table is None and c.kind in _COMPARED and not c.is_limit and c.quantity.high is None
    return plain and (c.kind != "time" or c.is_run)


def _key(claim: Claim) -> str:
    """The last word of "Sequential Time: 2.84ms" before the colon, or ""."""
    match = re.match(r"\W*([^:=|]{1,50}?)\s*(?:\([^)]*\))?\s*[:=]", claim.place.text)
    if not match or match.end() > claim.quantity.start:
        return ""
    words = re.findall(r"[a-z]+", match[1].lower())
    return words[-1] if words else ""


def _rounded(claim: Claim, terms: list[Term]) -> bool:
    """A second, rounder statement of the same ratio: "0.48x (2x faster)"."""
    return any(t.value.lo > 0 and follows(claim.quantity, Term(Interval.of(1.0) / t.value, "")) for t in terms)


def _repeats(context: Context, claim: Claim) -> bool:
    line = context.by_line.get(claim.place.line, [])
    return any(c.kind == "ratio" and c.quantity.start < claim.quantity.start for c in line)


def _same_ratio_in_table(context: Context, claim: Claim) -> str:
    if _ELSEWHERE.search(claim.place.text):
        return ""
    close = [
        c
        for c in context.ratio_cells
        if c.quantity.span.meets(claim.quantity.span)
        and abs(c.quantity.value - claim.quantity.value) <= 0.02 * claim.quantity.value
    ]
    best = min(close, key=lambda c: abs(c.quantity.value - claim.quantity.value), default=None)
    return f"line {best.place.line} prints {best.quantity.text}" if best else ""


def per_item(context: Context) -> list[Finding]:
    """ "64 GEMMs …: 0.83 ms" followed by "Average per GEMM: 0.013 ms"."""
    found = []
    for block in context.report.by_block.values():
        lines = [s.line for s in block]
        inside = [c for line in lines for c in context.by_line.get(line, []) if c.kind == "time"]
        for claim in inside:
            match = _PER_ITEM.search(claim.words)
            if not match or claim.quantity.bound or not re.search(r"average|avg|mean", claim.words, re.I):
                continue
            item = (match["item"] or "").rstrip("s")
            for whole in inside:
                count = (
                    re.search(rf"(?<![\w.])(\d[\d,]*)\s+(?:\w+\s+)?{re.escape(item)}s?\b", whole.place.text, re.I)
                    if item
                    else None
                )
                if whole is claim or not count:
                    continue
                n = int(count[1].replace(",", ""))
                if n > 1:
                    term = Term(
                        whole.quantity.span / n,
                        f"{whole.quantity.text} / {n} = {show('time', whole.quantity.value / n)}",
                    )
                    verdict = POSSIBLE if follows(claim.quantity, term) else INCONSISTENT
                    found.append(
                        context.finding(claim, verdict, "per_item", f"{term.words}, printed {claim.quantity.text}")
                    )
                    break
    return found


def totals(context: Context) -> list[Finding]:
    """A "Total" line must be the sum of the figures of the same kind just above it; "Saved" their difference."""
    found = []
    for block in context.report.by_block.values():
        if block[0].kind not in ("list", "fence"):
            continue
        above: list[Claim] = []
        for s in block:
            here = [c for c in context.by_line.get(s.line, []) if c.kind in ("time", "bytes")]
            for claim in here:
                finding = _total(context, claim, s, [c for c in above if c.kind == claim.kind])
                if finding is not None:
                    found.append(finding)
            above += here[-1:] if here else []
    return found


def _total(context: Context, claim: Claim, s: Statement, above: list[Claim]) -> Finding | None:
    if len(above) < 2 or claim.quantity.bound:
        return None
    key = re.match(r"\W*([^:]{1,40}):", s.text)
    words = key[1] if key else ""
    if re.search(r"^\W*(?:total|sum|overall)\b", words, re.I):
        return _sum_of(context, claim, above)
    if re.search(r"^\W*(?:saved|savings?|difference|reduction|delta)\b", words, re.I) and len(above) == 2:
        a, b = above
        gap, value = a.quantity.span - b.quantity.span, a.quantity.value - b.quantity.value
        if value < 0:
            gap, value = Interval(-gap.hi, -gap.lo), -value
        verdict = POSSIBLE if follows(claim.quantity, Term(gap, "")) else INCONSISTENT
        text = f"{a.quantity.text} − {b.quantity.text} = {show(claim.kind, value)}, printed {claim.quantity.text}"
        return context.finding(claim, verdict, "difference", text)
    return None


def _sum_of(context: Context, claim: Claim, above: list[Claim]) -> Finding:
    total = sum((c.quantity.span for c in above[1:]), above[0].quantity.span)
    listed = " + ".join(c.quantity.text for c in above)
    text = f"{listed} = {show(claim.kind, sum(c.quantity.value for c in above))}"
    if follows(claim.quantity, Term(total, "")):
        return context.finding(claim, POSSIBLE, "total", text)
    text += f", printed {claim.quantity.text}"
    # Reads and writes are all the traffic there is; of other totals, parts may be missing from the list.
    if claim.kind == "bytes" and all(re.search(r"\bread|\bwrit", c.place.text, re.I) for c in above):
        return context.finding(claim, INCONSISTENT, "total", text)
    return context.finding(claim, NOT_CHECKABLE, "total", f"{text}; other parts may not be listed")


def tiles(context: Context) -> list[Finding]:
    """ "1842 tokens (15 tiles)" with a tile size of 128: the count is the rows divided by the tile, rounded up."""
    found = []
    for block in context.report.by_block.values():
        size = next((d["tile"] for s in block if "tile" in (d := dims_in(s.text))), None)
        for s in block:
            match = _TILES.search(s.text)
            if not match or s.kind in ("code", "shell"):
                continue
            anchor = (s.line, match.start("tiles"))
            rows, count = int(match["rows"].replace(",", "")), int(match["tiles"])
            if size is None:
                finding = Finding(
                    s.line, s.text.strip(), NOT_CHECKABLE, "tiles", "the tile size is not stated", anchor=anchor
                )
            else:
                need = math.ceil(rows / size)
                verdict = POSSIBLE if need == count else INCONSISTENT
                text = f"⌈{rows} / {size}⌉ = {need}, printed {count}"
                finding = Finding(
                    s.line, s.text.strip(), verdict, "tiles", text, float(count), float(need), "tiles", anchor
                )
            found.append(finding)
    return found


def per_day(context: Context) -> list[Finding]:
    """ "0.94 ms per inference", "1000 inferences/second", "22.6 hours/day": the product must come out."""
    found = []
    for claim in context.claims:
        if (
            claim.kind != "time"
            or claim.place.table is not None
            or not re.search(r"\bdaily\b|/ ?day|per day|a day", claim.place.text, re.I)
        ):
            continue
        near = [
            c
            for c in context.claims
            if c.place.section == claim.place.section and c.place.table is None and c is not claim
        ]
        each = [
            c for c in near if c.kind == "time" and _EACH.search(c.place.text[c.quantity.end : c.quantity.end + 24])
        ]
        rates = [c for c in near if c.kind in ("event_rate", "token_rate")]
        if claim in each or not each or not rates:
            continue
        a = min(each, key=lambda c: abs(c.place.line - claim.place.line))
        b = min(rates, key=lambda c: abs(c.place.line - claim.place.line))
        product = a.quantity.span * b.quantity.span * 86400.0
        value = a.quantity.value * b.quantity.value * 86400.0
        text = (
            f"{a.quantity.text} × {b.quantity.text} × 86400 s = {value:,.0f} s = {value / 3600:.3g} h, printed "
            f"{claim.quantity.text}"
        )
        verdict = POSSIBLE if product.meets(claim.quantity.span) else INCONSISTENT
        found.append(context.finding(claim, verdict, "per_day", text, claim.quantity.value, value, "s"))
    return found


_EACH = re.compile(r"\s*(?:per|/)\s?(?:inference|request|token|call|step|image|sample|query|forward|iteration)", re.I)


def group_sums(context: Context) -> list[Finding]:
    """Tokens listed for every expert must add up to the total (or to top-k times it)."""
    found = []
    for block in context.report.by_block.values():
        dims: dict[str, int] = {}
        parts: list[int] = []
        last = None
        for s in block:
            match = re.match(r"\W*(?:expert|group)\s*#?\d+\b\D{0,10}?(\d[\d,]*)\s*(?:tokens|rows)", s.text, re.I)
            if match:
                parts.append(int(match[1].replace(",", "")))
                last = s
            else:
                for name, value in dims_in(s.text).items():
                    dims.setdefault(name, value)
        total, experts = dims.get("tokens"), dims.get("groups")
        if not last or not total or not experts or len(parts) != experts:
            continue
        multiples = sorted({1, dims.get("topk", 1), 2})
        ok = sum(parts) in [total * k for k in multiples]
        text = f"the {experts} experts' tokens add up to {sum(parts)}; the total is {total}"
        verdict = POSSIBLE if ok else INCONSISTENT
        found.append(
            Finding(
                last.line,
                last.text.strip(),
                verdict,
                "group_sum",
                text,
                float(sum(parts)),
                float(total),
                "tokens",
                (last.line, 0),
            )
        )
    return found
