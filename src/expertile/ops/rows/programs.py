"""How many programs of a row kernel run at one time, alone and in clusters."""

from __future__ import annotations

from expertile.ops.launch.device import Machine
from expertile.ops.launch.kernels import resident_clusters
from expertile.ops.rows.config import RowConfig


def programs(config: RowConfig, rows: int, here: Machine, index: int) -> int:
    """Programs (clusters, if rows are shared) for `rows` rows on GPU `index`, which is `here`; -1 for no GPU."""
    if config.cluster > 1 and config.programs_per_sm and index >= 0:
        return min(config.tiles(rows), max(1, resident_clusters(index, config.cluster, config.programs_per_sm)))
    return config.programs(rows, here.sm_count)
