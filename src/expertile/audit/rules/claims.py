"""Claims in words that the report's own figures or plain arithmetic refute."""

from __future__ import annotations

import re
from collections.abc import Iterator

from expertile.audit.facts import BITS, facts
from expertile.audit.finding import INCONSISTENT, QUESTION, Finding, finding, si
from expertile.audit.interval import exact
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report
from expertile.audit.rules.peaks import devices

_MEMORY = re.compile(r"(?i)memory|smaller|compress|footprint|storage|vram|saving")
_AFTER = re.compile(
    r"(?i)\W*(?:(?:the|in|of|lower|less|fewer|reduction)\W+)*(?:memory|smaller|compress|footprint|storage|vram|saving)"
)
_SHRUNK = re.compile(r"(?i)(?:compress|shrink|shrank|reduc|sav|smaller|cut|footprint)[^.;]{0,40}$")
_FASTER = re.compile(r"(?i)speed|faster|throughput|latency|quick|tokens|bandwidth|flops|accura|perplex")
_CHANGED = re.compile(
    r"(?i)(?:bits?|bf16|(?:fp|int|float|bfloat)\d+|half|weights|values|\d ?GB\)?)\)?,? ?(?:down )?(?:to|→|->|into) |"
    r"instead of|\bvs\b|"
    r"versus|compared (?:to|with)|relative to|(?:over|than) (?:the )?(?:fp|bf|float|half|\d+)"
)
_NOT_BITS = re.compile(
    r"(?i)prun|spars|evict|offload|kv|distill|activation|gradient|optimizer|batch|communicat|gpus?\b|network"
)


def _bits(text: str) -> list[int]:
    """The widths of the number formats that a text names."""
    named = [BITS[f] for f in facts(text).formats]
    counted = [
        int(b) for b in re.findall(r"(?i)\b(\d{1,2})[ -]?bits?\b", text) if int(b) in (1, 2, 3, 4, 5, 6, 8, 16, 32, 64)
    ]
    return list(dict.fromkeys((*named, *counted)))


def compression(report: Report) -> Iterator[Finding]:
    """A memory saving beyond the ratio of the bits; it asks where the wider format is not said."""
    lines = [row for row in report.rows if row.kind == "line"]
    wide = {b for b in _bits(report.text) if b >= 16}
    for i, row in enumerate(lines):
        for q in row.of("ratio", "percent") if _MEMORY.search(row.text) else ():
            before, after = row.text[: q.start], row.text[q.end : q.end + 24]
            if _FASTER.search(after) or not (_AFTER.match(after) or _SHRUNK.search(before)) or not q.value.mid:
                continue
            # The two formats stand in the sentence, or in the lines just before it.
            near = [r for r in lines[max(0, i - 3) : i + 1] if row.line - r.line <= 3]
            text = row.text if len(_bits(row.text)) > 1 else "\n".join(r.text for r in near)
            bits = _bits(text)
            known = len(bits) == 2 and max(bits) >= 16 and _CHANGED.search(text)
            if not bits or min(bits) > 8 or not (known or len(wide) == 1) or _NOT_BITS.search(before[-60:] + after):
                continue
            most = max(bits if known else wide) / min(bits)
            saved = q.value.lo if q.exact else q.value.mid
            ratio = saved if q.kind == "ratio" else 1 / max(1 - saved, 1e-9)
            if ratio > most * 1.06 and (
                q.kind == "ratio" or re.search(r"(?i)sav|reduc|less|smaller|lower|fewer", before[-40:] + after)
            ):
                less = f"{most:.3g}x smaller ({100 * (1 - 1 / most):.3g} % less)"
                change = f"{most * min(bits):.0f} to {min(bits)} bits is at most {less}"
                message = f"{change}, not {q.text}" + ("" if known else ": smaller than what?")
                yield finding(
                    INCONSISTENT if known else QUESTION, "compression", message, q, lines=tuple(r.line for r in near)
                )
    for grid in report.grids:
        for c in grid.columns("bytes"):
            if re.search(r"(?i)mem|size|vram|footprint|storage|weights", grid.header[c]):
                yield from _column(grid, c, {b for b in wide if b < 64})


def _column(grid: Grid, c: int, wide: set[int]) -> Iterator[Finding]:
    """Rows of one memory column that differ in their format only."""
    held = [(row, q, _bits(row.label)) for row in grid.body if (q := row.figure(c))]
    for row, q, bits in held:
        for other, base, from_bits in held if len(bits) == 1 and bits[0] <= 8 else ():
            stated = len(from_bits) == 1 and _without_format(other.label) == _without_format(row.label)
            if other is row or not (stated or (not from_bits and len(wide) == 1)):
                continue
            most = (from_bits[0] if stated else next(iter(wide))) / bits[0]
            if most > 1 and (base.value / q.value).lo > 1.08 * most:
                message = (
                    f"{base.text} / {q.text} is {base.value.mid / q.value.mid:.3g}x; the bits give at most {most:.3g}x"
                )
                yield finding(INCONSISTENT if stated else QUESTION, "compression", message, q, lines=(base.line,))
                break


