"""Shares of a peak ("39% of FP8 peak", "MFU: 45%") and arithmetic intensity against the machine's balance."""

from __future__ import annotations

import re
from itertools import pairwise

from expertile.lab.audit.claims import Claim
from expertile.lab.audit.context import Context
from expertile.lab.audit.finding import IMPOSSIBLE, INCONSISTENT, NOT_CHECKABLE, POSSIBLE, Finding
from expertile.lab.audit.formulas import Term, follows
from expertile.lab.audit.interval import Interval
from expertile.lab.audit.quantities import show
from expertile.lab.audit.wholes import stated_and_known_peaks

_SHARE = re.compile(
    r"\bpeak\b|\bmfu\b|\bhfu\b|of (?:the )?(?:theoretical|max)|roofline|bandwidth util|memory util|\bsol\b|of "
    r"(?:its |the )?limit",
    re.I,
)
_NEED = re.compile(r"need|ridge|balance|requir|threshold|break-?even", re.I)


def shares(context: Context) -> list[Finding]:
    """Percentages of a peak, paired in order with the rates of their line (or the one rate of their block)."""
    found: list[Finding] = []
    for line in context.by_sentence:
        percents = [c for c in line if c.kind == "percent" and c.quantity.high is None]
        if not percents or not any(_is_share(c) for c in percents):
            continue
        for percent in percents:
            if (
                percent.quantity.bound in ("", ">")
                and percent.quantity.interval.lo > 1.0
                and _SHARE.search(percent.words)
            ):
                text = f"{percent.quantity.text} of a peak is more than all of it"
                found.append(
                    context.finding(
                        percent, IMPOSSIBLE, "share_of_peak", text, 100 * percent.quantity.value, 100.0, "%"
                    )
                )
        for kind in ("flop_rate", "byte_rate"):
            rates = [c for c in line if c.kind == kind and not c.is_limit]
            if not rates:
                rates = _block_rates(context, percents[0], kind)
            if len(rates) == len(percents) and not any(_is_peak(context, r) for r in rates):
                found += [_share(context, r, p) for r, p in zip(rates, percents, strict=True)]
                break
    return found


def over_the_peak(context: Context) -> list[Finding]:
    """Table columns of "% of peak", MFU or bandwidth utilisation: more than 100 % is impossible."""
    found = []
    for claim in context.claims:
        if claim.kind != "percent" or claim.column is None or claim.quantity.interval.lo <= 1.03:
            continue
        if _OF_PEAK.search(claim.column.header) and not re.search(
            r"\bvs\b|speed|improve|cublas|torch|relative", claim.column.header, re.I
        ):
            text = f"{claim.quantity.text} of a peak is more than all of it"
            found.append(
                context.finding(claim, IMPOSSIBLE, "share_of_peak", text, 100 * claim.quantity.value, 100.0, "%")
            )
    return found


_OF_PEAK = re.compile(
    r"of (?:\w+ )?(?:peak|max|theoretical|roofline|sol)|% ?peak|\bmfu\b|\bhfu\b|(?:bandwidth|bw|memory|compute) "
    r"util|\bsol ?%",
    re.I,
)


def _is_share(percent: Claim) -> bool:
    """Whether a percentage is said to be of a peak: "39% of FP8 peak", "MFU: 45%"."""
    text, q = percent.place.text, percent.quantity
    after, before = text[q.end : q.end + 48], text[max(0, q.start - 32) : q.start]
    return bool(
        re.match(
            r"\s*\)?\s*(?:of\b[^.;]{0,32}?(?:peak|max|theoretical|roofline|bandwidth|limit)|mfu|hfu|sol\b|peak"
            r"|roofline)",
            after,
            re.I,
        )
        or re.search(
            r"(?:\bmfu|\bhfu|(?:bandwidth|memory|compute|tensor core) util\w*|of peak|% peak|peak)\s*[:=(]?\s*[~≈]?$",
            before,
            re.I,
        )
    )


def _is_peak(context: Context, rate: Claim) -> bool:
    """Whether the "rate" is itself one of the GPU's peaks ("an H100 (989 TFLOP/s) at 50% MFU")."""
    known, _ = context.report.devices(rate.place)
    for d in known:
        peaks = (
            [d.memory_bps or 0.0]
            if rate.kind == "byte_rate"
            else [p * f for p in d.peak_flops.values() for f in (0.924, 1, 1.848, 2)]
        )
        if any(abs(rate.quantity.value / p - 1) < 0.03 for p in peaks if p):
            return True
    return False


def _block_rates(context: Context, percent: Claim, kind: str) -> list[Claim]:
    bandwidth = bool(re.search(r"bandwidth|memory|hbm|dram", percent.place.text, re.I))
    if percent.place.kind not in ("fence", "list") or bandwidth != (kind == "byte_rate"):
        return []
    block = [c for c in context.by_block.get(percent.place.block, []) if c.kind == kind]
    measured = [c for c in block if not c.is_limit and c.place.line != percent.place.line]
    return measured if len(measured) == 1 else []


