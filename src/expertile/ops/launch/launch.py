"""One launch of a Triton or Gluon kernel, described in full but for its tensors.

`kernel[grid](...)` takes 30 to 50 µs, of which the driver's launch is 2. Here descriptors are encoded once for an
address: a CUtensorMap is an address, a shape, strides and a box, so it holds for whatever tensor lies there. No tensor
is kept alive, and every cache is bounded.

Triton compiles a kernel for what it looks at in an argument: a dtype, whether an address or a number is a multiple of
16, whether a number is 1 or needs 64 bits. `compiled` makes one kernel for all arguments that are alike in that, by
stand-ins for them; a `Launch` keeps that kernel, so that a call costs the host the driver's launch and little else. A
profiler's hooks, the interpreter and versions of Triton whose C launcher is not known (versions.py) go through Triton's
own launcher.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver as runtime
from triton.runtime.jit import JITFunction

from expertile.ops.launch import versions
from expertile.ops.launch.blocks import Blocks
from expertile.ops.launch.device import current_device, torch_device

_address: Callable[[Any], int] = torch.Tensor.data_ptr
_NO_CLUSTERS = f"cluster: expected Triton {versions.KNOWN_RANGE}, whose launcher is known to take clusters"


@dataclass(frozen=True, eq=False)
class Tensor:
    """How a tensor argument is described to TMA: shape, strides in elements, and the compiled kernel's box."""

    shape: list[int]
    strides: list[int]
    box: dict[str, Any]


@lru_cache(maxsize=4096)
def _encode(tensor: Tensor, address: int) -> tuple[Any, ...]:
    return versions.encode_descriptor(tensor.box, address, tensor.shape, tensor.strides)


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled kernel, ready for one device."""

    queue: versions.Queue
    function: int
    boxes: tuple[Any, ...]
    stream_of: Callable[[int], int]
    current_device: Callable[[], int]

    def tensor(self, which: int, blocks: Blocks) -> Tensor:
        """The kernel's descriptor number `which`, of a tensor that TMA sees like that."""
        return Tensor(list(blocks.shape), list(blocks.strides), self.boxes[which])

    def __call__(
        self, device: int, programs: int, tensors: Iterable[tuple[Tensor, Any]], rest: tuple[Any, ...]
    ) -> None:
        """Queue the kernel on `device`'s current stream.

        The kernel's parameters are descriptors, given as (description, address), and then `rest`: addresses,
        integers, and anything at all for compile-time parameters.
        """
        if self.current_device() != device:
            with torch.cuda.device(device):
                return self(device, programs, tensors, rest)
        described: list[Any] = []
        for tensor, address in tensors:
            described += _encode(tensor, address)
        self.queue(programs, self.stream_of(device), (*described, *rest))


def prepare(kernel: Any, cluster: int = 1) -> Compiled | None:
    """`kernel`, a `triton.compile` result, loaded on the current device, to run in thread block clusters of `cluster`
    programs; None where it has to be launched by Triton."""
    queue = versions.launcher(kernel, cluster)
    if queue is None:
        return None
    active = runtime.active
    boxes = versions.boxes(kernel)
    return Compiled(queue, kernel.function, boxes, active.get_current_stream, active.get_current_device)


def hooked() -> bool:
    """Whether a profiler hooks launches, which only Triton's own path shows."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


@dataclass(frozen=True, eq=False)
class Pointer:
    """A tensor argument, or the tensor of a descriptor, that isn't there yet; made by `pointer`."""

    dtype: torch.dtype
    aligned: bool  # whether the address is a multiple of 16

    def data_ptr(self) -> int:
        """What Triton takes for the address."""
        return 0 if self.aligned else 8


@lru_cache(maxsize=64)
def pointer(dtype: torch.dtype, aligned: bool = True) -> Pointer:
    """The one `Pointer` of this kind, so that hashing it costs nothing."""
    return Pointer(dtype, aligned)


def met(tensors: Sequence[torch.Tensor | None]) -> tuple[list[int | None], tuple[Pointer | None, ...]]:
    """Addresses of tensors, and what Triton specialises on of them."""
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    pairs = zip(tensors, addresses, strict=True)
    return addresses, tuple([None if t is None else pointer(t.dtype, a % 16 == 0) for t, a in pairs])  # type: ignore[operator]


Pointers = tuple[Pointer | torch.dtype | None, ...]


class _Direct(NamedTuple):
    """What a launch past Triton needs: the kernel, its descriptors, the arguments behind the pointers, and whether the
    pointers are one argument."""

    kernel: Compiled
    described: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    grouped: bool


def grouped(kernel: Any) -> bool:
    """Whether a kernel takes its pointers as one tuple, `tensors`, and its numbers as another, `scalars`."""
    return bool(kernel.arg_names[0] == "tensors")


