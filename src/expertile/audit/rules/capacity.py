"""What a named part holds and gains: memory above its capacity, Amdahl's bound, scores that are no whole number."""

import re
from collections.abc import Iterator
from dataclasses import replace

from expertile.audit.facts import facts
from expertile.audit.finding import IMPOSSIBLE, INCONSISTENT, QUESTION, Finding, finding, si
from expertile.audit.interval import Interval
from expertile.audit.pattern import regex, says
from expertile.audit.quantity import Quantity
from expertile.audit.report import Report
from expertile.audit.rules.hardware import gpu_counts, own_words
from expertile.audit.rules.terms import parameters

_HELD = regex(
    r"(?i)(?<![a-z])(?:max_?(?:memory_?)?)?(?:alloc(?:ated)?|reserved|vram|max[ _]mem\w*)(?![a-z])|"
    r"peak[ _](?:\w+ )?mem|mem\w*[ _.](?:used|peak|in use)|peak[ _(]+(?:gi?b|mi?b)\b"
)
_RANKED = regex(r"(?i)\b(?:itl|tpot|p\d\d)\b")  # which are no parts
_NOT_HELD = regex(
    r"(?i)offload|\bcpu\b|\bhost\b|\bram\b|managed|unified|\buvm\b|would|need|estimat|requir|predict|tried|out of|oom|"
    r"total|all gpus|\bsum\b|aggregate|theor|project|without|traffic|moved|per second|written|read\b|swap|"
    r"modded|disk|nvme"
)
_ELSEWHERE = regex(r"offload|streamed|managed|unified|\buvm\b|modded|windows|zero-infinity")
_EACH = regex(
    r"(?:each|per gpu|per card|per device)[ ,]+(?:unless|everywhere|throughout)|"
    r"(?:figures|numbers|gb) (?:are )?per gpu\b"
)
_FEWER = regex(r"lora|frozen|adapter|shard|zero|fsdp|galore|adafactor|tensor.parallel|pipeline|peft")
_PART = regex(
    r"(?i)(?:takes?|is|are|spends?|accounts? for)[^.;%]{0,24}% of (?:the |an? )?(?:\w+ ){0,2}(?:step|time|runtime|run)"
    r"|% of (?:the |an? |all )?(?:\w+ ){0,3}(?:step|time|runtime)\b"
)
_WHOLE = regex(
    r"(?i)end[- ]to[- ]end|\be2e\b|(?:whole|entire|full|training|inference) (?:step|run|model)|overall|step becomes"
)
_KERNEL = regex(r"(?i)in isolation|micro-?benchmark|kernel (?:itself )?(?:is|gets|runs)|the (?:new )?kernel")
_ALONE = regex(r"(?i)\b(?:on its own|by itself|alone)\b")
_PER_STEP = regex(r"(?i)\b(?:per|each|every|of the|in the) (?:step|iteration|pass|request)\b")
_ONLY = regex(r"nothing else|not touch|untouched|only change|only the \w+ (?:is |was )?(?:swapped|replaced|changed)")
_ONCE = regex(r"single run|greedy")
_OFTEN = regex(r"\b(?:\d+|several|multiple|many) (?:samples|runs|seeds|trials)\b|avg@|averaged|mean of")
_SIZES = {"humaneval": 164.0, "humaneval+": 164.0, "mbpp": 500.0, "mbpp+": 378.0, "math-500": 500.0}
_SIZES |= {"gpqadiamond": 198.0}
_PROBLEMS = regex(r"(?i)\b\d+ (?:problems|questions|tasks|items)\b")


def held(report: Report) -> Iterator[Finding]:
    """Memory in use above what the GPUs have."""
    if says(_ELSEWHERE, report.text):
        return
    for row in report.all_rows:
        for q in (q for q in row.of("bytes") if row.devices):
            heads = " ".join(report.blocks[b].text for b in report.sections[row.block])
            own = f"{q.label} {heads}" if row.kind == "table" else own_words(row, q)
            own = own.replace("_", " ")
            if row.kind == "table" and _NOT_HELD.search(q.label.replace("_", " ")):
                continue
            if not q.exact or not _HELD.search(own) or (row.kind != "table" and _NOT_HELD.search(own)):
                continue
            each = q.per_device or _EACH.search(report.text)
            count = 1.0 if each else max(gpu_counts(row))
            most = count * max(d.memory_bytes for d in row.devices) * 2**30 / 1e9
            if 1.03 * most < q.value.lo < 40 * most:
                whose = f"{f'{count:.0f} × ' * (count > 1)}{row.devices[0].name}"
                # Of a part that is sold with more memory the report names which.
                told = re.search(rf"(?<!\d){row.devices[0].memory_bytes / 1e9:.0f} ?g", report.text)
                one = len(report.everything.of("devices")) == 1 and not report.everything.foreign
                several = not each and (
                    count > 1 or re.search(r"multi(?!pl)|dual|nodes?\b|cluster|parallel|fsdp|zero", report.text)
                )
                sure = one and not several and (told or q.value.lo > 1.25 * most)
                message = f"{q.text} is more than {whose} has, {si(most / 1.073741824, 'B')}"
                if sure:
                    yield finding(IMPOSSIBLE, "memory", message, q)
                elif one and not several:
                    yield finding(QUESTION, "memory", f"{message}: was it one GPU, as it is sold?", q)


