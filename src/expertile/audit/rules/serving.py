"""Tokens, batches and latencies; MFU from parameters."""

import itertools
import math
import re
from collections.abc import Iterator

from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, Finding, finding, si
from expertile.audit.interval import Interval, exact, odd_ones
from expertile.audit.quantity import Quantity, same_statistic
from expertile.audit.report import Report, Row
from expertile.audit.rules.peaks import gpu_counts
from expertile.device import DTYPES

_WIDE = 0.08
_NOT_WALL = re.compile(
    r"(?i)ttft|first token|prefill|prompt|load|warm-?up|compile|p9\d|std|queue|tpot|itl|inter-?token|(?:per|next) token"
)
_PARALLEL = re.compile(
    r"(?i)(?:concurren\w*|users|clients|streams|parallel|max_num_seqs|accum\w*)[^\d\n]{0,16}(\d+)|"
    r"(\d+)[- ](?:way|concurrent|parallel|users|clients|streams|slots)"
)


def _at_once(row: Row) -> list[float]:
    """Numbers of sequences, GPUs or users that may be counted in: 1 and every such size that is stated anywhere."""
    everything = row.report.everything
    stated = [v for name in ("batch", "gpus", "experts", "heads") for v in everything.of(name)]
    users = [float(a or b) for a, b in _PARALLEL.findall(row.words)]
    return list(dict.fromkeys((1.0, *stated, *users, *(v for n, v in row.own.items() if n in ("batch", "gpus")))))


def _small_numbers(row: Row) -> list[float]:
    """Whole numbers of the row: a count of sequences may hide among them."""
    found = re.findall(r"(?<![\d.,])(\d{1,3})(?![\d.,%]|\s?(?:ms|s|x|tok))", row.text)
    return [float(n) for n in found if 2 <= int(n) <= 512][:8]


def _is_any(f: Interval, *values: float) -> bool:
    return any(f.meets(v, _WIDE) for v in values)


def per_token(report: Report) -> Iterator[Finding]:
    """ms per token against tokens/s: one is the inverse of the other, times the sequences at once."""
    held = [(row, row.only("s_per_token"), row.only("tokens_per_s")) for row in report.rows]
    for grid in report.grids:
        # A table's rows must confirm one another: each column may have its own percentile.
        for i, j in itertools.product(grid.columns("s_per_token"), grid.columns("tokens_per_s")):
            cells = [(r, a, b) for r in grid.body if (a := r.figure(i, "s_per_token")) and (b := r.figure(j))]
            found = odd_ones([a.value * b.value for _, a, b in cells], (1.0,))
            held += [cells[r] for r in found[1]] if found and found[0] == 1.0 else []
    for row, a, b in held:
        # Below the inverse, prefill or waiting may take the rest of the time.
        slower = a and b and (a.value * b.value).mid < 1 and (row.of("time") or _NOT_WALL.search(row.text))
        if a and b and not slower and not _is_any(a.value * b.value, *_at_once(row)):
            message = f"{a.text} per token is {si(1 / a.value.mid, 'tokens/s')}, not {b.text}"
            yield finding(INCONSISTENT, "tokens/s", message, b, a)


_NOT_ALL = re.compile(r"(?i)concurren|requests|per user|steady|decode only|excluding|worker|stream|pipeline|p9\d")
_TOKENS_KEY = re.compile(
    r"(?im)^\W*(?:(?:total|generated|output|new|completion|num) )*tokens(?: generated)?\W*[:=]\s*(\d[\d,]*)\s*$"
)


def token_counts(report: Report) -> Iterator[Finding]:
    """Tokens / time = tokens/s: "512 tokens in 8.0 s (64 tok/s)"."""
    for row in report.rows:
        q, t = row.only("tokens_per_s") or row.only("items_per_s"), row.only("time")
        if not (q and t) or _NOT_WALL.search(row.text) or row.of("rate") or len(row.of("time")) > 1:
            continue
        of = "run" if q.kind == "tokens_per_s" else q.item
        counts = [c for c in row.of("tokens", "items") if c.exact and (c.kind == "tokens" or c.item == of)]
        counts = counts if q.kind == "tokens_per_s" else [c for c in counts if c.kind == "items"]
        if row.kind == "record":
            keyed = [float(m.replace(",", "")) for m in _TOKENS_KEY.findall(row.text)]
            counts += [Quantity("tokens", exact(v), f"{v:.0f} tokens", "tokens", row.line) for v in keyed]
        if not 1 <= len(counts) <= 3 or _NOT_ALL.search(row.text):
            continue
        sums = [c.value for c in counts]
        sums.append(Interval(sum(s.lo for s in sums), sum(s.mid for s in sums), sum(s.hi for s in sums)))
        made, more = q.value * t.value, [*_at_once(row), *_small_numbers(row)]
        if not any(made.meets(s * n, _WIDE) or made.meets(s / n, _WIDE) for s in sums for n in more if s.mid):
            c = counts[0]
            message = f"{c.text} in {t.text} is {si(c.value.mid / t.value.mid, 'tokens/s')}, not {q.text}"
            yield finding(INCONSISTENT, "tokens/s", message, q, c, t)


