"""One error beside its honest twin: the first is accused by the rule that is named, the second is not."""

import pytest

from expertile.audit import audit_text

GEMM = "GPU: {gpu}\ndtype: {dtype}\nM=8192 N=8192 K=8192\n"
TABLE = "| name | before (us) | after (us) | speedup |\n|---|---|---|---|\n"
ROWS = "| a | 21.4 | 12.9 | 1.66x |\n| b | 40.2 | 22.1 | 1.82x |\n| c | 33.0 | 18.3 | 1.80x |\n"

CELLS = (
    "| op | torch | cuda |\n|---|---|---|\n| a | 100 us | 40 us (2.5x) |\n| b | 80 us | 32 us (2.5x) |\n"
    "| c | 60 us | 25 us ({}) |\n"
)
LOG = (
    "512: eager 1.50 ms, compiled 0.75 ms -> 2.00x\n1024: eager 5.60 ms, compiled 2.24 ms -> {}\n"
    "2048: eager 21.0 ms, compiled 7.0 ms -> 3.00x\n"
)
SCALING = (
    "| GPUs | samples/s | efficiency |\n|---|---|---|\n| 4 | 128 | 100 % |\n| 8 | 251 | 98 % |\n"
    "| 16 | 488 | 95 % |\n| 32 | 819 | {} |\n"
)
TOTAL = (
    "| part | time (ms) | % |\n|---|---|---|\n| a | 210 | 21.0 |\n| b | 340 | 34.0 |\n| c | 90 | 9.0 |\n"
    "| d | 330 | {} |\n| e | 30 | 3.0 |\n| Total | 1000 | 100 |\n"
)
CHANGE = (
    "| step | latency (ms) | change |\n|---|---|---|\n| base | 80.0 | |\n| a | 64.0 | -20 % |\n"
    "| b | 60.8 | -24 % |\n| c | 52.0 | {} |\n"
)
COPIES = (
    "#   size   time  algbw\n#    (B)   (us) (GB/s)\n 1048576  45.1  23.2\n 16777216 101.9 164.6\n"
    " 268435456 1099.0 244.3\n 1073741824 3950.0 {}\n"
)

