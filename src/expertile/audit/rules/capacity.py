"""What a named part holds and carries: memory above its capacity, a prompt read faster than its peak allows, work above
the roof that its intensity sets, ports' bits taken for bytes, shares of a peak, Amdahl's bound.
"""

import math
import re
from collections.abc import Iterator

from expertile.audit.facts import DIGITS
from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, Finding, finding, si
from expertile.audit.interval import Interval
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import SHARE, fastest, gpu_counts, on_sheet, own_words
from expertile.audit.rules.terms import parameters

_HELD = re.compile(r"(?i)\b(?:max_?(?:memory_?)?)?(?:alloc\w*|reserved|peak(?! at)|vram|max mem\w*|in use|used)\b")
_NOT_HELD = re.compile(
    r"(?i)offload|\bcpu\b|\bhost\b|\bram\b|managed|unified|\buvm\b|would|need|estimat|requir|predict|tried|out of|oom|"
    r"total|all gpus|\bsum\b|aggregate|theor|project|without|traffic|moved|per second|written|read\b|zero-infinity|swap|"
    r"modded|disk|nvme"
)
_PROMPT = re.compile(r"(?i)(\d[\d,]*)[ -](?:prompt|input)[ -]tokens?\b|prompts? of (\d[\d,]*) tokens")
_FIRST = re.compile(r"(?i)\bttft\b|time to first token|prefill")
_REUSED = re.compile(
    r"(?i)cache hit|cached|warm cache|prefix (?:caching|cache) (?:on|enabled)|sparse attention|moe|mixture"
)
_AT_INTENSITY = re.compile(r"(?i)(?:with|at|for) (?:this|that|the same) (?:arithmetic |operational )?intensity")
_SAID_AS = re.compile(r"(?i)\bi\.e\.,?|\bthat is\b|\bor\b|=|which (?:is|makes|gives)|\bthus\b|→|->")
_PART = re.compile(
    r"(?i)(?:takes?|is|are|spends?|accounts? for)[^.;%]{0,24}% of (?:the |an? )?(?:\w+ ){0,2}(?:step|time|runtime|run)"
    r"|% of (?:the |an? |all )?(?:\w+ ){0,3}(?:step|time|runtime)\b"
)
_WHOLE = re.compile(
    r"(?i)end[- ]to[- ]end|\be2e\b|(?:whole|entire|full|training|inference) (?:step|run|model)|overall|step becomes"
)
_KERNEL = re.compile(r"(?i)in isolation|micro-?benchmark|kernel (?:itself )?(?:is|gets|runs)|the (?:new )?kernel")
_OWN_PEAK = re.compile(r"(?i)\bof (?:the |its )?(?:\w+ )?peak\b")


def held(report: Report) -> Iterator[Finding]:
    """Memory in use above what the GPUs have."""
    if re.search(r"(?<!no )(?<!no cpu )offload|managed|unified|\buvm\b|modded|windows|zero-infinity", report.text):
        return
    for row in report.all_rows:
        for q in row.of("bytes") if row.devices else ():
            own = f"{q.label} {row.headings}" if row.kind == "table" else own_words(row, q)
            if row.kind == "table" and _NOT_HELD.search(q.label):
                continue
            if not q.exact or not _HELD.search(own) or (row.kind != "table" and _NOT_HELD.search(own)):
                continue
            count = 1.0 if q.per_device else max(gpu_counts(row))
            most = count * max(d.memory_bytes for d in row.devices) * 2**30 / 1e9
            if 1.03 * most < q.value.lo < 40 * most:
                whose = f"{f'{count:.0f} × ' * (count > 1)}{row.devices[0].name}"
                sure = len(report.everything.of("devices")) == 1 and count == 1 and not report.everything.foreign
                message = f"{q.text} is more than {whose} has, {si(most / 1.073741824, 'B')}"
                ask = "" if sure else ": of which GPUs is it?"
                yield finding(IMPOSSIBLE if sure else QUESTION, "memory", message + ask, q)


