"""cuda_grouped: our CUDA C++ kernel for sm_90a (H100, H200), compiled by NVRTC; bf16 and fp16, float32 accumulation,
results in the operands' dtype or in float32.

    RAGGED_M  out[rows of g] = a[rows of g] @ b[g] (+ bias[g])   a [M_tot, K], b [G, K, N] in either memory order
    RAGGED_K  out[g] = a[:, cols of g] @ b[rows of g]            a [M, K_tot] stored [K_tot, M], b [K_tot, N]

Every element has the bits of `gluon_hopper`: products are added 16 at a time in the order of k.

What Gluon lacked: tiles of any multiple of 16 columns, since its block shapes are powers of two. 2880 columns are 15
tiles of 192, and 11.25 of 256. In tiles at the right edge consumers multiply as few columns as there are, in multiples
of 64; of a tile with up to 64 rows they multiply 64; and a last wave that is a third or half full is cut into parts.

Limits: the tensor cores and the power they draw. `_cuda_grouped.cu` says how the work is laid out on the chip,
docs/notes/grouped_mm.md what was measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.backends._tma import unloadable_groups
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.grouped_mm.tail import filled
from expertile.ops.hopper.limits import refusal, storable
from expertile.ops.launch import nvrtc
from expertile.ops.launch.counter import tile_counter
from expertile.ops.launch.device import current_device, torch_device, wants_pdl
from expertile.ragged import power_of_two

_FILES = ("_cuda_grouped_store.cu", "_cuda_grouped.cu")
_SOURCES = (nvrtc.GROUPS, nvrtc.TILES, nvrtc.RING, *(Path(__file__).with_name(name) for name in _FILES))
_STEP = 64  # summands of a stage
_BLOCK = 64  # rows or columns of a box, 128 bytes of the other dimension
_SLOTS = 4  # tiles that the scheduler has told the others of
# Up to so many summands a tile's stores take longer than its products, so that two pieces have to be under way.
_SHORT_K = 640
_DTYPES = (torch.bfloat16, torch.float16)


def types(*more: Any) -> tuple[Any, ...]:
    """Of the kernel's parameters; `more` come behind the maps."""
    return (*(nvrtc.TensorMap,) * 6, *more, *(nvrtc.ADDRESS,) * 4, *(nvrtc.INT,) * 4, nvrtc.LONG)


