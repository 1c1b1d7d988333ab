"""Rung 6, TMA: one thread asks for a whole block by its coordinates, and hardware computes the addresses.

Changed from rung 5: a, b and out have descriptors; a block is one instruction, is cut at the tensor's edges and arrives
swizzled as wgmma reads it. Blocks of k are 64 wide, the 128 bytes that TMA swizzles over. Spends less of: issue slots
and registers for addresses, so that the loops over tiles and k can be fused (`flatten`). The kernel is that of the
backend `triton_tma`, in rung 5's order (one tile row per panel).
"""

from expertile.ladder._common import rung
from expertile.ops.grouped_mm.backends import triton_tma

CONFIG = triton_tma.Config(128, 128, 64, num_warps=8, num_stages=4, group_m=1, flatten=True)
BACKEND = rung(
    triton_tma.BACKEND,
    "6_tma",
    summary="as rung 5, with TMA descriptors instead of pointers",
    configs=lambda problem, device: (CONFIG,),
)
