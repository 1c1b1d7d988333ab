"""cuda_fp8: our CUDA C++ kernel for sm_90a (H100, H200), compiled by NVRTC; e4m3, float32 scales, promoted every 128.

    out_g = Σ_blocks (scale_a[:, block] ⊗ scale_b[:, block]) ∘ (a_g[:, block] @ b_g[block, :])

    RAGGED_M  a [M_tot, K]  b [G, K, N] stored [G, N, K]  scales BLOCK  out[rows of g], bfloat16 or float16

What Gluon (`gluon_fp8`) lacked: tiles of any multiple of 16 columns, since its block shapes are powers of two. Two
consumers of 64 x 192 read (128 + 192) · 128 bytes for 128 · 192 · 256 FLOP, 40 KB a step. Sums and products take 192
of a thread's 232 registers; one consumer promotes while the other multiplies. Gluon stands two `bar.sync` beside each
step's barriers, where here one lane of a warp arrives. And clusters, in which programs that share a tile's steps send
each other their sums: a split K without a second kernel.

TMA brings the scales of a, so it wants rows side by side, as `quantize_activations` leaves them: strides (1, a multiple
of 4). Others are copied into that order first, by a kernel of its own.

Limits: the tensor cores and the power they draw. `_cuda_fp8.cu` says how the work is laid out on the chip.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from expertile.device import Device
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.grouped_mm.tail import filled
from expertile.ops.hopper.limits import other_architecture
from expertile.ops.launch import nvrtc
from expertile.ops.launch.counter import tile_counter
from expertile.ops.launch.device import current_device, torch_device, wants_pdl
from expertile.ops.scaled_grouped_mm.backends import gluon_fp8
from expertile.ops.scaled_grouped_mm.problem import BLOCK, PDL_FLOPS, Backend, Operands, Recipe, ScaledProblem
from expertile.ragged import power_of_two

_FILES = ("_cuda_fp8_store.cu", "_cuda_fp8_steps.cu", "_cuda_fp8.cu")
_SOURCES = (nvrtc.GROUPS, nvrtc.TILES, *(Path(__file__).with_name(name) for name in _FILES))
_WIDTHS = (32, 48, *range(64, 161, 16), 192, 256)  # of tiles
_TYPES = (*(nvrtc.TensorMap,) * 7, *(nvrtc.ADDRESS,) * 4, *(nvrtc.INT,) * 5, *(nvrtc.LONG,) * 4)


@dataclass(frozen=True)
class Config:
    """Tile sizes and schedule.

    block_n: 32, 48, a multiple of 16 from 64 to 160, 192, or, for two consumers, 256 in two halves: others would meet a
        third scale of b.
    num_stages: 2 to 8, of the ring; an even number with up to 64 columns.
    group_m: rows of tiles that share one pass over a group's weights.
    dynamic: a dynamic tile scheduler, with a counter in memory; else program p of P takes p, p + P, p + 2P, …
    consumers: of 64 rows of the tile each, 1 or 2.
    split_k: programs, of one cluster, that share a tile's steps: 1, 2, 4 or 8; their schedule is static.
    """

    block_n: int = 192
    num_stages: int = 4
    group_m: int = 24
    dynamic: bool = True
    consumers: int = 2
    split_k: int = 1

    def __post_init__(self) -> None:
        choices = {"block_n": _WIDTHS, "num_stages": range(2, 9), "consumers": (1, 2), "split_k": (1, 2, 4, 8)}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(map(str, known))}, got {value}")
        if self.split_k > 1 and self.dynamic:
            raise ValueError(f"split_k: expected dynamic=False beside it, got {self.split_k}")
        if self.block_n // self.split_k % 8:
            raise ValueError(
                f"split_k: expected parts of a multiple of 8 columns, got {self.split_k} of {self.block_n}"
            )
        if self.block_n == 256 and self.consumers == 1:
            raise ValueError("consumers: expected 2 beside block_n=256, got 1")
        if self.block_n <= 64 and self.num_stages % 2:
            raise ValueError(
                f"num_stages: expected an even number beside block_n={self.block_n}, got {self.num_stages}"
            )

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 64 * self.consumers

    def smem_bytes(self, groups: int, k_blocks: int) -> int:
        """Shared memory of one program: ring, tile of out, barriers, the groups' tiles and rows, scales of b of two
        tiles, and up to 2048 to align."""
        stage = (self.rows + self.block_n) * BLOCK + 640
        slots = 64 + 80 + 2 * (2 if BLOCK % self.block_n else 1) * k_blocks * 4
        parts = self.rows * self.block_n * 4 // self.split_k
        out = max(self.rows * -(-self.block_n // 64) * 128, parts * (self.split_k - 1))
        return 2048 + self.num_stages * (stage + 16) + out + slots + 8 * groups

    def source(self, dtype: torch.dtype) -> str:
        """The program, for results of that dtype."""
        macros = {
            "CONSUMERS": self.consumers,
            "ROWS": self.rows,
            "BLOCK_N": self.block_n,
            "STAGES": self.num_stages,
            "GROUP_M": self.group_m,
            "DYNAMIC": int(self.dynamic),
            "SPLIT": self.split_k,
            "CUT": int(self.split_k == 1),
            "HALF": int(dtype is torch.float16),
        }
        widths = {*range(64, self.block_n, 64), self.block_n} - {256}
        products = "".join(map(_multiply, sorted(widths)))
        return nvrtc.program(macros, products, *_SOURCES)


def _multiply(n: int) -> str:
    """One wgmma of n columns and 32 summands: d += a · bᵀ, or d = where MORE is 0. A, B are added to the low words of
    the descriptors in here: the compiler would keep each sum in a register of its own."""
    names = ", ".join(f"%{i}" for i in range(n // 2))
    registers = ", ".join(f'"+f"(d[{i}])' for i in range(n // 2))
    a, b, to_a, to_b, more = (f"%{n // 2 + i}" for i in range(5))
    return (
        "template <int A, int B, int MORE>\n"
        f"__device__ __forceinline__ void multiply(Columns<{n}>, float* d, u32 a, u32 b) {{\n"
        '  asm volatile("{ .reg .pred more; .reg .b32 x, y; .reg .b64 p, q; "\n'
        f'    "add.u32 x, {a}, {to_a}; add.u32 y, {b}, {to_b}; setp.ne.b32 more, {more}, 0; "\n'
        f'    "mov.b64 p, {{x, {nvrtc.HIGH_WORD}}}; mov.b64 q, {{y, {nvrtc.HIGH_WORD}}}; "\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{names}}}, p, q, more, 1, 1; }}"\n'
        f'    : {registers} : "r"(a), "r"(b), "n"(A), "n"(B), "n"(MORE));\n}}\n'
    )


def supports(problem: ScaledProblem, device: Device) -> str | None:
    """The reason this kernel can't compute `problem` on `device`, or None."""
    p = problem
    if reason := other_architecture(device):
        return reason
    if p.layout is not Layout.RAGGED_M or p.recipe is not Recipe.BLOCK:
        return f"takes ragged rows with scales of blocks, not {p.layout.value} with {p.recipe.value}"
    if p.has_bias:
        return "takes no bias"
    if p.out_dtype not in (torch.bfloat16, torch.float16):
        return f"writes bfloat16 or float16, not {p.out_dtype}"
    if Config().smem_bytes(power_of_two(p.groups, 32), power_of_two(p.k_blocks, 64)) > device.smem_bytes:
        return f"lists groups and scales in shared memory, which {p.groups} groups of {p.k} summands exceed"
    if not (p.a_aligned and p.b_aligned):
        return "TMA needs base addresses that are multiples of 16 bytes"
    if p.a_strides[-1] != 1 or p.b_strides[-2] != 1:
        return f"e4m3 wgmma reads both operands with K contiguous, got strides {p.a_strides} and {p.b_strides}"
    if any(s <= 0 or s % 16 for s in (p.a_strides[0], p.b_strides[-1], p.b_strides[0])):
        return f"TMA needs strides that are positive multiples of 16 bytes, got {p.a_strides} and {p.b_strides}"
    if p.n % 8:
        return f"stores 8 columns at a time, N is {p.n}"
    return nvrtc.missing()


