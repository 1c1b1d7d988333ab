"""cuda_gather: our CUDA C++ kernel for products around a gated activation, rows gathered, for sm_90a, by NVRTC.

    GATED  pre[r] = a[rows[r]] @ b[g] (+ bias[g]), act[r] = f(gate, up)
    BACKWARD  with a_r = dy[rows[r]] @ b[g] and routing weight w:
           dpre[r] = f'(pre[r]) (w a_r), act_w[r] = w f(pre[r]), dweights[slots[r]] = <a_r, f(pre[r])>

bf16 and fp16, float32 accumulation; rows gathered, or in order. Tiles of 128 x 256, and epilogue warps that work on
one tile while the consumers multiply the next: `_cuda_gather.cu` says how. Products are handed over rounded to the
dtype, so f is that of the rounded pre, and a_r of BACKWARD is rounded, as `composed` has it.

What Gluon lacked (`gluon_gather`): warps beside producers and consumers that share shared memory with both, without a
barrier of the whole program. There a wide tile's epilogue stands between two tiles, or tiles are 128 x 128 and cross
from L2 twice as often. Limits: the tensor cores and the power they draw.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.gathered_mm.backend import Backend, Operands, Outputs
from expertile.ops.gathered_mm.backends._hopper import refusal, second_pair
from expertile.ops.gathered_mm.pointwise import add_row_sums
from expertile.ops.gathered_mm.problem import ACTIVATIONS, GatherProblem, Product
from expertile.ops.grouped_mm.backend import Pair
from expertile.ops.grouped_mm.backends.cuda_grouped import loadable
from expertile.ops.launch import nvrtc
from expertile.ops.launch.counter import tile_counter
from expertile.ops.launch.device import wants_pdl
from expertile.ragged import power_of_two

_NAMES = ("activation", "gather_tiles", "gather_epilogue", "gather")
_SOURCES = (nvrtc.GROUPS, nvrtc.RING, *(Path(__file__).with_name(f"_cuda_{name}.cu") for name in _NAMES))
_ROWS, _COLUMNS = 128, 256  # of a tile
_STAGES, _STEP, _SLOTS = 3, 64, 8  # of the ring; summands of a stage; tiles in the queue
_PRE_BYTES = {2: 12 * 1024, 4: 16 * 1024}  # rows of pre that the epilogue warps of BACKWARD hold, by their number
_PRODUCTS = {Product.GATED: 1, Product.BACKWARD: 2}
_MAPS = (nvrtc.TensorMap, nvrtc.TensorMap)
_TYPES = (*(nvrtc.ADDRESS,) * 11, *(nvrtc.INT,) * 4, nvrtc.LONG)


@dataclass(frozen=True)
class Config:
    """group_m: rows of tiles that share one pass over an expert's weights.
    dynamic: a dynamic tile scheduler, with a counter in memory; else program p of P takes p, p + P, p + 2P, …
    finishers: epilogue warps, 2, or 4 beside products of half the columns."""

    group_m: int = 8
    dynamic: bool = False
    finishers: int = 2

    @property
    def threads(self) -> int:
        """Of a program: warps in fours, of which two are idle beside four epilogue warps."""
        return 384 if self.finishers == 2 else 512

    def smem_bytes(self, product: Product, groups: int, bias: int) -> int:
        """Shared memory of one program: ring, products of a tile, rows of pre, bias of `bias` bytes a value, queue,
        barriers, tiles of the groups."""
        ring = _STAGES * ((_ROWS + _COLUMNS) * _STEP * 2 + 16)
        pre = _PRE_BYTES[self.finishers] if product is Product.BACKWARD else 0
        return ring + _ROWS * _COLUMNS * 2 + pre + _SLOTS * (_COLUMNS * bias + 24) + 32 + 8 * groups

    def source(self, p: GatherProblem, bias: int, more: bool) -> str:
        """The program for a problem with a bias of `bias` bytes a value, 0 for none; `more`: with a second pair."""
        half = p.dtype is torch.float16
        k_major = int(p.b_strides[1] == 1)
        macros = {
            "PRODUCT": _PRODUCTS[p.product],
            "ACTIVATION": ACTIVATIONS.index(p.activation),
            "INTERLEAVED": int(p.interleaved),
            "SAVE_PRE": int(p.save_pre),
            "K_MAJOR": k_major,
            "BIAS": bias,
            "BAND": self.group_m,
            "FINISHERS": self.finishers,
            "HALF": int(half),
            "MORE": int(more),
        }
        return nvrtc.program(
            macros, nvrtc.multiply(256 if self.finishers == 2 else 128, half, (0, 1 - k_major)), *_SOURCES
        )


def _nbytes(p: GatherProblem, config: Config) -> int:
    """Shared memory of a program, a bias taken to be in float32."""
    return config.smem_bytes(p.product, power_of_two(p.groups, 32), 4 * p.has_bias)


def supports(problem: GatherProblem, device: Device) -> str | None:
    """The reason this kernel can't compute `problem` on `device`, or None."""
    p = problem
    if reason := refusal(p, device):
        return reason
    if p.product not in _PRODUCTS:
        return "computes products beside a gated activation, nothing else"
    if p.product is Product.GATED and p.b_strides[1] != 1:
        return "gate and up are loaded apart, for which b must be stored [E, 2I, K]"
    if _nbytes(p, Config()) > device.smem_bytes:
        return f"lists experts in shared memory, which {p.groups} of them exceed"
    return nvrtc.missing()


