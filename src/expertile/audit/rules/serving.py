"""Tokens, batches and latencies; MFU from parameters."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, Finding, finding, si
from expertile.audit.interval import Interval, exact
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.peaks import devices, gpu_counts
from expertile.audit.rules.relation import odd_ones, same_owner
from expertile.device import DTYPES

_WIDE = 0.08
_NOT_WALL = re.compile(
    r"(?i)ttft|first token|prefill|prompt|load|warm-?up|compile|p9\d|std|queue|tpot|itl|inter-?token|(?:per|next) token"
)
_PARALLEL = re.compile(r"(?i)(?:concurren\w*|users|clients|streams|parallel|max_num_seqs|accum\w*)[^\d\n]{0,16}(\d+)")
_COUNTED = re.compile(r"(?i)(\d+)[- ](?:way|concurrent|parallel|users|clients|streams|slots)")


def _at_once(row: Row) -> list[float]:
    """Numbers of sequences, GPUs or users that may be counted in: 1 and every such size that is stated anywhere."""
    everything, words = row.scope.everything.sizes, row.scope.words
    stated = [v for name in ("batch", "gpus", "experts", "heads") for v in everything.get(name, ())]
    users = [float(m) for pattern in (_PARALLEL, _COUNTED) for m in pattern.findall(words)]
    return list(dict.fromkeys((1.0, *stated, *users, *(v for n, v in row.own.items() if n in ("batch", "gpus")))))


def _small_numbers(row: Row) -> list[float]:
    """Whole numbers of the row: a count of sequences may hide among them."""
    found = re.findall(r"(?<![\d.,])(\d{1,3})(?![\d.,%]|\s?(?:ms|s|x|tok))", row.text)
    return [float(n) for n in found if 2 <= int(n) <= 512][:8]


def per_token(report: Report) -> Iterator[Finding]:
    """ms per token against tokens/s: one is the inverse of the other, times the sequences at once."""

    def check(row: Row, a: Quantity, b: Quantity, also: float = 1.0) -> Iterator[Finding]:
        if not any((a.value * b.value).meets(c, _WIDE) for c in (*_at_once(row), also)):
            message = f"{a.text} per token is {si(1 / a.value.mid, 'tokens/s')}, not {b.text}"
            yield finding(INCONSISTENT, "tokens/s", message, b, a)

    for row in report.rows:
        a, b = row.only("s_per_token"), row.only("tokens_per_s")
        if a and b:
            yield from check(row, a, b)
    for grid in report.grids:
        for i, j in grid.pairs("s_per_token", "tokens_per_s"):
            cells = [
                (row, a, b)
                for row in grid.body
                if (a := row.figure(i, "s_per_token")) and (b := row.figure(j, "tokens_per_s"))
            ]
            found = odd_ones([a.value * b.value for _, a, b in cells], (1.0,))
            odd = found[1] if found else range(len(cells)) if len(cells) == 1 else ()
            for r in odd:
                yield from check(*cells[r], found[0] if found else 1.0)


_TOKENS_KEY = re.compile(
    r"(?im)^\W*(?:(?:total|generated|output|new|completion|num) )*tokens(?: generated)?\W*[:=]\s*(\d[\d,]*)\s*$"
)


def token_counts(report: Report) -> Iterator[Finding]:
    """Tokens / time = tokens/s: "512 tokens in 8.0 s (64 tok/s)"."""
    for row in report.rows:
        q, t = row.only("tokens_per_s"), row.only("time")
        counts = [c for c in row.of("tokens", "items") if c.exact and (c.kind == "tokens" or c.item == "run")]
        if row.kind == "record":
            keyed = [float(m.replace(",", "")) for m in _TOKENS_KEY.findall(row.text)]
            counts += [Quantity("tokens", exact(v), f"{v:.0f} tokens", "tokens", row.line) for v in keyed]
        if not (q and t) or _NOT_WALL.search(row.text) or not 1 <= len(counts) <= 3 or row.of("rate", "items_per_s"):
            continue
        if re.search(r"(?i)concurren|requests|per user|steady|decode only|excluding", row.text):
            continue
        sums = [c.value for c in counts]
        sums.append(Interval(sum(s.lo for s in sums), sum(s.mid for s in sums), sum(s.hi for s in sums)))
        made, more = q.value * t.value, [*_at_once(row), *_small_numbers(row)]
        if not any(made.meets(s * n, _WIDE) or made.meets(s / n, _WIDE) for s in sums for n in more if s.mid):
            c = counts[0]
            message = f"{c.text} in {t.text} is {si(c.value.mid / t.value.mid, 'tokens/s')}, not {q.text}"
            yield finding(INCONSISTENT, "tokens/s", message, q, c, t)


_STEPS = ("it", "iter", "iteration", "step", "batch", "batche")


def batches(report: Report) -> Iterator[Finding]:
    """Throughput = batch / latency, where both are per batch."""
    for grid in report.grids:
        for kind, time in itertools.product(("items_per_s", "tokens_per_s"), ("time", "s_per_item")):
            for i, j in grid.pairs(kind, time):
                cells = [(row, a, b) for row in grid.body if (a := row.figure(i, kind)) and (b := row.figure(j, time))]
                sizes = [row.scope.size("batch") for row, _, _ in cells]
                scaled = [a.value * b.value / s.value if s else None for (_, a, b), s in zip(cells, sizes, strict=True)]
                found = odd_ones(scaled, (1.0,))
                for r in found[1] if found and len(cells) - len(found[1]) > 1 else ():
                    (_, a, b), f = cells[r], scaled[r]
                    if f and found and not (f / found[0]).meets(1.0, 0.1):
                        times = f"{f.mid / found[0]:.3g} times what the other rows give"
                        message = f"{a.text} × {b.text} is {times} for their batch"
                        yield finding(INCONSISTENT, "throughput", message, a, b)
    for row in report.rows:
        q, t = row.only("items_per_s"), row.only("time") or row.only("s_per_item")
        batch = row.facts.sizes.get("batch", ())
        if not (q and t) or q.item in _STEPS or len(batch) != 1 or _NOT_WALL.search(t.words) or not same_owner(q, t):
            continue
        if (
            len(row.of("time", "s_per_item")) != 1
            or t.value.mid > 600
            or re.search(r"(?i)concurren|worker|stream|pipeline|p9\d", row.text)
        ):
            continue
        f, counts = q.value * t.value / batch[0], [*_at_once(row), *_small_numbers(row)]
        if not any(f.meets(c, _WIDE) or f.meets(c / batch[0], _WIDE) for c in counts):
            message = f"a batch of {batch[0]:.0f} in {t.text} is {batch[0] / t.value.mid:.4g} per s, not {q.text}"
            yield finding(INCONSISTENT, "throughput", message, q, t)


def step_tokens(report: Report) -> Iterator[Finding]:
    """Batch · sequence length / step time = tokens/s of a record."""
    for row in report.rows:
        q, t = row.only("tokens_per_s"), row.only("time") or row.only("s_per_item")
        if not (q and t) or row.of("tokens") or not re.search(r"(?i)step|iter|batch", t.words):
            continue
        batch, seq = row.scope.size("batch"), row.scope.size("seq")
        if not (batch and seq and batch.near and seq.near):
            continue
        f = q.value * t.value / (batch.value * seq.value)
        products = [a * b for a in _at_once(row) for b in _at_once(row)]
        if not any(f.meets(c, _WIDE) or f.meets(1 / c, _WIDE) for c in (*products, seq.value)):
            would = si(batch.value * seq.value / t.value.mid, "tokens/s")
            message = f"{batch.value:.0f} × {seq.value:.0f} tokens in {t.text} is {would}, not {q.text}"
            yield finding(INCONSISTENT, "tokens/s", message, q, t, lines=(batch.line, seq.line))


_MFU = re.compile(r"(?i)\bmfu\b|model flops? utili[sz]ation")
_SPARSE_MODEL = re.compile(r"(?i)\bmoe\b|mixture|mixtral|\d+x\d+b|a\d+b\b|lora|frozen|vision|vit\b|diffusion|active")
_MODEL = re.compile(
    r"(?i)(?:llama|gpt|mistral|qwen|opt|falcon|bloom|phi|gemma|pythia|mpt|model)[\w.-]*?[- ](\d+(?:\.\d+)?)b\b"
)


def mfu(report: Report) -> Iterator[Finding]:
    """6·N FLOPs for a trained token (2·N for a generated one) give the rate; attention adds to it.

    The formula is that of Kaplan et al. 2020 (arXiv:2001.08361), MFU that of Chowdhery et al. 2022 (arXiv:2204.02311).
    """
    for row in report.all_rows:
        shares = [q for q in row.of("percent") if _MFU.search(q.words) and q.exact]
        p, q = shares[0] if len(shares) == 1 else None, row.only("tokens_per_s")
        if p and p.value.lo > 1.0:
            yield finding(IMPOSSIBLE, "MFU", f"an MFU of {p.text} is above 100 %", p)
        if not (p and q and p.value.mid) or _SPARSE_MODEL.search(row.scope.words):
            continue
        sizes = {v.value.mid for v in row.of("params") if v.value.mid >= 5e7} or _models(report)
        # Whatever was multiplied, many divide by the bf16 peak.
        formats = {"bf16", "fp16", *(f for f in row.scope.everything.formats if f in DTYPES and f != "fp32")}
        peaks = [x for d in devices(row) for f in formats for x in (d.peak(f), d.sparse_peak(f)) if x]
        if len(sizes) != 1 or not peaks:
            continue
        n, trained = next(iter(sizes)), re.search(r"(?i)train|step|fine-?tun", row.scope.words)
        each = [n * q.value.mid / (x * g) for x in peaks for g in gpu_counts(row)]
        # "7B" may be 6.7 or 7.6; attention over long texts adds to 6·N.
        low, high = (5.1 if trained else 1.7), 8.3
        if not any(low * e <= p.value.hi and p.value.lo <= high * e for e in each):
            best = min((k * e for e in each for k in (2, 6)[bool(trained) :]), key=lambda x: abs(x - p.value.mid))
            at = f"{n / 1e9:.3g} B parameters at {q.text} on {devices(row)[0].name}"
            message = f"{at} are an MFU of {100 * best:.3g} %, not {p.text}"
            yield finding(INCONSISTENT, "MFU", message, p, q)


def _models(report: Report) -> set[float]:
    """The sizes of the models that the report speaks of."""
    found = {q.value.mid for row in report.rows for q in row.of("params") if q.value.mid >= 5e7}
    return found | {float(v) * 1e9 for v in _MODEL.findall(report.text)}
