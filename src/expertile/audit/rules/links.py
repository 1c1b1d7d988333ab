"""Measured rates against the limits that the text states, and links against those that their names mean."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from expertile.audit.facts import DIGITS, facts
from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FAR
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import MEASURED, is_limit, is_sheet, on_sheet, own_words
from expertile.device import NVLINK, PCIE_LANES

# What a bandwidth is of.
_PARTS = {
    "L2": r"\bl2\b",
    "on-chip memory": r"\bl1\b|shared mem|smem|sram|register",
    "NVLink": r"nvlink|nvswitch|device_to_device|gpu\(row\) ?<?->? ?gpu|\bp2p\b|\bpeer (?:cop|memc)",
    "PCIe": r"pci[- ]?e",
    "network": r"infiniband|\bib\b|ethernet|network|rdma|roce|\bnics?\b|inter-?node|[hne]dr\b",
    "xGMI": r"xgmi|infinity fabric",
    "disk": r"nvme|ssd|\bdisk|storage",
    "memory": r"hbm|[gd]?dram|gddr|vram|(?<!host )(?<!pinned )(?<!pageable )(?<!to gpu )(?<!to device )memory",
}
_PART = re.compile("|".join(f"(?P<p{i}>{form})" for i, form in enumerate(_PARTS.values())), re.IGNORECASE)
_ONE_WAY = re.compile(
    r"(?i)h2d|d2h|host.(?:to|->).device|device.(?:to|->).host|unidir|one[- ]way|(?:per|one|each) (?:direction|way)|"
    r"from (?:\w+ )?host|to the (?:gpu|device)|(?:to|from) (?:the )?cpu|loading|upload|download|h->d|d->h|pinned|"
    r"bus ?bw|reads? from|writes? to|\(row\) (?:->|<-)(?!>)"
)
_COPIED = re.compile(r"(?i)h2d|d2h|\bhost|pinned")
_BOTH_WAYS = re.compile(r"(?i)bi-?dir|both|duplex|together|in total|two[- ]way|aggregat|<->")
# Not what one link or memory carried.
_OTHER = re.compile(
    r"(?i)effective|equivalent|cached?\b|compress|logical|spars|would|expected|predict|ideal|aggregat|cluster|total|"
    r"system|domain|rack|nvl\d|generation|supports?|provides?|offers?|up to|claimed|all-?gather|sum of|8 gpus|combined"
)
_NAMED = re.compile(r"(?i)(?:nvlink|pci-?e|hbm|gddr|infiniband|memory)[\w. ]{0,12}\($")
_LINKS = ("PCIe", "NVLink")
_LINKS_OF = re.compile(
    rf"(?i)(?<![\w.])(\d+|{'|'.join(DIGITS)}) (?:[\w.]+ ){{0,2}}(?:links?|lanes|ports|bricks)(?: (?:of|at|with))?\W*$"
)
_BW = ("alg(?:o|orithm)?", "bus")
_SHARE = re.compile(r"peak|of|util|effic|theor|line rate")
_PCIE = re.compile(r"(?i)pci[- ]?e?(?:xpress)? ?(?:gen)? ?\.?(?P<g>[3-6])(?:\.0)?(?: ?[x×] ?(?P<n>\d+))?")


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
    found = {list(_PARTS)[int((m.lastgroup or "p0")[1:])] for m in _PART.finditer(text)}
    found -= {"memory"} if len(found) == 2 else set()
    return found.pop() if len(found) == 1 else ""


def _ways(text: str) -> int:
    """1 or 2 directions, as the last of its words for them says; else 0."""
    said = ((m.start(), ways) for ways, form in ((1, _ONE_WAY), (2, _BOTH_WAYS)) for m in form.finditer(text))
    return max(said, default=(0, 0))[1]


def _part_of(row: Row, q: Quantity, own: str) -> str:
    """The format of a rate, the memory or link of a bandwidth; of other figures nothing."""
    if q.kind == "rate":
        return "/".join(facts(own).of("formats") or row.stated("formats")[:1])
    copied = _part(row.report.text) if _COPIED.search(own) else ""
    return _part(own) or _part(f"{row.lead} {row.headings}") or copied or "memory" if q.kind == "bandwidth" else ""


def limits(report: Report) -> Iterator[Finding]:
    """Every rate against the one limit of its part that is stated, or that the name of its link means."""
    stated: list[_Limit] = []
    for row in report.lines_of_text:
        held = [(q, own_words(row, q)) for q in row.of(*_KINDS) if q.value.mid]
        said = [bool(is_limit(own) or _NAMED.search(own[: own.find(q.text)]) or is_sheet(q)) for q, own in held]
        for (q, own), told in zip(held, said, strict=True):
            if (told or (any(said) and _ways(own) and not MEASURED.search(row.text))) and "spars" not in own:
                part = (
                    "/".join(facts(own).of("formats")) if q.kind == "rate" else _part(row.text) or _part_of(row, q, own)
                )
                part = part if q.kind == "rate" else _part(own) or part
                many = _LINKS_OF.search(own[: own.find(q.text)])
                n, times = (int(DIGITS.get(many[1].lower(), many[1])), f"{many[1]} × ") if many else (1, "")
                stated.append(_Limit(part, n * q.plain.mid, _ways(own), f"the {times}{q.text} of line {q.line}", q))
    known = {id(limit.q) for limit in stated}
    for row in report.all_rows:
        yield from _bus(row)
        for q in (*row.of(*_KINDS), *_moved(row)):
            own = own_words(row, q)
            limit = on_sheet(row, q) or id(q) in known or is_limit(own) or _OTHER.search(own)
            if q.exact and q.value.mid and not limit:
                near = [s for s in stated if s.q and s.q.kind == q.kind and _beside(row, s.q, q)]
                yield from _above(row, q, own, near)


_KINDS = ("rate", "bandwidth", "tokens_per_s", "items_per_s")


def _beside(row: Row, limit: Quantity, q: Quantity) -> bool:
    near = 60 if q.kind in _KINDS[:2] else 3
    return len(row.report.lines) < near or abs(limit.line - q.line) < near / 2


def _moved(row: Row) -> Iterator[Quantity]:
    """The bytes/s of a sentence's only bytes in a time that crosses a link: "26 GB … over PCIe 3.0 x16 in 0.9 s"."""
    held = [q for q in row.of("bytes") if q.exact]
    for t in row.of("time") if len(held) == 1 and row.kind != "table" else ():
        own = own_words(row, t) if row.kind == "line" else row.text
        t = t if row.kind == "line" else replace(t, label=row.text)
        part = _part(own) or _part(f"{row.lead} {row.text}") * bool(_ONE_WAY.search(own))
        if part in _LINKS and t.exact and re.search(r"(?i)\bin\b|tak|took|[:=] ?\d", own):
            yield replace(t, kind="bandwidth", value=held[0].value / t.value, text=f"{held[0].text} in {t.text}")


