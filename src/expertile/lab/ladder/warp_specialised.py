"""Rung 8, warp-specialised Gluon: one warp loads, two warpgroups multiply, and no warp does both.

Changed from rung 7: roles instead of a software pipeline. A producer warp runs ahead through a ring of shared-memory
stages, consumers wait on barriers that the data itself completes, a tile is 128 x 256, and its result leaves by TMA in
pieces while the other consumer multiplies.
Spends less of: tensor-core time at the ends of tiles (the epilogue of one consumer lies beside the products of the
other), shared-memory reads per FLOP (a wider tile), and registers of warps that only load (`setmaxnreg`). The kernel is
the backend `gluon_hopper` as it is, config included.
"""

from __future__ import annotations

from expertile.lab.ladder._common import rung
from expertile.ops.grouped_mm.backends import gluon_hopper

BACKEND = rung(gluon_hopper.BACKEND, "8_warp_specialised")
