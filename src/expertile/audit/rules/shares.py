"""Shares of a peak, MFU, and peaks with sparsity that nobody speaks of."""

import re
from collections.abc import Iterator

from expertile.audit.facts import facts
from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, UNIT_OF, Finding, finding, si
from expertile.audit.interval import NUMBER, Interval, printed
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity
from expertile.audit.records import digits
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import EQUATION, SHARE, formats_of, gpu_counts, on_sheet, own_words, peaks_of
from expertile.audit.rules.terms import parameters
from expertile.device import DTYPES, generous_peak

# What calls a figure a peak.
_PEAK = regex(r"peak(?!s? at|ed)|theoret|roofline|max(?:imum)?\b|spec(?!ial|ul)|rated|limit|up to|of \(?$|\bof \d")
_OFFERS = regex(r"(?i)\b(?:offers?|provides?|delivers?|has|gives?|does)\b")
_OF = regex(
    r"(?i)\W*of (?:(?:the|its|a|peak|theoretical|gpu|dense|hbm|rtx|sxm|nvidia|amd|geforce|[a-z]{1,3}\d{2,4}\w*|"
    r"\w+'s)\W*)*"
)
_WITH_ATTENTION = regex(r"attention[_ ](?:flops?|per[_ ]token)|(?:plus|with|incl\w*) (?:the )?attention")
_MFU = regex(r"(?i)(?<![a-z])mfu(?![a-z])|model flops? utili[sz]ation")
_SIX = regex(r"(?i)\b6 ?(?:FLOPs? per )?[·*×x]? ?(?:N\b|(?:the )?(?:number of )?param\w*)(?!\W{0,3}(?:\+|plus))")
_BARE = regex(rf"(?<![\w.,]){NUMBER}(?![\w.,]*\w| ?[x×%])")
# What no more than 100 % can be of.
_OF_ALL = regex(
    rf"{_MFU.pattern}|\bhit[ _-]?(?:rate|ratio)|occupancy|accept\w*[ _]rate|(?<!cpu )(?<!core )utili[sz]ation"
)
_REDUCED = regex(
    r"(?i)(?<!not )(?<!not be )(?<!n.t )\b(?:reduc\w+|lower(?:s|ed)|decreas\w+|shr[aiu]nk\w*|cuts?|dropp?\w*|fell|"
    r"falls)\b(?: (?!and\b|speed)[a-z-]+){0,6} by $"
)
_PART_OF = regex(r"\W*(?:out )?of \d")  # "1.7 TB/s of 2.0 TB/s"


def _of(row: Row, p: Quantity, base: Quantity) -> bool:
    """Whether a sentence says "64 % of 756 TFLOPS"."""
    if row.kind != "line" or p.end >= base.start or re.match(r"\W*(?:out )?of (?:the )?\d|\W*/", row.text[base.end :]):
        return False
    return bool(_OF.fullmatch(row.text[p.end : base.start]))


def shares(report: Report) -> Iterator[Finding]:
    """ "612 TFLOPS of 989 (68% of peak)" against the peak of its own row, record or the lines right above it."""
    rows = [row for row in report.all_rows if row.of("percent")]
    for kind, unlike in (("rate", "bandwidth"), ("bandwidth", "rate")):
        # A table's row is one of peaks where its first words say so.
        figures = [(row, q) for row in report.all_rows for q in row.of(kind)]
        stated = [q for row, q in figures if _is_peak(row, q)]
        for row in (r for r in rows if not r.of(unlike)):
            yield from _share(row, kind, stated, [s for s in stated if s in row.quantities])
    for row in rows:
        for p in (p for p in row.of("percent") if p.exact and p.value.lo > 1.005):
            fell = row.kind == "line" and _REDUCED.search(row.text[: p.start])
            if fell or _OF_ALL.search(own_words(row, p)):
                yield finding(IMPOSSIBLE, "share", f"{p.text} is more than all there is", p)
        yield from _mfu(row)


def _is_peak(row: Row, q: Quantity) -> bool:
    """Whether a figure, or the first words of its table's row, say so."""
    if re.match(r"r ?max\b", q.words):
        return False  # of HPL
    told = _PEAK.search(" ".join((q.words, *row.label.lower().split()[:3]))) or on_sheet(row, q)
    return bool(told or any(_of(row, p, q) for p in row.of("percent"))) and not _PART_OF.match(row.text, q.end)


