"""Rung 6, TMA: one thread asks for a whole block by its coordinates, and hardware computes the addresses.

Changed from rung 5: a, b and out have descriptors; a block is one instruction, drops what lies past the edges of the
tensor by itself and arrives swizzled as wgmma reads it; rows past the end of the group are dropped at the store. Blocks
of k are 64 wide, the 128 bytes that TMA swizzles over.
Spends less of: issue slots and registers for addresses, so that one program per SM keeps the tensor cores as busy as
two did and the loops over tiles and k can be fused (`flatten`): the next tile's loads start during the epilogue. The
kernel is that of the backend `triton_tma`, its raster order switched off (one tile row per panel: rung 5's order).
"""

from __future__ import annotations

from expertile.lab.ladder._common import rung
from expertile.ops.grouped_mm.backends import triton_tma

CONFIG = triton_tma.Config(128, 128, 64, num_warps=8, num_stages=4, group_m=1, flatten=True)
BACKEND = rung(
    triton_tma.BACKEND,
    "6_tma",
    summary="as rung 5, with TMA descriptors instead of pointers",
    configs=lambda problem, device: (CONFIG,),
)
