"""The published formulas: one line for each, over the names of names.py."""

import math
from collections.abc import Callable
from dataclasses import dataclass

_WARP = 32
# Warps that a multiprocessor holds (CUDA C++ Programming Guide, "Compute Capabilities").
HOLDS = {(7, 0): 64, (7, 5): 32, (8, 0): 64, (8, 6): 48, (8, 7): 48, (8, 9): 48, (9, 0): 64, (10, 0): 64, (12, 0): 48}
_OPEN_LOOP = r"open.loop|poisson|rate.limit|think_?.?time|target rate"


def _resident(registers: float, threads: float, most: float) -> float:
    """The share of a multiprocessor's warps that its 65,536 registers leave; a warp has them in steps of 256."""
    warps = math.ceil(threads / _WARP)
    blocks = 65536 // (math.ceil(registers * _WARP / 256) * 256) // warps if registers else most // warps
    return min(blocks, most // warps) * warps / most


FUNCTIONS: dict[str, Callable[..., float]] = {
    f.__name__.strip("_"): f for f in (math.exp, math.log, math.ceil, math.floor, min, _resident)
}


ASK = 1 << 20


@dataclass(frozen=True)
class Formula:
    """`text`: "name = expression" or "<=", with alternatives between bars, of which the first is needed.

    `sure`: how many other figures must keep it that one of a row or block is accused. `fit`: how many must keep it at
    all, where it is a model. `slack`: the share by which a figure may be off; `far`: by which one is told. `unless`:
    words of the report that make it silent, `keys`: of a key. `reach`: "row", "block" or "report".
    """

    rule: str
    text: str
    sure: int = 0
    slack: float = 0.01
    far: float = 0.0
    fit: int = 0
    unless: str = ""
    reach: str = "report"
    keys: str = "(?!)"


_DROPPED = r"shared expert|(?<!no token )dropp"
_TREE = r"(?<!no )(?<!not )\btree[ -](?:draft|att|verif|size|depth|width|node|of|with)|(?<!no )draft tree"
_RESUMED = "resum|ramp|warm-?up batch|epoch|padd"
_STATISTIC = r"\b(?:p\d+|mean|avg|average|median|max|min|std|total|all)\b"
FORMULAS = (
    # Training: batches, ranks, tokens (Narayanan et al. 2021, arXiv:2104.04473, for the pipeline's bubble).
    Formula("batch", "global_batch = micro * accum * dp", unless="ramp|warm-?up batch"),
    Formula("batch", "global_batch = micro * accum * world", sure=ASK, unless=r"ramp|tensor|pipeline|\btp\b|\bpp\b"),
    Formula(
        "ranks",
        "world = tp * pp * dp | tp * pp * dp * cp | tp * pp * dp * ep | tp * pp | dp * pp | tp * dp | tp | dp",
        sure=ASK,
        slack=0,
    ),
    Formula("tokens", "samples_seen = steps * global_batch", sure=ASK, slack=0, fit=3, reach="row", unless=_RESUMED),
    Formula("tokens", "tokens_seen = steps * step_tokens", sure=ASK, unless=_RESUMED),
    Formula("tokens", "tokens_seen = steps * global_batch * seq_len", sure=ASK, unless=_RESUMED),
    Formula(
        "perplexity",
        "ppl = exp(nll) | 2 ** nll",
        sure=2,
        slack=0.04,
        far=0.1,
        reach="row",
        unless="label.smooth|per.byte|per.word|z.loss|aux|moe",
    ),
    # Models.
    # Of a peak with its unit and without.
    Formula("MFU", "mfu = gpu_flops / 1000000000000 / peak_flops", sure=ASK, slack=0.03, reach="block"),
    Formula("MFU", "mfu = gpu_flops * 1000000000000 / peak_flops", sure=2, slack=0.03, reach="row"),
    Formula(
        "routing",
        "expert_load = layer_tokens * topk / experts | ceil(layer_tokens * topk / experts) | "
        "floor(layer_tokens * topk / experts) | ep * layer_tokens * topk / experts | layer_tokens / experts",
        sure=2,
        unless=rf"{_DROPPED}|padd|align|capacity|(?:activ\w+|hit|used) experts|experts (?:are )?(?:hit|used)",
    ),
    Formula("remaining time", "eta = (last_step - step_now) * step_seconds", slack=0.03, far=0.3, fit=2, reach="row"),
    # Serving (vLLM's log; Leviathan et al. 2023, arXiv:2211.17192, for the expected length).
    Formula("tokens/s", "output_rate = tokens_out / benchmark_time", far=0.05, reach="block"),
    Formula("tokens/s", "total_rate = (tokens_in + tokens_out) / benchmark_time", far=0.05, reach="block"),
    Formula("concurrency", "concurrency = cache_tokens / longest", unless="sliding|hybrid"),
    Formula(
        "latency",
        "e2e = ttft + (output_tokens - 1) * tpot | ttft + output_tokens * tpot",
        slack=0.15,
        reach="row",
        keys=_STATISTIC,
    ),
    Formula("speculation", "accepted_length <= drafted + 1", unless=_TREE),
    Formula(  # of one sequence, where there is a draft at all
        "speculation",
        "emitted <= drafted + 1",
        unless=rf"{_TREE}|\A(?!(?s:.*)(?:draft|specul))|medusa|beam|candidates|concurren|"
        r"(?<!one )(?<!single )\b(?:users|streams)|(?:batch|\bbs)(?!(?:[ _-]size)?(?: of| is|[ :=_-])*(?:1|one)\b)",
    ),
    # Both are sums of the requests' times over the time of the benchmark (sglang, TensorRT-LLM, siege).
    # GPUs (Nsight Compute's metrics; the roofline of Williams et al. 2009).
    Formula("occupancy", "occupancy <= resident(registers, block_threads, warps_per_sm)", slack=0.03),
    Formula("occupancy", "achieved_occupancy <= occupancy", slack=0.02, reach="block"),
    Formula("cycles", "duration = cycles / sm_clock", slack=0.03, reach="block"),
    Formula("IPC", "ipc <= issue_slots", reach="row", unless=r"\bperf stat|cpu cycles"),
    Formula("peak", "fp32_peak = cores * 2 * boost_clock | cores * boost_clock | cores * 4 * boost_clock", slack=0.02),
    Formula("bandwidth", "peak_bandwidth = data_rate * bus_width", slack=0.02, reach="block"),
    Formula("intensity", "flop_per_byte = flop / dram_bytes", slack=0.02, reach="row"),
    # Parts are no more than the whole, nor a mean more than its root mean square, nor that more than the greatest.
    Formula("ratio", "hit_share = hits / (hits + misses) | hits / lookups", reach="block"),
    Formula("order", "top_1 <= top_5", reach="block"),
    Formula("order", "measured <= roof", sure=ASK, slack=0.02, reach="row"),
    Formula("memory", "allocated <= reserved", reach="row", unless="slots?\\b|quota|slurm"),
    # Figures that count something, and what they make.
    Formula(
        "concurrency", "clients = request_rate * mean_latency", sure=ASK, slack=0.1, unless=_OPEN_LOOP + r"|tokens?\b"
    ),
    Formula("concurrency", "request_rate <= clients / mean_latency", sure=ASK, slack=0.1, unless=_OPEN_LOOP),
    # Of several runs in one log: the rate stands last.
    Formula(
        "concurrency",
        "request_rate = clients / mean_latency",
        2,
        0.06,
        fit=2,
        reach="block",
        unless=_OPEN_LOOP + r"|tokens?\b",
    ),
    Formula("ratio", "wer = (substitutions + deletions + insertions) / words", slack=0.01, reach="block"),
    # Energy.
    Formula("power", "mean_power <= power_limit", slack=0.1, reach="row", unless=r"\bgpus\b|\bwall|server|chassis"),
    Formula(
        "throughput", "sample_rate = step_rate * batch | step_rate * batch * world | step_rate * batch * accum", ASK
    ),
)
