"""Host side of the `gluon_hopper` backend: TMA descriptors of one problem, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import MockTensor

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends._gluon_kernel import grouped_mm_kernel
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.launch import driver
from expertile.ops.launch.versions import FP_FUSION

_WRAP = 0x40000000


@dataclass(frozen=True)
class Blocks:
    """Shape and strides of a tensor as TMA sees it, and the box that one copy moves; contiguous dimension last.

    What feeds the tensor cores is swizzled in shared memory; a `plain` box lies there as in the tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    plain: bool = False

    @property
    def form(self) -> Blocks:
        """What a kernel is compiled for: the same of any tensor's."""
        pitches = (*(16 * 2 ** (len(self.box) - 1 - i) for i in range(len(self.box) - 1)), 1)
        return Blocks(self.box, pitches, self.box, self.plain)

    def of(self, base: Any) -> TensorDescriptor:
        itemsize = base.dtype.itemsize
        swizzle = 0 if self.plain or len(self.box) == 1 else min(128, self.box[-1] * itemsize)
        layout = NVMMASharedLayout(swizzle, itemsize * 8, len(self.box))
        return TensorDescriptor(base, list(self.shape), list(self.strides), list(self.box), layout)


def ragged(inner: int, stride: int, box: tuple[int, int]) -> Blocks:
    """Rows of `inner` elements, `stride` apart, with a window [first, end) that moves by coordinates alone:
    (_WRAP, end, _WRAP - (end - row), column) reaches row `row`, and what lies past `end` is out of bounds
    (the scheme of triton.tools.ragged_tma: addresses wrap around at 2**64)."""
    return Blocks((0x7FFF0000, 0x7FFF0000, _WRAP, inner), (2**34 - stride, stride, stride, 1), (1, 1, *box))


def _plain(shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, int], swap: bool) -> Blocks:
    """A matrix, or a stack of them; `swap`: stored the other way round."""
    if swap:
        shape, strides, box = ((*x[:-2], x[-1], x[-2]) for x in (shape, strides, box))  # type: ignore[assignment]
    return Blocks(shape, strides, (1,) * (len(shape) - 2) + box)


@dataclass(frozen=True)
class Plan:
    """All of a launch that follows from the problem, the config and the output's strides."""

    a: Blocks
    b: Blocks
    c: Blocks
    options: dict[str, Any]
    sizes: tuple[int, int, int, int]
    programs: int


