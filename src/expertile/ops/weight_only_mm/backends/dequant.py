"""Dequantise all weights into a temporary, then multiply as bfloat16 or float16: the honest baseline.

    out[rows of g] = a[rows of g] @ bits16(ŵ[g])ᵀ (+ bias[g])

FP8 activations are multiplied by their scales and rounded to bfloat16 before.

Bytes: for every value of the weights about half a byte read, two written, two read again, whatever the number of rows;
and 2·G·N·K bytes of memory while it runs. Many rows per group pay that off: the product itself is then the fastest of
`grouped_mm`'s, with nothing to unpack between its matrix instructions.
"""

from dataclasses import fields

import torch

from expertile.device import Device
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.api import select
from expertile.ops.grouped_mm.backend import Operands as GroupedOperands
from expertile.ops.grouped_mm.backend import new_out
from expertile.ops.grouped_mm.problem import Problem
from expertile.ops.weight_only_mm.backends.loop import scaled
from expertile.ops.weight_only_mm.dequantize import weight_only_dequantize
from expertile.ops.weight_only_mm.problem import Backend, Operands, WeightOnlyProblem


def dense_problem(problem: WeightOnlyProblem) -> Problem:
    """The product of a with the dequantised weights, [G, N, K] passed transposed."""
    shared = {field.name: getattr(problem, field.name) for field in fields(Problem)}
    shared |= {"b_strides": (problem.n * problem.k, 1, problem.k), "b_aligned": True}
    if problem.fp8:
        shared |= {"dtype": torch.bfloat16, "a_strides": (problem.k, 1), "a_aligned": True}
    return Problem(**shared)


def _supports(problem: WeightOnlyProblem, device: Device) -> str | None:
    """Every problem whose dense weights fit a quarter of the memory; `grouped_mm` has a backend for each."""
    nbytes = problem.groups * problem.n * problem.k * 2
    if nbytes > device.memory_bytes / 4:
        return f"its dequantised weights take {nbytes / 2**30:.1f} GiB, more than a quarter of the memory"
    return None


def _run(problem: WeightOnlyProblem, operands: Operands, config: NoConfig, out: torch.Tensor | None) -> torch.Tensor:
    out = new_out(problem, operands, out)
    product, w, a = dense_problem(problem), operands.w, operands.a
    if operands.scale_a is not None:
        a = scaled(a, operands.scale_a).to(product.dtype)
    dense = weight_only_dequantize(*w.parts, product.dtype)
    backend, chosen = select(product, Device.current(a.device))
    return backend.run(product, GroupedOperands(a, dense.transpose(-2, -1), operands.offs, operands.bias), chosen, out)


BACKEND = Backend(
    name="dequant", summary="weights dequantised into a temporary, then grouped_mm", supports=_supports, run=_run
)
