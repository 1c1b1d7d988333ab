"""Dimensions and shapes in a report's text: "M=4096", "Hidden Dim: 4096", "--batch 16", "8 GEMMs (1024×1024)"."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAMES: dict[str, tuple[str, ...]] = {
    "m": ("m", "dim m", "m dim"),
    "n": ("n", "dim n"),
    "k": ("k", "dim k"),
    "mnk": ("m n k", "n m k", "m k n", "matrix n", "mnk"),
    "groups": ("e", "g", "experts", "num experts", "number of experts", "groups", "num groups", "expert count"),
    "tokens": ("tokens", "num tokens", "total tokens", "n tokens", "number of tokens", "t", "token count"),
    "hidden": ("hidden", "hidden dim", "hidden size", "hidden dimension", "d model", "dmodel", "model dim", "embed dim",
               "hidden dims", "hidden sizes"),
    "ffn": ("ffn", "ffn dim", "ffn size", "intermediate", "intermediate size", "intermediate dim", "d ff", "ffn hidden",
            "moe intermediate size", "intermediate dimension"),
    "topk": ("topk", "top k", "experts per token", "num experts per tok"),
    "batch": ("b", "bs", "batch", "batch size", "batchsize", "batches"),
    "heads": ("h", "heads", "num heads", "nheads", "n heads", "number of heads", "q heads", "num q heads"),
    "kv_heads": ("kv heads", "num kv heads", "n kv heads"),
    "seq": ("s", "l", "seq", "seq len", "seqlen", "seq length", "sequence length", "sequence", "n ctx", "context",
            "context length", "sequence len", "max seq len", "ctx"),
    "head_dim": ("d", "head dim", "headdim", "hdim", "dim head", "d head", "head size", "head dimension"),
    "rows": ("rows", "num rows", "n rows"),
    "cols": ("cols", "columns", "num cols", "n cols", "row length", "vocab", "vocab size"),
    "elements": ("elements", "num elements", "n elements", "numel", "vector size", "vector length", "array size"),
    "size": ("size", "matrix size", "dim", "matrix dim", "problem size", "input size", "dimension", "matrix dimension"),
    "tile": ("tile", "tile size", "block size m", "tile m", "block m"),
}  # fmt: skip
_BY_NAME = {alias: name for name, aliases in _NAMES.items() for alias in aliases}
_WHOLE = r"\d{1,3}(?:,\d{3})+|\d+"
_ASSIGNMENT = re.compile(
    rf"(?<![\w-])(?P<name>[A-Za-z][A-Za-z_]*(?:[ _-][A-Za-z]+){{0,2}})\s*(?:="
    rf"|:)\s*(?P<value>{_WHOLE})(?P<kilo>[kK])?(?![\w.%^]|\s?[×*])"
)
_FLAG = re.compile(rf"--(?P<name>[a-z][a-z_-]*)[ =](?P<value>{_WHOLE})(?![\w.])")
_COUNTED = re.compile(
    rf"(?<![\w.])(?P<value>{_WHOLE})(?P<kilo>[kK])?\s+(?P<name>tokens|experts|heads|rows|columns|elements)\b(?!\s*/)",
    re.I,
)
_NAMED_AFTER = re.compile(
    r"\b(?P<name>batch size|batch|seq(?:uence)?[ _-]?len(?:gth)?|hidden (?:size|dim)|head dim|top)[ -](?:of "
    rf")?(?P<value>{_WHOLE})\b"
    r"(?!\.\d|\s?%|\s?x\b)", re.I
)  # fmt: skip
_TIMES = r"\s?(?:x|X|×|\*|✕)\s?"
_SHAPE = re.compile(
    rf"(?<![\w.])(?P<dims>(?:{_WHOLE})[kK]?(?:{_TIMES}(?:{_WHOLE})(?:[kK]\b)?)+)"
    r"(?![\w.]?\d)(?![A-Za-z²³^])(?!\s?(?:ms|us|µs|μs)\b)"
)
_BRACKET = re.compile(rf"[\[(](?P<dims>(?:{_WHOLE})(?:\s*,\s*(?:\d+))+)[\])]")
_POWER = re.compile(r"(?<![\w.^])(?P<base>\d{2,6})(?:\^(?P<e>[23])(?!\d)|(?P<u>[²³]))")
_TWO_POWER = re.compile(r"\b2\^(?P<e>\d{1,2})\b")
_COUNT_BEFORE = re.compile(
    rf"(?<![\w.,])(?P<count>{_WHOLE})\s*(?:x|×)?\s*(?:separate |independent |small |individual |large |batched )*"
    r"(?:GEMMs?|matmuls?|products|matrices|matrix multiplications?|problems|groups|experts)\s*(?:of |\(|,|:|@|x|×"
    r"|each)?\s*(?:size )?$", re.I
)  # fmt: skip
_TIMES_COUNT = re.compile(rf"(?<![\w.])(?P<count>{_WHOLE})\s*[x×]\s*[(\[]?\s*$")
_TILE_BEFORE = re.compile(r"(?:tile|block|cta|warp|mma|grid|cluster|granularity|instruction)[\w\s:=()-]{0,18}$", re.I)
_TILE_AFTER = re.compile(
    r"\s*(?:\w+[ -])?(?:tiles?|blocks?|threads?|cta|mma|or \d+[x×]\d+ (?:\w+ )?tiles?|block tile)\b", re.I
)


@dataclass(frozen=True)
class Shape:
    """A shape literal: its sizes, how many such problems ("8 GEMMs (1024×1024)" is 8), and where it stands."""

    sizes: tuple[int, ...]
    count: int
    start: int
    end: int

    @property
    def elements(self) -> int:
        """Product of the sizes."""
        total = 1
        for size in self.sizes:
            total *= size
        return total


def dim_name(text: str) -> str | None:
    """The dimension a header or key names ("Hidden Dim" -> "hidden"), or None."""
    words = re.sub(r"\([^)]*\)|\[[^\]]*\]", " ", text.lower())
    words = re.sub(r"[^a-z0-9]+", " ", words).strip()
    return _BY_NAME.get(words)


def named_sizes(header: str, cell: str) -> dict[str, int]:
    """Dimensions of a shape cell whose header names them: ("K×N", "4096×11008") -> {"k": 4096, "n": 11008}."""
    inner = re.search(r"[(\[]([^)\]]*)[)\]]", header)
    for text in ([inner[1]] if inner else []) + [header]:
        names = [dim_name(part) for part in re.split(r"\s*[x×,*]\s*|(?<=[A-Z])(?=[A-Z])", text.strip())]
        shapes = shapes_in(cell) or shapes_in(f"({cell})")
        known = [n for n in names if n is not None]
        if (
            len(names) >= 2
            and len(known) == len(names)
            and shapes
            and len(shapes[0].sizes) == len(names)
            and len(set(known)) == len(known)
        ):
            return dict(zip(known, shapes[0].sizes, strict=True))
    return {}


def number(text: str, kilo: bool = False) -> int:
    """ "16,384" -> 16384; with `kilo`, "4" -> 4096 (lengths named "4k" are multiples of 1024)."""
    value = int(text.replace(",", ""))
    return value * 1024 if kilo else value


def dims_in(text: str) -> dict[str, int]:
    """Every named dimension in one line; the first value of a name wins."""
    found: dict[str, int] = {}
    for pattern in (_ASSIGNMENT, _FLAG, _NAMED_AFTER, _COUNTED):
        for match in pattern.finditer(text):
            groups = match.groupdict()
            words = groups["name"]
            name = dim_name(words) or dim_name(words.split(" ")[-1])
            if words.lower() == "top":
                name = "topk"
            if name and name not in found:
                value = number(groups["value"], bool(groups.get("kilo")))
                if value > 0:
                    found[name] = value
    chained = re.search(rf"\bM\s?=\s?N\s?=\s?K\s?=\s?({_WHOLE})", text) or re.search(
        rf"\bM\s?=\s?K\s?=\s?N\s?=\s?({_WHOLE})", text
    )
    if chained:
        found.update(dict.fromkeys("mnk", number(chained[1])))
    if "heads" in found and not {"seq", "head_dim", "batch"} & found.keys() and re.search(r"\bH\s?=", text):
        found.setdefault("hidden", found.pop("heads"))  # a lone "H=4096" beside M and N is the hidden size
    return found


def shapes_in(text: str) -> list[Shape]:
    """Every shape literal in `text`, tile and block sizes left out, longest reading first come."""
    found: list[Shape] = []
    for pattern in (_SHAPE, _BRACKET):
        for match in pattern.finditer(text):
            if _is_tile(text, match.start(), match.end()):
                continue
            parts = re.split(rf"{_TIMES}|\s*,\s*(?=\d+\s*(?:,|$))", match["dims"])
            sizes = tuple(number(p.rstrip("kK"), p[-1] in "kK") for p in parts if p.strip())
            if len(sizes) < 2 or any(s <= 0 for s in sizes):
                continue
            if any(s.start <= match.start() < s.end for s in found):
                continue
            found.append(Shape(sizes, _count(text, match.start()), match.start(), match.end()))
    for match in _POWER.finditer(text):
        power = int(match["e"]) if match["e"] else {"²": 2, "³": 3}[match["u"]]
        base = int(match["base"])
        if base >= 16 and not _is_tile(text, match.start(), match.end()):
            found.append(Shape((base,) * power, _count(text, match.start()), match.start(), match.end()))
    return sorted(found, key=lambda s: s.start)


def power_of_two(text: str) -> int | None:
    """ "N = 2^30" -> 1073741824."""
    match = _TWO_POWER.search(text)
    return 2 ** int(match["e"]) if match else None


def _is_tile(text: str, start: int, end: int) -> bool:
    return bool(_TILE_BEFORE.search(text[:start]) or _TILE_AFTER.match(text[end:]))


def _count(text: str, start: int) -> int:
    match = _COUNT_BEFORE.search(text[:start]) or _TIMES_COUNT.search(text[:start])
    return number(match["count"]) if match else 1
