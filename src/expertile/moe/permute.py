"""permutation: which row of the expert order every routing slot goes to, without waiting for the host.

Slot s = t * k + j is token t's j-th expert. Rows are ordered by expert and, within an expert, by slot: a stable
counting sort of topk_ids,

    positions[s] = offs[e - 1] + |{s' < s: topk_ids[s'] = e}|     with e = topk_ids[s], offs = running sum of the counts

so equal inputs give equal orders, on every machine. A slot whose id is no expert (`num_experts` is the mark for a
dropped one) has no row.

What takes time is latency, not bytes, so there are three launches of many small programs:

    count   the histogram of every block of slots                             [E, blocks]
    scan    for every expert the running sum of its counts over the blocks
    place   rank within the block (slots before with the same id) + the block's base + the expert's start

On Hopper they are CUDA C++ (`_permute.cu`), blocks of 512 or 1024 slots: a warp ranks its slots by `match`. Elsewhere
they are Triton's, blocks of 128, which rank by comparing every two. Up to 1024 slots one program does it in one launch;
Triton's sorts id * 1024 + slot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
import triton
import triton.language as tl

from expertile.ops.checks import check_integer
from expertile.ops.launch import nvrtc
from expertile.ops.launch.device import capability, current_device, on_kernels, supports_pdl
from expertile.ops.launch.kernels import launch
from expertile.ops.launch.pdl import begin
from expertile.ops.torch_op import define, traced
from expertile.ragged import power_of_two

BLOCK = 128  # slots that are ranked against each other
SMALL = 1024  # slots that one program sorts
MOST_EXPERTS = 2048  # of the kernels, whose histograms stay within registers and shared memory
_BINS = 2048  # of one histogram: experts * blocks of one program
_WARPS = 8  # of a program of `_permute.cu`
# Up to so many slots Triton's sort is as fast as `_permute.cu`; from so many on a program of that takes 1024, else 512.
_FEW, _LARGE = 256, 2**17
_PARAMETERS = {  # of its kernels: addresses, then integers
    "count_slots": (nvrtc.ADDRESS,) * 2 + (nvrtc.INT,) * 3,
    "scan_counts": (nvrtc.ADDRESS,) * 2 + (nvrtc.INT,) * 2,
    "place_slots": (nvrtc.ADDRESS,) * 7 + (nvrtc.INT,) * 4,
}


@dataclass(frozen=True)
class Permutation:
    """The expert order of T * k slots; R = T * k.

    Attributes:
        offs: [E] int32, the end row of each expert.
        rows: [R] int32, the token of each row; 0 past offs[-1].
        slots: [R] int32, the slot t * k + j of each row; 0 past offs[-1].
        positions: [T, k] int32, the row of each slot; -1 for a dropped one.
    """

    offs: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor


@triton.jit
def _known(ids, experts):
    """The ids as int32, -1 where they name no expert. Compared before they are narrowed: nothing wraps around."""
    return tl.where((ids >= 0) & (ids < experts), ids, -1).to(tl.int32)


@triton.jit
def _expert(ids_ptr, slot, mask, experts):
    """Expert of each slot, -1 where there is none."""
    return _known(tl.load(ids_ptr + slot, mask=mask, other=-1), experts)


@triton.jit
def _sort_kernel(tensors, scalars, SLOTS_P2: tl.constexpr, EXPERTS_P2: tl.constexpr, PDL: tl.constexpr):
    ids_ptr, offs_ptr, rows_ptr, slots_ptr, positions_ptr = tensors
    num_slots, top_k, experts = scalars
    begin(PDL)
    i = tl.arange(0, SLOTS_P2)
    expert = _expert(ids_ptr, i, i < num_slots, experts)
    key = tl.sort(tl.where(expert < 0, experts, expert) * SLOTS_P2 + i)
    slot = key % SLOTS_P2
    kept = key < experts * SLOTS_P2
    tl.store(slots_ptr + i, tl.where(kept, slot, 0), mask=i < num_slots)
    tl.store(rows_ptr + i, tl.where(kept, slot // top_k, 0), mask=i < num_slots)
    tl.store(positions_ptr + slot, tl.where(kept, i, -1), mask=slot < num_slots)
    e = tl.arange(0, EXPERTS_P2)
    counts = tl.histogram(tl.maximum(expert, 0), EXPERTS_P2, mask=expert >= 0)
    tl.store(offs_ptr + e, tl.cumsum(counts, 0), mask=e < experts)


@triton.jit
def _count_kernel(
    tensors, scalars, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EXPERTS_P2: tl.constexpr, PDL: tl.constexpr
):
    """counts [E, blocks]: slots of each expert in each block; a program takes BLOCKS blocks. Clears rows and slots."""
    ids_ptr, rows_ptr, slots_ptr, counts_ptr = tensors
    num_slots, blocks, experts = scalars
    begin(PDL)
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK * BLOCKS)
    slot = program * (BLOCK * BLOCKS) + i
    there = slot < num_slots
    expert = _expert(ids_ptr, slot, there, experts)
    tl.store(rows_ptr + slot, 0, mask=there)
    tl.store(slots_ptr + slot, 0, mask=there)
    # Blocks vary fastest, so that an expert's counts are written side by side.
    counts = tl.histogram(tl.maximum(expert, 0) * BLOCKS + i // BLOCK, EXPERTS_P2 * BLOCKS, mask=expert >= 0)
    bins = tl.arange(0, EXPERTS_P2 * BLOCKS)
    block = program * BLOCKS + bins % BLOCKS
    counted = (bins // BLOCKS < experts) & (block < blocks)
    tl.store(counts_ptr + (bins // BLOCKS).to(tl.int64) * blocks + block, counts, mask=counted)


@triton.jit
def _scan_kernel(counts_ptr, totals_ptr, blocks, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """An expert's counts become the sums of those before them; totals [E] the sum of all."""
    begin(PDL)
    expert = tl.program_id(0)
    counts_ptr += expert.to(tl.int64) * blocks
    total = tl.zeros([], tl.int32)
    for start in range(0, blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        counts = tl.load(counts_ptr + block, mask=block < blocks, other=0)
        tl.store(counts_ptr + block, total + tl.cumsum(counts, 0) - counts, mask=block < blocks)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, total)


