"""Host side of the FP8 quantisers' kernels: outputs, configs, launches; api.py checks dtypes and shapes."""

from dataclasses import dataclass
from math import gcd, prod

import torch
import triton

from expertile import ragged
from expertile.formats.fp8 import TOKEN_BLOCK, aligned_offs
from expertile.ops.launch.device import machine
from expertile.ops.launch.kernels import launch
from expertile.ops.quantize.kernels import (
    Shape,
    quantize_norm_kernel,
    quantize_per_row_kernel,
    quantize_rows_kernel,
    quantize_tokens_kernel,
    quantize_weights_kernel,
    rstd_kernel,
)
from expertile.ops.quantize.strips_kernel import quantize_strips_kernel
from expertile.ops.rows.config import as_rows, unit

BLOCK = 128
SOURCES = ("plain", "swiglu", "swiglu_interleaved", "rms_norm")
# Blocks of a row that one program holds for its norm: 32 K elements. Longer rows are read twice.
_MOST_HELD = 256
MOST_IN_ROW = 32768  # elements of a row that a program with one scale for it holds
_FARTHEST_ROW = 2**23  # elements between two rows
# So that 16 warps of the kernel that holds strips share an SM.
_STRIPS_REGISTERS = 128

Optional = torch.Tensor | None
Quantized = tuple[torch.Tensor, torch.Tensor]  # e4m3 values, float32 scales


@dataclass(frozen=True)
class TokensConfig:
    """`per_program` tiles of 128 tokens × 128 channels, one after another, by `num_warps` warps: quantised along
    channels `rows` tokens at a time, along tokens `cols` channels at a time. `most_registers` of a thread let more
    programs share an SM."""

    per_program: int
    num_warps: int
    rows: int
    cols: int
    most_registers: int | None


@dataclass(frozen=True)
class StripsConfig:
    """As `TokensConfig`, of the kernel that holds a tile in strips: `per_program` of them by 4 or 8 warps.

    `staged`: the transposed copy goes through shared memory."""

    per_program: int
    num_warps: int
    staged: bool = False


@dataclass(frozen=True)
class WeightsConfig:
    """`per_program` blocks of 128×128, one after another, by `num_warps` warps; `num_stages` of them on their way at
    once, 1 loading each when it is its turn. `most_registers` of a thread let more programs share an SM."""

    per_program: int
    num_warps: int
    num_stages: int = 1
    most_registers: int | None = None


def tokens_config(source: str, by: int = 16) -> TokensConfig:
    """Config for 128 tokens × 128 channels quantised both ways, where rows are multiples of `by` elements. No value
    spills."""
    if source.startswith("swiglu") and by >= 16:
        return TokensConfig(4, 4, 32, 16, 168)
    return TokensConfig(4, 8, 64, 32, 128 if by >= 16 else None)


def strips_config(source: str, itemsize: int = 2) -> StripsConfig:
    """Config for tiles that are loaded once and held in strips, of elements of so many bytes."""
    if source.startswith("swiglu"):
        return StripsConfig(1, 8, staged=True)
    return StripsConfig(1, 4) if source == "plain" and itemsize == 2 else StripsConfig(2, 8)


def holds_tiles(x_rows: torch.Tensor, source: str, by: int) -> bool:
    """Whether the kernel that holds tiles can take these rows, multiples of `by` elements."""
    # Gate and up in float32 would be 128 KB of shared memory, more than GPUs before 9.0 have.
    small = x_rows.dtype.itemsize == 2 or not source.startswith("swiglu")
    return small and not triton.knobs.runtime.interpret and by >= 8 and x_rows.data_ptr() % 16 == 0


def weights_config(blocks: int, itemsize: int, sm_count: int) -> WeightsConfig:
    """Config for that many blocks of 128×128: a row of them in turn where there are enough."""
    if itemsize == 4:
        # A block is 64 KB, which two programs an SM need only load to keep enough on their way: stages only cost.
        return WeightsConfig(1, 16, 1, 64)
    return WeightsConfig(8, 16, 3, 64) if blocks >= 8 * 4 * sm_count else WeightsConfig(1, 16)