@dataclass(frozen=True)
class Config:
    """Tile sizes and schedule, by the words of `gluon_hopper.Config`.

    block_m: 128, or 64 with "pingpong". block_n: a multiple of 16 from 64 to 256, up to 192 for a consumer of 128 rows.
    num_stages: 2 to 8, of the ring, 64 summands each.
    mode: "split": two consumers with 64 rows each of a tile; "pingpong": two that take tiles in turn.
    group_m: rows of tiles that share one pass over a group's weights.
    store_slots: 1 to 4, of a consumer's pieces of 64 rows and 64 columns on their way to memory.
    dynamic: a dynamic tile scheduler, with a counter in memory; else program p of P takes p, p + P, p + 2P, …
    """

    block_m: int = 128
    block_n: int = 192
    num_stages: int = 5
    mode: str = "pingpong"
    group_m: int = 16
    store_slots: int = 1
    dynamic: bool = True

    def __post_init__(self) -> None:
        pingpong = self.mode == "pingpong"
        known: dict[str, Any] = {
            "mode": ("split", "pingpong"),
            "block_m": (64, 128) if pingpong else (128,),
            "block_n": range(64, 193 if pingpong and self.block_m == 128 else 257, 16),
            "num_stages": range(2, 9),
            "store_slots": range(1, 5),
        }
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name}: expected one of {', '.join(map(str, values))}, got {value}")

    def smem_bytes(self, groups: int, k_major: bool) -> int:
        """Shared memory of one program: ring, pieces of the result, tiles, barriers, the groups' tiles and rows, and up
        to 2048 to align. k_major: b has K contiguous."""
        columns = self.block_n if k_major else -(-self.block_n // _BLOCK) * _BLOCK
        ring = self.num_stages * ((self.block_m + columns) * _STEP * 2 + 16)
        return 2048 + ring + 2 * self.store_slots * _BLOCK * 128 + _SLOTS * 48 + 24 + 8 * groups

    def source(
        self,
        dtype: torch.dtype,
        layout: Layout,
        k_major: bool,
        bias_bytes: int = 0,
        gated: Mapping[str, int] | None = None,
        before: Sequence[Path] = (),
        out_bytes: int = 2,
        add: bool = False,
    ) -> str:
        """The program; bias_bytes: of an element of the bias, 0 where there is none. gated: the macros of a gated
        activation, whose functions are in `before`. out_bytes: of an element of the result. add: to what is there."""
        half, ragged_k = dtype is torch.float16, layout is Layout.RAGGED_K
        macros = {
            "RAGGED_K": int(ragged_k),
            "K_MAJOR": int(k_major),
            "BIAS": bias_bytes,
            "ROWS": self.block_m,
            "BLOCK_N": self.block_n,
            "STAGES": self.num_stages,
            "SLOTS": _SLOTS,
            "GROUP_M": self.group_m,
            "DYNAMIC": int(self.dynamic),
            "PINGPONG": int(self.mode == "pingpong"),
            "STORE_SLOTS": self.store_slots,
            "GATED": int(gated is not None),
            "CUT": int(gated is None and not add),
            "OUT_BYTES": out_bytes,
            "ADD": int(add),
            "HALF": int(half),
            **(gated or {}),
        }
        widths = sorted({*range(64, self.block_n if gated is None else 0, 64), self.block_n})
        turned = int(ragged_k), int(not k_major)
        products = "".join(nvrtc.multiply(n, half, turned) for n in widths)
        return nvrtc.program(macros, products, *before, *_SOURCES)


def _key(p: Problem) -> Problem:
    """The problem without what a program does not depend on."""
    strides = (0, 1, 0) if _k_major(p) else (0, 0, 1)
    return replace(p, groups=1, m=1, n=8, k=8, a_strides=(8, 1), b_strides=strides, group_sizes=None, has_bias=False)


def _k_major(p: Problem) -> bool:
    return p.layout is Layout.RAGGED_M and p.b_strides[-2] == 1


def supports(problem: Problem, device: Device) -> str | None:
    """The reason this kernel can't compute `problem` on `device`, or None."""
    p = problem
    if reason := refusal(p, device):
        return reason
    if p.layout not in (Layout.RAGGED_M, Layout.RAGGED_K):
        return f"takes ragged rows and a ragged k, not {p.layout.value}"
    if p.dtype not in _DTYPES or p.out_dtype not in (p.dtype, torch.float32):
        return f"multiplies bfloat16 or float16 and writes it or float32, not {p.dtype} to {p.out_dtype}"
    if p.layout is Layout.RAGGED_K and p.groups * p.m > 2**31 - 128:
        return f"counts rows in 32 bits, which {p.groups} groups of {p.m} exceed"
    return unloadable_groups(p) or nvrtc.missing()


def fitted(config: Config, depth: float, groups: int, k_major: bool, device: Device) -> Config:
    """`config` with the slots that stores need where a tile has `depth` summands, and as many stages, 2 to 8, as there
    is room for."""
    config = replace(config, store_slots=2 if depth <= _SHORT_K else 1)
    room = power_of_two(groups, 32), k_major
    deeper = (replace(config, num_stages=stages) for stages in range(8, 2, -1))
    fits = (c for c in deeper if c.smem_bytes(*room) <= device.smem_bytes)
    return next(fits, replace(config, num_stages=2))


_LOW = Config(block_m=64, block_n=256, dynamic=False)
_NARROW = Config(block_n=128, group_m=4)
_BETWEEN = Config(block_n=160)
_SHARED = Config(block_n=256, mode="split", dynamic=False)


@lru_cache(maxsize=1024)
def configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    """Configs worth timing. Rows that begin anywhere in L2's lines make loads the limit, and want the largest tile."""
    found = (Config(), _LOW, _NARROW, _BETWEEN, _SHARED)
    first = Config() if all(problem.aligned_rows) else _SHARED
    depth = problem.mean_group if problem.layout is Layout.RAGGED_K else problem.k
    room = problem.groups, _k_major(problem), device
    return tuple(fitted(c, depth, *room) for c in dict.fromkeys((first, *found)))


@lru_cache(maxsize=64)
def _kernel(config: Config, p: Problem, bias_bytes: int, add: bool, groups: int, device: int) -> nvrtc.Kernel:
    """The kernel on GPU number `device`, the current one, for problems like `p` and up to `groups` groups."""
    k_major = _k_major(p)
    source = config.source(p.dtype, p.layout, k_major, bias_bytes, out_bytes=p.out_dtype.itemsize, add=add)
    return nvrtc.kernel(nvrtc.compiled(source), "grouped_mm", types(), 3 * 128, config.smem_bytes(groups, k_major))


def run(
    problem: Problem, operands: Operands, config: Config, out: torch.Tensor | None, add: bool = False
) -> torch.Tensor:
    """Compute into `out` (rows past offs[-1] are left alone) or a new tensor; queues one kernel, waits for nothing."""
    if out is not None and out.dim() == 3 and out.stride(0) != problem.m * out.stride(1):
        return out.copy_(run(problem, operands, config, None))  # groups' results are rows of one matrix
    return filled(problem, operands, out, partial(_queue, problem, operands, config, add=add))


def add(problem: Problem, operands: Operands, config: Config, out: torch.Tensor | None) -> torch.Tensor:
    """Add to `out`. Boxes of 64 rows and 32 columns, float32, are added as they are stored."""
    assert out is not None
    p = problem
    boxes = p.out_dtype is torch.float32 and storable(out) and out.stride(0) == p.m * out.stride(1)
    if not boxes or p.layout is not Layout.RAGGED_K or p.m < 64 or config.block_n % 32:
        return out.add_(run(problem, operands, config, None))
    return run(problem, operands, config, out, add=True) if p.k else out


def loadable(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """`bias` as kernels load it: contiguous, of `dtype` or float32, at a multiple of 8 bytes."""
    if bias is not None and (bias.dtype not in (dtype, torch.float32) or bias.data_ptr() % 8):
        bias = bias.to(torch.float32, copy=True)
    return None if bias is None else bias.contiguous()


def _queue(p: Problem, o: Operands, config: Config, out: torch.Tensor, add: bool) -> None:
    assert o.offs is not None
    with current_device(out.device):
        bias = loadable(o.bias, p.dtype)
        tensors = (o.a, o.b, out, o.offs, tile_counter(config.dynamic, out), *(() if bias is None else (bias,)))
        device, bias_bytes = out.get_device(), 0 if bias is None else bias.element_size()
        addresses = tuple(map(torch.Tensor.data_ptr, tensors))
        pitch = out.stride(-2) * out.element_size()
        _launch(p, config, add, device, nvrtc.current_stream(device), pitch, bias_bytes, addresses)()


@lru_cache(maxsize=4096)
def _launch(
    p: Problem,
    config: Config,
    add: bool,
    device: int,
    stream: int,
    pitch: int,
    bias_bytes: int,
    addresses: tuple[int, ...],
) -> Callable[[], None]:
    """The launch for tensors at these addresses: a, b, out, offs, the counter and the bias; pitch: bytes between two
    rows of out."""
    a, b, out, offs, counter, *bias = addresses
    k_major, width = _k_major(p), config.block_n
    tensor_map = partial(nvrtc.tensor_map, itemsize=2)
    maps_a: tuple[nvrtc.TensorMap, ...]
    maps_b: tuple[nvrtc.TensorMap, ...]
    if p.layout is Layout.RAGGED_K:
        rows, tiles_m, box = p.groups * p.m, p.groups * -(-p.m // config.block_m), (1, 1, _STEP, _BLOCK)
        maps_a = (tensor_map(a, *nvrtc.ragged(p.m, p.a_strides[1] * 2, 2), box),) * 2
        maps_b = (tensor_map(b, *nvrtc.ragged(p.n, p.b_strides[0] * 2, 2), box),) * 3
    else:
        rows, tiles_m = p.m, (p.m + p.groups * (config.block_m - 1)) // config.block_m  # at most
        of_a = (p.m, p.k), (p.a_strides[0] * 2,)
        pitches = p.b_strides[0] * 2, max(p.b_strides[1:]) * 2
        maps_a = tuple(tensor_map(a, *of_a, (min(n, p.m), _STEP)) for n in (_BLOCK, config.block_m))
        if k_major:
            columns = (_BLOCK, width, p.n % width % _BLOCK or _BLOCK)
            maps_b = tuple(tensor_map(b, (p.groups, p.n, p.k), pitches, (1, n, _STEP)) for n in columns)
        else:
            maps_b = (tensor_map(b, (p.groups, p.k, p.n), pitches, (1, _STEP, _BLOCK)),) * 3
    size = p.out_dtype.itemsize
    maps = (*maps_a, *maps_b, nvrtc.tensor_map(out, (rows, p.n), (pitch,), (_BLOCK, 128 // size), size))
    kernel = _kernel(config, _key(p), bias_bytes, add, power_of_two(p.groups, 32), device)
    programs = min(tiles_m * -(-p.n // width), Device.current(torch_device(device)).sm_count)
    arguments = (*maps, offs, *(bias or (0,)), out, counter, p.m, p.groups, p.n, p.k, pitch)
    return kernel.launch(programs, stream, arguments, wants_pdl(p))


BACKEND = Backend(
    name="cuda_grouped",
    summary="CUDA C++ kernel for Hopper: tiles of 64 to 256 columns, no idle ones, TMA ring, wgmma, stores overlapped",
    supports=supports,
    configs=configs,
    run=run,
    add=add,
)
