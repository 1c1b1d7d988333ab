"""cuda_gated: the up-projection with its gated activation by `cuda_grouped`'s kernel, for sm_90a, by NVRTC.

    GATED  pre[r] = a[rows[r]] @ b[g] (+ bias[g]), act[r] = f(gate, up) of pre[r], rounded

bf16 and fp16, float32 accumulation; the bits of `composed` with `cuda_grouped`. Rows that are gathered are copied into
expert order first, 2 R K elements. A tile's columns are half gate, half up. A thread has both of the same columns, so
the activation needs no exchange, and while one consumer makes it, the other multiplies. What the copy buys beside
`cuda_gather`: operands come by TMA, and tiles have any multiple of 32 columns. Limits: the tensor cores and the power
they draw.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from expertile.device import Device
from expertile.ops.gathered_mm.backend import Backend, Operands, Outputs
from expertile.ops.gathered_mm.backends._hopper import refusal
from expertile.ops.gathered_mm.pointwise import ordered
from expertile.ops.gathered_mm.problem import ACTIVATIONS, GatherProblem, Product
from expertile.ops.grouped_mm.backends import cuda_grouped
from expertile.ops.grouped_mm.backends.cuda_grouped import Config
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.hopper.limits import wide_tiles_pay
from expertile.ops.launch import nvrtc
from expertile.ops.launch.counter import tile_counter
from expertile.ops.launch.device import torch_device, wants_pdl
from expertile.ragged import power_of_two

_ACTIVATION = Path(__file__).with_name("_cuda_activation.cu")
_TYPES = cuda_grouped.types(nvrtc.TensorMap, nvrtc.TensorMap, nvrtc.ADDRESS)


def supports(problem: GatherProblem, device: Device) -> str | None:
    """The reason this kernel can't compute `problem` on `device`, or None."""
    p = problem
    if reason := refusal(p, device):
        return reason
    if p.product is not Product.GATED:
        return "computes products beside a gated activation, nothing else"
    if p.b_strides[1] != 1:
        return "gate and up are loaded apart, for which b must be stored [E, 2I, K]"
    if p.groups > 2048:
        return f"lists experts in shared memory, which {p.groups} of them exceed"
    return nvrtc.missing()


_WIDE, _LOW = Config(), Config(block_m=64, block_n=256, dynamic=False)


@lru_cache(maxsize=1024)
def configs(problem: GatherProblem, device: Device) -> tuple[Config, ...]:
    """Configs worth timing, the default first: tiles of 64 x 256, unless bytes from L2 count, or many rows have halves
    of 128 columns to spare that those of 96 have not (docs/notes/grouped_mm.md, "Gathered products")."""
    inner = problem.intermediate
    spare = -(-inner // 128) * 128 > -(-inner // 96) * 96 and problem.mean_group >= 400
    first = _WIDE if spare or wide_tiles_pay(device) else _LOW
    found = dict.fromkeys((first, _WIDE, _LOW, Config(block_n=160), Config(block_n=128)))
    return tuple(cuda_grouped.fitted(c, problem.k, problem.groups, True, device) for c in found)


def _form(p: GatherProblem) -> tuple[tuple[str, int], ...]:
    """Macros: what a program depends on beside its config, dtype and bias."""
    place = ACTIVATIONS.index(p.activation)
    return (("ACTIVATION", place), ("INTERLEAVED", int(p.interleaved)), ("SAVE_PRE", int(p.save_pre)))


@lru_cache(maxsize=64)
def _kernel(
    config: Config, dtype: torch.dtype, bias_bytes: int, form: tuple[tuple[str, int], ...], groups: int, device: int
) -> nvrtc.Kernel:
    """The kernel on GPU number `device`, the current one."""
    source = config.source(dtype, Layout.RAGGED_M, True, bias_bytes, gated=dict(form), before=(_ACTIVATION,))
    binary = nvrtc.compiled(source, "--ftz=true")
    return nvrtc.kernel(binary, "grouped_mm", _TYPES, 3 * 128, config.smem_bytes(groups, k_major=True))


def run(problem: GatherProblem, operands: Operands, config: Config, outputs: Outputs) -> None:
    """Compute into `outputs` (rows past offs[-1] are left alone); queues one kernel, two where rows are gathered.
    ValueError for tiles of which half has no multiple of 16 columns."""
    if config.block_n % 32:
        raise ValueError(f"block_n: expected a multiple of 32, half gate, half up, got {config.block_n}")
    p, o, (act, pre) = problem, operands, outputs
    a = o.a if o.rows is None else ordered(o.a, o.rows, o.offs)
    pitch = p.k if p.gathered else p.a_strides[0]
    bias = cuda_grouped.loadable(o.bias, p.dtype)
    with torch.cuda.device(a.device):
        device = a.get_device()
        counter = tile_counter(config.dynamic, a)
        given = (a, o.b, act, act if pre is None else pre, o.offs, counter, *(() if bias is None else (bias,)))
        addresses = tuple(map(torch.Tensor.data_ptr, given))
        bias_bytes = 0 if bias is None else bias.element_size()
        _launch(p, config, device, nvrtc.current_stream(device), pitch, bias_bytes, addresses)()


@lru_cache(maxsize=4096)
def _launch(
    p: GatherProblem, config: Config, device: int, stream: int, pitch: int, bias_bytes: int, addresses: tuple[int, ...]
) -> Callable[[], None]:
    """The launch for tensors at these addresses: a, b, act, pre, offs, the counter and the bias; pitch: elements from
    one row of a to the next."""
    a, b, act, pre, offs, counter, *bias = addresses
    inner, (expert, _, n) = p.intermediate, p.b_strides
    half, step = (n, 2 * n) if p.interleaved else (inner * n, n)
    box = (1, config.block_n // 2, 64)
    weights = (nvrtc.tensor_map(at, (p.groups, inner, p.k), (expert * 2, step * 2), box, 2) for at in (b, b + half * 2))
    gate, up = weights
    rows = tuple(nvrtc.tensor_map(a, (p.m, p.k), (pitch * 2,), (min(h, p.m), 64), 2) for h in (64, config.block_m))
    # (address, columns, pitch) of act and of gate and up in pre, or of all of pre.
    halves = ((pre, 2 * inner),) * 2 if p.interleaved else ((pre, inner), (pre + 2 * inner, inner))
    stored = ((act, inner, inner), *((at, columns, 2 * inner) for at, columns in halves))
    maps = (nvrtc.tensor_map(at, (p.m, columns), (2 * gap,), (64, 64), 2) for at, columns, gap in stored)
    kernel = _kernel(config, p.dtype, bias_bytes, _form(p), power_of_two(p.groups, 32), device)
    tiles_m = (p.m + p.groups * (config.block_m - 1)) // config.block_m  # at most
    programs = min(tiles_m * -(-p.n // config.block_n), Device.current(torch_device(device)).sm_count)
    numbers = (p.m, p.groups, p.n, p.k, 2 * inner)
    arguments = (*rows, gate, up, up, *maps, pre, offs, *(bias or (0,)), act, counter, *numbers)
    return kernel.launch(programs, stream, arguments, wants_pdl(p))


BACKEND = Backend(
    name="cuda_gated",
    summary="CUDA C++ kernel for Hopper: rows copied into expert order, cuda_grouped's tiles, gated activation",
    supports=supports,
    configs=configs,
    run=run,
)
