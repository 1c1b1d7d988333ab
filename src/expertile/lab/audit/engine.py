"""The audit itself: parse, apply every rule, order the findings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from expertile.device import Device
from expertile.lab.audit import vocabulary
from expertile.lab.audit.context import Context
from expertile.lab.audit.dims import dims_in, shapes_in
from expertile.lab.audit.document import parse
from expertile.lab.audit.finding import IMPOSSIBLE, INCONSISTENT, NOT_CHECKABLE, POSSIBLE, AuditResult, Finding
from expertile.lab.audit.report import Options, Report
from expertile.lab.audit.rules.catalogue import RULES, remaining

_LARGEST = 20 * 2**20


def audit(
    text: str, *, shapes: tuple[str, ...] | list[str] = (), dtype: str | None = None, gpu: str | None = None
) -> AuditResult:
    """Judge every figure of the report `text`.

    `shapes` ("4096x4096x4096", "B=4 H=8 S=1024 D=64"), `dtype` ("bf16") and `gpu` ("H100") say what the text leaves
    out. ValueError if one of them cannot be read, or if the text holds no figure to judge.
    """
    options = Options(tuple(_shape(s) for s in shapes), _dtype(dtype), _gpu(gpu))
    report = Report(parse(text), options)
    context = Context(report)
    if not context.claims:
        raise ValueError(
            "report: expected at least one figure with a unit (ms, TFLOP/s, GB/s, MB, x, %) in a table, a result block "
            f"or a line; found none in {len(report.doc.raw)} lines"
        )
    findings: list[Finding] = []
    for rule in RULES:
        findings += rule(context)
    findings += remaining(context, findings)
    known, why = report.devices(None)
    notes = () if known else (why,)
    return AuditResult(tuple(_settled(findings)), known[0] if known else None, notes)


def audit_file(
    path: str | Path, shapes: tuple[str, ...] | list[str] = (), dtype: str | None = None, gpu: str | None = None
) -> AuditResult:
    """`audit` of a file. ValueError if it is missing, no regular file, too large, empty or not text."""
    source = Path(path)
    if not source.exists():
        raise ValueError(f"file: expected a Markdown or text report, but {source} does not exist")
    if not source.is_file():
        raise ValueError(f"file: expected a Markdown or text report, but {source} is not a file")
    if source.stat().st_size > _LARGEST:
        raise ValueError(
            f"file: expected a report of at most 20 MiB, got {source.stat().st_size / 2**20:.0f} MiB in {source}"
        )
    data = source.read_bytes()
    if not data.strip():
        raise ValueError(f"file: expected a Markdown or text report, but {source} is empty")
    return audit(_decoded(data, source), shapes=shapes, dtype=dtype, gpu=gpu)


def _decoded(data: bytes, source: Path) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16")
    if b"\x00" in data:
        raise ValueError(f"file: expected a Markdown or text report, but {source} is binary (it holds zero bytes)")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", errors="replace")
    controls = sum(c < " " and c not in "\t\n\r\f\x1b" for c in text)
    if controls > len(text) / 100:
        raise ValueError(f"file: expected a Markdown or text report, but {source} is binary")
    return text


def _shape(text: str) -> str:
    if not dims_in(text) and not shapes_in(text):
        raise ValueError(
            f"shape: expected sizes such as 4096x4096x14336, M=4096,N=4096,K=14336 or B=4,H=8,S=1024,D=64, got {text!r}"
        )
    return text


def _dtype(name: str | None) -> str | None:
    return None if name is None else vocabulary.device_key(name)


def _gpu(name: str | None) -> Device | None:
    return None if name is None else Device.by_name(name)


def _settled(findings: list[Finding]) -> list[Finding]:
    """One verdict for each claim: what speaks against it, else why it is possible, else why it is not checkable."""
    by_claim: dict[tuple[int, tuple[int, int]], list[Finding]] = {}
    for f in findings:
        here = by_claim.setdefault((f.line, f.anchor), [])
        if f not in here:
            here.append(f)
    settled: list[Finding] = []
    for here in by_claim.values():
        against = [f for f in here if f.verdict in (IMPOSSIBLE, INCONSISTENT)]
        for verdict in (POSSIBLE, NOT_CHECKABLE):
            same = [f for f in here if f.verdict == verdict]
            if same and not against:
                rules = ", ".join(dict.fromkeys(f.rule for f in same))
                text = "; ".join(dict.fromkeys(f.explanation for f in same))
                against = [replace(same[0], rule=rules, explanation=text)]
        settled += against
    return sorted(settled, key=lambda f: (f.line, f.anchor, f.rule))
