"""Claims without a figure of their own, or with one alone: the best of a table, in how many of its rows, a bound that
none passes, a title above two lines."""

import itertools
import re
from collections.abc import Iterator

from expertile.audit.facts import NUMBERS, size_of_name
from expertile.audit.finding import INCONSISTENT, QUESTION, Finding, finding
from expertile.audit.quantity import Quantity
from expertile.audit.report import Grid, Report, Row
from expertile.audit.rules.hardware import end_before, own_words
from expertile.audit.rules.told import APART, OUTCOME, change_of, may_be, mid, not_made, words_of
from expertile.audit.units import RATES, TIMES, TYPED

_ALL = re.compile(
    r"(?i)\b(?:faster|quicker|better|ahead|beats?|wins?|outperforms?|higher|lower)\b[^.;]{0,60}"
    r"\b(?:every|all|each|always|any|throughout|no exceptions?)\b|"
    r"\b(?:every|all|always|each|never)\b[^.;]{0,50}\b(?:faster|quicker|better|ahead|beats?|wins?|slower)\b"
)
_NOT_ALL = re.compile(r"(?i)\b(?:almost|nearly|not|most|except|but|other than|apart from|above|below|larger)\b")
_WORDS = NUMBERS | {"one": "1"}
_COUNT = rf"\d+|{'|'.join(_WORDS)}"
_LOW = re.compile(r"(?i)\b(?:min(?:imum)?|lowest|smallest|fastest|best|quickest|least)\b")
_HIGH = re.compile(r"(?i)\b(?:max(?:imum)?|highest|largest|fastest|best|peaks? at|most)\b")
_SLOWEST = re.compile(r"(?i)\b(?:slowest|worst)\b")
_OF = re.compile(rf"(?i)\b(?P<n>{_COUNT}) (?:out )?of (?:the |all |our )?(?P<m>{_COUNT})\b(?! ?%)")
_WON = re.compile(r"(?i)\b(?:ahead|wins?|won|faster|beats?|better|slower|loses?|lost|behind|outperforms?)\b")
_BY = re.compile(r"(?i)\bby\b|%|\dx|at least|more than|than \d|within|significant|other|both|each|either|except")
_MOST = r"(?P<most>highest|lowest|best|fastest|quickest|slowest|largest|smallest|most|least|worst|shortest|longest)"
# "TP8 has the highest throughput", "For N = 4096 the fastest is cuBLAS", "throughput peaks at batch 512"
_BEST = (
    re.compile(
        rf"(?i)\b(?:for|at|with|when) (?:[A-Za-z]\w* ?(?:=|of|is)? ?)?(?P<n>\d[\d,]*)\b,? (?:the )?(?:\w+ )?{_MOST}"
        r"(?: \w+)? (?:is|was) (?:the )?(?P<name>[\w .+-]{2,30})"
    ),
    re.compile(
        rf"(?i)\b(?:for|at|with) (?:[A-Za-z]\w* ?= ?)?(?P<n>\d[\d,]*)(?: \w+)?,? (?P<name>[\w .+-]{{1,30}}?) "
        rf"(?:is|was) (?:the )?{_MOST}\b"
    ),
    re.compile(
        r"(?i)\b(?P<what>\w+) (?:peaks?|peaked|(?:is|was) (?P<most>highest|greatest)|reaches (?:its|the) "
        r"(?:maximum|peak))(?: \w+)? (?:at|for|with) (?:a )?(?P<name>[a-z]+)(?: size)?(?: of| ?=)? ?(?P<n>\d[\d,]*)"
    ),
    re.compile(
        r"(?i)(?P<name>[\w.+-]+(?:[ /][\w.+-]+){0,4}) (?:has|had|gives?|shows?|reach\w+|takes?|took|is) the "
        rf"{_MOST} (?P<what>[\w -]{{4,40}})"
    ),
)
_OTHER = re.compile(r"(?i)\b(?:second|of these|at the|per|except|almost|after|apart)\b")
_MEASURE = (
    (r"throughput|speed|rate", ("tokens_per_s", "items_per_s", "rate")),
    (r"latenc|time|duration", TIMES),
    (r"memory|footprint|vram", ("bytes",)),
    (r"bandwidth", ("bandwidth",)),
)
_BOUND = re.compile(
    r"(?i)\b(?:(?P<low>(?:stays?|remains?|is|are|keeps?|holds?|never (?:drops?|falls?|goes)|"
    r"(?:does|do) not (?:drop|fall))"
    r" (?:always |well )?(?:(?P<not>below|under)|above|over|at least|at or above|no (?:less|lower) than))|"
    r"(?P<high>(?:stays?|remains?|is|are|keeps?|never (?:exceeds?|goes|rises)|(?:does|do) not (?:exceed|rise))"
    r"(?: (?:always |well )?(?:(?:below|under|at most|within|no (?:more|higher) than)|(?P<over>above|over)))?))\W+$"
)
_SAID = r"(?i)\W*(?:\d[\d:.T/-]*[])]?\s+){0,3}(?:@?[a-z][\w.-]*(?: \w+)?: )?\W*"  # "[10:05] ann: before: 61 GB"
_BEFORE = re.compile(rf"{_SAID}(?:before|old|was|main|master|baseline)\b")
_AFTER = re.compile(rf"{_SAID}(?:after|new|now|ours|(?:this )?pr|this (?:branch|patch|change))\b")
_OTHER_PART = re.compile(
    r"\b(?:on top|addition|another|activation|gradient|optimi[sz]er|kv|cache|weights|buffer|layer)"
)
_BY_NO_MORE = re.compile(r"(?i)\b(?:none|no|never|nothing|neither)\b[^.;]*? by more than (\d+(?:\.\d+)?)\b(?! ?%)")
_ENDS = re.compile("[,;:(]")
_NEVER = re.compile(r"(?i)\b(?:never|not)\b")
_SOME = re.compile(r"(?i)\b(?:except|apart from|other than|but for|most|beyond|until|when|if|where|small|large|only)\b")
_UP_TO = re.compile(r"(?i)(?:up to|all the way to|to|through|until|at|from) (?:\w+ ?= ?)?(\d[\d,]*)\b")