def trained(report: Report) -> Iterator[Finding]:
    """Rows that train every parameter with Adam in less memory than the weights and its two moments take."""
    if not re.search("adam", report.text) or says(_ELSEWHERE, report.text) or says(_FEWER, report.text):
        return
    for row in (r for g in report.grids for r in g.rows):
        n, held = parameters(row), [q for q in row.of("bytes") if re.search(r"(?i)peak|mem|vram|alloc", q.label)]
        moments = 2 if re.search(r"(?i)\b8[- ]?bit|int8", row.text) else 8 if "fp32" in row.facts.of("formats") else 4
        for q in held if len(held) == 1 and held[0].exact else ():
            if n and q.value.hi < 0.95 * (2 + moments) * n:
                made = f"{n / 1e9:.3g} B weights in 2 bytes and Adam's moments in {moments} are"
                message = f"{made} {si((2 + moments) * n, 'B')}, more than {q.text}: are all of them there?"
                yield finding(QUESTION, "memory", message, q)


def weights(report: Report) -> Iterator[Finding]:
    """Rows of GPUs and a format whose weights, as another table has them, they cannot hold."""
    if says(_ELSEWHERE, report.text):
        return
    sizes: dict[str, set[Quantity]] = {}
    for grid in report.grids:
        for row, q in ((row, q) for c in grid.columns("bytes") for row in grid.body if (q := row.figure(c))):
            if (
                re.search(r"(?i)weight|checkpoint|model size", q.label)
                and len(f := facts(row.label).of("formats")) == 1
            ):
                sizes.setdefault(f[0], set()).add(q)
    for row in report.lines_of_text:  # "weights take 68.8 GB in bf16, 34.4 GB in fp8"
        said = [(q, re.match(r" in (\w+)", row.text[q.end :])) for q in row.of("bytes")]
        for q, m in said if re.search(r"(?i)\bweights\b", row.text) else ():
            if m and len(f := facts(m[1]).of("formats")) == 1:
                sizes.setdefault(f[0], set()).add(q)
    for row in (r for g in report.grids for r in g.body if sizes and len(r.devices) == 1):
        m, formats = re.search(r"(?:^| )(\d{1,3}) ?[x×] ", row.label), facts(row.label).of("formats")
        held = sizes.get(formats[0], set()) if len(formats) == 1 else set()
        if m and len(held) == 1 and re.search(r"(?i)tok|ms|req|/s|mem", " ".join(q.label for q in row.quantities)):
            (q,), most = held, int(m[1]) * row.devices[0].memory_bytes
            if q.value.lo > 1.04 * most:
                message = f"{q.text} of {formats[0]} weights are more than {m[1]} × {row.devices[0].name} have"
                message += f", {si(most, 'B')}"
                yield Finding(QUESTION, "memory", row.line, m[0].strip(), f"{message}: are all held there?", (q.line,))


def sped_up(report: Report) -> Iterator[Finding]:
    """A whole that gains more than the part made faster allows (Amdahl 1967)."""
    rows = report.lines_of_text
    yield from _shortened(report)
    shares = [(r, p) for r in rows for p in r.of("percent") if p.exact and 0.02 < p.value.mid < 0.95]
    gains = [(r, q) for r in rows for q in r.of("ratio") if q.exact and q.value.lo > 1]
    parts = [(r, p) for r, p in shares if _PART.search(r.text)]
    wholes = [(r, q) for r, q in gains if _WHOLE.search(own_words(r, q))]
    kernels = [(r, q) for r, q in gains if _KERNEL.search(r.text)]
    kernels = [(r, q) for r, q in kernels if all(q is not w for _, w in wholes)]
    if len(wholes) != 1 or not parts or len(kernels) > 1:
        return
    headings = [r.text for r in rows[:3] if report.blocks[r.block].kind == "heading"]
    subject = " ".join([*headings, *(r.text for r, _ in kernels)])
    named = set(re.findall(r"[a-z]{5,}", subject.lower())) - {"kernel", "kernels", "faster", "whole", "isolation"}
    of = [(r, p) for r, p in parts if named & {*re.findall(r"[a-z]{5,}", f"{p.label} {r.text[: p.start]}".lower())}]
    of = [x for x in of if x[1] is x[0].of("percent")[0]]
    if len(of) != 1:
        return
    (_, share), (_, whole) = of[0], wholes[0]
    rest = Interval(1 - share.value.hi, 1 - share.value.mid, 1 - share.value.lo)
    part = (share.value / kernels[0][1].value) if kernels else Interval(0.0, 0.0, 0.0)
    least = rest + part
    if whole.value.lo * least.lo > 1.05:
        how = f"made {kernels[0][1].text} as fast " if kernels else ""
        message = f"a share of {share.text} {how}makes the whole at most {1 / least.mid:.3g}x as fast, not {whole.text}"
        sure = whole.value.lo * rest.lo > 1.05 and _ONLY.search(report.text)
        message += "" if sure else ": is something else faster?"
        yield finding(INCONSISTENT if sure else QUESTION, "Amdahl", message, whole, share, *(q for _, q in kernels))


