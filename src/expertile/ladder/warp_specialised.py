"""Rung 8, warp-specialised Gluon: one warp loads, two warpgroups multiply, and no warp does both.

Changed from rung 7: a producer warp runs ahead through a ring of stages, consumers wait on barriers that the data
itself completes, and a tile's result leaves by TMA in pieces while the other consumer multiplies. Spends less of:
tensor-core time at the ends of tiles, shared-memory reads per FLOP (a wider tile), and registers of warps that only
load. The kernel is the backend `gluon_hopper` as it is, config included.
"""

from expertile.ladder._common import rung
from expertile.ops.grouped_mm.backends import gluon_hopper

BACKEND = rung(gluon_hopper.BACKEND, "8_warp_specialised")