BUS = "| message | algbw | busbw |\n|-|-|-|\n| 1 GB | 262 GB/s | 458 GB/s |\n| 4 GB | 352 GB/s | {} GB/s |\n"
TABULAR = (
    "GPU (A100 40GB, 1555 GB/s) & ms & HBM bandwidth, GB/s \\\\ \\hline\n"
    "naive & 1.92 & 559 \\\\\nfused & 0.60 & {} \\\\\n"
)
JOULES = "gpu,power_w,tokens_per_s,tokens_per_joule\na,312,1480,4.74\nb,548,3260,5.95\nc,301,980,{}\nd,388,1190,3.07\n"
AT_ONCE = "concurrency,tpot_ms,output_tok_s\n1,10.96,91.2\n4,11.70,342\n16,13.27,{}\n64,18.71,3420\n"
TRAFFIC = (
    "k,us,read_mb,write_mb,gbps\na,412,268.4,134.2,977.2\nb,248,134.2,134.2,1082\nc,221,134.2,134.2,1214\n"
    "d,205,134.2,134.2,{}\n"
)
RANKS = "| metric | value |\n|-|-|\n| p50 | 455 ms |\n| p95 | {} ms |\n| p99 | 1130 ms |\n"
STAGES = "run,read_ms,run_ms,total_ms\na,12.1,40.2,52.3\nb,11.8,39.9,51.7\nc,12.3,41.0,{}\nd,12.0,40.5,52.5\n"
OF_HEAD = (
    "| v | DRAM GB/s | % of 2039 GB/s |\n|---|---|---|\n| a | 812 | 39.8 |\n| b | 1304 | 64.0 |\n| c | 1683 | {} |\n"
)
GPU_HEADS = (
    "| x | img/s (1 GPU) | img/s (8 GPUs) | efficiency |\n|-|-|-|-|\n| a | 312 | 2341 | 93.8 % |\n"
    "| b | 289 | 1988 | 86.0 % |\n| c | 301 | 2119 | {} |\n| d | 335 | 2586 | 96.5 % |\n"
)
EPOCH_LOG = "".join(
    f"2026-05-07 2{n}:00:00 INFO epoch {n} start\n2026-05-07 2{n}:18:3{n} INFO epoch {n} train done in {took} s\n"
    for n, took in enumerate(("1110", "1111", "{}"))
)
CLIENTS = "Transactions\n```\n" + "".join(
    f"number of clients: {n}\nlatency average = {ms} ms\ntps = {tps}.3 (without initial connection time)\n\n"
    for n, ms, tps in ((16, 0.225, 71200), (64, 0.265, 241700), (16, 1.628, 9830), (64, "{}", 21460))
)
CASES = [
    # name, rule, wrong, right
    ("clients", "concurrency", CLIENTS.format("4.086"), CLIENTS.format("2.982")),
    (
        "efficiency",
        "ratio",
        "From 1 to 4 GPUs the time falls from 96 min to 27 min, an efficiency of 97 %.",
        "From 1 to 4 GPUs the time falls from 96 min to 27 min, an efficiency of 89 %.",
    ),
    ("bus bandwidth", "bus bandwidth", BUS.format("880"), BUS.format("616")),
    ("LaTeX", "memory bandwidth", TABULAR.format("1790"), TABULAR.format("1430")),
    ("rate", "rate", GEMM.format(gpu="H100", dtype="bf16") + "time: 1.6 ms\nrate: 412 TFLOPS", "rate: 687 TFLOPS"),
    (
        "half counted",
        "rate",
        GEMM.format(gpu="H100", dtype="bf16") + "time: 1.6 ms\nrate: 412 TFLOPS",
        "rate: 343.6 TFLOPS",
    ),
    ("peak", "peak", "On an A100 in bf16 the kernel runs at 400 TFLOPS.", "On an A100 in bf16 it runs at 290 TFLOPS."),
    (
        "sum of GPUs",
        "peak",
        "On an A100 in bf16 the kernel runs at 400 TFLOPS.",
        "On 8x A100 in bf16 it runs at 2100 TFLOPS.",
    ),
    ("bound", "bound", GEMM.format(gpu="V100", dtype="fp16") + "time: 5 ms", "time: 12 ms"),
    (
        "memory",
        "memory bandwidth",
        "A100 80GB: device memory bandwidth 2900 GB/s",
        "L2 cache bandwidth 2900 GB/s on an A100",
    ),
    (
        "share",
        "share of peak",
        "402 TFLOPS, 72% of the peak of 756 TFLOPS",
        "402 TFLOPS, 53% of the peak of 756 TFLOPS",
    ),
    ("row", "ratio", TABLE + ROWS + "| d | 15.5 | 9.8 | 1.28x |", TABLE + ROWS + "| d | 15.5 | 9.8 | 1.58x |"),
    ("sentence", "ratio", "from 9.6 ms to 6.4 ms, 2.1x faster", "from 9.6 ms to 6.4 ms, 1.5x faster"),
    ("drop", "ratio", "dropped by 60%, from 50 ms to 30 ms", "dropped by 40%, from 50 ms to 30 ms"),
    ("tokens", "tokens/s", "512 tokens in 12.4 s (61.3 tokens/s)", "512 tokens in 12.4 s (41.3 tokens/s)"),
    (
        "batch of tokens",
        "tokens/s",
        "512 tokens in 12.4 s (61.3 tokens/s)",
        "batch size 4: 512 tokens in 12.4 s (165 tokens/s)",
    ),
    ("bits", "compression", "int4 instead of bf16: 6x smaller", "int4 instead of fp32: 6x smaller"),
    (
        "work",
        "equal work",
        "Equal work:\n1 GEMM (4096x4096)\n16 GEMMs (1024x1024)",
        "Equal work:\n1 GEMM (2048x2048)\n8 GEMMs (1024x1024)",
    ),
    ("quotient", "arithmetic", "So 51.44 / 17.52 = 3.44x.", "So 51.44 / 17.52 = 2.94x."),
    ("product", "arithmetic", "6 × 1.3e9 × 524288 = 6.1e15 FLOP", "6 × 1.3e9 × 524288 = 4.09e15 FLOP"),
    (
        "sum",
        "arithmetic",
        "queue 11 ms + prefill 142 ms + rest 2 ms = 189 ms",
        "queue 11 ms + prefill 142 ms + rest 2 ms = 155 ms",
    ),
    ("binary", "arithmetic", "2 × 12 × 16 × 64 × 4 bytes = 64 KB", "2 × 12 × 16 × 64 × 4 bytes = 96 KB"),
    ("of more", "arithmetic", "12 × 16 × 64 × 4 bytes = 96 KB", "2 (K and V) x 12 x 16 x 64 x 4 bytes = 96 KB"),
    ("tile", "arithmetic", "64 × 64 = 4.8 KB", "64×64×32 = 4.8 TFLOPS"),
    ("in brackets", "ratio", CELLS.format("3.4x"), CELLS.format("2.4x")),
    ("log", "ratio", LOG.format("3.50x"), LOG.format("2.50x")),
    ("weak scaling", "ratio", SCALING.format("92 %"), SCALING.format("80 %")),
    ("share of a total", "ratio", TOTAL.format("43.0"), TOTAL.format("33.0")),
    ("change", "ratio", CHANGE.format("-45 %"), CHANGE.format("-35 %")),
    ("copies", "bandwidth", COPIES.format("391.8"), COPIES.format("271.8")),
    ("two sizes", "compression", "from bf16 (65.5 GB) to 4 bit, 9.8 GB", "from bf16 (65.5 GB) to 4 bit, 17.9 GB"),
    (
        "per token",
        "tokens/s",
        "eval time = 3702.50 ms / 127 runs (29.15 ms per token, 54.30 tokens per second)",
        "eval time = 3702.50 ms / 127 runs (29.15 ms per token, 34.30 tokens per second)",
    ),
    (
        "sparse",
        "sparse peak",
        "The dense bf16 peak of an A100 is 624 TFLOPS.",
        "The dense bf16 peak of an A100 is 312 TFLOPS.",
    ),
    (
        "pcie",
        "link",
        "Pinned H2D over PCIe 4.0 x16 runs at 41.2 GB/s.",
        "Pinned H2D over PCIe 4.0 x16 runs at 25.2 GB/s.",
    ),
    ("staged", "bandwidth", "copied 512 MiB in 21.3 ms (38.2 GB/s)", "copied 512 MiB in 21.3 ms (25.2 GB/s)"),
    (
        "two in one",
        "ratio",
        "rose from 20 to 30 req/s (+80 %), fell from 90 ms to 60 ms (-33 %)",
        "rose from 20 to 30 req/s (+50 %), fell from 90 ms to 60 ms (-33 %)",
    ),
    (
        "billions",
        "tokens/s",
        "12.0 B tokens in 20 hours, which is 95k tokens/s",
        "12.0 B tokens in 48 hours, which is 69.4k tokens/s",
    ),
    (
        "one GPU's peak in every row",
        "share of peak",
        "A100 80GB, bf16\n\n| run | TFLOPS | MFU |\n|---|---|---|\n"
        "| a | 109.2 | 35.0% |\n| b | 146.6 | 47.0% |\n| c | 171.6 | 63.0% |",
        "| c | 171.6 | 55.0% |",
    ),
    (
        "share of what is named",
        "share of peak",
        "The stencil reaches 1210 GB/s on an A100 40GB, i.e. 64% of 1555 GB/s.",
        "The stencil reaches 1210 GB/s on an A100 40GB, i.e. 78% of 1555 GB/s.",
    ),
    (
        "attention by its letters",
        "rate",
        "b,h,s,d,fwd_ms,fwd_tflops\n2,8,1024,64,0.0430,99.9\n2,8,2048,64,0.1610,106.7\n2,8,4096,64,0.6200,150.0",
        "2,8,4096,64,0.6200,110.8",
    ),
    (
        "served",
        "tokens/s",
        "Completed requests: 300\nDuration (s): 25.0\nGenerated tokens: 60000\nRequest throughput (req/s): 12.0\n"
        "Output throughput (tok/s): 3100.0",
        "Output throughput (tok/s): 2400.0",
    ),
    (
        "one batch for all rows",
        "throughput",
        "Batch size 12.\n\n| engine | s/batch | images/s |\n|---|---|---|\n"
        "| a | 6.00 | 2.00 |\n| b | 4.80 | 2.50 |\n| c | 4.00 | 3.90 |",
        "| c | 4.00 | 3.00 |",
    ),
    (
        "two formats of one thing",
        "compression",
        "The table of 40M rows takes 20.5 GB in FP32 and 3.1 GB in FP8.",
        "The table of 40M rows takes 20.5 GB in FP32 and 5.2 GB in FP8.",
    ),
    ("work in a time", "rate", "2199.0 GFLOP in 15.0 ms = 171.6 TFLOPS", "2199.0 GFLOP in 15.0 ms = 146.6 TFLOPS"),
    (
        "a record of two variants",
        "ratio",
        "eager: 4.20 ms, 512.0 GB/s\nfused: 1.50 ms, 1433.6 GB/s\nspeedup: 3.60x",
        "speedup: 2.80x",
    ),
    (
        "behind both times",
        "ratio",
        "Ours takes 2.5 ms, the library 6.0 ms, which makes it 3.4x faster.",
        "Ours takes 2.5 ms, the library 6.0 ms, which makes it 2.4x faster.",
    ),
    (
        "cost",
        "cost",
        "8 H100s ran for 30 hours at $2.50 per GPU-hour, which is $900.",
        "8 H100s ran for 30 hours at $2.50 per GPU-hour, which is $600.",
    ),
    ("any units that balance", "product", JOULES.format("4.26"), JOULES.format("3.26")),
    ("sequences at once", "tokens/s", AT_ONCE.format("1602"), AT_ONCE.format("1206")),
    ("read and written", "bandwidth", TRAFFIC.format("1709"), TRAFFIC.format("1309")),
    ("percentiles", "order", RANKS.format("440"), RANKS.format("840")),
    ("sum of columns", "sum", STAGES.format("63.3"), STAGES.format("53.3")),
    ("share of the peak in a head", "share of peak", OF_HEAD.format("92.5"), OF_HEAD.format("82.5")),
    ("GPUs in the heads", "ratio", GPU_HEADS.format("78.0 %"), GPU_HEADS.format("88.0 %")),
]


