"""Checks somebody's benchmark report against arithmetic and hardware limits, from its text alone.

Needs markdown-it-py and nothing else: no torch, no Triton.
"""

from expertile.audit.engine import Audit, audit_text
from expertile.audit.finding import ACCUSATIONS, VERDICTS, Finding

__all__ = ["ACCUSATIONS", "VERDICTS", "Audit", "Finding", "audit_text"]
