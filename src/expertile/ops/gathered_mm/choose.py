"""choose(problem, device) -> Choice: which backend, with which config, and one sentence why.

On a CPU the reference. On a GPU the first backend, in the order that `ORDER` gives for the mean number of rows of an
expert, that takes the problem. Before the others: of an up-projection with wide results or rows in order `cuda_gated`,
of one with many rows `cuda_gather`; of a weight gradient that gathers many `cuda_wgrad`, unless the copy of the rows
serves many columns. A gated backward is composed for few rows, else `cuda_gather`'s.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from expertile.device import Device
from expertile.ops.backend import Choice, first_able, invariantly
from expertile.ops.gathered_mm.backend import Backend
from expertile.ops.gathered_mm.backends import BACKENDS
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.hopper.limits import wide_tiles_pay

# (mean rows of an expert up to, backends in order): with few rows a launch costs as much as a kernel runs, and one
# kernel that gathers for itself beats three; with many, the fastest products of the machine do, even on copied rows.
ORDER: tuple[tuple[float, tuple[str, ...]], ...] = (
    (32, ("gluon_gather", "triton_gather", "composed")),
    (math.inf, ("gluon_gather", "composed", "triton_gather")),
)
LAST = "reference"

# What these rest on: docs/notes/grouped_mm.md, "Gathered products".
# BACKWARD up to so many rows of an expert composed, beyond by `cuda_gather`, whose tiles are high: rows gathered for
# fewer columns than this, for more, and rows in order.
BACKWARD_COLUMNS, COMPOSED_BACKWARD_ROWS = 1536, (16, 400, 700)

# GATED with results as wide and sums as long as this by `cuda_gated`, which copies the rows, from so many rows of an
# expert on; where wide tiles pay, up to the second number. Where nothing is copied, from so many with any.
COPIED_GATED_COLUMNS, COPIED_GATED_SUM, COPIED_GATED_ROWS = 5120, 2560, (100, 800)
ORDERED_GATED_ROWS = 200
# Others with many rows by `cuda_gather`, where elements of an expert's results are as many as this; from more than the
# last number on where wide tiles pay.
CUDA_GATED_ROWS, CUDA_GATED_ELEMENTS, WIDE_GATED_ROWS = 1000, 2**22, 400

# A weight gradient that gathers is cuda_wgrad's from so many rows of an expert and so many columns of the other operand
# on; composed from so many of those, by the operand that is gathered, and (the second numbers) where wide tiles pay.
WGRAD_ROWS, WGRAD_COLUMNS = 400, 128
COMPOSED_WGRAD_COLUMNS = {"a": (2560, math.inf), "b": (1536, 5120)}


@lru_cache(maxsize=4096)
def choose(
    problem: GatherProblem, device: Device, backends: Sequence[Backend] = BACKENDS, batch_invariant: bool = False
) -> Choice[Backend]:
    """The backend and config for a problem. ValueError with every backend's reason when none takes it. Batch-invariant,
    numbers of rows have no say in the backend."""
    names: tuple[str, ...] = (LAST,)
    why = "what runs on a CPU"
    if device.kind == "cuda":
        rows = math.inf if batch_invariant else problem.mean_group
        order = next(order for most, order in ORDER if rows <= most)
        if problem.product is Product.BACKWARD:
            order = ("composed",) if rows <= _composed_backward(problem) else ("cuda_gather", "composed")
        elif _copied_gated(problem, rows, device):
            order = ("cuda_gated", *order)
        elif _gathering_wgrad(problem, device):
            order = ("cuda_wgrad", *order)
        elif _wide_tiles(problem, rows, device):
            order = ("cuda_gather", *order)
        names = (*order, LAST)
        why = f"the first of {', '.join(names)} that takes it"
    known = {backend.name: invariantly(backend) if batch_invariant else backend for backend in backends}
    asked = [known[name] for name in names if name in known]

    return first_able(problem, device, asked, why, verb="takes")


def _composed_backward(problem: GatherProblem) -> float:
    """Up to how many rows of an expert product and pointwise kernel beat the fused backward of the activation."""
    few, most, in_order = COMPOSED_BACKWARD_ROWS
    return in_order if not problem.gathered else few if problem.intermediate < BACKWARD_COLUMNS else most


def _copied_gated(problem: GatherProblem, rows: float, device: Device) -> bool:
    """Whether `cuda_gated` beats, the copy of the rows included, those that gather for an up-projection."""
    p, (least, most), narrow_pay = problem, COPIED_GATED_ROWS, not wide_tiles_pay(device)
    if p.product is not Product.GATED:
        return False
    wide = p.n >= COPIED_GATED_COLUMNS and p.k >= COPIED_GATED_SUM
    in_order = narrow_pay and not p.gathered and rows >= ORDERED_GATED_ROWS
    return in_order or (wide and rows >= least and (rows <= most or narrow_pay))


def _wide_tiles(problem: GatherProblem, rows: float, device: Device) -> bool:
    """Whether `cuda_gather`, whose epilogue works beside the next tile's products, is faster than `gluon_gather`."""
    p = problem
    many = rows >= CUDA_GATED_ROWS and rows * p.n >= CUDA_GATED_ELEMENTS
    wide = wide_tiles_pay(device) and rows > WIDE_GATED_ROWS
    return p.product is Product.GATED and bool(p.gathered) and (many or wide)


def _gathering_wgrad(problem: GatherProblem, device: Device) -> bool:
    """Whether a weight gradient that gathers fills its tiles, and the copy of the rows would serve few columns."""
    p = problem
    if p.product is not Product.WGRAD or not p.gathered:
        return False
    columns = p.m if p.gathered == "b" else p.n
    most = COMPOSED_WGRAD_COLUMNS[p.gathered][wide_tiles_pay(device)]
    return p.mean_group >= WGRAD_ROWS and WGRAD_COLUMNS <= columns < most
