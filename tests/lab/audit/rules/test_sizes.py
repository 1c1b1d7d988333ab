"""Memory claims as in shared reports 003 (INT4) and 004 (attention), in other words."""

import pytest

from expertile.lab.audit import IMPOSSIBLE, INCONSISTENT, POSSIBLE
from tests.lab.audit.helpers import against, the


@pytest.mark.parametrize(("figure", "verdict"), [("2 MB", POSSIBLE), ("4 MB", INCONSISTENT)])
def test_a_shape_equated_with_bytes(figure, verdict):
    assert the(f"- Small matrices (1024×1024 = {figure} in FP16) fit\n", "tensor_bytes").verdict == verdict


def test_any_format_will_do_where_none_is_named():
    assert the("- 4096×4096 = 67.1 MB\n", "tensor_bytes").verdict == POSSIBLE
    assert the("- 4096×4096 = 50.0 MB\n", "tensor_bytes").verdict == INCONSISTENT


def test_sizes_beside_a_configuration():
    text = (
        "# Attention, fp16\n\n- Shape: [batch=4, heads=8, seq_len=1024, head_dim=64]\n- Memory per operation: 12.6 "
        "MB (Q, K, V)\n"
    )
    assert the(text, "tensor_bytes").verdict == POSSIBLE


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("Compress the BF16 weights by 8x with INT4 (memory savings)", INCONSISTENT),
        ("Compress the BF16 weights by 3.9x with INT4 (memory savings)", POSSIBLE),
        ("INT4 makes memory 8x smaller than FP32", POSSIBLE),
        ("INT8 weights are 4x smaller than FP16", INCONSISTENT),
    ],
)
def test_narrow_formats_save_no_more_than_their_widths(line, verdict):
    assert the(f"- {line}\n", "compression").verdict == verdict


def test_the_wide_format_may_be_named_elsewhere():
    text = "# Weights\n\n- BF16: 2 bytes per weight\n- INT4: 0.5 bytes per weight\n- Savings: ~8x with INT4\n"
    finding = the(text, "compression")
    assert finding.verdict == INCONSISTENT
    assert finding.limit == 4.0
    assert "0.5 bytes (line 4)" in finding.explanation


@pytest.mark.parametrize(
    "line", ["INT4 is 8x faster in memory-bound cases", "Binary embeddings use 32x less memory than INT8"]
)
def test_other_gains_are_not_compression(line):
    assert against(f"- {line}\n") == []


@pytest.mark.parametrize(("figure", "verdict"), [("1.0 GB", POSSIBLE), ("0.5 GB", INCONSISTENT)])
def test_a_memory_column_cannot_shrink_more_than_the_format(figure, verdict):
    text = (
        "BF16 baseline.\n\n| impl | latency | Memory |\n|-|-|-|\n| loop | 9 ms | 3.7 GB |\n| fused | 5 ms | 3.7 GB "
        f"|\n| INT4 | 3 ms | {figure} |\n"
    )
    assert the(text, "compression").verdict == verdict


def test_the_share_that_attention_saves_varies_with_length():
    rows = "| 256 | 4.2 ({}) |\n| 1024 | 67.1 ({}) |\n| 2048 | 268.4 ({}) |\n"
    text = (
        "# Flash attention, fp16\n\n- Shape: [batch=4, heads=8, seq_len=1024, head_dim=64]\n\n| Seq Length | "
        "Memory Saved (MB) |\n|-|-|\n"
    ) + rows
    assert against(text.format("57%", "84%", "91%")) == []
    assert against(text.format("84%", "84%", "84%")) == [
        (7, INCONSISTENT, "attention_memory"),
        (9, INCONSISTENT, "attention_memory"),
    ]


@pytest.mark.parametrize(("figure", "found"), [("20", []), ("120", [(3 + 2, IMPOSSIBLE, "capacity")])])
def test_memory_in_use_fits_the_gpu(figure, found):
    assert against(f"GPU: H100\n\n| model | peak memory GB |\n|-|-|\n| a | {figure} |\n") == found
