"""The machine below `gluon_emulator`: partitions, one at a time, shared memory, both kinds of barriers, descriptors."""

import random
import threading
import types
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from triton.runtime.jit import JITFunction

current = threading.local()  # .partition, .scheduler of the running thread


class EmulationError(RuntimeError):
    """The kernel broke a rule of the hardware, or cannot go on."""


def call(f: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, jitted or plain, as Python."""
    return (f.fn if isinstance(f, JITFunction) else f)(*args, **kwargs)


# ---------------------------------------------------------------------------------------------- scheduling


class Partition:
    def __init__(self, name: str, warps: int = 4) -> None:
        self.name, self.threads = name, 32 * warps
        self.baton: SimpleQueue[None] = SimpleQueue()  # a semaphore without Python in it
        self.blocked_on: Callable[[], bool] | None = None
        self.done = False
        self.wgmmas: list[Callable[[], None]] = []
        self.stores: list[Callable[[], None]] = []
        self.copies: list[Callable[[], None]] = []  # cp.async that no barrier has been told of
        self.unfenced: set[Any] = set()  # shared memory written by ordinary stores since the last fence


class Scheduler:
    """One thread for each partition, exactly one of which runs at a time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.partitions: list[Partition] = []
        self.in_flight: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self.named = NamedBarriers()
        self.finished: SimpleQueue[None] = SimpleQueue()

    def run(self, jobs: list[tuple[Any, tuple[Any, ...]]], warps: list[int]) -> None:
        """Run partitions of so many warps each to their ends."""
        self.partitions = [Partition(f.__name__, w) for (f, _), w in zip(jobs, warps, strict=True)]
        self.named = NamedBarriers(taken=1 + len(jobs))
        threads = [
            threading.Thread(target=self._body, args=(part, f, args), daemon=True)
            for part, (f, args) in zip(self.partitions, jobs, strict=True)
        ]
        for thread in threads:
            thread.start()
        self.pass_baton(None)
        self.finished.get()
        for part in self.partitions:
            part.baton.put(None)
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        while self.in_flight:
            self._land_one()
        self.named.check_empty()

    def _body(self, part: Partition, f: Any, args: tuple[Any, ...]) -> None:
        part.baton.get()
        current.scheduler, current.partition = self, part
        try:
            if not self.error:
                call(f, *args)
                if part.wgmmas:
                    raise EmulationError(f"{part.name} ends with an unfinished wgmma")
                for land in part.stores:
                    land()
        except BaseException as e:
            self.error = self.error or e
        part.done = True
        self.pass_baton(None)

    def _land_one(self) -> None:
        self.in_flight.pop(self.rng.randrange(len(self.in_flight)))()

    def pass_baton(self, me: Partition | None) -> None:
        """Let a random runnable partition go on; when none can, land asynchronous copies until one can."""
        while True:
            live = [p for p in self.partitions if not p.done]
            if not live or self.error:
                self.finished.put(None)
                if me is None:
                    return
                raise EmulationError("stopped: another partition failed")
            if self.in_flight and self.rng.random() < 0.1:
                self._land_one()
            ready = [p for p in live if p.blocked_on is None or p.blocked_on()]
            if ready:
                break
            if self.in_flight:
                self._land_one()
            else:
                self.error = EmulationError("deadlock of " + ", ".join(p.name for p in live))
        chosen = self.rng.choice(ready)
        chosen.blocked_on = None
        if chosen is me:
            return
        chosen.baton.put(None)
        if me is not None:
            me.baton.get()
            if self.error:
                raise EmulationError("stopped: another partition failed")


def step(condition: Callable[[], bool] | None = None) -> None:
    """A point where another partition may run; with a condition, where this one must wait for it."""
    scheduler = getattr(current, "scheduler", None)
    if scheduler is None:
        if condition and not condition():
            raise EmulationError("the kernel's main body waits on a barrier that no thread completes")
        return
    current.partition.blocked_on = condition
    if condition is not None or scheduler.rng.random() < 0.3:
        scheduler.pass_baton(current.partition)


# ---------------------------------------------------------------------------------------------- memory


class Shared:
    """A view of shared memory; `key` names the buffer it lies in, for the fence check."""

    def __init__(self, tensor: torch.Tensor, layout: Any, key: Any = None) -> None:
        self.tensor, self.layout, self.key = tensor, layout, id(tensor) if key is None else key

    @property
    def type(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(shape=list(self.tensor.shape), layout=self.layout)

    def index(self, i: int) -> "Shared":
        if not 0 <= int(i) < self.tensor.shape[0]:
            raise EmulationError(f"shared memory index {int(i)} of {self.tensor.shape[0]}")
        return Shared(self.tensor[int(i)], self.layout, (self.key, int(i)))

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        if not 0 <= start <= start + length <= self.tensor.shape[dim]:
            raise EmulationError(f"shared memory slice {start}:{start + length} of {self.tensor.shape[dim]}")
        return Shared(self.tensor.narrow(dim, start, length), self.layout, self.key)

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.tensor.view(*shape), self.layout, self.key)

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        return Shared(self.tensor.view(dtype).view(*shape), layout, self.key)

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.tensor.permute(*order), self.layout, self.key)

    def load(self, layout: Any = None) -> torch.Tensor:
        step()
        return self.tensor.clone()

    def store(self, value: torch.Tensor) -> None:
        step()
        if value.dtype != self.tensor.dtype:
            raise EmulationError(f"{value.dtype} stored into shared memory of {self.tensor.dtype}")
        self.tensor.copy_(value)
        current.partition.unfenced.add(self.key)


