"""The optimisation ladder: eight ways to multiply by groups, each changing one thing of the one below.

`RUNGS` are backends (RAGGED_M forward, bf16 and fp16, weights [G, N, K]), lowest first, to be gated and raced like any
other: `expertile bench --preset ladder`. docs/notes/ladder.md tells the story.
"""

from expertile.ladder import (
    l2_order,
    masked_pointer,
    naive_loop,
    padded_bmm,
    persistent,
    tma,
    unmasked_pointer,
    warp_specialised,
)
from expertile.ops.grouped_mm.backend import Backend

RUNGS: tuple[Backend, ...] = (
    naive_loop.BACKEND,
    padded_bmm.BACKEND,
    masked_pointer.BACKEND,
    unmasked_pointer.BACKEND,
    persistent.BACKEND,
    tma.BACKEND,
    l2_order.BACKEND,
    warp_specialised.BACKEND,
)
