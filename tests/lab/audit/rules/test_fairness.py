"""Report 000's unequal diagnostic and 004's failed check, in other words."""

import pytest

from expertile.lab.audit import INCONSISTENT, POSSIBLE
from tests.lab.audit.helpers import against, the

TEXT = (
    "## Diagnosis\n\nWe compare {} in two forms.\n\n```\nOne GEMM ({}):  0.68 ms\n8 GEMMs (1024×1024):   0.32 "
    "ms\nRatio: 0.48x\n```\n"
)


def test_unequal_work_called_equal():
    finding = the(TEXT.format("equivalent total work", "2896×2896"), "equal_work")
    assert finding.verdict == INCONSISTENT
    assert finding.value == pytest.approx(2896**3 / (8 * 1024**3))
    assert "so the slower-looking one is the faster" in finding.explanation


def test_equal_work_called_equal():
    assert the(TEXT.format("the same work", "2048×2048"), "equal_work").verdict == POSSIBLE


def test_unequal_work_that_nobody_calls_equal():
    assert against(TEXT.format("several cases", "2896×2896")) == []


@pytest.mark.parametrize(
    "line",
    ["**Correctness:** ✗ FAIL (Max difference: 1.52e-02)", "- Numerical check: FAILED", "- allclose: False"],
)
def test_failed_checks(line):
    text = f"# Layer norm, FP32\n\n| n | ours (ms) |\n|-|-|\n| 1 | 2.0 |\n\n{line}\n"
    finding = the(text, "failed_check")
    assert (finding.line, finding.verdict) == (7, INCONSISTENT)
    assert "the table of lines 5–5" in finding.explanation


def test_a_difference_that_rounding_does_not_explain_is_measured():
    text = "# Layer norm, FP32: 1 ms\n\n**Correctness:** ✗ FAIL (Max difference: 1.52e-02)\n"
    assert "rounding unit of fp32" in the(text, "failed_check").explanation


@pytest.mark.parametrize(
    "line", ["Correctness: ✓ PASS", "Tests: 0 failed", "Correctness: no mismatch", "It failed to compile"]
)
def test_passed_checks(line):
    assert against(f"- {line}, 1 ms\n") == []


def test_a_column_of_checks():
    text = "| n | ms | Correct |\n|-|-|-|\n| 1 | 2 ms | ✓ |\n| 2 | 3 ms | ❌ |\n"
    assert against(text) == [(4, INCONSISTENT, "failed_check")]
