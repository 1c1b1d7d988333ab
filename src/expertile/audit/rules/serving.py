"""Tokens, batches and latencies; MFU from parameters."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, Finding, si
from expertile.audit.interval import Interval
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row, Scope
from expertile.audit.rules.peaks import _BY_NAME, _all_rows
from expertile.audit.rules.ratios import is_summary
from expertile.audit.rules.relation import odd_ones, same_owner, stem
from expertile.device import DTYPES

_WIDE = 0.08
_LATENCY = re.compile(r"(?i)latency|time|duration|elapsed|\bms\b|step|iter|\bin\b|took|forward|batch|→|->|=|per")
_NOT_WALL = re.compile(
    r"(?i)ttft|first token|prefill|prompt|load|warm-?up|compile|p9\d|std|queue|tpot|itl|inter-?token|per token|next token"
)


def per_token(report: Report) -> Iterator[Finding]:
    """ms per token against tokens/s of one line: one is the inverse of the other, times the sequences at once."""
    for row in report.rows:
        slow, fast = row.of("s_per_token"), row.of("tokens_per_s")
        if len(slow) != 1 or len(fast) != 1 or not slow[0].exact or not fast[0].exact:
            continue
        f = slow[0].value * fast[0].value
        if f.mid and not any(f.meets(c, _WIDE) for c in _at_once(report.scope(row), row)):
            yield Finding(
                INCONSISTENT, "tokens/s", fast[0].line, f"{slow[0].text}, {fast[0].text}",
                f"{slow[0].text} is {si(1 / slow[0].value.mid, 'tokens/s')}, not {fast[0].text}",
            )  # fmt: skip
    for grid in report.grids:
        body = [row for row in grid.rows if not is_summary(row)]
        for i, j in itertools.product(grid.columns("s_per_token"), grid.columns("tokens_per_s")):
            if stem(grid.header[i]) != stem(grid.header[j]) and len(grid.columns("s_per_token", "tokens_per_s")) > 2:
                continue
            yield from _columns(report, body, i, j)


def _columns(report: Report, body: list[Row], i: int, j: int) -> Iterator[Finding]:
    cells = [(_cell(row, i), _cell(row, j)) for row in body]
    factors: list[Interval | None] = [a.value * b.value if a and b else None for a, b in cells]
    found = odd_ones(factors, (1.0,))
    if found is None and len(body) > 1:
        return
    for r in found[1] if found else range(len(body)):
        (a, b), f = cells[r], factors[r]
        batch = [*_at_once(report.scope(body[r]), body[r]), found[0] if found else 1.0]
        if a and b and f is not None and not any(f.meets(c, _WIDE) for c in batch):
            yield Finding(
                INCONSISTENT, "tokens/s", b.line, f"{a.text}, {b.text}",
                f"{a.text} per token is {si(1 / a.value.mid, 'tokens/s')}, not {b.text}",
            )  # fmt: skip


def _cell(row: Row, column: int) -> Quantity | None:
    q = next((q for q in row.quantities if q.column == column), None)
    return q if q is not None and q.exact and q.value.mid > 0 else None


def _at_once(scope: Scope, row: Row) -> list[float]:
    """Numbers of sequences, GPUs or users that may be counted in: 1 and every such size that is stated anywhere."""
    stated = [v for name in ("batch", "gpus", "experts", "heads") for v in scope.everything.sizes.get(name, ())]
    users = [
        float(m)
        for m in re.findall(
            r"(?i)(?:concurren\w*|users|clients|streams|parallel|max_num_seqs)\D{0,12}(\d+)", scope.words
        )
    ]
    users += [
        float(m) for m in re.findall(r"(?i)(\d+) (?:concurrent|parallel|users|clients|streams|slots)", scope.words)
    ]
    own = [v for name, v in row.own.items() if name in ("batch", "gpus")]
    return list(dict.fromkeys((1.0, *stated, *users, *own)))


def token_counts(report: Report) -> Iterator[Finding]:
    """Tokens / time = tokens/s, in one line: "512 tokens in 8.0 s (64 tok/s)"."""
    for row in report.rows:
        fast = [q for q in row.of("tokens_per_s") if q.exact]
        times = [q for q in row.of("time") if q.exact and not _NOT_WALL.search(q.label)]
        counts = row.of("tokens", "items") if row.kind == "line" else row.of("tokens")
        counts = [q for q in counts if q.exact and (q.kind == "tokens" or q.item == "run")]
        if row.kind == "record":
            counts += _keyed_tokens(row)
        if len(fast) != 1 or len(times) != 1 or not 1 <= len(counts) <= 3 or len(row.of("tokens_per_s")) != 1:
            continue
        if (
            len(row.of("time")) != 1
            or not times[0].value.mid
            or not fast[0].value.mid
            or len(row.of("rate", "items_per_s"))
        ):
            continue
        made = fast[0].value * times[0].value
        sums = [counts[i].value for i in range(len(counts))]
        if len(counts) > 1:
            sums.append(
                Interval(
                    sum(c.value.lo for c in counts), sum(c.value.mid for c in counts), sum(c.value.hi for c in counts)
                )
            )
        more = [*_at_once(report.scope(row), row), *_numbers(row)]
        if any(made.meets(s * n, _WIDE) or made.meets(s / n, _WIDE) for s in sums for n in more if s.mid):
            continue
        if _NOT_WALL.search(row.text) or re.search(
            r"(?i)concurren|requests|per user|steady|decode only|excluding|\bavg\b.*ttft", row.text
        ):
            continue
        c = counts[0]
        yield Finding(
            INCONSISTENT, "tokens/s", fast[0].line, f"{c.text}, {times[0].text}, {fast[0].text}",
            f"{c.text} in {times[0].text} is {si(c.value.mid / times[0].value.mid, 'tokens/s')}, not {fast[0].text}",
            (c.line, times[0].line),
        )  # fmt: skip


_TOKENS_KEY = re.compile(
    r"(?im)^\W*(?:total |generated |output |new |completion |num |number of )*tokens(?: generated)?\W*[:=]\s*(\d[\d,]*)\s*$"
)


def _keyed_tokens(row: Row) -> list[Quantity]:
    return [
        Quantity("tokens", Interval(v, v, v), f"{v:.0f} tokens", "tokens", row.line)
        for m in _TOKENS_KEY.findall(row.text)
        if (v := float(m.replace(",", "")))
    ]


def _numbers(row: Row) -> list[float]:
    """Small whole numbers of the row: a count of sequences may hide among them."""
    return [
        float(n)
        for n in re.findall(r"(?<![\d.,])(\d{1,3})(?![\d.,%]|\s?(?:ms|s|x|tok))", row.text)
        if 2 <= int(n) <= 512
    ][:8]


def batches(report: Report) -> Iterator[Finding]:
    """Throughput = batch / latency, where both are per batch; tokens/s = batch · sequence / step time."""
    for grid in report.grids:
        body = [row for row in grid.rows if not is_summary(row)]
        for kind in ("items_per_s", "tokens_per_s"):
            for i, j in itertools.product(grid.columns(kind), grid.columns("time", "s_per_item")):
                alone = len(grid.columns(kind)) == 1 and len(grid.columns("time", "s_per_item")) == 1
                if not alone and stem(grid.header[i]) != stem(grid.header[j]):
                    continue
                cells = [(_cell(row, i), _cell(row, j)) for row in body]
                sizes = [report.scope(row).size("batch") for row in body]
                raw = [a.value * b.value if a and b else None for a, b in cells]
                scaled = [
                    f / s.value if f is not None and s is not None else None for f, s in zip(raw, sizes, strict=True)
                ]
                found = odd_ones(scaled, (1.0,)) or (odd_ones(raw) if kind == "items_per_s" else None)
                for r in found[1] if found and len(body) - len(found[1]) >= 2 else ():
                    (a, b), f = cells[r], scaled[r] if odd_ones(scaled, (1.0,)) else raw[r]
                    if a and b and f is not None and found and not (f / found[0]).meets(1.0, 0.1):
                        yield Finding(
                            INCONSISTENT, "throughput", a.line, f"{a.text}, {b.text}",
                            f"{a.text} × {b.text} is {f.mid / found[0]:.3g} times what the other rows give for their batch",
                        )  # fmt: skip
    for row in report.rows:
        fast = [
            q
            for q in row.of("items_per_s")
            if q.exact and q.item not in ("it", "iter", "iteration", "step", "batch", "batche")
        ]
        times = [q for q in row.of("time", "s_per_item") if q.exact and not _NOT_WALL.search(q.words)]
        batch = row.facts.sizes.get("batch", ())
        if len(fast) != 1 or len(times) != 1 or len(batch) != 1 or len(row.of("time", "s_per_item")) != 1:
            continue
        if not times[0].value.mid or not same_owner(fast[0], times[0], True):
            continue
        f = fast[0].value * times[0].value / batch[0]
        scope = report.scope(row)
        # Several GPUs or streams multiply; a data loader's waits divide, so only more than there is accuses.
        counts = [1.0, *scope.everything.sizes.get("gpus", ()), *_at_once(scope, row), *_numbers(row)]
        if any(f.meets(c, _WIDE) or f.meets(c / batch[0], _WIDE) for c in counts):
            continue
        if (
            re.search(r"(?i)concurren|worker|stream|pipeline|gpus|p9\d|users|clients", row.text)
            or times[0].value.mid > 600
        ):
            continue
        yield Finding(
            INCONSISTENT, "throughput", fast[0].line, f"{fast[0].text}, {times[0].text}",
            f"a batch of {batch[0]:.0f} in {times[0].text} is {batch[0] / times[0].value.mid:.4g} per s, not {fast[0].text}",
            (times[0].line,),
        )  # fmt: skip


def step_tokens(report: Report) -> Iterator[Finding]:
    """A record with batch, sequence length, step time and tokens/s."""
    for row in report.rows:
        fast, times = row.of("tokens_per_s"), row.of("time", "s_per_item")
        if len(fast) != 1 or len(times) != 1 or row.of("tokens") or not fast[0].exact or not times[0].exact:
            continue
        scope = report.scope(row)
        batch, seq = scope.size("batch"), scope.size("seq")
        step = re.search(r"(?i)step|iter|batch", times[0].words)
        if not batch or not seq or not step or not (batch.near and seq.near) or not times[0].value.mid:
            continue
        f = fast[0].value * times[0].value / (batch.value * seq.value)
        more = [*_at_once(scope, row), *_accumulation(scope)]
        products = [a * b for a in more for b in more]
        if any(f.meets(c, _WIDE) or f.meets(1 / c, _WIDE) for c in products) or f.meets(1 / seq.value, _WIDE):
            continue
        yield Finding(
            INCONSISTENT, "tokens/s", fast[0].line, f"{times[0].text}, {fast[0].text}",
            f"{batch.value:.0f} × {seq.value:.0f} tokens in {times[0].text} is "
            f"{si(batch.value * seq.value / times[0].value.mid, 'tokens/s')}, not {fast[0].text}",
            (batch.line, seq.line, times[0].line),
        )  # fmt: skip


def _accumulation(scope: Scope) -> list[float]:
    return [float(m) for m in re.findall(r"(?i)accum\w*[^\d\n]{0,24}(\d+)", scope.words)]


_MFU = re.compile(r"(?i)\bmfu\b|model flops? utili[sz]ation")
_SPARSE_MODEL = re.compile(r"(?i)\bmoe\b|mixture|mixtral|\d+x\d+b|a\d+b\b|lora|frozen|vision|vit\b|diffusion|active")


def mfu(report: Report) -> Iterator[Finding]:
    """6·N FLOPs for a trained token give the rate; a share above it may count attention, one below it nothing."""
    for row in _all_rows(report):
        shares = [q for q in row.of("percent", "share") if _MFU.search(q.words)]
        for q in shares:
            if q.value.lo > 1.0 and q.kind == "percent":
                yield Finding(IMPOSSIBLE, "MFU", q.line, q.text, f"an MFU of {q.text} is above 100 %")
        fast = [q for q in row.of("tokens_per_s") if q.exact]
        if len(shares) != 1 or len(fast) != 1 or not shares[0].value.mid or shares[0].kind != "percent":
            continue
        scope = report.scope(row)
        params = [q for q in row.of("params") if q.value.mid >= 5e7] or _params(report, row)
        devices = [_BY_NAME[name] for name in scope.devices if name in _BY_NAME]
        # Whatever was multiplied, many divide by the bf16 peak.
        formats = {"bf16", "fp16", *(f for f in scope.everything.formats if f in DTYPES and f != "fp32")}
        peaks = [p for d in devices for f in formats for p in (d.peak(f), d.sparse_peak(f)) if p]
        if len({q.value.mid for q in params}) != 1 or not peaks or _SPARSE_MODEL.search(scope.words):
            continue
        n = params[0].value.mid
        gpus = (1.0, *scope.everything.sizes.get("gpus", ()), *([row.own["gpus"]] if "gpus" in row.own else []))
        inference = not re.search(r"(?i)train|step|pretrain|fine-?tun", scope.words)
        # "7B" may be 6.7 or 7.6; attention over long texts adds to 6·N.
        low, high = (2.0, 8.0) if inference else (6.0, 7.5)
        would = [(k * n * fast[0].value.mid / (p * g)) for p in peaks for g in gpus for k in (low, high)]
        ok = any(low * n * fast[0].value.lo / (p * g) * 0.85 <= shares[0].value.hi and
                 shares[0].value.lo <= high * n * fast[0].value.hi / (p * g) * 1.1 for p in peaks for g in gpus)  # fmt: skip
        if not ok:
            best = min(would, key=lambda w: abs(w - shares[0].value.mid))
            yield Finding(
                INCONSISTENT, "MFU", shares[0].line, f"{fast[0].text}, {shares[0].text}",
                f"6 × {n / 1e9:.3g} B × {fast[0].text} on {devices[0].name} is an MFU of {100 * best:.3g} % at the nearest "
                f"reading, not {shares[0].text}", (fast[0].line, params[0].line),
            )  # fmt: skip


def _params(report: Report, row: Row) -> list[Quantity]:
    """The model's parameters, where the report speaks of one model only."""
    found = [q for r in report.rows for q in r.of("params") if q.value.mid >= 5e7]
    names = re.findall(
        r"(?i)(?:llama|gpt|mistral|qwen|opt|falcon|bloom|phi|gemma|pythia|mpt|model)[\w.-]*?[- ](\d+(?:\.\d+)?)b\b",
        report.text,
    )
    values = {q.value.mid for q in found} | {float(v) * 1e9 for v in names}
    if len(values) != 1:
        return []
    value = next(iter(values))
    return found[:1] or [Quantity("params", Interval(value, value, value), f"{value / 1e9:g}B", "", row.line)]
