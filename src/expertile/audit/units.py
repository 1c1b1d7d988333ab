"""Units as reports write them, and the kind of quantity that each means."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from expertile.audit.pattern import regex

# Kinds of quantity and their dimensions. Those without are ratio, percent, other (a unit that no rule uses) and number
# (no unit at all). A kind that is not named here is spelled out: "B/param", "$/token".
_DIMENSIONS = (
    "time s, rate flop/s, bandwidth B/s, bytes B, flop flop, intensity flop/B, tokens_per_s token/s, "
    "items_per_s item/s, s_per_token s/token, s_per_item s/item, tokens token, items item, "
    "params param, power J/s, energy J, money $, cycles cycle, instructions insn, carbon gCO2"
)
DIMENSIONS = dict(pair.split() for pair in _DIMENSIONS.split(", "))
_KINDS = {dimension: kind for kind, dimension in DIMENSIONS.items()}
UNTYPED = ("ratio", "percent", "number", "other")
RATES, TIMES = ("rate", "bandwidth", "tokens_per_s", "items_per_s"), ("time", "s_per_token", "s_per_item")
TYPED = (TIMES[0], *RATES, *TIMES[1:], "bytes")
_TEN = {"": 1.0, "b": 1e9, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_TOKEN = r"(?:tokens?|toks?|tkns?|tk|words?)"
_WHICH = r"(?:input|output|prompt|generated|new|total|completion|training|decoded)"
_NOUNS = (
    ("sample", r"images?|imgs?|bilder|samples?|frames?|examples?|sentences?|records?|rows?"),
    ("request", r"requests?|reqs?|queries|query|prompts?|sequences?|seqs?"),
    ("element", r"keys|particles|pixels"),
    ("step", r"iterations?|iters?|its?|steps?|batch(?:es)?"),
)
_ITEM = "|".join(form for _, form in _NOUNS)
# "8x A100" counts, it compares nothing.
_NOT_RATIO = r"[AHBLVTP]\d|RTX|GTX|GH|GB|MI\d|NVIDIA|Tesla|AMD|GPU|CPU|node|larger than|Samsung|Intel|Micron|Xeon|EPYC"
_BOARD = r"(?:[AHBLV]\d{2,3}|MI\d{3})[A-Z]?"  # "1,200 H100 GPU-hours", "96 A100-days"
_SECONDS = (
    (1e-9, "ns nsec nsecond nanoseconds"),
    (1e-6, "us µs μs usec usecs usecond microseconds microsec"),
    (1e-3, "ms msec msecs msecond millisec millisecond milliseconds Milliseconds"),
    (1.0, "s sec secs second seconds Second Seconds"),
    (60.0, "min mins minute minutes"),
    (3600.0, "h hr hrs hour hours"),
    (86400.0, "day days"),
)
_TIMES = {name: seconds for seconds, names in _SECONDS for name in names.split()}
_TIME = "|".join(sorted(_TIMES, key=len, reverse=True))
# In order: the first that matches wins, so the longer forms stand first. Groups: p prefix, bin "i", b byte or bit.
_FORMS: tuple[tuple[str, str], ...] = (
    ("tokens_per_s", r"(?P<p>[kKM])? ?(?:t/s|TPS|tps)\b"),
    ("items_per_s", r"(?P<p>[kKM])? ?(?:fps|FPS|qps|QPS|rps|RPS|ips|IPS)\b"),
    (
        "rate",
        r"(?P<p>(?i:[kmgtpe]|kilo|mega|giga|tera|peta)) ?(?:(?i:fl|i)?[oO][pP][sS]?(?: ?/ ?| per )(?:s|sec|second)\b|"
        r"(?i:(?:fl|i)ops|ops|flopps)\b)",
    ),
    ("rate", r"(?P<p>[MGTP])(?i:f/s)\b"),
    ("bandwidth", r"(?P<p>[KMGTkmgt])(?P<bin>i)?(?P<b>[Bb])ps\b"),
    (
        "bandwidth",
        r"(?P<p>[GT])(?P<b>b)(?:it|E)?(?= ?-?(?:[Ee]thernet|[Ii]nfini[Bb]and|IB|NICs?|NDR|HDR|EDR|RoCE)\b|(?<=E)\b)",
    ),
    ("carbon", r"(?P<mass>kg|g|t) ?(?:of )?CO2(?:eq?)?\b|(?P<mass_per>kg|g)(?= ?(?:/ ?|per )kWh\b)"),
    ("B/param", r"(?P<bpw>bpw)\b"),
    ("gpu*s", rf"(?:(?:{_BOARD}[ -])?(?i:gpu)[ -]?|{_BOARD}[ -])(?P<t>h|hours?|hrs?|days?)\b"),
    ("flop", r"(?P<p>(?i:[kmgtpe])|)(?:FLOPs?|(?<=[kmgtpeKMGTPE])(?i:flop)|flops?(?= ?/ ?(?i:b|byte)))\b"),
    ("flop", r"(?P<p>)[Oo]ps?(?= ?/ ?(?i:b|byte)s?\b)"),
    ("flop", r"(?P<p>[kMGTP])(?P<mac>MACs?)\b"),
    ("bytes", r"(?P<p>[KMGTkmgt])(?P<bin>i)?(?P<b>B|bits?|b(?=\b)|[Bb]ytes?)\b"),
    ("bytes", r"(?P<p>)(?P<b>[Bb]ytes?|B(?=/s)|[Bb]its?(?= ?/ ?(?:param|weight|elem)| per (?:param|weight|elem)))\b"),
    ("tokens", rf"(?P<p>[kKMBT]|[mb](?=illion)|t(?=rillion))?(?:r?illion)? ?(?:{_WHICH} )?(?i:{_TOKEN})\b"),
    ("items", rf"(?P<p>[kKMGB])? ?(?P<noun>(?i:{_ITEM}))\b(?= ?(?:/|per)|(?<=s)\b(?<!its)(?<!rows)(?<!records))"),
    # Messages, Transfers, Games have no prefix.
    (
        "items",
        r"(?P<p>[kKMGT])(?!essage|rans|eys|ernel|ask|urn|ame|est|rie|ile|raph|roup|ove|odel)"
        r"(?P<noun>(?:[a-z]{4,10}|[LC]?UP)s?)(?= ?(?:/ ?|per )(?:s|sec|second)\b)",
    ),
    ("items_per_s", r"(?P<p>[kMGT])(?P<noun>(?:LU|CU|TE)P)S\b"),
    ("items", r"(?P<noun>[A-Za-z]{3,16})(?= ?(?:/ ?|per )(?:[num]?s|sec|second)\b)"),
    ("money", r"(?P<p>[kKM])(?:illion)? ?(?:USD|EUR|dollars?)\b|(?:USD|EUR)(?P<thousands>[kKMB])\b"),
    ("params", r"(?P<p>[BMTkKG])(?:illion)?\b(?! (?:IB|NDR|HDR|NICs?|RoCE)\b)(?: ?-?(?:param(?:eter)?s?|weights))?"),
    ("power", r"(?P<p>[mkM]|[Kk]ilo|[Mm]ega)?(?:W|[Ww]atts?)\b"),
    ("energy", r"(?P<p>[mkM]|[Kk]ilo|[Mm]ega)?(?:(?P<h>Wh|[Ww]att[- ]?hours?)|J|[Jj]oules?)\b"),
    ("money", r"(?i:USD|EUR|dollars?)\b"),
    ("cycle/s", r"(?P<p>[kMGT])Hz\b"),
    ("cycles", r"(?P<p>)(?:CPU |SM )?(?:cycles|clocks)\b"),
    ("instructions", r"(?P<p>)(?:instructions|insn)\b"),
    ("other", r"(?:Hz|°C|V|mm2|mm²|nm|dB|RPM|cents?)\b"),
    ("other", r"(?:clk|warps|threads|blocks|SMs?|cores|registers|layers|heads|epochs)\b"),
    ("time", rf"(?P<t>{_TIME})\b"),
    ("percent", r"%(?:[ -]points)?|percent(?:age points)?\b|pct\b"),
    (
        "ratio",
        rf"[x×X](?![\w(])(?! ?(?:\d|{_NOT_RATIO}))|"
        r"times (?=faster|slower|higher|lower|longer|shorter|more|less|fewer|the |as (?:fast|much|many|high|slow))|"
        r"-?fold\b(?!,? ?(?:cross|valid|cv|avg|mean|split|train))",
    ),
)
_COMPILED = tuple((kind, regex(form)) for kind, form in _FORMS)
_PER_DEVICE = regex(
    r"(?i) ?(?:/|per|for (?:each|every)|(?<=second) and) ?(?:gpu|gcd|device|chip|card|accelerator)\b"
    r"(?![ -]?h| and (?:per )?h)"
)
_PER = regex(
    rf"(?: ?/ ?| per | an? (?=hour|h\b|second|day|token|step|month|image|sample|request|sequence|frame)|-per-|"
    rf"(?<=[a-zB]) (?=GPU-h)|\*)(?:(?:optimizer|generated|training|1) ?)?(?:(?P<token>(?P<m>(?:1 ?)?[Mkm] ?|(?:million|"
    rf"1,?000|thousand) )?(?i:(?:{_WHICH} )?{_TOKEN}))|(?P<item>(?i:{_ITEM}|layer|epoch|call|launch|kernel|op|sweep|"
    rf"pass|run|generation))|(?P<gpu>(?i:gpu)(?: and (?:per )?|[ -]?))?(?P<s>{_TIME}|s\^?-1)|"
    rf"(?P<B>(?i:bytes?|B))|(?P<flop>(?i:flops?))|"
    rf"(?P<param>(?i:param(?:eter)?|weight|element)s?)|(?P<J>(?:J|[Jj]oules?|kWh))|(?P<W>(?:W|[Ww]atts?))|"
    rf"(?P<cycle>(?i:cycles?))|(?P<other>(?i:clk|clock|sm|block|thread|head|warp|core|node)))\b"
)
_AMOUNTS = DIMENSIONS.keys() - {"intensity", "items_per_s", "s_per_token", "s_per_item"}
_STATISTIC = r"(?:p\d\d|avg|mean|median|min|max|best|std|average|geomean|±.*|dense|fwd|bwd|total|"
_STATISTIC += r"processed|served|generated|completed|seen|sent)"
_THINGS = r"keys|points|cells|elems|elements|edges|particles|pixels|rays|updates|hashes|pairs|nodes"
_BARE = regex(
    rf"(?i)(?<!first[ _])\b(?!(?:step|iter|epoch|batch|image|sample|frame|request|query|prompt)[ _]s\b)"
    rf"([kmgt]i?b|[kmgtp]flops?|{_TOKEN}|{_ITEM}|[kmgt](?:{_THINGS}))[ _](?:per[ _])?s(?:ec(?:ond)?)?\b|"
    r"\b([a-z]{3,}s) per second$"
)
_GBS = regex(r"^([KMGT]i?B)s$|(?<=[a-z\d] )(?<!mem )(?<!memory )(?<!size )(?<!vram )(?i:([kmgt]i?b)s)$")
# "Generated tokens: 60000" counts them, "Max tokens: 512" does not.
_COUNT = regex(
    r"(?i)(?:^|(?<!max)[ _])\W*(?:(?:total|training|generated|new|completed|successful|processed|output|input|"
    r"prompt)[ _](?:\w+[ _])?(?:tokens|requests|images|samples|steps)(?:[ _](?:processed|served|generated|completed|"
    r"seen))?|(?:num[ _])?(?:requests|prompts)|(?:tokens|images|samples)[ _](?:processed|served|generated|seen|total))$"
)
_NUMBER_OF = regex(
    r"(?i)^\W*(?:total num(?:ber)? of|num(?:ber)? of(?=.*(?:ed|done|run)$)) "
    r"((?:event|transaction|operation|call|row|iteration|message|packet|frame|job|update|insert|read|write)s)\b"
)
_MONEY = regex(r"(?i)[$€]|\b(?:usd|eur|dollars?|cost|price)\b")
_MONEY_PER = regex(r"(?i)(?:/|\bper\b) ?((?:\d[\d,]* ?)?[\w -]*\w)")
# Names that mean a unit without naming it.
_MEANT = tuple(
    (regex(f"(?i){form}"), unit)
    for form, unit in (
        (r".*\bhourly\b", "USD/h"),
        (r"flop$", "FLOP"),
        (r"(?:(?:benchmark|total) )?(?:duration|elapsed(?: time)?)$", "s"),
        (r"\W*(?:(?:%|percent|pct) of\b|percentage$)", "%"),
        (r"(?:flops?|ops?) per b(?:yte)?$", "FLOP/B"),
        (r".*\boutput throughput$|avg ts$", "tokens/s"),  # of llama-bench
        (r"model size$", "bytes"),
        (r".*\b(request|token|image|sample)s? throughput$", r"\1s/s"),
        (r".*\b(?:size|length|message|msg|data)\b.*\(B\)$", "bytes"),
    )
)
# A share without a sign: "mfu: 0.42".


@lru_cache(maxsize=256)
def powers_of(kind: str) -> Counter[str]:
    """The powers of a kind's units: "B/param" -> {"B": 1, "param": -1}. A ratio has none."""
    powers = Counter[str]()
    for i, side in enumerate(DIMENSIONS.get(kind, kind).split("/") if kind not in UNTYPED else ()):
        for unit in filter(None, side.split("*")):
            powers[unit] += 1 - 2 * i
    return powers


