"""Runs a Hopper Gluon kernel's Python source on CPU tensors, as an adversary would schedule it.

Partitions of `warp_specialize` run in an order that a seed decides, and asynchronous work lands as late as the
kernel's own synchronisation allows: TMA loads and cp.async at random or when nobody can go on, wgmma operands when the
wgmma is waited for, TMA stores when `store_wait` asks for them. Memory in flight holds NaN. So a stage freed too early,
a missing fence, a wrong phase, a store's buffer reused too soon or a deadlock shows as an `EmulationError` or as a
wrong number for some seed. Not modelled: layouts, registers, banks, time.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.experimental.gluon import language as real_gl
from triton.language.core import constexpr
from triton.runtime.jit import JITFunction

from tests.support.gluon_machine import (
    Descriptor,
    EmulationError,
    Mbarrier,
    Mbarriers,
    Partition,
    Pointer,
    Scheduler,
    Shared,
    call,
    current,
    step,
)

# ---------------------------------------------------------------------------------------------- hopper operations


class _Accumulator:
    """The result of an unfinished wgmma: may be passed on to the next wgmma or waited for, not read."""

    value: torch.Tensor | None = None

    def to(self, *_: Any) -> torch.Tensor:
        raise EmulationError("the accumulator of an unfinished wgmma is read")

    shape = property(to)


class _Tma:
    tensor_descriptor = object

    @staticmethod
    def load(desc: Descriptor, coord: Any, bar: Mbarrier, dst: Shared, pred: Any = True) -> None:
        step()
        if not pred:
            return
        if list(dst.tensor.shape) != desc.box:
            raise EmulationError(f"TMA box {desc.box} loaded into a buffer of {list(dst.tensor.shape)}")
        index, inside = desc.reach(coord)
        dst.tensor.fill_(float("nan"))

        def land() -> None:
            dst.tensor.copy_(torch.where(inside, desc.flat[torch.where(inside, index, 0)], 0))
            bar.tx_bytes -= desc.block_type.nbytes
            bar.settle()

        current.scheduler.in_flight.append(land)

    @staticmethod
    def store(desc: Descriptor, coord: Any, src: Shared) -> None:
        step()
        if src.key in current.partition.unfenced:
            raise EmulationError("a TMA store reads shared memory written without fence_async_shared")
        index, inside = desc.reach(coord)

        def land() -> None:
            desc.flat[index[inside]] = src.tensor.reshape(desc.box)[inside]

        current.partition.stores.append(land)

    @staticmethod
    def store_wait(pendings: int = 0) -> None:
        step()
        stores = current.partition.stores
        while len(stores) > pendings:
            stores.pop(0)()


class _AsyncCopy:
    """cp.async: lands when the barrier that was told of it is due, written through the generic proxy."""

    @staticmethod
    def load(dst: Shared, pointer: Pointer, mask: Any = True) -> None:
        step()
        index, inside = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask))
        if dst.tensor.shape != index.shape:
            raise EmulationError(f"cp.async of {list(index.shape)} into a buffer of {list(dst.tensor.shape)}")
        flat = pointer.tensor.view(-1)
        if bool((inside & ((index < 0) | (index >= flat.numel()))).any()):
            raise EmulationError("cp.async reads outside its tensor")
        dst.tensor.fill_(float("nan"))
        partitions = current.scheduler.partitions

        def land() -> None:
            dst.tensor.copy_(torch.where(inside, flat[torch.where(inside, index, 0)], 0))
            for partition in partitions:
                partition.unfenced.add(dst.key)

        current.partition.copies.append(land)

    @staticmethod
    def mbarrier_arrive(bar: Mbarrier, increment_count: bool = True) -> None:
        """One arrival of each thread of the partition, when all copies before it have landed."""
        step()
        if increment_count:
            raise EmulationError("arrivals of cp.async that raise the barrier's count are not emulated")
        partition = current.partition
        copies, partition.copies = partition.copies, []

        def arrive() -> None:
            for land in copies:
                land()
            bar.missing -= partition.threads
            bar.settle()

        current.scheduler.in_flight.append(arrive)


class _MbarrierOps:
    MBarrierLayout = real_gl.nvidia.hopper.mbarrier.MBarrierLayout

    @staticmethod
    def init(bar: Mbarrier, count: int) -> None:
        bar.init(count)

    @staticmethod
    def expect(bar: Mbarrier, nbytes: int, pred: Any = True) -> None:
        step()
        if pred:
            bar.tx_bytes += int(nbytes)
            bar.missing -= 1
            bar.settle()

    @staticmethod
    def arrive(bar: Mbarrier, *, count: int = 1, pred: Any = True) -> None:
        step()
        if pred:
            bar.missing -= count
            bar.settle()

    @staticmethod
    def wait(bar: Mbarrier, phase: int, pred: Any = True, deps: Any = ()) -> None:
        if pred:
            step(lambda: (bar.phases_done & 1) != (int(phase) & 1))


def _fence_async_shared(cluster: bool = False) -> None:
    step()
    current.partition.unfenced.clear()


def _warpgroup_mma(a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    step()
    if not isinstance(b, Shared):
        raise EmulationError("wgmma takes b from shared memory only")
    for operand in (a, b):
        if isinstance(operand, Shared) and operand.key in current.partition.unfenced:
            raise EmulationError("wgmma reads shared memory written without fence_async_shared")
    out = _Accumulator()
    a_registers = None if isinstance(a, Shared) else a.clone()

    def finish() -> None:
        left = a.tensor if a_registers is None else a_registers
        out.value = left.float() @ b.tensor.float()
        if use_acc:
            out.value = out.value + (acc.value if isinstance(acc, _Accumulator) else acc)

    current.partition.wgmmas.append(finish)
    return out if is_async else _warpgroup_mma_wait(0, (out,))


def _warpgroup_mma_wait(num_outstanding: int = 0, deps: tuple[Any, ...] = ()) -> Any:
    step()
    queue = current.partition.wgmmas
    while len(queue) > num_outstanding:
        queue.pop(0)()
    done = tuple(d.value if isinstance(d, _Accumulator) and d.value is not None else d for d in deps)
    return done[0] if len(done) == 1 else done


def _named_barrier(asm: str) -> None:
    """`bar.sync number, threads` or `bar.arrive number, threads`."""
    found = re.match(r"bar\.(sync|arrive) (\d+), (\d+);", asm)
    if found is None or getattr(current, "scheduler", None) is None:
        raise EmulationError(f"PTX that is not emulated here: {asm}")
    step()
    over = current.scheduler.named.come(int(found[2]), int(found[3]), current.partition)
    if found[1] == "sync":
        step(over)


# ---------------------------------------------------------------------------------------------- the language


class _Language:
    """Stands in for `gluon.language`; what is not listed (layouts, constexpr types) is the real module's."""

    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    int32, int64 = torch.int32, torch.int64

    def __init__(self, rng: random.Random, grid: int) -> None:
        self.rng, self.grid, self.program = rng, grid, 0
        self.fetched: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(real_gl, name)

    def constexpr(self, value: Any) -> Any:
        return value

    def static_range(self, *bounds: int) -> range:
        return range(*bounds)

    def program_id(self, axis: int = 0) -> int:
        return self.program

    def num_programs(self, axis: int = 0) -> int:
        return self.grid

    def num_warps(self) -> int:
        return 4

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return torch.where(condition, x, y) if isinstance(condition, torch.Tensor) else (x if condition else y)

    def maximum(self, x: Any, y: Any) -> Any:
        if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
            return torch.maximum(torch.as_tensor(x), torch.as_tensor(y))
        return max(x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
            return torch.minimum(torch.as_tensor(x), torch.as_tensor(y))
        return min(x, y)

    def sum(self, x: torch.Tensor, axis: int) -> int:
        return int(x.sum())

    def max(self, x: torch.Tensor, axis: int) -> int:
        return int(x.max())

    def min(self, x: torch.Tensor, axis: int) -> int:
        return int(x.min())

    def atomic_add(self, pointer: Pointer, value: int, sem: str) -> int:
        """The next tile number. Programs run one after the other, so all but the last get a few numbers only."""
        step()
        self.fetched[self.program] = self.fetched.get(self.program, 0) + 1
        if self.program < self.grid - 1 and self.fetched[self.program] > 2 + self.program:
            return 2**30
        flat = pointer.tensor.view(-1)
        before = int(flat[pointer.offset])
        flat[pointer.offset] += value
        return before

    def full(self, shape: Any, value: Any, dtype: torch.dtype, layout: Any = None) -> torch.Tensor:
        return torch.full(tuple(shape), value, dtype=dtype)

    def inline_asm_elementwise(self, asm: str, constraints: str, args: Any, **_: Any) -> Any:
        """Named barriers. Nothing else of what kernels say in PTX (prefetches) has an effect here; empty PTX hands its
        argument on."""
        if re.search(r"\bbar(rier)?\.", asm):
            _named_barrier(asm)
        return args[0] if not asm else None

    def associative_scan(self, x: torch.Tensor, axis: int, combine: Any) -> torch.Tensor:
        out = x.clone()
        for i in range(1, len(x)):
            out[i] = call(combine, out[i - 1], x[i])
        return out

    def arange(self, start: int, end: int, layout: Any = None) -> torch.Tensor:
        return torch.arange(start, end, dtype=torch.int32)

    def zeros(self, shape: Any, dtype: torch.dtype, layout: Any = None) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def expand_dims(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.unsqueeze(axis)

    def reshape(self, x: Any, shape: list[int]) -> torch.Tensor:
        return x.reshape(shape) if isinstance(x, torch.Tensor) else x.to(shape)

    def permute(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        return x.permute(*order)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[..., 0], x[..., 1]

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if isinstance(layout, _MbarrierOps.MBarrierLayout):
            return Mbarriers(shape[0])
        tensor = torch.zeros(shape, dtype=dtype)
        return Shared(tensor.fill_(float("nan")) if dtype.is_floating_point else tensor, layout)

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
        step()
        if not isinstance(pointer.offset, torch.Tensor):
            return pointer.tensor.view(-1)[int(pointer.offset)].item() if mask else other
        mask = torch.as_tensor(mask)
        value = pointer.tensor.view(-1)[torch.where(mask, pointer.offset, 0)]
        return torch.where(mask, value, torch.as_tensor(other, dtype=value.dtype))

    def warp_specialize(self, jobs: list[Any], worker_warps: list[int], worker_registers: list[int]) -> None:
        if not len(jobs) - 1 == len(worker_warps) == len(worker_registers):
            raise EmulationError("warp_specialize: a warp and a register count for every worker, none for the default")
        Scheduler(self.rng).run(jobs, [self.num_warps(), *worker_warps])


def _initializer(cls: Any) -> Any:
    """The `__init__` that an aggregate was written with."""
    init = cls.hash_attrs[0]
    return getattr(init, "fn", init)


def _aggregate(cls: Any) -> Callable[..., Any]:
    """A constructor of plain objects with the fields of a Triton aggregate."""
    init = _initializer(cls)

    def construct(*args: Any, **kwargs: Any) -> Any:
        value = types.SimpleNamespace()
        init(value, *args, **kwargs)
        return value

    return construct


def _is_aggregate(value: Any) -> bool:
    return isinstance(value, type) and getattr(value, "__triton_aggregate__", False)


def _modules(kernel: JITFunction) -> list[types.ModuleType]:
    """The kernel's module and, in turn, those that jitted functions and aggregates come from; not Triton's own."""
    found: dict[str, types.ModuleType] = {}
    waiting = {kernel.fn.__module__}
    while waiting:
        name = waiting.pop()
        found[name] = sys.modules[name]
        for value in vars(found[name]).values():
            if isinstance(value, JITFunction):
                home = value.fn.__module__
            elif _is_aggregate(value):
                home = value.__module__
                waiting |= {_initializer(value).__module__} - found.keys()
            else:
                continue
            if home not in found and not home.startswith("triton."):
                waiting.add(home)
    return [found[name] for name in sorted(found)]


@contextlib.contextmanager
def _emulated(module: types.ModuleType, language: _Language) -> Iterator[None]:
    """A module with the Gluon names it imported replaced by those above."""
    ours = {
        "gdc_wait": step,
        "gdc_launch_dependents": step,
        "gl": language,
        "async_copy": _AsyncCopy,
        "tma": _Tma,
        "cp_async": _AsyncCopy.load,
        "thread_barrier": step,
        "tma_load": _Tma.load,
        "tma_store": _Tma.store,
        "reinterpret": lambda smem, *as_what: smem.reinterpret(*as_what),
        "mbarrier": _MbarrierOps,
        "fence_async_shared": _fence_async_shared,
        "warpgroup_mma": _warpgroup_mma,
        "warpgroup_mma_wait": _warpgroup_mma_wait,
    }
    saved = dict(vars(module))
    for name, value in saved.items():
        if name in ours:
            setattr(module, name, ours[name])
        elif _is_aggregate(value):
            setattr(module, name, _aggregate(value))
        elif isinstance(value, constexpr):
            setattr(module, name, value.value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)


def run(kernel: Any, grid: int, args: tuple[Any, ...], options: dict[str, Any], seed: int = 0) -> None:
    """Run `kernel[(grid,)](*args, **options)` on the CPU, programs one after the other.

    Host TMA descriptors and tensors among `args` are converted; launch options the kernel has no parameter for are
    dropped. Raises EmulationError, or leaves wrong numbers in the output, when the kernel's synchronisation is wrong.
    """
    language = _Language(random.Random(seed), grid)

    def convert(x: Any) -> Any:
        if hasattr(x, "block_shape"):
            return Descriptor(x)
        return Pointer(x) if isinstance(x, torch.Tensor) else x

    options = {k: v for k, v in options.items() if k in kernel.arg_names}
    with contextlib.ExitStack() as stack:
        jit_call = JITFunction.__call__
        stack.callback(setattr, JITFunction, "__call__", jit_call)
        JITFunction.__call__ = lambda self, *a, **k: self.fn(*a, **k)  # type: ignore[method-assign]
        for module in _modules(kernel):
            stack.enter_context(_emulated(module, language))
        for language.program in range(grid):
            current.scheduler, current.partition = None, Partition("main body")
            kernel.fn(*map(convert, args), **options)
