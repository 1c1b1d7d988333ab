"""Figures with units in running text, and what their printed digits allow.

Kinds and their SI units: "time" s, "flop_rate" FLOP/s, "flops" FLOP, "byte_rate" B/s, "bytes" B, "ratio" and
"percent" plain fractions (2x is 2, 50 % is 0.5), "token_rate" and "event_rate" 1/s, "intensity" FLOP/B.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from expertile.lab.audit.interval import Interval, printed

NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,2}(?!\d))?"

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "g": 1e9, "m": 1e6, "T": 1e12, "t": 1e12, "P": 1e15}
_TIME = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "usec": 1e-6, "microseconds": 1e-6, "microsecond": 1e-6,
    "ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3, "millisecond": 1e-3, "nanoseconds": 1e-9,
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "minutes": 60.0, "mins": 60.0,
    "h": 3600.0, "hours": 3600.0, "hour": 3600.0, "hrs": 3600.0, "gpu-hours": 3600.0, "gpu hours": 3600.0,
}  # fmt: skip

_UNITS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("flop_rate", re.compile(r"(?P<p>[kKMGTPgtp])(?:FLOPS|(?:FLOPs?|OPs?)(?:/s(?:ec(?:ond)?)?|ps?)|F/s|TOPS)\b", re.I)),
    ("flop_rate", re.compile(r"(?P<p>[KMGTP])(?:FLOPs|[Ff]lops|OPS|Ops|F)\b")),
    ("flops", re.compile(r"(?P<p>[KMGTP])(?:FLOP|flop)\b")),
    ("intensity", re.compile(r"(?:FLOPs?|ops?)\s?(?:/|per )\s?(?:bytes?|B)\b", re.I)),
    ("byte_rate", re.compile(r"(?P<p>[kKMGT])(?P<i>i?)B(?:ytes)?(?:/s(?:ec(?:ond)?)?|ps)\b")),
    ("byte_rate", re.compile(r"(?P<p>[kmgt])b/s(?:ec(?:ond)?)?\b")),
    ("bytes", re.compile(r"(?P<p>[kKMGT])(?P<i>i?)(?:B|bytes)\b(?!/)")),
    ("bytes", re.compile(r"bytes?\b(?!/)", re.I)),
    ("token_rate", re.compile(r"(?P<p>[kKM]?)\s?(?:tokens?|toks?|t)\s?(?:/\s?s(?:ec(?:ond)?)?\b|per second\b)", re.I)),
    ("event_rate", re.compile(
        r"(?P<p>[kKM]?)\s?(?:inf(?:erences?)?|req(?:uests?)?|samples?|images?|its?|iter(?:ations)?|calls?|steps?)"
        r"\s?(?:/\s?s(?:ec(?:ond)?)?\b|per second\b)", re.I)),
    ("time", re.compile(
        r"(?:" + "|".join(sorted(map(re.escape, _TIME), key=len, reverse=True)) + r")\b", re.I)),
    ("percent", re.compile(r"%")),
)  # fmt: skip
_TIMES = re.compile(
    r"[x×](?![\w×(\[])(?!\s\d[\d.,]*\s*[µμmun]?s\b)(?!\s(?:NVIDIA\s)?(?:RTX|GTX|[AHBLVTP]\d{2,3}|MI\d{3}|GPUs?)\b)",
    re.I,
)
_SPACED_TIMES = re.compile(
    r"\s[x×](?=\s*(?:$|[),;|.]|faster|slower|speed|improve|higher|lower|better|smaller|less|more))"
)
_APPROXIMATE = re.compile(
    r"(?:~|≈|∼|\babout|\baround|\bapprox(?:imately|\.)?|\broughly|\bnearly|\balmost|\bca\.?)\s*$", re.I
)
_BELOW = re.compile(r"(?:<|≤|&lt;|\bunder|\bbelow|\bless than|\bat most)\s*=?\s*$", re.I)
_ABOVE = re.compile(r"(?:>|≥|&gt;|\bover|\babove|\bmore than|\bat least|\bexceed(?:s|ing)?)\s*=?\s*$", re.I)
_UP_TO = re.compile(r"\bup to\s*$", re.I)
_FIRST = re.compile(rf"(?<![\w.,])(?<!\w-)(?P<sign>(?<![\w)])[-+−])?(?P<a>{NUMBER})")
_JOIN = re.compile(rf"\s*(?:-|–|—|~|\bto\b)\s*(?P<b>{NUMBER})")


@dataclass(frozen=True)
class Quantity:
    """One figure as printed. `interval` is in SI units of `kind`; `high` is set for a range ("1.3-1.5x")."""

    kind: str
    text: str
    interval: Interval
    scale: float
    start: int
    end: int
    approximate: bool = False
    bound: str = ""  # "<", ">" or "up to"
    high: Interval | None = None
    binary_prefix: bool = False  # GB that may have meant GiB
    value_si: float = 0.0

    @property
    def value(self) -> float:
        """The printed number in SI units."""
        return self.value_si

    @property
    def readings(self) -> tuple[Interval, ...]:
        """The interval, and again with binary prefixes where "GB" may have meant GiB."""
        if not self.binary_prefix:
            return (self.interval,)
        ratio = (1.024) ** round(math.log10(self.scale) / 3)
        return (self.interval, self.interval * ratio)

    @property
    def span(self) -> Interval:
        """From the low end of a range to its high end."""
        return self.interval if self.high is None else Interval(self.interval.lo, self.high.hi)


def unit_at(text: str, position: int) -> tuple[str, float, bool, int] | None:
    """The unit that starts at `position`: (kind, SI scale, prefix may be binary, end), or None."""
    match = _TIMES.match(text, position)
    if match:
        return "ratio", 1.0, False, match.end()
    for kind, pattern in _UNITS:
        match = pattern.match(text, position)
        if not match:
            continue
        groups = match.groupdict()
        if match[0] in ("S", "H"):  # "B=4 H=32 S=8192" gives heads and a length, not hours and seconds
            return None
        if kind == "time":
            return kind, _time_scale(match[0]), False, match.end()
        if kind == "percent":
            return kind, 0.01, False, match.end()
        prefix = groups.get("p") or ""
        scale = _PREFIX.get(prefix, _PREFIX.get(prefix.upper(), 1.0))
        if groups.get("i"):
            scale = 1024.0 ** (round(math.log10(scale) / 3)) if scale > 1 else 1.0
        return kind, scale, kind == "bytes" and scale > 1 and not groups.get("i"), match.end()
    return None


def _time_scale(unit: str) -> float:
    return _TIME.get(unit) or _TIME[unit.lower()]


def find_quantities(text: str) -> list[Quantity]:
    """Every figure with a unit in `text`, in order. Parts of shapes ("128x128") and of names ("SXM2-32GB") are none."""
    found: list[Quantity] = []
    position = 0
    while match := _FIRST.search(text, position):
        position = match.end()
        quantity = _read(text, match)
        if quantity is not None:
            found.append(quantity)
            position = quantity.end
    return found


def _read(text: str, match: re.Match[str]) -> Quantity | None:
    before = text[: match.start()]
    end = match.end("a")
    unit = _unit_after(text, end)
    after_unit = unit[3] if unit else end
    joined = _JOIN.match(text, after_unit)
    high: Interval | None = None
    if joined and not re.search(r"\bfrom\s+[~≈]?$", before, re.I):
        second = _unit_after(text, joined.end())
        same = second and (unit is None or unit[:2] == second[:2])
        if second and same and printed(joined["b"]).mid > printed(match["a"]).mid:
            unit = second
            high = printed(joined["b"]) * second[1]
    elif joined and unit is None:  # "from 5 to 3 ms": the first figure borrows the unit of the second
        second = _unit_after(text, joined.end())
        if second:
            unit = (*second[:3], end)
    if unit is None:
        return None
    kind, scale, binary, unit_end = unit
    if text[unit_end : unit_end + 1] == "+":  # "2-4x+", "50GB+"
        unit_end += 1
        above = True
    else:
        above = bool(_ABOVE.search(before))
    approximate = bool(_APPROXIMATE.search(before)) or match["a"].startswith("~")
    value = float(match["a"].replace(",", "")) * scale
    interval = printed(match["a"], approximate) * scale
    if approximate and high is not None:
        high = high.widened(0.1)
    if match["sign"] in ("-", "−"):
        value, interval = -value, Interval(-interval.hi, -interval.lo)
    bound = ""
    if _BELOW.search(before):
        bound, interval = "<", Interval(min(0.0, interval.lo), interval.hi)
    elif above and high is None:
        bound, interval = ">", Interval(interval.lo, math.inf)
    elif _UP_TO.search(before):
        bound = "up to"
    return Quantity(
        kind, text[match.start() : unit_end], interval, scale, match.start(), unit_end, approximate, bound, high,
        binary, value,
    )  # fmt: skip


def _unit_after(text: str, end: int) -> tuple[str, float, bool, int] | None:
    direct = unit_at(text, end)
    if direct:
        return direct
    spaced = _SPACED_TIMES.match(text, end)
    if spaced:
        return "ratio", 1.0, False, spaced.end()
    gap = re.match(r"[ \u00a0\u202f]{1,2}|-(?=[a-zµμ])", text[end:])
    if not gap:
        return None
    unit = unit_at(text, end + gap.end())
    return None if unit is None or unit[0] == "ratio" else unit


def plain_number(text: str) -> re.Match[str] | None:
    """The first number of a table cell, with or without a unit; None if the cell starts with something else.

    "2^10", "511.5K", "12×16" and "v2.1" are no plain numbers.
    """
    return re.match(
        rf"\s*(?P<approx>[~≈<>≤≥])?\s*(?P<sign>[-+−])?(?P<a>{NUMBER})(?!\s?\^|[²³]|\s?[x×*]\s?\d"
        r"|[KMGTkBb](?![A-Za-z/])|/\d|[:.]\d|\d)",
        text,
    )


def with_unit(text: str, kind: str, scale: float) -> Quantity | None:
    """A table cell's leading number, read in the unit that its column header gives."""
    match = plain_number(text)
    if not match:
        return None
    approximate = match["approx"] in ("~", "≈")
    value = float(match["a"].replace(",", "")) * scale
    interval = printed(match["a"], approximate) * scale
    if match["sign"] in ("-", "−"):
        value, interval = -value, Interval(-interval.hi, -interval.lo)
    binary = kind == "bytes" and scale >= 1e3 and math.log10(scale).is_integer()
    return Quantity(
        kind, match[0].strip(), interval, scale, match.start("a"), match.end("a"), approximate, "", None, binary, value
    )


_SHOWN = {
    "time": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "flop_rate": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1.0, "FLOP/s")),
    "flops": ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP")),
    "byte_rate": ((1e9, "GB/s"), (1e6, "MB/s"), (1.0, "B/s")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "token_rate": ((1.0, "tokens/s"),),
    "event_rate": ((1.0, "/s"),),
    "intensity": ((1.0, "FLOP/B"),),
    "ratio": ((1.0, "x"),),
    "percent": ((0.01, "%"),),
}


def show(kind: str, value: float) -> str:
    """`value` (SI) with four significant digits and a fitting unit: show("time", 2.1e-4) is "210 µs"."""
    if kind not in _SHOWN:
        return _digits(value)
    scale, unit = next((s for s in _SHOWN[kind] if abs(value) >= s[0]), _SHOWN[kind][-1])
    space = "" if unit == "x" else " "
    return f"{_digits(value / scale)}{space}{unit}"


def _digits(value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3e}"
    text = f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}" if value else "0"
    return text.rstrip("0").rstrip(".") if "." in text else text