@pytest.mark.parametrize("rule, wrong, right", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_an_error_is_accused_and_its_honest_twin_is_not(rule, wrong, right):
    assert [f.rule for f in audit_text(wrong).accusations] == [rule]
    # Where the twin is one line, the others stay.
    honest = "\n".join([*wrong.splitlines()[:-1], right]) if "\n" in wrong and "\n" not in right else right
    assert [f.message for f in audit_text(honest).accusations] == []


def test_two_sizes_in_one_place_are_unknown():
    text = "M=1024 N=1024 K=1024 and M=8192 N=8192 K=8192 were run.\n\nGPU: V100\ntime: 0.1 ms\nrate: 100 TFLOPS\n"
    assert audit_text(text).accusations == ()


def test_the_nearest_set_up_above_a_result_wins():
    log = "".join(
        f"M={n} N={n} K={n}\ntime: {2e-9 * n**3 / rate:.4f} ms\nperf: {rate:.1f} TFLOPS\n\n"
        for n, rate in ((2048, 171.3), (4096, 212.9), (8192, 239.1))
    )
    assert audit_text(log, "run.log").accusations == ()
    assert len(audit_text(log.replace("212.9", "312.9"), "run.log").accusations) == 1


def test_four_lines_that_fail_alike_are_one_finding():
    rows = "".join(
        f"[INFO] translated {n} tokens, 31.39 ms, {n / 31.39:.0f} tokens/sec\n" for n in (67092, 67124, 67813, 67101)
    )
    (found,) = audit_text(rows, "x.log").accusations
    assert len(found.all_lines) == 4


def test_what_the_text_leaves_out_can_be_given():
    text = "time: 1.1 ms\nthroughput: 300 TFLOPS\n"
    assert audit_text(text).accusations == ()
    assert audit_text(text, gpu="A100", dtype="bf16", shape="8192x8192x8192").accusations
    for wrong in ({"gpu": "abacus"}, {"dtype": "int3"}, {"shape": "8192"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: (?:expected|no known)"):
            audit_text(text, **wrong)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("On an A100 in bf16 the kernel runs at 400 TFLOPS.", ["impossible"]),
        ("On an A100 in bf16 the kernel runs at 350 TFLOPS.", ["question"]),
        ("On an A100 in bf16 the kernel runs at 400 TFLOPS.\n\nThe V100 is slower.", ["question"]),
        ("A100 80GB: device memory bandwidth 2900 GB/s\n\nThe V100 is slower.", ["question"]),
        ("On an A100 in bf16 we expect about 400 TFLOPS.", ["question"]),
        (
            "On an A100 in bf16 the kernel runs at 400 TFLOPS.\n\nThat is more than the peak: skipped tiles count.",
            ["question"],
        ),
        ("A100 80GB: device memory bandwidth 2900 GB/s\n\nUp to 32 MB the buffer fits in the L2.", ["question"]),
    ],
    ids=["certain", "close", "two GPUs", "memory of two", "about", "skipped", "cached"],
)
def test_a_peak_accuses_where_nothing_else_can_be_meant(text, verdict):
    assert [f.verdict for f in audit_text(text).findings] == verdict


@pytest.mark.parametrize("power", ["2\\ :sup:`20`", "2<sup>20</sup>", "2^20"])
def test_raised_digits_are_a_power(power):
    for size, accused in (("8.39", 0), ("16.8", 1)):
        found = audit_text(f"The array takes {power} x 8 bytes = {size} MB on the A100.", "x.rst").accusations
        assert len(found) == accused, found


def test_a_power_beyond_all_numbers_is_no_equation():
    assert audit_text("2 × 3 = 16777^216", "x.md").findings == ()


@pytest.mark.parametrize(("rate", "accused"), [("12", 1), ("687", 0), ("344", 0)])
def test_a_table_of_one_row_is_judged_where_all_sizes_are_named(rate, accused):
    """344 counts multiply-adds as one."""
    text = f"| M | N | K | Time (ms) | TFLOPS |\n|-|-|-|-|-|\n| 4096 | 4096 | 4096 | 0.2 | {rate} |\n"
    assert len(audit_text(text).accusations) == accused


MOVED = "# Softmax on a V100\n\n| size | time (ms) |\n|-|-|\n| 4096x4096 | {} |\n\n# Bytes\n\nMatrix: 4096×4096\n\n- Total traffic: 402.7 MB\n"  # noqa: E501
SIZES = "In bf16 first.\n\n# Sizes\n\n| name | Memory |\n|-|-|\n| naive | 3.7 GB |\n| INT4 | {} GB |\n"
LINK = "One A100 on PCIe 4.0 x16.\n\n| what | GB/s |\n|-|-|\n| H2D | {} |\n"
ASKED = [
    ("link", LINK, "41.2", "25.2"),
    ("MFU", "Training a 7B model on 8x A100: 24,000 tokens/s, an MFU of {}.", "58 %", "40 %"),
    ("decoding", "Llama-7B in fp16 on one RTX 3090, no offloading: {} per token.", "6.1 ms", "18.1 ms"),
    ("throughput", "With batch size 32 one pass of the server takes 41 ms, so {} images/s.", "1,280", "780"),
    ("sparse peak", "The bf16 peak of an A100 is {} TFLOPS.", "624", "312"),
    ("total", "| part | ms |\n|-|-|\n| a | 10 |\n| b | 21 |\n| c | 32 |\n| total | {} |\n", "83", "63"),
    (
        "intensity",
        "| n | GFLOPS | GB/s |\n|-|-|-|\n| a | 98.9 | 1187 |\n| b | 118.5 | 1422 |\n| c | 119.8 | 1437 |\n"
        "| d | {} | 1461 |\n",
        "181.8",
        "121.8",
    ),
    (
        "total",
        "On average ours is {} faster.\n\n| model | speedup |\n|-|-|\n| a | 1.8x |\n| b | 2.1x |\n| c | 1.6x |\n",
        "2.9x",
        "1.9x",
    ),
    (
        "memory bandwidth",
        "# Decode on an L40S\n\n| KV read | latency | effective bandwidth |\n|-|-|-|\n| 8.59 GB | {} GB/s |\n",
        "8.10 ms | 1060",
        "11.5 ms | 747",
    ),
    ("tokens/s", "The run took 183.4 s.  It made 241,300 tokens, {} tokens/s.", "1,613", "1,316"),
    ("energy", "Each of the four cards drew 700 W for 10 hours, {} kWh in all.", "38", "28"),
    ("memory", "Adam keeps 16 bytes per parameter. For a 7B-parameter model that is {} GB.", "172", "112"),
    ("ratio", "Plain decoding runs at 31.5 tokens/s. A draft makes it 84.7 tokens/s, a {}x speedup.", "3.26", "2.69"),
    ("ratio", "We measured 96 TOPS and 271 TOPS in INT8 and 84 TFLOPS in FP16: {}x faster.", "4.2", "3.2"),
    ("ratio", "It serves 61 instead of 34 users, {}x as many.", "2.8", "1.8"),
    ("ratio", "Kernel time fell from 812 µs to 455 µs. That is a speedup of {}.", "2.18", "1.78"),
    ("total", "Queueing takes 14 ms, prefill 212 ms, decode 1480 ms; in total {} ms.", "1915", "1706"),
    ("total", "We saw 1.31x, 1.18x, 1.44x and 1.09x, a geometric mean of {}x.", "1.49", "1.25"),
    (
        "product",
        "Batch 4, accumulation 8, 16 GPUs, sequence length 2048: {} tokens per step.",
        "2,097,152",
        "1,048,576",
    ),
    ("product", "On 8 H200 it makes 3,620 tokens/s, i.e. {} tokens/s per GPU.", "552.5", "452.5"),
    ("product", "At batch 64 it makes 3,840 tokens/s, so each user sees {} tokens/s.", "80", "60"),
    ("limit", "An A6000 cannot exceed 59 tokens/s. We get {} tokens/s.", "74", "47"),
    (
        "headline",
        "INT4 is up to {}x faster.\n\n| M | a us | b us | gain |\n|-|-|-|-|\n| 1 | 96.4 | 28.1 | 3.43x |\n"
        "| 8 | 97.0 | 29.9 | 3.24x |\n| 32 | 99.8 | 40.6 | 2.46x |\n",
        "4.43",
        "3.43",
    ),
    (
        "proportion",
        "|x|algbw GB/s|busbw GB/s|\n|-|-|-|\n|a|92.0|161.0|\n|b|195.7|342.5|\n|c|254.1|{}|\n|d|272.4|476.7|\n",
        "384.6",
        "444.7",
    ),
    ("traffic", MOVED, "0.177", "0.577"),
    ("compression", SIZES, "0.5", "1.0"),
    (
        "compression",
        "Stored in bf16.\n\n# Later\n\nINT4 weights: compress the weights by {} (memory savings)\n",
        "8x",
        "4x",
    ),
    ("total", "| run | a ms |\n|-|-|\n| 1 | 8.0 |\n| 2 | 8.1 |\n| 3 | 8.2 |\n| mean | {} |\n", "8.4", "8.1"),
    ("limit", "A link carries at most 12.5 GB/s over InfiniBand. RDMA writes reach {} GB/s.", "14.8", "11.9"),
    ("bus bandwidth", "All-reduce on 8 GPUs: algorithm bandwidth 282 GB/s, bus bandwidth {} GB/s.", "561", "493"),
    ("cost", "One H100 costs $2.10 per GPU-hour. At 5,200 tokens/s that is ${} per million tokens.", "0.21", "0.11"),
    (
        "tokens/s",
        "requests done: 900\n\n```\ngenerated tokens: 180,000\nwall time: 90.0 s\nall done\n\nspeed {} tok/s\n```",
        "2444",
        "2000",
    ),
    (
        "retold",
        "| model | a ms | b ms |\n|-|-|-|\n| 7B | 21.0 | 14.0 |\n| 13B | 40.0 | 20.0 |\n\n13B is {}x faster.\n",
        "2.6",
        "2.0",
    ),
    (
        "headline",
        "It reaches {} tokens/s.\n\n| n | tokens/s |\n|-|-|\n| a | 410 |\n| b | 505 |\n| c | 480 |\n",
        "720",
        "505",
    ),
    ("work", "Attention, non-causal: B=4, H=32, S=4096, D=128 is {} TFLOP.", "2.2", "1.1"),
    ("link", "An A100-PCIe in a x16 Gen4 slot.\n\nWith pinned buffers the upload sustains {} GB/s.\n", "43.7", "25.2"),
    ("decoding", "# One user, A100 80GB\n\nQwen-72B in INT8, batch size 1: {} tok/s.", "61", "24"),
    (
        "memory",
        "One RTX 4090, nothing offloaded to the host.\n\n| method | peak GiB |\n|-|-|\n| LoRA | 16.3 |\n"
        "| full | {} |\n",
        "27.9",
        "21.7",
    ),
    (
        "memory bandwidth",
        "NVIDIA L4. Arrays of 2 GiB, far more than the 48 MB L2.\n\n| test | effective GB/s |\n|-|-|\n| copy | 247 |\n"
        "| triad | {} |\n\nA T4 copies at 241 GB/s.\n",
        "361",
        "251",
    ),
    (
        "headline",
        "| tokens | before | after |\n|-|-|-|\n| 1 | 214 | 171 |\n| 8 | 689 | 622 |\n| 64 | 742 | {} |\n"
        "| 256 | 846 | 744 |\n\nIt is faster at every batch size, with the largest gain, 1.25x, at 1 token.\n",
        "801",
        "701",
    ),
]


@pytest.mark.parametrize("rule, text, wrong, right", ASKED, ids=[case[0] for case in ASKED])
def test_lines_far_apart_are_asked_about(rule, text, wrong, right):
    assert [(f.verdict, f.rule) for f in audit_text(text.format(wrong), "x.md").findings] == [("question", rule)]
    assert audit_text(text.format(right), "x.md").findings == ()


@pytest.mark.parametrize(
    "text",
    [
        # Another clause has a share of its own.
        "On an A100 it moves 210 GB/s of the 1555 GB/s; the fused version reaches 70 % of it.",
        # A rank's bytes are a part of what the bus carries.
        "All-gather on 8 H100, NCCL.\n\nWith 16 MiB per rank it takes 0.42 ms (279 GB/s bus).",
        # Products that are not carried out.
        "T4, fp32. Winograd: 1.10 ms, 13.2 TFLOPS if you count the direct products.",
        # A pass with a draft makes several tokens.
        "# EAGLE drafts\n\n| | main | PR |\n|-|-|-|\n| time per pass | 46.1 ms | 53.5 ms |\n"
        "| tokens per pass | 1 | 3.42 |\n| tok/s | 21.7 | 64.0 |\n",
        # The format stands within a word.
        "B200\nOperation: gemm_ue4m3xe2m1_f32_bf16\nA=fe2m1 B=fe2m1 C=bf16\nMath: 6500000.0 GFLOP/s",
        "[titan] H200, peak FLOPS for the MFU: 9.890e+14\n[titan] tps: 7,000  tflops: 405.1  mfu: 40.96%",
    ],
)
def test_what_explains_itself_is_not_accused(text):
    assert audit_text(text, "x.md").accusations == ()


@pytest.mark.parametrize("most, accused", [("9.4", 0), ("7.1", 1)])
def test_three_percentiles_of_one_line_are_in_order(most, accused):
    assert len(audit_text(f"search: p50 4.1 ms, p90 8.2 ms, p99 {most} ms\n", "x.log").accusations) == accused


def test_samples_over_steps_are_the_batch():
    text = "train_batch_size = 32\ntrain_samples_per_second = {}\ntrain_steps_per_second = 0.50\n"
    asked = [len(audit_text(text.format(n), "x.log").findings) for n in ("16.0", "23.0")]
    assert asked == [0, 1]


RUNS = [(1, 2432, 21.05), (2, 4689, 10.92), (3, 4762, 13.61), (4, 7171, 7.14)]


@pytest.mark.parametrize(
    "rule, text, wrong, right",
    [
        ("order", "sort/2^20\n    time:   [{} µs 98.61 µs 98.83 µs]\n", "118.45", "98.45"),
        ("order", "  90.000%    8.12ms\n  99.000%   {}ms\n  99.900%   14.63ms\n  99.990%   21.40ms\n", "24.63", "9.46"),
        (
            "proportion",
            "| audio (s) | wall (s) | RTFx |\n|-|-|-|\n| 19452 | 62.1 | 313.2 |\n| 19230 | 63.4 | 303.3 |\n"
            "| 9420 | 31.8 | {} |\n| 19350 | 70.9 | 272.9 |\n",
            "246.2",
            "296.2",
        ),
        (
            "ratio",
            "a: 400 tokens (40.0 %)\nb: 250 tokens ({} %)\nc: 200 tokens (20.0 %)\nd: 150 tokens (15.0 %)\n",
            "35.0",
            "25.0",
        ),
        ("bandwidth", "[  5]   0.00-10.00  sec  41.2 GBytes  {} Gbits/sec\n", "45.4", "35.4"),
        (
            "throughput",
            "duration: 120 s\nnumber of transactions actually processed: 2214870\ntps = {} (excluding connections)\n",
            "23994.4",
            "18457.3",
        ),
        (
            "tokens/s",
            "[BENCHMARK] total_latency(ms) 41270.55\n[BENCHMARK] token_throughput(token/sec) {}\n\n"
            "[BENCHMARK] num_output_tokens 153600\n",
            "4721.0",
            "3721.8",
        ),
        ("memory", "- 1.3 B parameters\n- 28 bytes per parameter\n- so {} GB in every step\n", "46.4", "36.4"),
        (
            "tokens/s",
            "Benchmark duration (s): 118.42\nTotal input tokens: 512000\nTotal generated tokens: 128000\n"
            "Request throughput (req/s): 8.44\nTotal Token throughput (tok/s): {}\n",
            "4323.59",  # of the inputs alone
            "5404.49",
        ),
        (
            "order",
            "50.00 percentile latency (ns)   : 6988410\n95.00 percentile latency (ns)   : 11780224\n"
            "99.00 percentile latency (ns)   : {}\n",
            "11420118",
            "13420118",
        ),
        (
            "order",
            "| kernel | roof_TFLOPS | measured_TFLOPS |\n|-|-|-|\n| norm | 4.19 | {} |\n| decode | 26.80 | 21.90 |\n"
            "| gemm | 989.40 | 735.00 |\n",
            "4.61",
            "3.61",
        ),
        (
            "peak",
            "$ bench.py --dtype bf16\ndevice: NVIDIA A100-SXM4-80GB\n\n  seqlen   eager TFLOPS   flash TFLOPS\n"
            "  2048     22.0           168.7\n  4096     22.7           {}\n  8192     23.1           191.6\n\n"
            "max abs diff to float32: 3.9e-3\n",
            "385.4",
            "185.4",
        ),
        (
            "compression",
            "The 70.6 billion parameters became 4-bit integers with an fp16 scale for each 128. The whole checkpoint "
            "is now {} GB on disk.",
            "27.4",
            "36.9",
        ),
        (
            "total",
            '[cols="3,1"]\n|===\n| Item | GB\n\n| States | 26.0\n| Activations | 21.4\n| Layers in flight | 3.2\n'
            "| Context | 2.4\n| *Sum* | *{}*\n| Usable on the card | 79.0\n|===\n",
            "63.0",
            "53.0",
        ),
        (
            "peak",
            "One H100 SXM5. No structured sparsity in any row.\n\n| kernel | TFLOP/s |\n|-|-|\n| BF16 dense | 792 |\n"
            "| FP8 e4m3 dense | {} |\n",
            "2,340",
            "1,340",
        ),
        (
            "total",
            "The geometric mean of the speedups is {}.\n\n| matrix | old (ms) | new (ms) | speedup |\n|-|-|-|-|\n"
            "| a | 3.412 | 2.861 | 1.19 |\n| b | 1.244 | 1.038 | 1.20 |\n| c | 2.214 | 0.762 | 2.91 |\n",
            "1.82",
            "1.61",
        ),
        (
            "share of peak",
            "All on 64 H100 SXM.\n\nThat makes 406 TFLOP/s per GPU. Against the dense BF16 peak the model FLOP "
            "utilisation is {} %.",
            "20.5",
            "41.0",
        ),
        (
            "occupancy",
            "GPU: A100\n| kernel | registers | threads per block | occupancy |\n|-|-|-|-|\n| a | 128 | 256 | {} |\n"
            "| b | 32 | 256 | 100 % |\n",
            "50 %",
            "25 %",
        ),
        (
            "traffic",
            "GPU: RTX 4090\nkernel  total per launch  median\ncopy    2.00 GiB          2.31 ms\n"
            "triad   3.00 GiB          {} ms\nadd     3.00 GiB          3.45 ms\n",
            "2.84",
            "3.46",
        ),
        (
            "share of peak",
            "gpu: A100-SXM4-80GB\nprecision: bf16\nmodel_tflops_per_gpu: 138.3\npeak_tflops_per_gpu: 312\n"
            "mfu_percent: {}\n",
            "48.3",
            "44.3",
        ),
        (
            "rate",
            "| M | N | K | old (us) | new (us) | TFLOPS |\n|-|-|-|-|-|-|\n"
            "| 4096 | 4096 | 4096 | 201.4 | 193.2 | 711.4 |\n"
            "| 8192 | 8192 | 8192 | 1561.0 | 1497.6 | 734.2 |\n| 16384 | 8192 | 8192 | 3080.5 | 2964.1 | 741.9 |\n"
            "| 8192 | 28672 | 4096 | 2741.8 | 2618.3 | 734.9 |\n| 4096 | 14336 | 4096 | 702.9 | 671.5 | {} |\n",
            "736.4",  # all others agree to the last digit
            "716.4",
        ),
        (
            "rate",
            "causal,batch,heads,seqlen,headdim,ms,tflops\n0,16,16,1024,128,0.279,492.6\n0,8,16,2048,128,0.489,562.1\n"
            "0,4,16,4096,128,0.872,630.5\n1,16,16,1024,128,0.181,{}\n1,8,16,2048,128,0.294,467.5\n"
            "1,4,16,4096,128,0.512,536.9\n",
            "759.3",  # of the whole square
            "379.7",
        ),
    ],
)
def test_what_tools_print(rule, text, wrong, right):
    name = (
        "x.md"
        if text[0] in "-|"
        else "x.yaml"
        if "seed:" in text or "usd" in text
        else "x.csv"
        if text[0] == "c"
        else "x.log"
    )
    assert [f.rule for f in audit_text(text.format(wrong), name).findings] == [rule]
    assert audit_text(text.format(right), name).findings == ()


def test_plain_keys_behind_nested_ones_keep_their_lines():
    runs = "".join(f"  - a: {n}\n    wall_seconds: {time}\n    images_per_second: {rate}\n" for n, rate, time in RUNS)
    found = audit_text(f"suite: x\nruns:\n{runs}notes: the images_per_second of each\n", "x.yaml").findings
    assert [f.line for f in found] == [11]


@pytest.mark.parametrize(
    "text, of",
    [
        (
            "Benchmark duration (s): 70.12\nTotal input tokens: 217393\nTotal generated tokens: 198587\n"
            "Total token throughput (tok/s): 6932.40\n",
            "(217393 + 198587) ÷ 70.12 s = 5932 tokens/s",
        ),
        (
            "The 7B model trains in BF16 on 64 H100 SXM GPUs. It runs at 640,000 tokens/s, an MFU of 58.1 %.\n",
            "an MFU of 42.4 %",
        ),
    ],
)
def test_a_question_shows_the_arithmetic_that_comes_nearest(text, of):
    (found,) = audit_text(text).findings
    assert of in found.message


@pytest.mark.parametrize(
    "text",
    [
        # The text below says that a step makes several tokens.
        "| prompt tokens | ITL (ms) |\n|-|-|\n| 128 | 6.1 |\n\n"
        "Llama-3.1-8B in BF16 (16.1 GB), A100-SXM4-80GB, batch size 1, with EAGLE drafts.",
        # Full duplex: both directions together.
        "pinned copies, gen4 x16 is 31.5 GB/s per direction\nup and down at once 48.9 GB/s summed (24.1 and 24.8)\n",
        # Master weights and moments are no other format of the weights.
        "The fp16 weights take 26.0 GB; with fp32 master weights and Adam it is 208 GB.",
        # A bound is no measurement, nor is what a brochure says.
        "Reading 1.41 GB on the H200 can never be faster than 294 microseconds. We measured 402, thus 3.51 TB/s.",
        "It is 41.0 % if one divides by the 900 GB/s of the brochure, or 82.0 % of the 450 GB/s per direction.",
        # Somebody's bill beside the GPUs'.
        "wall clock 20.0 h\n8 GPUs, 2.00 USD per GPU hour\nGPU bill 320.00 USD\nstorage 41.30 USD\n",
        # A utilisation is of a peak, not of the table; a launch is a part of the row's time.
        "| nodes | GPUs | tok/s/GPU |\n|-|-|-|\n| 2 | 16 | 1012 |\n| 8 | 64 | 980 |\n| 16 | 128 | 911 |\n\n"
        "Model utilisation is 41.2 % on 2 nodes. It is only 37.1 % on 16.",
        "| n | us |\n|-|-|\n| 128 | 14.7 |\n| 256 | 21.0 |\n| 512 | 60.1 |\n\n"
        "At n=128 the launch (9 us) is most of the 14.7 us.",
        # Of several rates one is the bytes' in their time; a node is of eight GPUs, not of the four above.
        "NVLink is 900 GB/s per GPU (both ways), the NVMe does about 20 GB/s, so that the 300 GB are loaded in 15 s.",
        "8 x H100 a node.\n\n- four GPUs are the least\n\nPrices: 2.00 USD per GPU hour, thus 16.00 USD per hour.",
        # The total has more than the GPUs in it, a range is no pair, a step no sample.
        "wall clock 20.0 h\n8 GPUs, 2.00 USD per GPU hour\nGPU bill 320.00 USD\nsupport 31.00 USD\ntotal 351.00 USD\n",
        "Buckets between 40 and 400 MB made no difference. Turning one NIC off cost another 4 %.",
        "micro_batch: 4\nstep_time_s: 2.90\nforward_backward_s: 2.61\n",
        # The rate is of one of several times.
        "```\nwork: 16384 x 2 x 3 x 1024 x 2816 = 0.2834 TFLOP\nrouter gemm   0.031 ms\nup gemm       0.250 ms\n"
        "down gemm     0.110 ms\ngemm rate     787 TFLOP/s\n```\n",
        # The two of the first paragraph are meant; hours are nothing that counts.
        "The old kernel took 812 us for it, the new one takes 603 us.\n\nSo the new one needs 26 percent less time "
        "than the old one, and forward plus backward went from 1,540 to 1,331 us.",
        "With one failure every 9 hours and 1 minute lost for each we lose little; the lost work (15 minutes on "
        "average with one every half hour) is more.",
        # Two others of the sentence make the rate; two parts make the saving; both directions, and no limit.
        "Reads are limited by the disk: 95k ops/s at 168 us (76k reads/s go to the SSD, 4 KiB each, 311 MB/s).",
        "Weights of one layer: 128 MiB dense; compressed 64 MiB of values plus 8 MiB of indices, 43.75 % less.",
        "One 100GbE port each. So 191.9 Gbit/s through one port, counting both directions, 100 each way.",
        "Two machines joined by a 25 Gbit/s link.\n\nThe link isn't the limit: the server sends 3.63 Gbit/s of HTTP.",
        "20 executors x 8 cores, 64 GiB each, and the input of one day (1.84 billion events, 736 GB of JSON).",
        # Buffers are in no format.
        "The cache in fp8 takes half of what it takes in bf16. The buffers shrink from 1.9 GiB to 0.6 GiB, 68 % less.",
        # Weights that do not fit.
        "The 66B model in FP16 does not fit on one A100 80GB.",
        # The column beside is a part of the whole.
        "| build | kernel (us) | end-to-end speedup |\n|-|-|-|\n| main | 84.0 | 1.00x |\n| PR | 42.1 | 1.12x |\n",
        # A reduction below nothing is a rise.
        "op,eager_us,fused_us,speedup,reduction_pct\na,40.0,20.0,2.00,50.0\nb,90.0,30.0,3.00,66.7\n"
        "c,50.0,40.0,1.25,20.0\nd,201.0,202.2,0.99,-0.6\n",
        # Figures above the memory's are said to be the cache's.
        "# Why does a copy run at 2.4 TB/s on an RTX 4090?\n\nThe small buffers stay in L2: that is not DRAM "
        "bandwidth. If I flush the L2 in between, I see 880 GB/s.",
        # A cap is no length; one of two lengths makes no total.
        "Maximum concurrency for 4,096 tokens per request: 30.2x\nNamespace(random_input_len=512, num_prompts=400)\n"
        "Successful requests: 400\nTotal input tokens: 204800\nRequest throughput (req/s): 4.10\n"
        "Total token throughput (tok/s): 2930.4\n",
        # The text states its N, the time that is added is none of a batch, a card's memory is no total.
        "# Our 3B model on H100 SXM in bf16\n\nTraining runs at 10,400 tokens/s on one GPU.\n\n"
        "MFU: with N = 3.24 B and 6N FLOPs per token that is 20.4%.",
        "| batch | latency (ms) | images/s |\n|-|-|-|\n| 8 | 4.0 | 2,000 |\n| 32 | 13.0 | 2,462 |\n\n"
        "The copies of a batch of 32 add 2.2 ms: we go from 2,462 to 2,105 images/s.",
        "It doesn't fit one 80 GB card; TP=2 gives 61.2 GB per GPU.",
        # Shares of a rate above the list; runs of which a table has one.
        "Percent of the nominal rate, one way:\n\n- PCIe (31.5 GB/s): 80% up, 83% down; NVLink (56.25 GB/s): 92%\n",
        "Five runs in ms: 7.91, 6.22, 6.20, 6.21, 6.20; the dense one.\n\n| path | ms |\n|-|-|\n| dense | 6.20 |\n"
        "| sparse | 3.90 |\n",
        # What is worked out to be refuted; sentences that give another share than the one of the peak.
        "A reader multiplied 93.4 GB by 141 tokens/s. A dense model would need more than the H200's 4.8 TB/s.",
        "Going from 700 W to 500 W costs 10.8 % of the tokens.",
        "- 6,657 tok/s per MI300X, 13.0B parameters, BF16 training\n- forward and backward alone are 50.5 %, which is "
        "*not* the MFU",
        # A rate of training that no single stream could have; thousands of parameters have a comma.
        "22B model on 64 A100-80GB in BF16\n\n| schedule | tok/s, all GPUs | bubble |\n|-|-|-|\n"
        "| 1F1B | 64,063 | 9.9 % |\n| interleaved | 66,737 | 5.2 % |\n",
        "8 x H100 SXM | params 1,558M | bf16\nmfu = 6 * params * tok/s / (8 * 989.4e12)\n"
        "step 3 | 360,831 tok/s | mfu 42.6%\n",
        # GPU-hours count no GPUs.
        "Trained for 5.5 days on 64 GPUs: 8,448 GPU-hours.",
        # a bound of two; what is read besides
        "One L4. The weights take at least 53.5 ms (A) and 26.8 ms (B) to read. "
        "B also reads 1.07 GB of FP16 cache per step, 245 GB/s in all.",
        # two runs, of which one has a part more
        "| | plain | speculative |\n|---|---|---|\n| passes of the 70B model per step | 1 | 1 |\n"
        "| time of that pass | 17.6 ms | 18.1 ms |\n| step time | 17.6 ms | 21.5 ms |",
        "saving the checkpoint (13.48 GB bf16 weights, 80.88 GB fp32 master + moments)",
    ],
)
def test_nothing_is_asked_where_the_text_answers(text):
    assert audit_text(text, "x.md").findings == ()


def test_a_sparse_product_is_not_rated_by_what_it_really_multiplied():
    text = (
        "gpu: A100-SXM4-80GB\ncounting: 2*m*n*k over the time, zeros included; the sparse peak is 624 TFLOP/s\n"
        "results:\n"
        "  - kernel: cusparselt 2:4\n    time_ms: 2.551\n    tflops: 431.0\n    multiplications_{}_gflop: 549.8\n"
    )
    assert audit_text(text.format("really_done"), "x.yaml").accusations == ()
    assert len(audit_text(text.format("counted").replace("sparse", "dense"), "x.yaml").accusations) == 1


def test_links_are_not_counted_twice_where_the_bandwidth_is_a_gpus():
    text = (
        "#  Rank  0..7 on node h100-14, NVIDIA H100 80GB HBM3, NVLink 4 (18 links, 450 GB/s per direction{})\n\n"
        "- At 8 GiB each GPU moves 369 GB/s in each\n  direction, 82% of its 450 GB/s of NVLink.\n"
    )
    assert audit_text(text.format(" and GPU"), "nccl.txt").accusations == ()
    assert len(audit_text(text.format(""), "nccl.txt").accusations) == 1


@pytest.mark.parametrize(
    "text",
    [
        "# Is 4.1 TB/s of my RTX 4090 real?\n\nNo, the buffer fits in L2.\n",
        "It is called 80 times a step. The kernel saves 32.8 us per layer, times 80 layers = 2.6 ms.\n\n"
        "| batch | old us | new us |\n|---|---|---|\n| 1 | 35.2 | 28.0 |\n| 8 | 335.2 | 326.0 |\n| 9 | 94.4 | 76.9 |\n",
        "Peak of the card's memory: 1152 GB/s with the overclock.\n\n    stock  931 GB/s   92.4% of 1008\n",
        "# Decode, Mistral-7B FP16 (7.24 B params) on an A10\n\nBatch 1. Launches need 4 ms of CPU time a step.\n",
        "fp16\n\n[rtx4090]\nbatch = 1\nunet_s = 3.70\nimage_s = 4.01\n",
        "RTX 4090, 82.6 TFLOP/s in FP32 at 2.52 GHz. Locked:\n\n    16384 × 2 × 2.88 GHz = 94.4 TFLOP/s\n\n"
        "| n | TFLOP/s |\n|---|---|\n| 4096 | 84.1 |\n| 8192 | 86.6 |\n| 16384 | 86.9 |\n",
        "RTX 4090, one stream. Of Qwen3-30B-A3B 3.3 of 30.5 B parameters are active.\n\n"
        "| model | size | params | test | t/s |\n|---|---|---|---|---|\n"
        "| qwen3moe 30B.A3B Q4_K | 17.28 GiB | 30.53 B | tg128 | 188.42 |\n",
        # of a pin, not what is 88 % of the peak
        "RTX 3090, 24 GB.\n\nTriad reaches 88.0 % of the theoretical 936 GB/s (384 bit x 19.5 Gbit/s / 8).\n",
        # a difference, by chance a thousand times a row's time
        "A100, kernels in us.\n\n| rows | before us | after us |\n|---|---|---|\n| 4096 | 197.0 | 61.5 |\n"
        "| 8192 | 391.0 | 120.4 |\n\nOf 8192 rows a step saves 54 × (391.0 - 120.4) us = 14.6 ms; it went "
        "from 135.0 ms to 120.4 ms.\n",
        # the share is of the other figure, which has no unit
        "Tesla T4, 65 TFLOP/s in FP16 on the tensor cores.\n\nMy GEMM does 11.8 TFLOP/s, cuBLAS 39.0 (60 % of peak).\n",
        # of the row's batch, not that of the text
        "Mistral-7B in FP16, weights 14.5 GB, on an L4. At batch 1 it is bound by memory.\n\n"
        "| batch | decode tok/s |\n|---|---|\n| 1 | 19 |\n| 2 | 36 |\n| 8 | 130 |\n",
        # a limit that the sentence says it passes
        "The weights take 20 ms, so without drafts the limit is 50 tok/s. With four drafts we get 81 tok/s.\n\n"
        "81 tok/s, well above the 50 tok/s limit, is what counts.\n",
        # a step of 983,040 tokens is no slip of a million
        "".join(
            f"iter {n}: time {ms}ms, {983040 / ms * 1e3:,.0f} tok/s\n"
            for n, ms in ((1, 8571.3), (2, 8569.1), (3, 9574.4), (4, 8580.2))
        ),
        # what is left is no sum
        "Of 48 GB we may use 44 GB, minus 14 GB of weights, minus 2 GB for graphs leaves 28 GB a GPU, 56 GB together.",
        # parts of a sum, of which the share is of the whole
        "FP16 needs 29.1 GB. The new one has 13.2 B weights in INT8 plus 0.67 B in FP16, 14.6 GB in all, 50 % smaller.",
        # worked out at the memory's peak; a bound beside what was measured; a ratio that is denied
        "RTX 4090, 1008 GB/s.\n\n| rows | ours us | torch us |\n|---|---|---|\n| 64 | 48.1 | 61.0 |\n"
        "| 128 | 83.5 | 99.2 |\n| 512 | 301.0 | 390.4 |\n\n"
        "With 64 rows 41.3 MB are read. That takes 41.0 us at 1008 GB/s, so 64 rows are close.\n",
        "| batch | bound, ms per step | cache, GB |\n|---|---|---|\n| 1 | 7.4 | 0.3 |\n| 8 | 8.2 | 2.1 |\n"
        "| 32 | 11.3 | 8.6 |\n\nMeasured at batch 32: 15.1 ms per step.\n",
        "| format | GB |\n|---|---|\n| BF16 | 14.5 |\n| INT8 | 7.7 |\n| INT4 | 5.4 |\n\n"
        "The INT4 file is 2.69x smaller than BF16, and not 4x.\n",
        "RTX 4090, 1008 GB/s.\n\n| rows | us | GB/s |\n|---|---|---|\n| 512 | 5.0 | 2690 |\n| 8192 | 236 | 910 |\n\n"
        "The first row is above what the DRAM can give, it stays in L2. With an L2 flush 512 rows take 16.1 us.\n",
        "| lane | GB/s |\n|---|---|\n| a | 42 |\n| b | 37 |\n| c | 39 |\n\nLane a moves 42 of 63 GB/s.\n",
        "H100 SXM, 3.35 TB/s.\n\nPeople say 46.7 GB x 189 = 8.8 TB/s is impossible. Two of eight experts are read.\n",
        "| part | s |\n|---|---|\n| host | 4.20 |\n| card | 5.60 |\n| both | 9.90 |\n\n"
        "The host needs 1.2 s for products, 1.1 s for copies and 1.9 s for Adam.\n",
        '{"t": 1700000000, "event": "run_start"}\n{"t": 1700000700, "event": "run_stop"}\n\n'
        "run_start to run_stop, without the warm-up: 600 s\n",
        # 16 ranks, of which the first and the last are listed
        "```\n$ ./alltoall_perf -g 1\n#  Rank  0 Pid 1 on a device 0 NVIDIA H100 80GB HBM3\n#  ... (16 ranks)\n"
        "#  Rank 15 Pid 9 on b device 7 NVIDIA H100 80GB HBM3\n#\n"
        "#       size         count      type   redop    root     time   algbw   busbw #wrong\n"
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)\n"
        "     1048576         16384     float    none      -1    72.88   14.39   13.49      0\n"
        "     2097152         32768     float    none      -1    88.02   23.83   22.34      0\n```\n",
        # the tokens of each of so many experts
        "Grouped GEMM, H100 SXM, FP8.\n\n| experts | tokens / expert | N | K | time (ms) | TFLOP/s |\n"
        "|--:|--:|--:|--:|--:|--:|\n| 8 | 1024 | 14336 | 4096 | 0.871 | 1,105 |\n"
        "| 8 | 2048 | 14336 | 4096 | 1.638 | 1,175 |\n| 8 | 4096 | 14336 | 4096 | 3.173 | 1,213 |\n"
        "| 64 | 512 | 2816 | 2048 | 0.463 | 816 |\n",
        # a difference of two costs
        "| GPU | price per GPU hour |\n|---|---|\n| T4 | $0.35 |\n| L4 | $0.49 |\n| L40S | $1.05 |\n\n"
        "* L4: 11,287 GPU hours, $5,530\n* L40S: 4,221 GPU hours, $4,432\n\n"
        "So the L40S saves $1,098 on the bill of a million hours.\n",
        # the sheet's peak with sparsity
        "A100-SXM4-80GB. An effective rate must be compared with the sparse peak of the data sheet "
        "(624 TFLOP/s FP16, 1248 TOPS INT8).\n\n| M x N x K | dense TOPS | 2:4 effective TOPS |\n|---|---|---|\n"
        "| 8192x8192x8192 | 508 | 796 |\n| 8192x28672x8192 | 506 | 803 |\n| 8192x8192x4096 | 501 | 780 |\n",
        "Price: 256 chips x $4.20 x 24 h = $25,805 per day.\n",
        # two kernels, each with its own time
        "RTX 3090, 936 GB/s.\n\nIs gelu memory bound?\n  8192 x 3072 bf16, read + write = 100.7 MB per call, 119.2 us\n"
        "  (layer_norm: 25.2 MB in 31.3 us)\n",
        # a bound
        "RTX 3090, Qwen2.5-7B (7.62B parameters) in fp16, batch 1. The embedding is not read.\n\n"
        "At 936 GB/s this makes 66.1 tok/s at best.\n",
        # ten products
        "dgemm, n=8192 reps=10 flop=1.0995e+13\ngemm time 14.918 s  ->  737.0 GFLOP/s\n",
        "why does my read kernel show 4.3 TB/s on a 1.55 TB/s card??\n\nA100-SXM4-40GB. "
        "One launch goes 1000 times over the buffer.\n\n  MiB     total us      GB/s\n   64       45,344     1,480\n"
        "  128       95,733     1,402\n  512      387,632     1,385\n 1024      777,510     1,381\n",
        # less in the same time
        "| task | tok/s | vs. baseline |\n|---|---|---|\n| code | 146.0 | 2.50x |\n| random | 45.5 | 0.78x |\n"
        "| chat | 108.8 | 1.86x |\n\nOn random digits you pay 7.5 ms for nothing: 22 % slower than without.\n",
        # of nodes, with two ranks each
        "| nodes | ranks | time s | speed up |\n|--:|--:|--:|--:|\n| 4 | 8 | 2.21 | 4.71 |\n"
        "| 8 | 16 | 0.710 | 14.68 |\n| 16 | 32 | 0.374 | 27.86 |\n\n"
        "Scaling relative to 8 nodes: 16 nodes give an efficiency of 95 %.\n",
        # all tokens are not those of which each takes so long
        "    Max concurrency:                 64\n    Duration (s):                    40.42\n"
        "    Total token throughput (tok/s):  15893.06\n    Mean TPOT (ms):                  10.34\n",
        # worked out in its line
        "world_size 8, seq 2048\nbatch: 8 gpus x 8 seqs x 4 accum x 2048 = 524,288 tokens/step\nbatch 8\n",
        # a column of peaks without a unit; a title that doubts; a reference and partial sums in another format
        "| card | in | acc | ms | TFLOPS | dense peak | of peak |\n|---|---|---|---|---|---|---|\n"
        "| RTX 4090 | fp16 | fp32 | 6.92 | 158.9 | 165.2 | 96% |\n"
        "| RTX 4090 | fp16 | fp16 | 3.63 | 302.9 | 330.3 | 92% |\n\nThe tensor cores do 165 TFLOPS dense.\n",
        "## 303 TFLOPS on a 4090?? somebody counts twice\n\nThe peak of the 4090 is 165 TFLOPS dense in fp16.\n",
        "RTX 4090, fp16 in, fp16 out. The other mode is limited to 165 TFLOPS.\n\nErrors vs float64 grow with K. With "
        "partial sums in fp32 it takes 3.98 ms on the 4090, which is 276.3 TFLOPS.\n",
        # the two figures behind "while" are of another thing
        "The load grows by a factor of 40 while the speed for each user falls from 88.0 to 22.0 tokens/s.\n",
        # the reader of files from memory; what a link can do; a link that a later sentence names
        "The slot of the SSD is PCIe Gen4 x4, so 7.9 GB/s is the most.\n\nYes, 24 GB/s out of a 7 GB/s drive. "
        "All files fit into RAM, so from the second epoch on the drive is idle.\n",
        "L40S, PCIe Gen4 x16.\n\n| loader | s | GB/s |\n|---|---|---|\n| pickle | 6.31 | 2.55 |\n"
        "| mmap | 1.27 | 12.65 |\n"
        "| stream | 1.33 | 12.08 |\n\nThus mmap reaches half of what PCIe Gen4 x16 can do (about 25 GB/s).\n",
        "One CPU with 8 threads takes 2.02 ms (33.2 GB/s). With the copy over PCIe 3.0 x16 it would be 5.51 ms.\n",
        # a bound that the sentence works out is no rate of its MFU
        "A100 40GB, 6.74B params in fp16, batch 1. The loop makes 74.2 tok/s.\n\n2 x 6.74e9 x 74.2 = 1.00 TFLOPS, "
        "thus 0.32% MFU. More than 1555 / 13.48 = 115 tok/s is not possible.\n",
        # caches that nobody empties
        "RTX 4090, 72 MB of L2, 1008 GB/s. I don't flush the cache.\n\n| rows | MB moved | old us | new us | GB/s |\n"
        "|---|---|---|---|---|\n| 1024 | 16.8 | 27.4 | 6.4 | 2621 |\n| 8192 | 134.2 | 612.5 | 146.9 | 914 |\n",
        # a batch that hangs on the row
        "One H100 SXM5, bf16, causal attention forward. The batch size is 16384/S; 16 heads of dimension 128. "
        "FLOPs are 4 S^2 d h b.\n\n| S | b | ms | speed-up |\n|---|---|---|---|\n| 512 | 32 | 0.1762 | 1.00 |\n"
        "| 1k | 16 | 0.2804 | 1.00 |\n",
        # half a thousand tokens; a product of two sizes states neither
        "A100-SXM4 80GB, bf16, attention with 16 heads, head dim 128, non-causal. We keep batch x seqlen = 16k.\n\n"
        "| seqlen | batch | ms | TFLOPs/s |\n|---|---|---|---|\n| 0.5k | 32 | 0.417 | 165 |\n"
        "| 1k | 16 | 0.735 | 187 |\n",
        # one of two utilisations follows
        "| GPUs | tokens/s/GPU | MFU (6N) | with recompute |\n|---|---|---|---|\n| 8 | 2,310 | 29.9% | 39.9% |\n"
        "| 16 | 2,731 | 35.4% | 35.4% |\n| 32 | 2,631 | 34.1% | 34.1% |\n| 64 | 2,514 | 32.6% | 32.6% |\n",
        # a cap beside the draw; energy of each image; a run without a flag is none of the table
        "| cap W | avg W | s/image | J/image |\n|---|---|---|---|\n| 450 | 408 | 3.92 | 1599 |\n"
        "| 350 | 338 | 4.11 | 1389 |\n| 300 | 294 | 4.43 | 1302 |\n| 250 | 247 | 5.18 | 1279 |\n"
        "| 200 | 199 | 7.04 | 1401 |\n\nAt 300 W it saves 19 % energy.\n",
        "| depth | t/s |\n|---|---|\n| 0 | 34.12 |\n| 4096 | 29.36 |\n| 8192 | 25.71 |\n\n"
        "Without `-fa 1` the speed at depth 8192 is 15% lower.\n",
    ],
)
def test_nothing_is_asked_of_what_the_text_knows(text):
    assert audit_text(text, "x.md").findings == ()


