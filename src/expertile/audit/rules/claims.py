"""Claims in words that the report's own figures or plain arithmetic refute."""

from __future__ import annotations

import re
from collections.abc import Iterator

from expertile.audit.facts import BITS, facts
from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, Finding, si
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.ratios import is_summary

_SMALLER = re.compile(r"(?i)\W*(?:(?:the|in|of|lower|less|fewer|reduction)\W+)*(?:memory|smaller|compress|footprint|storage|vram|saving)")
_CHANGED = re.compile(r"(?i)\bto\b|instead of|\bvs\b|versus|compared|\bover\b|→|->|than|from")
_SHRUNK = re.compile(r"(?i)(?:compress|shrink|shrank|reduc|sav|smaller|cut|footprint)[^.;]{0,40}$")
_FASTER = re.compile(r"(?i)speed|faster|throughput|latency|quick|tokens|bandwidth|flops|accura|perplex")
_KIND_OF_BITS = {**{f: b for f, b in BITS.items()}}


def _bits(text: str) -> list[int]:
    found = [_KIND_OF_BITS[f] for f in facts(text).formats if f in _KIND_OF_BITS]
    found += [
        int(b) for b in re.findall(r"(?i)\b(\d{1,2})[ -]?bits?\b", text) if int(b) in (1, 2, 3, 4, 5, 6, 8, 16, 32, 64)
    ]
    return list(dict.fromkeys(found))


def compression(report: Report) -> Iterator[Finding]:
    """A memory saving beyond the ratio of the bits; it asks where the wider format is not said."""
    for row in report.rows:
        if row.kind != "line" or not re.search(r"(?i)memory|smaller|compress|footprint|size|storage|vram|saving", row.text):
            continue
        for q in row.of("ratio", "percent"):
            near = row.text[max(0, q.start - 60) : q.end + 60]
            if q.kind == "percent" and not re.search(r"(?i)sav|reduc|less|smaller|lower|fewer", near):
                continue
            after = row.text[q.end : q.end + 24].lower()
            if _FASTER.search(after) or not (_SMALLER.match(after) or _SHRUNK.search(row.text[: q.start])) or not q.value.mid:
                continue
            # The two formats stand in the sentence, or in the lines just before it.
            before = [r for r in report.rows if r.kind == "line" and 0 <= row.line - r.line <= 3]
            text = row.text if len(_bits(row.text)) > 1 else "\n".join(r.text for r in before)
            bits = _bits(text)
            known = len(bits) == 2 and max(bits) >= 16 and _CHANGED.search(text)
            if not bits or min(bits) > 8:
                continue
            wide = {b for b in _bits(report.text) if b >= 16}
            bits = bits if known else [min(bits), *wide] if len(wide) == 1 else []
            if not bits:
                continue
            lines = tuple(r.line for r in before) if text != row.text else ()
            most = max(bits) / min(bits)
            ratio = q.value.lo if q.kind == "ratio" else 1 / (1 - q.value.lo) if q.value.lo < 1 else float("inf")
            if not q.exact and q.kind == "ratio":
                ratio = q.value.mid
            if ratio > most * 1.06 and not re.search(
                r"(?i)prun|spars|evict|offload|kv|distill|activation|gradient|optimizer|batch|communicat|gpus?\b|network",
                near,
            ):
                yield Finding(
                    INCONSISTENT if known else QUESTION, "compression", q.line, q.text,
                    f"{max(bits)} to {min(bits)} bits is at most {most:.3g}x smaller ({100 * (1 - 1 / most):.3g} % less), "
                    f"not {q.text}" + ("" if known else ": smaller than what?"), lines,
                )  # fmt: skip
    yield from _table_compression(report)


def _table_compression(report: Report) -> Iterator[Finding]:
    for grid in report.grids:
        for c in grid.columns("bytes"):
            if not re.search(r"(?i)mem|size|vram|footprint|storage|weights", grid.header[c]):
                continue
            held = [
                (row, q) for row, q in zip(grid.rows, grid.column(c), strict=True) if q is not None and q.value.mid > 0
            ]
            wide = [b for b in _bits(report.text) if b in (16, 32)]
            for row, q in held:
                bits = _bits(row.label)
                if len(bits) != 1 or bits[0] > 8 or is_summary(row):
                    continue
                for other, base in held:
                    from_bits = _bits(other.label)
                    stated = len(from_bits) == 1
                    width = from_bits[0] if stated else max(wide, default=0)
                    same = stem_without_format(other.label) == stem_without_format(row.label)
                    if other is row or width <= bits[0] or (stated and not same):
                        continue
                    if not stated and len(set(wide)) != 1:
                        continue
                    x = base.value / q.value
                    if x.lo > 1.08 * width / bits[0]:
                        yield Finding(
                            INCONSISTENT if stated else QUESTION, "compression", q.line, q.text,
                            f"{base.text} / {q.text} is {x.mid:.3g}x; {width} to {bits[0]} bits is at most {width / bits[0]:.3g}x",
                            (base.line,),
                        )  # fmt: skip
                        break