def _above(row: Row, q: Quantity, own: str, stated: list[_Limit]) -> Iterator[Finding]:
    part, link = _part_of(row, q, own), False
    ways = (_ways(own) or _ways(row.lead)) if q.kind == "bandwidth" else 0
    held = [s for s in stated if s.part in (part, "" if q.kind == "rate" else part)]
    if part in _LINKS:
        link, around = True, f"{row.lead} {row.headings} {own}"
        known = (_link(text, row) for text in (own, around, row.report.text))
        held = held or [x for x in known if x and x.part == part][:1]
    held = [s for s in held if not ways or s.ways == ways] or held
    if not held:
        return
    limit = max(held, key=lambda s: s.value * 2 / (s.ways or 2))
    most = limit.value * ((ways or 2) / limit.ways if limit.ways and link else 1)
    told = (q.kind != "bandwidth" or _part(own) == part) and part and (not limit.q or abs(limit.q.line - q.line) < 30)
    several = max((1.0, *row.report.everything.of("gpus"))) if not q.per_device and not limit.ways else 1.0
    # Switches that add up lift the bus bandwidth of a collective; a figure far above is of something else.
    slack = 1.15 if re.search(r"(?i)bus ?b", own) else 1.03
    if slack * several * most < q.value.lo < (8 if told else 3) * most:
        certain = (ways and (not limit.q or limit.ways == ways)) if link else q.value.lo > FAR * most
        sure = told and certain and part != "network" and q.value.hi < 2.5 * most
        verdict = QUESTION if not sure else INCONSISTENT if limit.q else IMPOSSIBLE
        message = f"{q.text} is more than {limit.text}, {si(most, UNIT_OF[q.kind])}"
        beside = (limit.q,) if limit.q else ()
        ask = "" if sure else ": is it of the same part?"
        yield finding(verdict, "link" if link else "limit", message + ask, q, *beside)
    p = row.only("percent") if q.value.lo < 3 * most and len(row.of("bandwidth")) == 1 else None
    # "45 % of the one-way limit" leaves no other open.
    ends = (1,) if p and _ways(p.words) and limit.ways else (1, 2, 0.5)
    if (
        p
        and _SHARE.search(p.words)
        and not any((q.value / p.value).meets(s.value * x, 0.06) for s in held for x in ends)
    ):
        message = f"{q.text} is {100 * q.value.mid / most:.3g} % of {limit.text}, not {p.text}"
        yield finding(INCONSISTENT if _part(own) and ways else QUESTION, "link", message, q, p)