def _share(context: Context, rate: Claim, percent: Claim) -> Finding:
    wholes = stated_and_known_peaks(context, rate.place, rate.kind)
    for whole, words in wholes:
        term = Term(rate.quantity.span / Interval.of(whole).widened(0.005), "")
        if follows(percent.quantity, term):
            text = f"{rate.quantity.text} / {words} = {rate.quantity.value / whole:.1%}"
            return context.finding(percent, POSSIBLE, "share_of_peak", text)
    nearest = sorted(wholes, key=lambda w: abs(rate.quantity.value / w[0] - percent.quantity.value))
    stated = [w for w in wholes if "(line" in w[1]] or nearest
    implied = show(rate.kind, rate.quantity.value / percent.quantity.value) if percent.quantity.value else "∞"
    told = "; ".join(
        f"{rate.quantity.text} / {words} = {rate.quantity.value / whole:.1%}" for whole, words in stated[:2]
    )
    text = f"printed {percent.quantity.text}, which would make the peak {implied}; {told}"
    if not wholes:
        return context.finding(
            percent, NOT_CHECKABLE, "share_of_peak", f"{percent.quantity.text} of a peak of {implied}: no peak is known"
        )
    whole = stated[0][0]
    return context.finding(
        percent,
        INCONSISTENT,
        "share_of_peak",
        text,
        100 * percent.quantity.value,
        100 * rate.quantity.value / whole,
        "%",
    )


def intensity(context: Context) -> list[Finding]:
    """FLOP/B: the balance of peak compute and bandwidth as stated, and the utilisation that an intensity allows."""
    found = []
    balance = None
    plain: list[Claim] = []
    for claim in context.claims:
        if claim.kind != "intensity" or claim.place.table is not None:
            continue
        if _NEED.search(claim.place.text):
            balance = claim
            found.append(_balance(context, claim))
            continue
        plain.append(claim)
        same_line = [c for c in context.by_line.get(claim.place.line, []) if c.kind == "percent"]
        if balance is not None and len(same_line) == 1 and re.search(r"util|peak", claim.place.text, re.I):
            ratio = claim.quantity.span / balance.quantity.span
            text = f"{claim.quantity.text} / {balance.quantity.text} (line {balance.place.line}) = {ratio.mid:.2%}"
            verdict = POSSIBLE if follows(same_line[0].quantity, Term(ratio, "")) else INCONSISTENT
            found.append(context.finding(same_line[0], verdict, "intensity", text))
    for a, b in pairwise(plain):
        if a.place.block == b.place.block:
            found += _same_operations(context, a, b)
    return found


def _same_operations(context: Context, a: Claim, b: Claim) -> list[Finding]:
    """Intensity × traffic is the number of operations: two systems that compute the same must agree."""
    first, second = _traffic_of(context, a), _traffic_of(context, b)
    if first is None or second is None or first is second:
        return []
    x, y = a.quantity.span * first.quantity.span, b.quantity.span * second.quantity.span
    text = (
        f"{b.quantity.text} × {second.quantity.text} (line {second.place.line}) = {show('flops', y.mid)}, but "
        f"{a.quantity.text} × "
        f"{first.quantity.text} (line {first.place.line}) = {show('flops', x.mid)} for the same operation"
    )
    verdict = POSSIBLE if x.widened(0.05).meets(y.widened(0.05)) else INCONSISTENT
    return [context.finding(b, verdict, "intensity", text)]


def _traffic_of(context: Context, claim: Claim) -> Claim | None:
    """The total traffic that the report states of the system named before the colon, if there is exactly one."""
    key = re.match(r"\W*([A-Za-z][\w.-]*)[^:]{0,24}:", claim.place.text)
    if not key:
        return None
    chain = {s.index for s in context.report.doc.ancestors(claim.place.section) if s.level > 1}
    near = [
        c
        for c in context.claims
        if c.kind == "bytes"
        and c.place.table is None
        and re.match(r"\W*total\b.*(?:traffic|moved|bytes)", c.place.text, re.I)
        and re.search(rf"\b{re.escape(key[1])}\b", f"{c.place.text} {c.place.lead}", re.I)
        and chain & {s.index for s in context.report.doc.ancestors(c.place.section)}
    ]
    return near[0] if len(near) == 1 else None


def _balance(context: Context, claim: Claim) -> Finding:
    near = [c for c in context.limits if c.place.section == claim.place.section]
    compute = [c for c in near if c.kind == "flop_rate"]
    memory = [c for c in near if c.kind == "byte_rate"]
    if not compute or not memory:
        return context.finding(
            claim,
            NOT_CHECKABLE,
            "intensity",
            f"{claim.quantity.text}: peak compute and bandwidth are not both stated nearby",
        )
    for c in compute:
        for m in memory:
            ratio = c.quantity.span / m.quantity.span
            if follows(claim.quantity, Term(ratio.widened(0.01), "")):
                text = (
                    f"{c.quantity.text} / {m.quantity.text} = {show('intensity', c.quantity.value / m.quantity.value)}"
                )
                return context.finding(claim, POSSIBLE, "intensity", text)
    c, m = compute[0], memory[0]
    value = c.quantity.value / m.quantity.value
    text = f"printed {claim.quantity.text}, but {c.quantity.text} / {m.quantity.text} = {show('intensity', value)}"
    return context.finding(claim, INCONSISTENT, "intensity", text, claim.quantity.value, value, "FLOP/B")
