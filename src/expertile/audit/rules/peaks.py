"""Measured rates against the limits that the text states and those that links' names mean."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from expertile.audit.facts import DIGITS, facts
from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.pattern import denied, regex
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row, Size
from expertile.audit.rules.hardware import EQUATION, SHOWN, is_limit, on_sheet, own_words
from expertile.audit.rules.terms import BOTH_WAYS, ONE_WAY
from expertile.audit.units import RATES
from expertile.device import DTYPES, NVLINK, PCIE_LANES, generous_peak

# A memory or link right before its limit: "HBM3 (3.35 TB/s)", "LPDDR5 with 68 GB/s".
NAMED = regex(
    r"(?i)(?:(?:nvlink|pci-?e|hbm|gddr|infiniband|memory|\bnics?|\b[hnex]dr|ethernet)[\w. ]{0,12}\(|\((?:nvlink|"
    r"pci-?e)[\w. ]{0,12} |\b(?:\w*ddr\d|hbm|infiniband|ethernet|[hnex]dr)\w*(?:-\d+)?(?:,| with| at) |^\W*speed: )$"
)
# What a bandwidth is of.
_PARTS = {
    "L2": r"\bl2\b",
    "on-chip memory": r"\bl1\b|shared mem|smem|sram|register",
    "NVLink": r"nvlink|nvswitch|device_to_device|gpu\(row\) ?<?->? ?gpu|\bp2p\b|\bpeer (?:cop|memc)",
    "PCIe": r"pci[- ]?e|lnksta|\bgen ?[3-6] ?x\d",
    "network": r"infiniband|\bib\b|ethernet|gbe\b|network|rdma|\broce|\bnics?\b|inter-?node|\b[hnex]dr\d*\b|"
    r"connectx|^\W*speed: |[gm]bits?/s|\bib_(?:write|read|send)_",
    "xGMI": r"xgmi|infinity fabric",
    "disk": r"nvme|ssd|\bdisk|storage|\bdrive\b|optane",
    "memory": r"hbm|[gd]?dram|\w*ddr\d|vram|(?<!host )(?<!pinned )(?<!pageable )(?<!to gpu )(?<!to device )memory",
}
_PART = regex("(?i)" + "|".join(f"(?P<p{i}>{form})" for i, form in enumerate(_PARTS.values())))
_COPIED, _ON_DEVICE = regex(r"(?i)h2d|d2h|\bhost|pinned"), regex(r"(?i)d2d|device.to.device")
_READ = regex(
    r"(?i)(?<![a-z])(?:direct[ _-]?io|o_direct|cold|uncached|load(?:s|ed|ing)?|checkpoint|safetensors)(?![a-z])"
)
_OF_RAM = regex(rf"{_COPIED.pattern}|\bgpu|\bram\b|\bdevice|warm|page cache")
_PAGES = regex(r"(?:from|in|out of) (?:the )?page cache|(?:that|which|this) is ram\b|fits? in(?:to)? (?:the )?ram\b")
_SEVERAL = regex(  # drives, or the memory of a host
    r"(?<!no )(?<!not )(?<!without )\b(?:raid|strip(?:e|ing)|md\d|lvm|zfs|drives|ssds|disks|lustre|weka|gpfs|nfs|ceph|"
    r"beegfs|tmpfs|ram ?disk|/dev/shm)|(?<![\w.])(?:[2-9]|two|three|four|eight) ?[x×]? (?:[\w.-]+ ){0,2}(?:nvme|ssd)"
)
# Not what one link or memory carried.
_OTHER = regex(
    r"(?i)effective|equivalent|(?<!kv )cached?\b|compress|logical|spars|would|expected|predict|ideal|aggregat|cluster|"
    r"total|system|domain|rack|nvl\d|generation|supports?|provides?|offers?|up to|claimed|all-?gather|sum of|"
    r"(?<!write)(?<!write-)combined"
)
_NODES, _SUMMED = regex(r"\W*(\d+) (?:nodes|hosts|servers|machines)\b"), regex(r"(?i)per step|gradient|reduc")
_LINKS = ("PCIe", "NVLink")
_LINKS_OF = regex(
    rf"(?i)(?<![\w.-])(\d+|{'|'.join(DIGITS)}) (?:[\w.-]+ ){{0,2}}(?:links?|lanes|ports|bricks)"
    r"(?: (?:of|at|with|[x×]))?\W*$"
)
_OF_ALL = regex(
    r"(?i)^[^,;.]*\b(?:per|each|a|in) (?:direction (?:and|per|of each) )?(?:gpu|gcd|card|device|rank|total|all)\b"
)
_OF_LINK = regex(r"peak|of|util|effic|theor|line rate")
_OF_ITS = regex(r"\W*(?:out )?of (?:(?:that|this|it)\b|(\d[\d.,]*))")
_PCIE = regex(
    r"(?i)(?:pci[- ]?e?(?:xpress)? ?(?:gen)?|\bgen(?= ?[3-6] *x\d)) ?\.?(?P<g>[3-6])(?:\.0)?(?: *[x×] ?(?P<n>\d+))?|"
    r"\b[x×](?P<lanes>\d+),? (?:pci[- ]?e )?gen ?(?P<of>[3-6])"
)
_LSPCI = regex(r"(?i)lnksta:? *speed (8|16|32|64)(?:\.0)?gt/s[^,]*, *width x(\d+)")
_SPEED = {"8": "3", "16": "4", "32": "5", "64": "6"}  # GT/s of each generation
_PORT = regex(r"GbE|[Ee]thernet|InfiniBand|\b[HN]DR")
_NIC = regex(
    r"(?i)(?:connectx|bluefield|\bnics?\b|\bhcas?\b|\badapters?\b|\binfiniband\b)[\w-]*[ ,(]*"
    r"(?:(?:(?:single|dual|one|two|\d)[ -])?ports? |[nhex]dr\d*,? |(?:each|at|of|with|an?|one|single) )*\(?$"
)
_ALONE = regex(r"(?i)\b(?:per|each|own|one) (?:gpu|rank|nic|port|adapter)\b")  # one NIC carries it
_ONE_NIC = regex(r"\b(?:single|one) (?:[\w-]+ )?(?:adapter|nic|port|hca|cable)\b")
_PORTS = regex(rf"(?i)\b(\d|{'|'.join(DIGITS)}) ports\b")
_ONE_PORT = regex(r"(?i)\b(?:one|single|1) port\b")
_OVER = regex(r"(?i)\b(?:over|across|through|via)\b")
_PAST = regex(  # "126 tok/s, over the 69 tok/s limit of …"
    r"(?i)(?:(?:,|well|far) over(?= the)|\b(?:above|beyond|exceeds|(?:more|higher|faster) than)|(?<!-)>) ?"
    r"(?:\W?(?:the|its|our|this|that|a|peak|limit of)\b ?)*\W*$"
)
_COLLECTIVES = ((r"all-?_?reduce", 2.0), (r"all-?_?gather|reduce-?_?scatter|all-?_?to-?_?all", 1.0))


@dataclass(frozen=True)
class _Limit:
    """Units per second of `part`; `ways` 1 or 2 where it says so; `q` where the text states it."""

    part: str
    value: float
    ways: int
    text: str
    q: Quantity | None = None


def _part(text: str) -> str:
    """The one part that a text names."""
    found = _parts(text)
    found = found - {"memory"} if len(found) == 2 else found
    found = found - {"PCIe"} if found == {"PCIe", "disk"} else found  # by which the drive is plugged in
    return min(found) if len(found) == 1 else ""


@lru_cache(maxsize=1 << 12)
def _parts(text: str) -> frozenset[str]:
    return frozenset(list(_PARTS)[int((m.lastgroup or "p0")[1:])] for m in _PART.finditer(text) if not denied(m, text))


def _ways(text: str) -> int:
    """1 or 2 directions, as the last of its words for them says; else 0."""
    text = re.sub(r"(?i)(?<=[hd]2[hd])_", " ", text)
    said = [(m.start(), ways, m[0]) for ways, form in ((1, ONE_WAY), (2, BOTH_WAYS)) for m in form.finditer(text)]
    said = [x for x in said if x[2].lower() != "pinned"] or said
    return max(said, default=(0, 0, ""))[1]


def _part_of(row: Row, q: Quantity, own: str) -> str:
    """The format of a rate, the memory or link of a bandwidth; of other figures nothing."""
    if q.kind == "rate":
        return "/".join(facts(own).of("formats") or row.stated("formats")[:1])
    if row.kind == "table" and q.label == "dram":
        return "memory"
    over = f"{own} {row.lead[-120:] if row.kind == 'table' else ''}"  # "Host to Device" above a table
    over += row.headings * (_ways(own) == 2)  # of copies
    block = row.report.blocks[row.block]
    if row.kind == "line" and block.kind == "code" and block.lines:  # above the lines of one
        over += f" {block.lines[0].text}"
    whole = _parts(row.report.text) if _COPIED.search(over) and not _ON_DEVICE.search(over) else frozenset()
    copied = "PCIe" if "PCIe" in whole and "NVLink" not in whole else _part(row.report.text) if whole else ""
    carried = row.kind == "line" and re.search(r"(?i)\b(?:link|wire|bus|carr(?:y|ies))\b", own)
    linked = _part(row.text) if carried else ""
    read = _READ.search(row.text) and not _OF_RAM.search(row.text) and re.search(_PARTS["disk"], row.report.text)
    above = "".join(row.lead.partition(row.text)[:2])  # what a paragraph says later is of something else
    part = _part(own) or linked or ("disk" if read else _part(f"{above} {row.headings}")) or copied or "memory"
    return "" if q.kind != "bandwidth" else copied or part if part == "memory" else part


def limits(report: Report) -> Iterator[Finding]:
    """Every rate against the one limit of its part that is stated, or that the name of its link means."""
    stated: list[_Limit] = []
    for row in report.lines_of_text:
        held = [(q, own_words(row, q)) for q in row.of(*RATES) if q.value.mid]
        ends = [(q, row.text[: q.start], row.text[q.end :]) for q, _ in held if "b" in q.text]
        nics = {q for q, before, after in ends if _NIC.search(before) or re.match(r" (?:NIC|HCA|port|adapter)", after)}
        said = [
            bool(
                _PORT.search(q.text)
                or q in nics
                or is_limit(own)
                or NAMED.search(row.text[: q.start][-40:])
                or _is_sheet(q)
            )
            for q, own in held
        ]
        for (q, own), told in zip(held, said, strict=True):
            if (told or (any(said) and _ways(own) and not SHOWN.search(row.text))) and "spars" not in own:
                part = "/".join(facts(own).of("formats"))
                part = part if q.kind == "rate" else _part(own) or _part(row.text) or _part_of(row, q, own)
                part = "network" if q in nics else part
                after = row.text.partition(q.text)[2]
                many = None if _OF_ALL.match(after) else _LINKS_OF.search(own[: own.find(q.text)])
                n, times = (int(DIGITS.get(many[1].lower(), many[1])), f"{many[1]} × ") if many else (1, "")
                stated.append(_Limit(part, n * q.plain.mid, _ways(own), f"the {times}{q.text} of line {q.line}", q))
    known = {id(limit.q) for limit in stated}
    pairs = ((row, *two) for row in report.lines_of_text for k in RATES for two in itertools.combinations(row.of(k), 2))
    past = [q.plain for row, x, q in pairs if x.value.lo > q.value.hi and _PAST.search(row.text[: q.start])]
    stated = [s for s in stated if not any(x.meets(s.value) for x in past)]  # the text says it itself
    clocked = [q.value.hi for row in report.lines_of_text for q in row.of("rate") if _of_clock(row, q)]
    for row in report.all_rows:
        yield from _bus(row)
        for q in (*row.of(*RATES), *_crossed(row)):
            own = own_words(row, q)
            if row.kind == "table" and any(
                re.search(r"(?i)\b(?:me(?:di)?an|avg|min)\b", x.label) for x in row.of(q.kind)
            ):
                own = re.sub(r"(?i)\bmax(?:imum)?\b", "", own)  # it was measured
            other = bool(on_sheet(row, q) or id(q) in known or is_limit(own) or _OTHER.search(own))
            other |= q.kind == "bandwidth" and row.kind == "line" and bool(EQUATION.search(row.text[: q.start]))
            itself = any(s.value and q.plain.meets(s.value) for s in stated if s.q and s.q.kind == q.kind)
            itself |= q.kind == "rate" and q.value.lo <= max(clocked, default=0.0)
            if q.exact and q.value.mid and not (other or itself):
                lines = len(report.lines)
                reach = lines if lines < (60 if q.kind in RATES[:2] else 3) else 29 if q.kind in RATES[:2] else 1
                near = [s for s in stated if s.q and s.q.kind == q.kind and abs(s.q.line - q.line) <= reach]
                whole = [s for s in near if s.q and _flops(s.q) == _flops(q)]  # TOP/s are of integers
                yield from _beyond(row, q, own, whole or near)


def _flops(q: Quantity) -> bool:
    return q.kind != "rate" or "fl" in f"{q.text} {q.label}".lower()


def _of_clock(row: Row, q: Quantity) -> bool:
    """Whether a rate is worked out of lanes and a clock: "16384 × 2 × 2.88 GHz = 94.4 TFLOP/s"."""
    before = row.text[: q.start]
    return bool(EQUATION.search(before) and re.search(r"(?i)[\d.]+ ?(?:[GM]Hz|(?:[×x*·] ?10\^|e)9)\b", before))


def _crossed(row: Row) -> Iterator[Quantity]:
    """The bytes/s of a sentence's only bytes in a time that crosses a link: "26 GB … over PCIe 3.0 x16 in 0.9 s"."""
    held = [q for q in row.of("bytes") if q.exact]
    for t in row.of("time") if len(held) == 1 and row.kind != "table" else ():
        own = own_words(row, t) if row.kind == "line" else row.text
        t = t if row.kind == "line" else replace(t, label=row.text)
        part = _part(own) or _part(f"{row.lead} {row.text}") * bool(ONE_WAY.search(row.text) or _OVER.search(row.text))
        if part in (*_LINKS, "network", "disk") and t.exact and re.search(r"(?i)\bin\b|tak|took|need|[:=] ?\d", own):
            yield replace(t, kind="bandwidth", value=held[0].value / t.value, text=f"{held[0].text} in {t.text}")


