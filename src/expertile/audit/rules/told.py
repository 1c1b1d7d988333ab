"""What sentences and records say of other figures: ratios of the figures beside them and of the sentence before.

It asks, unless the sentence's or record's only two figures can only be what it compares.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace

from expertile.audit.finding import INCONSISTENT, QUESTION, Finding, finding
from expertile.audit.interval import NUMBER, ODD, Interval, exact, printed
from expertile.audit.pattern import regex
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report, Row
from expertile.audit.rules.hardware import on_sheet
from expertile.audit.rules.made import printed_as
from expertile.audit.rules.tables import wrong
from expertile.audit.units import RATES, TIMES, TYPED

_FROM = regex(
    r"(?i)\bfrom\b.*\bto\b|→|(?<!-)->|\bvs\.?\b|\bversus\b|compared (?:to|with)|instead|\bagainst\b|(?:down|up) to|"
    r"\bthan\b"
)
_GAINS = (
    r"(?:faster|as fast|slower|speed|slow|improve|reduc|less|lower|higher|more|increas|gain|decreas|drop|"
    r"\b(?:down|up)\b(?! to)|beat|outperform|buys|yields|better|shorten|sooner|quicker|smaller|\bcut|\bcosts?\b|"
    r"\badds?\b|sav)"
)
OUTCOME, _CHANGE = regex(rf"(?i){_GAINS}"), regex(rf"(?i)^\W*{_GAINS}")
_SPEED = regex(r"(?i)concurren|speed|faster|slower|latency|throughput|\btime")
_SIZE = regex(r"(?i)memory|vram|size|resource|gpus|power|energy|cost")
_THAN = regex(r"(?i)\b(?:than|over|vs)\b")
_LESS = regex(r"(?i)drop|\bdown\b|(?<!all)(?<!all[-_ ])reduc|decreas|\bless|lower|sav|\bcut|fell|shr[aiu]nk")
_BY = regex(r"(?i)\bby\W*$")
_ROSE = regex(r"(?i)\b(?:rose|ris|increas|grew|went up|climb)[^.;]{0,24}\bby\W*$")
_GAIN_OF = regex(r"(?i)\b(?:improvement|gain|increase|speed-?up) of\W*$")
_NO_RATIO = regex(
    r"(?i)peak|utili|efficien|accuracy|recall|confidence|error|sparsity|occupancy|of (?:the )?(?:total|time|runtime)"
)
_SHARES_OF = regex(
    r"(?i)(?:percent(?:age)?|%|shares?|fractions?) of (?:the |its |their )?(?:\w+ )?(?:rate|peak|limit)\b[^.]*:(?: |$)"
)
APART = regex(
    r"(?i)\bcould|\bwould|theor|(?<!as )(?<! we )(?<! I )expect|claim|paper|(?<!\d )report(?:ed|s) |vendor|ideal|"
    r"\bspec(?!ial|ul)|earlier|previ|elsewhere|other|=0\b|disabled|turned off|goal|should(?! not)|\bmay\b|if we|"
    r"for example|e\.g\.|percentage point"
)
_WORD = regex(r"[a-z0-9](?:[a-z0-9.+_-]*[a-z0-9+])?")
_PARTIAL = regex(r"(?i)sav|differ|delta|reduc|overhead")
_UNITS = r"(?:\w+ )?(?:gpus?|nodes?|cards?|devices?|ranks?)\b"
_MANY_MORE = regex(rf"(?i)\b(\d+)(?: times|[x×]) (?:the|as many|more) (?:resources|hardware|{_UNITS})")
_SCALED = regex(rf"(?i)\b(\d+) (?:(?:to|→|->|vs\.?) |{_UNITS}[^.;]*?[ (])(\d+) {_UNITS}")
_COMPARED = (*TYPED, "params", "tokens", "items", "money", "energy", "power", "flop")
# What says that a ratio compares the figures before it.
_COMPARES = regex(
    rf"(?i){_GAINS}[^|]{{0,24}}\||\bby\W*\||of which [^.;|]*\||\|[^|]{{0,12}}{_GAINS}|\|,? from |"
    r"\| ?(?:(?:times )?as (?:many|much|large|high)|the (?:\w+ )?(?:throughput|speed|"
    r"rate|bandwidth|load|traffic|capacity|performance)\b)|"
    r"\| of (?:the|a|each|every|its|this|that|one) (?:\w+ )?(?:step|time|run|request|iteration|call|epoch)"
)
# "fell from 19 to 11 ms, and the time in all-to-all by 47 %"
_OF_NEXT = regex(r"\band \w+ [^%]*?\w+ \w+ (?:by )?$")
_OF_ANOTHER = regex(r"\b(?:and|while|whereas|but) (?:the|its|their|our|that)\b[^;%]*\bby $")
_FASTER = regex(r"(?i)\W*(?:(faster|quicker|speed-?up|cheaper)|slower|slow-?down)")
_NAMED = regex(r"(?i)\b(?!(?:are|was|makes?|takes|time|kernel|version|and|the|our|thus|while)\b)[a-z][\w.+-]{2,}")
_PLUS = regex(r"^[^,;]*(?:\bplus\b|\+)[^,;]*$")  # "64 MiB of values plus 8 MiB of indices"
_GOES_ON = regex(r"\W*(?:(That|This)|So|Thus|Hence)\b")
_BARE = regex(rf"(?<![\w.])({NUMBER}) (?:instead of|vs\.?|against|compared (?:to|with)) ({NUMBER})(?! ?[\w%]*/)")


def mid(q: Quantity) -> float:
    return q.value.mid


def _at_least(q: Quantity) -> Quantity:
    """ "More than 8x" is any ratio from 8 on."""
    if q.exact or q.kind != "ratio" or not re.search(r"(?i)(?:more than|at least|over|exceeding)\W*$", q.label):
        return q
    return replace(q, value=Interval(0.97 * q.value.lo, q.value.mid, math.inf), exact=True)


def words_of(text: str) -> list[str]:
    """ "Ours (FP8), v1.2" -> ["ours", "fp8", "v1.2"]."""
    return _WORD.findall(text.lower())


def words_near(row: Row, q: Quantity, before: int, behind: int) -> str:
    return row.text[max(0, q.start - before) : q.start] + "|" + row.text[q.end : q.end + behind]


def may_be(q: Quantity, x: Interval, change: str = "", slack: float = ODD) -> bool:
    """Whether `q` may be what is printed for the quotient `x` or its inverse."""
    return any(f.hi > 0 and q.value.meets(f, slack) for z in (x, exact(1.0) / x) for f in printed_as(q, z, change))


def _either(q: Quantity, a: Quantity, b: Quantity, change: str = "") -> bool:
    alike = re.sub(r"[\d., ]|[kKMGT](?=i?B)", "", a.text) == re.sub(r"[\d., ]|[kKMGT](?=i?B)", "", b.text)
    return may_be(q, a.plain / b.plain if alike else a.value / b.value, change)


def not_made(q: Quantity, pair: list[Quantity], sure: bool = True) -> Finding:
    b, a = sorted(pair, key=mid)
    message = wrong(f"{a.text} / {b.text}", mid(a) / mid(b), q) + ("" if sure else ": is it of these two?")
    return finding(INCONSISTENT if sure else QUESTION, "ratio", message, q, lines=(a.line, b.line))


def ratios(report: Report) -> Iterator[Finding]:
    """Figures of one kind and what the sentence or record makes of them: "from 12.4 ms to 3.1 ms, 4.0x faster"."""
    for whole in report.rows:
        said = [q for q in map(_at_least, whole.of("ratio", "percent")) if q.exact and mid(q)]
        said = [q for q in said if not _NO_RATIO.search(q.words) or re.search(r"(?i)\b(?:sav|cut)\w*\W*$", q.label)]
        said = [q for q in said if not re.search("points|pp$", q.text)]
        if whole.kind != "line":
            yield from _of_record(whole, said)
        elif whole.of("ratio", "percent") and not (said and _SHARES_OF.search(whole.lead[-120:])):
            parts = ((p, [q for q in said if any(q.start == x.start for x in p.quantities)]) for p in whole.parts())
            found = [f for part, some in parts for f in _in_sentence(part, some)]
            sure = [f for f in found if f.verdict == INCONSISTENT]
            yield from [*sure, *_scaling(whole)] or [*_in_sentence(whole, said)] or found


def _scaling(row: Row) -> Iterator[Finding]:
    """ "From 1 to 4 GPUs … 96 min to 27 min … an efficiency of 89 %"; of one GPU and the report's only other number."""
    m, near = _SCALED.search(row.text), row.report.lines_of_text
    near = [r for r in near if r.block == row.block and 0 <= row.line - r.line < 3]
    if any(re.search(r"(?i)\bweak", r.text) for r in near):
        return  # the work grows with the GPUs
    counts = {n for r in near for n in r.facts.of("gpus")}
    ends = sorted(map(float, m.groups()) if m else counts or row.report.everything.of("gpus"))
    ends = [1.0, *ends] if len(ends) == 1 else ends
    said = _MANY_MORE.search(row.text)
    times = float(said[1]) if said else ends[1] / ends[0] if len(ends) == 2 else 0.0
    shares = [q for q in row.of("percent") if "efficien" in q.words and q.exact]
    nodes = m and "node" in m[0]  # of a table's two rows
    rows = [r for g in row.report.grids for r in g.rows]
    scaled = [r for r in rows if (r.bare.get("nodes") if nodes else r.own.get("gpus")) in ends]
    scaling = any(re.search(r"(?i)scal|gpu|nodes?\b|ranks|devices|cards|parallel|workers", r.text) for r in near)
    for kind in ("ratio", *TYPED) if times and len(shares) == 1 and scaling else ():
        held = [q for r in (near if kind != "ratio" else [row]) for q in r.of(kind) if mid(q) and q.exact]
        held = [q for q in held if q in row.quantities] if len(held) > 2 else held
        held = [q for q in held if not (said and q.start == said.start(1))]
        held = held or [q for r in scaled for q in r.of(kind) if mid(q)]
        gain = mid(held[0]) if len(held) == 1 and kind == "ratio" else 0.0
        gain = max(map(mid, held)) / min(map(mid, held)) if len(held) == 2 else gain
        if gain and not shares[0].value.meets(gain / times, 0.03):
            message = f"{gain:.3g}x on {times:.3g} times as many is an efficiency of {100 * gain / times:.3g} %"
            verdict = INCONSISTENT if m and held[0] in row.quantities else QUESTION
            yield finding(verdict, "ratio", f"{message}, not {shares[0].text}", shares[0], *held)