def _without_format(label: str) -> str:
    words = r"(?i)\b(?:(?:fp|bf|int|uint|w|q|nf)\d+\w*|awq|gptq|quantized|baseline|\d+-?bit|half|float\d*)\b"
    return " ".join(re.sub(r"[^a-z0-9.]+", " ", re.sub(words, " ", label).lower()).split())


_EQUAL = re.compile(
    r"(?i)\b(?:equivalent|equal|same|identical)\s+(?:total\s+|amount of\s+)?(?:work|flops?|compute|computation)\b"
)
_SHAPE = re.compile(
    r"(?i)(?:(?P<n>\d+)\s*(?:[x×]\s+)?(?:separate |small )?(?:gemms?|matmuls?|matrices|products?)\D{0,12})?"
    r"(?<!\d)(?P<a>\d{2,6})\s*[x×]\s*(?P<b>\d{2,6})(?:\s*[x×]\s*(?P<c>\d{2,6}))?"
)


def equal_work(report: Report) -> Iterator[Finding]:
    """Two products called equal work that are not; a speed-up between two rows of unlike sizes."""
    lines = [row for row in report.rows if row.kind == "line"]
    for i, row in enumerate(lines):
        said = _EQUAL.search(row.text)
        near = [r for r in lines[i : i + 8] if r.line - row.line <= 8] if said else []
        shapes = [(r.line, m) for r in near for m in _SHAPE.finditer(r.text) if m["c"] or m["a"] == m["b"]]
        if said is None or len(shapes) != 2 or not re.search(r"(?i)gemm|matmul|matri", " ".join(r.text for r in near)):
            continue
        work = [2.0 * int(m["n"] or 1) * int(m["a"]) * int(m["b"]) * int(m["c"] or m["b"]) for _, m in shapes]
        if max(work) > 1.1 * min(work):
            each = " and ".join(f"{m[0].strip()} = {si(w, 'FLOP')}" for (_, m), w in zip(shapes, work, strict=True))
            message = f"{each}: {max(work) / min(work):.3g} times the work"
            yield Finding(INCONSISTENT, "equal work", row.line, said[0], message, tuple(line for line, _ in shapes))
    for grid in report.grids:
        times, ratios = (
            grid.columns("time"),
            [c for c in grid.columns("ratio") if re.search(r"(?i)speed", grid.header[c])],
        )
        if len(grid.body) != 2 or len(times) != 1 or len(ratios) != 1:
            continue
        a, b = grid.body
        differ = [
            s for s in ("batch", "seq", "m", "n", "k", "tokens", "size") if s in a.own and a.own[s] != b.own.get(s)
        ]
        q, base, here = b.figure(ratios[0]), a.figure(times[0]), b.figure(times[0])
        if not (differ and a.label and b.label and q and base and here) or a.label == b.label or q.value.meets(1.0):
            continue
        if q.value.meets(base.value / here.value, 0.03):
            name = differ[0]
            message = f"{q.text} compares {name} {a.own[name]:.0f} with {name} {b.own.get(name, 0):.0f}"
            yield finding(INCONSISTENT, "equal work", message, q, lines=(a.line,))


def ranges(report: Report) -> Iterator[Finding]:
    """ "2-5x slower" over ratios that reach further: it asks, unless they reach twice as far."""
    for row in report.rows:
        for q in row.of("ratio") if row.kind == "line" else ():
            words = (q.words + row.text[q.end : q.end + 20]).lower()
            if not re.search(r"\d ?(?:-|–|to) ?\d", q.text) or not re.search(r"slower|faster|speed-?\s?up", words):
                continue
            # A heading speaks of the whole report.
            path, heading = report.sections[row.block], report.blocks[row.block].kind == "heading"
            same = [g for g in report.grids if report.sections[g.block] == path] or (report.grids if heading else [])
            cells = [
                x for g in same for c in g.columns("ratio") for r in g.rows if (x := r.figure(c)) and x.kind == "ratio"
            ]
            slower = "slow" in words and all(x.value.mid <= 1.05 for x in cells)
            values = [1 / x.value.mid if slower else x.value.mid for x in cells]
            outside = [
                x.line for x, v in zip(cells, values, strict=True) if not 0.93 * q.value.lo <= v <= 1.07 * q.value.hi
            ]
            if len(values) < 3 or not outside or (not slower and min(values) < 0.9):
                continue
            sure = max(values) > 2 * q.value.hi
            span = f"they reach from {min(values):.3g}x to {max(values):.3g}x"
            reach = f"{len(outside)} of {len(values)} rows lie outside {q.text}: {span}"
            message = reach + ("" if sure else "; are only some rows meant?")
            yield finding(INCONSISTENT if sure else QUESTION, "range", message, q, lines=tuple(outside[:6]))