def _beyond(row: Row, q: Quantity, own: str, stated: list[_Limit]) -> Iterator[Finding]:
    part, link = _part_of(row, q, own), False
    unknown = row.kind == "line" and not _parts(own) and len(_parts(row.text)) > 1
    if unknown or re.search(r"(?i)\bexceeds?\b.* can\b|\beffective\b", row.text):
        return  # which the text says itself
    if q.kind == "bandwidth" and len(many := _parts(own)) > 1:
        part = next((s.part for s in stated if s.part in many), part)
    formats = part.split("/") if part else row.report.everything.of("formats")
    peaks = [x for d in row.devices for f in formats for x in (d.peak(f), generous_peak(d, f)) if x]
    if q.kind == "rate" and (part or len(formats) > 1) and peaks and q.value.lo <= max(peaks):
        return  # the text states another of its peaks: without tensor cores, with the slower accumulation
    if part == "disk" and _PAGES.search(row.report.text):
        return
    if part in ("disk", "PCIe") and _SEVERAL.search(row.report.text if part == "disk" else row.headings):
        return
    ways = (_ways(own) or _ways(row.text) or _ways(row.lead)) if q.kind == "bandwidth" else 0
    held = [s for s in stated if s.part in (part, "" if q.kind == "rate" else part)]
    if part == "disk" and not (held or _OF_RAM.search(row.text)):  # what its own link carries, one way
        plugged = (_link(text, row) for text in row.report.lines if _part(text) == "disk")
        held, ways = [x for x in plugged if x and x.part == "PCIe"], 1
    if part in _LINKS:
        link = True
        known = (_link(text, row) for text in (own, f"{row.lead} {row.headings} {own}", row.report.text))
        held = held or [x for x in known if x and x.part == part][:1]
    held = [s for s in held if not ways or s.ways == ways] or held
    if not held:
        return
    limit = max(held, key=lambda s: s.value * 2 / (s.ways or 2))
    most = limit.value * ((ways or 2) / limit.ways if limit.ways else 1)
    if link and not limit.q and row.kind == "line" and q.plain.meets(limit.value) and not SHOWN.search(row.text):
        return  # what the link is sold with
    told = (q.kind != "bandwidth" or _part(own) == part) and part and (not limit.q or abs(limit.q.line - q.line) < 30)
    if limit.q and not limit.ways and q.value.lo < 2.02 * most and BOTH_WAYS.search(row.text):
        return  # both ways, and one
    one = (
        _ALONE.search(f"{row.lead} {row.headings}")
        or (row.kind == "line" and _ONE_PORT.search(row.text))
        or _ONE_NIC.search(row.report.text)
    )
    alone = q.per_device or (one and part == "network")
    several = max((1.0, *row.report.everything.of("gpus"))) if not alone and not limit.ways else 1.0
    if row.kind == "line" and part == "network" and (ports := _PORTS.search(row.text)):
        several = float(DIGITS.get(ports[1].lower(), ports[1]))
    # Switches that add up lift the bus bandwidth of a collective; a figure far above is of something else.
    slack = 1.15 if re.search(r"(?i)bus ?b", own) else 1.03
    if slack * several * most < q.value.lo < (8 if told else 3) * most:
        # A limit that the text states of anything else than a link may be that of another mode.
        sure = link and told and ways and (not limit.q or limit.ways == ways) and q.value.hi < 2.5 * most
        verdict = QUESTION if not sure else INCONSISTENT if limit.q else IMPOSSIBLE
        message = f"{q.text} is more than {limit.text}, {si(most, UNIT_OF[q.kind])}"
        beside = (limit.q,) if limit.q else ()
        ask = "" if sure else ": is it of the same part?"
        yield finding(verdict, "link" if link else "limit", message + ask, q, *beside)
    p = row.only("percent") if len(row.of("bandwidth")) == 1 else None
    after = (b for a, b in itertools.pairwise(row.quantities) if a is q and b.kind == "percent" and b.exact)
    p = p or next(after, None)
    based = p and row.kind == "line" and _OF_ITS.match(row.text, p.end)
    p = None if p and re.match(r" ?of the (?:local|other|same|first|former|single)\b", row.text[p.end :]) else p
    p = None if based and (not based[1] or based[1].rstrip(".,") not in limit.text) else p  # "92.4 % of 1008"
    # "45 % of the one-way limit" leaves no other open.
    ends = (1,) if p and _ways(p.words) and limit.ways else (1, 2, 0.5)
    whole = [s.value * x for s in held for x in ends]
    made = ((q.plain / p.value, 0.03), (q.plain * 1.0737 / p.value, 0.01)) if p and q.value.lo < 3 * most else ()
    if not limit.q or limit.q.kind == "rate":  # another peak that the text works out
        whole += [x.plain.mid for r in row.report.lines_of_text for x in r.of(q.kind) if x is not q]
    scaled = p and row.kind == "table" and "effic" in p.label.lower() and ("gpus" in row.own or row.of("ratio"))
    if (
        p
        and made
        and not scaled
        and _OF_LINK.search(p.words)
        and not any(m.meets(x, s) for x in whole for m, s in made)
    ):
        message = f"{q.text} is {100 * q.value.mid / most:.3g} % of {limit.text}, not {p.text}"
        yield finding(INCONSISTENT if _part(own) and ways else QUESTION, "link", message, q, p)


