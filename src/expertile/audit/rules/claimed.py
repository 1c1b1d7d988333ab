"""What sentences say of the report's own tables: means, wins, the fastest, the peak, a crossover, a named baseline."""

import itertools
import re
import statistics
from collections.abc import Iterator

from expertile.audit.facts import NUMBERS, size_of_name
from expertile.audit.finding import INCONSISTENT, QUESTION, Finding
from expertile.audit.interval import printed
from expertile.audit.records import Named, Sheet, digits, series, sheets, words
from expertile.audit.report import Report, Row
from expertile.audit.units import RATES

_SUMMARY = re.compile(r"(?i)\W*(?:total|sum|mean|avg|average|geo|median|all\b|overall)")
_WORDS = NUMBERS | {"one": "1"}
_COUNT = "|".join(_WORDS)
_MEAN = re.compile(
    r"(?i)\b(?:(?P<geo>geo(?:metric(?:al)?)?[ -]?mean)|(?P<median>median)|(?:arithmetic |plain |"
    r"simple )?(?P<mean>mean|average))"
    r"(?P<of>(?: [a-z-]+){0,2} (?:of|over|across) [^\d.;:=]*?)(?: is| was|:| =| comes to|"
    r" are) (?:about )?(?P<n>\d+(?:\.\d+)?)(?! ?%)(?: ?x| ?\w{1,3}\b)?(?=[\s.,;)]|$)"
)
_WINS = re.compile(
    rf"(?i)\b(?P<n>\d+|{_COUNT}) (?:out )?of (?:the |all |our )?(?P<m>\d+|{_COUNT})\b(?! ?%)(?P<what>(?: [a-z]+)?)"
)
_WON = re.compile(r"(?i)\b(?:ahead|wins?|won|faster|beats?|better|slower|loses?|lost|behind|outperforms?)\b")
_BY = re.compile(r"(?i)\bby\b|%|\dx|at least|more than|than \d|within|significant|other|both|each|either|except")
_FASTEST = re.compile(
    r"(?i)\b(?:for|at|with|when) (?P<key>[A-Za-z]\w*) ?(?:=|of|is)? ?(?P<n>\d[\d,]*)\b,? ?(?:the )?(?:\w+ )?"
    r"(?P<best>fastest|slowest|quickest|best|lowest|highest)(?: \w+)? (?:is|was) (?:the )?(?P<name>[\w .+-]{2,30})"
)
_IS_FASTEST = re.compile(
    r"(?i)\b(?:for|at|with) (?P<n>\d[\w,.]*)(?: \w+)?,? (?P<name>[\w .+-]{1,30}?) (?:is|was) (?:the )?"
    r"(?P<best>fastest|slowest|quickest)\b"
)
_PEAKS = re.compile(
    r"(?i)\b(?:peaks?|peaked|(?:is|was) (?:highest|greatest)|reaches (?:its|the) (?:maximum|peak)|"
    r"maximum)\b(?: is| \w+)?"
    r" (?:at|for|with) (?:a )?(?P<key>[a-z]+)(?: size)?(?: of| ?=)? ?(?P<n>\d[\d,]*)"
)
_FROM = re.compile(
    r"(?i)\b(?:for|from|at|above|once)\b[^.;:?\d]{0,40}(?P<n>\d[\d,]*)(?: [a-z]+){0,2} (?:and|or) (?:more|"
    r"above|up|larger|longer|greater)\b|"
    r"\bfrom (?:\w+ )?(?P<m>\d[\d,]*)(?: [a-z]+)? (?:on|onwards?|upwards?|up)\b"
)
_AGAINST = re.compile(r"(?i)\b(?:compared (?:with|to)|relative to|than|against|over) (?P<base>[\w.+-]+(?: [\w.+-]+)?)")
_GAIN = re.compile(r"(?i)\b(?:faster|quicker|higher|more|slower|lower|less|speed)")

_AGAIN = re.compile(
    r"\s*(?P<name>[A-Za-z][\w -]*?)[ :,]+(?P<key>[A-Za-z]\w*) ?= ?(?P<n>\d+)[ :,]+(?P<value>\d+(?:\.\d+)?)(?: "
    r"?[a-zµ]+)?\s*"
)


