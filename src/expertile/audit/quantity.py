"""Typed quantities in a line of text: value, unit, precision as printed, and the words around them."""

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from expertile.audit.interval import NUMBER, Interval, exact, printed
from expertile.audit.pattern import regex
from expertile.audit.units import NO_UNIT, RATES, Unit, match_unit, product, unit_of_name

_ABOUT = regex(r"(?i)(?:~|≈|∼|about|around|roughly|approx(?:imately|\.)?|nearly|almost|circa|ca\.|some) ?[(*]*$")
_BOUND = regex(
    r"(?i)(?:(?<![-=])>|<|≥|≤|(?<!add )(?<!adds )up to|over|more than|at least|less than|under|below|above|"
    r"exceed(?:s|ing)?|as (?:much|little|low|high) as|at most|\bnot (?:just |only |even |quite |\w+ly )?(?:by |the )?|"
    r"beyond|max(?:imum)?(?: of|[a-z ]+ for)?|within|(?:cannot|can't|never) (?:be |run |take )?(?:faster|shorter|less|"
    r"lower) than|(?<!token )\bevery|\beach|±|\+/?-|\+-) ?=? ?[(*]*$"
)
_FIGURE = regex(
    rf"(?<![\w.^])(?<!\d[-–,])(?:(?<![A-Za-z][-/])|(?<=B/)(?=\d+ ?ms))"
    rf"(?!0\d)(?P<a>[-+−]?{NUMBER})(?P<range>(?P<k>[kKM]?) ?(?:-|–|—|to|"
    rf"\.\.\.?) ?(?P<b>{NUMBER})(?=(?P=k)))?(?: ?(?:±|\+/?-|\\pm) ?{NUMBER})?"
)
_LATEX = regex(r"\\(?:text|mathrm|textbf|mathbf|mathit|operatorname)\{([^{}]*)\}")
_SYMBOLS = (
    *(("\\times", "×"), ("\\%", "%"), ("\\mu", "µ"), ("\\approx", "≈"), ("\\sim", "~"), ("\\cdot", "·")),
    *((space, " ") for space in ("\\,", "\\;", "\\ ", "&nbsp;", "\u00a0", "\u202f")),
)
_MARKS = regex(r"\*\*|__|`|\$+|</?[a-zA-Z][^<>]*>|!?\[(?=[^\]]*\]\()|\]\((?:[^()]*)\)")
# A dollar before a figure that no dollar ends as LaTeX would.
_PRICE = regex(
    r"\$ (?=\d[\d.,]*/)|\\?\$(?=\d[\d.,]*)(?![^$\n]*[^\s$|(]\$(?!\d))|\$(?= ?(?:/|per ))(?![^$\n]*\$)|(?<=\()\$(?=\))"
)
_GLOSSARY = (
    "ms: 毫秒; us: 微秒; s: 秒; hours: 小时; minutes: 分钟; per million: 每百万; per second: 每秒; "
    "per GPU: 每卡 单卡 每张卡; step: 每步; per: 每个 每; GPUs: 张卡 卡; x: 张 倍; is: 为; from: 从; "
    "to: 到 降至 提升到; improved by: 提升 提高; reduced by: 降低 减少; increased by: 增加; faster: 快; "
    "speedup: 加速比 加速; latency: 延迟; time: 耗时 时间; throughput: 吞吐量 吞吐; bandwidth: 带宽; "
    "memory: 显存 内存; peak: 峰值; theoretical: 理论; utilization: 利用率; batch size: 批大小 批次大小; "
    "sequence length: 序列长度; parameters: 参数量 参数; model: 模型; one-way: 单向; both directions: 双向; "
    "average: 平均; total: 总计 合计 总 共; share of: 占; compared to: 相比; vs: 比; dense: 稠密; sparse: 稀疏; "
    "i.e.: 即; about: 约; quantized: 量化; weights: 权重; measured: 测得; reached: 达到; single stream: 单流; "
    "requests: 请求; USD: 美元; cost: 成本; saved: 节省 节约; thus: 则"
)
_CHINESE = {zh: en for part in _GLOSSARY.split("; ") for en, _, of in [part.partition(": ")] for zh in of.split()}
_TIMES = {"doubl": "improved 2.0x", "tripl": "improved 3.0x", "quadrupl": "improved 4.0x", "halv": "reduced 2.0x"}
_TIMES_WORD = regex(rf"\b({'|'.join(_TIMES)})(?:e[ds]|ing)\b(?=(?: [a-z]+){{0,4}} from \d)")
_SPANS = ("day o", "hour o", "week o", "month o")
_ONE_OF = regex(r"(?<![\d.] )\b(?:[Aa]n?|[Oo]ne) (?=(?:day|hour|week|month) (?:of|on)\b)")
# "train_runtime = 1:25:12.40"
_CLOCK = regex(r"(?i)((?:runtime|duration|elapsed|wall[ _-]?time)[ _a-z]*[:=] *)(\d+):(\d\d):(\d\d(?:\.\d+)?)\b")
_PERCENTILE = regex(  # "percentile (99)", "p(90)=71ms", MLPerf's "99.00 percentile latency (ns)"
    r"\b(?:[Pp]ercentile ?|p(?=\(\d+\)=))\((?P<a>\d\d(?:\.\d+)?) ?%?\)|^ *(?P<b>\d\d\.\d)\d* percentile(?= [a-z])"
)
_HAN = regex("[\u3000-\u9fff\uff00-\uffef]")
_CHINESE_TERM = regex("|".join(sorted(_CHINESE, key=len, reverse=True)))
_WIDE = str.maketrans(
    {"。": ". ", "、": ", ", **{chr(c): chr(c - 0xFEE0) + " " * (chr(c) in ",:;)") for c in range(0xFF01, 0xFF5F)}}
)
_HYPHENED = regex(r"(?:hour|minute|second|day|token)(?= \w)")  # "a 6-hour run"
_KEY = regex(
    r"(?:^|[,;|(\[{:]|\s{2,}|\. |\t)\s*(?P<key>[A-Za-z%#][^:=|,;{}]{0,58}?)\s*(?:[:=]+>?|(?<=\w)  )\s*[(\[~≈€\"']*$"
)
# What shows that a figure without a unit is a part of something else.
_IN_TEXT, _IN_CELL = (
    regex(r" ?[x×*·] ?[\dA-Z]| ?[*·] ?[a-z]|[-/:]\d|\w"),
    regex(r"\s?[x×*/:]\s*\d|-\d|\w|\s\w{2}|\s?[*×·]\s*[A-Za-z(]"),
)
_AT_PRICE = regex(r"\W*(?:at|@|[x×*])(?: the| a)?(?: price| rate)?(?: of)?\W*€?")  # "9,216 GPU-hours at $2.10"
_BLANK, _MARKS_ONLY = regex(r"\s{3,}"), regex(r"[~≈<>≥≤(€\s]*")
_FACTOR = regex(r"[\d)] ?[×*/·] ?\(?$|[\d)] x $")
_TIMES_OVER = regex(r"(?<![\d.,×*x] )(?<![\w.,×*])(\d{1,2}) ?[x×] ?$")
_FACTOR_OF = regex(
    r"(?i)(?:(?:speed-?up|factor)(?: factor)? (?:of|is|was)|geo(?:metric )?-?mean(?: of| is|,|:)?|"
    r"mean (?:of|over) (?:the |all )?(?:\w+ )?speed-?ups(?: (?:of|over|on|across) [\w ]{3,24})? (?:is|was)) "
    r"(?:about )?\W*$"
)
_LIST = regex(
    rf"(?<![\w.])(?:(?:{NUMBER}, ?)+{NUMBER},? (?:and|or) |{NUMBER} (?:and|vs\.?|versus|against|instead of|→|->) |"
    rf"(?:{NUMBER} ?/ ?){{2,}})$"
)
_TRAILING_KEY = regex(
    r"(?P<key>[A-Za-z_][\w./%-]*)\s*[:=]\s*[(\[~≈\"']*$|"
    r"(?P<rate>\b[A-Za-z]+/s(?:ec)?(?:(?:/| per )(?i:gpu|device|rank))?|\b[a-z]+(?:_[a-z]+)+(?:\([\w/%]+\))?) $"
)
_OF_MANY = regex(r"(?i)(?:\bcost|price|\$|€|usd|energy|joules)\W{0,2} (?:/|per) ?$")  # "cost per 1M tokens: $0.63"
_AND = regex(r"(?: \([^()\d]*\))?,? and ")  # "at least 54 ms (A) and 27 ms (B)"
_TO = regex(r" ?(?:to|→|->|vs\.?|instead of|against|and|or) ?(?:about |~)?")
_PER = regex(
    r"(?i)(?:\bper|\b(?:for )?(?:each|every|one|a single|a(?= million| token)))[ -](?P<million>million |1 ?M |1?[MK] |"
    r"thousand )?(?:(?P<device>gpu|device|card|chip)|(?:(?:output|generated|input|training) )?(?P<noun>token|image|"
    r"frame|request|query|prompt|sample|step|hour)s?)\b(?:(?! and )[^.,;\d]|(?<=[A-Za-z-])\d+(?:\.\d+)?B?\b){0,40}$"
)
_BOARD = regex(r"\b(?:[AVHBLTP]\d{2,4}|RTX \w+|\d{4}(?: Ti| Super)?|MI\d+\w?)(?:[ -]?(?:SXM\d?|PCI[Ee]|NVL))?[ (-]*$")
_RANKED = regex(
    rf"(?i)\b(min|max|mean|median|avg|p\d\d)[ :=]+({NUMBER})(?![\w.%]| ?[a-zA-Zµ]{{1,3}}\b(?! ?{NUMBER}))(?=[\s,;)]|$)"
)
_BARE_EACH = regex(rf"(?i)\b(or|i\.e\.|that is|so|=|,) ({NUMBER}) (?=(?:per|for each|for every|a) [a-z]{{3,}}\b)")
_STATISTIC = regex(
    r"\b(?:avg|average|mean|median|min(?:imum)?|max(?:imum)?|best|worst|p\d\d|\d\d(?:\.\d+)?th|std|first|last|peak)\b|"
    r"\b\d\d(?:\.\d+)? ?%"
)
RATIO = regex(
    r"(?i)speed-?\s?up|\bratio\b|\brelative\b|\brel\b|slow-?\s?down|improvement|\bgain\b|faster|\bvs\.?\b|\bfactor\b|"
    r"normalized|\w ?/ ?(?!(?i:gpus?|device|card|sm|block|cta|warp|wave|thread|core|node|rank|user|request|req|token|"
    r"row|element|item|expert|head|layer|step|iter|call|epoch|s|sec|second)\b)\w|[x×] (?:baseline|over\b)"
)
_PER_STEP = regex(
    r"(?i)(?<![a-z])(?:step|iter(?:ation)?)[ _]time(?![a-z])|(?<![a-z])time[ _/]+(?:per[ _])?(?:step|iter)"
)
PER_TOKEN = regex(r"(?i)(?<![a-z])(?:tpot|itl|inter-?token|per[ _-](?:output[ _-])?token)(?![a-z])")