@triton.jit
def _place_kernel(tensors, scalars, BLOCK: tl.constexpr, EXPERTS_P2: tl.constexpr, PDL: tl.constexpr):
    ids_ptr, before_ptr, totals_ptr, offs_ptr, rows_ptr, slots_ptr, positions_ptr = tensors
    num_slots, top_k, blocks, experts = scalars
    begin(PDL)
    block = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    slot = block * BLOCK + i
    there = slot < num_slots
    ids = tl.load(ids_ptr + slot, mask=there, other=-1)
    # A thread has a slot (slots along the last dimension) and compares it with 16 ids at a time: sums across lanes run
    # at an eighth of the rate. `before` counts from the first of the 16; what lies past num_slots is after every slot.
    rank = tl.zeros([BLOCK], tl.int32)
    first, before = block * BLOCK, i
    j = tl.arange(0, 16)
    for _ in range(0, BLOCK, 16):
        other = tl.load(ids_ptr + first + j, mask=j < num_slots - first)
        rank += tl.sum(((ids[None, :] == other[:, None]) & (j[:, None] < before[None, :])).to(tl.int32), 0)
        first += 16
        before -= 16
    expert = _known(ids, experts)
    e = tl.arange(0, EXPERTS_P2)
    totals = tl.load(totals_ptr + e, mask=e < experts, other=0)
    ends = tl.cumsum(totals, 0)
    if block == 0:
        tl.store(offs_ptr + e, ends, mask=e < experts)
    kept = expert >= 0
    known = tl.maximum(expert, 0)
    earlier = tl.load(before_ptr + known.to(tl.int64) * blocks + block, mask=kept, other=0)
    position = tl.gather(ends - totals, known, 0) + earlier + rank
    tl.store(positions_ptr + slot, tl.where(kept, position, -1), mask=there)
    tl.store(rows_ptr + position, slot // top_k, mask=kept)
    tl.store(slots_ptr + position, slot, mask=kept)


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _empty(topk_ids: torch.Tensor, num_experts: int) -> _Parts:
    num_slots = topk_ids.numel()
    offs, rows, slots = (
        torch.empty(n, dtype=torch.int32, device=topk_ids.device) for n in (num_experts, num_slots, num_slots)
    )
    return offs, rows, slots, torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)