def _of_record(row: Row, said: list[Quantity]) -> Iterator[Finding]:
    """The ratio that a record, or a row of a table, gives of its only two figures."""
    parts = [q for q in row.of(*TYPED) if not _PARTIAL.search(q.label) and q.exact and q.value.mid]
    pairs = [held for kind in TYPED if len(held := [q for q in parts if q.kind == kind]) == 2]
    # A ratio of memory is not of the times beside it, nor one of speed of the bytes.
    other, text = (_SPEED if pairs and pairs[0][0].kind == "bytes" else _SIZE), row.text * (row.kind == "table")
    said = [q for q in said if OUTCOME.search(q.label + text) and not other.search(q.words)]
    # Of two variants with several figures each, the speed-up is of one of these; two ratios in a line are of parts.
    whole = len(pairs) > 1 and all(re.fullmatch(r"(?i)\W*(?:\w+ )?speed-?\s?up\W*", q.label) for q in said)
    apart = re.compile(r"(?i)peak|theor|limit|max|\bmin\b|\bp\d\d|std|total|best|worst")
    if len(said) != 1 or not pairs or not (whole or len(parts) == 2) or any(apart.search(x.label) for x in pairs[0]):
        return
    others = [p for p in row.of("ratio", "percent") if p is not said[0]]
    alone = not any(p.line == said[0].line or any(_either(p, x, y) for x, y in pairs) for p in others)
    if alone and not _THAN.search(said[0].after) and not any(_either(said[0], x, y) for x, y in pairs):
        yield not_made(said[0], pairs[0])