def _share(row: Row, kind: str, stated: list[Quantity], here: list[Quantity]) -> Iterator[Finding]:
    told = re.compile(rf"{SHARE.pattern}|efficien|\bof (?:that|it)\b") if here else SHARE
    said = [(p, any(_of(row, p, s) for s in here)) for p in row.of("percent") if p.exact and p.value.mid]
    said = [(p, of) for p, of in said if (told.search(p.words) and "hfu" not in p.words) or of]
    before = row.before if row.kind == "line" and not row.of(kind) else None  # "… 406 TFLOP/s. Of the peak it is 41 %."
    lent = before if before and not before.of("percent") else None
    found = [(q, q.plain) for r in (lent or row,) for q in r.of(kind) if q.exact and q not in stated]
    # Bits per second are those of a pin.
    found = [(q, x) for q, x in found if not (on_sheet(row, q) or re.search("(?i)bit/s|bps", q.text))]
    if len(said) != 1 or len(found) != 1 or not (here or row.devices):
        return
    (q, rate), (p, of) = found[0], said[0]
    if row.kind == "line" and not (of or lent) and row.clause(q) != row.clause(p):
        return
    formats = formats_of(q, row) or row.stated("formats")
    formats_of_all = () if "mfu" in p.words else formats  # of BF16 though products are in FP8
    known = [x for d in row.devices for x in (peaks_of(d, formats_of_all) if kind == "rate" else (d.memory_bps,)) if x]
    if kind == "rate" and formats_of_all and re.search(r"(?i)\bdense\b", row.text):
        dense = ((x, d.peak(f)) for d in row.devices for f in formats_of_all for x in peaks_of(d, (f,)))
        known = [x for x, most in dense if most and x < 1.5 * most] or known
    other = [x * n for x in (*known, *(s.value.mid for s in stated if s not in here)) for n in gpu_counts(row)]
    # "88 % of the 1555 GB/s peak" leaves nothing open.
    part, slack = rate / p.value, 0.03 if here else 0.06
    near = any(part.meets(s.plain, 0.05) for s in here) or any(rate.meets(s.plain) for s in stated)
    # "14.2 TFLOP/s against 36.0 of cuBLAS (55 % of peak)": the share may be that of a bare number behind the figure.
    between = row.text[q.end : p.start] if row.kind == "line" else ""
    scale = q.value.mid / digits(q) if digits(q) else 0.0
    others = [printed(n) * scale for n in _BARE.findall(between) if scale]
    near |= any((o / p.value).meets(x, 0.03) for o in others for x in (*other, *(s.value.mid for s in stated)))
    # A column "peak" without a unit counts in that of the figure.
    near |= any(part.meets(x.plain * scale, 0.03) for x in row.of("number") if _PEAK.search(x.label.lower()))
    gib = kind == "bandwidth"
    made = not of and any(part.meets(x, slack) or (gib and (part * 1.0737).meets(x, 0.02)) for x in other)
    base = (*here, *stated, None)[0]
    # Of a peak that the report never states, beside the one that it does.
    one = len({s.value.mid for s in stated}) == 1 == len(row.report.everything.of("devices")) and not near and made
    if one and base and kind == "rate" and not here and 0.4 < part.mid / base.value.mid < 2.6:
        counts = [n for n in gpu_counts(row) if part.meets(base.value.mid * n, slack)]
        apart = {*facts(base.label).of("formats")} and formats and not {*facts(base.label).of("formats")} & {*formats}
        if not (counts or apart):
            message = f"{q.text} of the {base.text} of line {base.line} is {100 * rate.mid / base.value.mid:.3g} %"
            yield finding(QUESTION, "share of peak", f"{message}, not {p.text}: of which peak?", p, q, base)
    near |= made
    if not near and (base or (len(row.devices) == 1 and known and (kind == "bandwidth" or formats))):
        peak, line, name = (base.value.mid, base.line, base.text) if base else (known[0], row.line, "")
        text = q.text if q.kind == kind else f"{q.text} a time"
        message = f"{text} of {name or si(peak, UNIT_OF[kind])} is {100 * rate.mid / peak:.3g} %, not {p.text}"
        sure = not lent and (here or (len(stated) == 1 and abs(line - row.line) <= 20))
        verdict = INCONSISTENT if sure else QUESTION
        yield finding(verdict, "share of peak", f"{message}; no other peak gives it either", p, q, lines=(line,))


def _measured(row: Row) -> list[Quantity]:
    """The tokens/s that the row does not work out itself."""
    return [q for q in row.of("tokens_per_s") if not EQUATION.search(row.text[: q.start])]


