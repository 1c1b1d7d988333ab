import pytest

from expertile.lab.audit import INCONSISTENT, NOT_CHECKABLE, POSSIBLE
from tests.lab.audit.helpers import against, the


@pytest.mark.parametrize(
    "line",
    [
        "Memory traffic reduced by 33% (201.3 MB → 134.2 MB)",
        "from 2.84 ms to 0.21 ms, 13.5x faster",
        "0.3103 ms Triton vs 1.831 ms PyTorch: 5.901x speedup",
        "Kernel launches reduced: 75% (4 → 1)",
        "120→866 tokens/sec (7.23x)",
        "about 40% less memory (251.7 MB → 151.0 MB)",
    ],
)
def test_changes_that_follow(line):
    assert the(f"- {line}\n", "change_in_line").verdict == POSSIBLE


@pytest.mark.parametrize(
    "line",
    [
        "Memory traffic reduced by 50% (201.3 MB → 134.2 MB)",
        "from 2.84 ms to 0.21 ms, 20x faster",
        "Kernel launches reduced: 50% (4 → 1)",
    ],
)
def test_changes_that_do_not(line):
    assert the(f"- {line}\n", "change_in_line").verdict == INCONSISTENT


def test_the_nearest_reading_is_shown():
    finding = the("- Reduced from 4.2 GB to 1.4 GB (a 75% reduction)\n", "change_in_line")
    assert "1 − 1.4 GB / 4.2 GB" in finding.explanation


def test_figures_of_different_sentences_are_not_compared():
    assert against("It went from 5 ms to 3 ms. Elsewhere we saw a 9x speedup.\n") == []


@pytest.mark.parametrize(("figure", "verdict"), [("6.3x", POSSIBLE), ("2.0x", INCONSISTENT)])
def test_one_over_the_ratio(figure, verdict):
    assert the(f"- ours: 0.16x of torch ({figure} slower)\n", "reciprocal").verdict == verdict


def test_slower_by_less_than_one():
    summary = (
        "| op | result |\n|-|-|\n| copy | Triton 2x slower |\n\n| op | Triton/Baseline |\n|-|-|\n| copy | 0.5x "
        "slower |\n| scan | 0.6x slower |\n"
    )
    assert against(summary) == [(7, INCONSISTENT, "slower_below_one")]
    alone = the("| op | Triton/Baseline |\n|-|-|\n| scan | 0.6x slower |\n", "slower_below_one")
    assert alone.verdict == NOT_CHECKABLE


@pytest.mark.parametrize(("figure", "verdict"), [("1.75x", POSSIBLE), ("1.20x", INCONSISTENT)])
def test_a_line_of_keys_and_figures(figure, verdict):
    line = f"M=1024 N=64 K=64 | cublas: 0.35 ms | ours: 0.20 ms | speedup: {figure}\n"
    assert the(line, "change_in_line").verdict == verdict