@dataclass(frozen=True)
class Quantity:
    """`value` in SI units (FLOP/s, bytes/s, s; percent as a share). `label` are the words before, `after` those behind.

    `exact` is False for "up to 3x", "> 100 GB/s", "about 4 ms" and for ranges: such a figure equals nothing.
    """

    kind: str
    value: Interval
    text: str
    label: str
    line: int
    after: str = ""
    column: int = -1
    exact: bool = True
    per_device: bool = False
    start: int = 0
    end: int = 0
    noun: str = ""

    @property
    def plain(self) -> Interval:
        """`value` where a column's unit is the same in every row: GB are not GiB in one of them."""
        return Interval(self.value.lo, self.value.mid, 2 * self.value.mid - self.value.lo)

    @property
    def words(self) -> str:
        """The lower-case words before and behind, up to the next figure."""
        return f"{self.label} {re.split(r'(?<![a-z])[0-9]', self.after)[0]}".lower()


_PARTED = regex(
    r"(?<![\d.,] )(?<![\w.,])[1-9]\d{0,2}(?: \d{3}){2,}(?= (?:tokens|param|samples|images|sequences|bytes)\b)"
)
_LEADING = regex(r"(?<=\d h )0(?=\d ?m(?:in)?\b)|(?<=\dh)0(?=\d ?m(?:in)?\b)")  # "2 h 04 min"
_THOUSAND = regex(r"(?<=\d) thousand (?=(?:\w+ )?tokens?\b)")