def arguments(kernel: Any, pointers: Iterable[Any], numbers: Iterable[Any]) -> tuple[Any, ...]:
    """What a kernel takes between its descriptors and its constants."""
    return (tuple(pointers), tuple(numbers)) if grouped(kernel) else (*pointers, *numbers)


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch without its tensors. A kernel's parameters are descriptors, pointers, numbers and compile-time
    constants, in this order; or two tuples, of its pointers and its numbers, and constants (`grouped`)."""

    kernel: Any
    blocks: tuple[Blocks | None, ...]  # of the descriptors; the last are None where the kernel does not use them
    block_dtypes: tuple[torch.dtype, ...]  # as which the descriptors' tensors are seen
    pointers: Pointers  # a bare dtype: the address is a multiple of 16, or the kernel does not specialise on that
    numbers: tuple[int | float, ...]
    options: Any  # a mapping, kept as its items: compile-time constants, and what Triton takes beside parameters
    programs: int  # or clusters
    cluster: int = 1  # programs of a thread block cluster
    _direct: dict[int, _Direct | None] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple((dict(self.options) | versions.FP_FUSION).items()))

    def run(
        self,
        device: int,
        tensors: Sequence[torch.Tensor | None],
        pointers: Sequence[torch.Tensor | None],
        addresses: Sequence[int | None] | None = None,
    ) -> None:
        """Queue the kernel on the current stream of GPU number `device` (-1: tensors of a CPU).

        `tensors` are those of the descriptors, anything where one is not used; `addresses` those of all `tensors` and
        then all `pointers`, to be given where one of these is None."""
        if device >= 0 and (self.cluster > 1 or not hooked()):
            try:
                direct = self._direct[device]
            except KeyError:
                direct = self._direct[device] = self._prepare(device)
            if direct is not None:
                kernel, described, rest, together = direct
                if addresses is None:
                    addresses = (*map(_address, tensors), *map(_address, pointers))
                used = zip(described, addresses, strict=False)
                own = addresses[len(described) :]
                kernel(device, self.programs, used, (tuple(own), *rest) if together else (*own, *rest))
                return
        with current_device(torch_device(device)):
            self.kernel[(self.programs * self.cluster,)](*self.arguments(tensors, pointers), **dict(self.options))

    def arguments(
        self, tensors: Sequence[torch.Tensor | None], pointers: Sequence[torch.Tensor | None]
    ) -> tuple[Any, ...]:
        """What Triton's own launcher takes for the kernel's parameters, compile-time constants aside."""
        seen = zip(self.blocks, tensors, self.block_dtypes, strict=True)
        described = (None if b is None or t is None else b.of(t.view(dtype), self.kernel) for b, t, dtype in seen)
        return (*described, *arguments(self.kernel, pointers, self.numbers))

    def _prepare(self, device: int) -> _Direct | None:
        seen = zip(self.blocks, self.block_dtypes, strict=True)
        forms = tuple(None if b is None else (b.form, dtype) for b, dtype in seen)
        kernel = compiled(self.kernel, forms, self.pointers, self.numbers, self.options, device, self.cluster)
        if kernel is None:
            return None
        described = tuple(kernel.tensor(i, b) for i, b in enumerate(self.blocks) if b is not None)
        known = len(self.blocks) + len(arguments(self.kernel, self.pointers, self.numbers))
        constants, together = (None,) * (len(self.kernel.arg_names) - known), grouped(self.kernel)
        return _Direct(kernel, described, (*((self.numbers,) if together else self.numbers), *constants), together)


def compiled(
    kernel: Any,
    forms: tuple[tuple[Blocks, torch.dtype] | None, ...],
    pointers: Pointers,
    numbers: tuple[int | float, ...],
    options: tuple[tuple[str, Any], ...],
    device: int,
    cluster: int = 1,
) -> Compiled | None:
    """`kernel` for GPU number `device`, for descriptors of those forms and dtypes and for arguments like the others;
    None where Triton has to launch it. RuntimeError for clusters that Triton's launcher is not known to take."""
    if not isinstance(kernel, JITFunction):  # the interpreter's functions are of another kind
        return None
    if grouped(kernel):
        some = tuple(map(alike, numbers))
    else:
        parameters = kernel.params[len(forms) + len(pointers) :]
        some = tuple(alike(n, not p.do_not_specialize) for p, n in zip(parameters, numbers, strict=False))
    found = _compiled(kernel, forms, pointers, some, options, device, cluster)
    if found is None and cluster > 1:
        raise RuntimeError(_NO_CLUSTERS)
    return found


@lru_cache(maxsize=4096)
def _compiled(
    kernel: JITFunction,
    forms: tuple[tuple[Blocks, torch.dtype] | None, ...],
    pointers: Pointers,
    numbers: tuple[int | float, ...],
    options: tuple[tuple[str, Any], ...],
    device: int,
    cluster: int,
) -> Compiled | None:
    described = (f and f[0].of(pointer(f[1]), kernel) for f in forms)
    stand_ins = (p if p is None or isinstance(p, Pointer) else pointer(p) for p in pointers)
    with torch.cuda.device(device):
        given = (*described, *arguments(kernel, stand_ins, numbers))
        made = kernel.run(*given, grid=(1,), warmup=True, **dict(options))
        return prepare(made, cluster)


def alike(number: int | float, specialize: bool = True) -> int | float:
    """One of the few numbers that stand for all: Triton compiles for it what it does for `number`, in a parameter that
    it specialises on or not."""
    if isinstance(number, float):
        return 0.5
    wide = 0 if -(2**31) <= number < 2**31 else 2**31
    if not specialize:
        return wide
    return 1 if number == 1 else wide + (16 if number % 16 == 0 else 2)
