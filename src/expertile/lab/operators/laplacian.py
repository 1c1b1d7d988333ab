"""laplacian in the lab: the 5-point stencil and its transpose over batches of grids."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.device import Device
from expertile.lab.operators._binds import compiled, one
from expertile.lab.operators._rows import random
from expertile.lab.race.operator import ROUNDOFF, Bind, Call, Inputs, Operator, Rival, Workload, with_backward
from expertile.ops.pointwise.laplacian import laplacian, laplacian_transpose
from expertile.roofline import Work

# (grids, rows, columns) of the study that report 000 sums up, which computes the interior alone.
_STUDY = ((1, 512, 512), (1, 1024, 1024), (1, 2048, 2048), (4, 512, 512), (16, 256, 256))
_STUDY_NOTE = "size and boundary of the study that report 000 sums up"
_LARGE = (  # grids too large for any cache; one whose rows are no whole vectors
    ((1, 8192, 8192), "zero", "fp32"),
    ((1, 8192, 8192), "replicate", "fp32"),
    ((1, 8192, 8192), "circular", "fp32"),
    ((1, 8192, 8192), "interior", "fp32"),
    ((64, 1024, 1024), "zero", "fp32"),
    ((1, 8191, 8191), "zero", "fp32"),
    ((1, 16384, 16384), "zero", "bf16"),
    ((1, 16384, 16384), "interior", "bf16"),
    ((1024, 256, 256), "zero", "bf16"),
    ((1, 16384, 16384), "zero", "fp16"),
)
_PAD = {"zero": "constant", "replicate": "replicate", "circular": "circular"}
_KERNEL = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))


def _cut(w: Workload) -> int:
    return 2 if w["boundary"] == "interior" else 0


def _random(w: Workload, device: torch.device, seed: int, cut: int) -> Tensor:
    return random(w, device, seed)(w["grids"], w["rows"] - cut, w["columns"] - cut)


def _sliced(u: Tensor, boundary: str) -> Tensor:
    """The stencil by slices, as one writes it in torch."""
    if boundary != "interior":
        u = F.pad(u, (1, 1, 1, 1), mode=_PAD[boundary])
    return u[:, :-2, 1:-1] + u[:, 2:, 1:-1] + u[:, 1:-1, :-2] + u[:, 1:-1, 2:] - 4.0 * u[:, 1:-1, 1:-1]


def _transposed(grad: Tensor, boundary: str) -> Tensor:
    """The transposed stencil by slices: the stencil itself, for the interior on a frame of zeros."""
    return _sliced(F.pad(grad, (1, 1, 1, 1)), "zero") if boundary == "interior" else _sliced(grad, boundary)


def _in_parts(w: Workload, x: Tensor, compute: Callable[[Tensor, str], Tensor]) -> Inputs:
    return (torch.cat([compute(part.double(), w["boundary"]) for part in x.split(max(1, 2**26 // x[0].numel()))]),)


def _work(w: Workload) -> Work:
    """Four additions, a product and a subtraction for each point of the result."""
    grids, rows, columns, cut = w["grids"], w["rows"], w["columns"], _cut(w)
    out = (rows - cut) * (columns - cut)
    return Work(6.0 * grids * out, float(grids * (rows * columns + out) * w.itemsize))


def _tolerance(w: Workload) -> tuple[float, float]:
    """Rivals in torch round each of five partial results to the dtype, ours rounds once."""
    return 3 * ROUNDOFF[w.dtype], 6 * ROUNDOFF[w.dtype]


def _zeros_or_none(w: Workload, device: Device) -> str | None:
    return None if w["boundary"] in ("zero", "interior") else "conv2d pads with zeros or not at all"


def _ours(compute: Callable[..., Tensor]) -> Bind:
    return one(lambda x, boundary: compute(x, boundary=boundary), "boundary")


def _convolution(w: Workload, inputs: Inputs) -> Call:
    u, padding = inputs[0][:, None], int(w["boundary"] == "zero")
    kernel = torch.tensor(_KERNEL, dtype=u.dtype, device=u.device)[None, None]

    def call() -> Inputs:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return (F.conv2d(u, kernel, padding=padding)[:, 0],)

    return call


def _autograd(w: Workload, inputs: Inputs) -> Call:
    grad, boundary = inputs[0], w["boundary"]
    u = grad.new_zeros(w["grids"], w["rows"], w["columns"]).requires_grad_()
    out = _sliced(u, boundary)
    return lambda: torch.autograd.grad(out, u, grad, retain_graph=True)


def _allocated(w: Workload) -> float:
    cut = 0 if w.op.endswith("backward") else _cut(w)
    return float(w["grids"] * (w["rows"] - cut) * (w["columns"] - cut) * w.itemsize)


def _workload(grid: tuple[int, int, int], boundary: str, dtype: str, note: str = "") -> Workload:
    grids, rows, columns = grid
    dims = (("grids", grids), ("rows", rows), ("columns", columns), ("boundary", boundary))
    return Workload(f"{grids}x{rows}x{columns}-{boundary}-{dtype}", "laplacian", "laplacian", dims, dtype, note)


def _preset() -> tuple[Workload, ...]:
    study = [_workload(grid, "interior", "fp32", _STUDY_NOTE) for grid in _STUDY]
    return with_backward(study + [_workload(*large) for large in _LARGE])


OPERATORS = (
    Operator(
        "laplacian",
        lambda w, device, seed: (_random(w, device, seed, 0),),
        lambda w, inputs: _in_parts(w, inputs[0], _sliced),
        _work,
        (
            Rival("expertile", _ours(laplacian), peer=False, peak_nbytes=_allocated),
            Rival("torch", one(_sliced, "boundary")),
            Rival("torch.compile", compiled(_sliced, "boundary")),
            Rival("conv2d", _convolution, _zeros_or_none),
        ),
        _tolerance,
    ),
    Operator(
        "laplacian_backward",
        lambda w, device, seed: (_random(w, device, seed, _cut(w)),),
        lambda w, inputs: _in_parts(w, inputs[0], _transposed),
        lambda w: Work(6.0 * w["grids"] * w["rows"] * w["columns"], _work(w).nbytes),
        (
            Rival("expertile", _ours(laplacian_transpose), peer=False, peak_nbytes=_allocated),
            Rival("torch", one(_transposed, "boundary")),
            Rival("torch.compile", compiled(_transposed, "boundary")),
            # Autograd runs on the stream of its forward pass, which no graph captures.
            Rival("torch.autograd", _autograd, graph=False),
        ),
        _tolerance,
    ),
)
PRESETS = {"laplacian": _preset}
