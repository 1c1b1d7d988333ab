"""Figures by the names that reports give them: "train.micro_batch_size: 2", "32-way data parallelism", "Waves Per SM".

A name stands before its figure (a key, a table's head, the first cell of a table of two columns), or a sentence says
it. NAMES has each by the units that it may have, the form of its key, and what a sentence says.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from expertile.audit.blocks import valued
from expertile.audit.facts import DIGITS
from expertile.audit.interval import NUMBER, Interval, exact, printed
from expertile.audit.quantity import Quantity, clean
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import own_words
from expertile.audit.units import match_unit


@dataclass(frozen=True)
class Name:
    """`kinds` of its figures ("n": a count or a plain number), the `key`'s form, and what sentences `said`: for a
    count a form with one group for it, for others a form of the words around the figure."""

    kinds: str
    key: str
    said: str = ""
    most: float = math.inf
    least: float = 0.0


@dataclass(frozen=True)
class Named:
    """A figure, the words of its key (of a sentence none), and the row that it stands in."""

    key: str
    kind: str
    value: Interval
    text: str
    line: int
    row: Row
    q: Quantity | None = None


_N = r"(\d[\d,]*(?:\.\d+)?[kKM]?)"
_MEAN = r"(?:mean|average|avg)"
_SIZE = r"(?: size| degree| world size)?"
_BATCH = r"(?:train )?batch(?: size)?"
_PARALLEL = r"(?: model)? parallel(?:ism)?"
NAMES = {
    # how a model is trained
    "tp": Name("n", rf"tp{_SIZE}|parallel tensor|tensor{_PARALLEL}{_SIZE}", rf"{_N}-way tensor|\bTP ?[=:]? ?{_N}\b"),
    "pp": Name(
        "n",
        rf"pp{_SIZE}|parallel pipeline|pipeline{_PARALLEL}{_SIZE}|(?:num )?(?:pipeline )?stages|p",
        rf"{_N} (?:pipeline )?stages|{_N}-way pipeline|\bPP ?[=:]? ?{_N}\b|\bp ?= ?{_N} stages",
    ),
    "dp": Name("n", rf"dp{_SIZE}|parallel data|data{_PARALLEL}{_SIZE}", rf"{_N}-way data|\bDP ?[=:]? ?{_N}\b"),
    "cp": Name("n", rf"cp{_SIZE}|context{_PARALLEL}{_SIZE}", rf"{_N}-way context|\bCP ?[=:]? ?{_N}\b"),
    "ep": Name("n", rf"ep{_SIZE}|expert parallel(?:ism)?{_SIZE}", rf"{_N}-way expert|\bEP ?[=:]? ?{_N}\b"),
    "world": Name(
        "n",
        r"world size|(?:num |total |n )?(?:gpus|ranks)",
        rf"{_N} (?:(?:[A-Z][\w-]+|\d+ ?GB) ){{0,5}}(?:GPUs|ranks)\b(?! (?:per|each|in each|on each))",
    ),
    "micro": Name("n", rf"(?:train )?micro ?{_BATCH}|mbs|per (?:device|gpu) {_BATCH}|{_BATCH} per (?:device|gpu)"),
    "accum": Name("n", r"(?:train )?(?:grad(?:ient)? ?)?acc(?:um(?:ulation)?)?(?: steps)?"),
    "global_batch": Name("n", rf"global ?{_BATCH}|gbs|(?:total|effective) {_BATCH}"),
    "microbatches": Name("n", r"m|(?:num )?micro ?batches|n ?mb", rf"{_N} micro-?batches"),
    "bubble": Name("percent", r"(?:pipeline )?bubble(?: fraction| ratio| share)?(?:,? theory)?|idle fraction"),
    "steps": Name("n", r"(?<!max )(?<!total )(?<!num )(?<!warmup )(?<!per )(?:steps?|iterations?)"),
    "step_tokens": Name(
        "n token/item", r"(?:global )?batch tokens|tokens (?:per|/) ?(?:step|batch|update)|batch size tokens"
    ),
    "tokens_seen": Name("n", r"(?:total )?tokens (?:seen|consumed|processed|trained(?: on)?)|consumed tokens"),
    "nll": Name("n", r"(?:eval |val |valid |test |train )?(?:nll|(?:lm |ce |cross entropy )?loss)(?: nats)?"),
    "ppl": Name("n", r"(?:eval |val |valid |test |train )?(?:ppl|perplexity)"),
    "tokens": Name("n", r"(?:num |n )?tokens"),
    "text_bytes": Name("bytes n", r"(?:utf 8 )?bytes"),
    "bits_per_byte": Name("n other", r"bits per byte|bpb"),
    "lr": Name("n", r"lr|learning rate"),
    "step": Name("n", r"step|iter(?:ation)?"),
    "peak_lr": Name("n", "(?!)", rf"warm-?up[^.;]{{0,24}}(?:->|to|→) ?({NUMBER})\b"),
    "warmup_steps": Name(
        "n", r"warm ?up (?:steps|iters)", rf"warm-?up[^;]{{0,40}} (?:over|in|for) {_N} (?:steps|iter)"
    ),
    # models
    "params": Name("n", r"(?:n |num |total |trainable )*(?:model )?(?:param(?:eter)?s?)(?: count)?", least=1e6),
    "adapter_params": Name("n", r"(?:trainable|lora|adapter) param(?:eter)?s"),
    "adapter_file": Name("bytes", r"adapter(?: file)?(?: size)?|lora (?:file|size|weights)"),
    "layers": Name(
        "n", r"(?:arch |model )?(?:n |num )?(?:hidden )?layers?", rf"{_N} (?:transformer |decoder )?layers\b"
    ),
    "hidden": Name("n", r"(?:arch |model )?(?:d model|hidden(?: size| dim)?|n embd)", rf"\bhidden(?: size)? {_N}\b"),
    "ffn": Name("n", r"(?:arch |model )?(?:d ff|ffn(?: dim| hidden size)?|intermediate size)"),
    "vocab": Name("n", r"(?:arch |model )?(?:n )?vocab(?: size)?"),
    "positions": Name("n", r"(?:arch |model )?(?:n positions|max position embeddings|n ctx)"),
    "experts": Name("n", r"(?:n |num )?(?:routed |local )?experts", rf"{_N} (?:routed )?experts\b"),
    "topk": Name("n", r"top k|experts per tok(?:en)?", rf"\btop-?{_N}\b"),
    "rank_tokens": Name("n", "(?!)", rf"{_N} tokens (?:per|on each) (?:rank|gpu)"),
    "expert_load": Name(
        "n", "(?!)", rf"(?:average|mean)(?: load)?[^.;\d]{{0,16}} {_N} (?:token|cop)[^.;]* (?:per|each) expert"
    ),
    "always_active": Name(
        "n params",
        r"(?:attention|shared|dense|non expert)[\w +]*always (?:used|active)|(?:shared|dense|non expert)(?: param\w*)?",
    ),
    "one_expert": Name("n params", r"one expert\b[\w ,]*|(?:per|each) expert"),
    "active": Name("n params", r"(?:total )?active(?: param(?:eter)?s)?(?: per token)?"),
    "checkpoint": Name(
        "bytes", r"checkpoint(?: size)?", r"(?i)\b(?:wrote|saved|written)\b.*in total|checkpoint|safetensors", least=1e7
    ),
    "layer_bytes": Name("bytes", r"(?:per )?layer"),
    "layers_bytes": Name("bytes", r"layers"),
    "weight_bytes": Name("B/param", r"bits (?:/|per) ?weight|bpw"),
    "compression": Name("ratio", r"(?:compression )?(?:ratio|compression)(?: vs| over| to)? (?:fp16|bf16)"),
    "eta": Name("time", "(?!)", r"\bETA:? (\d+:\d\d:\d\d)\b"),
    "step_now": Name("n", "(?!)", r"(?i)\b(?:step|iter\w*):? (\d+) ?/ ?\d+"),
    "last_step": Name("n", "(?!)", r"(?i)\b(?:step|iter\w*):? \d+ ?/ ?(\d+)"),
    "step_seconds": Name("s_per_item", r"step time|time per step", r"/ ?(?:step|it)"),
    "kept_values": Name("params n", "(?!)", r"(?i)surviv|kept|non-?zero"),
    "index_bits": Name("n", "(?!)", rf"{_N}-bit (?:position|index|metadata|indices)"),
    "metadata": Name("bytes", "(?!)", r"(?i)position|metadata|indices"),
    # serving
    "benchmark_time": Name("time", r"^(?:benchmark )?duration(?: s)?"),
    "tokens_in": Name("n", r"^total (?:input|prompt) tokens"),
    "tokens_out": Name("n", r"^total (?:generated|output) tokens"),
    "total_rate": Name("tokens_per_s", r"^total token throughput(?: tok/s)?"),
    "output_rate": Name("tokens_per_s", r"^output (?:token )?throughput(?: tok/s)?"),
    "ttft_slo": Name("time", r"slo ttft(?: ms)?|ttft slo(?: ms)?|ttft (?:limit|target)"),
    "ttft_p99": Name("time", r"ttft(?: ms| s)? p99|p99 ttft(?: ms| s)?"),
    "ttft_within": Name("percent", r"(?:share|fraction)(?: of requests)? within ttft slo(?: pct)?|ttft slo attainment"),
    "e2e_slo": Name("time", r"slo e2e(?: s)?|e2e slo(?: s)?"),
    "e2e_p99": Name("time", r"e2e(?: latency)?(?: ms| s)? p99|p99 e2e(?: latency)?(?: ms| s)?"),
    "e2e_within": Name("percent", r"(?:share|fraction)(?: of requests)? within e2e slo(?: pct)?|e2e slo attainment"),
    "blocks": Name("n", r"gpu blocks|(?:num )?(?:gpu|kv) blocks"),
    "block_tokens": Name("n", r"block size"),
    "cache_tokens": Name("n tokens", r"(?:gpu )?kv cache size|kv cache tokens"),
    "longest": Name("n", "(?!)", rf"(?i)concurrency for {_N} tokens"),
    "concurrency": Name("ratio", r"tokens per request"),
    "ttft": Name("time", r"ttft"),
    "tpot": Name("time s_per_token", r"tpot|itl"),
    "e2e": Name("time", r"e2e(?: latency| time)?|(?:total|request) latency"),
    "output_tokens": Name("n tokens", r"(?:output|completion|generated) tokens|(?:output|generation) len(?:gth)?"),
    "draft_length": Name("n", r"k|(?:draft|num speculative) (?:len(?:gth)?|tokens)|gamma"),
    "acceptance": Name(
        "n percent", r"accept\w*(?: rate| prob\w*)?", r"accepted with (?:a )?probability (?:of )?(0?\.\d+)"
    ),
    "expected_length": Name(
        "n ratio tokens token/item", r"(?:expected |mean )?tokens per (?:target )?(?:pass|step|verif\w*)"
    ),
    # what a GPU does
    "registers": Name("n", r"(?<!limit )reg(?:ister)?s?(?: per thread)?", rf"{_N} reg(?:ister)?s\b"),
    "block_threads": Name(
        "n", r"(?:thread )?block(?: size| dim)?|threads(?: per)?(?: block| cta)?", rf"{_N} threads\b(?! per SM)", 1024
    ),
    "block_smem": Name("bytes", "(?!)", r"(?i)(?:shared memory|smem)[^.;]*\b(?:per|each|a) (?:cta|block)\b"),
    "resident_blocks": Name(
        "n", r"(?:ctas|blocks) per sm", rf"(?i){_N} (?:ctas?|(?:thread )?blocks?) (?:per|on each|on an) SM\b"
    ),
    "max_warps": Name("n", r"max warps per sm"),
    "limit_registers": Name("n", r"block limit registers"),
    "limit_smem": Name("n", r"block limit shared mem"),
    "limit_warps": Name("n", r"block limit warps"),
    "active_warps": Name("n", r"theoretical active warps(?: per |/)?sm"),
    "occupancy": Name("percent", r"theoretical occupancy|theoretical|(?<!achieved )occupancy"),
    "achieved_occupancy": Name("percent", r"achieved(?: occupancy)?"),
    "sms": Name("n", r"# sms|(?:num )?sms|multiprocessors", rf"{_N} SMs\b"),
    "grid": Name("n", r"grid size|(?:launch )?grid"),
    "waves": Name("n", r"waves per sm"),
    "gemm_m": Name("n", r"(?<!block )(?<!tile )m"),
    "gemm_n": Name("n", r"(?<!block )(?<!tile )n"),
    "tile_m": Name("n", r"(?:block|tile) m"),
    "tile_n": Name("n", r"(?:block|tile) n"),
    "cycles": Name("cycles n", r"^(?:elapsed |sm )?cycles"),
    "sm_clock": Name("cycle/s", r"sm (?:frequency|clock)"),
    "duration": Name("time", r"(?:gpu |kernel )?duration"),
    "ipc": Name("n", r"(?:executed )?ipc(?: active| elapsed)?|inst(?:ructions)? per cycle"),
    "cores": Name("n", r"(?:fp32 |cuda )?cores(?: in total| total)?|total (?:fp32 |cuda )?cores"),
    "boost_clock": Name("cycle/s", r"(?:boost|max) clock(?: rate)?"),
    "fp32_peak": Name(
        "rate", r"(?:theoretical|peak)(?: peak)? (?:fp32|single)(?: precision)?|fp32 (?:theoretical|peak)"
    ),
    "data_rate": Name("bandwidth", r"(?:effective )?(?:memory )?data rate|memory speed", r"(?:data rate|per pin)"),
    "bus_width": Name("n bytes", r"(?:memory )?(?:bus|interface)(?: width)?"),
    "peak_bandwidth": Name("bandwidth", r"(?:=> ?)?(?:theoretical|peak)(?: memory)?(?: bandwidth)?"),
    "compute_roof": Name("rate", r"compute (?:roof|peak)|peak (?:compute|flops)"),
    "memory_roof": Name("bandwidth", r"memory (?:roof|bandwidth|peak)|peak (?:memory )?bandwidth"),
    "ridge": Name("intensity", r"ridge(?: point)?|machine balance"),
    "flop": Name("flop n", r"flop|flop count"),
    "dram_bytes": Name("bytes", r"(?:dram|total|memory) bytes|bytes"),
    "flop_per_byte": Name("intensity", r"flops? per byte|arithmetic intensity|ai|intensity"),
    "matrix_rows": Name("n", r"rows"),
    "matrix_cols": Name("n", r"cols|columns"),
    "nonzeros": Name("n", r"nnz|non ?zeros"),
    "density": Name("n percent", r"density"),
    "l2_read": Name("bytes", r"l2 read traffic(?: from sms)?|l2 reads?"),
    "l2_hits": Name("percent", r"l2 (?:read )?hit rate"),
    "dram_read": Name("bytes", r"(?:read from dram|dram reads?)[\w =]*"),
    "latency": Name("time", "(?!)", r"(?i)latency"),
    "bandwidth": Name("bandwidth", "(?!)", r"(?i)deliver|bandwidth|memory|dram|hbm"),
    "in_flight": Name("bytes", r"bytes in flight", r"(?i)in flight|outstanding"),
    "allocated": Name("bytes", r"(?:max )?(?:memory )?allocated(?: memory)?"),
    "reserved": Name("bytes", r"(?:max )?(?:memory )?reserved(?: memory)?"),
    "count": Name("n", r"(?:num(?:ber of)? )?(?:iterations|iters|launches|repeats|runs)"),
    "each": Name(
        "time s_per_item",
        rf"{_MEAN}(?: time)? per (?:iteration|launch|run|iter)|{_MEAN} time|time per (?:iteration|launch)",
    ),
    "whole": Name("time", r"(?:loop )?total(?: time)?|total loop time"),
    # cost
    "mean_power": Name(
        "power",
        rf"{_MEAN} (?:gpu |board )?(?:power|draw)(?: draw)?|power draw average",
        rf"(?i){_MEAN} (?:\w+ )?(?:power|draw)",
    ),
    "power_limit": Name("power", r"(?:enforced )?power limit(?: w)?|power cap"),
    "gpu_power": Name("n power", rf"(?:power )?{_MEAN} (?:w|power) per gpu"),
    "gpu_hours": Name("gpu*s", r"gpu hours"),
    "energy": Name(
        "energy", r"(?:power |total )?energy(?: of the run| consumed| used)?", r"(?i)energy|drew|consum|used"
    ),
    "ran_for": Name(
        "time",
        r"(?:workload |run )?(?:duration|stopped after|ran for)|run ?time|elapsed",
        r"(?i)stopped after|ran for|lasted",
    ),
    "pue": Name("n", r"pue", r"PUE (?:of|=|is|was) ?(\d\.\d+)"),
    "grid_carbon": Name("carbon/energy gCO2/J", r"carbon intensity", r"(?i)per kWh|/ ?kWh"),
    "carbon": Name("carbon", r"(?:total )?(?:emissions|carbon)", r"(?i)CO2"),
    # input and output
    "iops": Name("n params items", r"(?:read |write )?iops"),
    "block_bytes": Name("bytes n params", r"bs|block size"),
    "io_bandwidth": Name("bandwidth", r"(?:read |write )?bw"),
    "sample_rate": Name("items_per_s", r"samples/s|samples per s(?:ec)?|images/s|img/s"),
    "sample_bytes": Name("bytes B/item", r"bytes per sample|sample bytes", r"(?i)per (?:sample|image)|each"),
    "read_rate": Name("bandwidth", r"read gb/s|read (?:rate|bandwidth)|(?:gb|mb)/s"),
    "km": Name("n", r"(?:distance )?km|distance"),
    "rtt": Name("time", r"(?:min )?rtt|ping|round trip"),
    "hardware_threads": Name("n", r"threads|cores", rf"{_N} (?:hardware )?threads\b"),
    "real": Name("time", r"real"),
    "user": Name("time", r"user"),
}
_WORDS = re.compile(rf"\b(?:{'|'.join(DIGITS)})\b", re.IGNORECASE)
# A figure, what may stand between its key and it, and where its key begins.
_VALUE = re.compile(rf"(?<![\w.])(?<!\d[-/:]){NUMBER}(?![\d:]|\.\d|/\d|-\d)")
_SIGN = re.compile(r"(?:\s*[:=]+>?\s*[(\[]?|\s*\.{3,}\s*|\s+)$")
_BEGIN = re.compile(r"[,;|{}\"'\]]|\s{2,}|[:=] |: ")
_BRACKETS = re.compile(r"\([^()]*\)(?=\s*(?:[:=]|\.{3}))")
# Nsight Compute's and other columns: name, unit, value.
_COLUMNS = re.compile(rf"^\s*(?P<key>\S.*?)\s{{2,}}(?P<unit>%|[#A-Za-z][\w/]*)\s{{2,}}(?P<v>{NUMBER})\s*$")
_NCU = {"cycle": ("cycles", 1.0), "%": ("percent", 0.01)}
_NCU |= {f"cycle/{p}second": ("cycle/s", s) for p, s in (("n", 1e9), ("u", 1e6), ("", 1.0))}
_NCU |= {f"{p}second": ("time", s) for p, s in (("n", 1e-9), ("u", 1e-6), ("m", 1e-3), ("", 1.0))}
_NCU |= {f"{p}byte/block": ("bytes", s) for p, s in (("", 1.0), ("K", 1e3), ("M", 1e6))}
_NCU |= {"GHz": ("cycle/s", 1e9), "MHz": ("cycle/s", 1e6)}
_UNIT_END = re.compile(
    r" (?:[kmgt]?i?b|bytes|[mun]?s|sec(?:onds)?|k?wh?|pct|percent|hours|kj|gb ?/ ?s|mib ?/ ?s|[kmg]?hz|t?flops?)$"
)
_MINUTES = re.compile(r"(\d+)m([\d.]+)s\b")  # "3m12.4s"


def key_of(text: str) -> str:
    """The lower-case words of a key, without marks, brackets with a unit and the unit behind."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", text)
    text = re.sub(
        r"\s*[(\[](?P<i>[^()\[\]]*)[)\]]\s*$",
        lambda m: "" if match_unit(m["i"]) or "/" in m["i"] else f" {m['i']}",
        text,
    )
    return re.sub(r"[\s_.:,()\[\]=-]+", " ", text.lower()).strip(" /")


