"""Figures as in shared reports 000, 002 and 004, in other words."""

from expertile.lab.audit import IMPOSSIBLE, INCONSISTENT, POSSIBLE, audit
from tests.lab.audit.helpers import against

TIMES = (
    "| Shape | PyTorch (ms) | Triton (ms) | Speedup |\n|-|-|-|-|\n| a | 0.058 | 0.046 | 1.25x |\n| b | 0.177 | 0.169 "
    "| {} |\n| c | 0.786 | 0.668 | 1.18x |\n"
)


def test_a_speed_up_that_follows_and_one_that_does_not():
    assert against(TIMES.format("1.05x")) == []
    (finding,) = against(TIMES.format("1.25x"))
    assert finding == (4, INCONSISTENT, "derived_column")


def test_either_direction_but_one_for_the_whole_column():
    slow = TIMES.replace("1.25x", "0.79x").replace("1.18x", "0.85x")
    assert against(slow.format("0.95x")) == []
    assert against(slow.format("2.05x")) == [(4, INCONSISTENT, "derived_column")]


def test_a_header_names_its_columns():
    text = "| c | loop | expert | llm | llm/loop |\n|-|-|-|-|-|\n| a | 1.0 ms | 2.0 ms | 4.0 ms | {} |\n"
    assert against(text.format("0.25x")) == []
    assert against(text.format("0.50x")) == [(3, INCONSISTENT, "derived_column")]  # that would be llm/expert


def test_a_baseline_row():
    text = (
        "| impl | latency | speedup |\n|-|-|-|\n| naive | ~12 ms | 1.0x |\n| bmm | ~8 ms | 1.5x |\n| fused | ~4.5 ms "
        "| 2.6x |\n| int4 | ~3 ms | {} |\n"
    )
    assert against(text.format("4x")) == []
    assert against(text.format("8x")) == [(6, INCONSISTENT, "derived_column")]


def test_baselines_of_groups():
    rows = "| x torch | 8 ms | 1.0x |\n| x ours | 4 ms | 2.0x |\n| y torch | 30 ms | 1.0x |\n| y ours | 10 ms | {} |\n"
    text = "| impl | time | speedup |\n|-|-|-|\n" + rows
    assert against(text.format("3.0x")) == []
    assert against(text.format("4.0x")) == [(6, INCONSISTENT, "derived_column")]


def test_columns_without_units():
    text = (
        "| m | ours | cubin | ratio |\n|-|-|-|-|\n| 64 | 27.4 | 337.7 | 0.08x |\n| 128 | 320.9 | 675.2 | {} |\n| 512 "
        "| 614.9 | 1753.3 | 0.35x |\n"
    )
    assert against(text.format("0.48x")) == []
    assert against(text.format("0.84x")) == [(4, INCONSISTENT, "derived_column")]


def test_a_single_row_of_two_rivals():
    text = "| case | PyTorch (ms) | Triton (ms) | Speedup |\n|-|-|-|-|\n| a | 2.0 | 1.0 | {} |\n"
    assert against(text.format("2.0x")) == []
    assert against(text.format("3.0x")) == [(3, INCONSISTENT, "derived_column")]


def test_speed_ups_over_something_that_is_not_in_the_table():
    text = (
        "| model | prefill (ms) | decode (ms) | Speedup |\n|-|-|-|-|\n| a | 20 | 10 | 3.1x |\n| b | 40 | 10 | 2.9x |\n"
    )
    assert against(text) == []


def test_percentages_of_a_stated_peak():
    text = (
        "GPU: H100\n\nPeak bandwidth: 3300 GB/s\n\n| kernel | Bandwidth (GB/s) | % of peak |\n|-|-|-|\n| a | 622.87 "
        "| 18.87% |\n| b | 718.54 | 21.77% |\n| c | 3134.26 | {} |\n"
    )
    assert against(text.format("94.98%")) == []
    assert against(text.format("84.98%")) == [(9, INCONSISTENT, "derived_column")]


def test_more_than_the_whole_peak():
    text = "# bf16, A100\n\n| case | TFLOPS | MFU |\n|-|-|-|\n| a | 250 | 80.2% |\n| b | 280 | 180% |\n"
    assert (6, IMPOSSIBLE, "share_of_peak") in against(text)


def test_improvements():
    text = (
        "| batch | base (ms) | ours (ms) | improvement |\n|-|-|-|-|\n| 1 | 10 | 8 | 20% |\n| 2 | 20 | 15 | 25% |\n| "
        "4 | 40 | 20 | {} |\n"
    )
    assert against(text.format("50%")) == []
    assert against(text.format("70%")) == [(5, INCONSISTENT, "derived_column")]


def test_percentages_that_claim_nothing_are_left_alone():
    text = (
        "| n | GPU (ms) | CPU (ms) | noise |\n|-|-|-|-|\n| 1 | 10 | 8 | 20% |\n| 2 | 20 | 15 | 25% |\n| 4 | 40 | 20 "
        "| 3% |\n"
    )
    assert against(text) == []


def test_a_ratio_beside_its_figure():
    text = (
        "| n | torch | ours |\n|-|-|-|\n| 1 | 4.0 ms | 2.0 ms (2.0x) |\n| 2 | 9.0 ms | 3.0 ms (3.0x) |\n| 4 | 8.0 ms "
        "| 2.0 ms ({}) |\n"
    )
    assert against(text.format("4.0x")) == []
    assert against(text.format("6.0x")) == [(5, INCONSISTENT, "derived_column")]


def test_the_arithmetic_is_shown():
    finding = next(
        f for f in audit(TIMES.format("1.05x")).findings if f.line == 3 and f.unit == "" and "Speedup" in f.quote
    )
    assert finding.verdict == POSSIBLE
    assert "58 µs / 46 µs = 1.261x" in finding.explanation