def prompts(report: Report) -> Iterator[Finding]:
    """A time to the first token below the FLOPs of the prompt, 2 for each parameter and token."""
    said = {m[1] or m[2] for m in _PROMPT.finditer(report.text)}
    formats = report.everything.of("formats")
    if len(said) != 1 or not _FIRST.search(report.text) or _REUSED.search(report.text) or not formats:
        return
    tokens = float(said.pop().replace(",", ""))
    for row in report.lines_of_text:
        t, own = row.only("time"), row.facts.of("formats")
        told = _FIRST.search(f"{row.text} {row.headings} {row.lead}")
        n = (
            parameters(row)
            if t and told and row.devices and (row.of("params") or re.search(r"(?i)\d+b\b", row.text))
            else None
        )
        if not t or not n or re.search(r"(?i)tpot|itl|decode|per token", row.text):
            continue
        count = (*row.facts.of("gpus"), max(gpu_counts(row)))[0]
        most = count * fastest(row, own or formats)[0]
        least = 2 * n * tokens / most
        if t.exact and t.value.hi * 1.05 < least < 30 * t.value.hi:
            message = f"2 × {n / 1e9:.3g} B × {tokens:.0f} tokens take at least {si(least, 's')} on {count:.0f} × {row.devices[0].name}"
            yield finding(QUESTION, "bound", f"{message}, not {t.text}: was the whole prompt read?", t)


def roofs(report: Report) -> Iterator[Finding]:
    """A rate "with this intensity" above intensity × bandwidth (Williams et al. 2009)."""
    for row in report.lines_of_text:
        q = row.only("rate")
        before = (
            [r for r in (row, row.before) if r and r.of("intensity")] if q and _AT_INTENSITY.search(row.text) else []
        )
        if not q or not before or not row.devices:
            continue
        per_byte = before[0].only("intensity")
        near = [b for r in report.lines_of_text if r.block == row.block for b in r.of("bandwidth") if on_sheet(r, b)]
        memory = near[0].value.mid if near else max(d.memory_bps or math.inf for d in row.devices)
        if per_byte and q.value.lo > 1.05 * (per_byte.value * memory).hi:
            roof = si((per_byte.value * memory).mid, "FLOP/s")
            message = f"{per_byte.text} × {si(memory, 'B/s')} is {roof}, the roof of that intensity, below {q.text}"
            yield finding(INCONSISTENT, "memory bandwidth", message, q, per_byte, *near[:1])


def ports(report: Report) -> Iterator[Finding]:
    """ "2 ports at 200 Gb/s, i.e. 400 GB/s": bits that are taken for bytes."""
    for row in report.lines_of_text:
        rates = row.of("bandwidth")
        for a, b in zip(rates, rates[1:], strict=False):
            between = row.text[a.end : b.start]
            if not (_bits(a) and not _bits(b) and _SAID_AS.search(between) and len(between) < 40):
                continue
            words = re.findall(r"[\w.]+", row.text[: a.start].lower())[-12:]
            counts = {
                1.0,
                *(float(DIGITS.get(w, w)) for w in words if w in DIGITS or re.fullmatch(r"[2-9]|1[0-9]?", w)),
            }
            off = [(b.value / (a.value * n)) for n in counts]
            if any(x.meets(8.0, 0.02) for x in off) and not any(x.meets(y, 0.03) for x in off for y in (1.0, 2.0)):
                n = next(n for n, x in zip(counts, off, strict=True) if x.meets(8.0, 0.02))
                message = f"{f'{n:.0f} × ' * (n > 1)}{a.text} is {si(a.value.mid * n, 'B/s')}, not {b.text}: 8 bits are a byte"
                yield finding(INCONSISTENT, "bandwidth", message, b, a)


def _bits(q: Quantity) -> bool:
    return bool(re.search(r"[KMGT](?:b(?:it)?s?(?:/s|ps)|bit)", q.text))


