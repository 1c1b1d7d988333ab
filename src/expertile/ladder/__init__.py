"""The optimisation ladder: eight ways to multiply by groups, each changing one thing of the one below.

`RUNGS` are backends (RAGGED_M forward, bf16 and fp16, weights [G, N, K]), lowest first, to be gated and raced like any
other: `expertile bench --preset ladder`. docs/notes/ladder.md tells the story.
"""

from __future__ import annotations

from importlib.util import find_spec

from expertile.ladder import naive_loop, padded_bmm
from expertile.ops.grouped_mm.backend import Backend

RUNGS: tuple[Backend, ...] = (naive_loop.BACKEND, padded_bmm.BACKEND)

# Triton has no wheels outside Linux; the package works without it.
if find_spec("triton") is not None:
    from expertile.ladder import l2_order, masked_pointer, persistent, tma, unmasked_pointer, warp_specialised

    RUNGS += (
        masked_pointer.BACKEND,
        unmasked_pointer.BACKEND,
        persistent.BACKEND,
        tma.BACKEND,
        l2_order.BACKEND,
        warp_specialised.BACKEND,
    )
