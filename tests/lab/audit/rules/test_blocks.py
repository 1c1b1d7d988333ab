"""Blocks as in shared reports 000, 001 and 004, in other words."""

import pytest

from expertile.lab.audit import INCONSISTENT, POSSIBLE
from tests.lab.audit.helpers import against, the


@pytest.mark.parametrize(("figure", "verdict"), [("2.67×", POSSIBLE), ("3.67×", INCONSISTENT)])
def test_a_speed_up_below_its_two_figures(figure, verdict):
    text = f"```\nFP16 matmul:  0.26 ms\nFP32 matmul:  0.70 ms\nSpeedup: {figure}\n```\n"
    assert the(text, "speedup_in_block").verdict == verdict


@pytest.mark.parametrize(("figure", "verdict"), [("13.52x", POSSIBLE), ("20.0x", INCONSISTENT)])
def test_a_speed_up_over_the_parallel_block(figure, verdict):
    text = (
        "## Naive\n```\nSequential Time: 2.84ms\nThroughput: 45.2 TFLOPs/s\n```\n"
        f"## Tiled\n```\nTiled Time: 0.21ms\nThroughput: 612.3 TFLOPs/s\nSpeedup: {figure}\n```\n"
    )
    assert the(text, "speedup_in_block").verdict == verdict


def test_observations_in_a_list_are_not_a_block_of_results():
    text = "- Traffic fell from 201.3 MB to 134.2 MB\n- Best speedup at 2048×2048 (1.25x)\n"
    assert against(text) == []


@pytest.mark.parametrize(("figure", "verdict"), [("0.013 ms", POSSIBLE), ("0.13 ms", INCONSISTENT)])
def test_the_average_of_counted_items(figure, verdict):
    text = f"```\n64 GEMMs of 256×256:  0.83 ms\nAverage per GEMM:     {figure}\n```\n"
    assert the(text, "per_item").verdict == verdict


@pytest.mark.parametrize(("figure", "verdict"), [("402.72 MB", POSSIBLE), ("302.72 MB", INCONSISTENT)])
def test_totals_of_reads_and_writes(figure, verdict):
    text = f"- Memory Reads: 268.47 MB\n- Memory Writes: 134.25 MB\n- Total Traffic: {figure}\n"
    assert the(text, "total").verdict == verdict


@pytest.mark.parametrize(("figure", "verdict"), [("0.94ms", POSSIBLE), ("1.94ms", INCONSISTENT)])
def test_savings_are_the_difference(figure, verdict):
    text = f"- PyTorch: 24 × 0.170ms = 4.07ms\n- Triton: 24 × 0.131ms = 3.13ms\n- Saved: {figure} per inference\n"
    assert the(text, "difference").verdict == verdict


@pytest.mark.parametrize(("count", "verdict"), [(15, POSSIBLE), (14, INCONSISTENT)])
def test_tiles_round_up(count, verdict):
    text = f"```\nTile Size: 128\nExpert 0: 1842 tokens ({count} tiles)\nTime: 1 ms\n```\n"
    assert the(text, "tiles").verdict == verdict


@pytest.mark.parametrize(("last", "verdict"), [(300, POSSIBLE), (400, INCONSISTENT)])
def test_the_tokens_of_all_experts_add_up(last, verdict):
    text = (
        f"```\nNum Experts: 3\nTotal Tokens: 600\nExpert 0: 100 tokens\nExpert 1: 200 tokens\nExpert 2: {last} "
        "tokens\nTime: 1 ms\n```\n"
    )
    assert the(text, "group_sum").verdict == verdict


@pytest.mark.parametrize(("figure", "verdict"), [("22.6 hours", POSSIBLE), ("62.6 hours", INCONSISTENT)])
def test_savings_per_day(figure, verdict):
    text = f"- Saves 0.94 ms per inference at 1000 inferences/second\n- That is {figure} per day\n"
    assert the(text, "per_day").verdict == verdict
