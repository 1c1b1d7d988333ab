"""laplacian: the 5-point stencil on a batch of 2-D grids, in one pass over memory.

    out[i, j] = scale * (u[i-1, j] + u[i+1, j] + u[i, j-1] + u[i, j+1] - 4 u[i, j])

u [*, H, W] in float32, bfloat16 or float16, sums in float32. What lies outside the grid:

| boundary    | u outside               | out           | transpose                                         |
|-------------|-------------------------|---------------|---------------------------------------------------|
| "zero"      | 0 (Dirichlet)           | [*, H, W]     | itself                                            |
| "replicate" | the edge's own (no flux)| [*, H, W]     | itself                                            |
| "circular"  | the opposite edge       | [*, H, W]     | itself                                            |
| "interior"  | not needed              | [*, H-2, W-2] | "zero" on the gradient with a frame of zeros      |

So a gradient is the same kernel once more; for the last with input and output grids exchanged.

Bytes: itemsize * (H W + H_out W_out) for each grid; 0.75 FLOP/byte in float32, so memory limits it. A program holds
`block_rows` rows of a strip of columns, with one more above and below, in registers: 16 bytes to a thread and row. The
grid of the interior starts 4 bytes off its input's, so one of the two is not moved 16 bytes at a time; nor are rows
whose length is no multiple of 16 bytes.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from expertile.ops.launch.device import machine, on_kernels
from expertile.ops.launch.kernels import plan
from expertile.ops.launch.launch import Launch, pointer
from expertile.ops.pointwise.checks import VECTOR_BYTES, check_tensor
from expertile.ops.torch_op import define, differentiable_eagerly, traced
from expertile.ragged import power_of_two

BOUNDARIES = ("zero", "replicate", "circular", "interior")
_TRANSPOSE = {
    "zero": "zero",
    "replicate": "replicate",
    "circular": "circular",
    "interior": "interior_transpose",
    "interior_transpose": "interior",
}
# Lanes of one thread where elements cannot be loaded 16 bytes at a time: what rows cost is shared by as many columns.
_SCALAR_LANES = 4


@dataclass(frozen=True)
class Config:
    """`block_rows` rows of one program, whose 32 * num_warps threads lie side by side along a row."""

    block_rows: int
    num_warps: int


def configs(grids: int, rows: int, lanes: int, sm_count: int) -> tuple[Config, ...]:
    """Configs for `grids` grids of `rows` rows that keep `lanes` threads busy, the default first.

    The default takes 8 rows, as long as that leaves two programs for every SM. It reads 1.25 rows for one; 16 would
    read 1.125 and need twice the registers.
    """
    num_warps = min(4, power_of_two(-(-lanes // 32)))
    across = -(-lanes // (32 * num_warps))
    block_rows = 8
    while block_rows > 1 and grids * across * -(-rows // block_rows) < 2 * sm_count:
        block_rows //= 2
    default = Config(block_rows, num_warps)
    others = (Config(r, w) for w in (4, 8, 2, 1) for r in (8, 4, 16, 2))
    return (default, *(c for c in others if c != default and 32 * c.num_warps < 2 * max(lanes, 32)))


@triton.jit
def _wrap(index, size, BOUNDARY: tl.constexpr):
    """(where in [0, size) the value for `index` stands, whether there is one), at most one step outside."""
    if BOUNDARY == "zero":
        there = (index >= 0) & (index < size)
    elif BOUNDARY == "replicate":
        there = index <= size
        index = tl.minimum(tl.maximum(index, 0), size - 1)
    else:
        there = index <= size
        index = tl.where(index < 0, size - 1, tl.where(index == size, 0, index))
    return index, there


@triton.jit
def _after(x, first, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """(first, x[0], x[1] … x[-2]) of each lane's vector, in registers: halves are interleaved, then shifted in turn."""
    if VECTOR == 1:
        return first[:, None]
    else:
        even, odd = tl.split(tl.reshape(x, [LANES, VECTOR // 2, 2]))
        return tl.reshape(tl.join(_after(odd, first, LANES, VECTOR // 2), even), [LANES, VECTOR])


@triton.jit
def _before(x, last, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """(x[1], x[2] … x[-1], last) of each lane's vector."""
    if VECTOR == 1:
        return last[:, None]
    else:
        even, odd = tl.split(tl.reshape(x, [LANES, VECTOR // 2, 2]))
        return tl.reshape(tl.join(odd, _before(even, last, LANES, VECTOR // 2)), [LANES, VECTOR])


_NUMBERS = "scale rows columns out_rows out_columns u_stride_grid u_stride_row tiles_across tiles_down"


@triton.jit(do_not_specialize=_NUMBERS.split())
def _laplacian_kernel(
    u_ptr,
    out_ptr,
    scale: tl.float32,
    rows: tl.int32,
    columns: tl.int32,
    out_rows: tl.int32,
    out_columns: tl.int32,
    u_stride_grid: tl.int64,
    u_stride_row: tl.int64,
    tiles_across: tl.int32,
    tiles_down: tl.int32,
    BOUNDARY: tl.constexpr,
    FRAME_IN: tl.constexpr,
    FRAME_OUT: tl.constexpr,
    UNIT_IN: tl.constexpr,
    UNIT_OUT: tl.constexpr,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # Programs tile the larger of the two grids; the other has lost FRAME points on each side. Widths and strides come
    # in UNITs, vectors where they are whole ones, so that the compiler sees which addresses are multiples of 16 bytes.
    columns *= UNIT_IN
    out_columns *= UNIT_OUT
    tile = tl.program_id(0)
    first_row = tile // tiles_across % tiles_down * BLOCK_ROWS
    grid = (tile // tiles_across // tiles_down).to(tl.int64)
    u_grid = u_ptr + grid * u_stride_grid * UNIT_IN
    stride_row = u_stride_row * UNIT_IN
    lane = (tile % tiles_across * LANES + tl.arange(0, LANES)) * VECTOR
    column = lane[:, None] + tl.arange(0, VECTOR)[None, :]
    centre, loaded = _wrap(column - FRAME_IN, columns, BOUNDARY)
    stored = (column >= FRAME_OUT) & (column < out_columns + FRAME_OUT)
    # A whole vector is inside or outside, and neither its address nor its mask may look as if it were split.
    if UNIT_IN > 1:
        centre, loaded = column, (lane < columns)[:, None]
    if UNIT_OUT > 1:
        stored = (lane < out_columns)[:, None]
    left, loaded_left = _wrap(lane - FRAME_IN - 1, columns, BOUNDARY)
    right, loaded_right = _wrap(lane - FRAME_IN + VECTOR, columns, BOUNDARY)
    # All loads come before the first store: the compiler moves no load over a store to what may be the same memory.
    lines, lefts, rights = tl.tuple([]), tl.tuple([]), tl.tuple([])
    for i in tl.static_range(BLOCK_ROWS + 2):
        row, there = _wrap(first_row - FRAME_IN + i - 1, rows, BOUNDARY)
        u_row = u_grid + row.to(tl.int64) * stride_row
        lines += (tl.load(u_row + centre, mask=loaded & there, other=0.0),)
        if i > 0 and i <= BLOCK_ROWS:
            lefts += (tl.load(u_row + left, mask=loaded_left & there, other=0.0),)
            rights += (tl.load(u_row + right, mask=loaded_right & there, other=0.0),)
    for i in tl.static_range(BLOCK_ROWS):
        row = first_row - FRAME_OUT + i
        x = lines[i + 1].to(tl.float32)
        sides = _after(x, lefts[i].to(tl.float32), LANES, VECTOR)
        sides += _before(x, rights[i].to(tl.float32), LANES, VECTOR)
        around = lines[i].to(tl.float32) + lines[i + 2].to(tl.float32) + sides
        result = (around - 4.0 * x) * scale
        out_row = out_ptr + (grid * out_rows + row) * out_columns - FRAME_OUT
        there = (row >= 0) & (row < out_rows)
        tl.store(out_row + column, result.to(out_ptr.dtype.element_ty), mask=stored & there)


def _frames(boundary: str) -> tuple[int, int]:
    """Points that the input grid and the output grid have lost on each side."""
    return int(boundary == "interior_transpose"), int(boundary == "interior")


def _out_grid(rows: Any, columns: Any, boundary: str) -> tuple[Any, Any]:
    frame_in, frame_out = _frames(boundary)
    change = 2 * (frame_in - frame_out)
    return rows + change, columns + change


@lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    boundary: str,
    scale: float,
    aligned: bool,
    sm_count: int,
    config: Config | None,
) -> Launch:
    """The launch for u [grids, H, W] whose last stride is 1."""
    grids, rows, columns = shape
    frame_in, frame_out = _frames(boundary)
    out_rows, out_columns = _out_grid(rows, columns, boundary)
    vector = VECTOR_BYTES // dtype.itemsize
    wide = max(columns, out_columns)
    even_in = frame_in or not (strides[0] % vector or strides[1] % vector)
    if not (aligned and wide % vector == 0 and even_in):
        vector = 1
    per_thread = vector if vector > 1 else _SCALAR_LANES
    config = configs(grids, max(rows, out_rows), -(-wide // per_thread), sm_count)[0] if config is None else config
    lanes = 32 * config.num_warps * (per_thread // vector)
    across, down = -(-wide // (lanes * vector)), -(-max(rows, out_rows) // config.block_rows)
    unit_in, unit_out = 1 if frame_in else vector, 1 if frame_out else vector
    sizes = (rows, columns // unit_in, out_rows, out_columns // unit_out)
    numbers = (scale, *sizes, strides[0] // unit_in, strides[1] // unit_in, across, down)
    outside = "zero" if frame_in or frame_out else boundary
    constants = (outside, frame_in, frame_out, unit_in, unit_out, vector, lanes, config.block_rows)
    # Without vectors nothing rests on alignment, so one kernel serves whatever address.
    pointers = (pointer(dtype, vector > 1),) * 2
    return plan(_laplacian_kernel, grids * across * down, pointers, numbers, constants, config.num_warps)


def launch(u: torch.Tensor, out: torch.Tensor, boundary: str, scale: float, config: Config | None = None) -> None:
    """out = laplacian(u) for u [grids, H, W] with a last stride of 1, contiguous out, neither empty."""
    aligned = (u.data_ptr() | out.data_ptr()) % VECTOR_BYTES == 0
    sm_count = machine(u.get_device()).sm_count
    planned = _plan(tuple(u.shape), u.stride(), u.dtype, boundary, scale, aligned, sm_count, config)
    planned.run(u.get_device(), (), (u, out))


def _on_torch(u: torch.Tensor, boundary: str, scale: float) -> torch.Tensor:
    """The same by torch's own operators, sums in float32 (float64 for float64)."""
    x = u if u.dtype is torch.float64 else u.float()
    if boundary == "interior":
        out = x[..., :-2, 1:-1] + x[..., 2:, 1:-1] + x[..., 1:-1, :-2] + x[..., 1:-1, 2:] - 4.0 * x[..., 1:-1, 1:-1]
    elif boundary == "circular":
        out = x.roll(1, -2) + x.roll(-1, -2) + x.roll(1, -1) + x.roll(-1, -1) - 4.0 * x
    else:
        x = F.pad(x, (1, 1, 1, 1)) if boundary == "interior_transpose" else x
        out = -4.0 * x
        out[..., 1:, :] += x[..., :-1, :]
        out[..., :-1, :] += x[..., 1:, :]
        out[..., :, 1:] += x[..., :, :-1]
        out[..., :, :-1] += x[..., :, 1:]
        if boundary == "replicate":
            for edge in (0, -1):
                out[..., edge, :] += x[..., edge, :]
                out[..., :, edge] += x[..., :, edge]
    return out.mul_(scale).to(u.dtype)


def _forward(u: torch.Tensor, boundary: str, scale: float) -> torch.Tensor:
    rows, columns = u.shape[-2:]
    out = u.new_empty((*u.shape[:-2], *_out_grid(rows, columns, boundary)))
    if out.numel() == 0:
        return out
    if u.numel() == 0:  # the transpose on a frame around nothing
        return out.zero_()
    if not on_kernels(u) or u.dtype is torch.float64:
        return out.copy_(_on_torch(u, boundary, scale))
    grids = u if u.dim() == 3 else u.reshape(-1, rows, columns)
    if grids.stride(2) != 1 and columns > 1:
        grids = grids.contiguous()
    launch(grids, out, boundary, scale)
    return out


def _fake(u: torch.Tensor, boundary: str, scale: float) -> torch.Tensor:
    return u.new_empty((*u.shape[:-2], *_out_grid(u.shape[-2], u.shape[-1], boundary)))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.boundary, ctx.scale = inputs


# The gradient is the transposed operator, which is a laplacian too; so gradients have gradients.
def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _call_laplacian(grad, _TRANSPOSE[ctx.boundary], ctx.scale), None, None


def _gradient_eager(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _differentiable(grad, _TRANSPOSE[ctx.boundary], ctx.scale), None, None


_call_laplacian = define("laplacian", _forward, fake=_fake, gradient=_gradient, setup=_setup)
_differentiable = differentiable_eagerly(_forward, _setup, _gradient_eager)


def laplacian(u: torch.Tensor, *, boundary: str = "zero", scale: float = 1.0) -> torch.Tensor:
    """The 5-point Laplacian of each grid: scale * (sum of the four neighbours - 4 * the point).

    Args:
        u: [*, H, W]; float32, bfloat16 or float16 (on a CPU also float64). Any strides: grids with rows of adjacent
            elements (slices of larger ones too) are read in place, others are made contiguous first.
        boundary: what lies outside: "zero", "replicate" (the edge's own value), "circular" (the opposite edge), or
            "interior": nothing, only points with four neighbours are computed.
        scale: a factor of the result, 1 / h^2 for grid spacing h.

    Returns:
        [*, H, W], for "interior" [*, H-2, W-2]; u's dtype, contiguous. Differentiable, as often as wanted.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_tensor("u", u, least_dims=2)
    if boundary not in BOUNDARIES:
        raise ValueError(f"boundary: expected one of {', '.join(BOUNDARIES)}, got {boundary!r}")
    if boundary == "interior" and min(u.shape[-2:]) < 2:
        raise ValueError(f"u: expected at least 2 rows and 2 columns around an interior, got shape {list(u.shape)}")
    if traced(u):
        return _call_laplacian(u, boundary, scale)
    if not isinstance(scale, int | float):
        raise TypeError(f"scale: expected a number, got {type(scale).__name__}")
    if u.requires_grad and torch.is_grad_enabled():
        return _differentiable(u, boundary, float(scale))
    return _forward(u, boundary, float(scale))


def laplacian_transpose(grad: torch.Tensor, *, boundary: str = "zero", scale: float = 1.0) -> torch.Tensor:
    """The transpose of `laplacian` with that boundary, applied to `grad` of its result's shape: its backward pass.

    grad [*, H, W], for "interior" [*, H-2, W-2]; returns [*, H, W]. Errors as `laplacian` raises them.
    """
    check_tensor("grad", grad, least_dims=2)
    if boundary not in BOUNDARIES:
        raise ValueError(f"boundary: expected one of {', '.join(BOUNDARIES)}, got {boundary!r}")
    return _forward(grad, _TRANSPOSE[boundary], float(scale))
