"""Host side of the FP8 quantisers' kernels: outputs, configs, launches; quantize.py checks dtypes and shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
import triton

from expertile.ops._quantize_kernels import (
    quantize_rows_kernel,
    quantize_tokens_kernel,
    quantize_weights_kernel,
    rstd_kernel,
)
from expertile.ops._rows import as_rows, machine, unit
from expertile.ops._rows_launch import launch
from expertile.quant import TOKEN_BLOCK, aligned_offs

BLOCK = 128
SOURCES = ("plain", "swiglu", "swiglu_interleaved", "rms_norm")
# Blocks of a row that one program holds for its norm: 32 K elements. Longer rows are read twice.
_MOST_HELD = 256
_FARTHEST_ROW = 2**23  # elements between two rows

Optional = torch.Tensor | None
Quantized = tuple[torch.Tensor, torch.Tensor]  # e4m3 values, float32 scales


@dataclass(frozen=True)
class RowsConfig:
    """`blocks` blocks of 1×128 in one program, a power of two, among `num_warps` warps."""

    blocks: int
    num_warps: int


@dataclass(frozen=True)
class TokensConfig:
    """`per_program` tiles of 128 tokens × 128 channels, one after another, by `num_warps` warps: quantised along
    channels `rows` tokens at a time, along tokens `cols` channels at a time. `most_registers` of a thread let more
    programs share an SM."""

    per_program: int
    num_warps: int = 4
    rows: int = 32
    cols: int = 32
    most_registers: int | None = None


@dataclass(frozen=True)
class WeightsConfig:
    """`per_program` blocks of 128×128, one after another, by `num_warps` warps; `num_stages` of them on their way at
    once, 1 loading each when it is its turn. `most_registers` of a thread let more programs share an SM."""

    per_program: int
    num_warps: int
    num_stages: int = 1
    most_registers: int | None = None


def rows_configs(source: str, k: int) -> tuple[RowsConfig, ...]:
    """Configs for 1×128 blocks of rows of `k` elements, the default first. A norm's program holds whole rows."""
    if source == "rms_norm":
        held = triton.next_power_of_2(-(-k // BLOCK))
        warps = 4 if held <= 32 else 8 if held <= 128 else 16
        default = RowsConfig(max(held, 32), warps)
        more = (RowsConfig(max(held, 32), w) for w in (4, 8, 16) if 1 <= max(held, 32) // w <= 16)
        return tuple(dict.fromkeys((default, *more, RowsConfig(2 * held, warps))))
    return tuple(RowsConfig(b, w) for b, w in ((32, 4), (16, 4), (64, 4), (64, 8), (128, 8), (16, 2), (32, 8)))


def tokens_configs(source: str, by: int = 16) -> tuple[TokensConfig, ...]:
    """Configs for 128 tokens × 128 channels quantised both ways, the default first, where rows are multiples of `by`
    elements. None of them spills."""
    if by < 16:
        return (TokensConfig(4, 8, 64, 32), TokensConfig(4, 4, 32, 16))
    if source.startswith("swiglu"):
        warps4, warps8 = TokensConfig(4, 4, 32, 16, 168), TokensConfig(4, 8, 64, 32, 168)
        return warps4, warps8, replace(warps4, per_program=2), replace(warps4, per_program=1)
    warps8, warps4 = TokensConfig(4, 8, 64, 32, 128), TokensConfig(4, 4, 32, 16, 128)
    rest = (warps4, TokensConfig(4, 8, 64, 64, 128)) if source == "plain" else ()
    return warps8, *rest, *(replace(warps8, per_program=n) for n in (1, 2, 8))


def weights_configs(blocks: int, itemsize: int, sm_count: int) -> tuple[WeightsConfig, ...]:
    """Configs for that many blocks of 128×128, the default first: a row of them in turn where there are enough."""
    many = WeightsConfig(8, 16, 3, 64) if itemsize == 2 else WeightsConfig(8, 16, 3)
    few = WeightsConfig(1, 16)
    rest = (WeightsConfig(4, 16, 2, 64), WeightsConfig(4, 16, 3, 64), WeightsConfig(1, 8), WeightsConfig(8, 8, 2, 128))
    return (many, few, *rest) if blocks >= 8 * 4 * sm_count else (few, many, *rest)


def width(x: torch.Tensor, source: str) -> int:
    """Elements of a row of what is quantised."""
    return x.shape[-1] // 2 if source.startswith("swiglu") else x.shape[-1]


def quantize_rows(
    x: torch.Tensor,
    source: str = "plain",
    weight: Optional = None,
    eps: float = 0.0,
    power_of_two: bool = False,
    config: RowsConfig | None = None,
) -> Quantized:
    """Launch the 1×128 kernel: values [..., K], scales [..., ceil(K / 128)]."""
    k = width(x, source)
    blocks = -(-k // BLOCK)
    values = torch.empty((*x.shape[:-1], k), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((*x.shape[:-1], blocks), dtype=torch.float32, device=x.device)
    if values.numel() == 0:
        return values, scales
    x_rows = _near_rows(x)
    rows, stride = x_rows.shape[0], x_rows.stride(0)
    if config is None:
        config = rows_configs(source, k)[0]
    rstd = None
    if source == "rms_norm" and blocks <= _MOST_HELD:
        across = triton.next_power_of_2(blocks)
    else:
        rstd = _rstd(x_rows, eps) if source == "rms_norm" else None
        if source in ("plain", "swiglu_interleaved") and k % BLOCK == 0 and stride == x_rows.shape[1]:
            # Blocks lie side by side whatever row they are of.
            rows, k, stride, blocks = rows * blocks, BLOCK, stride // blocks, 1
        across = gcd(blocks, 16) if blocks % 4 == 0 else min(triton.next_power_of_2(blocks), 8)
    block_r = max(1, config.blocks // across)
    chunks = -(-blocks // across)
    by = unit(k, stride)
    launch(
        quantize_rows_kernel, -(-rows // block_r) * chunks, (x_rows, weight, rstd, values, scales),
        (rows, k // by, stride // by, chunks, eps),
        (
            source, by, block_r, across, rows % block_r == 0, k == chunks * across * BLOCK, power_of_two,
            _steps(x, source, power_of_two),
        ),
        num_warps=config.num_warps,
    )  # fmt: skip
    return values, scales


def quantize_tokens(
    x: torch.Tensor,
    offs: torch.Tensor,
    source: str = "plain",
    weight: Optional = None,
    eps: float = 0.0,
    power_of_two: bool = False,
    both: bool = True,
    config: TokensConfig | None = None,
) -> tuple[Quantized | None, Quantized, torch.Tensor]:
    """Launch the kernel that reads 128 tokens × 128 channels once: (rows as `quantize_rows` makes them if `both`, the
    transposed copy, its offs)."""
    tokens, k, groups = x.shape[0], width(x, source), offs.shape[0]
    blocks, room = -(-k // BLOCK), (tokens + (TOKEN_BLOCK - 1) * groups) // TOKEN_BLOCK
    dtype, device = torch.float8_e4m3fn, x.device
    turned = torch.empty(k, room * TOKEN_BLOCK, dtype=dtype, device=device)
    turned_scales = torch.empty(k, room, dtype=torch.float32, device=device)
    values = torch.empty(tokens, k, dtype=dtype, device=device) if both else None
    scales = torch.empty(tokens, blocks, dtype=torch.float32, device=device) if both else None
    # Rows behind the last group are quantised as rows all the same, in blocks of their own.
    token_blocks = (tokens + (TOKEN_BLOCK - 1) * (groups + 1)) // TOKEN_BLOCK if both else room
    rows = None if values is None or scales is None else (values, scales)
    if token_blocks == 0 or k == 0:
        return rows, (turned, turned_scales), aligned_offs(offs)
    ends = torch.empty(groups, dtype=torch.int32, device=device)
    x_rows = _near_rows(x)
    rstd = _rstd(x_rows, eps) if source == "rms_norm" else None
    by = unit(k, x_rows.stride(0))
    if config is None:
        config = tokens_configs(source, by)[0]
    chunks = -(-blocks // config.per_program)
    launch(
        quantize_tokens_kernel, token_blocks * chunks,
        (x_rows, weight, rstd, offs.contiguous(), values, scales, turned, turned_scales, ends),
        (tokens, k // by, x_rows.stride(0) // by, room, groups, chunks, 0),
        (
            source, by, max(32, triton.next_power_of_2(groups)), config.per_program, config.rows, config.cols,
            k % BLOCK == 0, power_of_two, _steps(x, source, power_of_two),
        ),
        num_warps=config.num_warps, most_registers=config.most_registers,
    )  # fmt: skip
    return rows, (turned, turned_scales), ends


def quantize_weights(w: torch.Tensor, power_of_two: bool = False, config: WeightsConfig | None = None) -> Quantized:
    """Launch the 128×128 kernel: values as w [..., N, K], scales [..., ceil(N / 128), ceil(K / 128)]."""
    n, k = w.shape[-2:]
    values = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device)
    row_tiles, blocks = -(-n // BLOCK), -(-k // BLOCK)
    scales = torch.empty((*w.shape[:-2], row_tiles, blocks), dtype=torch.float32, device=w.device)
    if w.numel() == 0:
        return values, scales
    stack = w.reshape(-1, n, k) if w.dim() != 3 else w
    if (stack.stride(2) != 1 and k > 1) or stack.stride(1) >= _FARTHEST_ROW:
        stack = stack.contiguous()
    if config is None:
        tiles = stack.shape[0] * row_tiles * blocks
        config = weights_configs(tiles, w.element_size(), machine(w.get_device()).sm_count)[0]
    by, chunks = unit(k, stack.stride(0), stack.stride(1)), -(-blocks // config.per_program)
    launch(
        quantize_weights_kernel, stack.shape[0] * row_tiles * chunks, (stack, values, scales),
        (n, k // by, stack.stride(0) // by, stack.stride(1) // by, chunks, row_tiles),
        (
            by, config.per_program, config.num_stages, n % BLOCK == 0, k % BLOCK == 0, power_of_two,
            _steps(w, "plain", power_of_two),
        ),
        num_warps=config.num_warps, most_registers=config.most_registers,
    )  # fmt: skip
    return values, scales


def _near_rows(x: torch.Tensor) -> torch.Tensor:
    """`as_rows`, 128 of them within the reach of 32 bits."""
    rows = as_rows(x)
    return rows if rows.stride(0) < _FARTHEST_ROW else rows.contiguous()


def _rstd(x_rows: torch.Tensor, eps: float) -> torch.Tensor:
    rows, k = x_rows.shape
    rstd = torch.empty(rows, dtype=torch.float32, device=x_rows.device)
    by = unit(k, x_rows.stride(0))
    block_c = min(4096, triton.next_power_of_2(k))
    block_r = max(1, 4096 // block_c)
    scalars = (rows, k // by, x_rows.stride(0) // by, eps)
    launch(rstd_kernel, -(-rows // block_r), (x_rows, rstd), scalars, (by, block_r, block_c), num_warps=4)
    return rstd


def _steps(x: torch.Tensor, source: str, power_of_two: bool) -> int:
    """Corrections after which a quotient has the right e4m3 value; see the kernels."""
    if power_of_two:
        return 0
    return 1 if source == "plain" and x.dtype.itemsize == 2 else 2