def _compared(row: Row) -> list[Quantity]:
    """The figures of a sentence, and two numbers without a unit that it compares: "61 instead of 34 users"."""
    m, held = _BARE.search(row.text), [x for x in row.of(*_COMPARED) if not on_sheet(row, x)]
    # "8K" and "320K tokens" are contexts.
    speed = _SPEED.search(row.text)
    held = [x for x in held if not (x.kind == "params" and x.value.mid < 1e6) and not (speed and x.kind == "tokens")]
    if m and not any(q.start <= m.start(1) < q.end for q in row.quantities):
        pair = ((m[g], m.start(g), m.end(g)) for g in (1, 2))
        held += [Quantity("number", printed(text), text, "", row.line, start=a, end=b) for text, a, b in pair]
    return held


def change_of(row: Row, q: Quantity, sure: bool, last: int) -> str:
    """Which change a ratio or percentage says that it is; `last` characters before it are its own."""
    head, tail = row.text[: q.start], row.text[q.end :]
    if q.kind == "percent" and re.match(r"\W*(?:slower|longer|more|higher)\b", tail):
        return "gain"
    if q.kind == "percent" and (re.match(r"\W*(?:faster|quicker|speed-?\s?up)\b", tail) or _GAIN_OF.search(head)):
        return "change" if q.value.mid > 1 else ""  # of "310 % faster" it asks whether 3.1 times as fast is meant
    by, less = _BY.search(head) or _CHANGE.search(tail), _LESS.search(head[-last:] + tail[:12])
    close = not sure or _LESS.search(head[-16:] + tail[:12])
    # "dropped by 60 %" is a change; "to 60 % of it" is a share. Throughput that "rose by 33 %" did not fall by it.
    if _ROSE.search(head) and q.kind == "percent" and all(x.kind in RATES for x in row.of(*TYPED)):
        return "gain"
    return "loss" if less and (by or (q.kind == "percent" and close)) else "change" if by and sure else ""