def width(x: torch.Tensor, source: str) -> int:
    """Elements of a row of what is quantised."""
    return x.shape[-1] // 2 if source.startswith("swiglu") else x.shape[-1]


def scales_like(x: torch.Tensor, blocks: int) -> torch.Tensor:
    """Room for `blocks` scales of each row of x [..., C]: [..., blocks] float32 on x's device.

    The scales of a block lie side by side for all R rows, which is how products read them. Strides are (1, pitch) if x
    has two dimensions, pitch = 4 · ceil(R / 4), so that every block's begin on a multiple of 16 bytes."""
    rows = prod(x.shape[:-1])
    # Rounded up by a remainder: torch.export knows that it is not negative, and asks nothing of R.
    scales = x.new_empty((blocks, rows + -rows % 4), dtype=torch.float32)[:, :rows].t()
    return scales if x.dim() == 2 else scales.view(*x.shape[:-1], blocks)


def room_for_rows(x: torch.Tensor, source: str) -> Quantized:
    """Values [..., K], and scales [..., ceil(K / 128)] as `scales_like` lays them out."""
    k = width(x, source)
    return x.new_empty((*x.shape[:-1], k), dtype=torch.float8_e4m3fn), scales_like(x, (k + BLOCK - 1) // BLOCK)


def room_for_one_scale(x: torch.Tensor) -> Quantized:
    """Values [..., K] and scales [..., 1]."""
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def room_for_tokens(x: torch.Tensor, offs: torch.Tensor, source: str) -> Quantized:
    """Of the transposed copy: values [K, P], and scales [K, P / 128] of which a program stores neighbouring ones."""
    k, room = width(x, source), (x.shape[0] + (TOKEN_BLOCK - 1) * offs.shape[0]) // TOKEN_BLOCK
    values = x.new_empty((k, room * TOKEN_BLOCK), dtype=torch.float8_e4m3fn)
    return values, x.new_empty((room, k), dtype=torch.float32).t()


def room_for_weights(w: torch.Tensor) -> Quantized:
    """Values as w [..., N, K], scales [..., ceil(N / 128), ceil(K / 128)]."""
    blocks = ((size + BLOCK - 1) // BLOCK for size in w.shape[-2:])
    return w.new_empty(w.shape, dtype=torch.float8_e4m3fn), w.new_empty((*w.shape[:-2], *blocks), dtype=torch.float32)


def quantize_rows(
    x: torch.Tensor, source: str = "plain", weight: Optional = None, eps: float = 0.0, power_of_two: bool = False
) -> Quantized:
    """Launch the 1×128 kernel: what `room_for_rows` has, filled."""
    values, scales = room_for_rows(x, source)
    k, blocks = values.shape[-1], scales.shape[-1]
    if values.numel() == 0:
        return values, scales
    x_rows = _near_rows(x)
    rows, stride, pitch = x_rows.shape[0], x_rows.stride(0), scales.stride(-1)
    if source == "rms_norm" and blocks <= _MOST_HELD:
        _quantize_norm(x_rows, weight, values, scales, eps, power_of_two)
        return values, scales
    held, num_warps = {"plain": (16, 4), "swiglu": (32, 8)}.get(source, (8, 4))  # blocks of one program
    rstd = _rstd(x_rows, eps) if source == "rms_norm" else None
    divide = _divide(x, source, power_of_two)
    if source == "swiglu_interleaved" and x.dtype.itemsize == 2 and stride % 2 == 0 and x_rows.data_ptr() % 4 == 0:
        source = "swiglu_words_bf16" if x.dtype is torch.bfloat16 else "swiglu_words_fp16"
        x_rows, stride = x_rows.view(torch.int32), stride // 2
    # Blocks of many rows, so that a program stores neighbouring scales.
    across = gcd(blocks, 2)
    block_r = max(1, held // across)
    chunks = -(-blocks // across)
    by = unit(k, stride)
    even = (rows % block_r == 0, k == chunks * across * BLOCK)
    tensors, scalars = (x_rows, weight, rstd, values, scales), (rows, k // by, stride // by, chunks, pitch)
    constants = (Shape(source, by, *even, power_of_two, divide, block_r, across),)
    launch(quantize_rows_kernel, -(-rows // block_r) * chunks, tensors, scalars, constants, num_warps=num_warps)
    return values, scales


def quantize_per_row(x: torch.Tensor) -> Quantized:
    """Launch the kernel for whole rows, one at least, of 1 to MOST_IN_ROW elements. A thread has 16 elements, or up to
    64 of long rows."""
    k, (values, scales) = x.shape[-1], room_for_one_scale(x)
    x_rows = _near_rows(x)
    rows, stride = x_rows.shape[0], x_rows.stride(0)
    held = ragged.power_of_two(-(-k // BLOCK))
    block_r = max(1, 16 // held)
    by, even = unit(k, stride), (rows % block_r == 0, k == held * BLOCK)
    tensors, scalars = (x_rows, values, scales), (rows, k // by, stride // by)
    constants = (Shape("plain", by, *even, False, _divide(x, "plain", False), block_r, held),)
    launch(
        quantize_per_row_kernel, -(-rows // block_r), tensors, scalars, constants, num_warps=min(16, max(4, held // 4))
    )
    return values, scales


def _quantize_norm(
    x_rows: torch.Tensor, weight: Optional, values: torch.Tensor, scales: torch.Tensor, eps: float, power_of_two: bool
) -> None:
    """`block_r` whole rows in one program, quantised in two `pieces` of a row (four of long ones) one after another: a
    thread has 32 elements, for which 64 registers do, so that an SM has 64 KB of rows on their way."""
    rows, k = x_rows.shape
    held = ragged.power_of_two(-(-k // BLOCK))
    block_r, pieces = max(1, 16 // held), min(4 if held > 128 else 2, held)
    num_warps = min(16, block_r * held // 8)
    narrow = all(t.element_size() == 2 for t in (x_rows, weight) if t is not None)
    registers = 64 if narrow and 16 <= held <= 128 and k % BLOCK == 0 else None
    across = ragged.power_of_two(-(-k // BLOCK // pieces))
    pieces, by = -(-k // (across * BLOCK)), unit(k, x_rows.stride(0))
    even = (rows % block_r == 0, k == pieces * across * BLOCK)
    tensors, scalars = (x_rows, weight, values, scales), (rows, k // by, x_rows.stride(0) // by, scales.stride(-1), eps)
    constants = (Shape("rms_norm", by, *even, power_of_two, 0, block_r, across, pieces),)
    programs = -(-rows // block_r)
    launch(quantize_norm_kernel, programs, tensors, scalars, constants, num_warps=num_warps, most_registers=registers)


def quantize_tokens(
    x: torch.Tensor,
    offs: torch.Tensor,
    source: str = "plain",
    weight: Optional = None,
    eps: float = 0.0,
    power_of_two: bool = False,
    both: bool = True,
    config: TokensConfig | StripsConfig | None = None,
) -> tuple[Quantized | None, Quantized, torch.Tensor]:
    """Launch the kernel that reads 128 tokens × 128 channels once: (rows as `quantize_rows` makes them if `both`, the
    transposed copy, its offs)."""
    tokens, groups = x.shape[0], offs.shape[0]
    rows = room_for_rows(x, source) if both else None
    turned = room_for_tokens(x, offs, source)
    k, room = turned[1].shape
    # Rows behind the last group are quantised as rows all the same, in blocks of their own.
    token_blocks = (tokens + (TOKEN_BLOCK - 1) * (groups + 1)) // TOKEN_BLOCK if both else room
    if token_blocks == 0 or k == 0:
        return rows, turned, aligned_offs(offs)
    ends = torch.empty(groups, dtype=torch.int32, device=x.device)
    x_rows = _near_rows(x)
    rstd = _rstd(x_rows, eps) if source == "rms_norm" else None
    by = unit(k, x_rows.stride(0))
    if config is None:
        held = holds_tiles(x_rows, source, by)
        config = strips_config(source, x.element_size()) if held else tokens_config(source, by)
    chunks = -(-k // (BLOCK * config.per_program))
    tensors = (x_rows, weight, rstd, offs.contiguous(), *(rows or (None, None)), *turned, ends)
    scalars = (tokens, k // by, x_rows.stride(0) // by, room, groups, chunks)
    how = (source, by, False, k % BLOCK == 0, power_of_two, _divide(x, source, power_of_two))
    count, warps, groups_p2 = token_blocks * chunks, config.num_warps, ragged.power_of_two(groups, 32)
    if isinstance(config, StripsConfig):
        of_strips = (groups_p2, config.staged, Shape(*how, PIECES=config.per_program))
        most = _STRIPS_REGISTERS
        launch(quantize_strips_kernel, count, tensors, scalars, of_strips, num_warps=warps, most_registers=most)
    else:
        of_tokens = (groups_p2, config.cols, Shape(*how, config.rows, PIECES=config.per_program))
        kernel, most_registers = quantize_tokens_kernel, config.most_registers
        launch(kernel, count, tensors, (*scalars, 0), of_tokens, num_warps=warps, most_registers=most_registers)
    return rows, turned, ends


def quantize_weights(w: torch.Tensor, power_of_two: bool = False, config: WeightsConfig | None = None) -> Quantized:
    """Launch the 128×128 kernel: what `room_for_weights` has, filled."""
    (n, k), (values, scales) = w.shape[-2:], room_for_weights(w)
    row_tiles, blocks = scales.shape[-2:]
    if w.numel() == 0:
        return values, scales
    stack = w.reshape(-1, n, k) if w.dim() != 3 else w
    if (stack.stride(2) != 1 and k > 1) or stack.stride(1) >= _FARTHEST_ROW:
        stack = stack.contiguous()
    if config is None:
        tiles = stack.shape[0] * row_tiles * blocks
        config = weights_config(tiles, w.element_size(), machine(w.get_device()).sm_count)
    by, chunks = unit(k, stack.stride(0), stack.stride(1)), -(-blocks // config.per_program)
    even, divide = (n % BLOCK == 0, k % BLOCK == 0), _divide(w, "plain", power_of_two)
    tensors = (stack, values, scales)
    scalars = (n, k // by, stack.stride(0) // by, stack.stride(1) // by, chunks, row_tiles)
    constants = (config.num_stages, Shape("plain", by, *even, power_of_two, divide, PIECES=config.per_program))
    programs = stack.shape[0] * row_tiles * chunks
    launch(
        quantize_weights_kernel,
        programs,
        tensors,
        scalars,
        constants,
        num_warps=config.num_warps,
        most_registers=config.most_registers,
    )
    return values, scales


def _near_rows(x: torch.Tensor) -> torch.Tensor:
    """`as_rows`, 128 of them within the reach of 32 bits."""
    rows = as_rows(x)
    return rows if rows.stride(0) < _FARTHEST_ROW else rows.contiguous()


def _rstd(x_rows: torch.Tensor, eps: float) -> torch.Tensor:
    rows, k = x_rows.shape
    rstd = torch.empty(rows, dtype=torch.float32, device=x_rows.device)
    by = unit(k, x_rows.stride(0))
    block_c = min(4096, ragged.power_of_two(k))
    block_r = max(1, 4096 // block_c)
    scalars = (rows, k // by, x_rows.stride(0) // by, eps)
    launch(rstd_kernel, -(-rows // block_r), (x_rows, rstd), scalars, (by, block_r, block_c), num_warps=4)
    return rstd


def _divide(x: torch.Tensor, source: str, power_of_two: bool) -> int:
    """How elements are divided by their scale; see the kernels."""
    if power_of_two or source != "plain":
        return 0
    return 1 if x.dtype.itemsize == 2 else 2
