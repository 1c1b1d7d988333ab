"""PCIe and NVLink against their own peaks."""

import re
from collections.abc import Iterator

from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, Finding, finding, si
from expertile.audit.report import Report, Row
from expertile.audit.rules.peaks import NO_RUN_OF_ONE
from expertile.device import NVLINK, PCIE_LANES

_PCIE = re.compile(r"(?i)pci-?e?(?:xpress)? ?(?:gen)? ?\.?(?P<g>[3-6])(?:\.0)?(?: ?[x×] ?(?P<n>\d+))?")
_LINK = re.compile(r"(?i)pci-?e|nvlink")
_ONE_WAY = re.compile(
    r"(?i)h2d|d2h|host.to.device|device.to.host|unidirection|one[- ]way|"
    r"(?:per|one) direction|from (?:the )?host|(?:to|from) (?:the )?cpu|loading|upload|download|h->d|d->h|pinned"
)
# Figures of several links, of a switch, or of what a link carries by its data sheet.
_OTHER = re.compile(
    r"(?i)(?:alg|bus) ?bw|switch|all-?gather|ethernet|infiniband|\bib\b|\bnodes\b|inter-?node|total|system|domain|rack|"
    r"nvl\d|fabric|generation|supports?|provides?|offers?|up to|\b[48] gpus|aggregat|hbm|memory bandwidth|vram|d2d|"
    r"device to device|all-?reduce"
)
_MEASURED = re.compile(
    r"(?i)measur|achiev|reach|\brun|\bmov|transfer|cop[yi]|\bget|\bsee|tak|took|load|read|show|give|stream|\bat\b|\bis\b"
)
_BW = ("alg(?:o|orithm)?", "bus")
_SHARE = re.compile(r"peak|of|util|effic|theor|line rate")


def links(report: Report) -> Iterator[Finding]:
    """A link's GB/s above its limit, and shares of the limit; where the link stands lines above it asks."""
    for row in report.all_rows:
        past = 0
        yield from _bus(row)
        for q in row.of("bandwidth"):
            # Of several figures in a sentence, the words since the last one.
            own = f"{q.label} {row.label}"
            if row.kind == "line":
                own = row.text[past : q.end] + re.split(r"[.;] ", row.text[q.end : q.end + 32])[0]
            past, near = q.end, own if _LINK.search(own) else f"{row.lead} {row.headings} {own}"
            link = _link(near, row) or _link(f"{row.lead} {own}", row)
            between = re.search(r"(?i)gpu ?\d|p2p", own) and not re.search(r"(?i)nvlink", near)
            past_all = link and near is not own and q.value.lo > 6 * link[1]
            if (
                link is None
                or between
                or past_all
                or _OTHER.search(own)
                or NO_RUN_OF_ONE.search(q.words)
                or not q.exact
            ):
                continue
            # A paragraph speaks of many things.
            ran = _MEASURED.search(row.text)
            told = bool(_LINK.search(own) and (ran or row.of("time") or _ONE_WAY.search(own)))
            told |= bool(_ONE_WAY.search(own) and _LINK.search(row.lead) and ran)
            if report.blocks[row.block].kind == "prose" and row.kind == "line" and not told:
                continue
            name, both = link
            one_way = _ONE_WAY.search(near) and not re.search(r"(?i)bidi|both|duplex|together", own)
            limit, ways = (both / 2, "one direction") if one_way else (both, "both directions")
            p = row.only("percent")
            sure = near is own and one_way and name.startswith("PCIe")
            if q.value.lo > 1.03 * limit:
                ask = "" if sure else ": did it cross this link?"
                message = f"{q.text} is more than the {si(limit, 'B/s')} of {name}, {ways}{ask}"
                yield finding(IMPOSSIBLE if sure else QUESTION, "link", message, q)
            elif (
                p
                and q.exact
                and _SHARE.search(p.words)
                and not any((q.value / p.value).meets(x, 0.06) for x in (both, both / 2))
            ):
                one, two = (f"{100 * q.value.mid / x:.3g} %" for x in (both / 2, both))
                message = f"{q.text} is {one} of one direction of {name} and {two} of both, not {p.text}"
                yield finding(INCONSISTENT if sure else QUESTION, "link", message, q, p)


def _bus(row: Row) -> Iterator[Finding]:
    """Of all collectives all-reduce has the highest bus bandwidth: 2 (n − 1) / n times the algorithm's (nccl-tests)."""
    alg, bus = ([q for q in row.of("bandwidth") if re.search(rf"(?i){w} ?(?:bw|bandwidth)", q.words)] for w in _BW)
    if len(alg) == len(bus) == 1 and alg[0].value.mid and bus[0].value.lo > 2.02 * alg[0].value.hi:
        message = f"{bus[0].text} of bus bandwidth is more than twice the algorithm's {alg[0].text}"
        yield finding(INCONSISTENT, "bus bandwidth", message, bus[0], alg[0])


def _link(text: str, row: Row) -> tuple[str, float] | None:
    """The one link that a text names, and its bytes/s in both directions together."""
    pcie, nvlink = {(m["g"], m["n"]) for m in _PCIE.finditer(text)}, re.search(r"(?i)nvlink", text)
    if len(pcie) == 1 and not nvlink:
        generation, lanes = pcie.pop()
        return f"PCIe {generation}.0 x{lanes or 16}", 2 * PCIE_LANES[generation] * int(lanes or 16)
    names = [part for device in row.devices for part in NVLINK if re.search(rf"\b{part}\b", device.name)]
    names += [
        part for part, g in (("V100", 2), ("A100", 3), ("H100", 4), ("B200", 5)) if re.search(rf"(?i)nvlink ?{g}", text)
    ]
    limits = {NVLINK[part] for part in names}
    return (f"{names[0]}'s NVLink", limits.pop()) if nvlink and not pcie and len(limits) == 1 else None
