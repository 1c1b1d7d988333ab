"""Tokens / time = tokens/s, in a sentence or a record."""

import re
from collections.abc import Iterator

from expertile.audit.finding import INCONSISTENT, Finding, finding, si
from expertile.audit.report import Report

_WIDE = 0.08
# Times of a part of the run, and tokens of several requests.
_NOT_ALL = re.compile(
    r"(?i)ttft|first token|prefill|prompt|load|warm-?up|compile|p9\d|std|queue|tpot|itl|inter-?token|"
    r"(?:per|next) token|concurren|requests|users?\b|clients|parallel|steady|decode only|"
    r"excluding|worker|stream|pipeline|accum"
)


def token_counts(report: Report) -> Iterator[Finding]:
    """ "512 tokens in 8.0 s (64 tok/s)", times every number of sequences or GPUs that the row or the report states."""
    several = [n for name in ("batch", "gpus") for n in report.everything.of(name)]
    for row in report.rows:
        q, t, counts = row.only("tokens_per_s"), row.only("time"), [c for c in row.of("tokens") if c.exact]
        if not (q and t and counts) or len(counts) > 3 or row.of("rate") or _NOT_ALL.search(row.text):
            continue
        # A whole number of the row may count sequences.
        small = [float(n) for n in re.findall(r"(?<![\d.,])(\d{1,3})(?![\d.,%]|\s?(?:ms|s|x|tok))", row.text) if int(n)]
        sums = [*(c.value for c in counts), sum((c.value for c in counts[1:]), counts[0].value)]
        ratios = [q.value * t.value / s for s in sums if s.mid]
        if not any(r.meets(x, _WIDE) for r in ratios for n in (1.0, *several, *small) for x in (n, 1 / n)):
            would = si(counts[0].value.mid / t.value.mid, "tokens/s")
            message = f"{counts[0].text} in {t.text} is {would}, not {q.text}"
            yield finding(INCONSISTENT, "tokens/s", message, q, counts[0], t)
