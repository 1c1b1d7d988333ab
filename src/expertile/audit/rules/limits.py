"""Measured rates against the limits that the text states, and links against those that their names mean."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from expertile.audit.facts import facts
from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import FAR
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.peaks import is_sheet
from expertile.device import NVLINK, PCIE_LANES

# What a bandwidth is of.
_PARTS = {
    "L2": r"\bl2\b",
    "on-chip memory": r"\bl1\b|shared mem|smem|sram|register",
    "NVLink": r"nvlink|nvswitch",
    "PCIe": r"pci-?e",
    "network": r"infiniband|\bib\b|ethernet|network|rdma|roce|\bnics?\b|inter-?node|[hne]dr\b",
    "xGMI": r"xgmi|infinity fabric",
    "disk": r"nvme|ssd|\bdisk|storage",
    "memory": r"hbm|[gd]?dram|gddr|vram|(?<!host )(?<!pinned )(?<!pageable )(?<!to gpu )(?<!to device )memory",
}
_PART = re.compile("|".join(f"(?P<p{i}>{form})" for i, form in enumerate(_PARTS.values())), re.IGNORECASE)
_LIMIT = re.compile(
    r"(?i)\bpeak(?!s? at|ed)|theoretical|line rate|\bspec|\brated|data ?sheet|\blimit|ceiling|roofline|\bcan (?:carry|deliver|do)|"
    r"capable|(?:per|each|one|a|in either) (?:way|direction)\b|upper bound|at most|cannot exceed|nominal|\(dense,? \d|\bmax(?:imum)?\b|(?:nvlink|pci-?e|hbm)[^.,;]{0,12} (?:gives?|delivers|provides?|offers?|supports?|has)\b"
)
_ONE_WAY = re.compile(
    r"(?i)h2d|d2h|host.to.device|device.to.host|unidir|one[- ]way|(?:per|one|each) (?:direction|way)|"
    r"from (?:\w+ )?host|to the (?:gpu|device)|(?:to|from) (?:the )?cpu|loading|upload|download|h->d|d->h|pinned|bus ?bw|reads? from|writes? to"
)
_BOTH_WAYS = re.compile(r"(?i)bi-?dir|both|duplex|together|in total|two[- ]way|aggregat")
# Not what one link or memory carried.
_OTHER = re.compile(
    r"(?i)effective|equivalent|cached?\b|compress|logical|spars|would|expected|predict|ideal|aggregat|cluster|total|"
    r"system|domain|rack|nvl\d|generation|supports?|provides?|offers?|up to|claimed|all-?gather|sum of|8 gpus|combined"
)
_NAMED = re.compile(r"(?i)(?:nvlink|pci-?e|hbm|gddr|infiniband|memory)[\w. ]{0,12}\($")
_MEASURED = re.compile(r"(?i)measur|achiev|reach|moved|transferred|copied|\bgot|\bsaw|took|sustain|hits?\b|sees?\b")
_BW = ("alg(?:o|orithm)?", "bus")
_SHARE = re.compile(r"peak|of|util|effic|theor|line rate")
_PCIE = re.compile(r"(?i)pci-?e?(?:xpress)? ?(?:gen)? ?\.?(?P<g>[3-6])(?:\.0)?(?: ?[x×] ?(?P<n>\d+))?")


@dataclass(frozen=True)
class _Limit:
    """FLOP/s or bytes/s of `part`; `ways` 1 or 2 where it says so; `q` where the text states it."""

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


def _own(row: Row, q: Quantity) -> str:
    """The words of a figure: its column and row, or those of a sentence since the last figure."""
    if row.kind != "line":
        return f"{q.label} {row.label}"
    past = max((x.end for x in row.quantities if x.end <= q.start), default=0)
    before = re.split(r"[,;]| and ", row.text[past : q.start], maxsplit=1)[-1] if past else row.text[: q.start]
    return before + q.text + re.split(r"[.;,] | and | while | but |$", row.text[q.end : q.end + 36])[0]


def _is_limit(own: str) -> bool:
    return bool(_LIMIT.search(own)) and not _MEASURED.search(own)


def _ways(text: str) -> int:
    return 2 if _BOTH_WAYS.search(text) else 1 if _ONE_WAY.search(text) else 0


def limits(report: Report) -> Iterator[Finding]:
    """Every FLOP/s and GB/s against the one limit of its part that is stated, or that the name of its link means."""
    stated: list[_Limit] = []
    for row in report.lines_of_text:
        held = [(q, _own(row, q)) for q in row.of("rate", "bandwidth") if q.value.mid]
        said = [bool(_is_limit(own) or _NAMED.search(own[: own.find(q.text)]) or is_sheet(row, q)) for q, own in held]
        for (q, own), told in zip(held, said, strict=True):
            if (told or (any(said) and not _MEASURED.search(row.text))) and "spars" not in own:
                part = (
                    "/".join(facts(own).of("formats"))
                    if q.kind == "rate"
                    else _part(own) or _part(row.text) or "memory"
                )
                stated.append(_Limit(part, q.plain.mid, _ways(own), f"the {q.text} of line {q.line}", q))
    known = {id(limit.q) for limit in stated}
    for row in report.all_rows:
        yield from _bus(row)
        for q in (*row.of("rate", "bandwidth"), *_moved(row)):
            own = _own(row, q)
            if q.exact and q.value.mid and id(q) not in known and not _is_limit(own) and not _OTHER.search(own):
                yield from _above(report, row, q, own, stated)


def _beside(report: Report, limit: _Limit, q: Quantity) -> bool:
    return limit.q is not None and (len(report.lines) < 60 or abs(limit.q.line - q.line) < 30)


def _moved(row: Row) -> Iterator[Quantity]:
    """The bytes/s of a sentence's only bytes in a time that crosses a link: "26 GB … over PCIe 3.0 x16 in 0.9 s"."""
    held = [q for q in row.of("bytes") if q.exact]
    for t in row.of("time") if len(held) == 1 and row.kind == "line" else ():
        if _part(own := _own(row, t)) in ("PCIe", "NVLink") and re.search(r"(?i)\bin\b|tak|took", own) and t.exact:
            rate = held[0].value / t.value
            yield replace(t, kind="bandwidth", value=rate, text=f"{held[0].text} in {t.text}")


