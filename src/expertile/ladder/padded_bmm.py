"""Rung 2, padded bmm: every group padded to the longest, then one batched product.

Changed from rung 1: one launch instead of one per group, and no concatenation where all groups are equally long.
Spends less of: launches, and SMs that stand idle in each group's last wave. Spends more of: FLOPs and bytes of padding,
with a scatter and a gather, where groups differ. The kernel is the backend `padded_bmm` as it is.
"""

from expertile.ladder._common import rung
from expertile.ops.grouped_mm.backends import padded_bmm

BACKEND = rung(padded_bmm.BACKEND, "2_padded_bmm")