def said(row: Row, grids: list[Grid]) -> Iterator[Finding]:
    """A sentence against the tables of three rows and more near it."""
    yield from _won(row, grids)
    yield from _within(row, grids)
    yield from _best(row, [g for g in grids if g.drawn])


def spoken(report: Report) -> Iterator[Finding]:
    """Bounds that a row passes, and what hyperfine says of its runs."""
    for row in report.lines_of_text:
        near = [g for g in report.tables if len(g.body) > 1 and min(abs(r.line - row.line) for r in g.rows) < 30]
        yield from _bounded(row, near) if near and not APART.search(row.text) else ()


def titles(report: Report) -> Iterator[Finding]:
    """ "3.9x for long contexts" above two lines, "before 812 us" and "after 305 us", that make another ratio; or, some
    lines below them, "latency down by 80 %"."""
    lines = report.lines_of_text
    befores = [(i, r) for i, r in enumerate(lines) if _BEFORE.match(r.text)]
    afters = ((r, s) for i, r in befores for s in lines[i + 1 : i + 4] if _AFTER.match(s.text))
    pairs = [
        (a, b)
        for r, s in afters
        if s.line - r.line < 5
        for k in TYPED
        if (a := r.only(k)) and (b := next((x for x in s.of(k) if x.exact and mid(x)), None))
    ]
    for row in lines if pairs else ():
        q = row.only("ratio") if len(row.quantities) == 1 and not APART.search(row.text) else None
        near = [(a, b) for a, b in pairs if 0 < a.line - row.line < 20]
        other = q and any(c.value.meets(q.value, 0.02) for r in report.all_rows if r is not row for c in r.of("ratio"))
        if q and len(near) == 1 and not other and not may_be(q, near[0][0].value / near[0][1].value, "", 0.03):
            yield not_made(q, [*near[0]], False)
        for q in row.of("percent", "ratio") if not APART.search(row.text) else ():
            words = own_words(row, q).lower()
            named = [some for form, some in _MEASURE if re.search(form, words) and not _OTHER_PART.search(words)]
            kinds = {*itertools.chain(*named)}
            near = [(a, b) for a, b in pairs if a.kind in kinds and 0 < row.line - b.line < 12]
            later = [x for r in lines if near and near[0][1].line < r.line <= row.line for x in r.of(*kinds)]
            if q.exact and len(near) == 1 and not later and (OUTCOME.search(words) or " by " in words):
                (a, b), change = near[0], change_of(row, q, False, q.start - end_before(row, q))
                yield from [] if may_be(q, a.value / b.value, change, 0.03) else [not_made(q, [a, b], False)]


