"""Tokens / time = tokens/s, in a sentence or a record."""

import re
from collections.abc import Iterator

from expertile.audit.finding import INCONSISTENT, Finding, finding, si
from expertile.audit.interval import Interval, exact
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row

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
