"""Units as reports write them, and the kind of quantity that each means."""

import re
from dataclasses import dataclass
from functools import lru_cache

# Kinds: time (s), rate (FLOP/s), bandwidth (B/s), bytes, tokens_per_s, items_per_s, s_per_token, ratio, percent, count,
# flop, other (a unit that no rule uses), number (no unit at all).
_TEN = {"": 1.0, "b": 1e9, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_TWO = {"": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40, "p": 2.0**50, "e": 2.0**60}
_PER_S = r"(?:/ ?(?:s|sec|second)s?\b|ps\b| per (?:s|sec|second)\b|\*s\^?-1)"
_TOKEN = r"(?:tokens?|toks?|tkns?|tk|words?)"
_ITEM = (
    r"(?:images?|imgs?|samples?|sequences?|seqs?|requests?|reqs?|iterations?|iters?|its?|steps?|frames?|examples?|"
    r"queries|prompts?|batch(?:es)?|sentences?|records?|rows?)"
)
# "8x A100" counts, it compares nothing.
_NOT_RATIO = r"[AHBLVTP]\d|RTX|GTX|GH|GB|MI\d|NVIDIA|Tesla|AMD|GPU|CPU|node|larger than"
_SECONDS = (
    (1e-9, "ns nsec nanoseconds"),
    (1e-6, "us µs μs usec usecs microseconds microsec"),
    (1e-3, "ms msec msecs millisec millisecond milliseconds"),
    (1.0, "s sec secs second seconds"),
    (60.0, "min mins minute minutes"),
    (3600.0, "h hr hrs hour hours"),
)
_TIMES = {name: seconds for seconds, names in _SECONDS for name in names.split()}
_TIME = "|".join(sorted(_TIMES, key=len, reverse=True))


@dataclass(frozen=True)
class Unit:
    """`low` and `high`: the SI value of one; they differ where a decimal and a binary prefix are both in use."""

    kind: str
    low: float
    high: float
    per_device: bool = False


NO_UNIT = Unit("number", 1.0, 1.0)
# In order: the first that matches wins, so the longer forms stand first.
_FORMS: tuple[tuple[str, str], ...] = (
    ("s_per_token", rf"(?P<t>{_TIME}) ?(?:/|per) ?(?i:output |generated )?(?i:{_TOKEN})\b"),
    ("tokens_per_s", rf"(?P<p>[kKM])? ?(?:(?i:{_TOKEN}) ?{_PER_S}|(?:t/s|TPS|tps|toks/s)\b)"),
    ("items_per_s", rf"(?P<p>[kKM])? ?(?:(?i:{_ITEM})(?= ?{_PER_S})|(?:fps|FPS|qps|QPS|rps|RPS)\b)(?: ?{_PER_S})?"),
    ("items_per_s", rf"(?:(?i:{_ITEM})) ?(?:/|per) ?(?P<t>min(?:ute)?|h(?:our)?)\b"),
    ("s_per_item", rf"(?P<t>{_TIME}) ?(?:/|per) ?(?:(?i:{_ITEM})|prompt|layer|epoch|call|launch|kernel|op)\b"),
    (
        "rate",
        r"(?P<p>(?i:[kmgtpe]|kilo|mega|giga|tera|peta)) ?(?i:(?:fl|i)ops?|ops|op(?=/))"
        r"(?: ?/ ?(?:s|sec|second)|ps| per second)?\b(?!/(?!(?i:gpu|gcd|device|chip|card)))",
    ),
    ("rate", r"(?P<p>[MGTP])(?i:f/s|flop/s)\b"),
    ("bandwidth", rf"(?P<p>[KMGTkmgt])(?P<bin>i)?(?P<b>[Bb](?:ytes?)?|its?) ?{_PER_S}"),
    ("bandwidth", r"(?P<b>[Bb]ytes?) ?(?:/ ?(?:s|sec|second)\b| per second\b)"),
    ("other", r"(?:[KMGT]i?)?[Bb](?:ytes)?/(?:clk|clock|cycle|SM|FLOP|flop|token|param(?:eter)?|weight|element)\b"),
    ("other", r"(?i:ops?|flops?)/(?i:byte|b|clk|clock|cycle)s?\b"),
    ("bytes", r"(?P<p>[KMGTkmgt])(?P<bin>i)?(?P<b>B|b(?=\b)|[Bb]ytes?)\b"),
    ("bytes", r"(?P<p>)(?P<b>[Bb]ytes?)\b"),
    ("tokens", rf"(?P<p>[kKMBT]|[mbt](?=illion))(?:illion)? ?(?i:{_TOKEN})\b"),
    ("params", r"(?P<p>[BMTkKG])(?:illion)?\b(?: ?-?(?:param(?:eter)?s?|weights))?"),
    ("other", r"(?:[kMGT]?Hz|mW|kW|W|Watts?|kWh|Wh|J|mJ|°C|V|mm2|mm²|nm|dB|RPM|USD|EUR|cents?)\b"),
    ("other", r"(?:cycles|clocks|clk|instructions|warps|threads|blocks|SMs?|cores|registers|layers|heads|epochs)\b"),
    ("time", rf"(?P<t>{_TIME})\b(?! ?/ ?[A-Za-z])"),
    ("percent", r"%|percent\b|pct\b"),
    (
        "ratio",
        rf"[x×X](?![\w(])(?! ?(?:\d|{_NOT_RATIO}))|times (?=faster|slower|higher|lower|more|less|fewer|the )|-?fold\b",
    ),
    ("tokens", rf"(?P<p>[kKM])? ?(?i:{_TOKEN})\b"),
    ("items", r"(?:(?i:images?|imgs?|samples?|sequences?|requests?|prompts?|runs))\b"),
)
_COMPILED = tuple((kind, re.compile(form)) for kind, form in _FORMS)
_PER_DEVICE = re.compile(r"(?i) ?(?:/|per) ?(?:gpu|gcd|device|chip|card)\b")


@lru_cache(maxsize=4096)
def match_unit(text: str) -> tuple[Unit, int] | None:
    """The unit that `text` begins with and how many characters it takes."""
    matches = ((kind, pattern.match(text)) for kind, pattern in _COMPILED)
    kind, m = next(((kind, m) for kind, m in matches if m), ("", None))
    if m is None:
        return None
    each = _PER_DEVICE.match(text, m.end())
    return _unit(kind, m.groupdict(), bool(each)), (each or m).end()


def _unit(kind: str, groups: dict[str, str | None], each: bool) -> Unit:
    prefix = (groups.get("p") or "")[:1].lower()
    low = high = _TEN.get(prefix, 1.0)
    if kind in ("bandwidth", "bytes"):
        low, high = (_TWO[prefix], _TWO[prefix]) if groups.get("bin") else (_TEN[prefix], _TWO[prefix])
        name = groups.get("b") or "B"
        # "Gbps" and "Gb/s" are bits in a network's words; "GB/s" are bytes. "gb/s" is how many write bytes.
        if kind == "bandwidth" and (name.startswith("it") or (name == "b" and (groups.get("p") or "").isupper())):
            low, high = low / 8, high / 8
    elif kind in ("time", "s_per_token", "s_per_item"):
        low = high = _TIMES[groups["t"] or "s"]
    elif kind == "items_per_s" and groups.get("t"):
        low = high = 1 / (60.0 if (groups["t"] or "").startswith("min") else 3600.0)
    elif kind == "percent":
        low = high = 0.01
    return Unit(kind, low, high, each)


_STATISTIC = r"(?:p\d\d|avg|mean|median|min|max|best|std|average|geomean|±.*|dense|fwd|bwd|total)"
_BARE = re.compile(rf"(?i)\b([kmgt]b|{_TOKEN}|{_ITEM})[ _](?:per[ _])?s(?:ec(?:ond)?)?\b")

_GBS = re.compile(r"(?i)(?:(?<=bandwidth[ _])|(?<=bw[ _]))([kmgt]i?b)s\b")


def unit_of_name(name: str) -> Unit | None:
    """The unit that a column's or key's name states: "Latency (ms)", "time_us", "TFLOPS", "GB/s [read]"."""
    for inside in re.findall(r"[(\[]([^()\[\]]*)[)\]]", name):
        for piece in (inside, *inside.split(",")):
            found = match_unit(piece.strip().lstrip("~≈# "))
            if found and found[1] >= len(piece.strip()) - 2 and found[0].kind not in ("items", "params"):
                return found[0]
    if re.search(r"(?i)\b(?:size|length|message|msg|data)\b.*\(B\)$", name):
        return match_unit("bytes")[0]  # type: ignore[index]
    # "tokens_per_s", "gb_s" and "tok_s" are rates.
    bare = re.sub(r"[(\[][^()\[\]]*[)\]]", " ", name).replace("_", " ")
    outside = _GBS.sub(r"\1/s", _BARE.sub(r"\1/s", bare))
    plain = re.sub(rf"(?i)(?:[\s,]+{_STATISTIC})+$", "", outside.strip())
    words = re.split(r"[\s,;:]+", plain)
    # "MB moved", "ms total"
    first = match_unit(words[0]) if len(words) == 2 and words[1] not in ("per", "each", "of") else None
    if (
        first
        and first[1] == len(words[0]) > 1
        and first[0].kind in ("bytes", "time")
        and words[0] not in ("min", "mins")
    ):
        return first[0]
    for start in range(len(words)):
        tail = " ".join(words[start:])
        unit, length = match_unit(tail) or (NO_UNIT, 0)
        # One letter alone ("M", "B", "T") names a dimension; "h" and "s" after a word are units.
        if length == len(tail) > (0 if start and tail in "sh" else 1):
            return unit if unit.kind not in ("items", "params", "tokens") else None
        if unit.kind in ("rate", "bandwidth", "tokens_per_s"):
            return unit
    return match_unit("%")[0] if "%" in outside else None  # type: ignore[index]
