"""add_scalar in the lab: x + 1 over flat tensors, where nothing but bytes and launches costs anything."""

from torch import Tensor

from expertile.lab.operators._binds import compiled, one
from expertile.lab.operators._rows import random
from expertile.lab.race.operator import ROUNDOFF, Operator, Rival, Workload
from expertile.ops.pointwise.add_scalar import add_scalar
from expertile.roofline import Work

# The sizes of the study that report 000 sums up; then up to where memory alone counts.
_STUDY = (32_000, 64_000, 128_000, 256_000, 512_000)
_LARGE = (1_000_000, 10_000_000, 100_000_000)


def _plus(x: Tensor, value: float) -> Tensor:
    return x + value


def _allocated(w: Workload) -> float:
    return float(w["elements"] * w.itemsize)


def _workload(elements: int, dtype: str, note: str = "") -> Workload:
    dims = (("elements", elements), ("value", 1.0))
    return Workload(f"{elements}-{dtype}", "add-scalar", "add_scalar", dims, dtype, note)


def _preset() -> tuple[Workload, ...]:
    study = tuple(_workload(n, "fp32", "size of the study that report 000 sums up") for n in _STUDY)
    large = tuple(_workload(n, "fp32") for n in _LARGE)
    narrow = tuple(_workload(n, dtype) for dtype in ("bf16", "fp16") for n in (32_000, *_LARGE))
    return study + large + narrow


OPERATORS = (
    Operator(
        "add_scalar",
        lambda w, device, seed: (random(w, device, seed)(w["elements"]),),
        lambda w, inputs: (inputs[0].double() + w["value"],),
        lambda w: Work(float(w["elements"]), 2.0 * w["elements"] * w.itemsize),
        (
            Rival("expertile", one(add_scalar, "value"), peer=False, peak_nbytes=_allocated),
            Rival("torch", one(_plus, "value"), peak_nbytes=_allocated),
            Rival("torch.compile", compiled(_plus, "value"), peak_nbytes=_allocated),
        ),
        # One rounding of the result, two where a rival rounds the number as well.
        lambda w: (2 * ROUNDOFF[w.dtype], 4 * ROUNDOFF[w.dtype]),
    ),
)
PRESETS = {"add-scalar": _preset}