class Mbarrier:
    """A shared-memory barrier: a phase completes when all arrivals and all expected bytes are in."""

    count = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count
        self.tx_bytes = 0
        self.phases_done = 0

    def settle(self) -> None:
        if self.missing < 0:
            raise EmulationError("an mbarrier got more arrivals than its count")
        if self.missing == 0 and self.tx_bytes == 0:
            self.phases_done += 1
            self.missing = self.count


class Mbarriers:
    def __init__(self, n: int) -> None:
        self.barriers = [Mbarrier() for _ in range(n)]

    def index(self, i: int) -> Mbarrier:
        return self.barriers[int(i)]


class NamedBarriers:
    """The 16 barriers of a multiprocessor that `bar.sync` and `bar.arrive` call by number.

    A round of a barrier ends when as many threads have come as the instruction says, those that wait and those that do
    not. Hardware counts only: if one partition came twice, a round would end without the other. That is an error here,
    and so are rounds of several sizes, arrivals that nobody has waited for at the kernel's end, and the numbers below
    `taken`: Triton's own, one for the default partition, one for the start of the others, one for each of those.
    """

    def __init__(self, taken: int = 0) -> None:
        self.taken = taken
        self.rounds = [0] * 16
        self.came: list[dict[Partition, int]] = [{} for _ in range(16)]
        self.expected = [0] * 16

    def come(self, number: int, threads: int, who: Partition) -> Callable[[], bool]:
        """All threads of `who` come to a barrier of `threads`; the answer tells whether that round is over."""
        if not self.taken <= number < 16:
            raise EmulationError(f"named barrier {number}: free are {self.taken} to 15")
        came, before = self.came[number], self.rounds[number]
        if who in came:
            raise EmulationError(f"{who.name} comes to named barrier {number} twice in one round")
        if came and self.expected[number] != threads:
            raise EmulationError(f"named barrier {number} is of {self.expected[number]} threads and of {threads}")
        came[who], self.expected[number] = who.threads, threads
        if sum(came.values()) > threads:
            raise EmulationError(f"{sum(came.values())} threads come to named barrier {number} of {threads}")
        if sum(came.values()) == threads:
            came.clear()
            self.rounds[number] += 1
        return lambda: self.rounds[number] > before

    def check_empty(self) -> None:
        left = {number: [p.name for p in came] for number, came in enumerate(self.came) if came}
        if left:
            raise EmulationError(f"named barriers with arrivals that no thread waited for: {left}")


class Descriptor:
    """A TMA descriptor over a tensor's storage, with bounds and 64-bit address wrap-around as in hardware."""

    def __init__(self, d: Any) -> None:
        self.base, self.shape, self.strides = d.base, list(d.shape), list(d.strides)
        self.box, self.layout, self.dtype = list(d.block_shape), d.layout, d.base.dtype
        nbytes = d.base.element_size()
        for extent in self.box:
            nbytes *= extent
        self.block_type = types.SimpleNamespace(shape=self.box, nbytes=nbytes)
        size = d.base.untyped_storage().nbytes() // d.base.element_size() - d.base.storage_offset()
        self.flat = d.base.as_strided((size,), (1,))
        self.last = sum((box - 1) * stride for box, stride in zip(self.box, self.strides, strict=True))

    def _start(self, coord: list[int]) -> int:
        """The index into `flat` of the box's first element."""
        itemsize = self.base.element_size()
        if len(coord) != len(self.box):
            raise EmulationError(f"{len(coord)} coordinates for a TMA box of rank {len(self.box)}")
        start = sum(int(c) * s for c, s in zip(coord, self.strides, strict=True)) * itemsize % 2**64
        start -= 2**64 if start >= 2**63 else 0
        if start % 16:
            raise EmulationError(f"TMA at {[int(c) for c in coord]} is no multiple of 16 bytes: an illegal instruction")
        return start // itemsize

    def whole(self, coord: list[int]) -> torch.Tensor | None:
        """A view of the box at `coord` if all of it is in bounds, which `reach` tells for each element."""
        start = self._start(coord)
        inside = all(0 <= int(c) <= e - b for c, e, b in zip(coord, self.shape, self.box, strict=True))
        if not inside or not 0 <= start < self.flat.numel() - self.last:
            return None
        return self.flat.as_strided(self.box, self.strides, self.flat.storage_offset() + start)

    def reach(self, coord: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(element index into `flat`, whether in bounds) for every element of the box at `coord`."""
        rank = len(self.box)
        index = torch.full([1] * rank, self._start(coord))
        inside = torch.ones([1] * rank, dtype=torch.bool)
        for dim, (c, extent, box, stride) in enumerate(zip(coord, self.shape, self.box, self.strides, strict=True)):
            along = torch.arange(box).view([box if d == dim else 1 for d in range(rank)])
            index = index + (along * stride if box > 1 else 0)
            inside = inside & (along + int(c) >= 0) & (along + int(c) < extent)
        index, inside = index.expand(self.box), inside.expand(self.box)
        if bool((inside & ((index < 0) | (index >= self.flat.numel()))).any()):
            raise EmulationError(f"TMA at {[int(c) for c in coord]} touches memory outside the tensor")
        return index, inside


class Pointer:
    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset

    @property
    def dtype(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(element_ty=self.tensor.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + offset)

    def __sub__(self, offset: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset - offset)