@lru_cache(maxsize=20000)
def clean(text: str) -> str:
    """`text` without Markdown's and LaTeX's marks, the terms of Chinese reports in English."""
    if _HAN.search(text):
        text = _CHINESE_TERM.sub(lambda m: f" {_CHINESE[m[0]]} ", text.translate(_WIDE))
        text = re.sub(r" +", " ", text)
    text = _ONE_OF.sub("1.00 ", text) if any(map(text.__contains__, _SPANS)) else text
    text = _THOUSAND.sub("k ", text) if " thousand " in text else text
    text = _PARTED.sub(lambda m: m[0].replace(" ", ""), _LEADING.sub("", text))
    if text.count(":") > 1:
        text = _CLOCK.sub(lambda m: f"{m[1]}{3600 * int(m[2]) + 60 * int(m[3]) + float(m[4]):.2f} s", text)
    if "ercentile" in text or "p(" in text:
        text = _PERCENTILE.sub(lambda m: f"p{m['a'] or format(float(m['b']), 'g')}", text)
    text = _TIMES_WORD.sub(lambda m: _TIMES[m[1]], text) if " from " in text else text
    if not any(mark in text for mark in "*_`$<[\\&~\u00a0\u202f"):
        return text
    text = _PRICE.sub("€", re.sub(r"(?<=[\w$}.)])~(?=[\w\\$])", " ", text))
    text = _MARKS.sub("", _LATEX.sub(r" \1", text.replace("{,}", ",")))
    for mark, plain in _SYMBOLS:
        text = text.replace(mark, plain)
    return re.sub(r"[{}]", " ", text) if "\\" in text else text


