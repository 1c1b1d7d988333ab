"""What a named part holds and gains: memory above its capacity, Amdahl's bound, scores that are no whole number."""

import re
from collections.abc import Iterator

from expertile.audit.finding import IMPOSSIBLE, QUESTION, Finding, finding, si
from expertile.audit.pattern import regex, says
from expertile.audit.report import Report
from expertile.audit.rules.hardware import gpu_counts, own_words

_HELD = regex(
    r"(?i)(?<![a-z])(?:max_?(?:memory_?)?)?(?:alloc(?:ated)?|reserved|vram|max[ _]mem\w*)(?![a-z])|"
    r"peak[ _](?:\w+ )?mem|mem\w*[ _.](?:used|peak|in use)|peak[ _(]+(?:gi?b|mi?b)\b"
)
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
_SIZES = {"humaneval": 164.0, "humaneval+": 164.0, "mbpp": 500.0, "mbpp+": 378.0, "math-500": 500.0}
_SIZES |= {"gpqadiamond": 198.0}


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