def plan(p: Problem, config: Any, out_strides: tuple[int, ...], programs: int) -> Plan:
    """Descriptors, compile-time options and sizes of `grouped_mm_kernel`."""
    rows, bn, bk = config.rows, config.block_n, config.block_k
    part_n = bn // config.store_parts
    a_k_major = p.layout is not Layout.RAGGED_K and p.a_strides[-1] == 1
    b_k_major = p.layout is not Layout.RAGGED_K and p.b_strides[-2] == 1
    lead = (p.groups,)
    box = config.box if p.layout is Layout.RAGGED_M and a_k_major else rows
    if p.layout is Layout.RAGGED_K:
        a = ragged(p.m, p.a_strides[1], (bk, rows))
        b = ragged(p.n, p.b_strides[0], (bk, bn))
    else:
        a_shape = (p.m, p.k) if len(p.a_strides) == 2 else (*lead, p.m, p.k)
        a = _plain(a_shape, p.a_strides, (box, bk), not a_k_major)
        b = _plain((*lead, p.k, p.n), p.b_strides, (bk, bn), b_k_major)
    if p.layout is Layout.RAGGED_M:
        c = ragged(p.n, out_strides[0], (rows, part_n))
    else:
        c = Blocks((*lead, p.m, p.n), out_strides, (1, rows, part_n))
    warps = config.num_warps * config.consumers + 1
    options = {
        "LAYOUT": p.layout.value,
        "A_K_MAJOR": a_k_major,
        "B_K_MAJOR": b_k_major,
        "HAS_BIAS": p.has_bias,
        "GROUPS_POW2": max(32, 1 << (p.groups - 1).bit_length()),
        "CONSUMERS": config.consumers,
        "ROWS": rows,
        "A_BOX": box,
        "BLOCK_M": config.block_m,
        "BLOCK_N": bn,
        "BLOCK_K": bk,
        "STAGES": config.num_stages,
        "LAG": config.lag,
        "GROUP_M": config.group_m,
        "C_PARTS": config.store_parts,
        "C_SLOTS": config.store_slots,
        "DYNAMIC": config.dynamic,
        # The first consumer gets what the second and the producer leave: as many.
        "CONSUMER_REGS": 232,
        "PRODUCER_REGS": 40,
        "num_warps": config.num_warps,
        **FP_FUSION,
        # Warps come in fours; the register file holds 65536.
        "maxnreg": min(65536 // (-(-warps // 4) * 4 * 32) // 8 * 8, 248),
        "launch_pdl": True,
    }
    return Plan(a, b, c, options, (p.groups, p.m, p.n, p.k), programs)


def arguments(p: Problem, operands: Operands, config: Any, out: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of `grouped_mm_kernel`, for a launch by Triton."""
    made = plan(p, config, out.stride(), 0)
    offs = operands.offs if operands.offs is not None else out
    bias = operands.bias if operands.bias is not None else out
    descriptors = (made.a.of(operands.a), made.b.of(operands.b), made.c.of(out))
    return (*descriptors, offs, bias, tickets(config.dynamic, offs), *made.sizes), made.options


def tickets(dynamic: bool, like: torch.Tensor) -> torch.Tensor:
    """The counter that one launch draws tile numbers from: fresh, so that launches on other streams and replays of
    CUDA graphs have their own. Any tensor where none is needed."""
    return torch.zeros(1, dtype=torch.int32, device=like.device) if dynamic else like


@dataclass(frozen=True, eq=False)
class Ready:
    """A plan with its compiled kernel."""

    kernel: driver.Compiled
    a: driver.Tensor
    b: driver.Tensor
    c: driver.Tensor
    rest: tuple[Any, ...]
    programs: int

    def __call__(self, device: int, a: int, b: int, c: int, pointers: tuple[int, ...]) -> None:
        """Queue the kernel on `device`'s current stream, for tensors at these addresses."""
        described = ((self.a, a), (self.b, b), (self.c, c))
        self.kernel(device, self.programs, described, (*pointers, *self.rest))


@lru_cache(maxsize=512)
def compiled(
    kernel: Any,
    forms: tuple[Blocks, ...],
    dtypes: tuple[torch.dtype, ...],
    numbers: tuple[int | float, ...],
    options: tuple[tuple[str, Any], ...],
    device: int,
) -> driver.Compiled | None:
    """`kernel(*descriptors, *pointers, *numbers, **options)` compiled for GPU number `device`: for descriptors of these
    forms, for `dtypes` of theirs and then of the pointers, and for any numbers, on which it must not specialise."""
    mocks = [MockTensor(dtype) for dtype in dtypes]
    args = (*(form.of(mock) for form, mock in zip(forms, mocks, strict=False)), *mocks[len(forms) :], *numbers)
    with torch.cuda.device(device):
        return driver.prepare(kernel.run(*args, grid=(1,), warmup=True, **dict(options)))


def make_ready(
    kernel: Any,
    blocks: tuple[Blocks, Blocks, Blocks],
    dtypes: tuple[torch.dtype, ...],
    numbers: tuple[int, ...],
    options: dict[str, Any],
    programs: int,
    device: int,
) -> Ready | None:
    """`kernel(a, b, c, *pointers, *numbers, **options)`, compiled and loaded on GPU number `device`; None where Triton
    has to launch it. `blocks` describe a, b, c; `dtypes` are theirs and then the pointers'."""
    forms = tuple(x.form for x in blocks)
    made = compiled(kernel, forms, dtypes, (2,) * len(numbers), tuple(options.items()), device)
    if made is None:
        return None
    a, b, c = (made.tensor(i, list(x.shape), list(x.strides)) for i, x in enumerate(blocks))
    constants = (None,) * (len(kernel.arg_names) - len(dtypes) - len(numbers))
    return Ready(made, a, b, c, (*numbers, *constants), programs)


@lru_cache(maxsize=1024)
def _ready(
    p: Problem, config: Any, out_strides: tuple[int, ...], bias_dtype: torch.dtype | None, device: int
) -> Ready | None:
    made = plan(p, config, out_strides, Device.current(f"cuda:{device}").sm_count)
    offs_dtype = p.out_dtype if p.layout is Layout.BATCHED else torch.int32
    dtypes = (p.dtype, p.dtype, p.out_dtype, offs_dtype, bias_dtype or p.out_dtype, torch.int32)
    return make_ready(
        grouped_mm_kernel, (made.a, made.b, made.c), dtypes, made.sizes, made.options, made.programs, device
    )


def launch(p: Problem, operands: Operands, config: Any, out: torch.Tensor) -> None:
    """Queue the kernel on the current stream of `out`'s device."""
    offs, bias = operands.offs, operands.bias
    device = out.get_device()
    ready = None
    if device >= 0 and not driver.hooked():
        ready = _ready(p, config, out.stride(), None if bias is None else bias.dtype, device)
    if ready is None:
        args, options = arguments(p, operands, config, out)
        grouped_mm_kernel[(Device.current(out.device).sm_count,)](*args, **options)
        return
    here = out.data_ptr()
    counter = tickets(config.dynamic, out)
    pointers = (
        here if offs is None else offs.data_ptr(), here if bias is None else bias.data_ptr(), counter.data_ptr(),
    )  # fmt: skip
    ready(device, operands.a.data_ptr(), operands.b.data_ptr(), here, pointers)