def _unit_at(text: str, at: int) -> tuple[Unit, int] | None:
    gap = re.compile(r"[)\] -]{0,4}(?:(?:dense|sparse|peak) (?:(?:INT|FP|BF|TF)\d+ )?|\()?").match(text, at)
    for start in dict.fromkeys((at, gap.end() if gap else at)):
        whole = _HYPHENED.match(text, start)
        if start < len(text) and (start == at or text[start - 1] != "-" or text[start] in "xX" or whole):
            found = match_unit(text[start:])
            # A single letter must stand at the figure ("102T") or be a second: "4 B" may be anything. "8 tokens=512"
            # begins the next key.
            sign = "=" if text[at : at + 1] == " " != text[at + 1 : at + 2] else "[:=]" if text[at] == " " else "(?!)"
            key = found and re.match(sign, text[start + found[1] :])
            if found and not key and not (found[0].kind in ("params", "other") and start > at + 1):
                return found[0], start + found[1]
    return None


def _each(unit: Unit, device: str | None, noun: str | None, million: str | None) -> Unit:
    """A unit whose "per GPU" or "per million tokens" stands before its figure."""
    if device:
        return replace(unit, per_device=True)
    per, found = match_unit(f"J per {million or ''}{noun}"), unit.kind  # any amount
    if per is None or unit.kind not in ("time", "energy", "money", "bytes"):
        return unit
    found = product(unit.kind, {"token": "tokens", "hour": "time"}.get(noun or "", "items"), -1)
    return replace(unit, kind=found, low=unit.low * per[0].low, high=unit.high * per[0].low, noun=per[0].noun)


