"""Figures as in shared reports 001 (H100, 16384×4096×14336 in 0.21 ms) and 003 (RTX 4090), in other words."""

import pytest

from expertile.lab.audit import IMPOSSIBLE, NOT_CHECKABLE, POSSIBLE, audit
from tests.lab.audit.helpers import accusations, against, the

BLOCK = (
    "# Grouped GEMM on H100\n\n```\n- Num Experts: 8\n- Hidden Dim: 4096\n- FFN Dim: 14336\n- Total Tokens: 16384\n- "
    "Time: {}\n```\n"
)


def test_a_time_that_needs_more_than_any_peak():
    finding = the(BLOCK.format("0.21ms"), "time_against_work")
    assert finding.verdict == IMPOSSIBLE
    assert finding.value == pytest.approx(2 * 16384 * 4096 * 14336 / 0.21e-3 / 1e12)
    assert "9163 TFLOP/s" in finding.explanation
    assert finding.line == 8


def test_the_same_shape_in_a_time_that_is_possible():
    assert the(BLOCK.format("3.1ms"), "time_against_work").verdict == POSSIBLE


def test_rounding_decides_in_favour_of_the_report():
    # 2·8192³ at the H100's generous bf16 limit takes 0.997 ms: "1 ms" may be 1.5 ms, "0.5 ms" cannot.
    text = "# bf16 GEMM, H100\n\n8192x8192x8192: {}\n"
    assert the(text.format("1 ms"), "time_against_work").verdict == POSSIBLE
    assert the(text.format("0.5 ms"), "time_against_work").verdict == IMPOSSIBLE


def test_bytes_that_memory_cannot_move_in_time():
    text = "# Softmax, fp32, V100\n\n| Shape | ours (ms) |\n|-|-|\n| 8192×8192 | 0.668 |\n| 8192×8192 | 0.400 |\n"
    assert against(text) == [(6, IMPOSSIBLE, "time_against_work")]


def test_small_data_may_stay_in_cache():
    # 4.2 MB in 1 µs would be 4.2 TB/s, from an L2 of 6 MB.
    assert against("# Softmax, fp16, V100\n\n| Shape | ours (µs) |\n|-|-|\n| 1024×1024 | 1.0 |\n") == []


@pytest.mark.parametrize(("figure", "verdict"), [("950 TFLOPS", POSSIBLE), ("1400 TFLOPS", IMPOSSIBLE)])
def test_printed_rates(figure, verdict):
    assert the(f"# bf16 matmul, H100\n\nthroughput: {figure}\n", "peak_compute").verdict == verdict


def test_without_a_format_the_fastest_counts():
    assert the("# matmul, H100\n\nthroughput: 1400 TFLOPS\n", "peak_compute").verdict == POSSIBLE


def test_bandwidth_above_dram_needs_to_know_the_size():
    text = "# RMSNorm, fp32, V100\n\n{}bandwidth: 1500 GB/s\n"
    assert the(text.format(""), "peak_bandwidth").verdict == NOT_CHECKABLE
    assert the(text.format("Shape: 8192x8192\n\n"), "peak_bandwidth").verdict == IMPOSSIBLE
    assert the(text.format("Shape: 256x1024\n\n"), "peak_bandwidth").verdict == POSSIBLE


@pytest.mark.parametrize("line", ["NVLink: 900 GB/s", "L2 bandwidth: 5500 GB/s", "SRAM: 19 TB/s"])
def test_other_memories_are_not_dram(line):
    assert against(f"# H100\n\n{line}\n") == []


def test_a_stated_peak_may_be_the_sparse_one():
    assert against("# H100\n\n- Peak compute: 1979 TFLOPS (BF16)\n") == []


def test_times_whose_sizes_stand_elsewhere():
    text = (
        "# MoE on an RTX 4090 (BF16)\n\n| impl | latency |\n|-|-|\n| loop | ~30 ms |\n| fused | ~4.5 ms |\n\n"
        "```bash\n# for results\nrun.py --config x --batch 16 --seq 512\n```\n\n"
        "| Config | Experts | Hidden | FFN | Top-K |\n|-|-|-|-|-|\n| x | 8 | 4096 | 14336 | 2 |\n"
    )
    assert against(text) == [(6, IMPOSSIBLE, "time_against_work")]
    undecided = text.replace("# for results", "# one of two").replace(
        "```\n\n|", "run.py --config x --batch 1 --seq 8\n```\n\n|"
    )
    assert against(undecided) == []


def test_an_unknown_gpu_has_no_limits():
    assert against("# bf16 matmul, RTX 4060 Ti\n\nthroughput: 1400 TFLOPS\n") == []


def test_prose_may_speak_of_other_hardware():
    prose = (
        "The next generation, whatever it will be called, is expected to reach 50 PFLOPS of some narrow format in a "
        "few years from now, "
    )
    assert against(f"# H100\n\n{prose * 2}as rumoured.\n") == []


@pytest.mark.parametrize(
    ("line", "impossible"),
    [
        ("H100: 700 TFLOP/s, A100: 500 TFLOP/s", ["500 TFLOP/s"]),
        ("500 TFLOP/s on an A100 and 700 TFLOP/s on an H100", ["500 TFLOP/s"]),
        ("A100 (500 TFLOP/s) vs H100 (700 TFLOP/s)", ["500 TFLOP/s"]),
        ("A100: 250 TFLOP/s; H100: 1,300 TFLOP/s", ["1300 TFLOP/s"]),
        ("A100: 250 TFLOP/s, H100: 700 TFLOP/s", []),
        # whose figure is whose takes a reader: the faster GPU's limit holds for all
        ("A100 and H100: 500 TFLOP/s and 700 TFLOP/s", []),
        ("H100 80GB and A100 80GB: 700 TFLOP/s and 250 TFLOP/s", []),
        ("H100 is faster than A100 at 700 TFLOP/s", []),
        ("H100: 250 TFLOP/s, 1.5x the A100, 700 TFLOP/s when tuned", []),
        ("H100 and A100: 1400 TFLOP/s and 250 TFLOP/s", ["1400 TFLOP/s"]),
    ],
)
def test_each_gpu_of_a_line_has_its_own_limits(line, impossible):
    found = [f for f in accusations(audit(f"# bf16 GEMM\n\n- {line}\n")) if f.rule == "peak_compute"]
    assert [f.explanation.split(" is ")[0] for f in found] == impossible


def test_a_possible_time_shows_the_reading_that_makes_it_so():
    # 4·B·H·S²·D of 4, 32, 4096, 128 in 0.8 ms is 1374 TFLOP/s, above an H100's peak; half of it, if causal, is not.
    text = "# Attention on H100, bf16\n\nB=4 H=32 S=4096 D=128\n\n- forward {} ms\n"
    finding = the(text.format("0.80"), "time_against_work")
    assert finding.verdict == POSSIBLE and finding.value == pytest.approx(687.2, abs=0.1)
    assert finding.explanation.startswith("4·4·32·4096²·128/2 (causal) = ")
    assert "but 4·4·32·4096²·128 would be 1374 TFLOP/s, which is impossible" in finding.explanation
    assert the(text.format("1.80"), "time_against_work").explanation.startswith("4·4·32·4096²·128 = ")
