"""Report 001's blocks in other words: a time and a rate that do not give the FLOPs of their own shape."""

import pytest

from expertile.lab.audit import INCONSISTENT, NOT_CHECKABLE, POSSIBLE, audit
from tests.lab.audit.helpers import against, the

BLOCK = (
    "```\nGrouped GEMM\nNum Experts: 8\nHidden Dim: 4096\nFFN Dim: 14336\nTotal Tokens: 16384\nTime: {}\nThroughput: "
    "{}\n```\n"
)


def test_a_block_that_agrees_and_one_that_does_not():
    assert the(BLOCK.format("2.84 ms", "677.5 TFLOPs/s"), "time_against_rate").verdict == POSSIBLE
    finding = the(BLOCK.format("2.84 ms", "45.2 TFLOPs/s"), "time_against_rate")
    assert finding.verdict == INCONSISTENT
    assert finding.limit == pytest.approx(677.5, rel=1e-3)


def test_other_readings_of_the_shape_are_tried():
    # Both products of the expert, or with the backward pass.
    for rate in ("1355 TFLOPs/s", "2032 TFLOPs/s"):
        assert the(BLOCK.format("2.84 ms", rate), "time_against_rate").verdict == POSSIBLE


def test_rows():
    table = (
        "# GEMM\n\n| M | N | K | time (us) | TFLOPS |\n|-|-|-|-|-|\n| 4096 | 4096 | 4096 | 512.3 | 268.3 |\n| 2048 | "
        "2048 | 2048 | 75.0 | {} |\n"
    )
    assert against(table.format("229.1")) == []
    assert against(table.format("129.1")) == [(6, INCONSISTENT, "time_against_rate")]


def test_a_unit_that_is_off_by_a_thousand_is_named():
    table = "# GEMM\n\n| M | N | K | Latency (s) | TFLOPS |\n|-|-|-|-|-|\n| 256 | 8192 | 8192 | 0.089056 | 386 |\n"
    assert "one of the units" in the(table, "time_against_rate").explanation


def test_a_guessed_third_size_accuses_nobody():
    finding = the("# matmul\n\n2048×2048: 0.10 ms, 10 TFLOPS\n", "time_against_rate")
    assert finding.verdict == NOT_CHECKABLE


def test_rivals_in_a_row_did_the_same_work():
    table = (
        "| case | torch (ms) | torch TFLOPS | ours (ms) | ours TFLOPS |\n|-|-|-|-|-|\n| a | 2.00 | 100 | 1.00 | {} "
        "|\n| b | 4.00 | 100 | 2.00 | 200 |\n| c | 6.00 | 90 | 3.00 | 180 |\n"
    )
    assert against(table.format("200")) == []
    assert against(table.format("300")) == [(3, INCONSISTENT, "same_work_in_row")]


def test_bytes_over_time():
    table = "# softmax, fp32\n\n| shape | ms | GB/s |\n|-|-|-|\n| 8192×8192 | 0.668 | {} |\n"
    assert the(table.format("803.7"), "time_against_rate").verdict == POSSIBLE
    assert the(table.format("401.9"), "time_against_rate").verdict == POSSIBLE  # one pass counted
    assert the(table.format("803700"), "time_against_rate").verdict == INCONSISTENT


def test_statistics_and_differences_are_not_times_of_the_work():
    text = "# GEMM 4096x4096x4096\n\n| case | std (ms) | TFLOPS |\n|-|-|-|\n| a | 0.01 | 300 |\n"
    assert [f.verdict for f in audit(text).findings if f.rule == "time_against_rate"] == []
