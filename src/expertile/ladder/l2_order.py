"""Rung 7, L2 raster order: the same tiles in another order.

Changed from rung 6: a group's tiles are walked in panels of `group_m` tile rows, down each column first, so that the
programs of one wave share blocks of b too; a model of the bytes picks the height. Spends less of: bytes from HBM. Row
by row, each tile row reads the group's whole b again unless L2 holds it.
"""

from dataclasses import replace

from expertile.device import Device
from expertile.ladder import tma
from expertile.ops.grouped_mm.backends import triton_tma
from expertile.ops.grouped_mm.persistent import best_group_m
from expertile.ops.grouped_mm.problem import Problem


def _configs(problem: Problem, device: Device) -> tuple[triton_tma.Config, ...]:
    c = tma.CONFIG
    return (replace(c, group_m=best_group_m(problem, c.block_m, c.block_n, device.sm_count, device.l2_bytes)),)


BACKEND = replace(
    tma.BACKEND, name="7_l2_order", summary="as rung 6, with tiles in panels that share blocks in L2", configs=_configs
)