def _first(row: Row) -> str:
    """The first cell of a table's row."""
    return row.text.partition(": ")[2].partition(";")[0].replace(",", "").strip()


def _at(row: Row, text: str, q: Quantity, *beside: Quantity, verdict: str = QUESTION, message: str = "") -> Finding:
    """A finding about some words of a sentence, which may run over several lines, and figures of a table."""
    lines = row.report.lines
    word = text.split()[0]
    line = next((n for n in range(row.line, min(row.line + 6, len(lines)) + 1) if word in lines[n - 1]), row.line)
    return Finding(verdict, "headline", line, text, message, tuple(x.line for x in (q, *beside)))


def _pairs(g: Grid) -> list[tuple[Row, Quantity, Quantity]]:
    """The rows of a table that has two columns of one kind, and what they have there."""
    for kind in (*TIMES, *RATES, "ratio", "number"):
        both = [c for c in g.columns(kind) if c and not size_of_name(g.header[c])]
        held = [(r, x, y) for r in g.body if len(both) == 2 and (x := r.figure(both[0])) and (y := r.figure(both[1]))]
        if len(held) > 2:
            return held
    return []


def _clause(text: str, form: re.Pattern[str]) -> tuple[int, int]:
    """Where the part of a sentence, between commas, colons and brackets, begins and ends that the form stands in."""
    m = form.search(text)
    end = _ENDS.search(text, m.end()) if m else None
    return (max(text.rfind(c, 0, m.start()) for c in ",;:(") + 1, end.start() if end else len(text)) if m else (0, 0)


def _won(row: Row, grids: list[Grid]) -> Iterator[Finding]:
    """ "Ahead at 9 of the 10 sizes" beside a table of ten rows and two columns; "faster on every shape" where in one
    row it is not."""
    first, last = _clause(row.text, _ALL)  # "…, with the largest gain, 1.30x, at 4096 tokens" is no part of the claim
    beside = any(first <= q.start < last for q in row.of("ratio", "percent"))
    every = first < last and not beside and not _NOT_ALL.search(row.text[first:last])
    m = _OF.search(row.text) if _WON.search(row.text) else None
    for g in grids:
        pairs = _pairs(g)
        less = [(x, y) for _, x, y in pairs if x.value.hi < y.value.lo]
        more = [(x, y) for _, x, y in pairs if x.value.lo > y.value.hi]
        few = min(less, more, key=len)
        if every and g.drawn and 0 < len(few) <= 0.4 * len(pairs):
            (x, y), *_ = few
            message = f"line {x.line} has {x.text} and {y.text}, the other way round than most rows: is it so on every?"
            yield finding(QUESTION, "headline", message, y, x, lines=(row.line,))
        n, of = (float(_WORDS.get(w.lower(), w)) for w in m.group("n", "m")) if m else (0.0, 0.0)
        counts = (len(less), len(more), len(pairs) - len(less), len(pairs) - len(more))
        alone = pairs and len({q.column for q in pairs[0][0].quantities}) < 4
        if m and alone and of == len(pairs) >= n not in counts and not _BY.search(row.text.replace(m[0], "")):
            each = f"{counts[0]} are less in the first column and {counts[1]} in the second"
            message = f"of {of:.0f} rows {each}, not {n:.0f}"
            yield _at(row, m[0], *(x for _, x, _ in pairs), verdict=INCONSISTENT, message=message)


