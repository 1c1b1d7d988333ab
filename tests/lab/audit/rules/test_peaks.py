"""Shares of peaks as in shared report 002, intensities as in 004, in other words."""

import pytest

from expertile.lab.audit import IMPOSSIBLE, INCONSISTENT, POSSIBLE, audit
from tests.lab.audit.helpers import against, the


@pytest.mark.parametrize(("share", "verdict"), [("39%", POSSIBLE), ("59%", INCONSISTENT)])
def test_a_share_of_the_stated_peak(share, verdict):
    text = f"- GPU: B200 (~4500 TFLOPs/s FP8 peak)\n- cubin best: 1753 TFLOPs/s ({share} of FP8 peak)\n"
    assert the(text, "share_of_peak").verdict == verdict


def test_several_shares_in_one_line_pair_in_order():
    text = "- GPU: B200 (~4500 TFLOPs/s FP8 peak)\n- cubin: 1753 TFLOPs/s (39% of FP8 peak), ours: 724 TFLOPs/s ({})\n"
    assert against(text.format("16%")) == []
    assert against(text.format("26%")) == [(2, INCONSISTENT, "share_of_peak")]


@pytest.mark.parametrize(("share", "verdict"), [("40%", POSSIBLE), ("62%", INCONSISTENT)])
def test_mfu_against_the_gpu(share, verdict):
    assert the(f"GPU: H100\n\nMFU: {share} at 400 TFLOPS (dense bf16)\n", "share_of_peak").verdict == verdict


def test_more_than_all_of_a_peak():
    assert the("GPU: H100\n\nWe reach 140% of peak.\n", "share_of_peak").verdict == IMPOSSIBLE


def test_a_peak_is_not_a_result():
    assert against("An H100 (989 TFLOP/s BF16) at 50% MFU would serve it.\n") == []


def test_utilisation_of_something_else_is_left_alone():
    assert against("GPU: H100\n\nThroughput: 45 TFLOPs/s at 25% SM utilization\n") == []


INTENSITY = """# V100
- Peak Bandwidth: 900 GB/s
- Peak Compute: 15.7 TFLOPS (FP32)
- Intensity needed: {} ops/byte

Softmax:
- PyTorch: 0.250 ops/byte → {} GPU utilization
"""


def test_balance_and_utilisation():
    assert against(INTENSITY.format("17.4", "1.4%")) == []
    assert against(INTENSITY.format("27.4", "0.9%")) == [(4, INCONSISTENT, "intensity")]
    assert against(INTENSITY.format("17.4", "14%")) == [(7, INCONSISTENT, "intensity")]


def test_intensity_times_traffic_is_one_number_of_operations():
    text = (
        "# T\n\n## Softmax\n\nPyTorch:\n- Total Traffic: 402.72 MB\n\nTriton:\n- Total Traffic: 134.22 MB\n\n"
        "Intensity:\n- PyTorch: 0.250 ops/byte\n- Triton: {} ops/byte\n"
    )
    assert [f.verdict for f in audit(text.format("0.750")).findings if f.rule == "intensity"] == [POSSIBLE]
    assert [f.verdict for f in audit(text.format("0.625")).findings if f.rule == "intensity"] == [INCONSISTENT]


@pytest.mark.parametrize(
    ("words", "verdict"),
    [("", IMPOSSIBLE), ("All products run in int8.", POSSIBLE), ("Quantised to W8A8.", POSSIBLE)],
)
def test_no_format_means_floating_point_unless_integers_are_spoken_of(words, verdict):
    # An A100 reaches 312 TFLOP/s in float16 and 624 TOPS in int8.
    text = f"# A100 results\n\n{words}\n\n| M | N | K | TFLOPS |\n|---|---|---|---|\n| 4096 | 4096 | 4096 | 458 |\n"
    verdicts = {f.verdict for f in audit(text).findings if "458" in f.quote}
    assert verdicts == {verdict}