def stem_without_format(label: str) -> str:
    """A row's label without its number format and the words around it."""
    plain = re.sub(
        r"(?i)\b(?:(?:fp|bf|int|uint|w|q|nf)\d+\w*|awq|gptq|quantized|baseline|\d+-?bit|half|float\d*)\b", " ", label
    )
    return " ".join(re.sub(r"[^a-z0-9.]+", " ", plain.lower()).split())


_EQUAL = re.compile(
    r"(?i)\b(?:equivalent|equal|same|identical)\s+(?:total\s+|amount of\s+)?(?:work|flops?|compute|computation|workload)\b"
)
_GEMMS = re.compile(r"(?i)(?:(?P<n>\d+)\s*(?:[x×]\s+)?(?:separate |small |independent )?(?:gemms?|matmuls?|matrices|products?)\D{0,12})?"
                    r"(?<!\d)(?P<a>\d{2,6})\s*[x×]\s*(?P<b>\d{2,6})(?:\s*[x×]\s*(?P<c>\d{2,6}))?")  # fmt: skip


def equal_work(report: Report) -> Iterator[Finding]:
    """Shapes called equal work that are not."""
    texts = [row for row in report.rows if row.kind == "line"]
    for i, row in enumerate(texts):
        if not _EQUAL.search(row.text):
            continue
        found: list[tuple[Row, float, str]] = []
        for other in texts[i : i + 8]:
            if other.line - row.line > 8:
                break
            for m in _GEMMS.finditer(other.text):
                a, b = int(m["a"]), int(m["b"])
                if m["c"] is None and a != b:
                    continue
                n, c = int(m["n"] or 1), int(m["c"] or b)
                found.append((other, 2.0 * n * a * b * c, f"{n}·2·{a}·{b}·{c}" if n > 1 else f"2·{a}·{b}·{c}"))
        if len(found) == 2 and re.search(r"(?i)gemm|matmul|matri", " ".join(r.text for r, _, _ in found) + row.text):
            (r1, w1, t1), (r2, w2, t2) = found
            if max(w1, w2) > 1.1 * min(w1, w2):
                yield Finding(
                    INCONSISTENT, "equal work", row.line, _EQUAL.search(row.text)[0],  # type: ignore[index]
                    f"{t1} = {si(w1, 'FLOP')} and {t2} = {si(w2, 'FLOP')}: {max(w1, w2) / min(w1, w2):.3g} times the work",
                    (r1.line, r2.line),
                )  # fmt: skip


def unequal_rows(report: Report) -> Iterator[Finding]:
    """A speed-up over a row of another size: two implementations, each at a size of its own."""
    for grid in report.grids:
        body = [row for row in grid.rows if not is_summary(row)]
        for c in grid.columns("ratio"):
            if len(body) != 2 or not re.search(r"(?i)speed", grid.header[c]):
                continue
            (a, b), times = body, grid.columns("time")
            differ = [
                s for s in ("batch", "seq", "m", "n", "k", "tokens", "size") if s in a.own and a.own[s] != b.own.get(s)
            ]
            if len(times) != 1 or not differ or a.label == b.label or not a.label or not b.label:
                continue
            q, base, here = (grid.column(x)[i] for x, i in ((c, 1), (times[0], 0), (times[0], 1)))
            if (
                q
                and base
                and here
                and here.value.mid
                and q.value.meets(base.value / here.value, 0.03)
                and not q.value.meets(1.0)
            ):
                yield Finding(
                    INCONSISTENT, "equal work", q.line, q.text,
                    f"{q.text} compares {differ[0]} {a.own[differ[0]]:.0f} with {differ[0]} {b.own[differ[0]]:.0f}", (a.line, b.line),
                )  # fmt: skip


_RANGE_OF = re.compile(r"(?i)slower|faster|speed-?\s?up")


def ranges(report: Report) -> Iterator[Finding]:
    """ "2-5x slower" over a column of ratios that reach further: asked, since the claim may mean some rows only."""
    for row in report.rows:
        for q in row.of("ratio"):
            if (
                row.kind != "line"
                or q.exact
                or not re.search(r"\d ?(?:-|–|to) ?\d", q.text)
                or not _RANGE_OF.search(q.words + row.text[q.end : q.end + 20])
            ):
                continue
            columns = [
                cells
                for grid in _above(report, row)
                for c in grid.columns("ratio")
                if (cells := _ratios(grid.column(c)))
            ]
            if len(columns) == 0 or len({len(c) for c in columns}) == 0:
                continue
            cells = [x for column in columns for x in column]
            slower = "slow" in (q.words + row.text[q.end : q.end + 20]).lower()
            values = (
                [1 / x.value.mid for x in cells]
                if slower and all(x.value.mid <= 1.05 for x in cells)
                else [x.value.mid for x in cells]
            )
            if len(values) < 3 or (not slower and min(values) < 0.9):
                continue
            lo, hi = q.value.lo, q.value.hi
            outside = [x for x, v in zip(cells, values, strict=True) if v < 0.93 * lo or v > 1.07 * hi]
            if outside:
                worst = (
                    max(outside, key=lambda x: x.value.mid) if not slower else min(outside, key=lambda x: x.value.mid)
                )
                sure = max(values) > 2 * hi
                yield Finding(
                    INCONSISTENT if sure else QUESTION, "range", q.line, q.text,
                    f"{len(outside)} of {len(values)} rows lie outside {q.text}: they reach from {min(values):.3g}x to {max(values):.3g}x"
                    + ("" if sure else "; are only some rows meant?"), tuple(sorted({x.line for x in outside} | {worst.line}))[:6],
                )  # fmt: skip