def claimed(report: Report) -> Iterator[Finding]:
    """Each sentence against the tables of the report."""
    tables = [s for s in sheets(report) if 1 < len(s.rows) < 60]
    for row in report.lines_of_text if tables else ():
        near = [s for s in tables if abs(s.block - row.block) < 4]
        for rule in (_mean, _wins, _fastest, _peak, _crossover, _weighted):
            yield from rule(report, row, near)
    yield from _baselines(report)
    yield from itertools.chain(*(_twice(report, s) for s in tables))


def _number(text: str) -> float:
    return float(_WORDS.get(text.lower(), text).replace(",", ""))


def _says(verdict: str, rule: str, message: str, line: int, quote: str, held: list[Named]) -> Finding:
    return Finding(verdict, rule, line, quote, message, tuple(f.line for f in held))


def _line(report: Report, row: Row, quote: str) -> int:
    """The line of a sentence, which may run over several, where a figure stands."""
    for n in range(row.line, min(row.line + 6, len(report.lines)) + 1):
        if quote in report.lines[n - 1]:
            return n
    return row.line


def _body(s: Sheet, c: int) -> list[Named]:
    some = [s.rows[r][c] for r, key in enumerate(s.keys) if c in s.rows[r] and not _SUMMARY.match(key)]
    return some if len({f.kind for f in some}) == 1 else []


def _own(s: Sheet) -> list[dict[int, Named]]:
    """The rows but those of totals and means."""
    return [row for row, key in zip(s.rows, s.keys, strict=True) if not _SUMMARY.match(key)]


def _values(s: Sheet) -> list[int]:
    """The columns that were measured: not the first, no sizes."""
    return [c for c in s.numeric if c and not size_of_name(s.header[c]) and len(s.header[c]) > 1]


def _mean(report: Report, row: Row, near: list[Sheet]) -> Iterator[Finding]:
    m = _MEAN.search(row.text)
    if (
        not m
        or "weighted" in row.text.lower()
        or re.search(r"(?i)exclud|without|harmonic|except|trim|suite|whole|full|entire|appendix", row.text)
    ):
        return
    if len(_MEAN.findall(row.text)) > 1:
        return
    said = {w.rstrip("s") for w in re.findall(r"[a-z]{4,}", m["of"].lower().replace("-", ""))}
    found = []
    for s in near:
        for c in _values(s):
            if {w.rstrip("s") for w in re.findall(r"[a-z]{4,}", s.header[c].lower().replace("-", ""))} & said - {
                "time"
            }:
                found.append((s, c))
    counts = {_number(x) for x in re.findall(rf"(?i)\b(?:the|all) (\d+|{_COUNT})\b", row.text)}
    if len(found) != 1 or not (held := _body(*found[0])) or (counts and len(held) not in counts):
        return
    values, q = [digits(f) for f in held], printed(m["n"])
    if len(values) < 3 or min(values) <= 0 or not min(values) / 2 < q.mid < max(values) * 2:
        return
    made = {
        "mean": statistics.fmean(values),
        "geo": statistics.geometric_mean(values),
        "median": statistics.median(values),
    }
    fits = [k for k, x in made.items() if q.meets(x, 0.003)]
    kind = next(k for k in ("geo", "median", "mean") if m[k])
    if kind in fits or (kind == "mean" and (fits or q.meets(statistics.harmonic_mean(values), 0.003))):
        return
    name = {"geo": "geometric mean", "mean": "mean", "median": "median"}[kind]
    other = {"geo": "geometric mean", "mean": "arithmetic mean", "median": "median"}
    more = f"; {m['n']} is the {other[fits[0]]}" if fits else ""
    outside = not min(values) <= q.mid <= max(values)
    message = f"the {name} of the {len(values)} rows is {made[kind]:.4g}, not {m['n']}{more}"
    sure = len(values) in counts and (fits or outside)
    yield _says(INCONSISTENT if sure else QUESTION, "total", message, _line(report, row, m["n"]), m["n"], held)


def _wins(report: Report, row: Row, near: list[Sheet]) -> Iterator[Finding]:
    """ "Ahead at 9 of the 10 sizes" beside a table of ten rows and two columns."""
    for m in _WINS.finditer(row.text):
        n, rows = _number(m["n"]), _number(m["m"])
        fit = [s for s in near if rows in (len(s.rows), len(_own(s))) and len(_values(s)) == 2 and len(s.numeric) <= 3]
        if not _WON.search(row.text) or _BY.search(row.text.replace(m[0], "")) or len(fit) != 1 or n > rows:
            continue
        a, b = ([r[c] for r in (_own(fit[0]) if len(fit[0].rows) != rows else fit[0].rows)] for c in _values(fit[0]))
        if len({f.kind for f in (*a, *b)}) > 1:
            continue
        less = sum(x.value < y.value for x, y in zip(a, b, strict=True))
        more = sum(x.value > y.value for x, y in zip(a, b, strict=True))
        if n not in (less, more, rows - less, rows - more):
            message = f"of {rows:.0f} rows {less} are less in the first column and {more} in the second, not {n:.0f}"
            yield _says(INCONSISTENT, "headline", message, _line(report, row, m["n"]), m[0], a)


