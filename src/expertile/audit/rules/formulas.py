"""Published formulas over named figures: each figure that a formula makes, against what the others of its scope make.

A figure's row comes first, then its block, then the whole report, where a name must have one value. What follows from
one row or one block accuses where the formula is a definition; anything else asks.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNIT_OF, Finding, si
from expertile.audit.interval import Interval, exact
from expertile.audit.report import Report, Row
from expertile.audit.rules.named import Named, named

_WARP = 32
# Warps, blocks and KiB of shared memory that a multiprocessor holds (CUDA C++ Programming Guide, "Compute
# Capabilities"); of each block 1 KiB is the system's from 8.0 on.
_HOLDS = {
    (7, 0): (64, 32, 96),
    (7, 5): (32, 16, 64),
    (8, 0): (64, 32, 164),
    (8, 6): (48, 16, 100),
    (8, 7): (48, 16, 164),
    (8, 9): (48, 24, 100),
    (9, 0): (64, 32, 228),
    (10, 0): (64, 32, 228),
    (12, 0): (48, 24, 100),
}
_LIGHT = 299_792.458  # km/s


def _resident(registers: float, threads: float, most: float) -> float:
    """The share of a multiprocessor's warps that its 65,536 registers leave; a warp has them in steps of 256."""
    warps = math.ceil(threads / _WARP)
    blocks = 65536 // (math.ceil(registers * _WARP / 256) * 256) // warps if registers else most // warps
    return min(blocks, most // warps) * warps / most


_FUNCTIONS: dict[str, Callable[..., float]] = {
    f.__name__.strip("_"): f for f in (math.exp, math.log, math.ceil, math.floor, min, _resident)
}


_NEVER = 1 << 20


@dataclass(frozen=True)
class Formula:
    """`text`: "name = expression", "<=" or ">=", with alternatives between bars, of which the first is needed.

    `sure`: how many other figures must keep it that one of a row or block is accused. `fit`: how many must keep it at
    all, where it is a model. `slack`: the share by which a figure may be off; `far`: by which one is told. `unless`:
    words of the report that make it silent, `keys`: of a key. `reach`: "row", "block" or "report".
    """

    rule: str
    text: str
    sure: int = 0
    slack: float = 0.01
    far: float = 0.0
    fit: int = 0
    unless: str = ""
    reach: str = "report"
    keys: str = "(?!)"


_STATISTIC = r"\b(?:p\d+|mean|avg|average|median|max|min|std|total|all)\b"
FORMULAS = (
    # Training: batches, ranks, tokens (Narayanan et al. 2021, arXiv:2104.04473, for the pipeline's bubble).
    Formula("batch", "global_batch = micro * accum * dp", unless="ramp|warm-?up batch"),
    Formula("batch", "global_batch = micro * accum * world", sure=_NEVER, unless=r"ramp|tensor|pipeline|\btp\b|\bpp\b"),
    Formula(
        "ranks",
        "world = tp * pp * dp | tp * pp * dp * cp | tp * pp * dp * ep | tp * pp | dp * pp | tp * dp | tp | dp",
        sure=_NEVER,
        slack=0,
    ),
    Formula("tokens", "tokens_seen = steps * step_tokens", sure=_NEVER, unless="resum|ramp|warm-?up batch|epoch|padd"),
    Formula(
        "bubble",
        "bubble = (pp - 1) / (microbatches + pp - 1) | (pp - 1) / microbatches",
        sure=2,
        unless=r"(?<!non-)interleav|zero.bubble|virtual|dualpipe|chimera|measured bubble",
    ),
    Formula(
        "perplexity",
        "ppl = exp(nll) | 2 ** nll",
        sure=2,
        slack=0.04,
        far=0.1,
        reach="row",
        unless="label.smooth|per.byte|per.word|z.loss|aux|moe",
    ),
    Formula(
        "bits per byte",
        "bits_per_byte = nll / log(2) * tokens / text_bytes | nll * tokens / text_bytes",
        slack=0.02,
        reach="block",
    ),
    Formula(
        "warm-up",
        "lr = peak_lr * step / warmup_steps if step <= warmup_steps else lr | peak_lr * (step + 1) / "
        "warmup_steps if step <= warmup_steps else lr",
        fit=3,
        unless="cosine warm|exponential|quadratic",
    ),
    # Models.
    Formula(
        "parameters",
        "params = "
        + " | ".join(
            f"layers * (4 * hidden * hidden + {m} * hidden * ffn) + {e} * vocab * hidden"
            for m in (2, 3)
            for e in (0, 1, 2)
        ),
        sure=_NEVER,
        slack=0.02,
        unless="moe|expert|kv.head|key.value|lora|encoder|vision|head.dim",
    ),
    Formula("parameters", "active = always_active + topk * one_expert", slack=0.03, unless="(?<!no )shared expert"),
    Formula("memory", "adapter_file = adapter_params * 2 | adapter_params * 4", slack=0.03, fit=2),
    Formula(
        "routing",
        "expert_load = " + " | ".join(f"{n} * rank_tokens * topk / experts" for n in (1, 2, 4, 8, 16, 32, 64, 128)),
        sure=_NEVER,
    ),
    Formula(
        "memory",
        "checkpoint = " + " | ".join(f"params * {n}" for n in (2, 4, 1, 6, 8, 10, 12, 14, 16, 18, 20)),
        sure=_NEVER,
        slack=0.06,
        unless=r"int4|4-bit|gptq|awq|nf4|gguf|\bq\d_|lora|experts|shard of|per rank|\bmoe\b",
    ),
    Formula(
        "memory",
        "optimizer_bytes = " + " | ".join(f"params * {n}" for n in (8, 12, 2, 4, 6, 10, 14, 16)),
        sure=_NEVER,
        slack=0.06,
        unless=r"shard|zero|fsdp|per gpu|8-bit|adafactor|lion|muon|sgd|lora|offload|moe",
    ),
    Formula("memory", "metadata = kept_values * index_bits / 8", slack=0.05, reach="block"),
    Formula("memory", "layers_bytes = layers * layer_bytes", sure=2, slack=0.03, reach="row"),
    Formula("compression", "compression = 2 / weight_bytes", slack=0.02, fit=2, reach="row"),
    Formula("remaining time", "eta = (last_step - step_now) * step_seconds", slack=0.03, far=0.3, fit=2, reach="row"),
    # Serving (vLLM's log; Leviathan et al. 2023, arXiv:2211.17192, for the expected length).
    Formula("tokens/s", "output_rate = tokens_out / benchmark_time", far=0.05, reach="block"),
    Formula("tokens/s", "total_rate = (tokens_in + tokens_out) / benchmark_time", far=0.05, reach="block"),
    Formula("concurrency", "concurrency = blocks * block_tokens / longest", unless="sliding|hybrid"),
    Formula("concurrency", "concurrency = cache_tokens / longest", unless="sliding|hybrid"),
    Formula(
        "latency",
        "e2e = ttft + (output_tokens - 1) * tpot | ttft + output_tokens * tpot",
        slack=0.15,
        reach="row",
        keys=_STATISTIC,
    ),
    Formula("speculation", "expected_length = (1 - acceptance ** (draft_length + 1)) / (1 - acceptance)", fit=2),
    Formula("speculation", "accepted_length <= drafted + 1", reach="row"),
    Formula(
        "real-time factor", "rtf = processing / audio | audio / processing", sure=2, slack=0.03, far=0.2, reach="row"
    ),
    # GPUs (Nsight Compute's metrics; the roofline of Williams et al. 2009).
    Formula("occupancy", "occupancy <= resident(registers, block_threads, warps_per_sm)", slack=0.03),
    Formula("occupancy", "occupancy = active_warps / max_warps", reach="block"),
    Formula("occupancy", "achieved_occupancy <= occupancy", slack=0.02, reach="row"),
    Formula("occupancy", "resident_blocks <= floor(smem_per_sm / (block_smem + 1024))", unless="cluster of"),
    Formula("occupancy", "resident_blocks <= floor(warps_per_sm * 32 / block_threads)", reach="row"),
    Formula("waves", "waves = grid / (sms * min(limit_registers, limit_smem, limit_warps))", slack=0.02, reach="block"),
    Formula(
        "grid",
        "grid = ceil(gemm_m / tile_m) * ceil(gemm_n / tile_n)",
        sure=_NEVER,
        unless=r"persistent|(?<!no )split-?_?k|stream-?k|batched|grouped|cluster",
        reach="block",
    ),
    Formula("cycles", "duration = cycles / sm_clock", slack=0.03, reach="block"),
    Formula("IPC", "ipc <= issue_slots", reach="row", unless=r"\bperf stat|cpu cycles"),
    Formula("peak", "fp32_peak = cores * 2 * boost_clock | cores * boost_clock | cores * 4 * boost_clock", slack=0.02),
    Formula("bandwidth", "peak_bandwidth = data_rate * bus_width", slack=0.02, reach="block"),
    Formula("ridge", "ridge = compute_roof / memory_roof", slack=0.03, reach="block"),
    Formula("intensity", "flop_per_byte = flop / dram_bytes", slack=0.02, reach="row"),
    Formula("density", "density = nonzeros / (matrix_rows * matrix_cols)", slack=0.02, reach="row"),
    Formula("conflicts", "conflicts = wavefronts / requests", slack=0.03, reach="block"),
    Formula("throughput", "ns_day * 86400 = time_step * 0.0864 / md_step", sure=_NEVER, slack=0.03),
    Formula("traffic", "dram_read = l2_read * (1 - l2_hits)", sure=_NEVER, slack=0.05, reach="block"),
    Formula("bytes in flight", "in_flight = latency * bandwidth", sure=_NEVER, slack=0.05, reach="block"),
    Formula("memory", "max_allocated <= max_reserved", reach="row"),
    Formula("memory", "allocated <= reserved", reach="row", unless="slots?\\b|quota|slurm"),
    Formula("total", "whole = count * each", sure=_NEVER, slack=0.03, reach="block", unless="warm"),
    # Figures that count something, and what they make.
    Formula(
        "concurrency",
        "clients = request_rate * mean_latency",
        sure=_NEVER,
        slack=0.06,
        unless=r"open.loop|poisson|rate.limit|think_?.?time\W{1,4}[1-9]|target rate|\btokens?\b",
    ),
    Formula(
        "throughput", "request_rate = completed / window", sure=_NEVER, slack=0.03, unless="ramp|warm", reach="block"
    ),
    Formula("ratio", "wer = (substitutions + deletions + insertions) / words", slack=0.01, reach="row"),
    Formula("ratio", "row_nonzeros = nonzeros / matrix_rows", slack=0.01, reach="block"),
    Formula(
        "grid",
        "launched_blocks = ceil(elements / (block_threads * thread_elements))",
        reach="block",
        unless="persistent|grid.stride",
    ),
    Formula("waves", "all_waves = launched_blocks / wave_blocks", slack=0.02, reach="block"),
    Formula("share of peak", "efficiency = rmax / rpeak", slack=0.01, reach="block", unless="scaling|parallel eff"),
    # Energy and carbon.
    Formula("power", "mean_power <= power_limit", slack=0.1, reach="row", unless=r"\bgpus\b|\bwall|server|chassis"),
    Formula(
        "energy",
        "energy = " + " | ".join(f"{n} * mean_power * ran_for" for n in (1, 2, 4, 8, 16, "world")),
        sure=_NEVER,
        slack=0.03,
    ),
    Formula("energy", "energy = gpu_hours * gpu_power", slack=0.03, unless="pue|cool|host|node power"),
    Formula(
        "carbon",
        "carbon = energy * grid_carbon | energy * pue * grid_carbon",
        sure=_NEVER,
        slack=0.04,
        unless="offset|embodied .*includ",
    ),
    # Input and output; hosts.
    Formula("throughput", "iops = io_bandwidth / block_bytes", slack=0.04, reach="block", unless="bssplit|mixed"),
    Formula("throughput", "read_rate = sample_rate * sample_bytes", slack=0.02, fit=2),
    Formula("round trip", f"rtt >= 2 * km / {_LIGHT}", reach="row"),
    Formula("processors", "user <= hardware_threads * real", sure=_NEVER, slack=0.03),
)
_PART = re.compile(r"\b(?:train|val|valid|test|eval)\b")
_FAR = 40.0  # off by more, a figure is of something else


@lru_cache(maxsize=256)
def _compiled(expression: str) -> tuple[CodeType, tuple[str, ...]]:
    names = dict.fromkeys(re.findall(r"[a-z_][a-z_0-9]*", expression))
    return compile(expression, "formula", "eval"), tuple(n for n in names if n not in (*_FUNCTIONS, "if", "else"))


@dataclass(frozen=True)
class _Scope:
    """Values of a formula's names, and how far from its figure the furthest stands: 0 in its row, 1 in its block."""

    held: dict[str, Named]
    distance: int


def formulas(report: Report) -> Iterator[Finding]:
    """Every figure that a formula makes."""
    for formula in FORMULAS:
        left, sign, right = re.split(r" ([<>]?=) ", formula.text, maxsplit=1)
        target = _compiled(left)[1][0]
        some = named(report, target)
        if not some or (formula.unless and re.search(formula.unless, report.text)):
            continue
        ways = right.split(" | ")
        broken, kept = [], 0
        by_way: dict[int, list[tuple[Named, list[_Made | None]]]] = {}
        for figure in {(f.line, f.value.mid): f for f in some}.values():
            several = [_made(report, figure, formula, left, way) for way in ways]
            made = [m for m in several if m] if several[0] else []  # the others excuse
            if made and any(_keeps(m, sign, formula.slack) for m in made):
                kept += 1
                way = next(i for i, m in enumerate(several) if m and _keeps(m, sign, formula.slack))
                by_way.setdefault(way, []).append((figure, several))
            elif made and not any(_keeps(m, sign, formula.far) for m in made):
                broken.append((figure, min(made, key=lambda m: abs(math.log(m[0].mid / m[1].mid)))))
        # One row counts otherwise than all others.
        usual = max(by_way, key=lambda w: len(by_way[w]), default=0)
        odd = [x for w, some_of in by_way.items() if w != usual for x in some_of]
        if formula.reach == "row" and len(odd) == 1 and len(by_way[usual]) > 2 and (m := odd[0][1][usual]):
            broken += [] if _keeps(m, sign, max(formula.slack, formula.far)) else [(odd[0][0], m)]
        if kept < formula.fit or (len(broken) > kept and len(broken) > 2):
            continue  # another convention
        near = 2 if formula.sure < _NEVER else 1
        alone = len({f.value.mid for f in some}) == 1 or kept > 1
        yield from (_broken(formula, sign, kept, *each) for each in broken if alone or each[1][2].distance < near)


_Made = tuple[Interval, Interval, _Scope, str]


def _made(report: Report, figure: Named, formula: Formula, left: str, way: str) -> _Made | None:
    """Both sides of one way to make the figure; None where a name has no value, or the sides are far apart."""
    (made, names), (said, of) = _compiled(way), _compiled(left)
    scope = _scope(report, of[0], figure, tuple(dict.fromkeys((*names, *of[1:]))), formula)
    if scope is None or any(re.search(formula.keys, f.key) for f in (figure, *scope.held.values())):
        return None
    target, given = {of[0]: figure.value}, {n: f.value for n, f in scope.held.items()}
    try:
        sides = [_value(code, target | given) for code in (said, made)]
    except (ArithmeticError, ValueError):
        return None
    if min(s.lo for s in sides) <= 0 or not 1 / _FAR < sides[0].mid / sides[1].mid < _FAR:
        return None
    shown = re.sub(r"[a-z_][a-z_0-9]*", lambda m: given_text(m[0], scope), way.split(" if ")[0])
    return sides[0], sides[1], scope, shown


def given_text(name: str, scope: _Scope) -> str:
    return _text(scope.held[name]) if name in scope.held else name


def _text(f: Named) -> str:
    """A figure with its unit, where its column or key has that."""
    return si(f.value.mid, UNIT_OF[f.kind]) if f.kind in UNIT_OF and not re.search(r"[^\d.,]", f.text) else f.text


def _value(code: CodeType, given: dict[str, Interval]) -> Interval:
    """The least and the largest value, at the ends of what was printed: every formula grows or falls with each name."""
    names = code.co_names
    free = {n: v for n, v in given.items() if n in names}

    def at(values: dict[str, float]) -> float:
        return float(eval(code, {"__builtins__": {}, **_FUNCTIONS}, values))

    mid = at({n: v.mid for n, v in free.items()})
    open_ = [n for n, v in free.items() if v.lo < v.hi]
    ends = [
        at({n: v.mid for n, v in free.items()} | dict(zip(open_, some, strict=True)))
        for some in itertools.product(*((free[n].lo, free[n].hi) for n in open_))
    ]
    return Interval(min(mid, *ends, mid), mid, max(mid, *ends, mid))


def _keeps(made: _Made, sign: str, slack: float) -> bool:
    said, of = made[:2]
    if sign == ">=":
        return of.lo <= said.hi * (1 + slack)
    return said.meets(of, slack) if sign == "=" else said.lo <= of.hi * (1 + slack)


def _broken(formula: Formula, sign: str, kept: int, figure: Named, made: _Made) -> Finding:
    _, of, scope, shown = made
    sure = kept >= formula.sure and scope.distance < 2
    for spelled, mark in ((r" \*\* ", "^"), (r" \* ", " × "), (" / ", " ÷ "), (" - ", " − ")):
        shown = re.sub(spelled, mark, shown)
    itself = formula.text.startswith(re.match(r"\w+", formula.text)[0] + " " + sign)  # type: ignore[index]
    value = _shown(of.mid, figure.kind) if itself else f"{of.mid:,.4g}"
    said = figure.text if not itself or _text(figure) == figure.text else f"{figure.text} ({_text(figure)})"
    shown = shown if shown in value else f"{shown} = {value}"
    shown = re.sub(r"resident\((.*), (.*), .*\) =", r"\1 registers × \2 threads:", shown)
    than = "most" if sign == "<=" else "least"
    message = f"{shown}, not {said}" if sign == "=" else f"{said} against at {than} {shown}"
    message += "" if sure else ": are they of the same run?"
    verdict = QUESTION if not sure else INCONSISTENT if sign == "=" else IMPOSSIBLE
    beside = [f for f in scope.held.values() if f.line]
    quote = ", ".join(dict.fromkeys(f.text for f in (figure, *beside)))
    return Finding(verdict, formula.rule, figure.line, quote, message, (figure.line, *(f.line for f in beside)))


def _shown(value: float, kind: str) -> str:
    if kind == "percent":
        return f"{100 * value:.3g} %"
    if kind == "carbon":
        return f"{value / 1e6:.4g} t CO2"
    return si(value, UNIT_OF[kind]) if kind in UNIT_OF else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def _scope(report: Report, target: str, figure: Named, names: tuple[str, ...], formula: Formula) -> _Scope | None:
    found: dict[str, Named] = {}
    furthest = 0
    # What stands above the last figure of this name is of another run.
    others = named(report, target)
    above = [f.line for f in others if f.row.block == figure.row.block and f.line < figure.line]
    last = 0 if formula.fit else max(above, default=0)
    for name in names:
        at = _nearest(report, named(report, name), figure, last) or _of_device(figure.row, name)
        if at is None or at[1] > ("row", "block", "report").index(formula.reach):
            return None
        found[name] = at[0]
        furthest = max(furthest, at[1])
    return _Scope(found, furthest)


def _nearest(report: Report, some: tuple[Named, ...], figure: Named, last: int) -> tuple[Named, int] | None:
    """The one value of a name in the figure's row, its block, the report; and how far it stands."""
    row = figure.row
    part = _PART.findall(figure.key)
    if part:  # of training or of evaluation
        some = tuple(f for f in some if set(_PART.findall(f.key)) <= set(part))
    block = [f for f in some if f.row.block == row.block and not _in_grid(f.row) and f.line > last]
    for distance, of in enumerate(([f for f in some if f.row is row], block, [f for f in some if not _in_grid(f.row)])):
        if len({f.value.mid for f in of}) == 1 and not (distance == 1 and _in_grid(row)):
            return of[0], distance
        above = [f for f in of if f.line <= figure.line]
        if distance == 1 and above and len(of) > 1 and report.blocks[row.block].kind == "code":
            return max(above, key=lambda f: f.line), distance  # a log's
        if of and distance < 1:
            return None
    return None


@lru_cache(maxsize=4096)
def _in_grid(row: Row) -> bool:
    """Whether it is one of several rows of a table, whose figures are their own."""
    return row.kind == "table" and any(
        len(g.rows) > 1 and len(g.header) > 2 and row in g.rows for g in row.report.grids
    )


def _of_device(row: Row, name: str) -> tuple[Named, int] | None:
    """What the row's GPU has of warps, blocks and shared memory."""
    if name not in ("warps_per_sm", "smem_per_sm", "issue_slots"):
        return None
    told = {(int(a), int(b)) for a, b in re.findall(r"\b(?:cc|compute capability:?) +(\d+)\.(\d)\b", row.report.text)}
    of = {d.capability for d in row.devices} or {d.capability for d in row.report.everything.of("devices")}
    parts = told if len(told) == 1 else {c for c in of if c}
    if len(parts) != 1 or (most := _HOLDS.get(parts.pop())) is None:
        return None
    if name == "issue_slots":  # four schedulers, one instruction each a cycle, from 7.0 on
        return Named("", "n", exact(4.0), "4 a cycle", 0, row), 0
    value, text = (most[0], f"{most[0]} warps") if name == "warps_per_sm" else (most[2] * 1024, f"{most[2]} KiB")
    return Named("", "n", exact(float(value)), text, 0, row), 0
