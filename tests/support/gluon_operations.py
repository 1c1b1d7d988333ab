"""The operations of Gluon for Hopper that `gluon_emulator` carries out: TMA, cp.async, wgmma, barriers and fences."""

import re
from typing import Any

import torch
from triton.experimental.gluon import language as real_gl

from tests.support.gluon_machine import Descriptor, EmulationError, Mbarrier, Pointer, Shared, current, step


class _Accumulator:
    """The result of an unfinished wgmma: may be passed on to the next wgmma or waited for, not read."""

    value: torch.Tensor | None = None

    def to(self, *_: Any) -> torch.Tensor:
        raise EmulationError("the accumulator of an unfinished wgmma is read")

    shape = property(to)


class Tma:
    tensor_descriptor = object

    @staticmethod
    def load(desc: Descriptor, coord: Any, bar: Mbarrier, dst: Shared, pred: Any = True) -> None:
        step()
        if not pred:
            return
        if list(dst.tensor.shape) != desc.box:
            raise EmulationError(f"TMA box {desc.box} loaded into a buffer of {list(dst.tensor.shape)}")
        whole = desc.whole(coord)
        index, inside = desc.reach(coord) if whole is None else (None, None)
        # Words have no NaN to stand for what is in flight; the bits of one do.
        dst.tensor.view(torch.float32 if dst.tensor.dtype is torch.int32 else dst.tensor.dtype).fill_(float("nan"))

        def land() -> None:
            if whole is None:
                dst.tensor.copy_(torch.where(inside, desc.flat[torch.where(inside, index, 0)], 0))
            else:
                dst.tensor.copy_(whole)
            bar.tx_bytes -= desc.block_type.nbytes
            bar.settle()

        current.scheduler.in_flight.append(land)

    @staticmethod
    def add(desc: Descriptor, coord: Any, src: Shared) -> None:
        Tma.store(desc, coord, src, add=True)

    @staticmethod
    def store(desc: Descriptor, coord: Any, src: Shared, add: bool = False) -> None:
        step()
        if src.key in current.partition.unfenced:
            raise EmulationError("a TMA store reads shared memory written without fence_async_shared")
        whole = desc.whole(coord)
        index, inside = desc.reach(coord) if whole is None else (None, None)

        def land() -> None:
            if whole is None:
                before = desc.flat[index[inside]] if add else 0
                desc.flat[index[inside]] = before + src.tensor.reshape(desc.box)[inside]
            else:
                whole.copy_(src.tensor.reshape(desc.box) + (whole if add else 0))

        current.partition.stores.append(land)

    @staticmethod
    def store_wait(pendings: int = 0) -> None:
        step()
        stores = current.partition.stores
        while len(stores) > pendings:
            stores.pop(0)()


class AsyncCopy:
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


class MbarrierOps:
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


def fence_async_shared(cluster: bool = False) -> None:
    step()
    current.partition.unfenced.clear()


def warpgroup_mma(a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
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
    return out if is_async else warpgroup_mma_wait(0, (out,))


def warpgroup_mma_wait(num_outstanding: int = 0, deps: tuple[Any, ...] = ()) -> Any:
    step()
    queue = current.partition.wgmmas
    while len(queue) > num_outstanding:
        queue.pop(0)()
    done = tuple(d.value if isinstance(d, _Accumulator) and d.value is not None else d for d in deps)
    return done[0] if len(done) == 1 else done


def named_barrier(asm: str) -> None:
    """`bar.sync number, threads` or `bar.arrive number, threads`."""
    found = re.match(r"bar\.(sync|arrive) (\d+), (\d+);", asm)
    if found is None or getattr(current, "scheduler", None) is None:
        raise EmulationError(f"PTX that is not emulated here: {asm}")
    step()
    over = current.scheduler.named.come(int(found[2]), int(found[3]), current.partition)
    if found[1] == "sync":
        step(over)