_LISTED = (
    "#  Rank  0 Group  0 Pid 1 on n1 device  0 [0x19] H100\n#  Rank  1 Group  0 Pid 1 on n1 device  1 [0x3b] H100\n"
)


@pytest.mark.parametrize(
    "name, text",
    [
        # Not all ranks are listed, and two small figures leave their quotient open.
        (
            "x.log",
            "$ all_reduce_perf -b 8 -e 8G -g 8\n# nThread 1 nGpus 8 minBytes 8\n"
            + _LISTED
            + "#       size         count      type   redop    root    time   algbw   busbw\n"
            "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)\n"
            "        1024           256     float     sum      -1   22.18   0.05   0.08\n"
            "       65536         16384     float     sum      -1   24.67   2.66   4.65\n",
        ),
        # Tables of other columns below remarks; bus bandwidth is no traffic.
        (
            "x.csv",
            "# algbw = size / time\ncollective,ranks,size_MiB,time_us,algbw_GBps,busbw_GBps\n"
            "all_reduce,16,64,412,162.9,305.4\nall_reduce,16,512,2710,198.1,371.5\nall_gather,16,64,247,271.7,254.7\n"
            "all_gather,16,512,1521,353.0,330.9\nall_gather,16,4096,11430,375.8,352.3\nalltoall,16,64,1010,66.4,62.3\n"
            "# latency\ncollective,ranks,scope,time_us\nall_reduce,8,intra,17.2\nall_gather,8,intra,14.8\n"
            "# one port\nrail,0,1,2,3,4,5,6,7\nGBps,48.9,48.9,49.0,48.9,48.8,48.9,48.9,49.0\n",
        ),
        (
            "x.yaml",
            "model:\n  vocab: 50304\nhardware:\n  gpus_total: 32\n  peak_tflops_per_gpu: 312\n"
            "parallelism: {dp: 32, tp: 1, pp: 1, zero_stage: 1}\n"
            "batch:\n  global_tokens: 1048576\nthroughput:\n  mfu: 0.418\nrun:\n  wall_hours: 13.78\n  gpu_hours: 441\n"
            "eval:\n  piqa_acc: 0.706\nnotes: >\n",
        ),
    ],
)
def test_nothing_is_asked_of_what_a_tool_printed(name, text):
    assert audit_text(text, name).findings == ()
