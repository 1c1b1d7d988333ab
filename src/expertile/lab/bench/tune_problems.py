"""Which problems `expertile tune` measures: known shapes, a grid of layers of models, and a space-filling design, a
scrambled Sobol sequence (Owen, "Scrambling Sobol' and Niederreiter-Xing points", J. Complexity 14, 1998) over rows and
groups, K and N, layout, dtype and spread of rows: every prefix of it covers the space evenly."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from expertile.device import Device
from expertile.lab.bench.presets import preset
from expertile.lab.operators import moe, presets
from expertile.lab.race.routing import draw
from expertile.lab.race.workloads import GroupedWorkload, grouped, ragged_m, wgrad
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.grouped_mm.tuned import Features

PRESET = "tune"
# Hidden and FFN sizes of published models, and the halves and doubles that tensor parallelism and SwiGLU make.
DIMS = (512, 768, 1024, 1408, 1536, 2048, 2560, 2880, 3072, 4096, 5120, 6144, 7168, 8192, 11008, 14336, 16384)
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 256, 384, 512)
MOST_ROWS, MOST_GROUPS = 262144, 512

_KIND_SHARES = (("forward", 0.42), ("dgrad", 0.2), ("wgrad", 0.23), ("batched", 0.15))
_DTYPE_SHARES = (("bf16", 0.8), ("fp16", 0.17), ("fp32", 0.03))
_ROUTING_SHARES = (("uniform", 0.5), ("balanced", 0.2), ("zipf(1)", 0.2), ("one", 0.1))
# What the grid crosses: groups, rows of a group, and (K, N) as layers of models have them.
_GRID_GROUPS = (8, 32, 128)
_GRID_ROWS = (16, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
_GRID_ROUTINGS = ("uniform", "zipf(1)")
_GRID_LAYERS = ((2048, 1536), (4096, 2048), (1024, 4096), (7168, 4096), (4096, 14336))
_MOST_FLOPS = 3e12  # some 5 ms on the largest GPU: what is larger costs seconds and tells nothing new
_MEMORY_SHARE = 0.03  # of the device, for one set of operands
# The draw of problem i of a design has the seed  seed * _SEED_STEP + i.
_SEED_STEP = 100003


def known(device: Device, seed: int = 0) -> tuple[GroupedWorkload, ...]:
    """The workloads of the presets anchors, squares, moe-ffn and models and of `trained`, without what does not fit."""
    if device.kind != "cuda":
        found = list(preset("cpu", seed=seed))
    else:
        found = [w for name in ("anchors", "squares", "moe-ffn", "models") for w in preset(name, seed=seed)]
        found += trained(seed)
    distinct = {(w.layout, w.group_sizes, w.m, w.n, w.k, w.dtype): w for w in reversed(found) if not w.unsupported}
    return tuple(w for w in reversed(distinct.values()) if fits(w, device))


def with_features(f: Features, name: str, sizes: Sequence[int], routing: str = "") -> GroupedWorkload:
    """A product with these features and those sizes of its groups, bf16 for "16-bit"."""
    layout = Layout(f.layout)
    m, n, k = {
        Layout.RAGGED_M: (f.rows, f.n, f.k),
        Layout.RAGGED_K: (f.k, f.n, f.rows),
        Layout.RAGGED_N: (f.n, f.rows, f.k),
        Layout.BATCHED: (f.rows // max(1, f.groups), f.n, f.k),
    }[layout]
    a_layout, b_layout = f.orders.split(",")
    dtype = {"16-bit": "bf16", "tf32": "fp32"}.get(f.dtype, f.dtype)
    return grouped(name, PRESET, layout, sizes, m, n, k, dtype, a_layout=a_layout, b_layout=b_layout, routing=routing)


@lru_cache(maxsize=64)
def _trained_sizes(shape: moe.Size, seed: int) -> tuple[int, ...]:
    tokens, _, _, experts, top_k = shape
    return draw("uniform", tokens, experts, top_k, seed)[0].group_sizes


def trained(seed: int = 0) -> Iterator[GroupedWorkload]:
    """The products of training every layer of the presets moe and moe-sonic, gradients of rows first."""
    layers = [w for name in ("moe", "moe-sonic") for w in presets()[name]() if w.op == "moe_train"]
    shapes = {moe.size(w): w for w in reversed(layers)}
    products = ("dx", "down", "dact", "wgrad-down", "wgrad-up", "up")
    for product, (shape, layer) in itertools.product(products, reversed(shapes.items())):
        (_, h, i, _, top_k), sizes = shape, _trained_sizes(shape, seed)
        name, label = f"{product}-{layer.name}", f"uniform top_k={top_k} seed={seed}"
        if product.startswith("wgrad"):
            m, n = (h, i) if product == "wgrad-down" else (2 * i, h)
            yield wgrad(name, layer.preset, sizes, m, n, "bf16", routing=label)
        else:
            k, n = {"dx": (2 * i, h), "down": (i, h), "dact": (h, i), "up": (h, 2 * i)}[product]
            order = "kn" if product in ("dx", "dact") else "nk"
            yield ragged_m(name, layer.preset, sizes, k, n, "bf16", b_layout=order, routing=label)


def design(
    device: Device, seed: int = 0, any_count: bool = False, unaligned: bool = False
) -> Iterator[GroupedWorkload]:
    """An endless sequence of workloads that fill the space evenly; the same for the same seed. Groups are numbers that
    models have, rows multiples of 16 from 256 on (fewer kernels to compile); with `any_count` anything. With
    `unaligned` K and N are multiples of 8 and none of 64. On a CPU rows, groups, K and N are a sixteenth of what a GPU
    gets."""
    sobol = torch.quasirandom.SobolEngine(dimension=7, scramble=True, seed=seed)
    for index in itertools.count():
        u = [min(x, 1 - 1e-7) for x in sobol.draw(1)[0].tolist()]
        less = (8 + 8 * (index % 7), 8 + 8 * (3 * index % 7)) if unaligned else (0, 0)
        name = f"unaligned-{seed}.{index:04d}" if unaligned else f"{seed}.{index:04d}"
        workload = _workload(u, device, name, seed * _SEED_STEP + index, any_count, less)
        if fits(workload, device):
            yield workload


def mixed(device: Device, seed: int = 0, any_count: bool = False) -> Iterator[GroupedWorkload]:
    """`design`; on a GPU with an unaligned workload in place of every eighth."""
    designed = design(device, seed, any_count)
    if device.kind != "cuda":
        return designed
    others = design(device, seed, any_count, unaligned=True)
    return (next(others) if i % 8 == 7 else w for i, w in enumerate(designed))


def grid(device: Device, seed: int = 0) -> Iterator[GroupedWorkload]:
    """Every combination of groups, rows and layers that fits, forward and both gradients in bfloat16, and the half of
    them with skewed rows as well: neighbours on all sides for the problems of MoE layers."""
    for groups, rows, (k, n), routing in itertools.product(_GRID_GROUPS, _GRID_ROWS, _GRID_LAYERS, _GRID_ROUTINGS):
        if routing != "uniform" and rows in (96, 192, 384, 768, 4096):
            continue
        sizes = group_sizes(routing, groups * rows, groups, seed)
        name, label = f"{groups}x{rows}-{k}-{n}-{routing}", f"{routing} seed={seed}"
        of = (PRESET, sizes, k, n, "bf16")
        found = [ragged_m(f"grid-forward-{name}", *of, routing=label)]
        if rows in (64, 128, 256, 512, 1024, 2048):
            if routing == "uniform":
                found.append(ragged_m(f"grid-dgrad-{name}", *of, b_layout="kn", routing=label))
            found.append(wgrad(f"grid-wgrad-{name}", *of, routing=label))
        yield from (w for w in found if fits(w, device))


def seed_of(routing: str) -> int | None:
    """The seed of the `design` that drew group sizes with this label; None where it names none."""
    found = re.search(r"seed=(\d+)$", routing)
    return int(found[1]) // _SEED_STEP if found else None


def problems(device: Device, seed: int = 0) -> Iterator[GroupedWorkload]:
    """Known shapes, then the grid's, each of them and a designed one in turn, then designed ones without end; the order
    in which to measure."""
    designed = mixed(device, seed)
    on_grid = grid(device, seed) if device.kind == "cuda" else iter(())
    for workload in itertools.chain(known(device, seed), on_grid):
        yield workload
        yield next(designed)
    yield from designed


def fits(workload: GroupedWorkload, device: Device) -> bool:
    """Whether a few dozen configs of it can be measured in about a second."""
    work = workload.problem(device.kind).work(workload.group_sizes)
    share = min(1.0, (device.peak("bf16") or device.peak("fp32") or 1e12) / 1e15)
    if device.kind != "cuda":
        share *= 0.02  # no CPU comes near its peak in bfloat16
    known_large = workload.preset in ("anchors", "moe", "moe-sonic") and device.kind == "cuda"
    most_flops, most_bytes = _MOST_FLOPS * share, _MEMORY_SHARE * device.memory_bytes
    if known_large:
        most_flops, most_bytes = 4 * most_flops, 8 * most_bytes
    return work.flops <= most_flops and workload.memory_nbytes <= most_bytes


def _workload(
    u: Sequence[float], device: Device, name: str, seed: int, any_count: bool, less: tuple[int, int]
) -> GroupedWorkload:
    """The point `u` in [0, 1)^7: rows, groups, K, N, kind, dtype, routing. K and N are `less` than what models have."""
    small = 1 if device.kind == "cuda" else 16
    rows = round((MOST_ROWS // small) ** u[0])
    groups = round((MOST_GROUPS // small) ** u[1])
    if not any_count:
        groups = min((g for g in GROUPS if g <= MOST_GROUPS // small), key=lambda g: abs(math.log(g / groups)))
        rows = rows if rows < 256 else rows // 16 * 16
    k, n = (DIMS[int(x * len(DIMS))] // small - few for x, few in zip(u[2:4], less, strict=True))
    kind, dtype, routing = _pick(u[4], _KIND_SHARES), _pick(u[5], _DTYPE_SHARES), _pick(u[6], _ROUTING_SHARES)
    if kind == "batched":
        per_group = max(1, rows // groups)
        sizes = (per_group,) * groups
        return grouped(f"batched-{name}", PRESET, Layout.BATCHED, sizes, per_group, n, k, dtype, routing="equal")
    sizes = group_sizes(routing, rows, groups, seed)
    label = f"{routing} seed={seed}"
    if kind == "wgrad":
        return wgrad(f"wgrad-{name}", PRESET, sizes, k, n, dtype, routing=label)
    order = "nk" if kind == "forward" else "kn"
    return ragged_m(f"{kind}-{name}", PRESET, sizes, k, n, dtype, b_layout=order, routing=label)


@lru_cache(maxsize=1024)
def group_sizes(routing: str, rows: int, groups: int, seed: int) -> tuple[int, ...]:
    """Rows of each group; "one": one group takes 90 % and the others share the rest."""
    if routing != "one" or groups < 3:
        return draw("balanced" if routing == "one" else routing, rows, groups, 1, seed)[0].group_sizes
    most = rows * 9 // 10
    rest = list(draw("uniform", rows - most, groups - 1, 1, seed)[0].group_sizes)
    rest.insert(seed % groups, most)
    return tuple(rest)


def _pick(u: float, shares: Sequence[tuple[str, float]]) -> str:
    for name, share in shares:
        if u < share:
            return name
        u -= share
    return shares[-1][0]