def _bus(row: Row) -> Iterator[Finding]:
    """Bus bandwidth is 2 (n − 1) / n times the algorithm's in an all-reduce, and never more (nccl-tests)."""
    rates = [(q, q.label[-30:].lower()) for q in row.of("bandwidth")]
    alg, bus = ([q for q, label in rates if re.search(rf"{w} ?(?:bw|band)", label)] for w in (r"alg\w*", "bus"))
    if len(alg) == len(bus) == 2:  # out of place and in place
        for pair in zip(alg, bus, strict=True):
            yield from _bus(row.of_these([*pair]))
    if len(alg) != 1 or len(bus) != 1 or not alg[0].value.mid:
        return
    ratio, n = bus[0].value / alg[0].value, row.size("gpus")
    ranks = re.findall(r"(?m)^# +rank +(\d+) ", row.report.text)  # each process may have one of the GPUs
    least = max([2, *map(int, re.findall(r"\bngpus (\d+)", row.report.text))])  # else not all are listed
    last, stated = max(map(int, ranks), default=0) + 1.0, row.report.everything.of("gpus")
    alike = len({*ranks}) == len(ranks) and last >= least and last in (len(ranks), *stated)
    ranks, n = (ranks, Size(last, row.line, True)) if alike else ([], n)
    links = [NVLINK[part] / 2 for d in row.devices for part in NVLINK if re.search(rf"\b{part}\b", d.name)]
    # Of one node; a switch that reduces saves traffic (NVLink SHARP).
    slack = 1.1 if all((d.capability or (9, 0)) < (9, 0) for d in row.devices) else 1.5
    if links and n and n.value <= 8 and bus[0].value.lo > slack * max(links):
        message = f"{bus[0].text} is more than {si(max(links), 'B/s')}, one way over {row.devices[0].name}'s NVLink"
        yield finding(QUESTION, "link", f"{message}: over which links?", bus[0])
    own = any(re.search(rf"(?i){form}", row.label) for form, _ in _COLLECTIVES)
    words = row.label if own else row.words + row.lead
    kinds = [times for form, times in _COLLECTIVES if re.search(rf"(?i){form}", words)]
    should = kinds[0] * (n.value - 1) / n.value if n and len(kinds) == 1 else 0.0
    if ratio.lo > 2.02 or (should and not ratio.meets(should, 0.03)):
        more = f"{should:.4g} times, with {n.value:.0f} GPUs" if n and should else "at most twice"
        message = f"{bus[0].text} is {ratio.mid:.3g} times the algorithm's {alg[0].text}; bus bandwidth is {more}"
        sure = ratio.lo > 2.02 or (should and last == len(ranks))
        yield finding(INCONSISTENT if sure else QUESTION, "bus bandwidth", message, bus[0], alg[0])