def quantities(text: str, line: int, cell: Unit | None = None) -> list[Quantity]:
    """All figures in `text` that have a unit, their own or their key's ("time_ms: 3.2").

    The first of a table's `cell` has its column's, and may be negative or have an end of its own ("102T").
    """
    found, bounded = list[Quantity](), list[Quantity]()
    for m in _FIGURE.finditer(text):
        past = found[-1].end if found else 0
        before = _BLANK.sub("  ", text[max(past, m.start() - 120) : m.start()])
        # "4096 × 4096 × 4 bytes" are not 4 bytes, nor has anybody moved the 80 GB of an "A100 80GB".
        factor = (_FACTOR.search(before) and not _TIMES_OVER.search(before)) or _OF_MANY.search(before)
        if m.start() < past or factor or (_BOARD.search(before) and re.match(" ?G", text[m.end() :])):
            continue
        first = cell is not None and not found and _MARKS_ONLY.fullmatch(before)
        key = None if cell else _KEY.search(before)
        if not key or re.search(r"\d\.\d", key["key"]):  # a sentence, no key
            key = None if cell else _TRAILING_KEY.search(before)
        name = (key["key"] or key.groupdict().get("rate") or "" if key else "").strip()
        priced = text[m.start() - 1 : m.start()] == "€"
        by_key, own = cell if first else unit_of_name(name), _unit_at(text, m.end())
        by_key = by_key or (Unit("ratio", 1.0, 1.0) if key and re.search(r"(?i)speed-?[ _]?up", name) else None)
        if priced and not (by_key and by_key.kind.startswith("$/")):  # "€2.40 per GPU-hour", "€9,523"
            unit, length = match_unit("USD" + text[m.end() : m.end() + 40]) or (NO_UNIT, 3)
            own = unit, m.end() + length - 3
        if own and own[0].kind in ("tokens", "time") and re.match(r" each\b", text[own[1] :]):
            kind = {"tokens": "token/item", "time": "s_per_item"}[own[0].kind]
            own = replace(own[0], kind=kind, noun=""), own[1]
        if own and own[0].kind == "money" and found and found[-1].kind == "gpu*s" and _AT_PRICE.fullmatch(before):
            own = replace(own[0], kind="$/gpu*s", low=own[0].low / 3600, high=own[0].high / 3600), own[1]
        if own and (per := _PER.search(before)):  # "per request that is 7 J"
            own = _each(own[0], *per.group("device", "noun", "million")), own[1]
        if own and own[0].kind == "time" and found and found[-1].kind.startswith("s_per") and _TO.fullmatch(before):
            own = replace(own[0], kind=found[-1].kind, noun=found[-1].noun), own[1]  # "per step from 3 ms to 2 ms"
        if own is None and cell is None and _FACTOR_OF.search(before) and not m["b"]:
            own = Unit("ratio", 1.0, 1.0), m.end()  # "a speed-up of 2.1"
        if own is None and re.fullmatch(r"1e\d+", m["a"]) and match_unit(name):
            continue  # "GB = 1e9"
        # "32-4 ms" is a range, "2024-05 run" is not.
        if own is None and m["b"] and not m["range"].strip().startswith("to"):
            continue
        if own is None and (by_key is None or (_IN_CELL if first else _IN_TEXT).match(text, m.end())):
            continue
        of, end = own or (by_key or NO_UNIT, m.end())
        if of.kind == "percent" and of.low == 1 and printed(m["a"].lstrip("-+−")).mid > 150:
            continue  # "peak FLOPS for the MFU: 9.89e14" is no share
        counts = by_key and by_key.kind in ("rate", "tokens", "tokens_per_s", "items_per_s")
        if of.kind == "params" and by_key and (counts or (first and by_key != NO_UNIT)):
            of = replace(by_key, low=of.low, high=of.high)
        ends = (text[end : end + 1], text[m.end() : m.end() + 1])
        during = found and of.kind == "time" and re.fullmatch(r" over (?:the |a )?", before)  # "72 kJ over 4 minutes"
        rate = found and found[-1].kind == "tokens" and before == " every "  # "4.05 tokens every 19.7 ms"
        bound = (_BOUND.search(before) and not (during or rate)) or "+" in ends
        goes_on = found[-1:] == bounded[-1:] != [] and found[-1].kind == of.kind and _AND.fullmatch(before)
        value, at = _value(m["a"], of), m.start()
        times = _TIMES_OVER.search(before) if of.kind.partition("/")[0] in ("bytes", "B", "flop") else None
        if times:  # "reads 2 x 67 MB"
            value, at = value * int(times[1]), m.start() - len(times[0])
        counted = of.kind in ("tokens", "items", "params")
        spelled = re.match(r" ?\((\d{1,3}(?:,\d{3})+)\)", text[end:]) if counted else None
        if spelled and 0.9 < printed(spelled[1]).mid / (value.mid or 1) < 1.1:
            value = exact(printed(spelled[1]).mid)  # "1M tokens (1,048,576)"
        if _ABOUT.search(before):
            value = Interval(0.95 * value.lo, value.mid, 1.05 * value.hi)
        change = re.search(r"(?i)\bfrom ?$", before)
        rose = m["b"] and change
        since = bool(m["b"]) and of.kind == "time" and value.mid == 0  # "0.00-10.00 sec"
        if m["b"] and not rose:
            other = _value(m["b"], of)
            value = other if since else Interval(min(value.lo, other.lo), value.mid, max(value.hi, other.hi, value.mid))
        label = name or re.split(r"[.;|]\s", before)[-1][-64:].strip()
        after = re.split(r"[.;,|()]\s|\n|\s[(|]", text[end : end + 48] + " ")[0].strip()
        # "2.4x-3.1x" is a range; "12 ms to 3 ms" is a change.
        ranged = of.kind in ("ratio", "percent") and not change and re.match(r" ?(?:[-–—]|to) ?\d", text[end:])
        # "-2.6 % (vs 48 % before)" names a base of its own.
        based = cell and (re.match(r" ?\(?(?:vs|versus|compared|relative)\b", text[end:]))
        signed = of.kind != "percent" and m["a"][0] in "-−"
        listed = _LIST.search(text[: m.start()], past) if own and cell is None and not m["b"] else None
        between = listed and re.search(r"(?i)\bbetween $", text[: listed.start()])  # a range
        sure = not (bound or goes_on or between or ranged or based or signed or (m["b"] and not (rose or since)))
        # "from 1,850 to 2,405 tokens/s" are two figures, "1.2, 1.4 and 1.3 ms" three.
        more = [(m["a"], m.start())] if rose else []
        more += [(x[0], listed.start() + x.start()) for x in re.finditer(NUMBER, listed[0])] if listed else []
        for digits, start in more:
            each, shown = _value(digits, of), f"{digits} {text[m.end() : end].strip()}"
            if rose or 0.05 < each.mid / (value.mid or 1) < 20:
                parts = (after, -1, sure, of.per_device, start, start + len(digits), of.noun)
                found.append(Quantity(of.kind, each, shown, label, line, *parts))
        if rose:
            value, label, at = _value(m["b"], of), "to", m.start("b")
        last = found[-1] if found else None  # "14 min 20 s"
        units = [re.sub(r"[\d., ]", "", x) for x in (last.text if last else "", text[at:end])]
        if (
            last
            and of.kind == last.kind == "time"
            and re.fullmatch(r"\s+(?:and )?", text[last.end : at])
            and units[0] != units[1]
        ):
            value, at, label = value + exact(last.value.mid), found.pop().start, last.label
        shown = text[at:end].strip()
        q = Quantity(of.kind, value, shown, label, line, after, -1, sure, of.per_device, at, end, of.noun)
        q = named(q) if name else q
        found.append(replace(q, kind="s_per_token") if cell is None and is_tpot(q) else q)
        bounded += found[-1:] if bound or goes_on else []
    return found if cell or len(found) > 3 else _without_units(text, line, found)


