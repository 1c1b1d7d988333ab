"""Facts of a set-up in a line of text: sizes, format, GPU, how many of them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from expertile.audit.pattern import regex
from expertile.device import Device, find_in_text

_NAMES = {
    "m": r"M|m",
    "n": r"N|n",
    "k": r"K|k",
    "batch": r"(?i:(?:(?:global|micro|mini|max|per[- ]gpu|per_device_train|train|total train)[ _-])?"
    r"batch(?:[ _-]?size)?|bsz?|num[ _]seqs|--batch-size)|B",
    "heads": r"(?i:(?:num|n|number of|attention|query|q)[ _]?heads?|heads?|n_?heads?|num_attention_heads)|H",
    "seq": r"(?i:(?:--)?seq(?:uence)?(?:[ _-]?len(?:gth)?)?|seqlen(?:_[qk])?|context(?:[ _-]?len(?:gth)?)?|n_ctx)|S|L",
    "head_dim": r"(?i:head[ _-]?dim(?:ension)?s?|headdim|head[ _-]size|hdim|d_head|dim per head)|D",
    "hidden": r"(?i:hidden(?:[ _-]?(?:dim(?:ension)?|size))?|d_model|n_embd|embed(?:ding)?[ _-]?dim|model[ _]dim)",
    "ffn": r"(?i:ffn(?:[ _-]?(?:hidden|intermediate))?(?:[ _-]?(?:dim|size))?|intermediate[ _-]?(?:dim|size)|d_ff)",
    "experts": r"(?i:(?:num|n|number of)?[ _]?experts|num_local_experts)|E",
    "topk": r"(?i:top[ _-]?k)",
    "tokens": r"(?i:(?:total|num|n|number of|#)?[ _]?(?:(?:input|output|generated) )?tokens)|T",
    "in_len": r"(?i:(?:--)?(?:random[_-])?(?:input|prompt)[ _-]len(?:gth)?|isl)",
    "out_len": r"(?i:(?:--)?(?:random[_-])?(?:output|gen)[ _-]len(?:gth)?|osl|max[_-]new[_-]tokens)",
    "kv_heads": r"(?i:(?:num|n)_(?:key_value|kv)_heads|h_?kv|kv[ _]heads)",
    "prompts": r"(?i:(?:--)?num[-_](?:prompts|requests))",
    "gpus": r"(?<!\d )(?<!all )(?i:(?:num|n|number of|total|#)?[ _]?(?:gpus|devices|ranks|chips)(?:_total)?|"
    r"(?:gpu|device)[ _]count|world[ _]size|tp|tensor[ _-]parallel)",
    "accum": r"(?i:(?:grad(?:ient)?[ _-]?)?accum(?:ulation)?(?:[ _-]?steps)?)",
    "layers": r"(?i:(?:num|n|number of)[ _](?:hidden[ _])?layers|n_?layers?|layers)",
    "elements": r"(?i:(?:num|n|number of)?[ _]?(?:elements|elems|floats)|numel)",
    "concurrency": r"(?i:(?:max[ _])?concurren(?:cy|t[ _](?:requests|users|clients))|"
    r"(?:num[ _])?(?:users|clients|streams)|#?running(?:[- ]req\w*)?)",
    "size": r"(?i:(?:matrix |problem )?(?:size|dim(?:ension)?s?|shape)|dimensions ?\(m ?= ?n ?= ?k\)|matrix)",
}
_INT = r"\d{1,3}(?:,\d{3})+|\d+[kK]?(?![\w%]|\.\d)"
# "Batch Size (B): 16", "batch=16", "--batch 16"; a word in brackets may stand between, and a space for the sign.
_SPACE = dict.fromkeys(
    ("batch", "heads", "seq", "head_dim", "hidden", "topk", "accum", "concurrency", "prompts"), r"|(?<=[A-Za-z]{2})\s+"
) | dict.fromkeys("mnk", r"|(?<=--[mnk])\s+")
_KEYED = {
    name: regex(
        rf"(?<![\w.*×·])(?<!\w-)(?<![a-z] [x×*·] )(?:{form})"
        rf"(?:(?:\s*\([A-Za-z_.,& ]+\))?\s*(?:[:=]|==|\bof\b|\bis\b)\s*\(?"
        rf"{_SPACE.get(name, '')})(?P<v>{_INT})(?!\s*[x×*=/]\s*\d|:\d|/[A-Z]\b){'(?! tokens)' * (name == 'batch')}"
    )
    for name, form in _NAMES.items()
}
# "512 sequences × 4096 tokens", "64 prompts of 128 tokens"
_EACH = [
    rf"({_INT}) (?:sequences|prompts|requests|samples) ?(?:[x×*]|of) ?(?:{_INT}) tokens",
    rf"(?:sequences|prompts|requests|samples) ?(?:[x×*]|of) ?({_INT}) tokens",
]
_COUNTED = {
    "experts": regex(rf"({_INT})[ -](?i:experts)\b(?! ?=)"),
    "heads": regex(rf"({_INT})[ -](?i:(?:attention |query )?heads)\b(?! ?=)"),
    "kv_heads": regex(rf"({_INT})[ -](?i:(?:kv|key[-/ ]value|k/v) heads)\b"),
    "head_dim": regex(rf"(?i:heads of (?:dim(?:ension)?|size)) ({_INT})\b"),
    "layers": regex(rf"({_INT})[ -](?i:(?:transformer |decoder |hidden )?layers)\b"),
    "elements": regex(rf"({_INT}) (?i:(?:fp\d+ |float\d* )?(?:elements|floats))\b"),
    "batch": regex(rf"(?i:batch of )({_INT})|\b[bB][sS] ?(\d+)\b|{_EACH[0]}"),
    "seq": regex(
        rf"{_EACH[1]}|({_INT}) (?:(?:output|generated|new|prompt|input) )?tokens each\b|"
        rf"(?:prompt|sequence|context|request)s? (?:length )?of ({_INT}) tokens"
    ),
    "size": regex(rf"(?i:matmul|[a-z]?gemm|\bmm) ({_INT})(?! ?[x×*,])\b"),
    "concurrency": regex(rf"(?i)({_INT}) (?:concurrent|parallel|simultaneous) \w+"),
    "gpus": regex(
        r"(?<![.,\d])(?<![a-z]-)\b(\d,\d{3}|\d{1,5})(?! (?:[A-Z]+\d+[A-Z]?[ -])?(?i:gpu[ -]?)?(?:h|hours?|days?)\b)"
        r" ?(?:(?:[x×*] ?-?|(?=(?:G?[AHBLV]\d{2,3}[A-Z]?|MI\d{3}[A-Z]?|T4|L4)s?\b))"
        r"(?:(?:NVIDIA |Nvidia |AMD |Tesla |GeForce )*(?:[A-Z]{1,3}\d{2,4}\w*|RTX|GTX))|"
        r"[x×*-]? ?(?i:(?:(?<=[ x×*-])(?!(?:per|core|[kmgt]i?b) )\w+ )?gpus?(?!-[a-z]+\d| ?= ?\d)|gcds?|cards\b|"
        r"ranks\b))\b|\bn[Gg]pus (\d+)|\b(?:TP|tp)[- ]?(2|4|8|16|32|64)\b(?![.%])"  # TP99 is a percentile
    ),
}
# Cheap tests, since most lines state no size. One of these stands in every text that states one of the name.
_HINTS = {
    "batch": "batch bs seqs sequence prompt request sample B",
    "heads": "head H",
    "seq": "seq context ctx token S L",
    "head_dim": "head hdim D",
    "experts": "expert E",
    "tokens": "token T",
    "in_len": "len isl",
    "out_len": "len osl max",
    "hidden": "hidden d_model embed embd model",
    "ffn": "ffn intermediate d_ff",
    "topk": "top",
    "kv_heads": "kv key k/v",
    "prompts": "num",
    "accum": "accum",
    "layers": "layer",
    "elements": "elem float numel",
    "concurrency": "concurren user client stream running parallel simultaneous",
    "size": "size dim shape matrix matmul gemm mm",
}
_HINTED = {name: tuple(words.split()) for name, words in _HINTS.items()}
_ASSIGNED = regex(r"[\w)]\s*(?:==?|:|\bof\b|\bis\b)\s*\(?\d")
_WORDED = regex(
    r"(?i)batch|accum|concurren|parallel|simult|users|running|seq|context|head|hidden|top[ -]k|experts|gpu|gcd|card|--|"
    r"rank|tokens|layers|elem|floats|matmul|gemm|\b(?:bs ?|tp[- ]?)\d|\d ?[x×*] ?-?[A-Z]|\d [AHBLVT]\d"
)
_CHAIN = regex(rf"(?<![\w*×·])(?P<names>[MNKmnk](?:\s*=\s*[MNKmnk]){{1,2}})\s*[=:)]+,?\s*(?P<v>{_INT})")
_TUPLE = regex(
    r"(?<![\d.x×*])(?P<a>\d{1,7})\s*[x×*,]\s*(?P<b>\d{1,7})(?:\s*[x×*,]\s*(?P<c>\d{1,7}))?(?![\d.]*\d|\s*[x×*]\s*\d)"
)
_SHAPE = regex(  # "(M, N, K) = (4096, 1024, 512)", "MxNxK: 4096x1024x512"
    r"\b([MNKmnk])[\Wx]{1,3}([MNKmnk])[\Wx]{1,3}([MNKmnk])\W{1,5}(\d{2,6})[\Wx]{1,3}(\d{2,6})[\Wx]{1,3}(\d{2,6})(?!\d)"
)
_NODES = regex(
    r"(?i)\b(\d{1,4})(?: (?:nodes?|servers|machines|hosts),? (?:(?:each )?(?:with|having)|of|[x×*])|"
    r" ?[x×] ?(?=\d{1,2} ?[x×]? ?[AHBV]\d00)) ?(\d{1,2})\b|\bnodes\W+(\d{1,4})\s+gpus[ _]per[ _]node\W+(\d{1,2})\b|"
    r"\bngpu\W+(\d+)\W+nnodes\W+(\d+)|\bnnodes\W+(\d+)\W+nproc[_-]per[_-]node\W+(\d+)"
)
_CUBE = regex(r"(?<![\w.^])(\d{3,5})(?:³|\^3)(?!\d)")
_DIGIT = regex(r"\d")
_NO_SIZE = regex(r"(?m)^[^\d\n]*\n(?=\s*[^\d\s][^\d\n]*(?:\n|\Z))")  # a line without digits, and so the next
_PRODUCT = regex(r"\d\s*[x×*,]\s*\d")
# A word that names a number format, and phrases of several words.
FORMATS = (
    ("fp4", r"(?:nv|mx)?fp4|\w*e2m1"),
    ("fp6", r"(?:mx)?fp6|e[23]m[23]\w*"),
    ("fp8", r"(?:mx)?fp8|float8|[uf]?e4m3\w*|f?e5m2\w*|w8a8"),
    ("int8", r"u?int8|[isu]8|q8"),
    ("int4", r"u?int4|w4(?:a16|a8)?|q4|awq|gptq|nf4|[iu]4|4bit"),
    ("bf16", r"bf16|bfloat16|bfloat|bhalf"),
    ("fp16", r"fp16|float16|f16|hgemm|amp|16bit"),
    ("tf32", r"tf32|tensorfloat32"),
    ("fp64", r"fp64|float64|f64|dgemm"),
    ("fp32", r"fp32|float32|f32|sgemm|32bit"),
)
# "double buffering" and "half the time" are no formats.
_PHRASES = {"single precision": "fp32", "double precision": "fp64", "half precision": "fp16", "mixed precision": "fp16"}
_PHRASES |= {"4 bit": "int4", "16 bit": "fp16", "32 bit": "fp32"}
BITS = {"fp64": 64, "fp32": 32, "tf32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "fp6": 6, "int8": 8, "fp4": 4, "int4": 4}
_FORMAT = regex("|".join(rf"(?P<{name}>{form})" for name, form in FORMATS))
_SPLIT = regex(r"[^a-z0-9]+")
_NOT_IN = regex(
    r"(?i)\berrors? (?:against|vs\.?|relative to) (?:an? |the )?(?:fp|float)64\b|"
    r"\b(?:no|not|without) (?=tf32|fp\d|bf16|int\d)\w+|tf32\)?\W{0,3}(?:is |was )?(?:false|off|disabled|0\b)|"
    r"\b(?:fp32|float32|f32|fp16|int32)[ -]acc\w*\b(?! ?[:=]| in\b)|"
    r"\b(?:acc(?:um\w*)?|(?<=partial )sums)(?: (?:type|dtype|in))?[:=]?(?:[ /]?(?:fp|float|f|int)(?:16|32)\b)+"
)
# Accelerators of which no peaks are known here: where they are named a figure may be theirs.
_FOREIGN = regex(
    r"\b(?:TPU|Gaudi ?\d?|Ascend|Trainium|Inferentia|Cerebras|Groq|Xeon|EPYC|Ryzen|M[1-4] (?:Pro|Max|Ultra)|Apple M\d|"
    r"Arc\b|Core i\d|Threadripper|Graphcore|SambaNova|Snapdragon|Hygon|Moore Threads|Biren|Cambricon)\b"
)
DIGITS = {"two": "2", "three": "3", "four": "4", "six": "6", "eight": "8", "twelve": "12", "sixteen": "16"}
DIGITS |= {"eighteen": "18"}
NUMBERS = DIGITS | {"five": "5", "seven": "7", "nine": "9", "ten": "10"}  # of anything but GPUs
_SPELLED = regex(
    rf"(?i)\b(?:{'|'.join(DIGITS)})\b(?=(?: \w+)? (?:gpus|cards|ranks|devices|(?:[AHBLV]\d{{2,3}}[A-Z]?|T4|L4)s?\b))|"
    rf"(?<=\bon )(?P<on>{'|'.join(DIGITS)})(?=[,.;)])"
)
_BARE = regex(
    r"(?i)\b(the |my |an? |our |your |one |single |dual |this |(?=\d0\d0 (?:FE|founders|card)\b))"
    r"([2-5]0[5-9]0(?: ti)?(?: super)?)s?\b"
)  # "my 3090"
_PLURAL = regex(r"\b([A-Z]{1,3}\d{2,4}[A-Z]?)s\b")  # "64 A100s"


_NOT_FOUR = regex(r"(?i)\b(?:(?:w|int|q)[235678]|[235678][ -]?bits?)\b")  # "gptq-w3"


@lru_cache(maxsize=4096)
def _format_of(word: str) -> str:
    m = _FORMAT.fullmatch(word)
    return (m and m.lastgroup) or ""


def _formats(text: str) -> list[str]:
    words = dict.fromkeys(_SPLIT.split(text.lower()))
    if not any(map(_format_of, words)) and words.keys().isdisjoint(("precision", "bit")):
        return []
    text = _NOT_IN.sub("", text)
    words = dict.fromkeys(_SPLIT.split(text.lower()))
    if _NOT_FOUR.search(text):
        words = {w: None for w in words if w not in ("awq", "gptq")}
    found = [*filter(None, map(_format_of, words))]
    if "precision" in words or "bit" in words:
        plain = " ".join(_SPLIT.split(text.lower()))
        found += [name for phrase, name in _PHRASES.items() if phrase in plain]
    return found


@dataclass(frozen=True)
class Facts:
    """What one text states of each size, and its "devices", "formats" and "tuples" (4096x4096): all values given."""

    stated: dict[str, tuple[Any, ...]]
    foreign: bool

    def of(self, what: str) -> tuple[Any, ...]:
        return self.stated.get(what, ())

    @property
    def sizes(self) -> dict[str, float]:
        """The sizes of which it states one value."""
        return {n: v[0] for n, v in self.stated.items() if len(v) == 1 and isinstance(v[0], float)}


def _int(text: str) -> float:
    value = text.replace(",", "")
    return float(value[:-1]) * 1024 if value[-1] in "kK" else float(value)


@lru_cache(maxsize=20000)
def facts(text: str) -> Facts:
    """The facts that `text` states. A size that is not named is none."""
    named = _BARE.sub(r"\1RTX \2", _PLURAL.sub(r"\1", text)) if _DIGIT.search(text) else text
    stated: dict[str, list[Any]] = {"formats": _formats(text), "devices": find_in_text(named)}
    lower = text.lower()
    if any(word in lower for word in DIGITS):
        text = _SPELLED.sub(lambda m: DIGITS[m[0].lower()] + " GPUs" * bool(m["on"]), text)
    if _DIGIT.search(text):
        _sizes(text, stated)
    each = {name: tuple(dict.fromkeys(values)) for name, values in stated.items() if values}
    return Facts(each, bool(_FOREIGN.search(text)))


def _sizes(text: str, stated: dict[str, list[Any]]) -> None:
    """Add the sizes that a text with digits states."""
    for m in _SHAPE.finditer(text):
        for name, side in zip(m.groups()[:3], m.groups()[3:], strict=True):
            stated.setdefault(name.lower(), []).append(float(side))
    for m in _CHAIN.finditer(text):
        for name in re.findall(r"[mnk]", m["names"].lower()):
            stated.setdefault(name, []).append(_int(m["v"]))
    worded, assigned = _WORDED.search(text), _ASSIGNED.search(text)
    sized = _NO_SIZE.sub(";\n", text)
    both = f"{sized.lower()}\n{sized}"
    lengths = re.search(r"_len|put[ -]len|\b[io]sl\b|max.new", both)
    keyed = _KEYED if assigned else _SPACE if worded else ()
    for forms, names in ((_KEYED, keyed), (_COUNTED, _COUNTED if worded else ())):
        for name in names:
            if name in _HINTED and not any(word in both for word in _HINTED[name]):
                continue
            if name in ("in_len", "out_len") and not lengths:
                continue
            values = (_int(next(filter(None, m.groups()))) for m in forms[name].finditer(sized))
            stated.setdefault(name, []).extend(filter(None, values))
    for m in _NODES.finditer(text):
        nodes, of_one = map(_int, filter(None, m.groups()))
        gpus = stated.setdefault("gpus", [])
        if of_one in gpus:
            gpus.remove(of_one)
        gpus.append(nodes * of_one)
    # "1,024" is one number; a product counts from 2 on.
    found = _TUPLE.finditer(text) if _PRODUCT.search(text) else ()
    tuples = [m for m in found if "," not in m[0] or text[max(0, m.start() - 1)] in "([{"]
    stated["tuples"] = [*(tuple(int(g) for g in m.groups() if g) for m in tuples)]
    stated["tuples"] += [(int(m[1]),) * 3 for m in _CUBE.finditer(text)]


@lru_cache(maxsize=4096)
def size_of_name(header: str) -> str | None:
    """The size that a column or key of this name holds: "Batch Size (B)" -> "batch"; None for any other."""
    name = re.sub(r"\s*(?:\([A-Za-z_ ]+\)|(?:/|per) ?GPU)\s*$", "", header.strip().replace("_", " ")).strip()
    last = header.strip().rpartition(" ")[2]  # of a record within a record: "config seq_len"
    name = name if "_" not in last and last not in ("gpus", "batch") else last.replace("_", " ")
    both, plain = f"{header.lower()} {header}".replace("_", " "), name == header.strip()
    for size, form in _NAMES.items():
        hinted = any(word.replace("_", " ") in both for word in _HINTED.get(size, ("",)))
        spaced = form.replace("_", " ")
        if hinted and (re.fullmatch(spaced, name) or (not plain and re.fullmatch(form, header.strip()))):
            return size
    return None


def seconds(cell: str) -> str:
    """ "19:20" and "1:02:03" of a column of minutes in seconds."""
    m = re.fullmatch(r"(?:(\d+):)?(\d{1,3}):(\d\d)", cell)
    return f"{3600 * int(m[1] or 0) + 60 * int(m[2]) + int(m[3])}.0 s" if m else cell


def of_rows(name: str, cell: str) -> tuple[str, str]:
    """A column of rows, beside those of N and K, is M: "8192 (4 x 2048)"."""
    rows = re.search(r"(?i)\brows|\btokens", name)
    return ("M", re.sub(r"^(\d[\d,]*)(?: ?\(|, ).*", r"\1", cell)) if rows else (name, cell)


def one_variant(named: tuple[Device, ...], above: Iterable[Device], text: str) -> tuple[Device, ...]:
    """GPUs and those of the headings above: "H100" in a title is the "H100 PCIe" of the text below."""
    known = {d.name.partition("PCIe")[0].split()[-1] for d in named if "PCIe" in d.name}
    other = re.search(r"(?i)sxm|hbm3|nvl|nvlink", text)
    return tuple(dict.fromkeys((*named, *(d for d in above if other or not known & {*d.name.split()}))))