def _link(text: str, row: Row) -> _Limit | None:
    """The one link that a text names, and its bytes/s in both directions together."""
    pcie = {(m["g"] or m["of"], m["n"] or m["lanes"]) for m in _PCIE.finditer(text)}
    pcie |= {(_SPEED[m[1]], m[2]) for m in _LSPCI.finditer(text)}
    pcie = {x for x in pcie if x[1] or not any(y[0] == x[0] and y[1] for y in pcie)}  # a CPU's "PCIe 4.0" beside
    nvlink = "NVLink" in _parts(text)
    if len(pcie) == 1 and not nvlink:
        generation, lanes = pcie.pop()
        both = 2 * PCIE_LANES[generation] * int(lanes or 16)
        return _Limit("PCIe", both, 2, f"PCIe {generation}.0 x{lanes or 16}")
    names = [part for device in row.devices for part in NVLINK if re.search(rf"\b{part}\b", device.name)]
    values = {NVLINK[part] for part in names} if nvlink and not pcie else set()
    return _Limit("NVLink", values.pop(), 2, f"{names[0]}'s NVLink") if len(values) == 1 else None


def _is_sheet(q: Quantity) -> bool:
    """Whether a figure that names its GPU just before it is that GPU's peak."""
    devices = facts(q.label).of("devices")
    return any(x and q.value.meets(x, 0.005) for d in devices for x in (d.memory_bps, *(d.peak(f) for f in DTYPES)))