def _in_sentence(row: Row, said: list[Quantity]) -> Iterator[Finding]:
    """A ratio that no two figures of its sentence, or of the one before, make."""
    parts = [x for x in row.of(*TYPED) if not on_sheet(row, x)]
    two = parts if len(parts) == 2 and parts[0].kind == parts[1].kind and len(said) < 3 else []
    for q in said:
        head, tail = row.text[: q.start], row.text[q.end :]
        own = [x for x in _compared(row) if x.end <= q.start]
        own = two if len(own) < 2 and len(row.quantities) == 3 else own  # "1.9x the throughput: 840 against 442"
        before = row.before if len(own) < 2 and len(said) < 3 else None
        if before and not before.of("ratio", "percent") and not (own and _PARTIAL.search(row.text)):
            lent = [x for x in _compared(before) if x.kind != "params" and (not own or x.kind == own[0].kind)]
            goes_on, kinds = _GOES_ON.match(row.text), [x.kind for x in lent]
            if not own and goes_on and goes_on[1]:  # of a prompt's tokens and two times the times
                lent = [x for x in lent if kinds.count(x.kind) > 1] or lent
            if not own and len(lent) == 1 and (first := before.before) and not first.of("ratio", "percent"):
                every = [x for r in (first, before) for x in r.of(lent[0].kind)]
                here = [x for r in row.report.lines_of_text if r.block == row.block for x in r.of(lent[0].kind)]
                lent = every if len(every) == len(here) == 2 else lent  # "Before: … After: …"
            more = not own and len(lent) == 4 and goes_on
            own += lent if len(lent) + len(own) == 2 or more else []
        sure = bool(two) and _only(row, q, two[0], two[1])
        own = [x for x in (two if sure else own) if x.exact and x.value.mid]
        several = [of for k in dict.fromkeys(x.kind for x in own) if 1 < len(of := [x for x in own if x.kind == k]) < 5]
        several = [of for of in several if any(not a.value.meets(of[0].value, 0.01) for a in of)]  # in two units
        several = [of for of in several if len(of) > 2 or not _PLUS.search(row.text[of[0].end : of[1].start])]  # a sum
        last = 24 if len(said) > 1 else 400
        change = change_of(row, q, sure, min(last, len(re.split(r"[%x] ?[a-z]*\)?[,;] ", head)[-1]) or 1))
        # "eager (48 ms), A 31 ms (1.55x) and B 25 ms (1.9x)"
        kinds = [x.kind for x in row.quantities]
        listed = len({kinds[0], *kinds[1::2]}) == 1 and not {*kinds[2::2]} - {"ratio", "percent"}
        beside = len(kinds) == 2 if before else len(kinds) % 2 and listed and q is not row.quantities[0]
        bracket = re.search(r"\([^()]*$", head[-48:]) and beside and (q.kind == "ratio" or q.text[0] in "+-−")
        if several and re.search(r"\b(?:while|whereas|but)\b", row.text[q.end : several[-1][-2].start]):
            continue  # "grows by a factor of 74 while the other falls from … to …"
        if not sure and all(of[0].kind == "power" for of in several):
            continue  # caps, of which something else follows
        if not several or not (sure or bracket or _COMPARES.search(words_near(row, q, 32, 40))):
            continue
        if any(_either(q, a, b, change) for of in several for a, b in itertools.combinations(of, 2)):
            continue
        threes = (x for of in several for x in itertools.permutations(of, 3))
        threes = (x for x in threes if _PLUS.search(head[x[0].end : x[1].start]))
        if any(may_be(q, (a.value + b.value) / c.value, change) for a, b, c in threes):
            continue
        m = re.search(r"than (?:the |an? )?([\w-]+)", tail[:40])
        known = m and any(m[1].lower() in f"{head} {x.label}".lower() for x in own)  # else it is another one
        size = (_SPEED if all(of[0].kind == "bytes" for of in several) else _SIZE).search(q.after[:24])
        if not size and (sure or known or not _THAN.search(q.after[:24])):
            # Where the sentence has two ratios, the other must follow.
            follow = [o for o in said if o is not q and two and _either(o, two[0], two[1])]
            if (_OF_NEXT if follow else _OF_ANOTHER).search(head[several[-1][-1].end :]):
                continue  # "by 96 %, from 870 to 34 us, and improved the latency by 6 %"
            if any(q.end < o.start < several[-1][-2].start for o in follow):
                continue  # "20 % smaller and takes 89x as long (55 s and 0.62 s)"
            ahead = several[-1][-2].start - q.end  # of these two only by its place
            far = ahead > 48 or (ahead > 0 and q.text[0] in "+-−")
            x, y = several[-1][-2:]
            gain, made = max(mid(q), 1 / mid(q)), max(mid(x) / mid(y), mid(y) / mid(x))
            certain = sure and not far and len(follow) == len(said) - 1
            # The two of another paragraph may be meant: "the new one takes a quarter less, and both went from … to …".
            near = (r for r in row.report.lines_of_text if 0 < row.line - r.line < 30)
            blocks = itertools.groupby(near, lambda r: r.block)
            pairs = ([v for r in rows for v in r.of(x.kind) if mid(v)] for _, rows in blocks)
            other = not certain and any(len(pair) == 2 and _either(q, pair[0], pair[1], change) for pair in pairs)
            if exact(gain).meets(made, 30.0) and not other:
                yield not_made(q, [x, y], certain and not (q.kind == "percent" and q.value.meets(made, ODD)))


