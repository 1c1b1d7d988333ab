"""Check a benchmark report against arithmetic and the limits of the hardware it names."""

from expertile.lab.audit.engine import audit, audit_file
from expertile.lab.audit.finding import IMPOSSIBLE, INCONSISTENT, NOT_CHECKABLE, POSSIBLE, AuditResult, Finding
from expertile.lab.audit.render import render, summary, to_json

__all__ = [
    "IMPOSSIBLE",
    "INCONSISTENT",
    "NOT_CHECKABLE",
    "POSSIBLE",
    "AuditResult",
    "Finding",
    "audit",
    "audit_file",
    "render",
    "summary",
    "to_json",
]
