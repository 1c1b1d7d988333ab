"""Launches of row kernels, and of the many small kernels beside them.

Their parameters are tensors (or None), then integers and floats, then compile-time constants; or two tuples, `tensors`
and `scalars`, and constants. What shapes alone decide is planned once (`plan`), the rest is launched as it comes
(`launch`), some 10 µs sooner than by `kernel[grid](...)`.

`cluster` programs side by side can form a thread block cluster (launch/versions.py); where that is not known
`Machine.clusters` is False.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver as runtime

from expertile.ops.launch import launch as launches
from expertile.ops.launch.launch import Compiled, Launch, Pointer, alike, arguments, compiled, met
from expertile.ops.launch.versions import FP_FUSION

_READY: dict[tuple[Any, ...], Compiled | None] = {}
_MOST_READY = 4096


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
        kernel = compiled(_mark, (), (torch.float32,), (), _options(_mark, (None,), (), (), 4), index, cluster)
        assert kernel is not None
        # Shared memory is what limits the CTAs of an SM here; each takes 1 KB more than it asks for.
        shared = props.shared_memory_per_multiprocessor // programs_per_sm - 1024
        return runtime.active.utils.cuOccupancyMaxActiveClusters(kernel.function, shared, cluster)


def plan(
    kernel: Any,
    count: int,
    pointers: tuple[Pointer | None, ...],
    scalars: tuple[int | float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    cluster: int = 1,
    most_registers: int | None = None,
    pdl: bool = False,
) -> Launch:
    """The launch of `count` programs (clusters of `cluster` programs each) of at most `most_registers` a thread.

    `pdl`: the kernel may start while the kernel before it runs (programmatic dependent launch, where `supports_pdl`
    allows it), and waits for it itself."""
    options = _options(kernel, pointers, scalars, constants, num_warps, most_registers, pdl)
    return Launch(kernel, (), (), pointers, scalars, options, count, cluster)


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
    pdl: bool = False,
) -> None:
    """`plan` and run at once on the first tensor's device, for launches whose numbers are new at most calls: only the
    compiled kernel is kept. The kernel may not read or write what is not reachable from `tensors`."""
    first = tensors[0]
    assert first is not None
    device = first.get_device()
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    how = num_warps, cluster, most_registers, pdl
    ready = None
    if device >= 0 and (cluster > 1 or not launches.hooked()):
        dtypes = tuple([None if t is None else t.dtype for t in tensors])
        aligned = tuple([a is None or a % 16 == 0 for a in addresses])
        key = (kernel.fn, device, constants, how, dtypes, aligned, tuple(map(alike, scalars)))
        try:
            ready = _READY[key]
        except KeyError:
            if len(_READY) >= _MOST_READY:
                _READY.clear()
            pointers = met(tensors)[1]
            options = _options(kernel, pointers, scalars, constants, num_warps, most_registers, pdl)
            ready = _READY[key] = compiled(kernel, (), pointers, scalars, options, device, cluster)
    if ready is None:
        plan(kernel, count, met(tensors)[1], scalars, constants, *how).run(device, (), tensors, addresses)
    else:
        ready(device, count, (), (*arguments(kernel, addresses, scalars), *constants))


def _options(
    kernel: Any,
    pointers: Sequence[Any],
    scalars: Sequence[Any],
    constants: tuple[Any, ...],
    num_warps: int,
    most_registers: int | None = None,
    pdl: bool = False,
) -> tuple[tuple[str, Any], ...]:
    """Constants by name, and what Triton takes beside a kernel's parameters."""
    names = kernel.arg_names[len(arguments(kernel, pointers, scalars)) :]
    options = dict(zip(names, constants, strict=True)) | {"num_warps": num_warps} | FP_FUSION
    if most_registers is not None:
        options["maxnreg"] = most_registers
    if pdl:
        options["launch_pdl"] = True
    return tuple(options.items())
