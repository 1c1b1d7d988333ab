"""Counters of dynamic tile schedulers: an int32 that is zero when a kernel begins, and that the kernel leaves at zero.

Kernels of one stream run one after another and share a counter. What a CUDA graph captures may be replayed on any
stream, so each captured launch has its own. Counters lie outside of torch's allocator: the first may be asked for while
a graph's memory pool is in use, and would be part of it.
"""

import itertools
from functools import lru_cache

import torch

from expertile.ops.launch import nvrtc
from expertile.ops.launch.device import current_device

_COUNT = 1 << 18  # of a GPU: a megabyte
_PER_THREAD = 2  # CU_STREAM_PER_THREAD, which is another stream in each thread
_counters: dict[int, tuple[torch.Tensor, "itertools.count[int]"]] = {}  # by GPU, and the next that nobody has had


def tile_counter(dynamic: bool, like: torch.Tensor) -> torch.Tensor:
    """The counter of a launch on the current stream of the tensor's device, [1] int32; `like` itself where the schedule
    is not dynamic. Where none is left it is a new one, which a kernel of its own sets to zero."""
    if not dynamic:
        return like
    if like.is_cuda:
        device = like.get_device()
        with current_device(like.device):
            capturing, stream = torch.cuda.is_current_stream_capturing(), nvrtc.current_stream(device)
            kept = _unused(device) if capturing else None if stream == _PER_THREAD else _of_stream(device, stream)
        if kept is not None:
            return kept
    return torch.zeros(1, dtype=torch.int32, device=like.device)


@lru_cache(maxsize=1024)
def _of_stream(device: int, stream: int) -> torch.Tensor | None:
    if device not in _counters:
        _counters.setdefault(device, (nvrtc.zeros(_COUNT), itertools.count()))
    return _unused(device)


def _unused(device: int) -> torch.Tensor | None:
    """One that nobody has had, or None."""
    if device not in _counters:  # and while a stream captures memory cannot be asked for
        return None
    counters, numbers = _counters[device]
    number = next(numbers)
    return counters[number : number + 1] if number < _COUNT else None