@lru_cache(maxsize=64)
def _cuda_kernel(name: str, tile: int, long_ids: bool, experts: int, device: int) -> nvrtc.Kernel:
    """Of `_permute.cu`, on GPU number `device`, the current one, for up to so many experts."""
    macros = {"WARPS": _WARPS, "GROUPS": tile // (32 * _WARPS), "LONG_IDS": int(long_ids)}
    binary = nvrtc.compiled(nvrtc.program(macros, "", nvrtc.GROUPS, Path(__file__).with_name("_permute.cu")))
    return nvrtc.kernel(binary, name, _PARAMETERS[name], 32 * _WARPS, 4 * (_WARPS * experts + _WARPS))


@lru_cache(maxsize=1024)
def _cuda_launches(
    slots: int,
    top_k: int,
    experts: int,
    tile: int,
    long_ids: bool,
    device: int,
    stream: int,
    addresses: tuple[int, ...],
) -> tuple[Callable[[], None], ...]:
    """Of tensors at these addresses: ids, the scratch memory, and the parts of a permutation."""
    ids, totals, *parts = addresses
    tiles, counts = -(-slots // tile), totals + 4 * experts
    sizes, steps = (tiles, experts), []
    if tiles > 1:
        steps = [("count_slots", tiles, (ids, counts, slots)), ("scan_counts", -(-experts // _WARPS), (counts, totals))]
    else:
        counts = totals = 0
    steps.append(("place_slots", tiles, (ids, counts, totals, *parts, slots, top_k)))
    most = power_of_two(experts, 32)
    return tuple(
        _cuda_kernel(name, tile, long_ids, most, device).launch(programs, stream, (*given, *sizes), True)
        for name, programs, given in steps
    )


def _by_cuda(topk_ids: torch.Tensor, num_experts: int, parts: _Parts) -> None:
    (tokens, top_k), device = topk_ids.shape, topk_ids.get_device()
    slots = tokens * top_k
    tile = 1024 if slots <= 1024 or slots >= _LARGE else 512
    scratch = torch.empty(num_experts * (-(-slots // tile) + 1), dtype=torch.int32, device=topk_ids.device)
    with current_device(topk_ids.device):
        addresses = tuple(x.data_ptr() for x in (topk_ids, scratch, *parts))
        long_ids, stream = topk_ids.dtype is torch.int64, nvrtc.current_stream(device)
        for launch in _cuda_launches(slots, top_k, num_experts, tile, long_ids, device, stream, addresses):
            launch()


def _on_device(topk_ids: torch.Tensor, num_experts: int) -> _Parts:
    _, rows, slots, _ = parts = _empty(topk_ids, num_experts)
    num_slots, top_k = topk_ids.numel(), topk_ids.shape[1]
    hopper = topk_ids.is_cuda and capability(topk_ids.get_device()) == (9, 0) and nvrtc.missing() is None
    if hopper and num_slots > _FEW:
        _by_cuda(topk_ids, num_experts, parts)
        return parts
    experts_p2, pdl = power_of_two(num_experts, 32), supports_pdl(topk_ids)
    queue = partial(launch, num_warps=4, pdl=pdl)
    if num_slots <= SMALL:
        constants = (power_of_two(num_slots, 128), experts_p2, pdl)
        queue(_sort_kernel, 1, (topk_ids, *parts), (num_slots, top_k, num_experts), constants)
        return parts
    blocks = -(-num_slots // BLOCK)
    together = min(8, _BINS // experts_p2)
    scratch = torch.empty(num_experts * (blocks + 1), dtype=torch.int32, device=topk_ids.device)
    totals, counts = scratch[:num_experts], scratch[num_experts:]
    tensors, sizes = (topk_ids, rows, slots, counts), (num_slots, blocks, num_experts)
    queue(_count_kernel, -(-blocks // together), tensors, sizes, (BLOCK, together, experts_p2, pdl))
    queue(_scan_kernel, num_experts, (counts, totals), (blocks,), (min(2048, power_of_two(blocks, 128)), pdl))
    scalars = (num_slots, top_k, blocks, num_experts)
    queue(_place_kernel, blocks, (topk_ids, counts, totals, *parts), scalars, (BLOCK, experts_p2, pdl))
    return parts


def _in_torch(topk_ids: torch.Tensor, num_experts: int) -> _Parts:
    top_k = topk_ids.shape[1]
    expert = topk_ids.flatten().long()
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    order = torch.sort(expert, stable=True).indices
    kept = torch.arange(expert.numel(), device=expert.device) < expert.numel() - counts[-1]
    slots = torch.where(kept, order, 0)
    row = torch.arange(expert.numel(), device=expert.device)
    positions = torch.empty_like(expert).scatter_(0, order, torch.where(kept, row, -1))
    parts = (counts[:-1].cumsum(0), slots // max(top_k, 1), slots, positions.view(topk_ids.shape))
    offs, rows, slots, positions = (x.to(torch.int32) for x in parts)
    return offs, rows, slots, positions


def _parts(topk_ids: torch.Tensor, num_experts: int) -> _Parts:
    if topk_ids.numel() == 0:
        offs, rows, slots, positions = _empty(topk_ids, num_experts)
        return offs.zero_(), rows, slots, positions
    if on_kernels(topk_ids) and num_experts <= MOST_EXPERTS:
        return _on_device(topk_ids.contiguous(), num_experts)
    return _in_torch(topk_ids, num_experts)


_call = define("moe_permutation", _parts, fake=_empty)


def check_ids(topk_ids: object, num_experts: int, values: bool = False) -> None:
    """ValueError unless topk_ids is [T, k], int32 or int64; with `values`, also if an id is not in
    -1 … num_experts, which waits for the GPU."""
    if not isinstance(topk_ids, torch.Tensor):
        raise ValueError(f"topk_ids: expected a torch.Tensor, got {type(topk_ids).__name__}")
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"topk_ids: expected shape [T, k], int32 or int64, got {list(topk_ids.shape)} {topk_ids.dtype}"
        )
    check_integer("num_experts", num_experts, 1)
    if values and topk_ids.numel():
        low, high = (int(x) for x in torch.aminmax(topk_ids))
        if low < -1 or high > num_experts:
            wrong = low if low < -1 else high
            raise ValueError(f"topk_ids: expected -1 … {num_experts} (-1 and {num_experts} = dropped), got {wrong}")


def permutation(topk_ids: torch.Tensor, num_experts: int, *, check: bool = False) -> Permutation:
    """The stable expert order of topk_ids [T, k] (int32 or int64).

    A slot whose id is `num_experts` or -1 is dropped; so is one out of range, unless `check` finds it first. No host
    synchronisation, so that a CUDA graph may be replayed with other ids; bit-identical from run to run.

    Raises:
        ValueError: another shape or dtype, no expert, or, with `check` (which waits for the GPU), an id out of range.
    """
    check_ids(topk_ids, num_experts, check)
    return Permutation(*(_call if traced(topk_ids) else _parts)(topk_ids, num_experts))
