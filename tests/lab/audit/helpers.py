"""Shorthands for tests of the audit."""

from expertile.lab.audit import IMPOSSIBLE, INCONSISTENT, AuditResult, Finding, audit


def against(text: str, **options: object) -> list[tuple[int, str, str]]:
    """(line, verdict, rule) of everything found against the report."""
    return [(f.line, f.verdict, f.rule) for f in accusations(audit(text, **options))]  # type: ignore[arg-type]


def accusations(result: AuditResult) -> list[Finding]:
    """The impossible and inconsistent findings, by line."""
    return [f for f in result.findings if f.verdict in (IMPOSSIBLE, INCONSISTENT)]


def the(text: str, rule: str, **options: object) -> Finding:
    """The one finding of `rule`; fails if there are none or several."""
    found = [f for f in audit(text, **options).findings if rule in f.rule.split(", ")]  # type: ignore[arg-type]
    assert len(found) == 1, [(f.line, f.rule, f.explanation) for f in found]
    return found[0]