def _ratios(column: list[Quantity | None]) -> list[Quantity]:
    held = [q for q in column if q is not None and q.kind == "ratio" and q.value.mid > 0]
    return held if len(held) >= 3 else []


def _above(report: Report, row: Row) -> list[object]:  # grids of the section, else of the report
    path = report.sections[row.block]
    same = [g for g in report.grids if report.sections[g.block] == path]
    # A heading speaks of the whole report.
    return same or (report.grids if report.blocks[row.block].kind == "heading" else [])  # type: ignore[return-value]


def failed_checks(report: Report) -> Iterator[Finding]:
    """A failed check of correctness whose times are reported all the same."""
    for row in report.rows:
        if row.kind == "line" and re.search(
            r"(?i)(?:correctness|verification|validation|numeric\w*(?: check)?)\W+[^a-z]*(?:fail|✗|❌)", row.text
        ):
            near = [r for r in report.rows if 0 <= r.line - row.line <= 3]
            excuse = next(
                (r for r in near if re.search(r"(?i)equivalent|acceptable|expected|fine|correct\b", r.text)), None
            )
            if excuse is not None and excuse is not row:
                yield Finding(
                    INCONSISTENT, "failed check", row.line, row.text.strip()[:80],
                    "the result fails the report's own check, so the times beside it are of no valid run", (excuse.line,),
                )  # fmt: skip


def traffic(report: Report) -> Iterator[Finding]:
    """Traffic that a stated time of the same section leaves no bandwidth for: tied over lines, so it asks."""
    from expertile.audit.rules.peaks import _BY_NAME

    for row in report.rows:
        moved = [q for q in row.of("bytes") if re.search(r"(?i)traffic", row.text) and q.exact]
        if row.kind != "line" or not moved:
            continue
        scope = report.scope(row)
        devices = [d for name in scope.devices if (d := _BY_NAME.get(name)) and d.memory_bps]
        shape = {t for g in _same_shape(report, row) for t in [g]}
        for q in moved[:1] if devices and shape else ():
            line, time = next(iter(sorted(shape)))
            speed = q.value.lo / time
            peak = max(d.memory_bps or 0 for d in devices)
            if speed > 1.1 * peak:
                yield Finding(
                    QUESTION, "traffic", q.line, q.text,
                    f"{q.text} in the {si(time, 's')} of line {line} is {si(speed, 'B/s')}, more than the {si(peak, 'B/s')} of "
                    f"{devices[0].name}: is this the same run?", (line,),
                )  # fmt: skip


def _same_shape(report: Report, row: Row) -> list[tuple[int, float]]:
    """Times of table rows whose shape is the only one that the row's section states: the slowest column, to be fair."""
    path = report.sections[row.block]
    stated = [t for i, f in enumerate(report.facts) if f and report.sections[i][:2] == path[:2] and report.blocks[i].table is None
              for t in f.tuples if len(t) == 2 and min(t) > 64]  # fmt: skip
    if not stated:
        return []
    found = []
    for grid in report.grids:
        for r in grid.rows:
            times = [q.value.hi for q in r.of("time")]
            if r.facts.tuples and r.facts.tuples[0] == stated[0] and times:
                found.append((r.line, max(times)))
    return found


def attention_share(report: Report) -> Iterator[Finding]:
    """One share of memory saved at every length: the score matrix grows with S², the rest with S."""
    for grid in report.grids:
        rows = [row for row in grid.rows if "seq" in row.own and row.of("bytes") and len(row.of("percent")) == 1]
        if len(rows) < 3 or len({row.own["seq"] for row in rows}) < 3:
            continue
        saved = [row.of("bytes")[-1].value.mid / row.own["seq"] ** 2 for row in rows]
        shares = {row.of("percent")[0].value.mid for row in rows}
        if max(saved) < 1.05 * min(saved) and len(shares) == 1 and next(iter(shares)) < 0.97:
            q = rows[-1].of("percent")[0]
            yield Finding(
                IMPOSSIBLE if False else INCONSISTENT, "constant share", rows[0].line, q.text,
                f"what is saved grows with the square of the length, what is left with the length: the share cannot be "
                f"{q.text} in all {len(rows)} rows", tuple(row.line for row in rows),
            )  # fmt: skip
