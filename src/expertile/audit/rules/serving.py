"""What the number of parameters says of tokens/s: MFU, and the time of one decoded token."""

import re
from collections.abc import Iterator

from expertile.audit.facts import BITS
from expertile.audit.finding import IMPOSSIBLE, QUESTION, Finding, finding, si
from expertile.audit.interval import exact
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.peaks import gpu_counts
from expertile.device import DTYPES

_MFU = re.compile(r"(?i)\bmfu\b|model flops? utili[sz]ation")
# Models of which not every parameter is used, or not as often as 6·N says.
_SPARSE = re.compile(
    r"(?i)\bmoe\b|mixture|mixtral|\d+x\d+b|a\d+(?:\.\d+)?b\b|lora|frozen|vision|vit\b|diffusion|\bactive|distill|"
    r"offload|spars|gpt-?oss|deepseek"
)
_DRAFTED = re.compile(r"(?i)speculat|draft|medusa|eagle|lookahead")
_ABSENT = re.compile(r"(?i)\b(?:no|without) \w+")
_MODEL = re.compile(r"(?i)(?<![\w.])(\d+(?:\.\d+)?)([bm])\b(?! ?(?:tokens|/s|gpu|rows|elem|param\w* active))")


def _parameters(row: Row) -> float | None:
    """The one number of parameters that the row states, or the whole report."""
    for text in (row.text, row.report.text):
        if found := {float(v) * (1e9 if of in "bB" else 1e6) for v, of in _MODEL.findall(text)}:
            other = any(form.search(_ABSENT.sub("", of)) for form, of in ((_SPARSE, text), (_DRAFTED, row.words)))
            return found.pop() if len(found) == 1 and not other else None
    return None


def mfu(report: Report) -> Iterator[Finding]:
    """6·N FLOPs for a trained token give the rate (Kaplan et al. 2020, arXiv:2001.08361), and the rate the MFU
    (Chowdhery et al. 2022, arXiv:2204.02311). Attention over long texts adds to 6·N, and "7B" may be 6.7 or 7.6."""
    for row in report.all_rows:
        shares = [q for q in row.of("percent") if _MFU.search(q.words) and q.exact]
        p, q = shares[0] if len(shares) == 1 else None, row.only("tokens_per_s")
        if p and not q and row.kind == "line":  # the one rate of its paragraph
            near = [x for r in report.lines_of_text if r.block == row.block for x in r.of("tokens_per_s")]
            q = near[0] if len(near) == 1 else None
        if p and p.value.lo > 1.0:
            yield finding(IMPOSSIBLE, "MFU", f"an MFU of {p.text} is above 100 %", p)
        n = _parameters(row) if p and q and p.value.mid else None
        if not (p and q and n):
            yield from _forward(row, q)
            continue
        # Whatever was multiplied, many divide by the bf16 peak.
        formats = {"bf16", "fp16", *(f for f in report.everything.of("formats") if f in DTYPES and f != "fp32")}
        peaks = [x for d in row.devices for f in formats for x in (d.peak(f), d.sparse_peak(f)) if x]
        counts = row.facts.of("gpus") or ((row.own["gpus"],) if "gpus" in row.own else gpu_counts(row))
        each = [n * q.value.mid / (x * g) for x in peaks for g in ((1.0,) if q.per_device else counts)]
        least = 5.1 if re.search(r"(?i)train|step|fine-?tun|fsdp", row.words) else 1.7
        # Attention adds to 6·N with the length of the texts.
        most = 8.3 if max(report.everything.of("seq") or (0,)) > 8000 else 7.6
        if each and not any(least * e <= p.value.hi and p.value.lo <= most * e for e in each):
            best = min((6 * e for e in each), key=lambda x: abs(x - p.value.mid))
            at = f"{n / 1e9:.3g} B parameters at {q.text} on {row.devices[0].name}"
            message = f"{at} are an MFU of {100 * best:.3g} %, not {p.text}: on how many GPUs, of which peak?"
            yield finding(QUESTION, "MFU", message, p, q)


def _forward(row: Row, q: Quantity | None) -> Iterator[Finding]:
    """2·N FLOPs for each token that is read, on the fastest formats of the GPUs."""
    d, time = row.only("tokens"), row.only("time")
    rate = q.value if q and q.exact else d.value / time.value if d and time and "prefill" in row.text.lower() else None
    n = _parameters(row) if rate and len(row.devices) == 1 else None
    if n and rate:
        device, told = row.devices[0], q.text if q else f"{d.text} in {time.text}" if d and time else ""
        formats = row.report.everything.of("formats")
        each = q is not None and q.per_device
        most = max(device.peak(f) or 0.0 for f in (formats or DTYPES)) * (1.0 if each else max(gpu_counts(row)))
        if 2 * n * rate.lo > (1.25 if q else 1.06) * most > 0:
            message = f"2 · {n / 1e9:.3g} B · {told} is {si(2 * n * rate.mid, 'FLOP/s')}"
            message += f", more than the {si(most, 'FLOP/s')} of {device.name}: on how many GPUs?"
            yield finding(QUESTION, "bound", message, q or time or row.quantities[0])