_COLLECTIVES = ((r"all-?_?reduce", 2.0), (r"all-?_?gather|reduce-?_?scatter|all-?_?to-?_?all", 1.0))


def _bus(row: Row) -> Iterator[Finding]:
    """Bus bandwidth is 2 (n − 1) / n times the algorithm's in an all-reduce, and never more (nccl-tests)."""
    alg, bus = (
        [q for q in row.of("bandwidth") if re.search(rf"(?i){w} ?(?:bw|bandwidth)", q.label[-20:])] for w in _BW
    )
    if len(alg) != 1 or len(bus) != 1 or not alg[0].value.mid:
        return
    ratio, n = bus[0].value / alg[0].value, row.size("gpus")
    kinds = [times for form, times in _COLLECTIVES if re.search(rf"(?i){form}", row.words + row.lead)]
    should = kinds[0] * (n.value - 1) / n.value if n and len(kinds) == 1 else 0.0
    if ratio.lo > 2.02 or (should and not ratio.meets(should, 0.03)):
        more = f"{should:.4g} times, with {n.value:.0f} GPUs" if n and should else "at most twice"
        message = f"{bus[0].text} is {ratio.mid:.3g} times the algorithm's {alg[0].text}; bus bandwidth is {more}"
        yield finding(INCONSISTENT if ratio.lo > 2.02 else QUESTION, "bus bandwidth", message, bus[0], alg[0])


def _link(text: str, row: Row) -> _Limit | None:
    """The one link that a text names, and its bytes/s in both directions together."""
    pcie, nvlink = {(m["g"], m["n"]) for m in _PCIE.finditer(text)}, re.search(rf"(?i){_PARTS['NVLink']}", text)
    pcie = {p for p in pcie if p[1]} or pcie  # "PCIe 4" above "PCIe 4.0 x8"
    if len(pcie) == 1 and not nvlink:
        generation, lanes = pcie.pop()
        both = 2 * PCIE_LANES[generation] * int(lanes or 16)
        return _Limit("PCIe", both, 2, f"PCIe {generation}.0 x{lanes or 16}")
    names = [part for device in row.devices for part in NVLINK if re.search(rf"\b{part}\b", device.name)]
    parts = {"2": "V100", "3": "A100", "4": "H100", "5": "B200"}
    names += [parts[g] for g in re.findall(r"(?i)nvlink ?([2-5])", text)]
    values = {NVLINK[part] for part in names} if nvlink and not pcie else set()
    return _Limit("NVLink", values.pop(), 2, f"{names[0]}'s NVLink") if len(values) == 1 else None