def shared(report: Report) -> Iterator[Finding]:
    """ "88 % of the peak" of which the rates right above make no such share."""
    for row in report.lines_of_text:
        shares = [p for p in row.of("percent") if p.exact and 0.02 < p.value.mid < 1]
        if row.of("rate", "bandwidth") or not shares or not _OWN_PEAK.search(row.text) or not SHARE.search(row.text):
            continue
        near = [r for r in report.all_rows if 0 < row.block - r.block <= 2 and r.block and r.kind != "record"]
        rates = [(q, r) for r in near for q in r.of("bandwidth", "rate") if q.exact and not on_sheet(r, q)]
        if not 1 < len(rates) < 9 or len({q.kind for q, _ in rates}) != 1:
            continue
        kind = rates[0][0].kind
        peaks = {q.value.mid for r in report.lines_of_text for q in r.of(kind) if on_sheet(r, q)}
        devices = report.everything.of("devices")
        peaks |= {d.memory_bps for d in devices if d.memory_bps} if kind == "bandwidth" else set()
        if len(devices) != 1 or kind == "rate" or not peaks:
            continue
        made = [q.value / peak for q, _ in rates for peak in peaks]
        odd = [p for p in shares if not any(p.value.meets(m, 0.015) for m in made)]
        if len(odd) == 1 and len(shares) > 1:
            message = f"the rates above are {', '.join(f'{100 * m.mid:.3g} %' for m in made[:4])} of the peak"
            yield finding(
                QUESTION, "share", f"{message}, not {odd[0].text}: of which is it?", odd[0], lines=(rates[0][0].line,)
            )


def sped_up(report: Report) -> Iterator[Finding]:
    """A whole that gains more than the part made faster allows (Amdahl 1967)."""
    rows = report.lines_of_text
    parts = [
        (r, p) for r in rows for p in r.of("percent") if p.exact and 0.02 < p.value.mid < 0.95 and _PART.search(r.text)
    ]
    wholes = [
        (r, q) for r in rows for q in r.of("ratio") if q.exact and q.value.lo > 1 and _WHOLE.search(own_words(r, q))
    ]
    kernels = [(r, q) for r in rows for q in r.of("ratio") if q.exact and q.value.lo > 1 and _KERNEL.search(r.text)]
    kernels = [(r, q) for r, q in kernels if all(q is not w for _, w in wholes)]
    if len(wholes) != 1 or not parts or len(kernels) > 1:
        return
    subject = " ".join(
        [*(r.text for r in rows[:3] if report.blocks[r.block].kind == "heading"), *(r.text for r, _ in kernels)]
    )
    named = {w for w in re.findall(r"[a-z]{5,}", subject.lower())} - {
        "kernel",
        "kernels",
        "faster",
        "whole",
        "isolation",
    }
    of = [(r, p) for r, p in parts if named & {*re.findall(r"[a-z]{5,}", f"{p.label} {r.text[: p.start]}".lower())}]
    of = [x for x in of if x[1] is x[0].of("percent")[0]]
    if len(of) != 1:
        return
    (_, share), (_, whole) = of[0], wholes[0]
    rest = Interval(1 - share.value.hi, 1 - share.value.mid, 1 - share.value.lo)
    part = (share.value / kernels[0][1].value) if kernels else Interval(0.0, 0.0, 0.0)
    least = rest + part
    if whole.value.lo * least.lo > 1.05:
        how = f"made {kernels[0][1].text} as fast " if kernels else ""
        message = f"a share of {share.text} {how}makes the whole at most {1 / least.mid:.3g}x as fast, not {whole.text}"
        sure = whole.value.lo * rest.lo > 1.05 and re.search(
            r"(?i)nothing else|does not touch|not touch|only change", report.text
        )
        beside = [q for _, q in kernels]
        yield finding(
            INCONSISTENT if sure else QUESTION,
            "Amdahl",
            message + ("" if sure else ": is something else faster?"),
            whole,
            share,
            *beside,
        )