def _without_units(text: str, line: int, found: list[Quantity]) -> list[Quantity]:
    """What a figure beside lends its unit: "mean 438.2 GB/s  min 405.1", "1,170 documents per second, or 146 per GPU",
    "14,042 questions; at 31 questions per second"."""
    more: list[tuple[Quantity, re.Match[str], int]] = []
    ranked = [q for q in found if re.search(r"(?i)\b(?:min|max|mean|median|avg|p\d\d)\W*$", q.label)]
    if len(ranked) == 1:
        more += [(ranked[0], m, 2) for m in _RANKED.finditer(text)]
    for q in (q for q in found if q.kind in RATES):
        more += [(q, m, 2) for m in _BARE_EACH.finditer(text) if 0 <= m.start() - q.end < 12]
    for q in (q for q in found if q.kind in (*RATES, "bytes", "power")):  # "42 of 63 GB/s"
        m = re.search(rf"(?<![\w.,/-])({NUMBER}) (?:out )?of (?:the |its )?$", text[: q.start])
        more += [(q, m, 1)] if m and q.end - q.start < 16 else []
    for of, m, at in more:
        if not any(q.start <= m.start(at) < q.end for q in found):
            shown = re.match(NUMBER, of.text)
            scale = of.value.mid / printed(shown[0]).mid if shown else 1.0
            value = printed(m[at]) * scale
            found.append(replace(of, value=value, text=m[at], label=m[1], start=m.start(at), end=m.end(at), after=""))
    return sorted(found, key=lambda q: q.start)


