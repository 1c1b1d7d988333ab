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
from expertile.audit.report import Report
from expertile.audit.rules.hardware import SHARE, fastest, gpu_counts, on_sheet, own_words
from expertile.audit.rules.terms import parameters
from expertile.device import PCIE_LANES

_HELD = re.compile(
    r"(?i)(?<![a-z])(?:max_?(?:memory_?)?)?(?:alloc(?:ated)?|reserved|vram|max[ _]mem\w*)(?![a-z])|"
    r"peak[ _](?:\w+ )?mem|mem\w*[ _.](?:used|peak|in use)|peak[ _(]+(?:gi?b|mi?b)\b"
)
_NOT_HELD = re.compile(
    r"(?i)offload|\bcpu\b|\bhost\b|\bram\b|managed|unified|\buvm\b|would|need|estimat|requir|predict|tried|out of|oom|"
    r"total|all gpus|\bsum\b|aggregate|theor|project|without|traffic|moved|per second|written|read\b|swap|"
    r"modded|disk|nvme"
)
_PROMPT = re.compile(r"(?i)(\d[\d,]*)[ -](?:prompt|input)[ -]tokens?\b|prompts? of (\d[\d,]*) tokens")
_FIRST = re.compile(r"(?i)\bttft\b|time to first token|prefill")
_REUSED = re.compile(
    r"(?i)cache hit|cached|warm cache|prefix (?:caching|cache) (?:on|enabled)|sparse attention|moe|mixture"
)
_AT_INTENSITY = re.compile(r"(?i)(?:with|at|for) (?:this|that|the same) (?:arithmetic |operational )?intensity")
_PREFIX = {"M": 1e6, "G": 1e9, "T": 1e12}
_BITS_AS_BYTES = re.compile(
    r"(?P<a>\d+(?:\.\d+)?) ?(?P<p>[MGT])(?:b/s|bps|bit/s|bE)\b(?: per \w+)?,? \(?"
    r"(?:i\.e\.,?|that is|or|=|which (?:is|makes|gives)|thus|→|->) (?P<b>\d+(?:\.\d+)?) ?(?P<r>[MGT])B/s"
)
_PART = re.compile(
    r"(?i)(?:takes?|is|are|spends?|accounts? for)[^.;%]{0,24}% of (?:the |an? )?(?:\w+ ){0,2}(?:step|time|runtime|run)"
    r"|% of (?:the |an? |all )?(?:\w+ ){0,3}(?:step|time|runtime)\b"
)
_WHOLE = re.compile(
    r"(?i)end[- ]to[- ]end|\be2e\b|(?:whole|entire|full|training|inference) (?:step|run|model)|overall|step becomes"
)
_KERNEL = re.compile(r"(?i)in isolation|micro-?benchmark|kernel (?:itself )?(?:is|gets|runs)|the (?:new )?kernel")
_PCIE = re.compile(r"(?:pci[- ]?e?(?:xpress)?|\bgen) ?(?:gen ?)?(?P<g>[3-6])(?:\.0)?(?: *[x×] ?(?P<n>\d+))?\b")
_LSPCI = re.compile(r"lnksta:? *speed (8|16|32|64)(?:\.0)?gt/s[^,]*, *width x(\d+)")
_OF_SPEED = {"8": "3", "16": "4", "32": "5", "64": "6"}
_COPY = re.compile(
    r"(?i)\b(?:h2d|d2h|h(?:to|->)d|d(?:to|->)h|host[ _]to[ _]device|device[ _]to[ _]host|"
    r"(?P<d2d>d2d|device[ _]to[ _]device))\b"
)
_ONCE = re.compile(r"single run|greedy")
_OFTEN = re.compile(r"\b(?:\d+|several|multiple|many) (?:samples|runs|seeds|trials)\b|avg@|averaged|mean of")
_PROBLEMS = re.compile(r"(?i)\b\d+ (?:problems|questions|tasks|items)\b")
_OWN_PEAK = re.compile(r"(?i)\bof (?:the |its )?(?:\w+ )?peak\b")


