"""What batch invariance costs: layers and products, batch-invariant and not, timed in turn."""

import math
import random
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from expertile.lab.measure.interleaved import Budget, Failure, time_interleaved
from expertile.lab.measure.stats import median_ci95
from expertile.moe import MoE
from expertile.ops.grouped_mm.api import grouped_mm
from tools.batch_invariance.fuzz import T

LAYERS = (
    ("prefill 8192", 8192, (2048, 768, 128, 8)),
    ("prefill 8192 large", 8192, (4096, 1024, 128, 8)),
    ("decode 1", 1, (2048, 768, 128, 8)),
    ("decode 8", 8, (2048, 768, 128, 8)),
    ("decode 64", 64, (2048, 768, 128, 8)),
)
PRODUCTS = (("product prefill", 65536), ("product decode", 64))
USUAL, INVARIANT = "usual", "invariant"

Calls = dict[str, Callable[[int], T]]


def layers(device: torch.device, sets: int, tokens: int, h: int, i: int, e: int, k: int) -> Calls:
    """A layer's forward pass on input set s, batch-invariant and not, with the same weights."""
    xs = torch.randn(sets, tokens, h, device=device).to(torch.bfloat16)
    usual, invariant = (
        MoE(h, i, e, k, device="meta", dtype=torch.bfloat16, batch_invariant=flag).requires_grad_(False)
        for flag in (False, True)
    )
    usual.to_empty(device=device).reset_parameters()
    invariant.load_state_dict(usual.state_dict(), assign=True)
    return {USUAL: lambda s: usual(xs[s]), INVARIANT: lambda s: invariant(xs[s])}


def products(device: torch.device, rows: int, k: int, n: int, groups: int) -> Calls:
    """A ragged product of groups of uneven sizes, batch-invariant and not."""
    a, b = torch.randn(rows, k, device=device).bfloat16(), torch.randn(groups, n, k, device=device).bfloat16()
    draw = random.Random(rows)
    ends = [*sorted(draw.randint(0, rows) for _ in range(groups - 1)), rows]
    offs = torch.tensor(ends, dtype=torch.int32, device=device)

    def product(batch_invariant: bool) -> T:
        return grouped_mm(a, b.transpose(1, 2), offs=offs, batch_invariant=batch_invariant)

    return {USUAL: lambda s: product(False), INVARIANT: lambda s: product(True)}


def cost(device: torch.device, small: bool, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a call, batch-invariant and not."""
    found = []
    for name, tokens, sizes in LAYERS:
        tokens, sizes = (min(tokens, 8), (32, 16, 8, 2)) if small else (tokens, sizes)
        sets = 8 if tokens <= 64 else 2
        line = compare(device, rounds, sets, partial(layers, device, sets, tokens, *sizes))
        found.append({"name": name, **line, **dict(zip("THIEk", (tokens, *sizes), strict=True))})
    for name, rows in PRODUCTS:
        rows, (k, n, g) = (min(rows, 16), (32, 16, 8)) if small else (rows, (2048, 1536, 128))
        line = compare(device, rounds, 1, partial(products, device, rows, k, n, g))
        found.append({"name": name, **line, "rows": rows, "K": k, "N": n, "G": g})
    return found


def compare(device: torch.device, rounds: int, sets: int, make: Callable[[], Calls]) -> dict[str, Any]:
    """Both in turn, round by round; or the "error"."""
    try:
        timed = time_interleaved(
            make(),
            policy="graph" if device.type == "cuda" else "eager",
            device=device,
            num_sets=sets,
            budget=Budget(seconds=math.inf, min_rounds=rounds, max_rounds=rounds, rel_ci=math.inf),
        )
    except Exception:
        return {"error": traceback.format_exc()[-2000:]}
    usual, invariant = timed[USUAL], timed[INVARIANT]
    if isinstance(usual, Failure) or isinstance(invariant, Failure):
        return {"error": "; ".join(f"{name}: {x.reason}" for name, x in timed.items() if isinstance(x, Failure))}
    ratio, interval = median_ci95([b / a for a, b in zip(usual.samples, invariant.samples, strict=True)])
    times = {"time_s_usual": usual.time_s, "time_s_invariant": invariant.time_s}
    return {"ratio": ratio, "ratio_ci95": interval, **times, "rounds": len(usual.samples)}