def _low(report: Report, s: Sheet, held: list[Named]) -> bool | None:
    """Whether less is better; None where nothing says so."""
    lead = "\n".join(report.lines[max(0, held[0].line - 8) : held[0].line]).lower()
    if "lower is better" in lead or held[0].kind == "time":
        return True
    return False if "higher is better" in lead or held[0].kind in RATES else None


def _fastest(report: Report, row: Row, near: list[Sheet]) -> Iterator[Finding]:
    """ "For N = 4096 the fastest is cuBLAS" beside the row of 4096."""
    m = _FASTEST.search(row.text) or _IS_FASTEST.search(row.text)
    for s in near if m else ():
        assert m is not None
        at = [r for r, key in enumerate(s.keys) if key.replace(",", "") == m["n"].replace(",", "")]
        columns = [c for c in _values(s) if at and len(at) == 1 and c in s.rows[at[0]]]
        name = {*words(m["name"])}
        named = [c for c in columns if words(s.header[c]) and {*words(s.header[c])} <= name]
        if len(named) != 1 or len(columns) < 2 or len({s.rows[at[0]][c].kind for c in columns}) > 1:
            continue
        held = [s.rows[at[0]][c] for c in columns]
        low, best = _low(report, s, held), m["best"].lower()
        if low is None or re.search(r"(?i)second|except|after|apart|of the", m[0]):
            continue
        least = best == "lowest" or (best != "highest" and low != (best == "slowest"))
        q = s.rows[at[0]][named[0]]
        other = (min if least else max)(held, key=lambda f: f.value)
        if abs(other.value - q.value) > other.off + q.off:
            message = f"{s.header[named[0]]} has {q.text}, {s.header[other.column]} {other.text}"
            yield _says(INCONSISTENT, "headline", message, _line(report, row, m["best"]), m["name"].strip(), [q])


def _peak(report: Report, row: Row, near: list[Sheet]) -> Iterator[Finding]:
    """ "Throughput peaks at batch 512" beside a table in which another row has more."""
    m = _PEAKS.search(re.sub(r"\s+", " ", row.text))
    for s in near if m else ():
        assert m is not None
        keys = [key.replace(",", "") for key in s.keys]
        columns = [c for c in range(1, len(s.header)) if c in s.numeric]
        alone = len(columns) == 1 and m["key"].lower() in s.header[0].lower() and len({*keys}) == len(keys)
        held = s.column(columns[0]) if alone else []
        rate = (
            re.search(r"(?i)throughput|rate|bandwidth|performance|speed", row.text) and held and held[0].kind in RATES
        )
        if m["n"].replace(",", "") in keys and rate:
            q, most = held[keys.index(m["n"].replace(",", ""))], max(held, key=lambda f: f.value)
            if most.value - most.off > q.value + q.off:
                message = f"{m['key']} {m['n']} has {q.text}, {s.keys[held.index(most)]} has {most.text}"
                yield _says(INCONSISTENT, "headline", message, _line(report, row, m["n"]), m["n"], [q, most])


def _crossover(report: Report, row: Row, near: list[Sheet]) -> Iterator[Finding]:
    """ "From 2048 on" beside two columns of which the better one changes once, in another row."""
    m = _FROM.search(row.text)
    for s in near if m else ():
        assert m is not None
        n, keys = (m["n"] or m["m"]).replace(",", ""), [key.replace(",", "") for key in s.keys]
        columns = [c for c in s.numeric if c]
        if n not in keys or len(columns) != 2 or not all(k.isdigit() for k in keys) or len(s.header) != 3:
            continue
        a, b = s.column(columns[0]), s.column(columns[1])
        signs = [x.value < y.value for x, y in sorted(zip(a, b, strict=True), key=lambda p: int(keys[a.index(p[0])]))]
        order = sorted(map(int, keys))
        turns = [i for i in range(1, len(signs)) if signs[i] != signs[i - 1]]
        if len(turns) == 1 and a[0].kind == b[0].kind and order[turns[0]] != int(n):
            message = (
                f"the better of {s.header[columns[0]]} and {s.header[columns[1]]} changes at {order[turns[0]]}, not at "
                f"{n}"
            )
            yield _says(QUESTION, "headline", f"{message}: is it of this table?", _line(report, row, n), n, [*a, *b])