def _plain(digits: str) -> Interval:
    """A number without a unit: a whole one is exact."""
    return exact(printed(digits).mid) if re.fullmatch(r"[\d,]+", digits) else printed(digits)


def _pair(row: Row, key: str, value: str, line: int, q: Quantity | None, unit: str = "") -> Named:
    words = key_of(key)
    if known := _NCU.get(unit or (re.findall(r"[(\[]([^()\[\]]*)[)\]]\s*$", key) or [""])[-1]):
        return Named(words, known[0], printed(value) * known[1], value, line, row, q)
    if q and q.kind not in ("number", "other", "ratio") and not (q.kind == "params" and len(q.text) == len(value)):
        return Named(words, q.kind, q.value, q.text, q.line, row, q)
    kind = q.kind if q and re.search(r"[x×X]$", q.text) else "n"
    return Named(words, kind, _plain(value), value, q.line if q else line, row, q)


def _digits(q: Quantity) -> str:
    m = re.search(NUMBER, q.text)
    return m[0] if m else f"{q.value.mid!r}"


def _of_table(row: Row, header: tuple[str, ...], lines: tuple[int, ...]) -> Iterator[Named]:
    for column, name in enumerate(header):
        q = next((q for q in row.quantities if q.column == column), None)
        cell = re.search(rf"(?:^|; ){re.escape(name)}: ([^;]*)", row.text) if name else None
        value = re.match(rf"\s*({NUMBER})(?![\w./:-])", cell[1]) if cell else None
        if q is not None and q.exact:
            yield _pair(row, name, _digits(q), q.line, q)
        elif value and q is None:
            yield _pair(row, name, value[1], lines[column] if lines else row.line, None)