def _value(digits: str, unit: Unit) -> Interval:
    value = printed(digits.lstrip("-+−"))
    if unit.kind == "percent" and unit.low == 1 and value.mid > 1.5:
        value = value * 0.01  # an MFU of 42
    counted = unit.kind == "B/param" or (unit.kind in ("items", "bytes", "flop") and unit.low == unit.high == 1)
    if counted and value.mid % 1 == 0:
        value = exact(value.mid)  # counts are not rounded, nor a format's bits
    if unit.kind == "bytes" and unit.low == unit.high and value.mid >= 1 and math.log2(value.mid) % 1 == 0:
        value = exact(value.mid)  # 4 GiB are a size that was chosen
    return Interval(value.lo * unit.low, value.mid * unit.low, value.hi * unit.high)


def same_statistic(a: str, b: str) -> bool:
    """Whether figures of these labels may be of one run: the median of one and the least of the other are not."""
    found = {_STATISTIC.findall(label.lower())[0] for label in (a, b) if _STATISTIC.search(label.lower())}
    return len(found) <= 1 or found <= {"avg", "average", "mean", "median"}


def is_tpot(q: Quantity) -> bool:
    """Whether a sentence calls a time that of an output token."""
    return q.kind in ("time", "s_per_token", "s_per_item") and bool(
        re.search(rf"{PER_TOKEN.pattern}[^.;,]{{0,30}}$", q.label)
    )


def named(q: Quantity) -> Quantity:
    """`q` with the kind that its column's name says."""
    if q.kind == "number" and RATIO.search(q.label):
        return replace(q, kind="ratio")
    if q.kind in ("money", "energy") and (per := _PER.search(q.label)):  # "$1.86" below "per hour"
        unit = _each(Unit(q.kind, 1.0, 1.0), None, *per.group("noun", "million")) if per["noun"] else NO_UNIT
        return replace(q, kind=unit.kind, value=q.value * unit.low, noun=unit.noun) if per["noun"] else q
    step, token = (q.kind == "time" and form.search(q.label) for form in (_PER_STEP, PER_TOKEN))
    return replace(q, kind="s_per_item", noun="step") if step else replace(q, kind="s_per_token") if token else q
