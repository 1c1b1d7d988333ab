"""The device of a tensor: its number of SMs, what it can do, and which tensors the Triton kernels serve."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from expertile.device import Device
from expertile.ops.launch import versions

# Programs of one launch under the interpreter: more than one, so that the striding over tiles is exercised.
_INTERPRETER_PROGRAMS = 3


@lru_cache(maxsize=64)
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def torch_device(index: int) -> torch.device:
    """GPU number `index`; -1: the CPU."""
    return torch.device("cuda", index) if index >= 0 else torch.device("cpu")


def program_count(device: torch.device, tiles_at_most: int, blocks_per_sm: int = 1) -> int:
    """How many programs to launch: as many as run at once, or one for each tile if those are fewer."""
    resident = _sm_count(device) * blocks_per_sm if device.type == "cuda" else _INTERPRETER_PROGRAMS
    return max(1, min(resident, tiles_at_most))


_NOTHING = nullcontext()


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU: make it `device` if it isn't."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


FORMULA_DTYPES = (*DTYPES, torch.float64)  # the last in plain torch alone


@dataclass(frozen=True)
class Machine:
    """What the choice of a config depends on: SMs, and whether CTAs can share a row."""

    sm_count: int
    clusters: bool


@lru_cache(maxsize=64)
def machine(index: int) -> Machine:
    """The GPU of that index; -1 for the CPU (the interpreter), which has few programs and no clusters."""
    if index < 0:
        return Machine(2, False)
    p = torch.cuda.get_device_properties(index)
    # Triton has no name for a cluster of independent programs: see launch/kernels.py.
    able = p.major >= 9 and versions.KNOWN
    return Machine(p.multi_processor_count, able)


@lru_cache(maxsize=64)
def capability(index: int) -> tuple[int, int]:
    """Compute capability of GPU `index`, asked for once: operators look at every call."""
    return torch.cuda.get_device_capability(index)


def no_triton(problem: Any, device: Device, major: int = 8) -> str | None:
    """Why Triton's kernels of compute capability `major`.0 and later can't run for `problem` on `device`, or None."""
    if triton.knobs.runtime.interpret or (problem.device_type == "cuda" and device.at_least(major)):
        return None
    return f"needs a CUDA GPU of compute capability {major}.0 or later (or TRITON_INTERPRET=1)"


def on_kernels(x: torch.Tensor) -> bool:
    """Whether x is served by the Triton kernels: on a GPU of compute capability 8.0 or later, or interpreted;
    float64 never is."""
    if x.dtype is torch.float64:
        return False
    if x.is_cuda:
        return capability(x.get_device()) >= (8, 0)
    return triton.knobs.runtime.interpret


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """What formulas in plain torch compute in: float32, and float64 for float64."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in `wide_dtype`."""
    return x.to(wide_dtype(x))


@lru_cache(maxsize=4096)
def wants_pdl(problem: Any, flops_at_most: float = 2e10) -> bool:
    """Whether a kernel for `problem`, by the FLOPs of its `work()`, shall start while the one before it ends
    (programmatic dependent launch). Kept, as working that out takes 4 to 11 us of the host, a look 1.

    It saves microseconds; and its programs take multiprocessors in the order in which they come free, where a plain
    launch gives neighbours to the two of a TPC, which read what they share once. (H100, 128 experts of 512 rows,
    1536 -> 2048 after another kernel: 934 us, without 628; docs/notes/grouped_mm.md, "Neighbours".)"""
    return bool(problem.work().flops <= flops_at_most)


def supports_pdl(x: torch.Tensor) -> bool:
    """Whether kernels on x's device take programmatic dependent launch: on compute capability 9.0 and later."""
    return x.is_cuda and capability(x.get_device()) >= (9, 0)