def kind_of(powers: Counter[str]) -> str:
    """The kind whose units have these powers; "ratio" where they cancel."""
    sides = ("*".join(sorted(u for u, p in powers.items() for _ in range(sign * p))) for sign in (1, -1))
    text = "/".join(sides).rstrip("/")
    return _KINDS.get(text, text) or "ratio"


@lru_cache(maxsize=4096)
def product(a: str, b: str, sign: int = 1) -> str:
    """The kind of `a` × `b`, with `sign` -1 of `a` ÷ `b`."""
    powers = Counter(powers_of(a))
    for unit, power in powers_of(b).items():
        powers[unit] += sign * power
    return kind_of(powers)


@dataclass(frozen=True)
class Unit:
    """`low` and `high`: the SI value of one; they differ where a decimal and a binary prefix are both in use. `noun`:
    what items are, "sample", "request" or "step"."""

    kind: str
    low: float
    high: float
    per_device: bool = False
    noun: str = ""


NO_UNIT = Unit("number", 1.0, 1.0)


@lru_cache(maxsize=4096)
def match_unit(text: str) -> tuple[Unit, int] | None:
    """The unit that `text` begins with and how many characters it takes."""
    matches = ((kind, pattern.match(text)) for kind, pattern in _COMPILED)
    kind, m = next(((kind, m) for kind, m in matches if m), ("", None))
    if m is None or not m[0]:
        return None
    unit, end = _unit(kind, m.groupdict()), m.end()
    each = bool(of := _PER_DEVICE.match(text, end))
    end = of.end() if of else end
    while kind in _AMOUNTS and (of := _PER.match(text, end)) and (kind != "params" or of["s"]):
        (what, found) = next((g, v) for g, v in of.groupdict().items() if v and g not in ("m", "gpu"))
        by, end, noun = 1.0, of.end(), unit.noun
        if found == "kWh":
            by = 3.6e6
        elif what == "s":
            by = _TIMES.get(found, 1.0)
        elif what == "token":
            by = {"": 1.0, "k": 1e3, "1": 1e3, "t": 1e3}.get(
                (of["m"] or "").replace("1 ", "").replace("1k", "k")[:1], 1e6
            )
        elif what == "item":
            noun = _noun(found)
        per = {"W": "J/s", "s": "gpu*s" if of["gpu"] else "s"}.get(what, what)
        if unit.kind == "rate" and what in ("item", "token"):  # "8.2 GFLOPs per image" are work
            unit = Unit("flop", unit.low, unit.high)
        name = "other" if what == "other" else product(unit.kind, per, -1)
        each_item = unit.kind in ("bytes", "flop") and noun != "sample"
        name = unit.kind if what == "item" and (each_item or unit.kind == "items") else name
        unit = Unit(name, unit.low / by, unit.high / by, each, noun)
        # "Gb/s" and "Mbit/s" are bits in a network's words; "GB/s" are bytes. "gb/s" is how many write bytes.
        bits = m["b"] if kind == "bytes" else ""
        if name == "bandwidth" and (bits.startswith("bit") or (bits == "b" and (m["p"] or "").isupper())):
            unit = Unit(name, unit.low / 8, unit.low / 8, each)
        kind = name
        each |= bool(of := _PER_DEVICE.match(text, end))
        end = of.end() if of else end
    # "4 tokens/x" has a unit that is not known.
    if kind == unit.kind and kind in ("time", "bytes") and re.match(r" ?/ ?[A-Za-z]", text[end:]):
        return (Unit("other", 1.0, 1.0), end) if kind == "bytes" else None
    return Unit(unit.kind, unit.low, unit.high, each, unit.noun), end


