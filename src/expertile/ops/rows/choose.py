"""Which config a row operator takes: a pure function of rows, columns, element size and machine.

docs/notes/rows.md has what decides; the tables follow measurements on an H200. `resident` stands where ptxas 13.4 takes
more registers than 12.8 and one program fewer would fit.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from expertile.ops.launch.device import Machine
from expertile.ops.rows.config import PORTABLE_CLUSTER, RowConfig
from expertile.ragged import power_of_two

T = TypeVar("T")

# float32 values of a slice that a program holds: 16 warps of 32 threads with 64 values each.
_MOST_HELD = 32768
# A slice that leaves room for more than one program per SM.
_EASILY_HELD = 16384
# The same where two inputs are held, or one and the sums over rows of a norm's backward pass.
_MOST_HELD_TWICE = 16384
_MOST_SUMMED = 8192
# So many rows fill the SMs of an H200 many times over even in pairs: tiles may be larger.
_MANY_ROWS_PER_SM = 64

# Short rows, forward: columns up to -> config for float32, for 2 bytes.
_FORWARD = {
    256: (RowConfig(8, 256, 2), RowConfig(8, 256, 2)),
    512: (RowConfig(2, 512, 2), RowConfig(2, 512, 2)),
    768: (RowConfig(4, 256, 8), RowConfig(4, 256, 4)),
    1024: (RowConfig(1, 1024, 2), RowConfig(1, 1024, 2)),
    2048: (RowConfig(1, 2048, 4), RowConfig(1, 2048, 4)),
    4096: (RowConfig(1, 4096, 4), RowConfig(1, 4096, 4)),
    7168: (RowConfig(1, 2048, 8), RowConfig(1, 2048, 8)),
    8192: (RowConfig(1, 2048, 16), RowConfig(1, 4096, 16)),
    16384: (RowConfig(1, 16384, 16), RowConfig(1, 16384, 16)),
}
# The same with a weight, and perhaps a bias; for many rows; and both.
_FORWARD_VECTORS = {
    **_FORWARD,
    768: (RowConfig(4, 256, 8), RowConfig(2, 256, 2)),
    1024: (RowConfig(1, 1024, 2), RowConfig(2, 1024, 2)),
    7168: (RowConfig(1, 2048, 8), RowConfig(1, 1024, 4)),
    8192: (RowConfig(1, 8192, 16, resident=2), RowConfig(2, 2048, 8)),
}
_FORWARD_MANY = {
    **_FORWARD,
    2048: (RowConfig(2, 2048, 8), RowConfig(1, 2048, 2)),
    4096: (RowConfig(2, 4096, 16), RowConfig(2, 4096, 16)),
}
_FORWARD_MANY_VECTORS = {
    **_FORWARD_VECTORS,
    2048: (RowConfig(2, 2048, 8), RowConfig(1, 2048, 2)),
    4096: (RowConfig(2, 4096, 16), RowConfig(1, 4096, 4)),
}

# Long rows, forward, float32 and 2 bytes. Programs stay, and the copies of the next rows hide exchange and reduction.
# Without a weight (softmax):
_FORWARD_LONG = {
    32768: (RowConfig(1, 16384, 16, 2), RowConfig(1, 8192, 8, 4)),
    65536: (RowConfig(1, 16384, 16, 4, 2, 2), RowConfig(1, 16384, 16, 4, 2, 3)),
    131072: (RowConfig(1, 16384, 16, 8), RowConfig(1, 2048, 8, 8)),
    262144: (RowConfig(1, 4096, 32, 8, 1, 2), RowConfig(1, 8192, 32, 8, 1, 3)),
}
# With a weight: programs that stay keep it in registers. With two vectors (layer norm):
_FORWARD_LONG_VECTORS = {
    32768: (RowConfig(1, 4096, 4, 8), RowConfig(2, 4096, 8, 8, resident=4)),
    65536: (RowConfig(1, 8192, 16, 8, 1, 4), RowConfig(2, 8192, 16, 8, 1, 3)),
    131072: (RowConfig(1, 8192, 32, 8, 1, 3), RowConfig(1, 8192, 32, 8, 1, 3)),
}
# With one (RMS norm):
_FORWARD_LONG_ONE_VECTOR = {**_FORWARD_LONG_VECTORS, 32768: (RowConfig(2, 4096, 8, 8, 2, 3), RowConfig(1, 4096, 4, 8))}
# Norms of long rows that are cut into body, head and tail (head_tail.py): two staying programs on an SM, so that one's
# heads and tails are loaded while the other works.
_FORWARD_LONG_CUT = {
    32768: (RowConfig(2, 4096, 8, 8, 2, 3), RowConfig(2, 4096, 8, 8, 2, 3)),
    65536: (RowConfig(1, 8192, 8, 8, 2, 3), RowConfig(1, 8192, 8, 8, 2, 3)),
}
# Softmax backward, float32 and 2 bytes.
_SOFTMAX_BACKWARD = {
    4096: (RowConfig(1, 4096, 16), RowConfig(1, 4096, 16)),
    8192: (RowConfig(1, 8192, 16), RowConfig(1, 2048, 16)),
    32768: (RowConfig(1, 8192, 8, 4), RowConfig(1, 8192, 8, 4)),
    131072: (RowConfig(1, 8192, 8, 8), RowConfig(1, 16384, 16, 8, 1, 3)),
}
_SOFTMAX_BACKWARD_MANY = {**_SOFTMAX_BACKWARD, 4096: (RowConfig(1, 4096, 8), RowConfig(2, 4096, 16))}
# Backward of the norms, float32 and 2 bytes, where weight and bias have gradients.
_NORM_BACKWARD = {
    256: (RowConfig(4, 256, 2, 1, 8, 2), RowConfig(1, 256, 1, 1, 16, 4)),
    512: (RowConfig(4, 512, 4, 1, 4, 2), RowConfig(2, 512, 2, 1, 4, 4)),
    768: (RowConfig(1, 256, 2, 1, 4, 3), RowConfig(1, 256, 2, 1, 8, 3)),
    1024: (RowConfig(4, 1024, 8, 1, 2, 2), RowConfig(1, 1024, 2, 1, 4, 4)),
    2048: (RowConfig(2, 2048, 8, 1, 2, 2), RowConfig(1, 2048, 4, 1, 2, 4)),
    4096: (RowConfig(1, 4096, 8, 1, 2, 2), RowConfig(2, 4096, 16, 1, 1, 4)),
    6144: (RowConfig(1, 8192, 16, 1, 1, 3), RowConfig(1, 8192, 16, 1, 1, 4)),
    8192: (RowConfig(1, 8192, 16, 1, 1, 3), RowConfig(1, 8192, 16, 1, 1, 3)),
    16384: (RowConfig(1, 4096, 8, 4, 2, 3), RowConfig(1, 4096, 8, 4, 2, 4)),
    32768: (RowConfig(2, 4096, 8, 8, 1, 3), RowConfig(1, 4096, 8, 8, 2, 4)),
    65536: (RowConfig(1, 8192, 16, 8, 1, 3), RowConfig(1, 8192, 16, 8, 1, 3)),
}
# The same with one sum over the rows, or none.
_NORM_BACKWARD_ONE_VECTOR = {**_NORM_BACKWARD, 4096: (RowConfig(1, 4096, 8, 1, 2, 2), RowConfig(2, 4096, 16, 1, 1, 3))}


def cut(length: int, most_pieces: int = 8) -> int:
    """Columns of a piece so that equal pieces, a power of two long, cover `length` with little to spare: the largest
    with at most 1/6 of padding; or the one with the least of those that take at most `most_pieces`."""
    size = power_of_two(length)
    best = size
    while -(-length // size) <= most_pieces and size >= 128:
        covered = -(-length // size) * size
        if covered * 6 <= length * 7:
            return size
        if covered < -(-length // best) * best:
            best = size
        size //= 2
    return best


def _cluster(cols: int, slice_cols: int, machine: Machine) -> int:
    """CTAs per row so that none has more than `slice_cols` columns, as far as they go."""
    if not machine.clusters:
        return 1
    return min(PORTABLE_CLUSTER, power_of_two(-(-cols // slice_cols)))


def _whole_vectors(num_warps: int, tile: int, itemsize: int) -> int:
    """As many warps, or fewer, that each thread has 16 bytes side by side in a tile of that many elements."""
    return max(1, min(num_warps, power_of_two(tile * itemsize // (32 * 16) + 1) // 2))


def _streamed(itemsize: int) -> RowConfig:
    return RowConfig(1, 16384 // itemsize, 16, streamed=True)


def _look_up(table: Mapping[int, tuple[T, T]], cols: int, itemsize: int) -> T | None:
    """The entry of the smallest number of columns that is at least `cols`."""
    for most, (four_bytes, two_bytes) in table.items():
        if cols <= most:
            return four_bytes if itemsize == 4 else two_bytes
    return None


def _fitted(config: RowConfig, rows: int, cols: int, itemsize: int, machine: Machine, most_pieces: int) -> RowConfig:
    """`config` for rows of `cols`, fewer than it was made for: pieces with less padding, unless loads would be narrower
    than 16 bytes, and no more rows in a tile than leave a tile for every program."""
    length = -(-cols // config.cluster)
    block_rows, programs = config.block_rows, machine.sm_count * max(1, config.programs_per_sm) // config.cluster
    while block_rows > 1 and rows < block_rows * programs:
        block_rows //= 2
    num_warps = max(1, config.num_warps * block_rows // config.block_rows)
    block_cols = min(config.block_cols, cut(length, most_pieces))
    # With slices each warp lies within one row, so that every thread knows all rows' sums.
    side_by_side = block_cols * (1 if config.cluster > 1 else block_rows)
    if side_by_side * itemsize < 32 * 16 * num_warps:
        block_cols = min(config.block_cols, power_of_two(length))
    num_warps = _whole_vectors(num_warps, block_rows * block_cols * -(-length // block_cols), itemsize)
    return replace(config, block_rows=block_rows, block_cols=block_cols, num_warps=num_warps)


def _in_whole_vectors(cols: int, itemsize: int) -> bool:
    """Whether rows are multiples of 16 bytes; others cannot be copied to shared memory ahead."""
    return cols * itemsize % 16 == 0


# Rows up to so long whose elements come one by one, as their addresses are no multiples of 16 bytes: many short pieces.
_MOST_ODD = 65536
_ODD = RowConfig(1, 512, 8, PORTABLE_CLUSTER)


def _odd(cols: int, itemsize: int, machine: Machine) -> bool:
    """Whether `_ODD` is for such rows."""
    return machine.clusters and _EASILY_HELD < cols <= _MOST_ODD and not _in_whole_vectors(cols, itemsize)


def _held(rows: int, length: int, cluster: int, itemsize: int, machine: Machine) -> RowConfig:
    """One program per tile, each row (or its slice of `length` columns) in registers."""
    if length > _EASILY_HELD:
        return RowConfig(1, 4096, 16, cluster)
    block_cols = cut(length)
    held = -(-length // block_cols) * block_cols
    block_rows = 1
    # Rows of a few KB share a program, unless the programs would be too few to fill the SMs.
    while held * block_rows < 2048 and rows > block_rows * 2 * 8 * machine.sm_count:
        block_rows *= 2
    per_thread = 32 if held >= 4096 else 16
    num_warps = max(1, min(32, power_of_two(held * block_rows // (32 * per_thread))))
    return RowConfig(block_rows, block_cols, _whole_vectors(num_warps, block_rows * block_cols, itemsize), cluster)


@lru_cache(maxsize=1024)
def forward(rows: int, cols: int, itemsize: int, machine: Machine, vectors: int = 0, inputs: int = 1) -> RowConfig:
    """For kernels that read `inputs` rows and write as many; of the norms, with `vectors` parameters, at least 1."""
    if inputs == 1 and machine.clusters and cols > _EASILY_HELD and _in_whole_vectors(cols, itemsize):
        tables = (_FORWARD_LONG, _FORWARD_LONG_ONE_VECTOR, _FORWARD_LONG_VECTORS)
        long = _look_up(tables[min(vectors, 2)], cols, itemsize)
        if long is not None:
            return _fitted(long, rows, cols, itemsize, machine, 8)
    if inputs == 1 and not vectors and _odd(cols, itemsize, machine):
        return _ODD
    cluster = _cluster(cols, _EASILY_HELD // inputs, machine)
    length = -(-cols // cluster)
    if length > _MOST_HELD:
        return _streamed(itemsize)
    plain = _held(rows, length, cluster, itemsize, machine)
    if cluster > 1 or length <= 128 or not _in_whole_vectors(cols, itemsize):
        return plain
    many = rows >= _MANY_ROWS_PER_SM * machine.sm_count
    if vectors:
        table = _FORWARD_MANY_VECTORS if many else _FORWARD_VECTORS
    else:
        table = _FORWARD_MANY if many else _FORWARD
    measured = _look_up(table, length, itemsize)
    if measured is None:
        return plain
    return _fitted(measured, rows, length, itemsize, machine, 8)


@lru_cache(maxsize=1024)
def cut_norm(
    rows: int, cols: int, itemsize: int, machine: Machine, vectors: int = 1, inputs: int = 1
) -> RowConfig | None:
    """As `forward`, for norms of rows that could be cut into head, tail and bodies of at most `cols`, whole vectors.
    None where rows are better not cut."""
    if cols * inputs <= _EASILY_HELD:
        return forward(rows, cols, itemsize, machine, vectors, inputs)
    long = _look_up(_FORWARD_LONG_CUT, cols, itemsize) if inputs == 1 and machine.clusters else None
    return None if long is None else _fitted(long, rows, cols, itemsize, machine, 8)


@lru_cache(maxsize=1024)
def softmax_backward(rows: int, cols: int, itemsize: int, machine: Machine) -> RowConfig:
    """For the kernel that holds two rows and writes one."""
    if cols > 2048 and _in_whole_vectors(cols, itemsize) and machine.clusters:
        many = rows >= _MANY_ROWS_PER_SM * machine.sm_count
        measured = _look_up(_SOFTMAX_BACKWARD_MANY if many else _SOFTMAX_BACKWARD, cols, itemsize)
        if measured is not None:
            return _fitted(measured, rows, cols, itemsize, machine, 8)
    if _odd(cols, itemsize, machine):
        return _ODD
    cluster = _cluster(cols, _EASILY_HELD // 2, machine)
    length = -(-cols // cluster)
    return _streamed(itemsize) if length > _MOST_HELD_TWICE else _held(rows, length, cluster, itemsize, machine)


@lru_cache(maxsize=1024)
def norm_backward(rows: int, cols: int, itemsize: int, machine: Machine, vectors: int = 2) -> RowConfig:
    """For the kernel that reads dy and h, writes dh and adds up `vectors` more rows; its programs stay."""
    if machine.clusters and cols > 128 and _in_whole_vectors(cols, itemsize):
        measured = _look_up(_NORM_BACKWARD if vectors > 1 else _NORM_BACKWARD_ONE_VECTOR, cols, itemsize)
        if measured is not None:
            # Cut where it was measured cut, padded where padding was measured better.
            padded = cols > 4096 and measured.cluster == 1
            return measured if padded else _fitted(measured, rows, cols, itemsize, machine, 4)
    cluster = _cluster(cols, _MOST_SUMMED, machine)
    length = -(-cols // cluster)
    if length > _MOST_SUMMED:
        return RowConfig(1, 4096, 8, streamed=True)
    block_cols = cut(length, 4)
    held = -(-length // block_cols) * block_cols
    block_rows = max(1, 1024 // held)
    num_warps = max(1, min(16, power_of_two(held * block_rows // 512)))
    if cols * itemsize % 16:  # elements come one by one, each with an address of its own
        num_warps = min(16, 2 * num_warps)
    num_warps = _whole_vectors(num_warps, block_rows * block_cols, itemsize)
    return RowConfig(block_rows, block_cols, num_warps, cluster, max(1, 16 // num_warps), 3)