def _mfu(row: Row) -> Iterator[Finding]:
    """6·N FLOPs for a trained token give the rate, and the rate the MFU (Chowdhery et al. 2022, arXiv:2204.02311).
    Attention over long texts adds to 6·N, and "7B" may be 6.7 or 7.6; whoever only reads tokens spends 2·N."""
    report = row.report
    said = [p for p in row.of("percent") if _MFU.search(p.words) and p.exact and p.value.mid]
    above = (r.text for r in reversed(row.above_lines) if not re.match(r"\s*[-*•]", r.text))
    first = next(above, "") if row.kind == "line" and re.match(r"\s*[-*•]", row.text) else ""  # of a list
    told = row.kind == "line" and _MFU.search(f"{row.text} {first}")
    said = said or [p for p in row.of("percent") if told and row.only("percent")]
    rates = _measured(row)
    near = " ".join(report.lines[row.line - 1 : row.line + 2]).replace("*", "")
    if len(said) != 1 or re.search(r"(?i)\bnot (?:the |an )?mfu", near):
        return
    p = said[0]
    if not rates and row.kind == "line":  # the one rate of its paragraph
        rates = [x for r in report.lines_of_text if r.block == row.block for x in _measured(r)]
    rates = rates if len(rates) < 2 else [q for q in rates if q.per_device]
    if not rates and re.search(r"(?i)\btrain(?:ed|ing)\b", report.text):  # any of the report's
        rates = [x for r in report.all_rows for x in _measured(r)]
    elif len(rates) > 1:
        return
    rates = [q for q in rates if q.exact and q.value.mid]
    n = parameters(row) if rates else None
    if not n:
        return
    formats = {"bf16", "fp16", *(f for f in report.everything.of("formats") if f in DTYPES and f != "fp32")}
    train = re.search(r"(?i)train|step|fine-?tun|fsdp", f"{row.words} {row.lead}")
    most = 8.3 if max(report.everything.of("seq") or (0,)) > 8000 else 7.6
    six = [] if _WITH_ATTENTION.search(report.text) else [report.text, f"{row.text} {first}"]
    # Without attention; of any of the part's clocks.
    most = min((x for x, text in zip((7.0, 6.5), six, strict=False) if _SIX.search(text)), default=most)
    both = not re.search(r"(?i)\bdense\b", row.text)
    peaks = [(x, 5.1) for d in row.devices for f in formats if both and (x := d.sparse_peak(f))]
    peaks += [(x, 5.1 if train else 1.7) for d in row.devices for f in formats if (x := d.peak(f))]
    stated = [x.value.mid for x in row.of("rate") if on_sheet(row, x)]  # the peak meant
    if report.everything.foreign and not peaks and not stated:  # the only one that the report has
        stated = [*{x.value.mid for r in report.lines_of_text for x in r.of("rate")}]
        stated = stated if len(stated) == 1 else []
    peaks = [(x, 5.1) for x in stated] or peaks
    counts = row.facts.of("gpus") or ((row.own["gpus"],) if "gpus" in row.own else gpu_counts(row))
    work = [(q, n * q.value.mid / g) for q in rates for g in ((1.0,) if q.per_device else counts)]
    each = [Interval(least, 6.0, most) * (rate / x) for _, rate in work for x, least in peaks]
    if each and not any(e.meets(p.value) for e in each):
        known = stated or [x for d in row.devices for x in peaks_of(d, [*formats])]
        shares = ((6 * rate / x, q) for x in known for q, rate in work)
        best, q = min(shares, key=lambda of: abs(of[0] - p.value.mid))
        at = f"{n / 1e9:.3g} B parameters at {q.text}" + "".join(f" on {d.name}" for d in row.devices[: not stated])
        message = f"{at} are an MFU of {100 * best:.3g} %, not {p.text}: on how many GPUs, of which peak?"
        yield finding(QUESTION, "MFU", message, p, q)


def sparse_peaks(report: Report) -> Iterator[Finding]:
    """A peak with structured sparsity, stated where the report never speaks of sparsity; "dense" makes it certain."""
    for row in (r for r in report.all_rows if r.of("rate") and len(r.devices) == 1):
        for q in row.of("rate"):
            formats, part = formats_of(q, row) or row.stated("formats"), row.clause(q).lower()
            dense_of = re.search(r"dense|(?:no|without) (?:\w+ )?spars", f"{q.words} {part}")
            told = dense_of or _PEAK.search(f"{q.text} {q.words} {row.headings}") or _OFFERS.search(own_words(row, q))
            spoken = report.sparse and (not dense_of or re.search(r"(?<!no )(?<!without )spars|2:4", part))
            if not formats or not told or spoken:
                continue
            device = row.devices[0]
            # Data sheets state them at a clock below the highest that the part boosts to.
            dense = max(generous_peak(device, f) or 0.0 for f in formats)
            sparse = max(device.sparse_peak(f) or 0.0 for f in formats)
            if dense < 0.6 * sparse and 0.9 * sparse < q.value.mid < 1.015 * sparse:
                message = f"{q.text} is {device.name}'s {'/'.join(formats)} peak with 2:4 sparsity"
                message += "" if dense_of else ": is half of it meant?"
                yield finding(INCONSISTENT if dense_of else QUESTION, "sparse peak", message, q)