def batches(report: Report) -> Iterator[Finding]:
    """Throughput = batch / latency: the rows of a table, over several batches, agree but for one."""
    for grid, kind, time in itertools.product(report.grids, ("items_per_s", "tokens_per_s"), ("time", "s_per_item")):
        for cells in grid.pairs(kind, time):
            held = [(a, b, size.value) for row, a, b in cells if (size := row.size("batch"))]
            scaled = [a.value * b.value / size for a, b, size in held]
            found = odd_ones(scaled, (1.0,)) if len({size for _, _, size in held}) > 1 else None
            for r in found[1] if found and len(held) - len(found[1]) > 1 else ():
                (a, b, _), off = held[r], scaled[r] / (found[0] if found else 1.0)
                if not off.meets(1.0, 0.1):
                    message = f"{a.text} × {b.text} is {off.mid:.3g} times what the other rows give for their batch"
                    yield finding(INCONSISTENT, "throughput", message, a, b)


_STEPS = ("it", "iter", "iteration", "step", "batch", "batche")


def steps(report: Report) -> Iterator[Finding]:
    """Batch / latency = items/s, and batch · sequence length / step time = tokens/s, of one line or record."""
    for row in report.rows:
        q, t = row.only("items_per_s") or row.only("tokens_per_s"), row.only("time") or row.only("s_per_item")
        if not (q and t) or len(row.of("time", "s_per_item")) != 1 or q.item in _STEPS or t.value.mid > 600:
            continue
        if _NOT_WALL.search(t.words) or not same_statistic(q.label, t.label) or _NOT_ALL.search(row.text):
            continue
        tokens = q.kind == "tokens_per_s"
        if tokens and (row.of("tokens") or not re.search(r"(?i)step|iter|batch", t.words)):
            continue
        sizes = [row.size(name) for name in (("batch", "seq") if tokens else ("batch",))]
        known = [s for s in sizes if s and (s.near if tokens else s.line == row.line or row.facts.of("batch"))]
        if len(known) < len(sizes):
            continue
        items, at_once = math.prod(s.value for s in known), _at_once(row)
        counts = [a * b for a in at_once for b in at_once] if tokens else [*at_once, *_small_numbers(row)]
        of_one = [c / n for c in counts for n in (1.0, known[0].value)]
        if not _is_any(q.value * t.value / items, *of_one, *(1 / c for c in counts)):
            rule, unit = ("tokens/s", "tokens/s") if tokens else ("throughput", "per s")
            of = f"{' × '.join(f'{s.value:.0f}' for s in known)}{' tokens' * tokens} in {t.text}"
            message = f"{of} is {si(items / t.value.mid, unit)}, not {q.text}"
            yield finding(INCONSISTENT, rule, message, q, t, lines=tuple(s.line for s in known))


_MFU = re.compile(r"(?i)\bmfu\b|model flops? utili[sz]ation")
_SPARSE_MODEL = re.compile(r"(?i)\bmoe\b|mixture|mixtral|\d+x\d+b|a\d+b\b|lora|frozen|vision|vit\b|diffusion|active")
_MODEL = re.compile(
    r"(?i)(?:llama|gpt|mistral|qwen|opt|falcon|bloom|phi|gemma|pythia|mpt|model)[\w.-]*?[- ](\d+(?:\.\d+)?)b\b"
)


def mfu(report: Report) -> Iterator[Finding]:
    """6·N FLOPs for a trained token (2·N for a generated one) give the rate; attention adds to it.

    The formula is that of Kaplan et al. 2020 (arXiv:2001.08361), MFU that of Chowdhery et al. 2022 (arXiv:2204.02311).
    """
    everywhere = {v.value.mid for r in report.rows for v in r.of("params")}
    everywhere |= {float(v) * 1e9 for v in _MODEL.findall(report.text)}
    for row in report.all_rows:
        shares = [q for q in row.of("percent") if _MFU.search(q.words) and q.exact]
        p, q = shares[0] if len(shares) == 1 else None, row.only("tokens_per_s")
        if p and p.value.lo > 1.0:
            yield finding(IMPOSSIBLE, "MFU", f"an MFU of {p.text} is above 100 %", p)
        if not (p and q and p.value.mid) or _SPARSE_MODEL.search(row.words):
            continue
        sizes = [n for n in ({v.value.mid for v in row.of("params")} or everywhere) if n >= 5e7]
        # Whatever was multiplied, many divide by the bf16 peak.
        formats = {"bf16", "fp16", *(f for f in row.report.everything.of("formats") if f in DTYPES and f != "fp32")}
        peaks = [x for d in row.devices for f in formats for x in (d.peak(f), d.sparse_peak(f)) if x]
        if len(sizes) != 1 or not peaks:
            continue
        trained = re.search(r"(?i)train|step|fine-?tun", row.words)
        counts = row.facts.of("gpus") if row.kind == "table" else ()
        each = [sizes[0] * q.value.mid / (x * g) for x in peaks for g in counts or gpu_counts(row)]
        # "7B" may be 6.7 or 7.6; attention over long texts adds to 6·N.
        if not any((5.1 if trained else 1.7) * e <= p.value.hi and p.value.lo <= 8.3 * e for e in each):
            best = min((k * e for e in each for k in (2, 6)[bool(trained) :]), key=lambda x: abs(x - p.value.mid))
            at = f"{sizes[0] / 1e9:.3g} B parameters at {q.text} on {row.devices[0].name}"
            message = f"{at} are an MFU of {100 * best:.3g} %, not {p.text}"
            yield finding(INCONSISTENT, "MFU", message, p, q)
