"""Runs a Hopper Gluon kernel's Python source on CPU tensors, as an adversary would schedule it.

Partitions of `warp_specialize` run in an order that a seed decides, and asynchronous work lands as late as the
kernel's own synchronisation allows: TMA loads and cp.async at random or when nobody can go on, wgmma operands when the
wgmma is waited for, TMA stores when `store_wait` asks for them. Memory in flight holds NaN. So a stage freed too early,
a missing fence, a wrong phase, a store's buffer reused too soon or a deadlock shows as an `EmulationError` or as a
wrong number for some seed. Not modelled: layouts, registers, banks, time.
"""

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
    Mbarriers,
    Partition,
    Pointer,
    Scheduler,
    Shared,
    call,
    current,
    step,
)
from tests.support.gluon_operations import (
    AsyncCopy,
    MbarrierOps,
    Tma,
    fence_async_shared,
    named_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


class Language:
    """Stands in for `gluon.language`; what is not listed (layouts, constexpr types) is the real module's."""

    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    int32, int64 = torch.int32, torch.int64

    def __init__(self, rng: random.Random, grid: int) -> None:
        self.rng, self.grid, self.program = rng, grid, 0
        self.fetched: dict[int, int] = {}
        self.writes: dict[int, torch.Tensor] = {}  # address of a tensor -> how often each element was stored

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
        tensors = isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor)
        return torch.maximum(torch.as_tensor(x), torch.as_tensor(y)) if tensors else max(x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        tensors = isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor)
        return torch.minimum(torch.as_tensor(x), torch.as_tensor(y)) if tensors else min(x, y)

    def sum(self, x: torch.Tensor, axis: int) -> Any:
        return _scalar(x.sum(axis))

    def max(self, x: torch.Tensor, axis: int) -> Any:
        return _scalar(x.amax(axis))

    def min(self, x: torch.Tensor, axis: int) -> Any:
        return _scalar(x.amin(axis))

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    def exp2(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp2(x)

    def log2(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log2(x)

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) else x

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, y), -1)

    def convert_layout(self, x: torch.Tensor, layout: Any, assert_trivial: bool = False) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise EmulationError("the accumulator of an unfinished wgmma is converted")
        return x

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
        """Named barriers, moves and exp2. Prefetches have no effect here; empty PTX hands its argument on."""
        if re.search(r"\bbar(rier)?\.", asm):
            named_barrier(asm)
        elif asm.startswith("ex2.approx.ftz.f32 "):
            return torch.exp2(args[0])
        elif args and asm and not asm.startswith("mov.b32"):
            raise EmulationError(f"PTX that is not emulated here: {asm}")
        return args[0] if args else None

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
        if isinstance(layout, MbarrierOps.MBarrierLayout):
            return Mbarriers(shape[0])
        tensor = torch.zeros(shape, dtype=dtype)
        return Shared(tensor.fill_(float("nan")) if dtype.is_floating_point else tensor, layout)

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
        step()
        if isinstance(pointer.offset, int) and mask is True and 0 <= pointer.offset < pointer.tensor.numel():
            return pointer.tensor.view(-1)[pointer.offset].item()
        at, inside = self._reach("load", pointer, mask)
        if not isinstance(pointer.offset, torch.Tensor) and at.dim() == 0:
            return pointer.tensor.view(-1)[at].item() if inside else other
        value = pointer.tensor.view(-1)[torch.where(inside, at, 0)]
        return torch.where(inside, value, torch.as_tensor(other, dtype=value.dtype))

    def store(self, pointer: Pointer, value: torch.Tensor, mask: Any = True) -> None:
        step()
        at, inside, value = torch.broadcast_tensors(*self._reach("store", pointer, mask), torch.as_tensor(value))
        flat, at = pointer.tensor.view(-1), at[inside].long()
        flat[at] = value[inside].to(flat.dtype)
        if flat.data_ptr() not in self.writes:
            self.writes[flat.data_ptr()] = torch.zeros(len(flat), dtype=torch.int32)
        self.writes[flat.data_ptr()].index_add_(0, at, torch.ones(len(at), dtype=torch.int32))

    def _reach(self, what: str, pointer: Pointer, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and mask of an access, which must not lie outside its tensor."""
        at, inside = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask, dtype=torch.bool))
        if bool((inside & ((at < 0) | (at >= pointer.tensor.numel()))).any()):
            raise EmulationError(f"a {what} lies outside its tensor")
        return at, inside

    def warp_specialize(self, jobs: list[Any], worker_warps: list[int], worker_registers: list[int]) -> None:
        if not len(jobs) - 1 == len(worker_warps) == len(worker_registers):
            raise EmulationError("warp_specialize: a warp and a register count for every worker, none for the default")
        Scheduler(self.rng).run(jobs, [self.num_warps(), *worker_warps])


def _scalar(x: torch.Tensor) -> Any:
    """Sums of integers are Python numbers; floats divide by zero as tensors do."""
    return x.item() if x.dim() == 0 and not x.dtype.is_floating_point else x


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
    """The kernel's module and those that its jitted functions, aggregates and modules of ours come from."""
    found: dict[str, types.ModuleType] = {}
    waiting = {kernel.fn.__module__}
    while waiting:
        name = waiting.pop()
        found[name] = sys.modules[name]
        for value in vars(found[name]).values():
            if isinstance(value, types.ModuleType) and value.__name__.startswith(("expertile.ops.", "mutant")):
                home = value.__name__
            elif isinstance(value, JITFunction):
                home = value.fn.__module__
            elif _is_aggregate(value):
                home = value.__module__
                waiting |= {_initializer(value).__module__} - found.keys()
            else:
                continue
            if home not in found and not home.startswith("triton."):
                waiting.add(home)
    return [found[name] for name in sorted(found)]


def _flat(x: torch.Tensor) -> torch.Tensor:
    """A tensor of any strides as the memory that a kernel reaches from its first element."""
    if x.is_contiguous():
        return x
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))


@contextlib.contextmanager
def _emulated(module: types.ModuleType, language: Language) -> Iterator[None]:
    """A module with the Gluon names it imported replaced by those above."""
    ours = {
        "gdc_wait": step,
        "gdc_launch_dependents": step,
        "gl": language,
        "async_copy": AsyncCopy,
        "tma": Tma,
        "cp_async": AsyncCopy.load,
        "thread_barrier": step,
        "tma_load": Tma.load,
        "tma_store": Tma.store,
        "tma_add": Tma.add,
        "reinterpret": lambda smem, *as_what: smem.reinterpret(*as_what),
        "mbarrier": MbarrierOps,
        "fence_async_shared": fence_async_shared,
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
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


def run(
    kernel: Any,
    grid: int,
    args: tuple[Any, ...],
    options: dict[str, Any],
    seed: int = 0,
    language_type: type[Language] = Language,
) -> Language:
    """Run `kernel[(grid,)](*args, **options)` on the CPU, programs one after the other; returns the language, which
    has counted the stores.

    Host TMA descriptors and tensors among `args` are converted; launch options the kernel has no parameter for are
    dropped. Raises EmulationError, or leaves wrong numbers in the output, when the kernel's synchronisation is wrong.
    """
    language = language_type(random.Random(seed), grid)

    def convert(x: Any) -> Any:
        if hasattr(x, "block_shape"):
            return Descriptor(x)
        return Pointer(_flat(x)) if isinstance(x, torch.Tensor) else x

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
    return language
