"""Two deliberately wrong rivals that stand in every run as speed of light.

`dense`: the same rows against one weight, the FLOPs without any raggedness; each operator that has such a product
states it. `copy`: as many bytes moved as the operator must read and write, by the driver's copy and by an element-wise
kernel. Either alone may fall short of the memory (docs/notes/measuring.md); the record is that of the faster one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from expertile.lab.race.operator import Verdict
from expertile.roofline import Work


@dataclass(frozen=True)
class Copy:
    """One way to copy: `move(source, out)` writes int32 `source` to `out` and returns it, each byte once."""

    way: str
    move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def call(self, nbytes: float, device: torch.device) -> Callable[[], torch.Tensor]:
        """A copy that reads and writes `nbytes` bytes together, into fresh memory."""
        source = _random_words(nbytes, device)
        return lambda: self.move(source, torch.empty_like(source))

    def check(self, nbytes: float, device: torch.device) -> Verdict:
        """Whether it copies, over other words than those to be copied."""
        source = _random_words(nbytes, device)
        same = torch.equal(self.move(source, source.bitwise_not()), source)
        error = 0.0 if same else math.inf
        return Verdict(same, error, error, "" if same else "the copy differs from what was copied")


# Words of 4 bytes whatever the dtype, so that the kernel's loads are 16 bytes wide in all of them.
COPIES = (
    Copy("memcpy", lambda source, out: out.copy_(source)),
    Copy("kernel", lambda source, out: torch.add(source, 0, out=out)),
)


def copy_work(nbytes: float) -> Work:
    """What copying `nbytes` bytes (read and written together) in whole words really moves."""
    return Work(0.0, 8.0 * _words(nbytes))


def _words(nbytes: float) -> int:
    return math.ceil(nbytes / 8)


def _random_words(nbytes: float, device: torch.device) -> torch.Tensor:
    """Half of `nbytes` bytes as int32: the bits of normal float32 numbers."""
    return torch.empty(_words(nbytes), device=device).normal_().view(torch.int32)