def _only(row: Row, q: Quantity, a: Quantity, b: Quantity) -> bool:
    """Whether a sentence's two figures can only be what its ratio compares."""
    before, between, behind = row.text[: a.start], row.text[a.end : b.start], row.text[b.end : q.start]
    ahead = row.text[q.end : a.start]
    if q.end <= a.start and (")" in ahead or len(ahead) > (90 if ":" in ahead else 48)):
        return False  # it has figures of its own
    close = re.fullmatch(r"\W{1,3}", behind) and OUTCOME.search(q.after) and not _THAN.search(q.after)
    # "1.9 ms, the unfused one 5.1 ms, which makes it 3.7x faster"
    last = q is row.quantities[-1] and len(row.quantities) == 3 and re.match(r"\W*(?:faster|slower|speed)", q.after)
    # "as the length grew 4x" is not of the times: a word of gain stands beside the ratio, or the times do.
    told: object = (
        (q.end <= a.start and q.text[0] in "+-−")
        or OUTCOME.search(words_near(row, q, 24, 16))
        or _BY.search(row.text[: q.start])
    )
    told = told or re.fullmatch(r"\W+", behind) or "→" in between or re.search("(?<!-)->", between)
    # "42.8 -> 40.2 s, a 2.6 s reduction (-6 %)"
    other = re.search(r"\d", between) or re.search(r"\d ?(?:→|->) ?$", before)
    return bool(told and not other and (_FROM.search(f"{before[-8:]} {between}") or close or last))


def direction(row: Row) -> Iterator[Finding]:
    """ "CUDA 3.21 ms, Triton 4.21 ms: Triton is 1.31x faster": the name before the ratio stands at one figure alone."""
    for q, m in ((q, m) for q in row.of("ratio") if q.exact and (m := _FASTER.match(row.text, q.end))):
        pair = next((held for r in (row, row.before) if r for k in TIMES if len(held := r.of(k)) == 2), None)
        names = {n.lower() for n in _NAMED.findall(re.split(r"[,;:.] ", row.text[: q.start])[-1])}
        of = [{n for n in names if n in x.label[-24:].lower()} for x in pair or ()]
        if pair and all(x.exact and x.value.mid for x in pair) and bool(of[0]) != bool(of[1]):
            own, other = pair if of[0] else pair[::-1]
            gain = other.value.mid / own.value.mid
            if (gain > 1) != bool(m[1]) and 0.9 < max(gain, 1 / gain) / q.value.mid < 1.1:
                name = min(of[0] or of[1])
                message = f"{name} has {own.text}, the other {other.text}: is it {q.text} {m[0].strip()}?"
                yield finding(QUESTION, "ratio", message, q, own, other)