@lru_cache(maxsize=1024)
def configs(problem: GatherProblem, device: Device) -> tuple[Config, ...]:
    """Configs worth timing, the default first.

    Of up-projections up to K = 2048 tiles by number: neighbours share a TPC. With longer K programs drift apart.
    (Measured when a kernel of its own set the counter to zero, 2 us.) A gated backward's epilogue limits up to that K:
    four warps. docs/notes/moe.md has the times."""
    p, short = problem, problem.k <= 2048
    found: tuple[Config, ...]
    if p.product is Product.BACKWARD and short:
        found = (Config(8, True, 4), Config(16, True, 4), Config(8, False, 4), Config(dynamic=True))
    else:
        found = (Config(dynamic=not short), Config(16, not short), Config(dynamic=short))
    return tuple(c for c in found if _nbytes(p, c) <= device.smem_bytes)


def invariant(problem: GatherProblem, device: Device) -> tuple[Config, ...]:
    """All configs for BACKWARD: one tile serves any number of rows. Up-projections of few rows want other tiles, those
    of `gluon_gather`."""
    return configs(problem, device) if problem.product is Product.BACKWARD else ()


def _key(p: GatherProblem) -> GatherProblem:
    """The problem without what a program does not depend on."""
    strides = (0, 1, 0) if p.b_strides[1] == 1 else (0, 0, 1)
    one = replace(p, groups=1, m=1, n=8, k=8, tokens=1, gathered="", weights_shape=())
    return replace(one, a_strides=(8, 1), b_strides=strides)


@lru_cache(maxsize=64)
def _kernel(config: Config, key: GatherProblem, bias: int, more: bool, groups: int, device: int) -> nvrtc.Kernel:
    """The kernel on GPU number `device`, the current one."""
    binary = nvrtc.compiled(config.source(key, bias, more), "--ftz=true")
    smem_bytes = config.smem_bytes(key.product, groups, bias)
    types = (*_MAPS, *((*_MAPS, nvrtc.ADDRESS, nvrtc.INT) if more else ()), *_TYPES)
    return nvrtc.kernel(binary, "gathered_mm", types, config.threads, smem_bytes)


def _weights(p: GatherProblem, b: torch.Tensor) -> tuple[nvrtc.TensorMap, nvrtc.TensorMap]:
    """What TMA loads of b: gate and up where there are such, else the same twice."""
    expert, k, n = (2 * s for s in p.b_strides)
    at = b.data_ptr()
    if k != 2:
        made = nvrtc.tensor_map(at, (p.groups, p.k, p.n), (expert, k), (1, _STEP, 64), 2)
        return made, made
    if p.product is Product.GATED:
        up, step = (at + n, 2 * n) if p.interleaved else (at + p.intermediate * n, n)
        shape, pitches, box = (p.groups, p.intermediate, p.k), (expert, step), (1, _COLUMNS // 2, _STEP)
        return tuple(nvrtc.tensor_map(x, shape, pitches, box, 2) for x in (at, up))  # type: ignore[return-value]
    made = nvrtc.tensor_map(at, (p.groups, p.n, p.k), (expert, n), (1, _COLUMNS // 2, _STEP), 2)
    return made, made


def _second(p: GatherProblem, more: Pair | None) -> tuple[Any, ...]:
    """The kernel's arguments for a second pair of operands."""
    if more is None:
        return ()
    u, factor = more
    rank = u.shape[1]
    return *_weights(second_pair(p, rank), factor), u.data_ptr(), rank


def run(problem: GatherProblem, operands: Operands, config: Config, outputs: Outputs, more: Pair | None = None) -> None:
    """Compute into `outputs` (rows past offs[-1] are left alone); queues a kernel, two for BACKWARD.

    `more`: a second pair of operands, u [R, r] with rows in order and b [E, r, N] laid out as b is, r a multiple of 8,
    both without gaps: u[row] @ b[g] is added to the product, in the same accumulators."""
    p, o = problem, operands
    bias, pre, sums = loadable(o.bias, p.dtype), o.pre, None
    if p.product is Product.BACKWARD:
        dpre, act_w, _ = outputs
        assert pre is not None
        if pre.data_ptr() % 16:
            pre = pre.clone()
        sums = o.a.new_empty((-(-p.n // _COLUMNS), p.m), dtype=torch.float32)
        results = (act_w, pre, dpre)
    else:
        results = (*outputs, None)  # act and pre
    with torch.cuda.device(o.a.device):
        nbytes = 0 if bias is None else bias.element_size()
        counter = tile_counter(True, o.offs) if config.dynamic else None
        given = (o.a, o.rows, o.offs, bias, o.slots, o.weights, *results, sums, counter)
        tensors = (None if x is None else x.data_ptr() for x in given)
        sizes = (p.groups, p.m, p.k, p.intermediate, p.a_strides[0] * 2)
        kernel = _kernel(config, _key(p), nbytes, more is not None, power_of_two(p.groups, 32), o.a.get_device())
        programs = Device.current(o.a.device).sm_count
        arguments = (*_weights(p, o.b), *_second(p, more), *tensors, *sizes)
        kernel.launch(programs, nvrtc.current_stream(o.a.get_device()), arguments, wants_pdl(p))()
        if sums is not None:
            assert o.slots is not None
            add_row_sums(sums, o.slots, o.offs, outputs[2])


BACKEND = Backend(
    name="cuda_gather",
    summary="CUDA C++ kernel for Hopper: rows gathered by cp.async, tiles of 128x256, warps of their own for epilogues",
    supports=supports,
    configs=configs,
    run=run,
    invariant=invariant,
)