def _of_line(row: Row) -> Iterator[Named]:
    if m := _COLUMNS.match(row.text):
        yield _pair(row, m["key"], m["v"], row.line, None, m["unit"])
        return
    code, past = row.report.blocks[row.block].kind != "prose", 0
    at = {q.start: q for q in row.quantities if q.exact}
    text = _BRACKETS.sub(lambda m: " " * len(m[0]), row.text)
    for m in _VALUE.finditer(text):
        sign = _SIGN.search(text, past, m.start())
        if sign and (code or sign[0].strip()):
            key = _BEGIN.split(text[past : sign.start()])[-1].strip()
            if timed := _MINUTES.match(text, m.start()):
                seconds = printed(timed[2]) + exact(60.0 * int(timed[1]))
                yield Named(key_of(key), "time", seconds, timed[0], row.line, row)
            elif re.search("[A-Za-z#]", key):
                yield _pair(row, key, m[0], row.line, at.get(m.start()))
        past = m.end()


@lru_cache(maxsize=8)
def figures(report: Report) -> tuple[Named, ...]:
    """Every figure that has a key."""
    found: list[Named] = []
    for row in report.lines_of_text:
        found += _of_line(row)
    for grid in report.grids:
        table = report.blocks[grid.block].table
        cells = table.lines if table and len(table.lines) == len(grid.rows) else ((),) * len(grid.rows)
        for row, lines in zip(grid.rows, cells, strict=True):
            found += _of_table(row, grid.header, lines if len(lines) == len(grid.header) else ())
            if len(grid.header) == 2 and (q := row.figure(1)):
                found.append(_pair(row, row.label, _digits(q), q.line, q))
    for row in report.rows:  # a table of names and values
        table = report.blocks[row.block].table
        table = valued(table) if table else None
        for line, cells in table.rows if table and row.kind == "record" else ():
            text = clean(cells[1])
            q = next((q for q in row.quantities if q.line == line), None)
            if m := re.match(rf"\s*({NUMBER})(?![\w./:-])", text):
                found.append(_pair(row, clean(cells[0]), m[1], line, q))
    return tuple(found)


