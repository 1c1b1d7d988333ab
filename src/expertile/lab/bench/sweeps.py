"""Presets in which one thing varies and all else stays: tokens, groups, K or N; skew beside its balanced twin; and the
gradients of forward products. bf16 throughout."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from expertile.device import Device
from expertile.lab.race.routing import draw
from expertile.lab.race.workloads import GroupedWorkload, ragged_m
from expertile.ops.grouped_mm.problem import Layout
from expertile.roofline import bound

# (experts, K, N, top-k): gate-up of Qwen3-30B-A3B (2 x 768 columns) and up of Mixtral-8x7B (config.json of each).
_TOKEN_SWEEPS = {"qwen3-gate-up": (128, 2048, 1536, 8), "mixtral-up": (8, 4096, 14336, 2)}
_TOKENS = tuple(2**i for i in range(17))
_GROUPS = tuple(2**i for i in range(10))
_EXTENTS = tuple(2**i for i in range(8, 14))


def scaling(routing: str = "balanced", seed: int = 0) -> list[GroupedWorkload]:
    """How cost grows: with tokens, 1 to 65536, in two models; with groups, 1 to 512, of 32768 rows in all (FLOPs stay,
    weights grow), and of 256 rows each with the same weights cut into ever narrower experts; with K and with N, 64
    groups of 256 rows."""
    out = []
    for sweep, (groups, k, n, top_k) in _TOKEN_SWEEPS.items():
        for tokens in _TOKENS:
            (drawn,) = draw(routing, tokens, groups, top_k, seed)
            name = f"{sweep}-tokens{tokens}"
            out.append(ragged_m(name, "scaling", drawn.group_sizes, k, n, "bf16", routing=drawn.label))
    even = (  # name, groups, rows of each, K, N
        *((f"same-rows-groups{g}", g, 32768 // g, 2048, 1536) for g in _GROUPS),
        *((f"same-weights-groups{g}", g, 256, 2048, 65536 // g) for g in _GROUPS),
        *((f"depth-k{x}", 64, 256, x, 2048) for x in _EXTENTS),
        *((f"width-n{x}", 64, 256, 2048, x) for x in _EXTENTS),
    )
    for name, groups, rows, k, n in even:
        out.append(ragged_m(name, "scaling", (rows,) * groups, k, n, "bf16", routing="balanced"))
    return out


def skew(seed: int = 0) -> list[GroupedWorkload]:
    """Uneven groups, each with a twin of the same FLOPs and bytes whose groups are even (see `twin`)."""
    rng = np.random.default_rng(seed)
    wide, tall = (2048, 1536), (4096, 14336)
    uneven = [
        *(_uneven(f"qwen3-{case}", *wide, sizes, seed) for case, sizes in _cases(rng, 128, 65536).items()),
        *(_uneven(f"qwen3-{case}-decode", *wide, sizes, seed) for case, sizes in _cases(rng, 128, 1024).items()),
        _uneven("tiny-groups", *wide, tuple(int(s) for s in rng.integers(0, 4, 512)), seed),
        *(_zipf("qwen3", *wide, 128, 65536, s, seed) for s in (0.5, 1.0, 1.5, 2.0)),
        *(_uneven(f"mixtral-{case}", *tall, sizes, seed) for case, sizes in _cases(rng, 8, 16384).items()),
        *(_zipf("mixtral", *tall, 8, 16384, s, seed) for s in (1.0, 2.0)),
    ]
    twins: dict[tuple[int, ...], GroupedWorkload] = {}
    for workload in uneven:
        even = twin(workload)
        twins.setdefault((*even.group_sizes, even.k, even.n), even)
    return uneven + list(twins.values())


def twin(workload: GroupedWorkload) -> GroupedWorkload:
    """The same rows on as many groups as have any, spread evenly: same FLOPs, same bytes, no skew."""
    used = sum(size > 0 for size in workload.group_sizes)
    each, extra = divmod(workload.m, used)
    sizes = tuple(each + (g < extra) for g in range(used))
    name = f"balanced-{used}x{workload.m}-k{workload.k}-n{workload.n}"
    return ragged_m(name, workload.preset, sizes, workload.k, workload.n, workload.dtype, routing="balanced")


def gradients(forward: Iterable[GroupedWorkload]) -> list[GroupedWorkload]:
    """For every forward product that compute limits on an H200 the gradient of its input, and all weight gradients
    among `forward` as they are. dgrad: dout [rows, N] times weights [G, N, K] as they are stored -> [rows, K], so K and
    N exchanged and b_layout "kn"."""
    h200 = Device.by_name("h200")
    out = []
    for w in forward:
        if w.layout is Layout.RAGGED_K:
            out.append(replace(w, preset="gradients"))
        elif bound(w.problem("cuda").work(), h200, w.dtype).limiter == "compute":
            out.append(replace(w, name=f"dgrad-{w.name}", preset="gradients", k=w.n, n=w.k, b_layout="kn"))
    return out


def _uneven(name: str, k: int, n: int, sizes: Sequence[int], seed: int) -> GroupedWorkload:
    return ragged_m(name, "skew", sizes, k, n, "bf16", routing=f"{name} seed={seed}")


def _zipf(model: str, k: int, n: int, groups: int, rows: int, s: float, seed: int) -> GroupedWorkload:
    # top-1: drawing several experts for each token without replacement would flatten the shares
    (drawn,) = draw(f"zipf({s})", rows, groups, 1, seed)
    return ragged_m(f"{model}-zipf{s:g}", "skew", drawn.group_sizes, k, n, "bf16", routing=drawn.label)


def _cases(rng: np.random.Generator, groups: int, rows: int) -> dict[str, tuple[int, ...]]:
    """One group with 90 % of the rows and the rest spread evenly; and half of the groups empty, the others even."""
    favourite = int(rng.integers(groups))
    each, extra = divmod(rows - rows * 9 // 10, groups - 1)
    rest = [each + (g < extra) for g in range(groups - 1)]
    rest.insert(favourite, rows * 9 // 10)
    used = set(rng.permutation(groups)[: groups // 2].tolist())
    half = tuple(rows // len(used) if g in used else 0 for g in range(groups))
    return {"one-takes-90": tuple(rest), "half-empty": half}
