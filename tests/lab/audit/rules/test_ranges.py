"""Headlines over columns as in shared reports 002, 003 and 004, in other words."""

from expertile.lab.audit import INCONSISTENT, NOT_CHECKABLE, POSSIBLE, audit
from tests.lab.audit.helpers import against, the

TABLE = (
    "| m | ours | cubin | ratio |\n|-|-|-|-|\n| 64 | 27.4 | 337.7 | 0.08x |\n| 128 | 320.9 | 675.2 | 0.48x |\n| 512 "
    "| 614.9 | 1753.3 | 0.35x |\n| 1024 | 14.1 | 287.5 | 0.05x |\n"
)


def test_a_headline_that_understates_its_column():
    finding = the(f"# Results\n\n{TABLE}\n# Why 2-5x slower\n", "range_of_column")
    assert finding.verdict == INCONSISTENT
    assert "0.05x = 20.2x slower on line 8" in finding.explanation


def test_a_headline_that_covers_it():
    assert the(f"# Results\n\n{TABLE}\n# Why 2-20x slower\n", "range_of_column").verdict == POSSIBLE


def test_a_headline_about_something_else():
    assert against(f"# Results\n\n{TABLE}\nOther kernels are 50-90x slower.\n") == []


def test_ranges_of_some_rows():
    text = f"# Results\n\n{TABLE}\n- m=128: ratio 0.40x-0.50x\n- m=64: ratio {{}}\n"
    assert against(text.format("0.05x-0.10x")) == []
    assert against(text.format("0.20x-0.30x")) == [(11, INCONSISTENT, "range_of_rows")]


SPEEDUPS = (
    "| n | torch (ms) | ours (ms) | speedup |\n|-|-|-|-|\n| 256 | 1.36 | 1.0 | 1.36x |\n| 512 | 1.16 | 1.0 | {} |\n| "
    "1024 | 1.50 | 1.0 | 1.50x |\n"
)


def test_consistent_means_every_row():
    text = f"# X\n\n{SPEEDUPS.format('1.16x')}\n- {{}} 1.36-1.50x speedup\n"
    assert against(text.format("Consistent")) == [(9, INCONSISTENT, "range_of_column")]
    assert the(text.format("Typically"), "range_of_column").verdict == POSSIBLE


def test_the_row_that_a_sentence_names():
    text = (
        "# MoE\n\n1. **Fused kernel** is fast (2-3x speedup)\n\n| impl | ms | speedup |\n|-|-|-|\n| loop | 12 ms | "
        "1.0x |\n| Fused kernel | 4.6 ms | 2.6x |\n| other | 3 ms | 4.0x |\n"
    )
    assert against(text) == []


def test_extremes():
    text = f"# Results\n\nratio: min={{}}  max={{}}\n\n{TABLE}"
    assert against(text.format("0.03x", "0.48x")) == []
    assert against(text.format("0.10x", "0.48x")) == [(3, INCONSISTENT, "extreme")]
    assert against(text.format("0.03x", "0.40x")) == [(3, INCONSISTENT, "extreme")]


def test_trends():
    table = (
        "# X\n\n| n | torch (ms) | ours (ms) | speedup |\n|-|-|-|-|\n| 1 | 1.0 | 1.0 | {} |\n| 2 | 1.0 | 1.0 | {} |\n"
        "| 4 | 1.0 | 1.0 | {} |\n\n- Speedup increases with larger size\n"
    )
    verdicts = {
        figures: [f.verdict for f in audit(table.format(*figures)).findings if f.rule == "trend"]
        for figures in (("1.10x", "1.20x", "1.30x"), ("1.30x", "1.20x", "1.10x"), ("1.20x", "1.10x", "1.30x"))
    }
    assert list(verdicts.values()) == [[POSSIBLE], [INCONSISTENT], [NOT_CHECKABLE]]