def held(report: Report) -> Iterator[Finding]:
    """Memory in use above what the GPUs have."""
    if re.search(r"(?<!no )(?<!no cpu )offload|managed|unified|\buvm\b|modded|windows|zero-infinity", report.text):
        return
    for row in report.all_rows:
        for q in row.of("bytes") if row.devices else ():
            own = f"{q.label} {row.headings}" if row.kind == "table" else own_words(row, q)
            own = own.replace("_", " ")
            if row.kind == "table" and _NOT_HELD.search(q.label.replace("_", " ")):
                continue
            if not q.exact or not _HELD.search(own) or (row.kind != "table" and _NOT_HELD.search(own)):
                continue
            count = 1.0 if q.per_device else max(gpu_counts(row))
            most = count * max(d.memory_bytes for d in row.devices) * 2**30 / 1e9
            if 1.03 * most < q.value.lo < 40 * most:
                whose = f"{f'{count:.0f} × ' * (count > 1)}{row.devices[0].name}"
                # Of a part that is sold with more memory the report names which.
                told = re.search(rf"(?<!\d){row.devices[0].memory_bytes / 1e9:.0f} ?g", report.text)
                one = len(report.everything.of("devices")) == 1 and not report.everything.foreign
                several = count > 1 or re.search(r"multi|dual|nodes?\b|cluster|parallel|fsdp|zero", report.text)
                sure = one and not several and (told or q.value.lo > 1.25 * most)
                message = f"{q.text} is more than {whose} has, {si(most / 1.073741824, 'B')}"
                if sure:
                    yield finding(IMPOSSIBLE, "memory", message, q)


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
        most = count * fastest(row, own or row.stated("formats") or formats)[0]
        least = 2 * n * tokens / most
        if t.exact and t.value.hi * 1.05 < least < 30 * t.value.hi:
            gpus = f"{count:.0f} × {row.devices[0].name}"
            message = f"2 × {n / 1e9:.3g} B × {tokens:.0f} tokens take at least {si(least, 's')} on {gpus}"
            yield finding(QUESTION, "bound", f"{message}, not {t.text}: was the whole prompt read?", t)


def roofs(report: Report) -> Iterator[Finding]:
    """A rate "with this intensity" above intensity × bandwidth (Williams et al. 2009)."""
    of = [q for r in report.all_rows if r.kind != "record" for q in r.of("intensity") if "ridge" not in q.words]
    for row in (r for r in report.lines_of_text if _AT_INTENSITY.search(r.text) and len(of) == 1):
        q = row.only("rate")
        if not q or not row.devices or not 0 <= row.line - of[0].line < 9:
            continue
        near = [b for r in report.lines_of_text if r.line < row.line for b in r.of("bandwidth") if on_sheet(r, b)]
        memory = max((b.value.mid for b in near), default=max(d.memory_bps or math.inf for d in row.devices))
        if q.value.lo > 1.05 * (of[0].value * memory).hi:
            roof = si((of[0].value * memory).mid, "FLOP/s")
            message = f"{of[0].text} × {si(memory, 'B/s')} is {roof}, the roof of that intensity, below {q.text}"
            yield finding(QUESTION, "memory bandwidth", f"{message}: did a cache hold it?", q, of[0])