_SINGLE = re.compile(
    r"(?i)batch(?:[ -]?size)?[ =:-]*(?:of |is )?(?:1|one)\b|single[ -](?:stream|user|request|sequence|batch)|"
    r"\bbs ?=? ?1\b|one (?:user|request|stream) at"
)
_WEIGHTS = re.compile(r"(?i)weights?|checkpoint|\bmodel\b|param")


def decoding(report: Report) -> Iterator[Finding]:
    """A token of a single stream takes the time in which the memory yields every weight once."""
    for row in report.all_rows:
        q = row.only("s_per_token") or row.only("tokens_per_s")
        if not q or re.search(
            r"(?i)prefill|prompt (?:proc|eval|tok|read)|input|train|\bpp\d|"
            r"\bttft",
            f"{q.words} {row.label} {row.text}",
        ):
            continue
        # One stream is a time for each token, or what is said to be one.
        batch, told = row.size("batch"), f"{row.words} {row.lead}"
        single = (batch is not None and batch.value == 1) or (
            not batch and (q.kind == "s_per_token" or _SINGLE.search(told))
        )
        formats = row.facts.of("formats") or report.everything.of("formats")
        held = [
            b
            for r in report.lines_of_text
            for b in r.of("bytes")
            if b.exact and _WEIGHTS.search(f"{b.label[-40:]} {b.after[:12]}")
        ]
        n = _parameters(row)
        n = n if n and len(formats) == 1 else None
        memory = [b for r in report.lines_of_text for b in r.of("bandwidth") if "memory" in b.words]
        if (
            not single
            or len(row.devices) != (0 if len(memory) == 1 and not row.devices else 1)
            or not (n or len({b.value.mid for b in held}) == 1)
        ):
            continue
        if not n and any(form.search(_ABSENT.sub("", report.text)) for form in (_SPARSE, _DRAFTED)):
            continue
        nbytes, of = (n * BITS[formats[0]] / 8, f" of {formats[0]} weights") if n else (0.0, " of weights")
        nbytes = held[0].value.lo if len({b.value.mid for b in held}) == 1 else nbytes
        name, speed = (row.devices[0].name, row.devices[0].memory_bps) if row.devices else ("", memory[0].value.mid)
        most = (speed or float("inf")) * max(gpu_counts(row))
        time = q.value if q.kind == "s_per_token" else exact(1.0) / q.value
        if nbytes / time.hi > 1.2 * most and max(report.everything.of("concurrency") or (1,)) == 1:
            rate = f"{si(nbytes, 'B')}{of} in {q.text} are {si(nbytes / time.mid, 'B/s')}"
            message = f"{rate}, more than the {si(most, 'B/s')} of {name or 'the'}'s memory: how many tokens at once?"
            yield finding(QUESTION, "decoding", message, q)


_SIX = re.compile(r"6 ?[·*×]? ?[NP]\b|(?i:train|token)")


def training(report: Report) -> Iterator[Finding]:
    """6·N·D FLOPs of training from the parameters and tokens beside them, and what the GPUs can do of it: it asks."""
    for block in {r.block for r in report.lines_of_text}:
        rows = [r for r in report.lines_of_text if r.block == block]
        n = {q.value.mid: q for r in rows for q in r.of("params") if q.exact}
        d = [q for r in rows for q in r.of("tokens") if q.exact and q.value.mid > 1e8]
        if len(n) != 1 or len(d) != 1 or not _SIX.search(" ".join(r.text for r in rows)):
            continue
        work, text = next(iter(n.values())).value * d[0].value * 6.0, f"6 · {next(iter(n.values())).text} · {d[0].text}"
        for row, q in ((r, q) for r in rows for q in r.of("flop", "time") if q.exact):
            gpus, peaks = row.size("gpus"), [p for x in row.devices for f in ("bf16", "fp8") if (p := x.peak(f))]
            if (
                q.kind == "flop"
                and q.value.mid > 1e18
                and not any(q.value.meets(work * f, 0.12) for f in (1, 4 / 3, 1 / 3))
            ):
                yield finding(QUESTION, "arithmetic", f"{text} is {si(work.mid, 'FLOP')}, not {q.text}", q, d[0])
            elif q.kind == "time" and q.value.mid > 3600 and gpus and peaks:
                rate = work.lo / q.value.hi / gpus.value
                if rate > max(peaks):
                    message = f"{text} in {q.text} on {gpus.value:.0f} GPUs is {si(rate, 'FLOP/s')} each"
                    yield finding(QUESTION, "bound", f"{message}, more than {row.devices[0].name} can do", q, d[0])