def _best(row: Row, grids: list[Grid]) -> Iterator[Finding]:
    """One row of a column, or one column of a row, is said to be the best of all; of a row that a number names it is
    certain."""
    m = next(filter(None, (form.search(re.sub(r"\s+", " ", row.text)) for form in _BEST)), None)
    if not m or row.of(*TYPED, "ratio") or _OTHER.search(m[0]):
        return
    said = {"n": "", "what": "", **m.groupdict()}
    most, n = (said["most"] or "highest").lower(), (said["n"] or "").replace(",", "")
    what, name = words_of(said["what"] or ""), _last_words(said["name"]) if not said["what"] or not n else [n]
    kinds = [k for form, some in _MEASURE for k in some if re.search(form, (said["what"] or "").lower())]
    for g in grids:
        if n and not said["what"]:
            heads = [" ".join(words_of(re.sub(r"\(.*?\)", "", h))) for h in g.header]
            rows = [r for r in g.body if _first(r) == n]
            cells = [(h, x) for r in rows for c, h in enumerate(heads) if c and (x := r.figure(c))]
        else:
            columns = [c for c, h in enumerate(g.header) if {*words_of(h)} & {w for w in what if len(w) > 3}]
            columns = [c for c in columns if any(r.figure(c) for r in g.body)] or g.columns(*kinds)
            one = [(r, x) for r in g.body if len(columns) == 1 and (x := r.figure(columns[0]))]
            cells = [(_first(r) if n else " ".join(words_of(r.label)), x) for r, x in one]
        named = [x for of, x in cells if of in name or (n and not said["what"] and f" {of} " in f" {name[-1]} ")]
        if len(named) != 1 or len({x.kind for _, x in cells}) > 1:
            continue
        q = named[0]
        if n and q.kind not in (*TIMES, *RATES):
            continue  # is more better?
        low = most in ("lowest", "smallest", "least", "shortest") or (most == "quickest" and q.kind in TIMES)
        low |= most in ("best", "fastest") and q.kind in TIMES
        low |= most in ("worst", "slowest") and q.kind in RATES
        other = (min if low else max)((x for _, x in cells), key=mid)
        if (other.value.hi < q.value.lo) if low else (other.value.lo > q.value.hi):
            message = f"{m[0].strip()}: it has {q.text}, line {other.line} {other.text}"
            if n:
                yield _at(row, n, q, other, verdict=INCONSISTENT, message=message)
            else:
                yield finding(QUESTION, "headline", f"{message}: of which rows is it?", q, other, lines=(row.line,))


def _last_words(text: str) -> list[str]:
    """The last words of a text, one to five of them."""
    words = words_of(text)
    return [" ".join(words[-n:]) for n in range(1, 6)]


def _within(row: Row, grids: list[Grid]) -> Iterator[Finding]:
    """ "None moves perplexity by more than 0.1 against fp16" beside a column of that name in which a row does."""
    m = _BY_NO_MORE.search(row.text)
    if m is None:
        return
    words, most = {*words_of(row.text)}, float(m[1])
    for g in grids:
        for c, name in enumerate(g.header):
            cells = [(r, q) for r in g.body if (q := r.figure(c))]
            if len(cells) < 3 or not {n for n in words_of(name) if len(n) > 3} & words:
                continue
            firsts = [{*words_of(_first(r))} for r, _ in cells]
            named = [q for (_, q), first in zip(cells, firsts, strict=True) if first <= words]
            # Of all that may be the base, the one from which they are least apart.
            bases = named or [q for _, q in cells]
            worst = [max(((abs(mid(q) - mid(b)), q, b) for _, q in cells), key=lambda of: of[0]) for b in bases]
            off, q, base = min(worst, key=lambda of: of[0])
            if 1.05 * most < off < 50 * most:
                message = f"{q.text} is {off:.3g} from {base.text}, more than {m[1]}: is it meant too?"
                yield finding(QUESTION, "headline", message, q, base, lines=(row.line,))