def failed_checks(report: Report) -> Iterator[Finding]:
    """A failed check of correctness that is excused in the next lines, its times reported all the same."""
    lines = [row for row in report.rows if row.kind == "line"]
    for i, row in enumerate(lines):
        if re.search(
            r"(?i)(?:correctness|verification|validation|numeric\w*(?: check)?)\W+[^a-z]*(?:fail|✗|❌)", row.text
        ):
            near = [r for r in lines[i + 1 : i + 4] if r.line - row.line <= 3]
            excuse = next(
                (r for r in near if re.search(r"(?i)equivalent|acceptable|expected|fine|correct\b", r.text)), None
            )
            if excuse is not None:
                message = "the result fails the report's own check, so the times beside it are of no valid run"
                yield Finding(INCONSISTENT, "failed check", row.line, row.text.strip()[:80], message, (excuse.line,))


def traffic(report: Report) -> Iterator[Finding]:
    """Traffic that the time of the shape stated in its section leaves no bandwidth for: distant lines, so it asks."""
    for row in report.rows:
        q, gpus = row.only("bytes") or next(iter(row.of("bytes")), None), [d for d in devices(row) if d.memory_bps]
        if row.kind != "line" or q is None or "traffic" not in row.text.lower() or not gpus or not q.exact:
            continue
        top = report.sections[row.block][:2]
        texts = [i for i, block in enumerate(report.blocks) if report.sections[i][:2] == top and block.lines]
        shape = next((t for i in texts for t in report.facts[i].tuples if len(t) == 2 and min(t) > 64), None)
        times = [t for g in report.grids for r in g.rows if r.facts.tuples[:1] == (shape,) for t in r.of("time")]
        # The slowest column, to be fair.
        t = max(times, key=lambda t: t.value.hi, default=None)
        most = max(d.memory_bps or 0 for d in gpus)
        if t is not None and q.value.lo / t.value.hi > 1.1 * most:
            rate = f"{q.text} in the {t.text} of line {t.line} is {si(q.value.mid / t.value.mid, 'B/s')}"
            message = f"{rate}, more than the {si(most, 'B/s')} of {gpus[0].name}: is this the same run?"
            yield finding(QUESTION, "traffic", message, q, lines=(t.line,))


def model_runs(report: Report) -> Iterator[Finding]:
    """Times of an MoE product whose model stands in a table and whose batch in a command: distant lines, so it asks."""
    commands = [(r, m) for r in report.rows for m in [re.search(r"--config[ =](\w+)", r.text)] if m and r.facts.sizes]
    for row in (row for grid in report.grids for row in grid.body):
        sizes = {"hidden", "ffn", "experts"}
        model = next((r for g in report.grids for r in g.rows if sizes <= r.own.keys() and r is not row), None)
        same = [r for r, m in commands if model and m[1].lower() in model.label.lower().split()]
        runs = [f["batch"][0] * f["seq"][0] for r in same if (f := r.facts.sizes) and {"batch", "seq"} <= f.keys()]
        times = [q for q in row.of("time") if q.value.mid > 0]
        if model is None or not runs or not times or not devices(row):
            continue
        own = model.own
        work = 2 * max(runs) * own.get("topk", 1) * own["hidden"] * own["ffn"]
        formats = row.scope.everything.formats
        most = max(d.peak(f) or 0 for d in devices(row) for f in (formats if set(formats) & {"fp8"} else ("bf16",)))
        for q in times:
            if most and work / q.value.hi > 1.2 * most:
                message = (
                    f"{max(runs):.0f} tokens of the model of line {model.line} in {q.text} are "
                    f"{si(work / q.value.mid, 'FLOP/s')}, more than "
                    f"the {si(most, 'FLOP/s')} of {devices(row)[0].name} for one of its products: was this run smaller?"
                )
                yield finding(QUESTION, "bound", message, q, lines=(model.line, *(r.line for r in same)))


def attention_share(report: Report) -> Iterator[Finding]:
    """One share of memory saved at every length: the score matrix grows with S², the rest with S."""
    for grid in report.grids:
        rows = [row for row in grid.rows if "seq" in row.own and row.of("bytes") and len(row.of("percent")) == 1]
        shares: list[Quantity] = [row.of("percent")[0] for row in rows]
        saved = [row.of("bytes")[-1].value / exact(row.own["seq"] ** 2) for row in rows]
        lengths, share = {row.own["seq"] for row in rows}, {q.value.mid for q in shares}
        if len(lengths) > 2 and len(share) == 1 and max(share) < 0.97 and all(s.meets(saved[0], 0.05) for s in saved):
            message = (
                "what is saved grows with the square of the length, what is left with the length: "
                f"the share cannot be {shares[0].text} in all {len(rows)} rows"
            )
            yield finding(INCONSISTENT, "constant share", message, *shares)