def ports(report: Report) -> Iterator[Finding]:
    """ "2 ports at 200 Gb/s, i.e. 400 GB/s": bits that are taken for bytes."""
    for row in report.lines_of_text:
        for m in _BITS_AS_BYTES.finditer(row.text):
            words = re.findall(r"[\w.]+", row.text[: m.start()].lower())[-12:]
            counts = [1.0, *(float(DIGITS.get(w, w)) for w in words if w in DIGITS or re.fullmatch(r"[2-9]|1\d", w))]
            bits, nbytes = float(m["a"]) * _PREFIX[m["p"]] / 8, float(m["b"]) * _PREFIX[m["r"]]
            off = [nbytes / (bits * n) for n in counts]
            if not any(abs(x / y - 1) < 0.06 for x in off for y in (1.0, 2.0)):
                for n in [n for n, x in zip(counts, off, strict=True) if abs(x / 8 - 1) < 0.01][:1]:
                    each = f"{f'{n:.0f} × ' * (n > 1)}{m['a']} {m['p']}b/s"
                    message = f"{each} is {si(bits * n, 'B/s')}, not {m['b']} {m['r']}B/s: a byte has 8 bits"
                    yield Finding(INCONSISTENT, "bandwidth", row.line, m["b"], message, (row.line,))


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
        made = [q.plain / peak for q, _ in rates for peak in peaks]
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
    named = set(re.findall(r"[a-z]{5,}", subject.lower())) - {"kernel", "kernels", "faster", "whole", "isolation"}
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


def links(report: Report) -> Iterator[Finding]:
    """Copies between host and GPU above one direction of the PCIe link that the report names."""
    text = re.sub(r"[^.;,\n]*\b(?:nvme|ssd|nic|hca|connectx)[^.;,\n]*", "", report.text)
    named = {(m["g"], m["n"] or "16") for m in _PCIE.finditer(text)}
    named |= {(_OF_SPEED[m[1]], m[2]) for m in _LSPCI.finditer(report.text)}
    if len(named) != 1 or re.search(
        r"gh200|gb200|nvlink-c2c|bidirectional|both directions|duplex|nvcomp|decompress", report.text
    ):
        return
    ((generation, lanes),) = named
    most = PCIE_LANES[generation] * int(lanes)
    for row in report.all_rows:
        for q in row.of("bandwidth"):
            own = own_words(row, q)
            near = own if _COPY.search(own) or row.kind == "line" else row.lead[-90:]
            last = [*_COPY.finditer(near)][-1:]
            ways = bool(last) and not last[0]["d2d"] and not re.search(r"(?i)both|total|sum|aggregate|gpus", own)
            count = 1.0 if q.per_device else max(gpu_counts(row))
            if ways and q.exact and 1.03 * most < q.value.lo / count < 8 * most and not on_sheet(row, q):
                message = f"{q.text} is more than PCIe {generation}.0 x{lanes} carries one way, {si(most, 'B/s')}"
                yield finding(QUESTION, "link", f"{message}: over which link?", q)


def counted(report: Report) -> Iterator[Finding]:
    """Scores that are no whole number of problems solved: 55.0 % of 30."""
    text = " ".join(r.text for r in report.lines_of_text)
    once = re.search("(?:one|single) sample", report.text) or (
        _ONCE.search(report.text) and not _OFTEN.search(report.text)
    )
    if not once or not _PROBLEMS.search(text):
        return
    for grid in report.grids:
        for column, name in enumerate(grid.header):
            count = rf"{re.escape(name)}(?: [A-Za-z]+)?(?: (?:has|of|with|of course)| ?[:(=])* ?(\d{{2,3}})\b(?!\.\d|%)"
            of = re.search(count, text) if len(name) > 2 else None
            cells = [q for r in grid.body if (q := r.figure(column)) and q.kind in ("number", "percent")]
            if not of or len(cells) < 3:
                continue
            odd = [q for q in cells if not _whole(q, float(of[1]))]
            if len(odd) == 1:
                q = odd[0]
                solved = (100 if q.kind == "percent" else 1) * q.value.mid * float(of[1]) / 100
                message = f"{q.text} of {of[1]} is {solved:.4g} solved, the others are whole numbers"
                yield finding(QUESTION, "count", f"{message}: of how many is it?", q)


def _whole(q: Quantity, n: float) -> bool:
    """Whether a percentage is that of a whole number of n, as it is printed."""
    said = q.value.mid * (100 if q.kind == "percent" else 1)
    digits = re.search(r"\.(\d+)", q.text)
    return not digits or abs(100 * round(said * n / 100) / n - said) <= 1.01 * 10.0 ** -len(digits[1])