def _noun(found: str) -> str:
    return next((noun for noun, form in _NOUNS if re.fullmatch(f"(?i:{form})", found)), "other")


def _unit(kind: str, groups: dict[str, str | None]) -> Unit:
    prefix = (groups.get("p") or groups.get("thousands") or "")[:1].lower()
    low = high = _TEN.get(prefix, 1.0) * (2 if groups.get("mac") else 1)
    if kind in ("bandwidth", "bytes"):
        two = 2.0 ** (10 * " kmgt".index(prefix or " "))
        low, high = (two if groups.get("bin") else low), two
        bits = kind == "bandwidth" and groups.get("b") == "b" and (groups.get("p") or "").isupper()
        bits |= not prefix and (groups.get("b") or "").lower().startswith("bit")
        low, high = (low / 8, low / 8) if bits else (low, high)
    elif kind in ("time", "gpu*s"):
        name = groups["t"] or "s"
        low = high = _TIMES.get(name, 86400.0)
    elif kind in ("power", "energy"):
        low = high = (1e-3 if groups["p"] == "m" else _TEN[prefix]) * (3600.0 if groups.get("h") else 1.0)
    elif kind == "percent":
        low = high = 0.01
    elif kind == "carbon":
        low = high = {"g": 1.0, "kg": 1e3, "t": 1e6}[groups["mass"] or groups["mass_per"] or ""]
    elif groups.get("bpw"):  # bits a weight
        low = high = 0.125
    return Unit(kind, low, high, False, _noun(groups.get("noun") or "") if groups.get("noun") else "")


