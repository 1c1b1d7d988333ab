import pytest

from expertile.lab.audit import IMPOSSIBLE, POSSIBLE, AuditResult, Finding


def test_verdicts_are_one_of_four():
    with pytest.raises(ValueError, match="verdict: expected one of"):
        Finding(1, "3 ms", "wrong", "rule", "because")


def test_findings_by_verdict():
    good, bad = Finding(1, "a", POSSIBLE, "r", "x"), Finding(2, "b", IMPOSSIBLE, "r", "y")
    result = AuditResult((good, bad), None)
    assert result.of(IMPOSSIBLE) == (bad,)
    assert result.of(POSSIBLE) == (good,)
