"""Counters of dynamic tile schedulers: an int32 that is zero when a kernel begins, and that the kernel leaves at zero.

Kernels of one stream run one after another and share a counter. What a CUDA graph captures may be replayed on any
stream, so each captured launch has its own. Counters lie outside of torch's allocator: the first may be asked for while
a graph's memory pool is in use, and would be part of it.

Two kernels share a counter at one time only where a stream is not in order: between them stands a kernel that starts
early and never waits for the one before it (programmatic dependent launch), or the handle of a destroyed stream is used
again before its work is done. What they compute would be out of order too.
"""

from functools import lru_cache

import torch

from expertile.ops.launch import nvrtc
from expertile.ops.launch.device import current_device

_COUNT, _OF_STREAMS = 1 << 18, 1 << 12  # of a GPU: a megabyte, of which streams have the first
_PER_THREAD = 2  # CU_STREAM_PER_THREAD, which is another stream in each thread


class _Counters:
    """Of one GPU; those of streams and those of graphs that nobody has had yet."""

    def __init__(self) -> None:
        self.zeros = nvrtc.zeros(_COUNT)
        self.of_streams, self.of_graphs = iter(range(_OF_STREAMS)), iter(range(_OF_STREAMS, _COUNT))

    def take(self, graph: bool) -> torch.Tensor | None:
        number = next(self.of_graphs if graph else self.of_streams, None)
        return None if number is None else self.zeros[number : number + 1]


_counters: dict[int, _Counters | None] = {}  # by GPU; None: there was no memory for them


def tile_counter(dynamic: bool, like: torch.Tensor) -> torch.Tensor:
    """The counter of a launch on the current stream of the tensor's device, [1] int32; `like` itself where the schedule
    is not dynamic. Where none is left it is a new one, which a kernel of its own sets to zero. So is one that a graph
    captures before any launch outside of graphs has asked for memory."""
    if not dynamic:
        return like
    if like.is_cuda:
        device = like.get_device()
        with current_device(like.device):
            stream = nvrtc.current_stream(device)
            if torch.cuda.is_current_stream_capturing():
                counters = _counters.get(device)
                kept = counters.take(True) if counters else None
            else:
                kept = None if stream == _PER_THREAD else _of_stream(device, stream)
        if kept is not None:
            return kept
    return torch.zeros(1, dtype=torch.int32, device=like.device)


@lru_cache(maxsize=_OF_STREAMS)
def _of_stream(device: int, stream: int) -> torch.Tensor | None:
    if device not in _counters:
        try:
            found = _Counters()
        except (RuntimeError, AttributeError):  # torch has all memory, or the driver lacks a function
            found = None
        _counters.setdefault(device, found)
    counters = _counters[device]
    return counters.take(False) if counters else None