def _bounded(row: Row, near: list[Grid]) -> Iterator[Finding]:
    """ "Efficiency stays above 85 % up to 512 ranks" beside a row of 71 %."""
    for q in row.quantities:
        m = _BOUND.search(row.text[: q.start])
        if not m or _SOME.search(row.text.replace(m[0], "")) or q.text[0] in "+-−":
            continue
        down = (m["low"] and not m["not"]) or (m["not"] and _NEVER.search(m["low"]))
        down = bool(down) and not (m["high"] and m["over"])
        down = not down if m["high"] and m["over"] and _NEVER.search(m["high"]) else down
        if m["high"] and not m["over"] and re.fullmatch(r"(?i)(?:is|are|stays?|remains?|keeps?)\W+", m["high"] + " "):
            continue  # "is 85 %"
        if re.match(r"(?i)\W*(?:for|at|on|in|with) (?:[a-z]+ )?\d", row.text[q.end :]):
            continue  # of some
        names = {*words_of(row.text[: m.start()])}
        for g in near:
            heads = [c for c in g.columns(q.kind) if {w for w in words_of(g.header[c]) if len(w) > 3} & names]
            to = _UP_TO.search(row.text[q.end :])
            last = float(to[1].replace(",", "")) if to else float("inf")
            for c in heads if len(heads) == 1 else ():
                for r in g.body:
                    f = r.figure(c)
                    first = r.figure(0)
                    if f and first and to and first.value.mid > last:
                        continue
                    if f and (f.value.hi < 0.999 * q.value.mid if down else f.value.lo > 1.001 * q.value.mid):
                        bound = "at least" if down else "at most"
                        message = f"line {f.line} has {f.text}, {bound} {q.text} is said: of which rows is it?"
                        yield finding(QUESTION, "headline", message, q, f)
                        break


def extreme(row: Row, q: Quantity, grids: list[Grid]) -> Iterator[Finding]:
    """The best row is said to be one that another of the same sizes beats."""
    past = end_before(row, q)
    before = row.text[max(past, q.start - 120) : q.start]
    low = q.kind in TIMES and _LOW.search(before)
    high = (q.kind in (*RATES, "ratio") and _HIGH.search(before)) or (q.kind in TIMES and _SLOWEST.search(before))
    if bool(low) == bool(high) or re.search(r"(?i)\b(?:only|at|for|with|second|next|of the|per|each)\b", before[-30:]):
        return
    columns = ((g, [x for r in g.body if (x := r.figure(c, q.kind))]) for g in grids for c in g.columns(q.kind))
    for grid, held in ((g, held) for g, held in columns if len(held) > 2):
        same = [x for x in held if x.value.mid == q.value.mid]
        other = min(held, key=lambda x: x.value.mid) if low else max(held, key=lambda x: x.value.mid)
        beaten = other.value.hi < q.value.lo if low else other.value.lo > q.value.hi
        runs = [r for r in grid.body if other in r.quantities or (same[:1] and same[0] in r.quantities)]
        if same and beaten and runs[0].own == runs[-1].own and runs[0].bare == runs[-1].bare:
            message = f"{q.text} is not the {'least' if low else 'most'}: line {other.line} has {other.text}"
            yield finding(QUESTION, "headline", f"{message}: of which rows is it?", q, other)