def _above(report: Report, row: Row, q: Quantity, own: str, stated: list[_Limit]) -> Iterator[Finding]:
    if q.kind == "rate":
        formats = "/".join(facts(own).of("formats") or row.stated("formats")[:1])
        held = [s for s in stated if s.q and s.q.kind == "rate" and s.part in (formats, "") and _beside(report, s, q)]
        part, ways = formats, 0
    else:
        near = _part(own)
        part, ways = near or _part(f"{row.lead} {row.headings}") or "memory", _ways(own) or _ways(row.lead)
        held = [s for s in stated if s.part == part and s.q and s.q.kind == "bandwidth" and _beside(report, s, q)]
        held = (
            held
            or [x for x in (_link(own, row), _link(f"{row.lead} {row.headings} {own}", row)) if x and x.part == part][
                :1
            ]
        )
    if len({(s.value, s.ways) for s in held}) > 1 and ways:
        held = [s for s in held if s.ways == ways]
    if not held:
        return
    limit = max(held, key=lambda s: s.value * 2 / (s.ways or 2))
    if limit.ways and part in ("NVLink", "PCIe"):
        limit = replace(limit, value=limit.value * (ways or 2) / limit.ways)
    told = part and (q.kind == "rate" or _part(own) == part) and (not limit.q or abs(limit.q.line - q.line) < 30)
    if q.value.lo > (8 if told else 3) * limit.value:  # of something else
        return
    several = max((1.0, *report.everything.of("gpus"))) if not q.per_device and not limit.ways else 1.0
    # Switches that add up lift the bus bandwidth of a collective.
    if q.value.lo > (1.15 if re.search(r"(?i)bus ?b", own) else 1.03) * limit.value * several:
        sure = (
            told
            and part != "network"
            and q.value.hi < 2.5 * limit.value
            and q.value.lo > (1.03 if part in ("NVLink", "PCIe") and ways else FAR) * limit.value
        )
        sure = sure and (ways != 0 and (not limit.q or limit.ways == ways) or part not in ("NVLink", "PCIe"))
        ask = "" if sure else ": is it of the same part?"
        verdict = QUESTION if not sure else INCONSISTENT if limit.q else IMPOSSIBLE
        message = f"{q.text} is more than {limit.text}, {si(limit.value, UNIT_OF[q.kind])}"
        yield finding(
            verdict,
            "link" if part in ("NVLink", "PCIe") else "limit",
            message + ask,
            q,
            *([limit.q] if limit.q else []),
        )
    p = row.only("percent")
    if (
        p
        and not limit.q
        and _SHARE.search(p.words)
        and not any((q.value / p.value).meets(limit.value * x, 0.06) for x in (1, 2, 0.5))
    ):
        message = f"{q.text} is {100 * q.value.mid / limit.value:.3g} % of {limit.text}, not {p.text}"
        yield finding(INCONSISTENT if _part(own) and ways else QUESTION, "link", message, q, p)


def _bus(row: Row) -> Iterator[Finding]:
    """Of all collectives all-reduce has the highest bus bandwidth: 2 (n − 1) / n times the algorithm's (nccl-tests)."""
    alg, bus = ([q for q in row.of("bandwidth") if re.search(rf"(?i){w} ?(?:bw|bandwidth)", q.words)] for w in _BW)
    if len(alg) == len(bus) == 1 and alg[0].value.mid and bus[0].value.lo > 2.02 * alg[0].value.hi:
        message = f"{bus[0].text} of bus bandwidth is more than twice the algorithm's {alg[0].text}"
        yield finding(INCONSISTENT, "bus bandwidth", message, bus[0], alg[0])


def _link(text: str, row: Row) -> _Limit | None:
    """The one link that a text names, and its bytes/s in both directions together."""
    pcie, nvlink = {(m["g"], m["n"]) for m in _PCIE.finditer(text)}, re.search(r"(?i)nvlink", text)
    pcie = {p for p in pcie if p[1]} or pcie  # "PCIe 4" above "PCIe 4.0 x8"
    if len(pcie) == 1 and not nvlink:
        generation, lanes = pcie.pop()
        name = f"PCIe {generation}.0 x{lanes or 16}"
        return _Limit("PCIe", 2 * PCIE_LANES[generation] * int(lanes or 16), 2, name)
    names = [part for device in row.devices for part in NVLINK if re.search(rf"\b{part}\b", device.name)]
    names += [
        part for part, g in (("V100", 2), ("A100", 3), ("H100", 4), ("B200", 5)) if re.search(rf"(?i)nvlink ?{g}", text)
    ]
    values = {NVLINK[part] for part in names}
    return (
        _Limit("NVLink", values.pop(), 2, f"{names[0]}'s NVLink") if nvlink and not pcie and len(values) == 1 else None
    )
