"""What the row operators (softmax, layer norm, RMS norm) share on the host: rows of a tensor, configs, checks.

A tensor [..., C] is R rows of C elements. A row is cut into `cluster` slices, one for each CTA of a cluster, a slice
into pieces of `block_cols` elements, which its CTA holds in registers. A streamed row does not stay: it is read twice.
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch

from expertile.ops.launch.device import DTYPES, Machine
from expertile.ops.launch.kernels import resident_clusters

# CTAs that every GPU with clusters can gather in one (CUDA C++ Programming Guide, "Thread Block Clusters").
PORTABLE_CLUSTER = 8


class Shape(NamedTuple):
    """How rows lie on programs, known when compiling: tiles of BLOCK_R rows, CLUSTER slices of a row, PIECES of BLOCK_C
    columns in a slice. EVEN_R, EVEN_C: nothing reaches past the last row, or past a row. VECTOR > 1: rows are cut into
    body, head and tail (head_tail.py). STAYS: a program strides over the tiles, STAGES of which are on their way at
    once. Lengths and strides come in UNITs."""

    BLOCK_R: int
    BLOCK_C: int
    PIECES: int
    CLUSTER: int
    EVEN_R: bool
    EVEN_C: bool
    VECTOR: int
    STAYS: bool
    STAGES: int
    UNIT: int


@dataclass(frozen=True)
class RowConfig:
    """How rows are laid onto programs.

    block_rows: rows of one tile.
    block_cols: columns of one piece of a slice; a power of two.
    num_warps: warps of a program.
    cluster: programs that share a row, 1, 2, 4 or 8; more than one needs compute capability 9.0, and at most 4 rows.
    programs_per_sm: 0 for one program per tile; otherwise the programs stay and stride over the tiles.
    num_stages: tiles of a staying program on their way at once; 1 loads a tile when it is its turn.
    streamed: the row is read twice instead of held; any length.
    resident: programs that must fit on an SM at once where every tile has its own; 0 for as many as registers allow.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    cluster: int = 1
    programs_per_sm: int = 0
    num_stages: int = 1
    streamed: bool = False
    resident: int = 0

    def pieces(self, cols: int) -> int:
        """Pieces of one slice of a row of `cols` elements."""
        return -(-cols // (self.cluster * self.block_cols))

    def shape(self, rows: int, cols: int, by: int, cut: int = 1) -> Shape:
        """Of tiles of [rows, cols]. by: elements of a unit of lengths; `cut`: of a word that rows are cut by."""
        if self.streamed:  # one kernel for all
            return Shape(self.block_rows, self.block_cols, 1, 1, False, False, 1, False, self.num_stages, by)
        pieces = self.pieces(cols // cut * cut)
        even = cut == 1 and cols == self.cluster * pieces * self.block_cols
        tile = (self.block_rows, self.block_cols, pieces, self.cluster)
        return Shape(*tile, rows % self.block_rows == 0, even, cut, self.programs_per_sm > 0, self.num_stages, by)

    def tiles(self, rows: int) -> int:
        """Tiles of `rows` rows."""
        return -(-rows // self.block_rows)

    def programs(self, rows: int, sm_count: int) -> int:
        """Programs (clusters, if rows are shared) for `rows` rows on `sm_count` SMs that clusters fill wholly."""
        if not self.programs_per_sm:
            return self.tiles(rows)
        return min(self.tiles(rows), max(1, sm_count * self.programs_per_sm // self.cluster))

    def resident_programs(self, rows: int, here: Machine, index: int) -> int:
        """The same on GPU `index`, which is `here`, as far as its clusters go; -1 for no GPU."""
        if self.cluster > 1 and self.programs_per_sm and index >= 0:
            return min(self.tiles(rows), max(1, resident_clusters(index, self.cluster, self.programs_per_sm)))
        return self.programs(rows, here.sm_count)

    @property
    def most_registers(self) -> int | None:
        """Registers of a thread so that as many clusters stay on an SM as are launched for it, or `resident` programs;
        None: no limit."""
        programs = self.programs_per_sm if self.cluster > 1 and self.programs_per_sm else self.resident
        return min(255, 65536 // (32 * self.num_warps * programs) // 8 * 8) if programs else None


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [R, C] with neighbouring elements of a row side by side: a view where there is one, otherwise a copy."""
    cols = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, cols)
    if (rows.stride(1) == 1 or cols == 1) and rows.stride(0) < 2**31:
        return rows
    return rows.contiguous()


def unit(cols: int, *strides: int) -> int:
    """The largest power of two, at most 16, that divides the row length and the row strides: loads may be that wide."""
    return gcd(16, cols, *strides)


# Bodies of rows that are cut start and end at multiples of so many bytes: 16, what a thread moves at once, or more.
CUT_BYTES = 16
# Rows that are cut have at least so many columns: shorter ones are hardly more than head and tail.
LEAST_CUT = 256


def vector(out: torch.Tensor, *inputs: torch.Tensor) -> int:
    """How rows [R, C] of `inputs` and of `out`, which is contiguous, are cut into body, head and tail (head_tail.py):
    the elements of CUT_BYTES, if rows are no multiple of 16 bytes but lie alike in all tensors; otherwise 1: not."""
    rows, cols = inputs[0].shape
    itemsize = out.element_size()
    if cols * itemsize % 16 == 0 or cols < LEAST_CUT or out.data_ptr() % CUT_BYTES:
        return 1
    elements = CUT_BYTES // itemsize
    for x in inputs:
        if x.dtype != out.dtype or x.data_ptr() % CUT_BYTES or (rows > 1 and (x.stride(0) - cols) % elements):
            return 1
    return elements


def check_configs(**configs: object) -> None:
    """ValueError unless each is None or a RowConfig."""
    for name, config in configs.items():
        if config is not None and not isinstance(config, RowConfig):
            raise ValueError(f"{name}: expected a RowConfig or None, got {config!r}")


def check_input(name: str, x: object, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """ValueError unless x is a tensor of one of `dtypes` with at least one dimension."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        *names, last = (str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name}: expected {', '.join(names)} or {last}, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError(f"{name}: expected at least one dimension, got a scalar")
