"""Launching a row kernel: compiled once for a specialisation, then by the driver's launch alone.

A row kernel's parameters are tensors (or None), then integers and floats, then compile-time constants. What Triton
would compile anew for is the key here: the constants, dtypes, 16-byte alignment, integers that are 1 or multiples of
16. Going through `kernel[grid](...)` instead costs some 10 µs a call, longer than a row kernel of a few megabytes runs.

`cluster` programs side by side can form a thread block cluster. Triton knows clusters only as one program on several
CTAs, and its launcher does the rest (launch/versions.py); where that is not known `Machine.clusters` is False.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver as runtime

from expertile.ops.launch import driver, versions
from expertile.ops.launch.device import current_device

_READY: dict[tuple[Any, ...], driver.Compiled | None] = {}
_MOST_READY = 4096
_NO_CLUSTERS = f"cluster: expected Triton {versions.KNOWN_RANGE}, whose launcher is known to take clusters"


@triton.jit
def _mark(ptr):
    tl.store(ptr, 0.0)


@lru_cache(maxsize=256)
def resident_clusters(index: int, cluster: int, programs_per_sm: int) -> int:
    """Clusters that GPU `index` runs at one time, with that many CTAs on an SM.

    Fewer than SMs * CTAs / cluster: a cluster lies within one GPC, whose SMs may be no multiple of it, and how many SMs
    a GPC has differs from GPU to GPU. One cluster too many would wait for all others to end, and double the time."""
    props = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index):
        # A thread of autograd that has not called the CUDA runtime yet has no context, which the driver asks for below.
        torch.cuda.mem_get_info(index)
        kernel = _compile(_mark, (torch.empty(1, device=f"cuda:{index}"),), (), (), 4, cluster)
        if kernel is None:
            raise RuntimeError(_NO_CLUSTERS)
        # Shared memory is what limits the CTAs of an SM here; each takes 1 KB more than it asks for.
        shared = props.shared_memory_per_multiprocessor // programs_per_sm - 1024
        return runtime.active.utils.cuOccupancyMaxActiveClusters(kernel.function, shared, cluster)


def launch(
    kernel: Any,
    count: int,
    tensors: tuple[torch.Tensor | None, ...],
    scalars: tuple[int | float, ...],
    constants: tuple[Any, ...],
    *,
    num_warps: int,
    cluster: int = 1,
    most_registers: int | None = None,
    early: bool = False,
) -> driver.Compiled | None:
    """Queue `count` programs (clusters of `cluster` programs each) of at most `most_registers` a thread on the current
    stream of the first tensor's device. The kernel may not read or write what is not reachable from `tensors`.
    Returns it compiled, if it was launched without Triton.

    `early`: it may start while the kernel before it runs (programmatic dependent launch, where `starts_early` says
    so), and waits for it itself."""
    first = tensors[0]
    assert first is not None
    device = first.get_device()
    if device >= 0 and (cluster > 1 or not driver.hooked()):
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        key = (
            kernel.fn, device, constants, num_warps, cluster, most_registers, early,
            tuple([None if t is None else t.dtype for t in tensors]),
            tuple([a is None or a % 16 == 0 for a in addresses]),
            tuple([_divisor(s) for s in scalars]),
        )  # fmt: skip
        try:
            ready = _READY[key]
        except KeyError:
            if len(_READY) >= _MOST_READY:
                _READY.clear()
            with torch.cuda.device(device):
                ready = _READY[key] = _compile(
                    kernel, tensors, scalars, constants, num_warps, cluster, most_registers, early
                )  # fmt: skip
        if ready is not None:
            ready(device, count, (), (*addresses, *scalars, *constants))
            return ready
        if cluster > 1:
            raise RuntimeError(_NO_CLUSTERS)
    with current_device(first.device):
        kernel[(count * cluster,)](
            *tensors, *scalars, *constants, num_warps=num_warps, **_options(most_registers, early)
        )  # fmt: skip
    return None


@dataclass(frozen=True, eq=False)
class Plan:
    """A launch without its tensors, what shapes alone decide: worked out once, as a call costs the host more than a
    small one costs the GPU. `launch`'s arguments, and the kernels compiled for the dtypes and addresses met so far."""

    kernel: Any
    count: int
    scalars: tuple[int, ...]
    constants: tuple[Any, ...]
    num_warps: int
    cluster: int = 1
    most_registers: int | None = None
    compiled: dict[tuple[Any, ...], driver.Compiled] = field(default_factory=dict, repr=False)

    def __call__(self, tensors: tuple[torch.Tensor | None, ...], *last: float) -> None:
        """As `launch`; `last` are floats after the plan's scalars."""
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        key = (
            device, *[None if t is None else t.dtype for t in tensors],
            *[a is None or a % 16 == 0 for a in addresses],
        )  # fmt: skip
        ready = self.compiled.get(key)
        if ready is not None and (self.cluster > 1 or not driver.hooked()):
            ready(device, self.count, (), (*addresses, *self.scalars, *last, *self.constants))
            return
        ready = launch(
            self.kernel, self.count, tensors, (*self.scalars, *last), self.constants, num_warps=self.num_warps,
            cluster=self.cluster, most_registers=self.most_registers,
        )  # fmt: skip
        if ready is not None:
            self.compiled[key] = ready


def _options(most_registers: int | None, early: bool) -> dict[str, Any]:
    registers = {} if most_registers is None else {"maxnreg": most_registers}
    return versions.FP_FUSION | registers | ({"launch_pdl": True} if early else {})


def _divisor(scalar: int | float) -> int:
    """What Triton specialises an argument for: 1, a multiple of 16, or neither."""
    if type(scalar) is not int:
        return 0
    return 1 if scalar == 1 else 16 if scalar % 16 == 0 else 0


def _compile(
    kernel: Any,
    tensors: tuple[torch.Tensor | None, ...],
    scalars: tuple[int | float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    cluster: int,
    most_registers: int | None = None,
    early: bool = False,
) -> driver.Compiled | None:
    options = _options(most_registers, early)
    compiled = kernel.run(*tensors, *scalars, *constants, grid=(1,), warmup=True, num_warps=num_warps, **options)
    return driver.prepare(compiled, cluster)