def _weighted(report: Report, row: Row, near: list[Sheet]) -> Iterator[Finding]:
    """A mean over all calls that is the plain mean of their classes, whose shares are stated."""
    q = next((q for q in row.quantities if q.exact and re.match(r"\W{0,2}on average\b", row.text[q.end :])), None)
    for s in near if q else ():
        assert q is not None
        columns = [c for c in s.numeric if c]
        share = [
            c
            for c in columns
            if re.search(r"(?i)share", s.header[c]) and abs(sum(f.value for f in s.column(c)) - 1) < 0.015
        ]
        same = [c for c in columns if c not in share and all(f.kind == q.kind for f in s.column(c))]
        if len(share) == 1 and len(same) == 1:
            held, parts = s.column(same[0]), [f.value for f in s.column(share[0])]
            made = sum(f.value * w for f, w in zip(held, parts, strict=True))
            plain = statistics.fmean(f.value for f in held)
            if q.value.meets(plain, 0.005) and not q.value.meets(made, 0.05):
                message = (
                    f"by their shares the mean is {made / plain * q.value.mid:.3g}; {q.text} is the plain mean of the "
                    f"rows"
                )
                yield _says(QUESTION, "total", f"{message}: which is meant?", q.line, q.text, held)


def _baselines(report: Report) -> Iterator[Finding]:
    """ "39 % faster than v0.8" that is the gain over another row: it asks."""
    lists = [
        s
        for s in series(report)
        if 2 < len(s.figures) < 12 and len({*s.labels}) == len(s.labels) and len({f.kind for f in s.figures}) == 1
    ]
    for row in report.lines_of_text if lists else ():
        m = _AGAINST.search(row.text)
        said = [q for q in row.of("percent", "ratio") if q.exact and _GAIN.search(row.text[q.end : q.end + 24])]
        for s in lists if m and len(said) == 1 else ():
            assert m is not None
            base = [
                i
                for i, x in enumerate(s.labels)
                if x.lower().strip() in (m["base"].lower().rstrip(".,"), m["base"].split()[0].lower().rstrip(",."))
            ]
            if len(base) != 1 or min(s.values) <= 0:
                continue

            def fits(b: int, values: list[float] = s.values) -> bool:
                pairs = [x / values[b] for i, x in enumerate(values) if i != b]
                forms = itertools.chain(*((x, x - 1, 1 - x, 1 / x, 1 / x - 1, 1 - 1 / x) for x in pairs))
                return any(x > 0 and said[0].value.meets(x, 0.02) for x in forms)  # noqa: B023

            other = [i for i in range(len(s.values)) if i != base[0] and fits(i)]
            if other and not fits(base[0]):
                message = (
                    f"no row is so of {s.labels[base[0]]}, {s.figures[base[0]].text}; it is of {s.labels[other[0]]}"
                )
                yield _says(
                    QUESTION,
                    "ratio",
                    f"{message}: which is the baseline?",
                    said[0].line,
                    said[0].text,
                    [s.figures[base[0]]],
                )


def _twice(report: Report, s: Sheet) -> Iterator[Finding]:
    """Lines that repeat a table's figures ("fa_like S=2048 0.412"), of which one has another: it asks."""
    columns = {words(h): c for c, h in enumerate(s.header) if c and words(h)}
    same, other = 0, list[tuple[int, str, Named]]()
    for block in (b for b in report.blocks if b.kind in ("code", "list") and not b.table):
        for line in block.lines:
            m = _AGAIN.fullmatch(line.text)
            c = columns.get(words(m["name"])) if m else None
            if not m or c is None or m["key"].lower() != s.header[0].lower() or m["n"] not in s.keys:
                continue
            if f := s.rows[s.keys.index(m["n"])].get(c):
                fits = abs(digits(f) - float(m["value"])) <= 0.005 * digits(f)
                same += fits
                other += [] if fits else [(line.number, m["value"], f)]
    if len(other) == 1 and same > 2:
        number, text, f = other[0]
        message = f"line {f.line} has {f.text} of {f.name}, all other figures are the same: which is right?"
        yield Finding(QUESTION, "retold", number, text, message, (f.line, number))
