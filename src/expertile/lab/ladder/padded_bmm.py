"""Rung 2, padded bmm: every group padded to the longest, then one batched product.

Changed from rung 1: one launch instead of one per group, and no concatenation where all groups are equally long.
Spends less of: launches, and SMs that stand idle in each group's last wave. Spends more of: FLOPs and bytes of padding,
with a scatter and a gather, where groups differ. The kernel is the backend `padded_bmm` as it is.
"""

from __future__ import annotations

from dataclasses import replace

from expertile.device import Device
from expertile.lab.ladder._common import takes
from expertile.ops.grouped_mm.backends import padded_bmm
from expertile.ops.grouped_mm.problem import Problem


def _supports(problem: Problem, device: Device) -> str | None:
    return takes(problem) or padded_bmm.BACKEND.supports(problem, device)


BACKEND = replace(padded_bmm.BACKEND, name="2_padded_bmm", supports=_supports)