def _fits(name: Name, kind: str) -> bool:
    return kind in name.kinds.split() or (kind in ("n", "items", "tokens") and "n" in name.kinds.split())


_ANY = re.compile(rf"(?:^|[ /(])(?:{'|'.join(of.key for of in NAMES.values() if of.key != '(?!)')})$")
_KEYS = {name: re.compile(rf"(?:^|[ /(])(?:{of.key})$") for name, of in NAMES.items()}


@lru_cache(maxsize=1 << 14)
def _names_of(key: str) -> frozenset[str]:
    """The names that a key may be, with the unit behind it and without."""
    forms = {key, _UNIT_END.sub("", key)}
    held = [k for k in forms if _ANY.search(k)]
    return frozenset(n for n, form in _KEYS.items() if any(map(form.search, held)))


@lru_cache(maxsize=8)
def _keyed(report: Report) -> dict[str, list[Named]]:
    held: dict[str, list[Named]] = defaultdict(list)
    for f in figures(report):
        for name in _names_of(f.key):
            if _fits(NAMES[name], f.kind) and NAMES[name].least <= f.value.mid <= NAMES[name].most:
                held[name].append(f)
    return held


@lru_cache(maxsize=2048)
def named(report: Report, name: str) -> tuple[Named, ...]:
    """The report's figures of one of NAMES."""
    of = NAMES.get(name)
    said = _said(report, of) if of and of.said else ()
    return (*_keyed(report)[name], *(f for f in said if of and of.least <= f.value.mid <= of.most))


def _said(report: Report, of: Name) -> Iterator[Named]:
    form = re.compile(of.said)
    for row in report.lines_of_text:
        if form.groups:
            text = _WORDS.sub(lambda m: DIGITS[m[0].lower()], row.text)
            for m in form.finditer(text):
                digits = next(filter(None, m.groups()))
                if ":" in digits:
                    parts = [float(x) for x in digits.split(":")]
                    yield Named("", "time", exact(3600 * parts[0] + 60 * parts[1] + parts[2]), digits, row.line, row)
                    continue
                scale = {"k": 1e3, "K": 1e3, "M": 1e6}.get(digits[-1], 1.0)
                yield Named("", "n", _plain(digits.rstrip("kKM")) * scale, digits, row.line, row)
        elif form.search(row.text):
            for q in row.of(*of.kinds.split()):
                if q.exact and form.search(own_words(row, q)):
                    yield Named("", q.kind, q.value, q.text, q.line, row, q)
