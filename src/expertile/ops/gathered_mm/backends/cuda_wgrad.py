"""cuda_wgrad: our CUDA C++ kernel for weight gradients that gather one operand, for sm_90a (H100, H200), by NVRTC.

    WGRAD  out[g] = Σ over rows r of g of a[r]ᵀ b[r], one of them gathered

bf16 and fp16, float32 accumulation, every sum in the order of its rows. Tiles of 128 gathered columns by 256 of the
other operand, shared by two consumers; `_cuda_wgrad.cu` says how the work is laid out on the chip. No copy of the
gathered operand is made, which would be R · columns elements written and read.

What Gluon lacked (`gluon_gather`): a thread asks for its step's row numbers once and hands them on by shuffles, and
results leave turned (stmatrix.trans) where the gathered operand is b. Limits: the tensor cores and the power they draw.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from expertile.device import Device
from expertile.ops.gathered_mm.backend import Backend, Operands, Outputs
from expertile.ops.gathered_mm.backends._hopper import unfit
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.launch import nvrtc
from expertile.ops.launch.device import wants_pdl

_SOURCES = (nvrtc.GROUPS, nvrtc.RING, Path(__file__).with_name("_cuda_wgrad.cu"))
_GATHERED, _OTHER = 128, 256  # columns of a tile, of both operands
_STEP, _BLOCK = 64, 64  # rows of a step; rows and columns of TMA's boxes
_TYPES = (nvrtc.TensorMap, nvrtc.TensorMap, *(nvrtc.ADDRESS,) * 3, *(nvrtc.INT,) * 3, nvrtc.LONG)


@dataclass(frozen=True)
class Config:
    """num_stages: steps of 64 rows in shared memory. band: tiles of the gathered operand that share one pass over the
    columns of the other."""

    num_stages: int = 4
    band: int = 4

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one program: ring, four pieces of the result, barriers, and up to 1024 to align."""
        return 1024 + self.num_stages * ((_GATHERED + _OTHER) * _STEP * 2 + 16) + 4 * _BLOCK * _BLOCK * 2

    def source(self, dtype: torch.dtype, turned: bool) -> str:
        """The program; `turned`: the gathered operand's columns are the result's last dimension."""
        half = dtype is torch.float16
        macros = {"STAGES": self.num_stages, "BAND": self.band, "TURNED": int(turned), "HALF": int(half)}
        return nvrtc.program(macros, nvrtc.multiply(_OTHER, half, (1, 1)), *_SOURCES)


def supports(problem: GatherProblem, device: Device) -> str | None:
    """The reason this kernel can't compute `problem` on `device`, or None."""
    p = problem
    if p.product is not Product.WGRAD or not p.gathered:
        return "computes weight gradients that gather one operand, nothing else"
    if reason := unfit(p, device):
        return reason
    for name, strides, columns in (("a", p.a_strides, p.m), ("b", p.b_strides, p.n)):
        if strides[1] != 1 or strides[0] % 8 or strides[0] <= 0 or columns % 8:
            return f"16-byte copies need rows of {name} in whole 16 bytes, got {columns} columns and strides {strides}"
    if p.groups * (-(-p.m // _GATHERED)) * (-(-p.n // _GATHERED)) >= 2**31:
        return f"counts tiles in 32 bits, which {p.groups} experts of {p.m} x {p.n} exceed"
    return nvrtc.missing()


@lru_cache(maxsize=16)
def _kernel(config: Config, dtype: torch.dtype, turned: bool, device: int) -> nvrtc.Kernel:
    """The kernel on GPU number `device`, the current one."""
    binary = nvrtc.compiled(config.source(dtype, turned))
    return nvrtc.kernel(binary, "gathered_wgrad", _TYPES, 3 * 128, config.smem_bytes)


def run(problem: GatherProblem, operands: Operands, config: Config, outputs: Outputs) -> None:
    """Compute into `outputs`; queues one kernel."""
    p, o, (out,) = problem, operands, outputs
    assert o.rows is not None
    turned = p.gathered == "b"
    gathered, other = (o.b, o.a) if turned else (o.a, o.b)
    width, columns, pitch = gathered.shape[1], other.shape[1], other.stride(0) * 2
    with torch.cuda.device(out.device):
        box, to = (1, 1, _BLOCK, _BLOCK), tuple(out.shape)
        maps = (
            nvrtc.tensor_map(other.data_ptr(), *nvrtc.ragged(columns, pitch, 2), box, 2),
            nvrtc.tensor_map(out.data_ptr(), to, (p.m * p.n * 2, p.n * 2), box[1:], 2),
        )
        tensors = (gathered.data_ptr(), o.rows.data_ptr(), o.offs.data_ptr())
        sizes = (p.groups, width, columns, gathered.stride(0) * 2)
        programs = Device.current(out.device).sm_count
        kernel = _kernel(config, p.dtype, turned, out.get_device())
        stream = nvrtc.current_stream(out.get_device())
        kernel.launch(programs, stream, (*maps, *tensors, *sizes), wants_pdl(p))()


BACKEND = Backend(
    name="cuda_wgrad",
    summary="CUDA C++ kernel for Hopper: weight gradients that gather, tiles of 128x256, no copy of the rows",
    supports=supports,
    configs=lambda problem, device: (Config(), Config(band=16)),
    run=run,
)
