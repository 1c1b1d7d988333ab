"""The gathered products in one plain Triton kernel each, with pointers and masks, on sm_80 and later.

    MM        out[r] = x[rows[r]] @ b[g] (+ bias[g])
    GATED     pre[r] = the same; act[r] = f(gate, up) from the float32 sums
    WGRAD     out[g] = Σ_r a[rows[r]]ᵀ b[r]

Rows are looked up once a tile and loaded where they lie, 16 bytes at a time where K is contiguous, so no permuted copy
of x exists. A tile of GATED has two sums, of gate and of up columns, whether those are neighbours or half a row apart.

Bytes: x and b at least once (a tile reads (BLOCK_M + BLOCK_N) · K elements, mostly from L2), the outputs once. Limits:
as `grouped_mm`'s triton_pointer: cp.async through addresses in registers, about 0.6 of the peak on Hopper; few rows an
expert are limited by the bytes of b.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from expertile.device import Device
from expertile.ops.gathered_mm.backend import Backend, Operands, Outputs
from expertile.ops.gathered_mm.backends._triton_gather_kernels import gather_kernel, wgrad_kernel
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.grouped_mm.backends import triton_pointer
from expertile.ops.grouped_mm.backends.triton_pointer import Config
from expertile.ops.grouped_mm.persistent import tile_options, tiles_bound, tiles_of
from expertile.ops.launch.device import program_count, torch_device
from expertile.ops.launch.launch import Launch, Pointers, met


def _parts(product: Product, config: Config) -> int:
    """In how many pieces of columns the epilogue runs: sums of one thread at a time that leave it enough registers."""
    at_once = {Product.MM: 128, Product.GATED: 32}[product]
    parts = config.block_m * config.block_n // (32 * config.num_warps * at_once)
    return max(1, min(4, parts, config.block_n // 16))


@lru_cache(maxsize=1024)
def _launch(
    problem: GatherProblem, config: Config, pointers: Pointers, bias_strides: tuple[int, ...], device: int
) -> Launch:
    """The launch on GPU `device` for arguments like `pointers`."""
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    where = torch_device(device)
    tiles = tiles_of(problem.grouped(), block_m, block_n, block_k)
    shared = {"PRECISION": "tf32" if problem.allow_tf32 else "ieee", **tile_options(tiles, config)}
    if problem.product is Product.WGRAD:
        numbers = (problem.m, problem.n, problem.groups, *problem.a_strides, *problem.b_strides, config.group_m)
        options = {"GATHERED": problem.gathered, **shared}
        programs = program_count(where, tiles_bound(tiles, problem.groups, problem.m, problem.n), config.blocks_per_sm)
        return Launch(wgrad_kernel, (), (), pointers, numbers, options, programs)
    cols = problem.intermediate if problem.product is Product.GATED else problem.n
    rows = problem.tokens if problem.gathered else block_m
    reach = max(
        rows * problem.a_strides[0] + block_k * problem.a_strides[1],
        block_k * problem.b_strides[1] + 2 * block_n * problem.b_strides[2],
    )
    options = {
        "EPILOGUE": problem.product.value,
        "ACTIVATION": problem.activation,
        "INTERLEAVED": problem.interleaved,
        "EVEN_K": problem.k % block_k == 0,
        "EVEN_N": cols % block_n == 0,
        "PARTS": _parts(problem.product, config),
        "OFFSET": tl.int32 if reach < 2**31 else tl.int64,
        **shared,
    }
    strides = (*problem.a_strides, *problem.b_strides, *bias_strides)
    numbers = (cols, problem.k, problem.groups, *strides, config.group_m)
    programs = program_count(where, tiles_bound(tiles, problem.groups, problem.m, cols), config.blocks_per_sm)
    return Launch(gather_kernel, (), (), pointers, numbers, options, programs)


def run(problem: GatherProblem, operands: Operands, config: Config, outputs: Outputs) -> None:
    """Queue the product, with whatever epilogue, on the current stream."""
    o = operands
    tensors: tuple[torch.Tensor | None, ...]
    if problem.product is Product.WGRAD:
        tensors = (o.a, o.b, outputs[0], o.rows if problem.gathered else None, o.offs)
    else:
        # GATED gives (act, pre).
        out, act = outputs[::-1] if problem.product is Product.GATED else (outputs[0], None)
        tensors = (o.a, o.b, out, act, o.rows, o.offs, o.bias)
    addresses, pointers = met(tensors)
    device, strides = o.a.get_device(), (0, 0) if o.bias is None else o.bias.stride()
    _launch(problem, config, pointers, strides, device).run(device, (), tensors, addresses)


def supports(problem: GatherProblem, device: Device) -> str | None:
    """The reason these kernels can't compute `problem` on `device`, or None; the others are `triton_pointer`'s."""
    if problem.product is Product.BACKWARD:
        return "computes no backward pass of an activation"
    return triton_pointer.supports(problem.grouped(), device)


@lru_cache(maxsize=4096)
def configs(problem: GatherProblem, device: Device) -> tuple[Config, ...]:
    """The tiles of `grouped_mm`'s triton_pointer, the lowest modelled time first. GATED tiles count columns of the
    activation, of which each takes two of b's."""
    found: list[Any] = []
    for c in triton_pointer.configs(problem.grouped(), device):
        if problem.product is Product.GATED:
            c = replace(c, block_n=c.block_n // 2)
        elif problem.product is Product.WGRAD and problem.gathered:
            # Looking rows up takes a stage of its own.
            stage = (c.block_m + c.block_n) * c.block_k * problem.dtype.itemsize
            if (c.num_stages + 1) * stage <= (device.smem_bytes or 101376):
                c = replace(c, num_stages=c.num_stages + 1)
        found.append(c)
    return tuple(dict.fromkeys(found))


BACKEND = Backend(
    name="triton_gather",
    summary="Triton, pointers: rows gathered and activation applied inside one kernel (sm_80+)",
    supports=supports,
    configs=configs,
    run=run,
)