def _waves(problem: ScaledProblem, device: Device, config: Config) -> float:
    """Programs' tiles for each multiprocessor, where groups have their mean rows."""
    tiles_m = -(-problem.mean_group // config.rows)
    return problem.groups * tiles_m * -(-problem.n // config.block_n) * config.split_k / device.sm_count


# From so many tiles of a multiprocessor on a dynamic scheduler deals them out.
_DYNAMIC_WAVES = 6


def _rounds(waves: float, groups: int, config: Config) -> float:
    """How many tiles, one after another, the multiprocessor with the most work takes. The kernel cuts the tiles of a
    last wave that is a third or half full, and of one of 192 columns that the last group's columns make in tiles of
    128; a dynamic scheduler evens out what is left."""
    whole = math.floor(waves)
    last = waves - whole
    if config.dynamic or not last:
        return waves
    if whole and config.block_n in (128, 192, 256) and config.split_k == 1:
        if last * (config.block_n // 64) <= 1:
            return whole + (0.87 if config.block_n == 128 else 0.55)
        if last * 2 <= 1:
            return whole + 0.93
        if config.block_n == 192 and last <= min(0.64, waves / groups):
            return whole + 0.75
    return whole + 1


def _seconds(problem: ScaledProblem, device: Device, config: Config) -> float:
    """Modelled time of one call (`gluon_fp8.modelled`).

    Two consumers cover each other's promotion, the better the more columns a consumer multiplies at a time, the worse
    where two scales of b meet anywhere in the tile; where a group has up to 64 rows, one is alone, and no more than
    those are loaded. (Fitted to 151 problems of 24 to 8192 rows a group on an H200, 2026-11-27:
    docs/notes/quantised.md, "One model".)"""
    alone = problem.mean_group <= 64 or config.consumers == 1
    wide = 0.05 if config.block_n == 256 else 0.085 * max(0, config.block_n - 128) / 64
    covered = 1.0 + 0.1 * (config.block_n % 64 > 0) - wide
    waves = _waves(problem, device, config)
    tile = 64 if alone else config.rows, config.block_n
    loading = (min(tile[0], problem.m) + tile[1]) / sum(tile)  # boxes end where the tensor does
    waiting, rounds = 2.0 if alone else covered, _rounds(waves, problem.groups, config)
    units = waves * device.sm_count
    seconds = gluon_fp8.modelled(problem, device, tile, waiting, rounds, units, config.split_k, loading)
    copied = problem.scale_a_strides[0] != 1  # scales of a, by a kernel of its own
    # Its first tile is found, and asked of memory, before the kernel ahead is done; by fewer warps sooner.
    seconds += 2e-6 * copied - 0.2e-6 - 0.43e-6 * (config.consumers == 1)
    return seconds + (4.6e-6 if config.block_n == 128 else 1.1e-6) * (config.split_k > 1)


def slower(problem: ScaledProblem) -> str | None:
    """Why `gluon_fp8` is taken for a problem that this kernel could compute, or None. (Of 151 products of 24 to 8192
    rows a group it is the faster one by more than 1 % on one; H200, 2026-11-27.)"""
    rows = problem.mean_group
    return f"loads 64 rows where a group has {rows:.0f}" if rows <= 16 else None


def _fitted(config: Config, problem: ScaledProblem, device: Device) -> Config:
    """`config` with as many stages, 4 to 8, as there is room for; 3 where a tile has 256 columns."""
    sizes = power_of_two(problem.groups, 32), power_of_two(problem.k_blocks, 64)
    for stages in range(8, 4, -1 if config.block_n > 64 else -2):
        if (deeper := replace(config, num_stages=stages)).smem_bytes(*sizes) <= device.smem_bytes:
            return deeper
    return replace(config, num_stages=4 if config.block_n <= 192 else 3)


@lru_cache(maxsize=1024)
def configs(problem: ScaledProblem, device: Device) -> tuple[Config, ...]:
    """Configs worth timing, the one with the lowest modelled time first, its tiles shared out beforehand where they are
    few."""
    split = Config(64, dynamic=False, split_k=2)
    widths = [(n, 2) for n in _WIDTHS[2:]] + [(n, 1) for n in (64, 80, 96) if problem.mean_group <= 192]
    found = [Config(n, consumers=consumers) for n, consumers in widths]
    found = [replace(c, dynamic=_waves(problem, device, c) >= _DYNAMIC_WAVES) for c in found]
    found += [c for n in _WIDTHS[:2] if _waves(problem, device, c := Config(n, dynamic=False)) <= 1]
    if _waves(problem, device, split) <= 2:
        found += [replace(split, consumers=1), split, replace(split, block_n=128)]
    found = [_fitted(c, problem, device) for c in found]
    first, *others = sorted(found, key=partial(_seconds, problem, device))
    more = (replace(first, dynamic=not first.dynamic),) if first.split_k == 1 else ()
    return (first, *others[:4], *more)


@lru_cache(maxsize=64)
def _kernel(config: Config, dtype: torch.dtype, groups: int, k_blocks: int, device: int) -> nvrtc.Kernel:
    """The kernel on GPU number `device`, the current one."""
    smem_bytes, binary = config.smem_bytes(groups, k_blocks), nvrtc.compiled(config.source(dtype))
    return nvrtc.kernel(binary, "scaled_grouped_mm", _TYPES, (config.consumers + 1) * 128, smem_bytes, config.split_k)


def _side_by_side(p: ScaledProblem, scale_a: torch.Tensor) -> torch.Tensor:
    """The scales with those of all rows side by side, as TMA takes them."""
    row, block = p.scale_a_strides
    if row == 1 and block % 4 == 0 and block >= p.m and scale_a.data_ptr() % 16 == 0:
        return scale_a
    room = scale_a.new_empty(p.k_blocks, -(-p.m // 4) * 4)
    return room[:, : p.m].t().copy_(scale_a)


def run(problem: ScaledProblem, operands: Operands, config: Config, out: torch.Tensor | None) -> torch.Tensor:
    """Compute into `out` (rows past offs[-1] are left alone) or a new tensor; queues one kernel, and one more for
    scales of a with K contiguous; waits for nothing."""
    return filled(problem, operands, out, partial(_queue, problem, operands, config))


def _queue(p: ScaledProblem, o: Operands, config: Config, out: torch.Tensor) -> None:
    with current_device(out.device):
        scale_a = _side_by_side(p, o.scale_a)  # named: what TMA reads must outlive the launch
        tensors = (o.a, o.b, scale_a, out, o.offs, o.scale_b, tile_counter(config.dynamic, out))
        device, pitches = out.get_device(), (scale_a.stride(1) * 4, out.stride(0) * 2)
        addresses = tuple(map(torch.Tensor.data_ptr, tensors))
        _launch(p, config, device, nvrtc.current_stream(device), pitches, addresses)()


@lru_cache(maxsize=4096)
def _launch(
    p: ScaledProblem, config: Config, device: int, stream: int, pitches: tuple[int, int], addresses: tuple[int, ...]
) -> Callable[[], None]:
    """The launch for tensors at these addresses: those of a, b, the scales of a, out, offs, the scales of b and the
    counter; pitches: bytes between two blocks of scales of a, and between two rows of out."""
    a, b, scale_a, out, offs, scale_b, counter = addresses
    of_a, of_b = ((p.m, p.k), p.a_strides[:1]), ((p.groups, p.n, p.k), (p.b_strides[0], p.b_strides[2]))
    scales = min(config.rows + 4, -(-p.m // 4) * 4)
    maps = (
        nvrtc.tensor_map(a, *of_a, (min(64, p.m), BLOCK)),
        nvrtc.tensor_map(a, *of_a, (min(config.rows, p.m), BLOCK)),
        nvrtc.tensor_map(b, *of_b, (1, 64, BLOCK)),
        nvrtc.tensor_map(b, *of_b, (1, config.block_n, BLOCK)),
        nvrtc.tensor_map(b, *of_b, (1, p.n % config.block_n % 64 or 64, BLOCK)),
        nvrtc.tensor_map(scale_a, (p.k_blocks, p.m), pitches[:1], (1, scales), 4, swizzled=False),
        nvrtc.tensor_map(out, (p.m, p.n), pitches[1:], (64, 64), 2),
    )
    pdl = wants_pdl(p, PDL_FLOPS)
    sizes = (pdl, p.m, p.groups, p.n, p.k, *p.scale_b_strides, pitches[1])
    kernel = _kernel(config, p.out_dtype, power_of_two(p.groups, 32), power_of_two(p.k_blocks, 64), device)
    tiles = (p.m + p.groups * (config.rows - 1)) // config.rows * -(-p.n // config.block_n)  # at most
    programs = min(tiles, Device.current(torch_device(device)).sm_count // kernel.cluster) * kernel.cluster
    return kernel.launch(programs, stream, (*maps, offs, scale_b, out, counter, *sizes), pdl)


BACKEND = Backend(
    name="cuda_fp8",
    summary="CUDA C++ kernel for Hopper: tiles of 32 to 256 columns, TMA ring, FP8 wgmma, float32 promotion every 128",
    supports=supports,
    configs=configs,
    run=run,
)
