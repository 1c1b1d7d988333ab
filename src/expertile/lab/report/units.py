"""Numbers as people read them: µs, TFLOP/s or TB/s, per cent. Inside the library everything stays in seconds."""

import re
from collections.abc import Sequence

from expertile.lab.report.rows import Row

MISSING = "–"


def significant(value: float) -> str:
    """Three significant figures without an exponent: 0.123, 1.23, 12.3, 123, 1,234."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.0995 else f"{value:.2g}"


def micros(seconds: float | None) -> str:
    """A time in µs, without the unit."""
    return MISSING if seconds is None else significant(seconds * 1e6)


def percent(share: float | None) -> str:
    """A share of one; one decimal under 10 % so that small CPU shares can be told apart."""
    if share is None:
        return MISSING
    return f"{share * 100:.0f} %" if share >= 0.0995 else f"{share * 100:.1f} %"


def times(ratio: float | None) -> str:
    """A ratio of two times: 1.06×."""
    return MISSING if ratio is None else f"{significant(ratio) if ratio >= 9.995 else f'{ratio:.2f}'}×"


def flop_rate(tflops: float | None) -> str:
    if tflops is None:
        return MISSING
    return f"{significant(tflops)} TFLOP/s" if tflops >= 0.9995 else f"{significant(tflops * 1e3)} GFLOP/s"


def byte_rate(gbps: float | None) -> str:
    if gbps is None:
        return MISSING
    return f"{significant(gbps / 1e3)} TB/s" if gbps >= 999.5 else f"{significant(gbps)} GB/s"


def rate(row: Row) -> str:
    """The rate that says most: bytes per second for a row that `moves` more than it computes, else FLOP per second."""
    if not row.timed:
        return MISSING
    return byte_rate(row.gbps) if row.moves else flop_rate(row.tflops)


def bound_rate(row: Row) -> str:
    """The rate at the bound itself."""
    if not row.bound_s:
        return MISSING
    if row.limiter == "memory":
        return byte_rate(row.nbytes / row.bound_s / 1e9 if row.nbytes else None)
    return flop_rate(row.flops / row.bound_s / 1e12 if row.flops else None)


def spread(row: Row) -> str:
    """Half the 95 % interval, as a share of the time."""
    if not row.timed or row.ci95_s is None:
        return MISSING
    return f"±{(row.ci95_s[1] - row.ci95_s[0]) / 2 / row.seconds * 100:.1f} %"


def error(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1e}"


def plural(count: int, noun: str) -> str:
    """`1 workload`, `3 workloads`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def listed(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip(" .…") + "…"


def markdown_table(header: str | Sequence[str], body: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are aligned to the left, the others to the right. The header may be
    one text, with "|" between the columns."""
    header = [name.strip() for name in header.split("|")] if isinstance(header, str) else header
    rule = ["-" if index < left else "-:" for index in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *body))


def cell(text: str) -> str:
    """Text that stays inside one table cell and brings no HTML, markup or marker of its own."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\|`*\[\]])", r"\\\1", text)
