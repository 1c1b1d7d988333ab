"""Row kernels compiled for GPUs that are not here: which shapes, and what every one of them must satisfy."""

from collections.abc import Callable
from typing import Any

import torch

from expertile.ops.launch.device import Machine
from expertile.ops.rows.config import RowConfig
from tests.support.aot import Resources, most_spills, resources
from tests.support.fake_driver import compile_only

MACHINES = {80: Machine(108, False), 90: Machine(132, True), 100: Machine(148, True)}
ROWS = 4096
# Columns: tiny, short, odd, of models, and as long as they come; odd ones cannot be loaded 16 bytes at a time.
COLS = {80: (1023, 5120), 90: (1, 256, 768, 1023, 4096, 5120, 32768, 131072, 262144), 100: (768,)}
DTYPES = (torch.float32, torch.bfloat16)
WHOLE = 16


def cases(config_of: Callable[[int, int, int, Machine], RowConfig], columns: tuple[int, ...] = ()):
    """(arch, dtype, columns, config) of the default config of every shape. Dtypes take turns where they have the same
    config, and on sm_80 and sm_100, which do what sm_90 does."""
    found = []
    for arch, machine in MACHINES.items():
        for turn, cols in enumerate(columns or COLS[arch]):
            configs = {dtype: config_of(ROWS, cols, dtype.itemsize, machine) for dtype in DTYPES}
            both = arch == 90 and len(set(configs.values())) > 1
            found += [(arch, d, cols, configs[d]) for d in (DTYPES if both else (DTYPES[turn % 2],))]
    return found


def compiled(arch: int, run: Callable[[], Any]) -> list[Resources]:
    """What `run` launches, compiled for sm_`arch`."""
    with compile_only(arch) as kernels:
        run()
    return [resources(kernel, arch) for kernel in kernels]


def assert_sound(found: Resources, cols: int, config: RowConfig) -> None:
    """It fits, does not spill, moves 16 bytes at a time where rows allow it, and shares rows through the cluster."""
    assert found.fits, str(found)
    assert found.spills <= most_spills(0, 2), str(found)
    # A few short pieces among two warps measure better than wider loads.
    wide_enough = config.block_rows * config.block_cols >= 8 * 32 * config.num_warps
    if cols % WHOLE == 0 and cols >= 256 and wide_enough:
        wide = ("ld.global", "st.global", "cp.async.cg.shared.global")
        moves = [line for line in found.ptx.splitlines() if any(w in line for w in wide)]
        assert any(".v4.b32" in line or ", 0x10" in line for line in moves), found.ptx[:2000]
    # One instruction of PTX, one of the machine (UCGABAR_WAIT), which ptxas may not leave out.
    assert ("barrier.cluster.wait" in found.ptx) == (config.cluster > 1), found