def _shortened(report: Report) -> Iterator[Finding]:
    """ "The kernel goes from 74 ms to 35 ms per step, the step from 412 ms to 332 ms": more than the part took; also
    of two columns where nothing but the parts named has changed."""
    lines = [(r.text, ts) for r in report.lines_of_text if "from " in r.text and (ts := r.of("time", "s_per_item"))]
    parts = [ts for text, ts in lines if (_KERNEL.search(text) or _ALONE.search(text)) and _PER_STEP.search(text)]
    held = [([ts for text, ts in lines if _WHOLE.search(text) and ts not in parts], parts)] if len(parts) == 1 else []
    only = _ONLY.search(report.text)
    whole = [ts for text, ts in lines if _WHOLE.search(text) and len(ts) == 2] if not held else []
    title = {*re.findall(r"[a-z]{5,}", next((b.text for b in report.blocks if b.kind == "heading"), "").lower())}
    for g in report.grids if len(whole) == 1 else ():  # a profile of the whole, and the part that the title names
        times = [(r, t) for r in g.rows if (t := r.only("time"))]
        total = any(r.summary and t.value.meets(whole[0][0].value) for r, t in times)
        named = [t for r, t in times if not r.summary and title & {*re.findall(r"[a-z]{5,}", r.label.lower())}]
        gains = [x for r in report.lines_of_text for x in r.of("ratio") if x.line < whole[0][0].line and x.exact]
        for t in named if total and gains and len(named) == 1 else ():
            most = max(gains, key=lambda x: x.value.mid)
            held.append((whole, [[t, replace(t, value=t.value / most.value, text=f"{t.text} ÷ {most.text}")]]))
    for g in report.grids if only else ():
        columns = g.columns("time")
        rows = [(r.label, [q for c in columns if (q := r.figure(c, "time"))]) for r in g.rows]
        rows = [(label, ts) for label, ts in rows if not _RANKED.search(label)]
        wholes = [ts for label, ts in rows if _WHOLE.search(label)]
        held.append((wholes, [ts for _, ts in rows if ts not in wholes and len(ts) == 2]))
    for wholes, some in held:
        if len(wholes) != 1 or not some or any(len(ts) != 2 or not all(t.exact for t in ts) for ts in (*wholes, *some)):
            continue
        (a, b), all_of = wholes[0], sum(x.value.hi for x, _ in some)
        saved, least = a.value.lo - b.value.hi, sum(x.value.hi - y.value.lo for x, y in some)
        if all_of < a.value.lo and saved > 1.05 * least > 0:
            sure = saved > 1.02 * all_of and only
            message = f"from {a.text} to {b.text} is {si(a.value.mid - b.value.mid, 's')} less, "
            message += f"{' and '.join(f'{x.text} to {y.text}' for x, y in some)} {si(least, 's')} at most"
            message += "" if sure else ": is something else faster?"
            yield finding(INCONSISTENT if sure else QUESTION, "Amdahl", message, b, a, *(q for ts in some for q in ts))


def counted(report: Report) -> Iterator[Finding]:
    """Scores that are no whole number of problems solved: 55.0 % of 30."""
    text = " ".join(r.text for r in report.lines_of_text)
    single = re.search("(?:one|single) sample", report.text)
    once = single or (_ONCE.search(report.text) and not _OFTEN.search(report.text))
    if not once or not _PROBLEMS.search(text):
        return
    for grid in report.grids:
        for column, name in enumerate(grid.header):
            name = re.sub(r"\s*\(.*", "", name)
            count = rf"{re.escape(name)}(?: [A-Za-z]+)?(?: (?:has|of|with|of course)| ?[:(=])* ?(\d{{2,3}})\b(?!\.\d|%)"
            of = re.search(count, text) if len(name) > 2 else None
            n = float(of[1]) if of else _SIZES.get(name.lower().replace(" ", ""), 0.0)
            cells = [q for r in grid.body if (q := r.figure(column)) and q.kind in ("number", "percent")]
            if not n or len(cells) < 3:
                continue
            odd = [q for q in cells if not _whole(q, n)]
            if len(odd) == 1:
                q = odd[0]
                solved = (100 if q.kind == "percent" else 1) * q.value.mid * n / 100
                message = f"{q.text} of {n:.0f} is {solved:.4g} solved, the others are whole numbers"
                yield finding(QUESTION, "count", f"{message}: of how many is it?", q)


def _whole(q: Quantity, n: float) -> bool:
    """Whether a percentage is that of a whole number of n, as it is printed."""
    said = q.value.mid * (100 if q.kind == "percent" else 1)
    digits = re.search(r"\.(\d+)", q.text)
    return not digits or abs(100 * round(said * n / 100) / n - said) <= 1.01 * 10.0 ** -len(digits[1])