def _averaged(unit: Unit, name: str) -> Unit:
    """Tokens that are an average are so many an item."""
    average = unit.kind == "tokens" and re.search(r"(?i)\b(?:avg|average|mean)\b", name)
    return replace(unit, kind="token/item") if average else unit


def _capital(m: re.Match[str]) -> str:
    return m[0].translate(str.maketrans("wj", "WJ"))


def unit_of_name(name: str) -> Unit | None:
    """The unit that a column's or key's name states: "Latency (ms)", "time_us", "TFLOPS", "GB/s [read]"."""
    if re.fullmatch(r"(?i)\W*mins?\W*", name):
        return None  # the least
    name = re.sub(r"(?<=[a-z])([ _])pro[ _](?=[A-Z])", r"\1per\1", name)  # "Bilder_pro_Joule"
    last = name.rpartition(" ")[2]
    if last != name and "_" in last and (inner_unit := unit_of_name(last)):  # of a record within a record
        return inner_unit
    if last != name and re.fullmatch(r"(?i)param(?:eter)?s|utili[sz]ation|ratio|count|share|efficiency", last):
        name = last  # "model_tflops utilisation"
    spaced = name.replace("_", " ")
    if _MONEY.search(spaced) and (per := _MONEY_PER.search(spaced)):  # "usd_per_million_output_tokens", "$/1M tokens"
        found = match_unit("USD per " + re.sub(r"(?i)\b(?:usd|eur|dollars?)\b", "", per[1]).strip())
        return found[0] if found and found[0].kind != "money" else None
    if meant := next((m.expand(unit) for form, unit in _MEANT if (m := form.match(spaced))), ""):
        return (match_unit(meant) or (None,))[0]
    if re.search(r"(?i)^(?!.*(?:%|\bpct|percent)).*\b[mh]fu\b", spaced):
        return Unit("percent", 1.0, 1.0)
    inner = re.findall(r"[(\[]([^()\[\]]*)[)\]]", name)
    for inside in (i for i in inner if i != "min" or len(inner) == 1):  # "FTL(min)(s)" is a least
        for piece in (inside, *inside.split(",")):
            text = re.sub(r"^[$€]", "USD", piece.strip().lstrip("~≈# "))
            found = match_unit(text)
            if found and found[1] >= len(text) - 2 and found[0].kind not in ("items", "params"):
                return _averaged(found[0], spaced)
    # "tokens_per_s", "gb_s" and "tok_s" are rates.
    bare = re.sub(r"[(\[][^()\[\]]*[)\]]", " ", name).replace("_", " ")
    bare = re.sub(r"^[$€]", "USD", re.sub(r" k?(?:w|j|wh)$", _capital, bare.strip()))
    outside = _GBS.sub(r"\1\2/s", _BARE.sub(lambda m: f"{m[1] or m[2]}/s", bare))
    if counted := _NUMBER_OF.search(spaced):
        return Unit("items", 1.0, 1.0, False, _noun(counted[1]))
    plain = re.sub(rf"(?i)(?:[\s,]+{_STATISTIC})+$", "", outside.strip())
    words = re.split(r"[\s,;:]+|-(?=[KMGTP](?:FLOPS|flops|B/s)$)", plain)
    # "MB moved", "ms total"
    first = match_unit(words[0]) if len(words) == 2 and words[1] not in ("per", "each", "of") else None
    last_unit = match_unit(words[1]) if first and first[0].kind == "bytes" and len(words) == 2 else None
    if last_unit and last_unit[0].kind == "bytes" and last_unit[1] == len(words[1]) > 1:
        return last_unit[0]  # "bytes_GB"
    whole = first and first[1] == len(words[0]) > 1 and words[0] not in ("min", "mins")
    if whole and first and first[0].kind in ("bytes", "time"):
        return first[0]
    for start in range(len(words)):
        if start and words[start - 1] == "per":
            if start + 1 < len(words) and re.fullmatch("(?i)gpu|device|card|chip|rank", words[start]):
                continue  # "power_per_gpu_w"
            own = match_unit(words[-1]) if words[0] in ("time", "latency", "mean", "avg") else None
            return own[0] if own and own[0].kind == "time" and start + 2 == len(words) else None  # else of what?
        tail = " ".join(words[start:])
        unit, length = match_unit(tail) or (NO_UNIT, 0)
        # One letter alone ("M", "B", "T") names a dimension; "h" and "s" after a word are units.
        if length == len(tail) > (0 if start and tail in ("s", "h", "w", "W", "J") else 1):
            known = unit.kind not in ("items", "params", "tokens") or _COUNT.search(name)
            return _averaged(unit, spaced) if known else None
        if unit.kind in ("rate", "bandwidth", "tokens_per_s"):
            return unit
    if re.search(r"(?<!\d)%", outside):
        return match_unit("%")[0]  # type: ignore[index]
    of = name.rpartition(" ")[0]  # "stages_ms resize"
    return unit_of_name(of) if re.fullmatch(r"\w+_(?:[mun]?s|[kmgt]i?b)", of) else None
