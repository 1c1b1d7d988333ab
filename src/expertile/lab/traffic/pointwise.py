"""Traffic of the 5-point stencil and of x + value: operators that read once and write once, however they are written,
unless they are written as several."""

from dataclasses import replace

from expertile.device import Device
from expertile.lab.race.operator import Workload
from expertile.lab.traffic.model import OURS, TORCH, UNFUSED, Formula, Step, Way
from expertile.ops.pointwise.laplacian import BOUNDARIES, configs


def _grids(s: Workload) -> tuple[int, int, float, float]:
    """(elements of u, elements of the result, their bytes)."""
    cut = 2 if s["boundary"] == "interior" else 0
    u, out = s["grids"] * s["rows"] * s["columns"], s["grids"] * (s["rows"] - cut) * (s["columns"] - cut)
    return u, out, float(u * s.itemsize), float(out * s.itemsize)


def _halo(s: Workload, device: Device, read: float) -> float:
    """Bytes of the rows that two programs read: two for each `block_rows` that a program takes."""
    per_thread = 16 // s.itemsize
    config = configs(s["grids"], s["rows"], -(-s["columns"] // per_thread), device.sm_count)[0]
    return 2 / config.block_rows * read


def _pad(s: Workload) -> tuple[Step, ...]:
    """F.pad by one point on each side (aten/src/ATen/native/PadNd.cpp, cuda/ReplicationPadding.cu)."""
    _, _, u, _ = _grids(s)
    frame = float(s["grids"] * (s["rows"] + 2) * (s["columns"] + 2) * s.itemsize)
    if s["boundary"] == "zero":
        return Step("fill the frame", 0.0, frame), Step("copy into it", u, u)
    if s["boundary"] == "replicate":
        return (Step("replication_pad2d", u, frame),)
    return (Step("copy the grid and four edges", frame, frame, launches=5),) if s["boundary"] == "circular" else ()


def _sliced(out: float, n: int) -> tuple[Step, ...]:
    """up + down + left + right - 4 * centre, an operator at a time; slices are views and cost nothing."""
    return (
        Step("up + down", 2 * out, out, n),
        Step("+ left", 2 * out, out, n),
        Step("+ right", 2 * out, out, n),
        Step("4 * centre", out, out, n),
        Step("subtract", 2 * out, out, n),
    )


def _laplacian(s: Workload, device: Device) -> tuple[Way, ...]:
    _, n, u, out = _grids(s)
    by_slices = Way(UNFUSED, (*_pad(s), *_sliced(out, n)), note="five reads of the grid and as many temporaries")
    convolution = Way(TORCH, (Step("conv2d", u, out, 18 * n),), note="F.conv2d with nine weights, at best")
    ours = Way(OURS, (Step("laplacian", u, out, 6 * n, _halo(s, device, u)),), note="rows of two programs come from L2")
    return by_slices, convolution, ours


def _laplacian_backward(s: Workload, device: Device) -> tuple[Way, ...]:
    n, _, u, out = _grids(s)
    pads = _pad(s)
    if s["boundary"] == "interior":
        frame = (Step("fill the grid", 0.0, u), Step("copy into it", out, out))
        pads = (*frame, *_pad(replace(s, dims=(*s.dims[:-1], ("boundary", "zero")))))
    by_slices = Way(UNFUSED, (*pads, *_sliced(u, n)), note="the transposed stencil by slices")
    convolution = Way(TORCH, (Step("conv_transpose2d", out, u, 18 * n),), note="at best")
    ours = Way(OURS, (Step("laplacian", out, u, 6 * n, _halo(s, device, out)),), note="the same kernel")
    return by_slices, convolution, ours


def _check(s: Workload) -> None:
    if s["boundary"] not in BOUNDARIES:
        raise ValueError(f"boundary: expected one of {', '.join(BOUNDARIES)}, got {s['boundary']!r}")
    if s["boundary"] == "interior" and min(s["rows"], s["columns"]) < 3:
        raise ValueError(f"rows, columns: expected 3 or more for an interior, got {s['rows']} x {s['columns']}")


def _add(s: Workload, device: Device) -> tuple[Way, ...]:
    n, e = s["elements"], float(s["elements"] * s.itemsize)
    return (
        Way(TORCH, (Step("vectorized_elementwise_kernel", e, e, n),), "aten/src/ATen/native/cuda/CUDALoops.cuh"),
        Way(OURS, (Step("add_scalar", e, e, n),), note="the same bytes: one operation has nothing to fuse"),
    )


_GRID = {"grids": 1, "rows": 8192, "columns": 8192, "boundary": "zero"}

FORMULAS = (
    Formula("laplacian", _GRID, _laplacian, _check),
    Formula("laplacian_backward", _GRID, _laplacian_backward, _check),
    Formula("add_scalar", {"elements": 100_000_000, "value": 1.0}, _add),
)
